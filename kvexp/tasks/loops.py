"""Repetition in a text: the share of n-grams that were there before, and where it begins to go in circles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COPIES = 3  # of a passage, one directly behind the other, are a loop
LEAST_WORDS = 12  # that the copies of a loop have together: "no, no, no" is none
LONGEST = 128  # words of a passage that are looked at


@dataclass(frozen=True)
class Loop:
    """A passage of `period` words that begins at word `start` and comes at least COPIES times in a row."""

    start: int
    period: int


def repeated_share(words: Sequence[str], n: int = 4) -> float:
    """Share of a text's n-grams that stood in it before, 0 to 1; 0 for a text of fewer than n words."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def first_loop(words: Sequence[str]) -> Loop | None:
    """The loop that begins first, of several that begin there the shortest; None where there is none."""
    found: list[tuple[int, int]] = []
    for period in range(1, min(LONGEST, len(words) // COPIES) + 1):
        needed = max((COPIES - 1) * period, LEAST_WORDS - period)
        run = 0  # neighbouring words that are the same one period later
        for place in range(len(words) - period):
            run = run + 1 if words[place] == words[place + period] else 0
            if run >= needed:
                found.append((place - run + 1, period))
                break
    return Loop(*min(found)) if found else None
