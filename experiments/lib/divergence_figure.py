"""KL divergence of an exhibit's runs from the full cache: what its second verdict is judged by, as a picture.

Curves where a panel has three budgets or more, else a row of dots per method and setting. Tasks none of whose runs has
enough examples for an interval are one panel, their examples put together, as claims do that pool them.
"""

from __future__ import annotations

import re
import textwrap
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.lib.divergence import pooled_kl
from experiments.lib.draw import METHODS, in_order, legend
from experiments.lib.titles import panel_title
from kvexp.results.plots import LEAST, color_of, divergence, marker_of
from kvexp.run.store import EPSILON_KL

WIDTH, HEIGHT = 3.9, 2.6  # inches of a panel of curves
DOTS, ROW, LETTER = 2.9, 0.19, 0.065  # inches: width of a panel of dots, height of a line of it, a letter of its words
WORDS = 30  # letters of a line of a setting
MANY = 3  # budgets that make a curve
NEAR = f"near the full cache: {EPSILON_KL:g}"
RUN = ["method", "setting", "kv_ratio"]


def draw_divergence(frame: pd.DataFrame, figure: Figure) -> None:
    """Draw the frame of `lib.divergence.divergence_frame`: a panel per model and task, or one of all tasks pooled."""
    shown = pooled(frame) if frame["kl_low"].isna().all() and frame["task"].nunique() > 1 else frame
    panels = list(shown.groupby(["model", "task"], sort=False))
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    curved = all(part["kv_ratio"].nunique() >= MANY for _, part in panels)
    wide, high = (WIDTH, HEIGHT) if curved else _room(shown)
    figure.set_size_inches(wide * columns, high * rows + 0.4)
    figure.set_layout_engine("constrained")
    for place, ((model, task), part) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        (_curves if curved else _dots)(part, axes)
        title = textwrap.fill(panel_title(str(model), str(task)), 44)
        axes.set_title(f"{title} (n = {int(part['n'].min())})", fontsize=8)
        axes.tick_params(which="both", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure)


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of each method, setting and budget of all tasks as one, with the interval over all their examples."""
    made = []
    for key, runs in frame.groupby(["model", *RUN], sort=False, dropna=False):
        kl, low, high = pooled_kl(runs)
        row: dict[str, Any] = dict(zip(["model", *RUN], key, strict=True))
        row |= {"task": f"{runs['task'].nunique()} tasks", "n": int(runs["n"].sum()), "kl": kl}
        made.append(row | {"kl_low": low, "kl_high": high})
    return pd.DataFrame(made)


def _curves(part: pd.DataFrame, axes: Axes) -> None:
    divergence(part.assign(epsilon=EPSILON_KL), axes)
    axes.plot([], [], color="black", linewidth=1.0, linestyle="--", label=NEAR)
    axes.set_xlabel("kv_ratio (budget / prompt tokens)", fontsize=8)
    axes.set_ylabel("KL from the full cache,\nnats per token", fontsize=8)
    _plain(axes.yaxis)


def _plain(axis: Axis) -> None:
    """0.05 instead of a power of ten, at one, two and five of each."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _label(run: Any) -> str:
    """The method and its settings below one another, without the groups that their options are of."""
    words = re.sub(r"[\w.]+\.(?=\w+=)", "", run["setting"])
    return textwrap.fill(f"{run['method']} {words}".strip(), WORDS, break_long_words=False)


def _room(shown: pd.DataFrame) -> tuple[float, float]:
    """Width and height of a panel of dots, whose words stand beside it."""
    labels = {_label(run) for _, run in shown.iterrows()}
    lines = max(label.count("\n") + 1 for label in labels)
    longest = max(len(line) for label in labels for line in label.splitlines())
    return DOTS + LETTER * longest, ROW * len(labels) * max(2, lines) + 0.8


def _dots(part: pd.DataFrame, axes: Axes) -> None:
    """A row per method and setting, methods in the papers' order; smaller budgets are hollow."""
    ratios = sorted(part["kv_ratio"].dropna().unique(), reverse=True)
    order = in_order(part["method"].tolist(), METHODS)
    named = part.assign(place=part["method"].map(order.index))
    names: list[str] = []
    for _, run in named.sort_values(["place", "setting"], kind="stable").iterrows():
        label = _label(run)
        if label not in names:
            names.append(label)
        kl = max(float(run["kl"]), LEAST)
        shift = 0.28 * (ratios.index(run["kv_ratio"]) / (len(ratios) - 1) - 0.5) if len(ratios) > 1 else 0.0
        color = color_of(str(run["method"]))
        if np.isfinite(run["kl_low"]):
            ends = [max(float(run["kl_low"]), LEAST), float(run["kl_high"])]
            axes.plot(ends, [names.index(label) + shift] * 2, color=color, linewidth=1.0)
        face = color if run["kv_ratio"] == ratios[0] else "white"
        look: dict[str, Any] = {"color": color, "markerfacecolor": face, "marker": marker_of(str(run["method"]))}
        axes.plot(kl, names.index(label) + shift, linestyle="none", markersize=4.5, **look)
    for ratio in ratios:
        face = "0.3" if ratio == ratios[0] else "white"
        axes.plot([], [], "o", color="0.3", markerfacecolor=face, markersize=4.5, label=f"kv_ratio {ratio:g}")
    axes.axvline(EPSILON_KL, color="black", linewidth=1.0, linestyle="--", label=NEAR)
    axes.set_xscale("log")
    _plain(axes.xaxis)
    axes.set_xlabel("KL from the full cache, nats per token", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
