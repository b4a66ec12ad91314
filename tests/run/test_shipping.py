"""Sweeps that workers do: whole groups are shipped, baselines computed once, shards give the unsharded run's rows."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_py
from small import small
from test_shared_prefill import content

from kvexp.results.table import table
from kvexp.run.labels import Shard
from kvexp.run.store import Run, runs
from kvexp.run.workers import JobBatch, run_batch
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FEW = small("limit=5", "task.max_new_tokens=5", "task.nll=false", "batch_size=2")
SWEEP = ("-m", "method=h2o,window", "kv_ratio=0.3,0.5,0.7")  # six jobs
ENGINES = {
    "joblib": ("joblib", "hydra.launcher.n_jobs=2"),
    "submitit_local": ("submitit",),
    "ray": ("ray", "hydra.launcher.init.num_cpus=2"),
}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*words, to=folder) of run.py in this process."""
    return lambda *words, to="out", few=FEW: run_py(monkeypatch, capsys, *words, *few, f"outputs_dir={tmp_path / to}")


@pytest.fixture
def serial(monkeypatch):
    """An engine that works in this process, shipments backwards; holds the shipments."""
    pytest.importorskip("joblib")
    sent: list[JobBatch] = []

    def engine(self, work, shipments):
        sent.extend(shipments)
        yield from ((place, work(shipments[place])) for place in reversed(range(len(shipments))))

    from hydra_plugins.kvexp_shipping import JoblibLauncher

    monkeypatch.setattr(JoblibLauncher, "engine", engine)
    return sent


def without_batch(made):
    """Rows without what tells of their company: a shard's last batch may be smaller."""
    for *_, rows in made.values():
        for row in rows.values():
            for name in ("batch_size", "kv_bytes", "peak_kv_bytes"):
                (row["receipt"] or {}).pop(name, None)
    return made


def lines(run):
    return (run.path / "examples.jsonl").read_text().splitlines()


def test_shards_share_out_all_examples_and_no_other():
    for total in (0, 1, 5, 7, 100):
        for of in (1, 2, 3, 8):
            parts = [list(Shard(index, of).takes(total)) for index in range(of)]
            assert list(itertools.chain(*parts)) == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert Shard.read(None).whole and Shard.read("0/1").whole and Shard.read("2/3") == Shard(2, 3)
    for wrong in ("3/3", "-1/3", "1", 2, "0/0", "1/2/3", "a/b", True):
        with pytest.raises(ConfigError, match="shard must be null or i/n"):
            Shard.read(wrong)


def test_parts_of_a_run_are_claimed_beside_each_other_and_never_beside_the_whole(tmp_path):
    run = Run.open(tmp_path, {"a": 1}, {})
    with run.claim(part="0-of-2"):
        with run.claim(timeout=0, part="1-of-2"):
            pass
        for part in ("0-of-2", None):
            with pytest.raises(TimeoutError), run.claim(timeout=0, part=part):
                pass
    with run.claim(), pytest.raises(TimeoutError), run.claim(timeout=0, part="0-of-2"):
        pass
    with run.claim(timeout=0, part="0-of-2"):
        pass


TWENTY = (
    "model=testbed_rope",
    "task=testbed_summary",
    "limit=21",
    "task.max_new_tokens=6",
    "batch_size=3",
)  # of the testbed: enough for a verdict


@pytest.mark.parametrize(
    ("launcher", "few"), [pytest.param("basic", FEW, marks=pytest.mark.slow), ("shared_prefill", TWENTY)]
)
def test_a_run_in_shards_is_the_run(command, tmp_path, launcher, few):
    words = ("-m", f"hydra/launcher={launcher}", "method=h2o,full", "kv_ratio=0.4")
    assert command(*words, to="whole", few=few)[0] == 0
    for shard in ("2/3", "0/3"):
        assert command(*words, f"shard={shard}", to="parts", few=few)[0] == 0
        assert not any(run.finished for run in runs(tmp_path / "parts"))
    assert command(*words, "shard=1/3", to="parts", few=few)[0] == 0
    whole, parts = (without_batch(content(tmp_path / name)) for name in ("whole", "parts"))
    assert whole == parts
    assert all(finished for *_, finished, _ in parts.values())
    one, other = (table(tmp_path / name) for name in ("whole", "parts"))
    numbers = ["hash", "n", "paired", "status", "verdict99", "rouge1", "rouge1_low", "rouge1_high", "rouge2_of_full"]
    assert one[numbers].equals(other[numbers])
    again = command(*words, to="parts", few=few)
    assert again[0] == 0 and all(len(lines(run)) == len(run.rows()) for run in runs(tmp_path / "parts"))


def test_whole_groups_are_shipped_and_wrong_jobs_are_not(command, tmp_path, serial):
    code, out, err = command(*SWEEP[:2], "kv_ratio=0.3,1.5", "hydra/launcher=joblib", "hydra.launcher.shards=2")
    assert code == 1 and "kv_ratio must be in (0, 1], got 1.5" in err
    assert "2 run(s) failed" in out and "2 of 2 pieces are back" in out
    assert [[job.config.shard for job in one.jobs] for one in serial] == [["0/2"] * 2, ["1/2"] * 2]
    assert "[4/4]" in out, "a worker knows the place of its jobs in the sweep"
    assert command(*SWEEP[:2], "kv_ratio=0.3", to="alone")[0] == 0
    ours, alone = (without_batch(content(tmp_path / name)) for name in ("out", "alone"))
    assert ours == alone


def test_runs_that_cannot_share_are_shipped_alone(command, serial):
    code, _, err = command(*SWEEP[:2], "kv_ratio=0.5", "generation.num_beams=2", "hydra/launcher=joblib")
    assert code == 0, err
    assert [len(one.jobs) for one in serial] == [1, 1]


def test_failures_of_workers_reach_the_summary_and_the_exit_code(command, tmp_path, serial, monkeypatch):
    import kvexp.run.batches as module

    monkeypatch.setattr(module, "load", lambda spec: (_ for _ in ()).throw(RuntimeError("out of luck")))
    monkeypatch.setattr("kvexp.run.batches.load", module.load)
    code, out, _ = command("-m", "method=h2o,window", "kv_ratio=0.5", "hydra/launcher=joblib")
    assert code == 1 and "2 run(s) failed" in out and out.count("out of luck") == 1, "once for both"


def test_a_worker_that_dies_is_told_and_what_it_did_is_kept(command, tmp_path, monkeypatch):
    pytest.importorskip("joblib")
    from hydra_plugins.kvexp_shipping import JoblibLauncher

    def engine(self, work, shipments):
        for place, shipment in enumerate(shipments):
            if place:
                yield place, MemoryError("killed")
            else:
                yield place, work(shipment)

    monkeypatch.setattr(JoblibLauncher, "engine", engine)
    words = (*SWEEP[:2], "kv_ratio=0.5", "generation.num_beams=2", "hydra/launcher=joblib")
    code, out, _ = command(*words)
    assert code == 1 and "1 run(s) failed" in out and "its worker ended (MemoryError: killed)" in out
    assert "method=window" in out.partition("failed:")[2]
    monkeypatch.setattr(JoblibLauncher, "engine", lambda self, work, each: ((i, work(s)) for i, s in enumerate(each)))
    assert command(*words)[0] == 0


def test_what_cannot_be_shipped_is_one_line(command, monkeypatch):
    from hydra_plugins.kvexp_shipping import RayLauncher

    for words, message in (
        (("hydra.launcher.shards=0",), "hydra.launcher.shards must be at least 1, got 0"),
        (("hydra.launcher.shards=2", "shard=0/2"), "drop one"),
    ):
        code, out, err = command("-m", "hydra/launcher=joblib", "kv_ratio=0.5", *words)
        assert code == 1 and message in err and "Traceback" not in err + out
    monkeypatch.setattr(RayLauncher, "needs", "no_such_engine")
    code, out, err = command("-m", "hydra/launcher=ray", "kv_ratio=0.5")
    assert code == 1 and "needs no_such_engine, which is not installed" in err and "Traceback" not in err + out


def engine_or_skip(name):
    if importlib.util.find_spec(ENGINES[name][0]) is None:
        pytest.skip(f"{ENGINES[name][0]} is not installed")
    return f"hydra/launcher={name}", *ENGINES[name][1:]


@pytest.mark.parametrize(
    "engine",
    ["joblib", pytest.param("submitit_local", marks=pytest.mark.slow), pytest.param("ray", marks=pytest.mark.slow)],
)
def test_six_jobs_on_an_engine(command, tmp_path, engine):
    """A sweep of six jobs in two shards, by real workers: rows and folders of one process."""
    words = (*SWEEP, *engine_or_skip(engine), "hydra.launcher.shards=2")
    if engine == "submitit_local":  # in a process of its own: submitit takes pytest's streams with it
        line = [sys.executable, "run.py", *words, *FEW, f"outputs_dir={tmp_path / 'out'}"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=250)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = command(*words)
    assert code == 0, out + err
    assert "2 of 2 pieces are back" in out
    assert command(*SWEEP, to="alone")[0] == 0
    ours, alone = (without_batch(content(tmp_path / name)) for name in ("out", "alone"))
    assert len(ours) == 7 and ours == alone
    assert all(len(lines(run)) == 5 for run in runs(tmp_path / "out"))


def test_workers_that_need_one_baseline_compute_it_once(command, tmp_path):
    words = ("-m", "method=h2o,window", "kv_ratio=0.5", "generation.num_beams=2")
    code, out, err = command(*words, *engine_or_skip("joblib"))
    assert code == 0, out + err
    assert "2 jobs go out in 2 pieces" in out
    found = list(runs(tmp_path / "out"))
    assert len(found) == 3 and all(len(lines(run)) == 5 for run in found), "each example once, the baseline's too"


def test_a_worker_forgets_its_last_shipment():
    assert run_batch(JobBatch([], [])) == run_batch(JobBatch([], []))
