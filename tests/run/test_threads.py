"""How many threads torch gets and how they wait: what is decided, of which readings, and that OpenMP follows it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from commands import run_py
from small import small

from kvexp import util
from kvexp.run import threads
from kvexp.run.store import runs
from kvexp.run.threads import LoadMeter, Threads, decide_threads, machine_load, use_threads
from kvexp.util import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ALL = math.inf


@pytest.mark.parametrize(
    ("cores", "quota", "others", "environ", "asked", "expected"),
    [
        (2, ALL, 0.0, {}, None, Threads(None, False, 0.0)),
        (2, ALL, 0.25, {}, None, Threads(None, False, 0.25)),
        (2, ALL, 0.5, {}, None, Threads(1, True, 0.5)),
        (2, ALL, 1.0, {}, None, Threads(1, True, 1.0)),
        (2, ALL, 2.0, {}, None, Threads(1, True, 2.0)),  # never none
        (16, ALL, 1.125, {}, None, Threads(15, True, 1.125)),
        (16, ALL, 6.75, {}, None, Threads(9, True, 6.75)),
        # a quota's cores are free as long as others leave so many
        (64, 4.0, 10.0, {}, None, Threads(4, False, 0.0)),
        (64, 4.0, 62.0, {}, None, Threads(2, True, 2.0)),
        (8, 1.5, 0.0, {}, None, Threads(1, False, 0.0)),
        (8, 0.5, 0.0, {}, None, Threads(1, False, 0.0)),
        # threads=N stands; it waits by the load
        (16, ALL, 1.0, {}, 8, Threads(8, False, 0.0)),
        (2, ALL, 1.0, {}, 2, Threads(2, True, 1.0)),
        (2, ALL, 1.0, {}, 1, Threads(1, False, 0.0)),
        # what the user has set stands
        (2, ALL, 1.0, {"OMP_NUM_THREADS": "2"}, None, Threads(None, False, 1.0)),
        (2, ALL, 1.0, {"OMP_NUM_THREADS": "1"}, None, Threads(None, False, 0.0)),
        (2, ALL, 1.0, {"OMP_NUM_THREADS": "2,1"}, None, Threads(None, False, 1.0)),  # OpenMP's own list of levels
        (2, ALL, 1.0, {"MKL_NUM_THREADS": "2"}, None, Threads(None, False, 1.0)),
        (2, ALL, 1.0, {"OMP_WAIT_POLICY": "ACTIVE"}, None, Threads(None, False, 1.0)),
        (2, ALL, 1.0, {"GOMP_SPINCOUNT": "9"}, 2, Threads(2, False, 1.0)),
    ],
)
def test_decision(cores, quota, others, environ, asked, expected):
    assert decide_threads(cores, quota, others, environ, asked) == expected


def test_load_is_what_others_worked_on_the_cores_of_this_process(monkeypatch):
    """By hand: in 4 s of the clock two of three cores worked 6 s, of which this process had 1.5."""
    clock = {"now": 10.0, "own": 1.0}
    core = namedtuple("core", "user nice system idle iowait steal")
    times = [core(1.0, 0.1, 0.2, 7.0, 7.0, 0.3), core(5.0, 5.0, 5.0, 5.0, 5.0, 5.0), core(*[0.0] * 6)]
    monkeypatch.setattr(threads, "_cores", lambda: [0, 2])
    monkeypatch.setattr(threads.psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(threads.time, "process_time", lambda: clock["own"])
    meter = LoadMeter()
    clock |= {"now": 14.0, "own": 2.5}
    times[:] = [core(3.0, 0.2, 0.6, 9.0, 9.0, 0.9), core(9.0, 9.0, 9.0, 9.0, 9.0, 9.0), core(2.9, 0, 0, 4.0, 0, 0)]
    assert meter.others() == pytest.approx((2.0 + 0.1 + 0.4 + 0.6 + 2.9 - 1.5) / 4)


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
    monkeypatch.setattr(util, "PROC", tmp_path / "proc")
    monkeypatch.setattr(util, "CGROUPS", tmp_path / "groups")
    assert util.cpu_quota() == quota


PLAN = """
import os, sys
from kvexp.run import threads
threads._cores, threads.cpu_quota = lambda: [0, 1], lambda: float("inf")
threads.LoadMeter.others = lambda self: 1.0
sys.argv[1:] = ["--dry-run", "model=tiny", "task=sample", "limit=1", *sys.argv[1:]]
from kvexp.cli import run
try:
    run()
finally:
    import torch
    print(torch.get_num_threads(), [name for name in os.environ if name in threads.USERS], threads.machine_load())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP as torch has it on Linux")
@pytest.mark.parametrize(
    ("words", "environ", "count", "spins"),
    [
        ([], {}, 1, 0),
        pytest.param([], {"OMP_NUM_THREADS": "2"}, 2, 300_000, marks=pytest.mark.slow),
        (["threads=2"], {}, 2, 0),  # --dry-run imports torch before it knows of the option
    ],
    ids=["decided", "left alone", "threads=2"],
)
def test_torch_has_the_threads_that_were_decided(tmp_path, words, environ, count, spins):
    """`kvexp run` in a process of its own, beside one that takes a core; OpenMP itself says how its threads wait."""
    env = {name: value for name, value in os.environ.items() if name not in threads.USERS} | environ
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", PLAN, *words, f"outputs_dir={tmp_path}"]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{count} CPU thread(s)" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{count} {list(environ)} 1.0"
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
    said = "busy machine: other processes take 1.0 of 2 cores, so torch has 1 thread (threads=N: so many)"
    assert done.stderr.count(said) == (not environ)


def test_one_command_has_one_number_of_threads(monkeypatch):
    given = []
    monkeypatch.setattr(threads, "_asked", None)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    use_threads(3)
    use_threads(3)
    assert given == [3, 3]
    with pytest.raises(ConfigError, match="threads=2, but this command has threads=3: give each a command"):
        use_threads(2)


def test_rows_record_the_load_and_the_option_is_no_part_of_a_run(tmp_path, monkeypatch, capsys):
    """As torch was imported, or more while the rows were made; nothing where torch was there before the command."""
    monkeypatch.setattr(LoadMeter, "others", lambda self: 1.25)
    monkeypatch.setattr(threads, "_cores", lambda: [0, 1])
    monkeypatch.setattr(threads, "_asked", None)
    before, hashes = torch.get_num_threads(), []
    try:
        for count, at_import, load, words in (
            (2, 0.0, 1.25, ()),
            (1, 2.0, 2.0, ()),
            (2, 0.0, 0.25, ("threads=1",)),
            (2, None, None, ()),
        ):
            torch.set_num_threads(count)
            monkeypatch.setattr(threads, "_load", at_import)
            out = tmp_path / str(len(hashes))
            code, _, said = run_py(monkeypatch, capsys, *small("limit=1", f"outputs_dir={out}", *words))
            assert code == 0, said
            made = list(runs(out))
            assert [row.get("load") for run in made for row in run.rows()] == [load, load]
            assert machine_load() == at_import
            hashes.append({(run.hash, run.labels["setting"]) for run in made})
    finally:
        torch.set_num_threads(before)
    assert len(hashes[0]) == 2 and all(each == hashes[0] for each in hashes)
