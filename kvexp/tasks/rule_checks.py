"""Rules that an answer follows or not, as code: each a function of the answer's text alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

LIST_MARK = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s*", re.MULTILINE)  # "1. ", "2) ", "- " at the beginning of a line
LETTERS = re.compile(r"\w+")


def without_list_marks(text: str) -> str:
    """The text without the numbers and dashes that its lines begin with: they are no part of what is said."""
    return LIST_MARK.sub("", text)


def mentions(text: str, accepted: Sequence[str]) -> bool:
    """Whether one of these words or phrases (lower case) stands in the text, whole, whatever its case."""
    plain = without_list_marks(text).lower()
    return any(re.search(rf"(?<!\w){re.escape(words)}(?!\w)", plain) for words in accepted)


def starts_with(text: str, words: str) -> bool:
    """Whether the first words are these, whatever their case and the marks before them."""
    return text.lstrip(" \n\t\"'*").lower().startswith(words.lower())


def ends_with(text: str, words: str) -> bool:
    """Whether the last words are these, whatever their case and the marks behind them."""
    return text.rstrip(" \n\t\"'*.!").lower().endswith(words.lower())


def is_list(text: str, items: int) -> bool:
    """Whether at least so many lines begin with a number or a dash."""
    return len(LIST_MARK.findall(text)) >= items


def at_most_words(text: str, most: int) -> bool:
    """Whether the text has some words, and no more than so many."""
    return 0 < len(LETTERS.findall(text)) <= most
