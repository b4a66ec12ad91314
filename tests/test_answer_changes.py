"""What became of the full cache's answers, from rows made by hand."""

import math

import pytest

from kvexp.record import Run
from kvexp.results.answer_changes import answer_changes, choice_changes, choice_kl, first_difference, with_answers
from kvexp.results.divergence_table import divergence_table
from kvexp.results.read import folders

LABELS = {"model": "tiny", "task": "xsum", "kv_ratio": 0.5}


def pair(outputs, full, other, method="h2o"):
    """Folders of a baseline and a run with these rows, which lack an id alone."""
    base = Run.open(outputs, {"method": "full"}, LABELS | {"method": "full", "kv_ratio": None})
    run = Run.open(outputs, {"method": method}, LABELS | {"method": method}, baseline=base.hash)
    for each, rows in ((base, full), (run, other)):
        for index, row in enumerate(rows):
            each.append({"example": f"e{index}", "index": index, "metrics": {"acc": 0.0}, "skipped": None} | row)
    found = {folder.run.hash: folder for folder in folders(outputs)}
    return found[run.hash], found[base.hash]


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 2), ([1, 2], [1, 2, 3], 3), ([1, 2, 3], [1, 2], 3)],
)
def test_first_difference(one, other, place):
    assert first_difference(one, other) == place


def test_answers(tmp_path):
    full = [{"output_tokens": [1, 2, 3, 4]}, {"output_tokens": [5, 6]}, {"output_tokens": [7]}, {"output_tokens": []}]
    other = [{"output_tokens": [1, 2, 9, 4]}, {"output_tokens": [5, 6]}, {"output_tokens": [8, 7]}, {}]
    found = answer_changes(*pair(tmp_path, full, other))
    assert found == pytest.approx({"same_answers": 1 / 3, "same_tokens": (3 / 4 + 1 + 0) / 3, "parts_at": 2.0})


def test_rows_of_before_hold_no_tokens(tmp_path):
    run, base = pair(tmp_path, [{}], [{"output_tokens": [1]}])
    assert all(math.isnan(value) for value in answer_changes(run, base).values())
    assert all(math.isnan(value) for value in answer_changes(run, None).values())
    assert with_answers(divergence_table([run]), [run], {}).empty


def test_choices_flip_both_ways(tmp_path):
    def row(acc, *logprobs):
        return {"metrics": {"acc": acc}, "choices": {"logprobs": list(logprobs), "tokens": [1] * len(logprobs)}}

    full = [row(100.0, -1, -2), row(0.0, -3, -1), row(100.0, -1, -5), row(0.0, -2, -1)]
    other = [row(0.0, -2, -1), row(100.0, -1, -3), row(0.0, -5, -1), row(0.0, -2, -1)]
    found = choice_changes(*pair(tmp_path, full, other))
    assert (found["n"], found["metric"], found["lost"], found["won"]) == (4, "acc", 2, 1)
    assert found["choice_kl"] == pytest.approx(sum(map(by_hand, full, other)) / 4)
    assert math.isnan(found["kl_low"]), "four examples give no interval"


def by_hand(full, other):
    """KL over two choices, from the definition."""
    p, q = (1 / (1 + math.exp(b - a)) for a, b in (full["choices"]["logprobs"], other["choices"]["logprobs"]))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_scores_that_are_no_right_or_wrong_do_not_flip(tmp_path):
    full = [{"metrics": {"f1": 30.0}, "choices": {"logprobs": [-1.0, -2.0]}}]
    found = choice_changes(*pair(tmp_path, full, [{**full[0], "metrics": {"f1": 20.0}}]))
    assert found["lost"] is None and found["choice_kl"] == 0.0


def test_other_choices_have_no_divergence():
    assert choice_kl({"logprobs": [-1.0]}, {"logprobs": [-1.0]}) is None
    assert choice_kl({"logprobs": [-1.0, -2.0]}, {"logprobs": [-1.0, -2.0, -3.0]}) is None
