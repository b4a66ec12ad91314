"""Ctrl-C: a summary, exit status 130 and no traceback, at any moment; the same command then goes on."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from faults.stage import ENV, ROOT, TWO_THREADS
from faults.sweeps import launchers, lines_of, rows_of, sweep

# Each says where it is, and stays there: at so many rows or texts of the process, or while the weights are read.


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


@pytest.mark.parametrize("launcher", launchers("shared_prefill"))
def test_between_rows(stage, tmp_path, launcher):
    out = tmp_path / "out"
    child = stage.start(sweep(out, launcher=launcher), tmp_path / "log", SLOW_ROW)
    child.until("HERE")
    child.send(signal.SIGINT)
    assert child.wait() == 130
    assert "interrupted: 2 rows were written, " in child.said, "the third one was not done with"
    assert "texts were measured" not in child.said, "answers are written before texts are forced"
    assert "of 2 jobs are complete; all rows written so far are kept; the same command goes on" in child.said
    assert "Traceback" not in child.said
    assert len(lines_of(out)) == 3
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log2")
    assert code == 0, said
    assert sorted(len(rows) for rows in rows_of(out).values()) == [3, 3, 3] and len(lines_of(out)) == 9


def test_between_texts(stage, tmp_path):
    """They are no rows."""
    child = stage.start(sweep(tmp_path / "out", launcher="shared_prefill"), tmp_path / "log", SLOW_TEXT)
    child.until("HERE")
    child.send(signal.SIGINT)
    assert child.wait() == 130
    assert "interrupted: 9 rows were written, 1 texts were measured, 0 of 2 jobs are complete; " in child.said


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [("SIGTERM", 143, "terminated: 2 rows were written, "), ("SIGHUP", 129, "hung up: all")],
)
def test_terminated_by_a_cluster_or_with_its_terminal(stage, tmp_path, number, code, words):
    child = stage.start(sweep(tmp_path / "out", launcher="shared_prefill"), tmp_path / "log", SLOW_ROW)
    child.until("HERE")
    child.send(getattr(signal, number))
    assert child.wait() == code
    assert words in child.said and "all rows written so far are kept; the same command goes on" in child.said
    assert "Traceback" not in child.said and len(lines_of(tmp_path / "out")) == 3


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


@pytest.mark.parametrize("launcher", launchers("basic"))
def test_while_a_model_loads(stage, tmp_path, launcher):
    child = stage.start(sweep(tmp_path / "out", launcher=launcher), tmp_path / "log", SLOW_LOAD)
    child.until("HERE")
    child.send(signal.SIGINT)
    assert child.wait() == 130
    assert "interrupted: 0 rows were written, 0 of 2 jobs are complete; " in child.said
    assert "Traceback" not in child.said


@pytest.mark.parametrize("pause", [0.0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_twice_in_a_row(stage, tmp_path, pause):
    child = stage.start(sweep(tmp_path / "out"), tmp_path / "log", SLOW_ROW)
    child.until("HERE")
    for _ in range(2):
        child.send(signal.SIGINT)
        time.sleep(pause)
    assert child.wait(10) == 130
    assert "interrupted: " in child.said and "Traceback" not in child.said


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
