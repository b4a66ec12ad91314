"""Texts of a length in tokens, for tasks that know no tokenizer but are handed a way to count."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvexp.tasks.metrics import is_unspaced

_WORD, _CHARACTER = re.compile(r"\S+"), re.compile(r"\S")


def word_ends(text: str) -> list[int]:
    """Where the words of a text end; its characters, where it is written without spaces between words."""
    return [word.end() for word in (_CHARACTER if is_unspaced(text) else _WORD).finditer(text)]


def longest_fit(count: Callable[[int], int], limit: int, size: int) -> int:
    """The largest n in 0..size with count(n) <= limit, or one that makes exactly `limit`; -1 if not even 0 fits.

    count grows with n, about evenly, and is dear: the place is interpolated, and every third guess halves what is
    left. Where count is not quite monotone, as tokens of a growing text are not, what is returned was counted.
    """
    low, at_low, high, at_high = 0, count(0), size + 1, 0
    if at_low > limit:
        return -1
    rounds = 0
    while at_low < limit and high - low > 1:
        rounds += 1
        if high > size:
            guess = 4 * limit if low == 0 else low + (limit - at_low) * low // max(at_low, 1) + 1
        elif rounds % 3 == 0:
            guess = (low + high) // 2
        else:
            guess = low + (limit - at_low) * (high - low) // (at_high - at_low)
        guess = min(max(guess, low + 1), high - 1)
        tokens = count(guess)
        if tokens <= limit:
            low, at_low = guess, tokens
        else:
            high, at_high = guess, tokens
    return low
