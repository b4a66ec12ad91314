"""Where a sweep is, as a person follows it: which job of how many, and how long the rest takes."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from kvexp.session import Session
from kvexp.terminal import say


def plan_jobs(session: Session, overrides: Sequence[str], params: dict[str, Any]) -> None:
    """Note the jobs Hydra's basic sweeper makes of these: params of the configuration, then the command line's."""
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
    session.overrides_of_jobs = [list(words) for words in itertools.product(*varied)]


@contextlib.contextmanager
def job_progress(session: Session, number: int | None, overrides: Sequence[str]) -> Iterator[None]:
    """Around one job: say which it is (number from 0; None for a single run) and measure it."""
    if number is not None:
        say(job_line(session, number, overrides), flush=True)
    start, rows = time.monotonic(), session.rows_written
    yield
    session.jobs_done += 1  # well or with an error that was recorded
    if session.rows_written > rows:
        session.job_seconds.append(time.monotonic() - start)


def job_line(session: Session, number: int, overrides: Sequence[str]) -> str:
    """ "[3/10] h2o kv_ratio=0.5, about 4 min left"."""
    jobs, seconds = session.overrides_of_jobs, session.job_seconds
    known = number < len(jobs)
    words = jobs[number] if known else overrides
    place = f"[{number + 1}/{len(jobs)}]" if known else f"[{number + 1}]"
    line = " ".join([place, *(word.removeprefix("method=") for word in words)])
    if not known or not seconds:
        return line
    left = (len(jobs) - number) * statistics.median(seconds)
    return f"{line}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """80 s, 12 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
