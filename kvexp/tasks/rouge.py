"""ROUGE through evaluate's metric interface, computed by rouge_score, without the hub `evaluate.load` needs.

Importing this module takes seconds (`evaluate` imports most of the machine-learning world): import it late.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import datasets
import evaluate
from rouge_score import rouge_scorer

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


class Rouge(evaluate.Metric):
    """F1 of rouge_score with stemmer, in percent: the plain mean over the pairs, or one number per pair.

    `compute(predictions=[...], references=[...], per_example=False)` gives {"rouge1": ..., ...}. rougeLsum splits at
    newlines: put one sentence on a line (`lines`). Departures from evaluate's own script: percent instead of a
    fraction, and the mean instead of a bootstrap's middle, which is up to 1.7e-3 off it at 100 pairs and differs
    from process to process. Keeps its pairs in memory and makes no folder.
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True, seed=0)
        self.scorer = rouge_scorer.RougeScorer(list(TYPES), use_stemmer=True)

    def _build_data_dir(self) -> str:
        return ""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="ROUGE F1 with stemmer, by the rouge_score package, in percent.",
            citation="Lin 2004, ROUGE: a package for automatic evaluation of summaries",
            inputs_description="predictions, references: texts; per_example: lists instead of means",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str], per_example: bool = False) -> dict[str, Any]:
        scores = [
            self.scorer.score(reference, output) for output, reference in zip(predictions, references, strict=True)
        ]
        columns = {kind: [100 * float(score[kind].fmeasure) for score in scores] for kind in TYPES}
        return columns if per_example else {kind: sum(column) / len(column) for kind, column in columns.items()}


@lru_cache(maxsize=1)
def metric() -> Rouge:
    return Rouge()


def rouge(output: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum F1 of one pair, 0 to 100. Both texts are taken as they are: see `lines`."""
    # Not through `compute`, which writes every pair to an Arrow table first: ten times the time of the scoring itself.
    scores = metric().scorer.score(reference, output)
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
