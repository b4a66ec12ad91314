"""Marked texts of a prompt as tokens: what `keep=span` and `keep=fair` spare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvexp.tasks import Example

if TYPE_CHECKING:
    from kvexp.models.types import Tokenizer


def marked_texts(example: Example) -> tuple[str, ...]:
    """The texts that are marked, in their order: the example's own, else what stands around its document."""
    return example.marks or tuple(part for part in (example.prefix, example.suffix) if part.strip())


def token_spans(
    example: Example, text: str, count: int, tokenizer: Tokenizer, *, templated: bool
) -> list[tuple[int, int]]:
    """(first token, one behind the last) of each marked text in a prompt's `text`; empty where one is not there whole.

    count: tokens that are left of the text; templated: it brings its own start token. What a template puts in front of
    a prompt that begins with a marked text belongs to that mark. Tokens that a mark shares with its neighbour text are
    the mark's.
    """
    marks = [mark.strip() for mark in marked_texts(example)]
    if not marks:
        return []
    try:
        offsets = tokenizer(
            text, add_special_tokens=not templated, return_offsets_mapping=True, verbose=False
        ).offset_mapping
    except NotImplementedError:  # a tokenizer in Python knows no offsets
        return []
    found, at, last = [], 0, 0
    for place, mark in enumerate(marks):
        at = text.rfind(mark) if place and mark is marks[-1] else text.find(mark, at)
        if at < 0:
            return []
        inside = [i for i, (start, end) in enumerate(offsets) if start < at + len(mark) and end > at and end > start]
        if not inside or inside[-1] >= count:
            return []
        begins = place == 0 and example.prompt.lstrip().startswith(mark)
        first = 0 if begins else max(inside[0], last)
        if inside[-1] < first:
            return []
        last = inside[-1] + 1
        found.append((first, last))
        at += len(mark)
    return found
