"""Long answers: loops and repetition against a search that tries everything, the task, and its table."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from report_runs import labels

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.record import Run, divergence_lines
from kvexp.results.long_answers_table import print_long, read_long
from kvexp.tasks import LongAnswers
from kvexp.tasks.loops import COPIES, LEAST_WORDS, Loop, first_loop, repeated_share


def loop_by_hand(words: list[str]) -> Loop | None:
    """The first place, and there the shortest passage, of which enough copies follow one another."""
    for start in range(len(words)):
        for period in range(1, len(words)):
            copies = max(COPIES, -(-LEAST_WORDS // period))
            whole, rest = max(COPIES * period, LEAST_WORDS), words[start:]
            if copies and len(rest) >= whole and all(rest[i] == rest[i % period] for i in range(whole)):
                return Loop(start, period)
    return None


def texts() -> list[list[str]]:
    rng = np.random.RandomState(3)
    made = [list(map(str, rng.randint(0, n, size))) for n, size in product((1, 2, 3, 5), (0, 3, 11, 12, 13, 40))]
    for period, before, copies in product((1, 2, 4, 7, 12), (0, 5), (1, 2, 3, 4)):
        passage = [f"w{i}" for i in range(period)]
        head, tail = [f"a{i}" for i in range(before)], ["z"] * 2
        made.append([*head, *passage * copies, *tail])
        made.append([*head, *passage * copies, *passage[: period // 2], *tail])
    return made


@pytest.mark.parametrize("words", texts())
def test_the_first_loop_is_what_a_search_of_all_passages_finds(words: list[str]) -> None:
    assert first_loop(words) == loop_by_hand(words)


def test_no_no_no_is_no_loop_and_four_times_three_words_are() -> None:
    assert first_loop(["no"] * 11) is None and first_loop(["no"] * 12) == Loop(0, 1)
    assert first_loop(list("xyzabcdabcdabcdend")) == Loop(3, 4)
    assert first_loop(list("abcabcabc")) is None  # nine words together
    assert first_loop([]) is None


def test_repeated_share_counts_ngrams_that_were_there() -> None:
    assert repeated_share(list("abcde")) == 0
    assert repeated_share(list("abcdabcd")) == pytest.approx(1 / 5)
    assert repeated_share(["a"] * 10) == pytest.approx(6 / 7)
    assert repeated_share(["a"] * 3) == 0


def test_scores_and_prompts() -> None:
    task = LongAnswers()
    story, facts = list(LongAnswers(limit=2).examples())
    assert story.info["kind"] == "story" and facts.info["kind"] == "facts" and story.info["article"] in story.id
    assert facts.body.startswith(story.body) and len(story.body) < len(facts.body)
    circles = "It rained. " + "And so on and on. " * 5
    made = task.score(circles, "", story)
    assert made["loop_free"] == pytest.approx(100 * 2 / 27) and made["not_repeated"] < 50
    assert task.score("Nothing is said twice here.", "", story) == {"not_repeated": 100.0, "loop_free": 100.0}
    assert task.score("", "", story) == {"not_repeated": 100.0, "loop_free": 100.0}
    with pytest.raises(ConfigError, match=r"task\.kinds must be one or both of story, facts, got"):
        LongAnswers(kinds=("poem",)).check_options()


def run_of(folder: Any, name: dict[str, Any], outputs: list[tuple[str, int, str]], baseline: str | None) -> Run:
    task = LongAnswers()
    example = next(iter(task.examples()))
    run = Run.open(folder, {"labels": name}, name, {}, baseline=baseline)
    for index, (output, tokens, reason) in enumerate(outputs):
        run.append({
            "example": f"e{index}", "index": index, "metrics": task.score(output, "", example), "new_tokens": tokens,
            "finish_reason": reason, "output": output, "skipped": None, "receipt": {"first_eviction_step": 0},
        })  # fmt: skip
    run.finish(len(outputs))
    return run


def test_the_table_of_length_ends_loops_and_divergence_by_position(tmp_path: Any) -> None:
    circles = "It rained. " + "And so on and on. " * 5
    full = run_of(tmp_path, labels("m", "long_answers", "full"), [("A short end.", 4, "stop")] * 2, None)
    name = {**labels("m", "long_answers", "h2o"), "tokens": 64}
    other = run_of(tmp_path, name, [(circles, 30, "length"), ("Done.", 2, "stop")], full.hash)
    line = {"example": "e0", "index": 0, "text": "own", "first_by_prefill": True, "tokens": list(range(100))}
    line |= {"kl": [9.0] + [0.1] * 63 + [0.5] * 36, "full_logprob": [0.0] * 100, "logprob": [0.0] * 100}
    divergence_lines.append(other, [line | {"same_top1": [1] * 100}])
    frame = read_long(tmp_path, {}).set_index("method")
    row = frame.loc["h2o"]
    assert (row["tokens"], row["ended"], row["looped"], row["loop_at"]) == (16, 50, 50, pytest.approx(2))
    assert row["tokens_of_full"] == 400 and row["budget_tokens"] == 64
    assert (row["kl_64"], row["kl_128"]) == (pytest.approx(0.1), pytest.approx(0.5))
    assert frame.loc["full", "ended"] == 100 and frame.loc["full", "looped"] == 0
    console = Console(markup=False, width=200, record=True)
    print_long(read_long(tmp_path, {}), console)
    text = console.export_text()
    assert "long answers" in text and "KL to" in text
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="task=long_answers"):
        read_long(tmp_path / "empty", {})
