"""One line per compared field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Report:
    """Results of one file: field -> (passed, what was seen)."""

    lines: list[tuple[str, bool, str]] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)

    def exact(self, name: str, ours: Any, theirs: Any) -> None:
        """Equal in every element; shapes too."""
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if ours.shape != theirs.shape:
            self.lines.append((name, False, f"shape {ours.shape} instead of {theirs.shape}"))
            return
        wrong = int((ours != theirs).sum())
        self.lines.append((name, wrong == 0, f"{wrong} of {theirs.size} differ"))

    def close(self, name: str, ours: Any, theirs: Any, atol: float = 1e-4, rtol: float = 1e-5) -> None:
        """Within atol + rtol relative wherever `theirs` is a number; elsewhere ours must not be one either."""
        ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
        if ours.shape != theirs.shape:
            self.lines.append((name, False, f"shape {ours.shape} instead of {theirs.shape}"))
            return
        same_gaps = bool((np.isnan(ours) == np.isnan(theirs)).all())
        number = ~np.isnan(theirs)
        error = np.abs(ours - theirs)[number]
        good = same_gaps and bool((error <= atol + rtol * np.abs(theirs[number])).all())
        worst = float(error.max()) if error.size else 0.0
        self.lines.append((name, good, f"max difference {worst:.2g}" + ("" if same_gaps else ", gaps differ")))

    def overlap(self, name: str, ours: Any, theirs: Any, least: float) -> None:
        """Share of the larger of two sets that is in both; for half-precision recordings."""
        ours, theirs = np.asarray(ours, bool), np.asarray(theirs, bool)
        if ours.shape != theirs.shape:
            self.lines.append((name, False, f"shape {ours.shape} instead of {theirs.shape}"))
            return
        share = float((ours & theirs).sum() / max(1, ours.sum(), theirs.sum()))
        self.lines.append((name, share >= least, f"overlap {share:.4f}, least {least}"))

    def skip(self, name: str, why: str) -> None:
        """A field that was looked at and not compared."""
        self.skipped.add(name)
        self.lines.append((name, True, f"not compared: {why}"))

    @property
    def passed(self) -> bool:
        return len(self.lines) > len(self.skipped) and all(ok for _, ok, _ in self.lines)

    def __str__(self) -> str:
        width = max((len(name) for name, _, _ in self.lines), default=0)
        return "\n".join(f"  {'pass' if ok else 'FAIL'}  {name:<{width}}  {seen}" for name, ok, seen in self.lines)
