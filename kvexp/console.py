"""rich's console and progress bars for text from models, data and file names: only our own colours reach a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.segment import Segment

from kvexp.session import Session
from kvexp.terminal import say, visible

EVERY_S = 10.0  # between plain lines


class Console(rich.console.Console):
    """rich.console.Console; control characters of whatever is printed are shown (`kvexp.terminal.visible`)."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Cells of a table come through here before the table sets their widths, so columns stay straight."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class Progress:
    """Context manager around the examples of a run, or whatever else is counted; `advance` after each.

    session: counts the rows written; None where what is counted are no rows.
    """

    def __init__(
        self, title: str, total: int, done: int, what: str = "examples", session: Session | None = None
    ) -> None:
        self.session = session
        self.title, self.total, self.done, self.first, self.what = title, total, done, done, what
        self.start = self.last = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self.bar = Bar(*columns, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console())
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, completed=self.done, rate="")
        else:
            say(f"{self.title}: {self.total - self.done} {self.what}", flush=True)
        return self

    def advance(self, count: int = 1) -> None:
        """So many more are done: rows are on disk."""
        self.done += count
        if self.session is not None:
            self.session.rows_written += count
        now = time.monotonic()
        rate = (self.done - self.first) / max(now - self.start, 1e-9)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, rate=f"{rate:.2g}/s")
        elif now - self.last > EVERY_S:
            self.last = now
            left = (self.total - self.done) / rate
            say(f"{self.title}: {self.done}/{self.total}, {rate:.2g}/s, {left:.0f} s left", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
