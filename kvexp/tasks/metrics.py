"""Measures of a short answer that several tasks share: token F1, exact match, recall of words. Fractions, 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
FUNCTION_WORDS = frozenset(
    "and or but if in on at to of by for from with as is are was were be it its that this".split()  # noqa: SIM905
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces: SQuAD's normalisation (arXiv:1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words; 0 where they share none."""
    shared = sum((Counter(answer) & Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, reference: str) -> float:
    """F1 of the normalised words of an answer and one reference, as SQuAD and LongBench measure it."""
    return f1(normalise(answer).split(), normalise(reference).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if both are the same text after normalisation."""
    return float(normalise(answer) == normalise(reference))


def contains(answer: str, reference: str) -> float:
    """1 if the normalised reference stands in the normalised answer, word for word; the empty one stands in none."""
    wanted = normalise(reference)
    return float(bool(wanted) and f" {wanted} " in f" {normalise(answer)} ")


def word_recall(answer: str, reference: str) -> float:
    """Share of the reference's distinct normalised words that the answer holds, in whatever order.

    Function words, which any English answer holds, do not count, unless the reference has no other.
    """
    wanted = set(normalise(reference).split())
    wanted = wanted - FUNCTION_WORDS or wanted
    return len(wanted & set(normalise(answer).split())) / len(wanted) if wanted else 0.0
