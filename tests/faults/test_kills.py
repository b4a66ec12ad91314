"""A sweep that is killed at random moments ends with the files of one that is not, byte for byte but for times.

The short form; the long one (30 moments, fresh processes) is `make faults`.
"""

import functools

import pytest

from faults.kills import LAUNCHERS, Killer
from faults.stage import TWO_THREADS


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_and_resumed(stage, tmp_path, launcher):
    killer = Killer(stage.start, launcher, tmp_path, seed=9)
    killer.run(5)
    assert killer.kills == 5


def test_processes_side_by_side_killed_and_resumed(stage, tmp_path):
    start = functools.partial(stage.start, before=TWO_THREADS)
    killer = Killer(start, "shared_prefill", tmp_path, seed=10, ordered=False)
    killer.run(5)
    assert killer.kills == 5
    assert "in 2 processes" in (tmp_path / "undisturbed.log").read_text()
