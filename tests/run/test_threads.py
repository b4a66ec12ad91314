"""How many threads torch gets and how they wait: what is decided, of which readings, and that OpenMP follows it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import run_py
from small import small

from kvexp.run.store import runs
from kvexp.util import machine
from kvexp.util.errors import ConfigError
from kvexp.util.machine import LoadMeter, Threads, decide_threads, machine_load, use_threads

ROOT = Path(__file__).resolve().parents[2]
PASSIVE, ALL = {"OMP_WAIT_POLICY": "PASSIVE"}, math.inf
BESIDE_A_HOG = Threads(1, PASSIVE, 2, 1.0)


@pytest.mark.parametrize(
    ("cores", "quota", "others", "environ", "asked", "expected"),
    [
        (2, ALL, 0.0, {}, None, Threads(None, {}, 2, 0.0)),
        (2, ALL, 0.25, {}, None, Threads(None, {}, 2, 0.25)),
        (2, ALL, 0.5, {}, None, Threads(1, PASSIVE, 2, 0.5)),
        (2, ALL, 1.0, {}, None, BESIDE_A_HOG),
        (2, ALL, 2.0, {}, None, Threads(1, PASSIVE, 2, 2.0)),  # never none
        (16, ALL, 1.125, {}, None, Threads(15, PASSIVE, 16, 1.125)),
        (16, ALL, 6.75, {}, None, Threads(9, PASSIVE, 16, 6.75)),
        # a quota's cores are free as long as others leave so many
        (64, 4.0, 10.0, {}, None, Threads(4, {}, 4, 0.0)),
        (64, 4.0, 62.0, {}, None, Threads(2, PASSIVE, 4, 2.0)),
        (8, 1.5, 0.0, {}, None, Threads(1, {}, 1, 0.0)),
        (8, 0.5, 0.0, {}, None, Threads(1, {}, 1, 0.0)),
        # threads=N stands; it waits by the load
        (16, ALL, 1.0, {}, 8, Threads(8, {}, 8, 0.0)),
        (2, ALL, 1.0, {}, 2, Threads(2, PASSIVE, 2, 1.0)),
        (2, ALL, 1.0, {}, 1, Threads(1, {}, 1, 0.0)),
        # what the user has set stands
        (2, ALL, 1.0, {"OMP_NUM_THREADS": "2"}, None, Threads(None, {}, 2, 1.0)),
        (2, ALL, 1.0, {"OMP_NUM_THREADS": "1"}, None, Threads(None, {}, 1, 0.0)),
        (2, ALL, 1.0, {"OMP_NUM_THREADS": "2,1"}, None, Threads(None, {}, 2, 1.0)),  # OpenMP's own list of levels
        (2, ALL, 1.0, {"MKL_NUM_THREADS": "2"}, None, Threads(None, {}, 2, 1.0)),
        (2, ALL, 1.0, {"OMP_WAIT_POLICY": "ACTIVE"}, None, Threads(None, {}, 2, 1.0)),
        (2, ALL, 1.0, {"GOMP_SPINCOUNT": "9"}, 2, Threads(2, {}, 2, 1.0)),
        # systems that do not tell
        (2, ALL, None, {}, None, Threads(None, {}, 2, None)),
        (8, 2.0, None, {}, None, Threads(2, {}, 2, None)),
        (0, ALL, None, {}, None, Threads()),
        (0, ALL, None, {}, 4, Threads(4)),
    ],
)
def test_decision(cores, quota, others, environ, asked, expected):
    assert decide_threads(cores, quota, others, environ, asked) == expected


def test_load_is_what_others_worked_on_the_cores_of_this_process(tmp_path, monkeypatch):
    """By hand: in 4 s of the clock two of three cores worked 6 s, of which this process had 1.5."""
    now, own = iter([10.0, 14.0]), iter([1.0, 2.5])
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 10}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 9 9 9 9\ncpu0 100 10 20 7 7 1 2 3 0 0\ncpu1 5 5 5 5 5 5 5 5\ncpu10 0 0 0 0 0 0 0 0 0 0\nintr 1\n"
    )
    meter = LoadMeter()
    stat.write_text(
        "cpu 9 9 9 9\ncpu0 300 20 60 9 9 11 22 33 0 0\ncpu1 999 5 5 5 5 5 5 5\ncpu10 290 0 0 4 4 0 0 0 0 0\n"
    )
    assert meter.others() == (2.0 + 0.1 + 0.4 + 0.1 + 0.2 + 0.3 + 2.9 - 1.5) / 4


@pytest.mark.parametrize("content", [None, "", "cpu 1 2 3 4\n", "cpu0 0 0 0 0 0 0 0 0\n"])
def test_no_load_where_the_system_does_not_tell(tmp_path, monkeypatch, content):
    monkeypatch.setattr(machine, "PROC", tmp_path)
    if content is not None:
        (tmp_path / "stat").write_text(content)
    meter = LoadMeter()
    meter.began -= 1.0
    assert meter.others() is None


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, math.inf),
        (
            "5:cpuset:/x\n3:cpu,cpuacct:/a\n",
            {f"cpu/a/cpu.cfs_{n}_us": t for n, t in (("quota", "50000"), ("period", "100000"))},
            0.5,
        ),
        ("3:cpu:/a\n", {f"cpu/a/cpu.cfs_{n}_us": t for n, t in (("quota", "-1"), ("period", "100000"))}, math.inf),
        ("", {}, math.inf),
    ],
    ids=["version 2, a group above", "no limit", "version 1", "version 1, no limit", "no groups"],
)
def test_quota(tmp_path, monkeypatch, groups, files, quota):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content)
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "groups")
    assert machine._quota() == quota


PLAN = """
import os, sys
from kvexp.util import machine
machine._cores, machine._quota = lambda: {0, 1}, lambda: float("inf")
machine.LoadMeter.others = lambda self: 1.0
sys.argv[1:] = ["--dry-run", "model=tiny", "task=sample", "limit=1", *sys.argv[1:]]
from kvexp.cli import run
try:
    run()
finally:
    import torch
    print(torch.get_num_threads(), [name for name in os.environ if name in machine.USERS], machine.threads)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP as torch has it on Linux")
@pytest.mark.parametrize(
    ("words", "environ", "threads", "decided", "spins"),
    [
        ([], {}, 1, BESIDE_A_HOG, 0),
        pytest.param(
            *([], {"OMP_NUM_THREADS": "2"}, 2, Threads(None, {}, 2, 1.0), 300_000), marks=pytest.mark.slow
        ),  # what is decided is a row of test_decision
        (["threads=2"], {}, 2, BESIDE_A_HOG, 0),  # --dry-run imports torch before it knows of the option
    ],
    ids=["decided", "left alone", "threads=2"],
)
def test_torch_has_the_threads_that_were_decided(tmp_path, words, environ, threads, decided, spins):
    """`kvexp run` in a process of its own, beside one that takes a core; OpenMP itself says how its threads wait."""
    env = {name: value for name, value in os.environ.items() if name not in machine.USERS} | environ
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", PLAN, *words, f"outputs_dir={tmp_path}"]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{threads} CPU thread(s)" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{threads} {list(environ)} {decided}"
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
    said = "busy machine: other processes take 1.0 of 2 cores, so torch has 1 thread (threads=N: so many)"
    assert done.stderr.count(said) == (not words and not environ)


def test_one_command_has_one_number_of_threads(monkeypatch):
    given = []
    monkeypatch.setattr(machine, "_threads_asked", None)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    use_threads(3)
    use_threads(3)
    assert given == [3, 3]
    with pytest.raises(ConfigError, match="threads=2, but this command has threads=3: give each a command"):
        use_threads(2)


def test_rows_record_the_load_and_the_option_is_no_part_of_a_run(tmp_path, monkeypatch, capsys):
    """As torch was imported, or more while the rows were made; nothing where torch was there before the command."""
    monkeypatch.setattr(LoadMeter, "others", lambda self: 1.25)
    monkeypatch.setattr(machine, "_cores", lambda: {0, 1})
    monkeypatch.setattr(machine, "_threads_asked", None)
    hashes = []
    for decided, load, words in (
        (Threads(None, {}, 2, 0.0), 1.25, ()),
        (Threads(1, {}, 2, 2.0), 2.0, ()),
        (Threads(None, {}, 1, 0.0), 0.25, ("threads=1",)),
        (Threads(None, {}, 2, None), None, ()),
        (None, None, ()),
    ):
        monkeypatch.setattr(machine, "threads", decided)
        out = tmp_path / str(len(hashes))
        code, _, said = run_py(monkeypatch, capsys, *small("limit=1", "method=full", f"outputs_dir={out}", *words))
        assert code == 0, said
        made = list(runs(out))
        assert [row.get("load") for run in made for row in run.rows()] == [load]
        assert machine_load() == (decided and decided.load)
        hashes.append({(run.hash, run.labels["setting"]) for run in made})
    assert len(hashes[0]) == 1 and all(each == hashes[0] for each in hashes)
