"""PQCache, Fig. 9c: sub-vectors and bits per code at nearly the same number of bits per key."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import option, points
from experiments.lib.divergence import Closer, Near, by_divergence
from experiments.lib.draw import METRICS
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import Side, all_hold, ends, estimate, interval_columns, pooled_difference, positive

ALL = "score"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points by m x b, each task by its headline metric; two sub-vectors compared with more, over all tasks."""
    frame = frame.assign(shape=[_shape(setting) for setting in frame["setting"]])
    parts = []
    for _, part in frame.groupby("task", sort=False):
        made = points(part, str(part["headline"].iloc[0]))
        parts.append(made.assign(bar=part["shape"].to_numpy(), fell_back=part["fell_back"].to_numpy()))
    same = frame.assign(scores=[_headline(run) for _, run in frame.iterrows()])
    two = pooled_difference(
        same, lambda r: r["shape"].startswith("2"), lambda r: r["shape"][:1] in "48" and r["shape"] != "", ALL
    )
    eight = pooled_difference(same, lambda run: run["shape"] == "2x8", lambda run: run["shape"] == "2x6", ALL)
    return pd.concat(parts).assign(
        **interval_columns("two_over_more", two), **interval_columns("eight_over_six", eight)
    )


def _shape(setting: str) -> str:
    m, b = option(setting, "method.m"), option(setting, "method.b")
    return f"{m}x{b}" if m else ""


def _headline(run: pd.Series) -> dict[str, dict[str, float]]:
    return {example: {ALL: scored[run["headline"]]} for example, scored in run["scores"].items()}


def draw(table: pd.DataFrame, figure: Figure) -> None:
    named = [f"{task}, {METRICS.get(m, m)}" for task, m in zip(table["task"], table["metric"], strict=True)]
    bars(table.assign(task=named).sort_values("bar"), figure, columns=2, width=2.9)
    for axes in figure.axes:
        axes.set_ylabel("%" if axes.get_ylabel() else "", fontsize=8)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Two parts: two sub-vectors beat four and eight, and 2 x 8 beats 2 x 6, over both tasks."""
    first = table.iloc[0]
    two, eight = (ends(first, name) for name in ("two_over_more", "eight_over_six"))
    means = table[table["bar"].ne("")].groupby("bar")["value"].mean()
    named = ", ".join(f"{name} {value:.1f}" for name, value in means.items())
    short = table[table["fell_back"].fillna("").ne("")]
    told = "".join(f"; {row['bar']} on {row['task']}: {row['fell_back']}" for _, row in short.iterrows())
    return all_hold([positive(two[1], two[2]), positive(eight[1], eight[2])]), (
        f"means {named}; two sub-vectors are {estimate(*two, sign=True)} points over more, "
        f"2x8 is {estimate(*eight, sign=True)} over 2x6{told}"
    )


def _of(*shapes: str) -> Side:
    return lambda run: _shape(run["setting"]) in shapes


EXHIBITS = {
    "fig9c": Exhibit(
        claim=(
            "At 12 to 16 bits a key all shapes of codes do well, those with two sub-vectors best and most stably; "
            "2 x 8 is better than 2 x 6 (arXiv:2407.12820, Fig. 9c and section 4.2.5)"
        ),
        sweeps=("pqcache_fig9c", "pqcache_fig9c_m4", "pqcache_fig9c_m8"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(
            Closer("two sub-vectors than more", _of("2x6", "2x8"), _of("4x3", "4x4", "8x2")),
            Closer("2x8 than 2x6", _of("2x8"), _of("2x6")),
            *(Near(shape, _of(shape), judged=False) for shape in ("2x6", "2x8", "4x3", "4x4", "8x2")),
        ),
    ),
}
