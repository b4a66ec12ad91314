"""run.py from the inside: what a command says and leaves behind where jobs are counted, refused or published."""

from __future__ import annotations

import errno
import json
import os

import pytest
from commands import run_py
from small import small

import kvexp.run.batches as batches
import kvexp.run.jobs as jobs
from kvexp.results.read import ALL_VERSIONS
from kvexp.results.table import table
from kvexp.results.views import main as results
from kvexp.run.jobs import job_line
from kvexp.run.session import Session
from kvexp.run.store import Run, accept, refusals, refuse, runs
from kvexp.util.output import duration

SMALL = ["limit=2", "task.max_new_tokens=4", "task.continuation_words=3", "task.nll=false"]  # of task=sample


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*arguments) -> (exit code, stdout, stderr) of run.py in this process, writing to tmp_path / "out"."""

    def called(*arguments, outputs=tmp_path / "out"):
        options = [word for word in arguments if word.startswith("-")]
        overrides = small(*(word for word in arguments if not word.startswith("-")), *SMALL)
        return run_py(monkeypatch, capsys, *options, *overrides, f"outputs_dir={outputs}")

    return called


def test_a_sweep_counts_its_jobs_and_says_how_long_the_rest_takes(command):
    each = ("-m", "hydra/launcher=basic", "method=h2o,window", "kv_ratio=0.3,0.6")
    code, out, err = command(*each)
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("[")]
    assert [line.partition(",")[0] for line in lines] == [
        "[1/4] h2o kv_ratio=0.3",
        "[2/4] h2o kv_ratio=0.6",
        "[3/4] window kv_ratio=0.3",
        "[4/4] window kv_ratio=0.6",
    ]
    assert all(", about " in line and line.endswith(" left") for line in lines[1:])
    assert "HYDRA" not in out + err
    assert not any(line.startswith("[") for line in command("method=h2o", "kv_ratio=0.3")[1].splitlines())


def test_settings_of_a_job_are_built_once(command, monkeypatch):
    numbers, build = [], jobs.settings_of_job
    monkeypatch.setattr(jobs, "settings_of_job", lambda job, session: numbers.append(job.number) or build(job, session))
    assert command("-m", "method=h2o,window", "kv_ratio=0.5")[0] == 0
    assert numbers == [0, 1]


def test_the_line_of_a_job():
    session = Session(overrides_of_jobs=[[f"method={name}"] for name in ("h2o", "a2sf")])
    assert job_line(session, 0, []) == "[1/2] h2o"
    session.job_seconds = [100.0, 60.0, 62.0]  # the first one loaded the model
    assert job_line(session, 1, []) == "[2/2] a2sf, about 62 s left"
    assert job_line(session, 2, ["method=tova", "limit=3"]) == "[3] tova limit=3"
    assert (duration(89), duration(91), duration(7200)) == ("89 s", "2 min", "2.0 h")


def test_a_refused_job_is_recorded_shown_and_forgotten_once_it_runs(command, tmp_path, capsys):
    code, _, err = command("-m", "method=h2o", "kv_ratio=0.3,1.5")
    assert code == 1 and "kv_ratio must be in (0, 1], got 1.5" in err
    (left,) = refusals(tmp_path / "out")
    settings = ["task.continuation_words=3", "task.max_new_tokens=4", "task.nll=False"]
    assert left.overrides == ["kv_ratio=1.5", "method=h2o", "model=tiny", *settings, "task=sample"], (
        "without limit and outputs_dir"
    )
    assert left.labels["method"] == "h2o" and left.labels["kv_ratio"] == 1.5 and left.error == "ConfigError"
    shown = table(tmp_path / "out")
    row = shown[shown["status"] == "refused"].iloc[0]
    assert (row["method"], row["kv_ratio"], row["n"], row["hash"]) == ("h2o", 1.5, 0, left.path.stem)
    assert "kv_ratio must be in (0, 1], got 1.5" in row["note"]
    assert set(shown["comparisons"]) == {1}, "what was never run is not among the comparisons"
    assert results([str(tmp_path / "out"), "-w", "status=refused"]) == 0
    assert "refused: ConfigError: kv_ratio must be" in capsys.readouterr().out.replace("\n", " ")

    code, _, _ = command("method=h2o", "kv_ratio=0.3", "batch_size=0")
    assert code == 1 and len(list(refusals(tmp_path / "out"))) == 2
    code, _, _ = command("method=h2o", "kv_ratio=0.3", "batch_size=2")
    assert code == 0
    assert [r.labels["kv_ratio"] for r in refusals(tmp_path / "out")] == [1.5], "batch_size changes no number"


def test_a_job_whose_baseline_fails_is_recorded_too(command, tmp_path, monkeypatch):
    import kvexp.run.batches as module

    monkeypatch.setattr(module, "load", lambda spec: (_ for _ in ()).throw(RuntimeError("out of luck")))
    code, _, err = command("method=h2o", "kv_ratio=0.3")
    assert code == 1 and "out of luck" in err
    (baseline,) = runs(tmp_path / "out")
    assert baseline.failure()["message"] == "out of luck"
    (left,) = refusals(tmp_path / "out")
    assert (left.labels["method"], left.error, left.message) == ("h2o", "RuntimeError", "out of luck")
    code, _, _ = command("method=full")
    assert len(list(refusals(tmp_path / "out"))) == 1, "its own folder says it"


def test_values_that_no_column_holds_stay_text(command, tmp_path):
    assert command("method=h2o", "kv_ratio=half")[0] == 1
    assert command("method=h2o", "kv_ratio=0.3")[0] == 0
    shown = table(tmp_path / "out", {ALL_VERSIONS: True})
    assert sorted(shown["kv_ratio"].dropna()) == [0.3]
    assert "kv_ratio=half" in "".join(shown["setting"])
    assert "kv_ratio=half" not in "".join(table(tmp_path / "out")["setting"]), "the second run made up for it"


def test_refusals_are_told_apart_by_overrides_in_any_order(tmp_path):
    first = refuse(tmp_path, ["b=2", "a=1"], {"method": "h2o"}, ValueError("no"))
    assert refuse(tmp_path, ["a=1", "b=2"], {}, ValueError("no")).path == first.path
    assert refuse(tmp_path, ["a=1"], {}, ValueError("no")).path != first.path
    first.path.write_text("{")
    assert len(list(refusals(tmp_path))) == 1, "an unreadable notice is no loss"
    accept(tmp_path, ["a=1"])
    accept(tmp_path, ["a=1"])
    accept(tmp_path / "nowhere", ["a=1"])
    assert not list(refusals(tmp_path))


@pytest.mark.parametrize("mode", [[], ["-m"]])
def test_outputs_through_a_file_are_one_clear_line(command, tmp_path, mode):
    (tmp_path / "file").write_text("")
    code, out, err = command(*mode, "kv_ratio=0.3", outputs=tmp_path / "file" / "out")
    assert code == 1
    assert "choose another outputs_dir" in err and "Traceback" not in err + out
    assert err.count("error:") == 1


def test_on_a_full_disk_a_sweep_computes_once(command, monkeypatch):
    calls, original = [], batches.outputs_of_batches

    def append(self, *rows):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OSError(errno.ENOSPC, "cannot write rows: No space left on device; free disk space") from full

    monkeypatch.setattr(Run, "append", append)
    monkeypatch.setattr(batches, "outputs_of_batches", lambda *given: calls.append(1) or original(*given))
    for launcher in ("shared_prefill", "basic"):
        code, out, err = command("-m", f"hydra/launcher={launcher}", "method=h2o,window,tova", "kv_ratio=0.5")
        assert code == 1 and err.count("No space left on device") == 1 and "Traceback" not in err + out
    assert len(calls) == 2, "once for each command"


@pytest.mark.parametrize(
    ("mode", "override", "message"),  # other values: test_log.py
    [
        ([], "log.project=7", "log.project must be a name, got 7"),
        (["-m"], "log.wandb=perhaps", "log.wandb must be true or false, got 'perhaps'"),
    ],
)
def test_what_cannot_be_published_is_said_before_the_runs(command, tmp_path, mode, override, message):
    code, out, err = command(*mode, "log=wandb", override)
    assert code == 1 and message in err and "Traceback" not in err + out
    assert not list(runs(tmp_path / "out")) and not list(refusals(tmp_path / "out"))


def test_one_run_under_two_names_shows_the_one_asked_for(command, tmp_path):
    """method=h2o_keyformer_paper is Keyformer with seven settings: said by hand, they are the same run."""
    words = ["tau_end=1.0", "noise=none", "key_window=release_frozen", "score_batch=sum_all"]
    by_hand = ["method=keyformer", *(f"method.{word}" for word in words)]
    for arguments in (["method=h2o_keyformer_paper"], by_hand):
        code, out, err = command(*arguments, "kv_ratio=0.3")
        assert code == 0, err
        assert arguments[0].removeprefix("method=") in out
    found = [r for r in runs(tmp_path / "out") if r.baseline]
    assert len(found) == 1 and [labels["method"] for labels in found[0].asked] == ["h2o_keyformer_paper", "keyformer"]
    named = dict(table(tmp_path / "out", {"method": "h2o_keyformer_paper"}).iloc[0])
    assert named["method"] == "h2o_keyformer_paper" and "method=keyformer" in named["also"]
    latest = table(tmp_path / "out", {"kv_ratio": 0.3}).iloc[0]
    assert latest["method"] == "keyformer" and latest["also"].startswith("method=h2o_keyformer_paper")


def test_an_experiment_is_a_label_and_the_group(command, tmp_path):
    pytest.importorskip("wandb")
    code, _, err = command("-m", "experiment=keyformer_recent", "method.recent_ratio=0.2,0.5", "kv_ratio=0.3")
    assert code == 0, err
    assert set(table(tmp_path / "out")["experiment"]) == {"keyformer_recent"}
    assert command("method=keyformer", "method.recent_ratio=0.2", "kv_ratio=0.3")[0] == 0
    assert set(table(tmp_path / "out")["experiment"]) == {"keyformer_recent"}, (
        "asked for by hand, it stays a part of it"
    )


def test_nothing_that_is_no_number_stops_the_others(command, tmp_path, monkeypatch):
    from kvexp.tasks import Stories

    good = Stories.score

    def score(self, output, reference, example):
        found = good(self, output, reference, example)
        return found | ({"rouge2": float("nan")} if example.id == "sample-0" else {})

    monkeypatch.setattr(Stories, "score", score)
    code, out, err = command("method=full")
    assert code == 0, err
    (found,) = runs(tmp_path / "out")
    bad, fine = found.rows()
    assert found.finished and bad["skipped"] == "metric rouge2 is nan" and bad["output"] is not None
    assert "rouge2" not in bad["metrics"] and "rouge1" in bad["metrics"] and fine["skipped"] is None
    row = table(tmp_path / "out").iloc[0]
    assert (row["n"], row["skipped"], row["unscored"]) == (1, 1, "metric rouge2 is nan (1)")
    assert "without a score: metric rouge2 is nan (1)" in out and "skipped" in out


def test_the_last_line_of_a_folder_of_rows_is_json_that_others_can_read(command, tmp_path):
    assert command("method=h2o", "kv_ratio=0.3", "batch_size=2")[0] == 0
    for found in runs(tmp_path / "out"):
        lines = [json.loads(line) for line in (found.path / "examples.jsonl").read_text().splitlines()]
        assert [line["receipt"]["batch_size"] for line in lines] == [2, 2]
        assert [line["revision"] for line in lines] == [None, None]
    shown = table(tmp_path / "out")
    assert list(shown["batch_size"]) == list(shown["smallest_batch"]) == [2, 2]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_the_flag_of_a_sweep_may_stand_anywhere(tmp_path, monkeypatch, capsys, flag, place):
    """Hydra's own parser takes it in front of the overrides or behind them alone."""
    given = ["method=h2o", f"outputs_dir={tmp_path}"]
    code, out, err = run_py(monkeypatch, capsys, *given[:place], flag, *given[place:], "kv_ratio=1.5,2.5")
    assert code == 1 and "[2/2] kv_ratio=2.5" in out and "unrecognized" not in err
