"""A2SF, Table 1: accuracy at a fifth of the cache, with one example before the question and with none."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import option, points
from experiments.lib.draw import METHODS, in_order
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, interval_columns, pooled_difference, positive

METRIC = "acc"
SHOTS, CLAIMED = "task.num_fewshot", ("0", "1")
PAIRS = (("a2sf", "h2o"), ("h2o", "window"))


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points by shots, and the pooled differences of each pair and number of shots."""
    frame = frame.assign(shots=[option(setting, SHOTS) for setting in frame["setting"]])
    made = points(frame, METRIC, rival="h2o").assign(shots=frame["shots"].to_numpy())
    for one, other in PAIRS:
        for shots in sorted(set(frame["shots"]), reverse=True):
            found = pooled_difference(frame, _of(one, shots), _of(other, shots), METRIC)
            made = made.assign(**interval_columns(f"{one}_over_{other}_{shots}", found))
    place = {name: i for i, name in enumerate(in_order(made["method"].tolist(), METHODS))}
    return made.sort_values(["model", "shots", "method"], key=lambda c: c.map(place) if c.name == "method" else c)


def _of(method: str, shots: str):  # type: ignore[no-untyped-def]
    return lambda run: run["method"] == method and run["shots"] == shots


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per model, number of shots and task, which each have a full cache of their own."""
    tasks = table["task"] if table["task"].nunique() > 1 else [""] * len(table)
    named = [f"{task} {shots}-shot".strip() for task, shots in zip(tasks, table["shots"], strict=True)]
    named = table.assign(task=named, bar=table["method"])
    bars(named.sort_values("shots", ascending=False, kind="stable"), figure, columns=4, width=1.9)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Every pair with one shot and with none, pooled over the models; further numbers of shots are told."""
    first, verdicts, found = table.iloc[0], [], []
    for shots in sorted(set(table["shots"]), reverse=True):
        for one, other in PAIRS:
            each = ends(first, f"{one}_over_{other}_{shots}")
            verdicts += [positive(each[1], each[2])] if shots in CLAIMED else []
            found.append(f"{one} - {other} {estimate(*each, sign=True)} ({shots}-shot)")
    return all_hold(verdicts), "points of accuracy over all models: " + "; ".join(found)


EXHIBITS = {
    "table1": Exhibit(
        claim=(
            "At a fifth of the cache A2SF is more accurate than H2O, by 7.8 points with one shot and 5.1 without "
            "on average of seven data sets, and H2O than local attention (arXiv:2407.20485, Table 1, LLaMA-2-7B)"
        ),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
