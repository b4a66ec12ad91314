"""A sweep that is killed at random moments ends with the files of one that is not, byte for byte but for times.

The short form, three moments of each kind; five of each launcher are slow, and the long form (30 moments, fresh
processes) is `make faults`.
"""

import functools

import pytest

from faults.kills import Killer
from faults.stage import TWO_THREADS


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
