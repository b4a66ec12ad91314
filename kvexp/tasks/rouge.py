"""ROUGE of one pair of texts by rouge_score, and what each summary is brought into before: one sentence per line."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from nltk.stem.porter import PorterStemmer
from rouge_score import rouge_scorer, tokenize, tokenizers

from kvexp.tasks.metrics import unimported, words_of
from kvexp.tasks.needle import OTHER_ENDS

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
_END_ANY = re.compile(rf"(?<=[.!?\u2026])([{_CLOSE}]*)\s+(?=[{_OPEN}]*([^\W_]))")


class Words(tokenizers.Tokenizer):  # type: ignore[misc]
    """rouge_score's own words and stems, but that a word is stemmed once: that is most of the time a score takes."""

    def __init__(self) -> None:
        self.stem = lru_cache(1 << 16)(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        words: list[str] = tokenize.tokenize(text, self)
        return words


class UnicodeWords(Words):
    """Words of any script, those of a-z and 0-9 stemmed as rouge_score does: of ASCII texts they are the same words.

    As XL-Sum scores its languages (arXiv:2106.13822): letters and their marks stay, punctuation goes. Departures from
    its release: one stemmer, and a character is a word in scripts without spaces, where the release segments (Chinese,
    Japanese, Thai, Burmese).
    """

    def tokenize(self, text: str) -> list[str]:
        return [self.stem(word) if len(word) > 3 and word.isascii() else word for word in words_of(text)]


@cache
def scorer(tokenizer: str = "default") -> rouge_scorer.RougeScorer:
    """All of TYPES, with stemmer. tokenizer: default, which is rouge_score's own, or unicode."""
    return rouge_scorer.RougeScorer(list(TYPES), tokenizer=UnicodeWords() if tokenizer == "unicode" else Words())


def rouge(output: str, reference: str, tokenizer: str = "default") -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum F1 of one pair, 0 to 100. Both texts are taken as they are: see `lines`."""
    scores = scorer(tokenizer).score(reference, output)
    return {kind: 100 * float(scores[kind].fmeasure) for kind in TYPES}


def sentences(text: str, tokenizer: str = "default") -> list[str]:
    """Sentences of an English text: every newline ends one, and . ! ? … where a new one can begin.

    Stands in for nltk's punkt, which has to be downloaded. It matters for rougeLsum only, whose other scores see words.
    An abbreviation at the end of a sentence, and a sentence that begins in lower case, stay joined to their neighbour.
    """
    found = []
    anywhere = tokenizer == "unicode"  # in front of a letter of any script, and at the marks of other scripts
    if anywhere:
        text = OTHER_ENDS.sub(lambda end: f"{end.group().rstrip()}\n", text)
    for line in text.splitlines():
        start = 0
        for end in (_END_ANY if anywhere else _END).finditer(line):
            if anywhere and end.group(2).islower():
                continue
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


def lines(text: str, join_first: bool = False, tokenizer: str = "default") -> str:
    """The text with one sentence per line, as rougeLsum wants it; join_first makes its newlines spaces before."""
    return "\n".join(sentences(text.replace("\n", " ") if join_first else text, tokenizer))
