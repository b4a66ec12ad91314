"""The evictions behind the token of largest divergence."""

import pytest
from test_sweep_divergence import ONE_BY_ONE, group

from kvexp.diagnose.__main__ import main
from kvexp.diagnose.folders import rows_of
from kvexp.diagnose.runs import cases, settings_at
from kvexp.diagnose.undo import UndoneEvictions
from kvexp.diagnose.worst_token import ForcedReplay, worst_tokens
from kvexp.record import divergence_lines, runs
from kvexp.session import Session
from kvexp.sweep.prefill_groups import run_group

QUESTIONS = ("task=testbed_qa", "task.question=after_eviction", "task.max_new_tokens=5", "limit=3", "batch_size=1")


def made(outputs, *task, method="h2o"):
    run_group(group(outputs, *task, methods=(method,)), Session())
    return next(run for run in runs(outputs) if run.labels["method"] == method)


@pytest.mark.parametrize(("task", "method"), [(ONE_BY_ONE, "keyformer"), (QUESTIONS, "h2o")])
def test_nothing_undone_is_the_recorded_divergence_and_everything_undone_is_none(tmp_path, task, method):
    run = made(tmp_path, *task, method=method)
    by_name, rows = {each.line["example"]: each for each in worst_tokens(run)}, rows_of(run)
    for row, case, _ in cases(settings_at(run), [rows[name] for name in by_name]):
        worst = by_name[row["example"]]
        replay = ForcedReplay(case, worst.line["tokens"][: worst.place], 0.05)
        replay.answers([UndoneEvictions((), (), 0, 0), replay.everything])
        assert replay.kl == pytest.approx([worst.kl, 0], abs=1e-4)
        assert worst.kl == max(worst.line["kl"][int(worst.line["first_by_prefill"]) :])


def test_the_largest_come_first_and_are_explained(tmp_path, capsys):
    run = made(tmp_path, *ONE_BY_ONE)
    found = worst_tokens(run)
    assert [each.kl for each in found] == sorted((each.kl for each in found), reverse=True) and found[0].kl > 0.5
    assert main(["explain", str(run.path), "--kl"]) == 0
    told = capsys.readouterr().out
    assert f"token {found[0].place + 1} of" in told and f"KL {found[0].kl:.3f} nats" in told
    assert "is behind it: with" in told
    (run.path / divergence_lines.NAME).unlink()
    assert main(["explain", str(run.path), "--kl"]) == 2
    assert "kvexp divergence" in capsys.readouterr().err
