"""The study of eviction while decoding: its texts, its numbers against masks by hand, its verdicts on made-up rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import stock, tiny

from experiments.studies import decoding
from experiments.studies.decoding import (
    AGES,
    BEGIN,
    END,
    PROMPT,
    SINKS,
    STEP,
    Arm,
    Tokens,
    arms,
    compare,
    compare_each,
    main,
    read_rows,
    text_of,
    tokens_of,
)
from kvexp.hf.load import byte_tokenizer


@pytest.mark.parametrize("kind", list(decoding.KINDS))
def test_texts_are_functions_of_their_kind_and_number(kind: str) -> None:
    tokenizer = byte_tokenizer()
    one, again, other = (tokens_of(kind, number, tokenizer) for number in (3, 3, 4))
    assert one == again and one.ids != other.ids and len(one.ids) == decoding.TOKENS
    said = tokenizer.decode(one.ids[: one.prompt], skip_special_tokens=True)
    assert said == decoding.KINDS[kind](decoding.Random(f"decoding {kind} 3")).prompt


def test_a_ledger_never_says_what_a_code_stands_for_before_it_is_used() -> None:
    text = decoding.ledger(decoding.Random("a"))
    table = dict(line.split(", ")[0].split(": ") for line in text.prompt.splitlines() if line.endswith("marks"))
    prices = {line.split(":")[0]: int(line.split()[-2]) for line in text.prompt.splitlines() if line.endswith("marks")}
    total = 0
    for line, _ in zip(text.lines, range(60), strict=False):
        if line.startswith("Booked"):
            count, code = int(line.split()[1]), line.split()[3].rstrip(":")
            total += count * prices[code]
            assert f"{count * prices[code]} marks for {table[code]}; in all {total} marks." in line


def test_a_solution_counts_right() -> None:
    lines = [line for line, _ in zip(decoding.solution(decoding.Random("b")).lines, range(80), strict=False)]
    sums = [line.rstrip(".").rpartition(". ")[2] for line in lines if " = " in line]
    for each in sums:
        left, right = each.split(" = ")
        assert eval(left) == int(right)
    assert len(sums) > 20


def test_codes_are_said_once_and_asked_for_after_so_many_blocks() -> None:
    tokenizer = byte_tokenizer()
    text = tokens_of("codes", 1, tokenizer, 6000)
    assert sorted(text.codes) == sorted(AGES)
    words = tokenizer.decode(text.ids)
    for age, at in text.codes.items():
        code = tokenizer.decode(text.ids[at.start : at.stop]).strip()
        assert words.count(code) == 2 and len(code) == 11
        said = len(tokenizer(words[: words.index(code)]).input_ids)
        ends = [end for end in range(text.prompt, 6000, STEP) if said < end <= at.start]
        assert age <= len(ends) <= age + 6  # the notes of all codes are a few blocks of bytes


@pytest.mark.parametrize("every", [STEP, 1])
def test_numbers_are_those_of_masks_by_hand(every: int) -> None:
    """Recency with the prompt kept, in blocks of 64 and token by token, against one masked forward of stock's."""
    prompt, slots, count = 20, 70, 200
    ids = torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    causal = torch.ones(count, count).tril().bool()
    visible = causal.clone()
    for end in range(prompt + every, count, every):
        visible[end:, prompt : max(prompt, end - (slots - prompt))] = False
    with torch.inference_mode():
        masks = [torch.zeros(1, 1, count, count).masked_fill(~each, -1e30) for each in (causal, visible)]
        p, q = (stock("llama")(torch.tensor([ids]), attention_mask=m).logits[0].log_softmax(-1) for m in masks)
    kl = (p.exp() * (p - q)).sum(-1)[prompt - 1 : -1]
    first, late = (STEP + 1, 2 * STEP + 1) if every == STEP else (52, 72)
    text = Tokens(ids, prompt, {4: range(150, 156)})
    chosen = [Arm("recency", PROMPT, slots, every), Arm("redrawn", PROMPT, count, every)]
    made, whole = compare(tiny("llama"), text, chosen, 90, 0, None)
    assert made["tokens"] == count - prompt - first and math.isclose(made["kl"], float(kl[first:].mean()), rel_tol=1e-3)
    assert float(kl[:first].max()) < 1e-5 < made["kl"]
    asked = q[149:155].gather(-1, torch.tensor(ids[150:156])[:, None]).mean()
    assert math.isclose(made["codes"]["4"], -float(asked), rel_tol=1e-3)
    assert math.isclose(made["full_codes"]["4"], whole["codes"]["4"], rel_tol=1e-4)
    assert math.isclose(made["kl_late"], float(kl[late:].mean()), rel_tol=1e-3)
    assert made["seconds"] > 0 and math.isnan(whole["kl"])  # nothing was ever evicted


def test_every_rule_runs_with_prompt_and_with_sinks_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {name: rule for name, rule in decoding.RULES.items() if not rule.needs.calibration}
    monkeypatch.setattr(decoding, "RULES", rules)
    text = Tokens(torch.randint(0, 61, (210,), generator=torch.Generator().manual_seed(6)).tolist(), 12, {})
    chosen = [arm for arm in arms(8, 12, 1136) if arm.slots == 128]
    rows = compare(tiny("llama"), text, chosen, 150, 1, None)
    assert all(row["kl"] > 0 for row in rows) and len({row["kl"] for row in rows}) == len(rows)


def test_texts_and_arms_fed_in_one_forward_have_the_numbers_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {name: rule for name, rule in decoding.RULES.items() if not rule.needs.calibration}
    monkeypatch.setattr(decoding, "RULES", rules)
    dice = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 61, (2, 190), generator=dice).tolist()
    texts = [Tokens(ids[0], 12, {4: range(170, 176)}), Tokens(ids[1], 15, {4: range(171, 177)})]
    kinds = ((PROMPT, 142), (SINKS, 130))
    kind_of = [kinds[0 if rule in decoding.LATER else i % 2] for i, rule in enumerate(rules)]
    chosen = [(Arm(rule, *kind, 1), kind[1] + 20) for rule, kind in zip(rules, kind_of, strict=True)]
    made = compare_each(tiny("llama"), texts, chosen, [1, 2], None)
    for seed, (text, rows) in enumerate(zip(texts, made, strict=True), 1):
        for (arm, more), row in [*zip(chosen, rows, strict=True)][seed % 2 :: 2]:  # each arm by itself, on one of them
            (alone,) = compare(tiny("llama"), text, [arm], more, seed, None)
            assert row.keys() == alone.keys() and row["tokens"] == alone["tokens"] and row["kl"] > 0
            for name in ("kl", "kl_late", "nll", "full_nll", "top1", "quarters"):
                np.testing.assert_allclose(row[name], alone[name], rtol=1e-3, atol=1e-6, err_msg=f"{arm} {name}")
            assert math.isclose(row["codes"]["4"], alone["codes"]["4"], rel_tol=1e-4)


def test_cells_without_room_are_left_out() -> None:
    assert [len(arms(share, 32)) for share in decoding.SHARES] == [16, 16, 16, 16]
    assert [len(arms(share, 320)) for share in decoding.SHARES] == [16, 16, 16, 6]
    assert arms(8, 32)[-1] == Arm("redrawn", PROMPT, 640)


def test_verdicts_of_made_up_rows(tmp_path: Path, capsys: Any) -> None:
    """In one cell scoring is worth far more than the margin, in another far less."""
    dice = torch.Generator().manual_seed(1)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(20):
            for kind, gain in (("solution", 0.5), ("ledger", 0.97)):
                noise = 1 + 0.02 * torch.randn(1, generator=dice).item()
                for arm in arms(8, 32):
                    scored = arm.rule in decoding.SCORED
                    kl = 0.8 if arm.slots > 512 else gain if scored else 1.0
                    row = {"model": "m", "kind": kind, "number": number, "total": 4096, "seconds": 1}
                    row |= {"kl": kl * noise, "kl_late": kl * noise}
                    file.write(json.dumps(row | vars(arm)) + "\n")
        lost = {"codes": {"4": 1.5, "57": 3.0}, "full_codes": {"4": 1.0, "57": 1.0}, "kl": 1, "kl_late": 1}
        row = {"model": "m", "kind": "codes", "number": 0, "total": 4096, "seconds": 1}
        file.write(json.dumps(row | lost | vars(Arm("vase", PROMPT, 512))) + "\n")
        file.write('{"model": "m", "ki')  # cut off
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("scoring is worth more") == 4 and said.count("chance holds") == 10  # of LATER 6
    assert "| solution | 512 | `snapkv` | 20 | -37.5 %" in said
    assert "| 512 | `vase` | +0.50 | - | - | - | +2.00 |" in said
    rows = [row for row in read_rows(tmp_path) if row["number"] < 15]
    assert text_of(rows).count("none before 16") == 14
    level = np.mean([row["kl"] for row in rows if row["kind"] == "solution" and row["rule"] == "vase"])
    levels = [f"{x:.3g}" for x in (*[level] * 4, *[2 * level] * 3, 0.8 * 2 * level)]
    assert f"| {' | '.join(levels)} |" in text_of(rows)
    (page := tmp_path / "page.md").write_text(f"before\n{BEGIN}\nearlier\n{END}\nafter\n")
    assert main(["report", str(tmp_path), "--page", str(page)]) == 0
    assert text_of(read_rows(tmp_path)) in page.read_text() and "earlier" not in page.read_text()
    assert main(["size", str(tmp_path)]) == 0
    sizes = capsys.readouterr().out
    assert "solution 512 vase: 20 texts, sd 0.0" in sizes and "-37" not in sizes


def test_cells_with_too_few_texts_are_no_tests_and_fewer_yet_are_not_shown() -> None:
    def cell(every: int, texts: int, gap: float) -> list[dict[str, Any]]:
        found = []
        for number in range(texts):
            spread = 0.1 if number % 2 else -0.1
            for rule, slots, kl in (("snapkv", 512, gap + spread), ("redrawn", 640, 0.0)):
                row = {"kind": "ledger", "number": number, "total": 4096, "kl": math.exp(kl), "kl_late": math.exp(kl)}
                found.append(row | vars(Arm(rule, PROMPT, slots, every)))
        return found

    decided = cell(64, 16, 0.05)  # t = 1.94 of 16 texts: p = 0.036
    alone = next(line for line in text_of(decided).splitlines() if line.startswith("| ledger | 512"))
    assert "| 16 |" in alone and "chance holds" in alone
    eight = text_of(decided + cell(1, 8, 0.0))
    assert alone in eight and "| ledger/1 | 512 | `snapkv` | 8 |" in eight and "none before 16 texts" in eight
    assert "open" in text_of(decided + cell(1, 16, 0.0)), "sixteen are a test, and count in the correction"
    assert "ledger/1" not in text_of(decided + cell(1, 5, 0.0))
