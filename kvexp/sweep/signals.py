"""Ctrl-C or SIGTERM at any moment: a summary and exit status 130 or 143, no traceback; a second one stops at once.

Nothing beyond the standard library is loaded by importing this, so that it holds also while the rest is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from kvexp.session import Session, current
from kvexp.terminal import say

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM: what a shell expects
KEPT = "all rows written so far are kept; the same command goes on from there"
# A cluster's preemption terminates, a terminal that is closed hangs up: nobody reads a summary then.
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    WORDS[signal.SIGHUP] = "hung up"


def install_handler() -> None:
    """From now on these signals end the process cleanly; one that is ignored (a shell's background, nohup) stays so."""
    for number in WORDS:
        if _is_default(number):
            signal.signal(number, _stop_at_once)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The block ends at the first interrupt, with a summary; before and after it there is nothing to sum up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is _stop_at_once or _is_default(number):
            signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args in {(each,) for each in WORDS} else signal.SIGINT
        say(f"\n{WORDS[number]}: {_summary()}{KEPT}", file=sys.stderr, flush=True)
        sys.exit(128 + number)
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by something else than Python
                signal.signal(number, handler)


def _is_default(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _stop_at_once)
    signal.signal(signal.SIGTERM, _stop_at_once)
    raise KeyboardInterrupt(signal.Signals(number))


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Rows are on disk when they are written, so there is nothing to wait for."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"\n{WORDS[signal.Signals(number)]}: {KEPT}\n".encode())
    os._exit(128 + number)


def _summary() -> str:
    return summary(current())


def summary(session: Session) -> str:
    """What a command has done so far."""
    if not session.begun:
        return "nothing was begun; "
    jobs = len(session.overrides_of_jobs)
    done = f"{session.jobs_done} of {jobs} jobs are complete; " if jobs else "the run is not complete; "
    texts = f"{session.texts_measured} texts were measured, " if session.texts_measured else ""
    return f"{session.rows_written} rows were written, {texts}{done}"
