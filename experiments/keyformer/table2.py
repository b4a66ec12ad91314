"""Keyformer, Table 2: choice by log-likelihood with 0 and 5 answered questions before it, half the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import option, points
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import better
from experiments.lib.verdicts import each_row


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """`shots` and `asked` from the setting; the task's name says both, so that each has its own full cache."""
    made = points(frame, "acc", rival="h2o")
    shots = [option(words, "task.num_fewshot", "0") for words in made["setting"]]
    asked = [option(words, "task.question") for words in made["setting"]]
    task = [f"{name}{f' {where}' if where else ''}" for name, where in zip(made["task"], asked, strict=True)]
    return made.assign(shots=shots, task=task, bar=made["method"], shade=[f"{count} shots" for count in shots])


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """The paper names its cells by shots alone."""
    shown = table.assign(setting="task.num_fewshot=" + table["shots"])
    bars(shown.sort_values(["task", "shots"], kind="stable"), figure, "keyformer_table2", columns=2, full_as_bar=True)


EXHIBITS = {
    "table2": Exhibit(
        claim=(
            "In few-shot choice with half the KV cache Keyformer surpasses H2O in all tasks and shot settings "
            "(arXiv:2403.09054, section 4.3; its own Table 2 has three losses and one tie in 16 cells)"
        ),
        table=table,
        draw=draw,
        holds=each_row(
            lambda table: table[table["method"].eq("keyformer")].sort_values(["model", "task", "shots"], kind="stable"),
            "ahead",
            better,
            "{model} {task} {shade} {number}",
            "keyformer less H2O, accuracy points: {}",
        ),
    ),
}
