"""What a command prints: visible text, errors and warnings as lines, sizes and times."""

from __future__ import annotations

import atexit
import functools
import math
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import ParamSpec, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment


def size(value: float | None) -> str:
    """Bytes in binary units: 1536 -> 1.50 KiB; "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return (
                f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
            )
        value /= 1024
    return f"{value:.3g} TiB"


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 without tab and line feed, DEL, C1


def visible(text: str) -> str:
    r"""The text with its control characters as Python writes them: ESC is `\x1b`. Tabs and line feeds stay.

    A terminal takes ESC, BEL, backspace and the C1 codes of a model's answer as commands: to rename the window, to
    write over lines that are there, to send keys. Whatever a command prints goes through `say` or `Console`.
    """
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def say(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, of visible text."""
    print(*(visible(str(word)) for word in words), end=end, file=file or sys.stdout, flush=flush)


P = ParamSpec("P")


def tells_errors(*kinds: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorator of a command: errors of these kinds are a line, an OSError by its reason, and the exit code 2."""

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def command(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except kinds as error:
                say(f"error: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
                return 2

        return command

    return decorate


def tells_warnings(main: Callable[P, int]) -> Callable[P, int]:
    """Decorator of a command: each warning is a line."""

    @functools.wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", file=sys.stderr)
            warnings.simplefilter("always")
            return main(*args, **kwargs)

    return command


UNREAD = 141  # 128 + SIGPIPE, what a shell shows for other tools


def watch_pipes() -> None:
    """From now on the process ends quietly where its output goes to a pipe whose reader has left, as in
    `kvexp results | head -3`.
    """
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


class Console(rich.console.Console):
    """rich.console.Console; control characters of whatever is printed are shown (`visible`), so that only kvexp's own
    colours reach a terminal.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Cells of a table come through here before the table sets their widths, so columns stay straight."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def duration(seconds: float) -> str:
    """80 s, 12 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
