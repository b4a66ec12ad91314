"""Several processes on one sweep share its runs: every row is made once, by one of them, and none is torn."""

from collections import Counter

import pytest

from faults.sweeps import LAUNCHERS, lines_of, rows_of, sweep
from kvexp.run.store import runs

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
    first.until("3 examples")
    second = stage.start(sweep(out), tmp_path / "log1")
    second.until("other processes are working on all that is left (2): waiting for them")
    first.send(9)
    assert second.wait() == 0, second.said
    assert sorted(len(rows) for rows in rows_of(out).values()) == [3, 3, 3] and len(lines_of(out)) == 9
