"""A2SF, Fig. 5: accuracy against the forgetting factor at 0.3 of the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import option, points
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, interval_columns, pooled_difference, positive

METRIC = "acc"
LOW = (0.1, 0.3)  # where the peak is said to be


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with alpha; h2o, which has none, stands at both ends of the axis."""
    alphas = [_alpha(method, setting) for method, setting in zip(frame["method"], frame["setting"], strict=True)]
    frame = frame.assign(alpha=alphas)
    made = points(frame, METRIC, rival="h2o").assign(alpha=alphas, setting="")
    gaps = {
        "low_over_high": pooled_difference(frame, _within(*LOW), _within(LOW[1] + 0.05, 1.0), METRIC),
        "none_over_h2o": pooled_difference(frame, _within(0.0, 0.0), lambda run: run["method"] == "h2o", METRIC),
        "low_over_none": pooled_difference(frame, _within(*LOW), _within(0.0, 0.0), METRIC),
    }
    for name, found in gaps.items():
        made = made.assign(**interval_columns(name, found))
    ends = made[made["method"].eq("h2o")]
    return pd.concat([made[made["method"].ne("h2o")], ends.assign(alpha=0.0), ends.assign(alpha=made["alpha"].max())])


def _alpha(method: str, setting: str) -> float:
    return float(option(setting, "method.alpha", "nan")) if method == "a2sf" else float("nan")


def _within(low: float, high: float):  # type: ignore[no-untyped-def]
    return lambda run: low - 1e-9 <= run["alpha"] <= high + 1e-9


def draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table, figure, x="alpha", xlabel="forgetting factor")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Three parts over all models: 0.1 to 0.3 beats what is above and what is below it, and 0 beats H2O."""
    first = table.iloc[0]
    each = {name: ends(first, name) for name in ("low_over_high", "none_over_h2o", "low_over_none")}
    means = table[table["method"].eq("a2sf")].groupby("alpha")["value"].mean()
    return all_hold(positive(each[name][1], each[name][2]) for name in each), (
        f"best mean accuracy at {means.idxmax():g} ({means.max():.1f}); 0.1 to 0.3 is "
        f"{estimate(*each['low_over_high'], sign=True)} "
        f"points over 0.4 and more, 0 is {estimate(*each['none_over_h2o'], sign=True)} over h2o; 0.1 to 0.3 is "
        f"{estimate(*each['low_over_none'], sign=True)} over 0"
    )


EXHIBITS = {
    "fig5": Exhibit(
        claim=(
            "Accuracy peaks at a forgetting factor of 0.1 to 0.3 and falls above it; a factor of 0, no history at "
            "all, is still better than H2O in all cases (arXiv:2407.20485, Fig. 5 and section 4.4)"
        ),
        sweeps=("a2sf_fig5", "a2sf_fig5_h2o"),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
