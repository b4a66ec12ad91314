"""A line per model with its interval, the paper's own line hollow beside it: what attention is like, model by model."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.curves import MODELS, in_order

LINES = ("#332288", "#117733", "#aa4499", "#661100")  # of models: none is a method's color


def model_lines(table: pd.DataFrame, paper: pd.DataFrame, figure: Figure, x: str, value: str) -> Axes:
    """Draw columns x and value (with _low and _high) of a table; `paper` has x and value too, of its own models."""
    figure.set_size_inches(4.2, 2.6)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for place, model in enumerate(in_order(table["model"].tolist(), MODELS)):
        line = table[table["model"].eq(model)].sort_values(x)
        reach = [line[value] - line[f"{value}_low"], line[f"{value}_high"] - line[value]]
        look = {"color": LINES[place % len(LINES)], "marker": "osD^"[place % 4], "markersize": 4, "linewidth": 1.2}
        axes.errorbar(line[x], line[value], reach, label=model, capsize=2, **look)
        known = paper[paper["model"].eq(model)]
        if len(known):
            look |= {"linestyle": ":", "markerfacecolor": "none"}
            axes.plot(known[x], known[value], label=f"{model} (paper)", **look)
    axes.tick_params(labelsize=7)
    axes.grid(color="0.92", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return axes
