"""ROUGE through evaluate's metric interface, computed by rouge_score, without the hub `evaluate.load` needs.

The runner does not come this way: `compute` writes every pair to an Arrow table first, ten times the time of the
scoring itself, and importing `evaluate` takes a second.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from kvexp.tasks.rouge import TYPES, rouge
from kvexp.tasks.rouge_packages import check_references


class Rouge(evaluate.Metric):  # type: ignore[misc]
    """F1 of rouge_score with stemmer, in percent: the plain mean over the pairs, or one number per pair.

    `compute(predictions=[...], references=[...], per_example=False)` gives {"rouge1": ..., ...}; tokenizer="unicode"
    for texts of other letters than a-z. rougeLsum splits at newlines: put one sentence on a line (`lines`). Departures
    from evaluate's own script: percent instead of a fraction, and the mean instead of a bootstrap's middle, which is up
    to 1.7e-3 off it at 100 pairs and differs from process to process. Keeps its pairs in memory and makes no folder.
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True, seed=0)

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

    def _compute(
        self, predictions: list[str], references: list[str], per_example: bool = False, tokenizer: str = "default"
    ) -> dict[str, Any]:
        if tokenizer == "default":
            check_references(references)
        pairs = zip(predictions, references, strict=True)
        scores = [rouge(output, reference, tokenizer) for output, reference in pairs]
        columns = {kind: [score[kind] for score in scores] for kind in TYPES}
        return columns if per_example else {kind: sum(column) / len(column) for kind, column in columns.items()}
