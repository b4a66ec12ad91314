"""ROUGE of one pair of texts by rouge_score, and what each summary is brought into before: one sentence per line."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from kvexp.tasks.rouge_packages import unimported

with unimported("sklearn", "scipy.stats"):
    from nltk.stem.porter import PorterStemmer
    from rouge_score import rouge_scorer, tokenize, tokenizers

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

# A full stop after one of these, or after a single letter, ends no sentence (unless the line ends there too).
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof rev hon st sen rep gov gen col capt lt sgt cmdr maj supt insp jr sr "  # noqa: SIM905
    "vs approx dept e.g i.e cf inc ltd co corp u.s u.k u.n e.u d.c".split()
)
# The same in front of a number only: "No. 10", but "He said no. They left."
NUMBERED = frozenset("no nos vol fig p pp jan feb mar apr jun jul aug sep sept oct nov dec".split())  # noqa: SIM905
_OPEN, _CLOSE = "\"'(\\[\u201c\u2018", "\"')\\]\u201d\u2019"
# The end of a sentence: . ! ? or …, closing quotes or brackets, white space, then what can begin one.
_END = re.compile(rf"(?<=[.!?\u2026])([{_CLOSE}]*)\s+(?=[{_OPEN}]*[A-Z0-9\u00c0-\u00d6\u00d8-\u00de])")


class Words(tokenizers.Tokenizer):  # type: ignore[misc]
    """rouge_score's own words and stems, but that a word is stemmed once: that is most of the time a score takes."""

    def __init__(self) -> None:
        self.stem = lru_cache(1 << 16)(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        words: list[str] = tokenize.tokenize(text, self)
        return words


@cache
def scorer() -> rouge_scorer.RougeScorer:
    """All of TYPES, with stemmer."""
    return rouge_scorer.RougeScorer(list(TYPES), tokenizer=Words())


def rouge(output: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum F1 of one pair, 0 to 100. Both texts are taken as they are: see `lines`."""
    scores = scorer().score(reference, output)
    return {kind: 100 * float(scores[kind].fmeasure) for kind in TYPES}


def sentences(text: str) -> list[str]:
    """Sentences of an English text: every newline ends one, and . ! ? … where a new one can begin.

    Stands in for nltk's punkt, which has to be downloaded. It matters for rougeLsum only, whose other scores see words.
    An abbreviation at the end of a sentence, and a sentence that begins in lower case, stay joined to their neighbour.
    """
    found = []
    for line in text.splitlines():
        start = 0
        for end in _END.finditer(line):
            if not end.group(1) and _abbreviated(line[: end.start()], line[end.end()]):
                continue
            found.append(line[start : end.end()].strip())
            start = end.end()
        found.append(line[start:].strip())
    return [sentence for sentence in found if sentence]


def _abbreviated(before: str, follows: str) -> bool:
    """Whether the full stop that ends `before` belongs to its last word; `follows` is what comes next."""
    word = before.rsplit(None, 1)[-1].lstrip(_OPEN).removesuffix(".").lower()
    if word in NUMBERED and follows.isdigit():
        return True
    return word in ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i")


def lines(text: str, join_first: bool = False) -> str:
    """The text with one sentence per line, as rougeLsum wants it; join_first makes its newlines spaces before."""
    return "\n".join(sentences(text.replace("\n", " ") if join_first else text))
