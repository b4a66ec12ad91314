"""The printed table: what was compared, the ratio with its spread, bandwidth, distance to the floor, the target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.clock import BUSY, Ratio


@dataclass(frozen=True)
class Target:
    """A ratio has to be at most, or at least, this."""

    limit: float
    side: Literal["<=", ">="]

    def met(self, value: float) -> bool:
        return value <= self.limit if self.side == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.side} {self.limit:g}"


@dataclass(frozen=True)
class Line:
    """what: the comparison, in words; ratio: None with the reason in `note` where there is none.

    by_cpu: the same ratio of the processor's seconds, which others on the machine disturb less. bandwidth: bytes per
    second reached; floor: measured time over the least time the bytes allow. A verdict reached while others used the
    machine carries a question mark.
    """

    what: str
    ratio: Ratio | None
    by_cpu: Ratio | None = None
    bandwidth: float | None = None
    floor: float | None = None
    target: Target | None = None
    note: str = ""

    def cells(self) -> list[str]:
        verdict = ""
        if self.target is not None and self.ratio is not None:
            doubt = "?" if self.note.startswith(BUSY) else ""
            verdict = ("met" if self.target.met(self.ratio.value) else "MISSED") + doubt
        return [
            self.what,
            "" if self.ratio is None else f"{self.ratio.value:.3g}",
            "" if self.ratio is None else f"{self.ratio.low:.3g} to {self.ratio.high:.3g}",
            "" if self.by_cpu is None else f"{self.by_cpu.value:.3g}",
            "" if self.bandwidth is None else f"{self.bandwidth / 1e9:.1f}",
            "" if self.floor is None else f"{self.floor:.3g}",
            "" if self.target is None else str(self.target),
            verdict,
            self.note,
        ]


HEAD = ("what", "ratio", "min to max", "by cpu", "GB/s", "x floor", "target", "verdict", "note")


def table(lines: Iterable[Line], head: Sequence[str] = HEAD) -> str:
    """Markdown, columns aligned; a column nobody fills is left out."""
    rows = [list(head), *(line.cells() for line in lines)]
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    text = ["| " + " | ".join(row[i].ljust(widths[i]) for i in used) + " |" for row in rows]
    return "\n".join([text[0], "|" + "|".join("-" * (widths[i] + 2) for i in used) + "|", *text[1:]])
