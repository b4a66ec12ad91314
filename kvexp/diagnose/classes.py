"""What kind of token stands at a position: first, last, digits, names, punctuation, or any other word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from kvexp.testbed.words import NAMES

FIRST, LAST = 4, 8  # tokens at either end of a prompt that are counted apart, whatever they are
CLASSES = ("first", "last", "digits", "names", "punctuation", "other")
NUMBERS = frozenset(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
PEOPLE = frozenset(NAMES)  # the testbed's language has no capitals
_EDGE = re.compile(r"(?<=\s)(?=\S)|(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)")


def classes_of(texts: Sequence[str]) -> list[str]:
    """The class of every token of a prompt, by the word it is part of; `first` and `last` go before all others.

    digits: a word with a digit in it, or a number from zero to ten written out. names: a capital that starts no
    sentence, or a name of the testbed's language.
    """
    words, where = _words(texts)
    kinds, starts = [], True
    for word in words:
        kinds.append(_kind(word, starts))
        if word.strip():
            starts = word.strip()[-1] in ".!?:\u3002" or "\n" in word
    last = len(texts) - LAST
    return [
        "first" if place < FIRST else "last" if place >= last else kinds[where[place]] for place in range(len(texts))
    ]


def _words(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The words of the text, and the number of the word in which each token's first letter stands."""
    whole = "".join(texts)
    edges = [0, *(match.start() for match in _EDGE.finditer(whole)), len(whole)]
    words = [whole[start:end] for start, end in pairwise(edges)]
    where, place, word = [], 0, 0
    for text in texts:
        letter = place + len(text) - len(text.lstrip())
        while word < len(words) - 1 and edges[word + 1] <= letter:
            word += 1
        where.append(word)
        place += len(text)
    return words, where


def _kind(word: str, starts: bool) -> str:
    bare = word.strip()
    if any(letter.isdigit() for letter in bare) or bare.lower() in NUMBERS:
        return "digits"
    if bare in PEOPLE or (bare[:1].isupper() and not starts and len(bare) > 1):
        return "names"
    return "other" if any(letter.isalnum() for letter in bare) else "punctuation"
