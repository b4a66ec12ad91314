"""A sweep that is killed at random moments ends with the files of one that is not, byte for byte but for times.

The short form, three moments of each kind; five of each launcher are slow, and the long form (30 moments, fresh
processes) is `make faults`.
"""

import functools

import pytest

from faults.kills import Killer
from faults.stage import TWO_THREADS
from faults.sweeps import lines_of, rows_of, sweep


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
import kvexp.run.limits as limits
import kvexp.generate
limits.WRITE_EVERY_S, limits.FEW_STEPS, limits.WORTH_ROWS = 1e-9, 0, 0
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
