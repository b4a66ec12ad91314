"""Output that nobody reads any more, as in `kvexp results | head -3`: the process ends, and says nothing."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
from types import FrameType

UNREAD = 141  # 128 + SIGPIPE, what a shell shows for other tools


def watch_pipes() -> None:
    """From now on the process ends quietly where its output goes to a pipe whose reader has left."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, _end_if_unread)
        atexit.register(_flush)  # what is still buffered is written after the last statement


def _end_if_unread(number: int, frame: FrameType | None) -> None:
    """A broken connection to somewhere else (a hub, a worker) raises the same signal and is an exception as before."""
    ours = select.poll()
    for stream in (1, 2):
        ours.register(stream, 0)
    if any(event & select.POLLERR for _, event in ours.poll(0)):
        os._exit(UNREAD)  # rows are on disk when they are written, so there is nothing to wait for


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(UNREAD)
