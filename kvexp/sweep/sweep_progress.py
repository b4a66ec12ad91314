"""The jobs of a sweep as a person follows them: which one of how many, what tells it apart, how long the rest takes."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from kvexp.evaluate.progress import Progress
from kvexp.terminal import say


class Sweep:
    """Filled in when a sweep starts; a single run has no jobs to count."""

    def __init__(self) -> None:
        self.jobs: list[list[str]] = []
        self.complete = 0  # jobs that ended, well or with an error that was recorded
        self.deferring = False  # whether a job that another process is at may be left for the end
        self.seconds: list[float] = []  # of the jobs that made rows: one whose rows were there already tells nothing

    def plan(self, overrides: Sequence[str], params: dict[str, Any]) -> None:
        """The jobs Hydra's basic sweeper makes of these: params of the configuration, then the command line's."""
        words = [f"{key}={value}" for key, value in params.items()] + list(overrides)
        values: dict[str, list[str]] = {}
        try:
            for override in OverridesParser.create().parse_overrides(words):
                swept = override.is_sweep_override()
                values[override.get_key_element()] = list(override.sweep_string_iterator()) if swept else [""]
        except HydraException:  # glob() and the like, which need the whole of Hydra: the jobs are numbered all the same
            return
        # A key of one value multiplies nothing and tells no job apart.
        varied = [[f"{key}={one}" for one in each] for key, each in values.items() if len(each) > 1]
        self.jobs = [list(words) for words in itertools.product(*varied)]

    @contextlib.contextmanager
    def job(self, number: int | None, overrides: Sequence[str]) -> Iterator[None]:
        """Around one job: say which it is (number from 0; None for a single run) and measure it."""
        if number is not None:
            say(self.line(number, overrides), flush=True)
        start, rows = time.monotonic(), Progress.made
        yield
        self.complete += 1
        if Progress.made > rows:
            self.seconds.append(time.monotonic() - start)

    def line(self, number: int, overrides: Sequence[str]) -> str:
        """ "[3/10] h2o kv_ratio=0.5, about 4 min left"."""
        known = number < len(self.jobs)
        words = self.jobs[number] if known else overrides
        place = f"[{number + 1}/{len(self.jobs)}]" if known else f"[{number + 1}]"
        line = " ".join([place, *(word.removeprefix("method=") for word in words)])
        if not known or not self.seconds:
            return line
        left = (len(self.jobs) - number) * statistics.median(self.seconds)
        return f"{line}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """80 s, 12 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


SWEEP = Sweep()
