"""A sweep that is killed at random moments ends with the files of one that is not, byte for byte but for times.

The long form, 30 moments of each kind, is `make faults`.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from faults.kills import Killer
from faults.stage import TWO_THREADS
from faults.sweeps import lines_of, rows_of, sweep
from kvexp.run.store import runs


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed(stage, tmp_path, processes):
    start = functools.partial(stage.start, before=TWO_THREADS) if processes == 2 else stage.start
    killer = Killer(start, "shared_prefill", tmp_path, seed=8 + processes, ordered=processes == 1)
    killer.run(3)
    assert killer.kills == 3
    assert ("in 2 processes" in (tmp_path / "undisturbed.log").read_text()) is (processes == 2)


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


def test_one_that_is_killed_leaves_its_run_to_the_others(stage, tmp_path):
    out = tmp_path / "out"
    first = stage.start(sweep(out), tmp_path / "log0", SLOW.replace("0.3", "30"))
    first.until("3 prompts")
    second = stage.start(sweep(out), tmp_path / "log1")
    second.until("other processes are working on all that is left (2): waiting for them")
    first.send(9)
    assert second.wait() == 0, second.said
    assert sorted(len(rows) for rows in rows_of(out).values()) == [3, 3, 3] and len(lines_of(out)) == 9
