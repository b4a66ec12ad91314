"""Progress of a command: a bar on a terminal, elsewhere a line a minute, and the time that is left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from kvexp.util.output import Console, duration, say

EVERY_S = 60.0  # between plain lines
TITLE = 32  # letters in front of a bar
REDRAW_S = 0.2  # between two changes of a bar
KNOWN = 0.02  # of a kind of work, done: from then on it is known how long the rest takes
LARGE = 0.1  # of a kind of work: a first piece of it that tells how long the others take
# Kinds of work of a run: prompts are read, answers written, texts forced to measure their KL from the full cache.
PROMPTS, ANSWERS, TEXTS = "prompts", "answers", "KL passes"
Listener = Callable[[str, float], None]
_listeners: list[Listener] = []  # to work as it is done, the innermost last


def worked(kind: str, count: float) -> None:
    """Report to the innermost `Progress`, if any, that so many prompts, answers or texts are done: a part of one too.

    Called after every decode step, in timed runs too: a listener has to be quick.
    """
    if _listeners:
        _listeners[-1](kind, count)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let `worked` call this listener in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Progress:
    """Context manager around the examples of a run, or whatever else is counted; `advance` after each.

    work: how many of each kind are to be done, where kinds take times of their own: prompts are read, then answers
    written, then texts forced. The time left is shown once each kind's pace is known by some of it (`worked` reports
    parts of an answer); forced texts count as fast as answers until then.
    """

    def __init__(
        self, title: str, total: int, done: int, what: str = "examples", work: Mapping[str, int] | None = None
    ) -> None:
        self.title, self.total, self.done, self.what = title, total, done, what
        # A kind with nothing to do has no pace: what is said of it (a conversation forces texts) is the last kind's.
        self.work = {kind: count for kind, count in (work or {}).items() if count} or {what: total - done}
        self.made = dict.fromkeys(self.work, 0.0)  # of each kind, parts included
        self.written = dict.fromkeys(self.work, 0)
        self.spent = dict.fromkeys(self.work, 0.0)  # seconds
        self.first: dict[str, tuple[float, float]] = {}  # seconds of the first piece of each kind, and how much it was
        self.last = self.shown = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(listening(self._worked))
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), TaskProgressColumn())
            self.bar = Bar(*columns, TextColumn("{task.fields[words]}", markup=False), console=Console())
            self.bar.start()
            title = self.title if len(self.title) <= TITLE else f"{self.title[: TITLE - 1]}…"
            self.task = self.bar.add_task(title, total=1.0, completed=0, words=self._counts())
        else:
            say(f"{self.title}: {self._counts(done=False)}", flush=True)
        return self

    def advance(self, count: int = 1, kind: str | None = None) -> None:
        """Count so many more as done, whose rows are on disk. kind: of `work`."""
        kind = kind or next(iter(self.work))
        self.done += count
        self.written[kind] += count
        self._worked(kind, max(0.0, self.written[kind] - self.made[kind]))

    def seconds_left(self) -> float | None:
        """Seconds that the rest takes; None until that is known."""
        done, pace = self.made, dict[str, float]()
        for kind, (seconds, count) in self.first.items():
            if done[kind] >= max(2 * count, KNOWN * self.work[kind]):
                pace[kind] = (self.spent[kind] - seconds) / (done[kind] - count)
            elif count >= LARGE * self.work[kind]:
                pace[kind] = self.spent[kind] / done[kind]
        if TEXTS in self.work and TEXTS not in pace and ANSWERS in pace:
            pace[TEXTS] = pace[ANSWERS]
        left = {kind: max(0.0, self.work[kind] - done[kind]) for kind in self.work}
        later = [1 - done[kind] / self.work[kind] for kind in (ANSWERS, TEXTS) if self.work.get(kind)]
        if PROMPTS in left and later and min(later) < 1:  # prompts are read before; some kinds of task tell of none
            left[PROMPTS] = min(left[PROMPTS], max(later) * self.work[PROMPTS]) if done[PROMPTS] else 0.0
        if any(left[kind] and kind not in pace for kind in left):
            return None
        return sum(count * pace[kind] for kind, count in left.items() if count)

    def _worked(self, kind: str, count: float) -> None:
        """Listener of `worked`; the time since the last call was this kind's."""
        if kind not in self.work:
            kind, count = next(reversed(self.work)), 0.0
        now = time.monotonic()
        self.spent[kind] += now - self.last
        self.last = now
        self.made[kind] = min(float(self.work[kind]), self.made[kind] + count)
        if count:
            self.first.setdefault(kind, (self.spent[kind], self.made[kind]))
        if now - self.shown < (EVERY_S if self.bar is None else REDRAW_S):
            return
        self.shown = now
        left = self.seconds_left()
        about = "about" if any(self.written.values()) else "at most"  # answers may end before max_new_tokens
        time_left = "time not known yet" if left is None else f"{about} {duration(left)} left"
        if self.bar is None:
            say(f"{self.title}: {self._counts()}, {time_left}", flush=True)
            return
        spent = sum(self.spent.values())
        share = self.done / max(1, self.total) if left is None else spent / max(spent + left, 1e-9)
        # A narrow terminal cuts the end off: the time left stands first.
        self.bar.update(self.task, completed=share, words=f"{time_left}, {self._counts()}")

    def _counts(self, *, done: bool = True) -> str:
        """ "12/20 prompts, 30/76 answers"; without what is done, "20 prompts, 76 answers"."""
        if list(self.work) == [self.what]:
            return f"{self.done}/{self.total} {self.what}" if done else f"{self.total - self.done} {self.what}"
        counts = ((kind, count, f"{int(self.made[kind])}/" if done else "") for kind, count in self.work.items())
        return ", ".join(f"{before}{count} {kind}" for kind, count, before in counts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.bar is not None:
            if kind is None:
                self.bar.update(self.task, completed=1.0, words=self._counts())
            self.bar.stop()
