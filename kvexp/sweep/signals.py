"""Ctrl-C at any moment: a summary and exit status 130, never a traceback; a second one stops at once.

Nothing beyond the standard library is loaded by importing this, so that it holds also while the rest is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from kvexp.session import current
from kvexp.terminal import say

INTERRUPTED = 130  # 128 + SIGINT, what a shell expects
KEPT = "all rows written so far are kept; the same command goes on from there"


def install_handler() -> None:
    """From now on an interrupt ends the process cleanly; where it is ignored (a shell's background), it stays so."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _stop_at_once)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The block ends at the first interrupt, with a summary; before and after it there is nothing to sum up."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _stop)
    try:
        yield
    except KeyboardInterrupt:
        say(f"\ninterrupted: {_summary()}{KEPT}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _stop_at_once)
    raise KeyboardInterrupt


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Rows are on disk when they are written, so there is nothing to wait for."""
    os.write(2, f"\ninterrupted: {KEPT}\n".encode())
    os._exit(INTERRUPTED)


def _summary() -> str:
    """What this command has done so far."""
    session = current()
    if not session.begun:
        return "nothing was begun; "
    jobs = len(session.overrides_of_jobs)
    done = f"{session.jobs_done} of {jobs} jobs are complete; " if jobs else "the run is not complete; "
    texts = f"{session.texts_measured} texts were measured, " if session.texts_measured else ""
    return f"{session.rows_written} rows were written, {texts}{done}"
