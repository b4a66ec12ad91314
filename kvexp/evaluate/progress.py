"""Progress of one run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import ClassVar

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kvexp.console import Console
from kvexp.terminal import say

EVERY_S = 10.0  # between plain lines


class Progress:
    """Context manager around the examples of a run, or whatever else is counted; `advance` after each."""

    made: ClassVar[int] = 0  # rows of this process, over all its runs

    def __init__(self, title: str, total: int, done: int, what: str = "examples") -> None:
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
        Progress.made += count
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
