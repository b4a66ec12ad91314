"""Exhibits made one after the other, or by several processes side by side: what became of each, errors included."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from experiments.exhibits import HERE, load
from experiments.make import Asked, Made, make
from kvexp.errors import ConfigError

MEASURED = HERE / "measured.json"


def results(names: Sequence[str], asked: Asked, workers: int) -> Iterator[tuple[str, Made | str]]:
    """(name, what was made or why it could not be) as each is ready; those that took longest when recorded come first.

    Processes that want the same run wait for each other (`kvexp.record`): none is made twice.
    """
    if workers == 1 or len(names) == 1:
        yield from ((name, attempt(name, asked)) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    with ProcessPoolExecutor(workers, spawn, initializer=_share, initargs=(workers,)) as pool:
        waiting = {pool.submit(attempt, name, asked): name for name in longest_first(names, asked.scale)}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def attempt(name: str, asked: Asked) -> Made | str:
    """One exhibit. A defect of one, told in full, keeps no other from being made."""
    try:
        return make(load(name), asked)
    except ConfigError as error:
        return f"error: {error}"
    except Exception:
        return traceback.format_exc()


def longest_first(names: Sequence[str], scale: str) -> list[str]:
    """So that no process is left alone with the longest at the end."""
    known = json.loads(MEASURED.read_text("utf-8")).get(scale, {}) if MEASURED.exists() else {}
    return sorted(names, key=lambda name: -(known.get(name, {}).get("seconds") or 0))


def _share(workers: int) -> None:
    """The cores divided among the processes."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
