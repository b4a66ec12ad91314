"""Time limits for work that may hang: an exception where Python still runs, an end of the process where it does not."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError

GRACE_S = 10.0  # for Python code to notice the alarm, before the work counts as stuck inside a library
LONGEST_S = 1e9  # thirty years: clocks take no number much larger
HUNG = 124  # exit status of a process that could not be brought back: that of timeout(1)


class Overdue(BaseException):
    """The time is up. No `Exception`: code that goes on after any error must not go on after this one."""


@contextlib.contextmanager
def deadline(seconds: float | None, stuck: Callable[[], None]) -> Iterator[None]:
    """Overdue in the block after so many seconds, on a clock that nobody sets; None: no limit.

    Work that does not come back from a library's call cannot be interrupted: then, after GRACE_S more, `stuck` is
    called in another thread, and is to end the process (`start_anew`).
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("timeout_s needs a run to have its process's main thread, which this launcher does not give")
    seconds = min(seconds, LONGEST_S)
    inside = True

    def ring(*_: Any) -> None:
        if inside:
            raise Overdue

    before = signal.signal(signal.SIGALRM, ring)
    watchdog = threading.Timer(seconds + GRACE_S, stuck)
    watchdog.daemon = True
    try:
        watchdog.start()
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again and again: an exception in a callback is lost
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watchdog.cancel()


def start_anew() -> None:
    """End this process, whatever its other threads do; the command line begins again in its place, if it was one."""
    sys.stdout.flush()
    sys.stderr.flush()
    line = [Path(word).name for word in sys.orig_argv[:4]]
    if "run.py" in line[:3] or ("kvexp", "run") in itertools.pairwise(line):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os._exit(HUNG)
