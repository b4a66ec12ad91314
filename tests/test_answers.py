"""What docs/answers.md says of its commands' output, where it is more than a score, holds on the first examples."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, PYTHON, blocks, words_of
from test_docs import called
from torch import Tensor

from kvexp.core import layer_attention
from kvexp.core.attention import AttentionInputs, with_renumbered_positions
from kvexp.core.cache_settings import CacheSettings

PAGE = next(page for page in DOCS if page.name == "answers.md")
COMMANDS = [command for block in blocks(PAGE) for command, _ in block.commands]


@pytest.fixture
def rows(tmp_path: Path):
    """Run the one command of the page that has these words; label of each run -> its rows, of two examples."""

    def ran(*words: str) -> dict[str, list[dict[str, Any]]]:
        (command,) = (each for each in COMMANDS if all(word in each for word in words))
        overrides = [word for word in words_of(command)[2:] if not word.startswith(("limit=", "-m"))]
        own = ["limit=2", "divergence=false", f"outputs_dir={tmp_path}"]
        code, _, err = called(["python", "run.py", "-m", *own, *overrides])
        assert code == 0, err
        found = {}
        for folder in tmp_path.glob("*/config.json"):
            labels = json.loads(folder.read_text("utf-8"))["labels"]
            text = (folder.parent / "examples.jsonl").read_text("utf-8")
            found[f"{labels['method']} {labels['setting']}"] = [json.loads(line) for line in text.splitlines()]
        return found

    return ran


def of(found: dict[str, list[dict[str, Any]]], *words: str) -> list[dict[str, Any]]:
    """The rows of the one run whose label has these words."""
    (label,) = (label for label in found if all(word in label for word in words))
    return found[label]


def receipts(rows: list[dict[str, Any]], field: str) -> list[Any]:
    return [row["receipt"][field] for row in rows]


def test_an_answer_of_one_token_does_not_feel_eviction_unless_the_question_comes_after_it(rows) -> None:
    found = rows("task.max_new_tokens=1")
    for place, same in (("in_prompt", True), ("after_eviction", False)):
        full = [row["output_tokens"] for row in of(found, "full", place)]
        for method in ("window", "h2o"):
            run = of(found, method, place)
            assert receipts(run, "first_eviction_step") == [0, 0]
            assert ([row["output_tokens"] for row in run] == full) == same, (method, place)


def test_hiding_keeps_the_same_tokens_and_more_bytes_than_the_full_cache(rows) -> None:
    found = rows("cache.mode=overwrite,mask")
    full, drops, hides = of(found, "full"), of(found, "mode=overwrite"), of(found, "mode=mask")
    assert receipts(drops, "slots") == receipts(hides, "slots")
    assert receipts(drops, "kept_digest") == receipts(hides, "kept_digest")
    assert [row["output"] for row in drops] == [row["output"] for row in hides]
    for less, all_of_it, more in zip(*(receipts(each, "kv_bytes") for each in (drops, full, hides)), strict=True):
        assert less < all_of_it <= more


def test_what_chooses_once_grows_with_the_answer(rows) -> None:
    found = rows("method=snapkv,h2o", "budget.tokens=64")
    for once, each_step in zip(of(found, "snapkv"), of(found, "h2o"), strict=True):
        assert each_step["receipt"]["slots"] == 63
        assert once["receipt"]["slots"] == 63 + once["new_tokens"] - 1


def proof_of_positions() -> None:
    """Run the page's Python block that holds a cache's answers against the stock model's."""
    (code,) = (code for code in PYTHON.findall(PAGE.read_text("utf-8")) if "assert_close" in code)
    exec(compile(code, PAGE.name, "exec"), {})


def test_the_proof_of_positions_holds() -> None:
    proof_of_positions()


def unmoved(inputs: AttentionInputs, positions: Tensor) -> AttentionInputs:
    return inputs


def mixed(inputs: AttentionInputs, positions: Tensor) -> AttentionInputs:
    """Keys at 0, 1, 2 …, and the query where it was."""
    turned, rope = with_renumbered_positions(inputs, positions), inputs.params.rope
    assert rope is not None and turned.rope_positions is not None
    moved = turned.rope_positions[1][:, :, -1:] - inputs.query_positions[:, None, -1:]
    return replace(turned, keys=rope.rotate_by(turned.keys, moved.expand_as(positions)))


@pytest.mark.parametrize("fault", [unmoved, mixed], ids=lambda fault: fault.__name__)
def test_the_proof_of_positions_fails_where_keys_and_query_are_not_moved_alike(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_attention, "with_renumbered_positions", fault)
    with pytest.raises(AssertionError, match="not close"):
        proof_of_positions()


def test_the_proof_of_positions_fails_where_original_ones_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheSettings, "renumbered", property(lambda _: True))
    with pytest.raises(AssertionError, match="not close"):
        proof_of_positions()


def test_blocks_of_rows_choose_what_the_whole_matrix_chooses(rows) -> None:
    found = rows("cache.observe=blocked,naive")
    assert receipts(of(found, "blocked"), "kept_digest") == receipts(of(found, "naive"), "kept_digest")


def told(command: str) -> list[str]:
    """The scores that the page says the command shows: numbers with a decimal point in the sentences after its block.

    Sentences about a real model are another measurement.
    """
    after = PAGE.read_text("utf-8").partition(f"{command}\n```\n")[2].split("\n## ")[0]
    sentences = re.split(r"(?<=[.)])\s+(?=[A-Z])", after.strip().split("\n\n")[0])
    return re.findall(r"\d+\.\d+", " ".join(each for each in sentences if "real model" not in each))


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in COMMANDS if told(each)], ids=lambda command: command[14:60])
def test_the_scores_told_are_those_printed(command: str, tmp_path: Path) -> None:
    """The whole command; the page may round further than the table."""
    words = [word for word in words_of(command)[2:] if word != "-m"]
    code, out, err = called(["python", "run.py", "-m", f"outputs_dir={tmp_path}", *words])
    assert code == 0, err
    printed = [float(number) for number in re.findall(r"\d+\.\d+", out)]

    def shown(score: str) -> bool:
        half = 0.5 * 10.0 ** -len(score.partition(".")[2])
        return any(abs(number - float(score)) <= half * (1 + 1e-9) for number in printed)

    assert [score for score in told(command) if not shown(score)] == [], out
