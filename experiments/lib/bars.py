"""Bars of variants, a panel per model and task: full in black, 99 % of it in red, intervals, the paper's numbers."""

from __future__ import annotations

import textwrap
from math import ceil

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.data import paper_numbers_for
from experiments.lib.draw import HEIGHT, METRICS, legend, levels, panels_of
from experiments.lib.titles import panel_title
from kvexp.results.plots import color_of

SHADES = (1.0, 0.72, 0.5, 0.35)  # of a method's color, for the runs of one method side by side in a group


def bars(
    table: pd.DataFrame,
    figure: Figure,
    paper: str = "",
    columns: int = 3,
    width: float = 2.6,
    full_as_bar: bool = False,
) -> None:
    """Draw a table of `points` with a column `bar`, the name below each bar, in the table's order.

    A column `shade`, if there is one, groups: bars of one name stand side by side, one per shade. full_as_bar: full
    attention is no line, where it differs from shade to shade.
    """
    metric, panels = str(table["metric"].iloc[0]), panels_of(table)
    columns = min(columns, len(panels))
    rows = ceil(len(panels) / columns)
    figure.set_size_inches(width * columns + 0.3, (HEIGHT + 0.35) * rows + 0.35)
    figure.set_layout_engine("constrained")
    known = paper_numbers_for(paper, table) if paper else None
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        part = table[table["model"].eq(model) & table["task"].eq(task)]
        full = part["method"].eq("full")
        if full.any() and not full_as_bar:
            levels(axes, float(part[full]["value"].iloc[0]))
        _bars(part if full_as_bar else part[~full], axes, known)
        title = textwrap.fill(panel_title(model, task, part.get("question", ())), int(16 * width))
        axes.set_title(f"{title}\n(n = {int(part['n'].min())})", fontsize=8)
        axes.set_ylabel(METRICS.get(metric, metric) if place % columns == 0 else "", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure)


def _bars(runs: pd.DataFrame, axes: Axes, known: pd.DataFrame | None) -> None:
    names = list(dict.fromkeys(runs["bar"]))
    shades = list(dict.fromkeys(runs["shade"])) if "shade" in runs else [""]
    wide = 0.8 / max(1, len(shades))
    for _, run in runs.iterrows():
        which = shades.index(run["shade"]) if "shade" in runs else 0
        at = names.index(run["bar"]) + (which - (len(shades) - 1) / 2) * wide
        label = str(run["shade"]) if "shade" in runs and names.index(run["bar"]) == 0 else "_"
        axes.bar(at, run["value"], wide * 0.92, color=color_of(run["method"]), alpha=SHADES[which % 4], label=label)
        if pd.notna(run["low"]):  # too few examples have no interval, which is not one of no width
            reach = [[max(0.0, run["value"] - run["low"])], [max(0.0, run["high"] - run["value"])]]
            axes.errorbar(at, run["value"], reach, fmt="none", ecolor="0.2", elinewidth=0.9, capsize=2)
        theirs = _theirs(known, run)
        if theirs is not None:
            axes.plot(at, theirs, "D", markersize=5, markerfacecolor="none", color="black", label="paper")
    axes.set_xticks(range(len(names)), [textwrap.fill(name, 11, break_long_words=False) for name in names], rotation=0)


def _theirs(known: pd.DataFrame | None, run: pd.Series) -> float | None:
    """The paper's number for the very same run."""
    if known is None:
        return None
    same = known["metric"].eq(run["metric"]) & known["method"].eq(run["method"]) & known["setting"].eq(run["setting"])
    ratio = run["kv_ratio"]
    same &= known["kv_ratio"].isna() if pd.isna(ratio) else known["kv_ratio"].eq(ratio)
    found = known[same & known["model"].eq(run["model"]) & known["task"].eq(run["task"])]
    return float(found["value"].iloc[0]) if len(found) else None
