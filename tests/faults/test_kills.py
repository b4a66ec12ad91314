"""A sweep that is killed at random moments ends with the files of one that is not, byte for byte but for times.

The short form, three moments of each kind; five of each launcher are slow, and the long form (30 moments, fresh
processes) is `make faults`.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from faults.kills import Killer
from faults.stage import TWO_THREADS
from faults.sweeps import LAUNCHERS, lines_of, rows_of, sweep
from kvexp.run.store import runs

# A sweep that is killed at random moments ends with the files of one that is not, byte for byte but for times.
#
# The short form, three moments of each kind; five of each launcher are slow, and the long form (30 moments, fresh
# processes) is `make faults`.


@pytest.mark.parametrize(
    ("launcher", "kills"),
    [
        ("shared_prefill", 3),
        pytest.param("shared_prefill", 5, marks=pytest.mark.slow),
        pytest.param("basic", 5, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed(stage, tmp_path, launcher, kills):
    killer = Killer(stage.start, launcher, tmp_path, seed=9)
    killer.run(kills)
    assert killer.kills == kills


@pytest.mark.parametrize("kills", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_processes_side_by_side_killed_and_resumed(stage, tmp_path, kills):
    start = functools.partial(stage.start, before=TWO_THREADS)
    killer = Killer(start, "shared_prefill", tmp_path, seed=10, ordered=False)
    killer.run(kills)
    assert killer.kills == kills
    assert "in 2 processes" in (tmp_path / "undisturbed.log").read_text()


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


@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        ("shared_prefill", 2),
        pytest.param("basic", 2, marks=pytest.mark.slow),  # two of it share a sweep in the next test too
        *(pytest.param(launcher, 4, marks=pytest.mark.slow) for launcher in LAUNCHERS),
    ],
)
def test_every_row_is_made_once(stage, tmp_path, launcher, count):
    """shared_prefill shares by groups that have no run in common: here one per task."""
    out = tmp_path / "out"
    words = sweep(out, "task=testbed_summary,testbed_dialogue", "limit=2", launcher=launcher)
    children = [stage.start(words, tmp_path / f"log{i}", SLOW) for i in range(count)]
    for child in children:
        assert child.wait() == 0, child.said
        assert "Traceback" not in child.said
    made = [[line for line in child.said.splitlines() if line.startswith("MADE")] for child in children]
    counts = Counter(line for lines in made for line in lines)
    assert all(run.finished for run in runs(out)) and len(list(runs(out))) == 6
    assert len(lines_of(out)) == 12 and set(counts.values()) == {1}
    assert sum(bool(lines) for lines in made) >= 2, "the work was shared"


def test_one_that_is_killed_leaves_its_run_to_the_others(stage, tmp_path):
    out = tmp_path / "out"
    first = stage.start(sweep(out), tmp_path / "log0", SLOW.replace("0.3", "30"))
    first.until("3 prompts")
    second = stage.start(sweep(out), tmp_path / "log1")
    second.until("other processes are working on all that is left (2): waiting for them")
    first.send(9)
    assert second.wait() == 0, second.said
    assert sorted(len(rows) for rows in rows_of(out).values()) == [3, 3, 3] and len(lines_of(out)) == 9
