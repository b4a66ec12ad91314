"""The marked text, in a terminal and as a page, of a log made by hand; the token texts it is made of."""

from __future__ import annotations

import dataclasses
import io
import json

import pandas as pd
import pytest
import torch
from rich.console import Console
from test_eviction_log import case_of, held, job, run_job, run_of, watched
from test_shared_prefill import content
from tiny import CONFIGS, stock

from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.show import show
from kvexp.diagnose.twin import MEASURES, twin
from kvexp.generate.prefill import decode_step
from kvexp.hf.cache import mark, texts_of
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import A2SF, H2O, TOVA, StreamingLLM
from kvexp.retrieval import Oracle, Quest, SparQ
from kvexp.run.evictions import TWIN, ExampleLog, read_example_log, read_table, view_of, write_example_log
from kvexp.run.store import Run
from kvexp.util.errors import ConfigError

TEXTS = ["a", " <b>", " c\n", "d", " \u65e5\u672c", " ?", " yes", "&"]  # 5 of the prompt, 1 asked, 2 answered
LOG = ExampleLog("ex", 5, 1, list(range(8)), TEXTS, heads=[3, 3], same_output=True, same_kept=True)
GONE = pd.DataFrame(
    [(0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 2, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 1), (0, 1, 2, 3), (1, 0, 0, 2)],
    columns=["step", "layer", "head", "position"],
)


def printed(view, width=40):
    out = io.StringIO()
    show(view, Console(file=out, width=width, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_counts_by_hand():
    at_prompt, later = view_of(LOG, GONE), view_of(LOG, GONE, step=1)
    assert at_prompt.kept.tolist() == [[3, 0, 3, 3, 3, 0, 0, 0], [3, 0, 3, 2, 3, 0, 0, 0]]
    assert at_prompt.counts.tolist() == [6, 0, 6, 5, 6, 0, 0, 0] and at_prompt.present == 5
    assert later.counts.tolist() == [6, 0, 5, 5, 6, 6, 0, 0] and later.present == 6
    assert view_of(LOG, GONE, layer=1).counts.tolist() == [3, 0, 3, 2, 3, 0, 0, 0]
    assert later.kept[:, 2].tolist() == [2, 3]


@pytest.mark.parametrize(("asked", "reason"), [({"step": 3}, "from 0 .* to 2"), ({"layer": 2}, "from 0 to 1")])
def test_what_is_not_there(asked, reason):
    with pytest.raises(ConfigError, match=reason):
        view_of(LOG, GONE, **asked)


@pytest.mark.parametrize(
    "table",
    [
        GONE.drop(columns="layer"),
        GONE.assign(position=8),
        GONE.assign(layer=-1),
        GONE.assign(position=["x"] * len(GONE)),
        GONE.assign(step="now"),
    ],
)
def test_a_damaged_log_is_one_line(table):
    with pytest.raises(ConfigError, match=r"the log of evictions of example ex is damaged: .*remove it and run"):
        view_of(LOG, table)


WHOLE = dataclasses.asdict(LOG)
WRONG = [{name: value} for name in ("ids", "heads", "texts", "prompt_tokens") for value in (None, "5", [[]])]
DAMAGED = ["{", "[]", "[" * 99999, json.dumps({name: value for name, value in WHOLE.items() if name != "ids"})]
DAMAGED += [json.dumps(WHOLE | one) for one in (*WRONG, {"prompt_tokens": 99}, {"more": 1})]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_description_of_a_log_is_one_line(tmp_path, text):
    run = Run.open(tmp_path, {"a": 1}, {"method": "h2o"})
    write_example_log(run, LOG)
    assert read_example_log(run, "ex") == LOG
    (file,) = (run.path / "diagnose").glob("ex*.json")
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"ex.*\.json: .*; remove the file and run the same command again"):
        read_example_log(run, "ex")


def test_every_token_has_its_mark_below_it():
    lines = printed(view_of(LOG, GONE), width=90)
    assert lines[1:5] == ["a <b> c\u21b5", "#....###", "d \u65e5\u672c ? yes&", "8#####"]
    assert "of 5 tokens 3 are held by all heads, 1 by some, 1 by none" in lines[-1]
    narrow = printed(view_of(LOG, GONE), width=6)
    assert narrow[narrow.index("a <b>") + 1] == "#...."


def test_marks_never_say_none_or_all_of_some():
    assert [mark(n, 16) for n in (0, 1, 8, 15, 16)] == [".", "1", "5", "9", "#"]
    assert mark(1, 1024) == "1" and mark(1023, 1024) == "9"


def test_texts_of_tokens_join_to_the_text():
    words = byte_tokenizer()
    for text in ("h\u00e9llo w\u00f6rld \u2026 \u65e5\u672c", "plain", "\U0001f600\n\n x"):
        ids = words(text).input_ids
        texts = texts_of(words, ids)
        assert "".join(texts) == words.decode(ids) and len(texts) == len(ids)
    broken = [*words("a").input_ids, *words("\u65e5").input_ids[1:3], *words("b").input_ids[1:]]
    assert texts_of(words, broken)[-1].endswith("b")


# The twin of methods that keep everything and select: what a step did not attend to, by Hugging Face's attention.


@pytest.mark.parametrize("method", [Oracle(), Quest(page=4), SparQ(r=6)], ids=lambda method: method.name)
def test_what_is_lost_is_what_a_step_did_not_attend_to(method):
    case = case_of("llama", method)
    frame, answer, _ = losses(case)
    ids = [*case.prompt, *answer]
    with torch.no_grad():
        whole = stock("llama")(torch.tensor([ids]), output_attentions=True)
    context = case.prefill_prompt()
    for step, token in enumerate(answer[:-1]):
        at = torch.tensor([[len(case.prompt) + step]])
        with torch.no_grad():
            decode_step(case.model, torch.full_like(at, token), at, context.cache)
        for layer in range(2):
            weights = whole.attentions[layer][0, :, int(at), : int(at) + 1]  # [H * G, S]
            chosen = context.cache.layer_states[layer].kept_positions()[0]
            per_head = torch.tensor(
                [1 - float(weights[q, chosen[q * len(chosen) // len(weights)]].sum()) for q in range(15)]
            )
            mine = frame[(frame.step == step + 1) & (frame.layer == layer)].sort_values("head")
            torch.testing.assert_close(
                torch.tensor(mine.lost.to_numpy()), per_head.view(3, 5).mean(1), atol=3e-5, rtol=1e-4
            )
            assert (mine.kept <= 12).all() and (mine.lost > 0).any()


def test_an_oracle_overlaps_with_the_ideal_set_and_a_run_gets_its_twin(tmp_path, command):
    run_job(job(tmp_path, "method=oracle", "diagnose=twin", limit=2))
    assert not command.failures
    run = run_of(tmp_path, "oracle")
    for row in run.rows():
        frame, told = read_table(run, row["example"], TWIN), read_example_log(run, row["example"])
        assert told.same and len(frame) and frame.lost.ge(frame.lost_ideal - 1e-6).all()
        assert frame.overlap.mean() > 0.5 and set(frame["head"]) == set(range(told.heads[0]))


# -- the twin run against Hugging Face's own attention of the same tokens, against itself where it must agree ---------


QUESTION = [50, 51]


def losses(case):
    answer = case.generate_again().tokens[0]
    made, agrees = twin(case, answer)
    return pd.DataFrame(made.table()), answer, agrees


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("method", [H2O(), A2SF(alpha=0.5)], ids=lambda method: method.name)
def test_what_is_lost_is_what_hugging_face_attends_to_and_the_log_says_is_gone(family, method):
    case = case_of(family, method, question=QUESTION)
    frame, answer, agrees = losses(case)
    _, log = watched(case)
    ids = [*case.prompt, *QUESTION, *answer]
    with torch.no_grad():
        whole = stock(family)(torch.tensor([ids]), output_attentions=True)
    start = len(case.prompt)
    assert len(frame) == 2 * 3 * (len(ids) - start - 1)
    for row in frame.itertuples():
        weights = whole.attentions[row.layer][0]
        groups = weights.shape[0] // 3
        mass = weights[row.head * groups : (row.head + 1) * groups, start + row.step - 1].mean(0)
        seen = [*held(log, row.layer, row.head, start + row.step - 1, row.step - 1), start + row.step - 1]
        assert row.kept == len(seen) == 12
        assert row.lost == pytest.approx(1 - float(mass[seen].sum()), abs=2e-5)
        others = sorted(range(start + row.step - 1), key=lambda place: -float(mass[place]))
        ideal = {start + row.step - 1, *others[:11]}
        assert row.lost_ideal == pytest.approx(1 - float(mass[sorted(ideal)].sum()), abs=2e-5)
        assert row.overlap == pytest.approx(len(ideal & set(seen)) / 12, abs=1e-6)
        assert row.lost_ideal <= row.lost + 1e-6
    written = whole.logits[0, start + len(QUESTION) - 1 : -1].argmax(-1).tolist()
    assert agrees == [one == other for one, other in zip(written, answer, strict=True)]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_below_the_first_layer_nothing_has_gone_wrong_yet(family, mode):
    frame, _, _ = losses(case_of(family, TOVA(), mode=mode))
    first, second = frame[frame.layer == 0], frame[frame.layer == 1]
    assert (first.error - first.error_here).abs().max() < 2e-6
    assert first.error.min() > 1e-3, "else the comparison shows nothing"
    assert (second.error - second.error_here).abs().max() > 1e-3


def test_error_by_hand():
    """A head whose output is (3, 4) in full and (3, 0) without the second slot is 0.8 off."""
    from kvexp.diagnose.twin import _distance, ideal_set

    assert _distance(torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 4.0]])).tolist() == [pytest.approx(0.8)]
    mass = torch.tensor([[0.4, 0.1, 0.3, 0.05, 0.15], [0.2, 0.2, 0.2, 0.2, 0.2]])
    chosen = ideal_set(mass, torch.tensor(3), torch.tensor([2, 3]))
    assert [row.nonzero()[:, 0].tolist() for row in chosen] == [[0, 3], [2, 3, 4]]


def test_a_budget_for_all_loses_nothing():
    case = dataclasses.replace(case_of("llama", H2O()), cache=CacheConfig(H2O(), Budget(tokens=60)))
    frame, _, agrees = losses(case)
    assert frame.lost.max() < 1e-6 and frame.error.max() < 1e-5 and frame.error_here.max() < 1e-5
    assert set(frame.overlap) == {1.0} and all(agrees)


def test_renumbered_survivors_differ_in_the_first_layer_already():
    frame, _, _ = losses(case_of("llama", StreamingLLM(), positions="renumbered"))
    first = frame[frame.layer == 0]
    assert (first.error - first.error_here).abs().max() > 1e-3


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_gets_twins_and_keeps_its_rows(tmp_path, command):
    run_job(job(tmp_path / "none"))
    run_job(job(tmp_path / "twin", "diagnose=log"))
    run_job(job(tmp_path / "twin", "diagnose=twin"))
    assert not command.failures
    assert content(tmp_path / "twin") == content(tmp_path / "none")
    run = run_of(tmp_path / "twin")
    for row in run.rows():
        told, frame = read_example_log(run, row["example"]), read_table(run, row["example"], TWIN)
        assert told.same and len(told.agrees) == told.new_tokens
        assert frame[list(MEASURES)].notna().all().all()
        assert sorted(set(frame.step)) == list(range(1, told.steps + 1))
