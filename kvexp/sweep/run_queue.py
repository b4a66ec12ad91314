"""Several processes on one sweep: each takes the runs that no other is at, and waits only where none is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvexp.errors import ConfigError
from kvexp.record import Run, identity
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.config.settings import Settings

Item = TypeVar("Item")

POLL_S = 0.5


def in_turn(items: Sequence[tuple[Item, Sequence[Settings]]], work: Callable[[Item], bool | None]) -> None:
    """Every item's work, those first whose runs nobody else is at, else in order; what returns False comes again."""
    left, told = list(items), False
    while left:
        place = next((place for place, (_, runs) in enumerate(left) if free(runs)), None)
        if place is not None:
            item = left.pop(place)
            if work(item[0]) is False:  # somebody was faster
                left.append(item)
            continue
        if not told:
            say(f"other processes are working on all that is left ({len(left)}): waiting for them", flush=True)
            told = True
        time.sleep(POLL_S)


def free(wanted: Sequence[Settings]) -> bool:
    """Whether nobody works on these runs or their baselines now; a moment later somebody may."""
    each = (one for asked in wanted for one in (asked, _baseline(asked)))
    runs = {(one.outputs_dir / identity(one.identity), one.shard.name) for one in each}
    return not any(_claimed(path, part) for path, part in runs)


def _baseline(settings: Settings) -> Settings:
    return settings if settings.is_baseline else settings.baseline()


def _claimed(path: Path, part: str | None) -> bool:
    try:
        with Run.load(path).claim(timeout=0, part=part):
            return False
    except TimeoutError:
        return True
    except (ConfigError, OSError):  # not there yet, or not to be used: its own turn will say so
        return False
