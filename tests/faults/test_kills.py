"""A sweep that is killed or interrupted keeps its rows, and goes on to those of one that is not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest

from faults.stage import ENV, ROOT, TWO_THREADS
from faults.sweeps import lines_of, rows_of, sweep
from kvexp.run.store import runs

SOON = """
import os
import kvexp.run.batches as batches
import kvexp.generate
batches.MAX_UNWRITTEN_ROWS = 1
decode = kvexp.generate.decode_batches
def fatal(*given, **named):
    fatal.calls += 1
    if fatal.calls == 3:
        os.kill(os.getpid(), 9)
    return decode(*given, **named)
fatal.calls = 0
kvexp.generate.decode_batches = fatal
"""


def test_what_was_decoded_before_the_kill_is_kept(stage, tmp_path):
    """Three runs of three examples fit into one group: what its first rows cost is not lost with its last ones."""
    out = tmp_path / "out"
    words = sweep(out, "task.max_new_tokens=24", launcher="shared_prefill")
    code, said = stage.run(words, tmp_path / "log", SOON)
    assert code == -9, said
    assert len(lines_of(out)) == 2
    code, said = stage.run(words, tmp_path / "log2")
    assert code == 0, said
    assert sorted(len(rows) for rows in rows_of(out).values()) == [3, 3, 3] and len(lines_of(out)) == 9


# Several processes on one sweep share its runs: every row is made once, by one of them, and none is torn.


# Each of these runs takes a while, so that all processes are there at once; and each says which rows it made.
SLOW = """
import os, time
from kvexp.run.store import Run
append = Run.append
def slow(self, *rows):
    time.sleep(0.3)
    append(self, *rows)
    for row in rows:
        print("MADE", self.hash, row["example"], flush=True)
Run.append = slow
"""


def test_every_row_is_made_once(stage, tmp_path):
    """shared_prefill shares by groups that have no run in common: here one per task."""
    out = tmp_path / "out"
    words = sweep(out, "task=testbed_summary,testbed_dialogue", "limit=2", launcher="shared_prefill")
    children = [stage.start(words, tmp_path / f"log{i}", SLOW) for i in range(2)]
    for child in children:
        assert child.wait() == 0, child.said
        assert "Traceback" not in child.said
    made = [[line for line in child.said.splitlines() if line.startswith("MADE")] for child in children]
    counts = Counter(line for lines in made for line in lines)
    assert all(run.finished for run in runs(out)) and len(list(runs(out))) == 6
    assert len(lines_of(out)) == 12 and set(counts.values()) == {1}
    assert sum(bool(lines) for lines in made) >= 2, "the work was shared"


def test_one_that_is_killed_leaves_its_run_to_the_others(stage, tmp_path, undisturbed):
    out = tmp_path / "out"
    first = stage.start(sweep(out), tmp_path / "log0", SLOW.replace("0.3", "30"))
    first.until("3 prompts")
    second = stage.start(sweep(out), tmp_path / "log1")
    second.until("other processes are working on all that is left (2): waiting for them")
    first.send(9)
    assert second.wait() == 0, second.said
    assert rows_of(out) == rows_of(undisturbed) and len(lines_of(out)) == 9


# -- ctrl-C: a summary, exit status 130 and no traceback, at any moment; the same command then goes on -----------------


def slow(method, count):
    """Source that lets the `count`-th call of this method of a run wait."""
    return f"""
import time
from kvexp.run.store import Run
write = Run.{method}
def slow(*given):
    write(*given)
    slow.made += 1
    if slow.made == {count}:
        print("HERE", flush=True)
        time.sleep(60)
slow.made = 0
Run.{method} = slow
"""


SLOW_ROW, SLOW_TEXT = slow("append", 3), slow("append_divergence", 2)
SLOW_LOAD = """
import time
import kvexp.hf
def load(*args, **options):
    print("HERE", flush=True)
    time.sleep(60)
kvexp.hf.load_model = load
"""


KEPT = "of 2 jobs are complete; all rows written so far are kept; the same command goes on"
MOMENTS = {
    "between rows": (SLOW_ROW, "SIGINT", 130, f"interrupted: 2 rows were written, 0 {KEPT}", 3),
    "between texts": (
        SLOW_TEXT,
        "SIGINT",
        130,
        f"interrupted: 9 rows were written, 1 KL passes were made, 0 {KEPT}",
        9,
    ),
    "a model loads": (SLOW_LOAD, "SIGINT", 130, f"interrupted: 0 rows were written, 0 {KEPT}", 0),
    "a cluster's preemption": (SLOW_ROW, "SIGTERM", 143, f"terminated: 2 rows were written, 0 {KEPT}", 3),
    "its terminal is closed": (SLOW_ROW, "SIGHUP", 129, "hung up: all rows written so far are kept", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_it_with_a_summary(stage, tmp_path, moment):
    """The row at which it stands is on disk and not counted yet; answers are written before texts are forced."""
    before, number, code, words, lines = MOMENTS[moment]
    out = tmp_path / "out"
    child = stage.start(sweep(out, launcher="shared_prefill"), tmp_path / "log", before)
    child.until("HERE")
    child.send(getattr(signal, number))
    assert child.wait() == code
    assert words in child.said and "Traceback" not in child.said, child.said
    assert len(lines_of(out)) == lines


def test_processes_side_by_side(stage, tmp_path):
    """They end with the command, whatever they are at."""
    out = tmp_path / "out"
    child = stage.start(sweep(out, launcher="shared_prefill"), tmp_path / "log", TWO_THREADS + SLOW_ROW)
    child.until("HERE")
    child.send(signal.SIGINT)
    assert child.wait() == 130
    assert re.search("rows were written, .*0 of 2 jobs are complete; all rows written so far are kept", child.said)
    assert "Traceback" not in child.said and "in 2 processes" in child.said
    code, said = stage.run(sweep(out, launcher="shared_prefill"), tmp_path / "log2", TWO_THREADS)
    assert code == 0, said
    assert sorted(len(rows) for rows in rows_of(out).values()) == [3, 3, 3] and len(lines_of(out)) == 9


def test_a_summary_that_hangs_is_ended_by_the_second_one(stage, tmp_path):
    hang = "import time, kvexp.run.jobs as i\ni.summary = lambda _: print('HANGS', flush=True) or time.sleep(60)"
    child = stage.start(sweep(tmp_path / "out"), tmp_path / "log", SLOW_ROW + hang)
    child.until("HERE")
    child.send(signal.SIGINT)
    child.until("HANGS")
    child.send(signal.SIGINT)
    assert child.wait(10) == 130
    assert "interrupted: all rows written so far are kept" in child.said and "Traceback" not in child.said


def test_while_everything_is_imported(tmp_path):
    """A process of its own, told where it is by the one module that is imported first."""
    code = (
        "import signal, sys, threading, os, time, runpy\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import kvexp.run.jobs as i\n"
        "watch = i.install_handler\n"
        "def told():\n    watch(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "i.install_handler = told\n"
        "sys.argv = ['run.py']\n"
        "runpy.run_path('run.py', run_name='__main__')\n"
    )
    env = os.environ | ENV | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.strip().startswith("interrupted: ") and "Traceback" not in done.stderr


def test_where_interrupts_are_ignored_they_stay_so(stage, tmp_path):
    """A shell's background job is not to end when somebody presses Ctrl-C at another one."""
    ignore = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    child = stage.start(sweep(tmp_path / "out", "limit=1"), tmp_path / "log", ignore)
    child.until("answers")
    child.send(signal.SIGINT)
    assert child.wait() == 0
