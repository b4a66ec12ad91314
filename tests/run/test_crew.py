"""Processes that share out batches: everything is done once, what fails is said, and none outlives the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from kvexp.run.workers import ForkPool, num_workers
from kvexp.util.errors import CacheError

forks = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


class Note:
    """What the processes did, in a file each line of which is one write."""

    def __init__(self, path):
        self.path = path

    def __call__(self, text):
        with open(self.path, "a") as file:
            file.write(text + "\n")

    @property
    def lines(self):
        return self.path.read_text().splitlines() if self.path.exists() else []


@pytest.fixture
def note(tmp_path):
    return Note(tmp_path / "note")


def rows(crew, items):
    return sum(1 for _ in crew.imap(items))


@forks
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_every_item_once(size, note):
    def task(item):
        for _ in range(item):
            note(f"{item} {os.getpid()} {torch.get_num_threads()}")
            yield

    before = set(multiprocessing.active_children())
    with ForkPool(size, task) as crew:
        assert rows(crew, [3, 0, 1, 4, 2]) == 10
        assert rows(crew, [2]) == 2 and rows(crew, []) == 0
    done = [line.split() for line in note.lines]
    assert Counter(item for item, _, _ in done) == {"3": 3, "1": 1, "4": 4, "2": 4}
    assert {threads for _, _, threads in done} == {"1"}
    assert (str(os.getpid()) in {pid for _, pid, _ in done}) is (size == 1)
    assert not set(multiprocessing.active_children()) - before


@forks
def test_they_work_side_by_side(note):
    def task(item):
        note(f"begun {item}")
        end = time.monotonic() + 60
        while sum(line.startswith("begun") for line in note.lines) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        note(f"seen {len(note.lines)}")
        yield

    with ForkPool(2, task) as crew:
        assert rows(crew, ["a", "b"]) == 2
    assert len(note.lines) == 4


@forks
def test_what_is_raised_is_raised_here_when_the_others_are_done(note):
    def task(item):
        if item == 0:
            yield
            raise CacheError("this prompt is no prompt")
        time.sleep(0.5)
        note(f"done {item}")
        yield

    with pytest.raises(CacheError, match="this prompt is no prompt") as raised, ForkPool(2, task) as crew:
        rows(crew, list(range(6)))
    assert "in task" in str(raised.value.__cause__), "where it came from"
    assert note.lines == ["done 1"], "what was under way is finished, nothing new is begun"


@forks
def test_an_error_of_another_kind_comes_as_words():
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__("odd words")
            self.stream = sys.stdout  # which no pipe can carry

    def task(item):
        raise Odd(1, 2)
        yield

    with pytest.raises(RuntimeError, match="Odd: odd words"), ForkPool(2, task) as crew:
        rows(crew, [1])


@forks
@pytest.mark.parametrize("item", [0, 3])
def test_a_process_that_is_killed_leaves_its_item(item, note, capfd):
    def task(one):
        if one == item:
            os.kill(os.getpid(), signal.SIGKILL)
        note(f"done {one}")
        yield

    with ForkPool(2, task) as crew:
        assert rows(crew, list(range(6))) == 5
    assert sorted(note.lines) == [f"done {one}" for one in range(6) if one != item]
    assert capfd.readouterr().err.count("one of 2 processes ended (-9); what it was at is made again") == 1


@forks
def test_all_killed(capfd):
    def task(item):
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    with ForkPool(2, task) as crew:
        assert rows(crew, list(range(6))) == 0
    assert capfd.readouterr().err.count("ended (-9)") == 2


@forks
def test_whoever_stops_reading_stops_them(note):
    def task(item):
        yield
        note(str(os.getpid()))
        time.sleep(60)

    begun = time.monotonic()
    before = set(multiprocessing.active_children())
    crew = ForkPool(2, task)
    with crew:
        next(crew.imap([1, 2]))
        assert len(set(multiprocessing.active_children()) - before) == 2
    assert time.monotonic() - begun < 30 and not set(multiprocessing.active_children()) - before


@forks
def test_none_outlives_its_parent(stage, tmp_path, note):
    """A killed parent cannot end them; they end with it, in the middle of what they do."""
    program = f"""
import os, time
from kvexp.run.workers import ForkPool
def task(item):
    with open({str(note.path)!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(60)
    yield
with ForkPool(2, task) as crew:
    list(crew.imap([1, 2]))
"""
    parent = stage.start([], tmp_path / "log", program)
    end = time.monotonic() + 120
    while len(note.lines) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    parent.send(signal.SIGKILL)
    parent.wait()
    pids = [int(line) for line in note.lines]
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(pids) == 2 and not any(map(_alive, pids))


def _alive(pid):
    """Running: not gone, and no zombie that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_num_workers(monkeypatch):
    """As many as torch has threads, and none where a forked process would be in trouble."""
    model = nn.Linear(2, 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert num_workers(model) == (5 if sys.platform == "linux" else 1)
    assert num_workers(nn.Linear(2, 2, device="meta")) == 1
    found = []
    other = threading.Thread(target=lambda: found.append(num_workers(model)))
    other.start()
    other.join()
    assert found == [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert num_workers(model) == 1
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert num_workers(model) == 1
