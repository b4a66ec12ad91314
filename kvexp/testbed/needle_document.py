"""A document with one code at a chosen depth, among filler and a few other facts."""

from __future__ import annotations

from random import Random

from kvexp.testbed.document import Document, Fact, draw_fact, filler_for
from kvexp.testbed.words import NAMES


def needle_document(rng: Random, split: str, tokens: int, depth: float, others: int = 5) -> tuple[Document, Fact]:
    """(document of about `tokens` tokens, the fact to find); depth 0 puts it first, 1 last among all sentences."""
    taken: set[tuple[str, str]] = set()
    needle = draw_fact(rng, split, taken, NAMES, "code")
    facts = [draw_fact(rng, split, taken, NAMES, None) for _ in range(others)]
    sentences = [fact.sentence() for fact in facts]
    sentences += filler_for(rng, tokens - sum(len(s.split()) for s in [*sentences, needle.sentence()]))
    rng.shuffle(sentences)
    place = round(depth * len(sentences))
    sentences.insert(place, needle.sentence())
    return Document(tuple(sentences), (needle, *facts)), needle
