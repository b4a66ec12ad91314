"""PQCache, Fig. 10c: quality against the iterations of k-means."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import option, points
from experiments.lib.divergence import Closer, by_divergence, lowest, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import ends, estimate, interval_columns, pooled_difference, positive

KEY = "method.max_iter"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with the iterations that were really made, and the most allowed compared with the fewest."""
    metric = "rouge2" if "rouge2" in frame else str(frame["headline"].iloc[0])
    limits = [option(setting, KEY) for setting in frame["setting"]]
    allowed = [float(limit) if limit.isdigit() else math.nan for limit in limits]
    frame = frame.assign(allowed=allowed, adaptive=[limit == "adaptive" for limit in limits])
    low, high = frame["allowed"].min(), frame["allowed"].max()
    made = points(frame, metric).assign(iterations=frame["kmeans_iterations"].to_numpy(), limit=limits)
    most = pooled_difference(frame, lambda run: run["allowed"] == high, lambda run: run["allowed"] == low, metric)
    given = pooled_difference(frame, lambda run: run["adaptive"], lambda run: run["allowed"] == high, metric)
    return made.assign(
        fewest=low,
        most=high,
        **interval_columns("most_over_fewest", most),
        **interval_columns("adaptive_over_most", given),
    )


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A line over the fixed numbers, and the adaptive one apart, hollow."""
    curves(
        table[table["limit"].ne("adaptive")].assign(setting=""), figure, x="iterations", xlabel="iterations made (mean)"
    )
    figure.set_size_inches(3.8, 3.0)
    figure.axes[0].set_ylim(bottom=0.8 * table["low"].min())  # a few points apart: from 0 on they would be one line
    found = table[table["limit"].eq("adaptive")]
    figure.axes[0].plot(found["iterations"], found["value"], "o", color="#882255", markerfacecolor="none", markersize=9)
    for _, row in found.iterrows():
        figure.axes[0].annotate(
            "adaptive", (row["iterations"], row["value"]), (-6, -14), textcoords="offset points", fontsize=7, ha="right"
        )


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Whether the most iterations are better than the fewest; how adaptive fares is told."""
    first = table.iloc[0]
    most, given = (ends(first, name) for name in ("most_over_fewest", "adaptive_over_most"))
    return positive(most[1], most[2]), (
        f"{first['most']:.0f} iterations are {estimate(*most, sign=True)} points over {first['fewest']:.0f}; adaptive "
        f"is {estimate(*given, sign=True)} to {first['most']:.0f} (not part of the verdict)"
    )


EXHIBITS = {
    "fig10c": Exhibit(
        claim=(
            "Clustering with more iterations gives better scores; as many as hide behind the prefill (adaptive) "
            "are good enough (arXiv:2407.12820, Fig. 10c and section 4.3.3; its times are a GPU's and not "
            "measured here)"
        ),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(
            Closer("30 iterations than 1", of("pqcache", f"{KEY}=30"), of("pqcache", f"{KEY}=1")),
            told=partial(lowest, key=KEY, method="pqcache"),
        ),
    ),
}
