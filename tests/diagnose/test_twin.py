"""The twin run against Hugging Face's own attention of the same tokens, against itself where it must agree, drawn."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
import torch
from test_eviction_log import case_of, held, job, run_job, run_of, watched
from test_shared_prefill import content
from tiny import CONFIGS, stock

from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.show import main
from kvexp.diagnose.twin import MEASURES, curves, heatmaps, twin
from kvexp.methods import A2SF, H2O, TOVA, StreamingLLM
from kvexp.run.evictions import TWIN, read_example_log, read_table

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


def test_a_run_gets_twins_and_pictures_and_keeps_its_rows(tmp_path, command, capsys):
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
    assert main(["draw", str(run.path), "--format", "svg", "--out", str(tmp_path / "pictures")]) == 0
    assert sorted(file.name for file in (tmp_path / "pictures").iterdir()) == ["curves.svg", "heatmap.svg"]
    assert main(["draw", str(run.path.parent / run.baseline)]) == 2
    assert "full evicts nothing" in capsys.readouterr().err


def test_pictures_show_the_means():
    rows = [
        {"example": example, "step": step, "layer": layer, "head": head} | dict.fromkeys(MEASURES, 0.1 * (1 + layer))
        for example, steps in (("a", 3), ("b", 1))
        for step in range(1, steps + 1)
        for layer in (0, 1)
        for head in (0, 1, 2)
    ]
    frame = pd.DataFrame(rows)
    frame.loc[(frame.example == "b") & (frame.layer == 0), "lost"] = 0.5
    image = heatmaps(frame, "h2o 0.3").axes[0].images[0].get_array()
    assert image.shape == (2, 3)
    assert image[0, 0] == pytest.approx(0.3), "examples count alike, however long their answers"
    lines = {line.get_label(): line.get_ydata().tolist() for line in curves(frame, "h2o").axes[0].lines}
    assert lines["layer 0"] == pytest.approx([0.3, 0.1, 0.1])
    assert lines["layer 1"] == pytest.approx([0.2, 0.2, 0.2])
