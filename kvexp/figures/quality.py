"""Quality against kv_ratio, one line per method, with the full cache's level and the 99 % mark.

kvexp plot-quality outputs/ quality.png --metric rouge2
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvexp.errors import ConfigError
from kvexp.figures.dodge import dodge
from kvexp.figures.legend import legend_below
from kvexp.figures.picture import write_picture
from kvexp.figures.style import DASHES, MARK_COLOR, color_of, marker_of
from kvexp.results import table
from kvexp.results.columns import n_words, parts, shared_settings, with_n
from kvexp.results.question_place import titled
from kvexp.results.stats import MIN_PAIRS
from kvexp.results.units import called
from kvexp.results.where import add_choice, chosen_by

Dashes = Mapping[tuple[str, str], Any]  # (method, setting) -> line style
PANEL = (4.4, 3.3)  # inches
PANELS = 4  # in a row


def quality(frame: pd.DataFrame, metric: str, axes: Axes, dashes: Dashes | None = None) -> None:
    """Draw one model and task's runs: `frame` as `kvexp.results.table` gives it, in percent of the baseline.

    The bars are the paired bootstrap's 95 % intervals; points of too few examples for one are hollow. A method has one
    color; its settings differ in their dashes.
    """
    runs = drawable(frame, metric)
    if runs.empty:
        raise ConfigError(f"no run has a kv_ratio and a percentage of its baseline in {metric}: nothing to draw")
    dashes = dashes or dashes_of(runs)
    axes.axhline(100, color="black", linewidth=1.2, label="full")
    axes.axhline(99, color=MARK_COLOR, linewidth=1.0, linestyle="--", label="99 % of full")
    axes.annotate("99 %", (1.01, 99), xycoords=axes.get_yaxis_transform(), color=MARK_COLOR, fontsize=7, va="center")
    lines = runs.groupby(["method", "setting"], sort=True)
    for place, (key, line) in enumerate(lines):
        method, setting = map(str, key)
        line = line.sort_values("kv_ratio")
        middle = line[f"{metric}_of_full"]
        sides = (middle - line[f"{metric}_low"], line[f"{metric}_high"] - middle)
        reach = [side.clip(lower=0).to_numpy() for side in sides]  # matplotlib takes a series of one for a number
        look: dict[str, Any] = {
            "color": color_of(method),
            "marker": marker_of(method),
            "markersize": 4,
        }
        bars = {"linestyle": dashes[method, setting], "linewidth": 1.4, "elinewidth": 0.8, "capsize": 2}
        drawn = axes.errorbar(line["kv_ratio"], middle, reach, label=f"{method} {setting}".rstrip(), **look, **bars)
        few = line[line["paired"] < MIN_PAIRS]
        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "zorder": 3}
        over = axes.plot(few["kv_ratio"], few[f"{metric}_of_full"], **hollow, **look)
        dodge([*drawn.get_children(), *over], place, lines.ngroups)
    axes.set_xlabel("kv_ratio (budget / prompt tokens)")
    axes.set_ylabel(f"{called(metric, runs['task'].iloc[0] if 'task' in runs else None)}, % of full")
    axes.set_ylim(bottom=min(0.0, runs[[f"{metric}_of_full", f"{metric}_low"]].min().min()))
    axes.locator_params(axis="x", nbins=6)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def drawable(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The runs that have a place in the picture, with a setting ("") where there is none."""
    runs = frame[frame["verdict99"].ne("baseline") & frame[f"{metric}_of_full"].notna() & frame["kv_ratio"].notna()]
    setting = runs["setting"].fillna("").astype(str) if "setting" in runs else ""
    return runs.assign(setting=setting, method=runs["method"].astype(str))


def dashes_of(runs: pd.DataFrame) -> dict[tuple[str, str], Any]:
    """A line style for each setting of a method, in the order of their words; the only one is drawn through."""
    found: dict[tuple[str, str], Any] = {}
    for method, part in runs.groupby("method"):
        found |= {(str(method), setting): dash for setting, dash in zip(sorted(set(part["setting"])), cycle(DASHES))}
    return found


def draw(frame: pd.DataFrame, metric: str | None) -> Figure:
    """One panel for each model and task in the table, one legend below; metric: None takes each task's first."""
    if "status" in frame:
        frame = frame[frame["status"] != "refused"]
    frame = frame.sort_values(["model", "task"], kind="stable")
    panels = [(title, part) for title, _, part in parts(frame) if _comparable(part)]
    if not panels:
        raise ConfigError("no finished runs with a baseline to draw; run a sweep over kv_ratio first")
    metrics = [metric or str(part["headline"].dropna().iloc[0]) for _, part in panels]
    for (title, part), own in zip(panels, metrics, strict=True):
        if f"{own}_of_full" not in part:
            raise ConfigError(f"{title} has no metric {own!r}")
    shown = [drawable(part, own) for (_, part), own in zip(panels, metrics, strict=True)]
    if all(runs.empty for runs in shown):
        raise ConfigError(
            f"no run has a kv_ratio and a percentage of its baseline, which takes {MIN_PAIRS} examples or more: there "
            "is nothing to draw"
        )
    records: list[Any] = [row for runs in shown for row in runs.to_dict("records")]
    shared, rows = shared_settings(records)
    left = iter(rows)
    shown = [runs.assign(setting=[next(left)["setting"] for _ in range(len(runs))]) for runs in shown]
    shown = [with_n(runs, "paired") for runs in shown]
    dashes = dashes_of(pd.concat(shown))
    columns = min(PANELS, len(panels))
    figure = Figure(layout="constrained")
    for place, ((title, _), runs, own) in enumerate(zip(panels, shown, metrics, strict=True)):
        if runs.empty:
            continue
        axes = figure.add_subplot(ceil(len(panels) / columns), columns, place + 1)
        quality(runs, own, axes, dashes)
        title = titled(title, runs["question"]) if "question" in runs else title
        axes.set_title(textwrap.fill(f"{title} ({n_words(runs, 'paired')})", 52), fontsize=9)
    if shared:
        figure.suptitle(textwrap.fill(" ".join(shared), 60 * columns), fontsize=8)
    lines = legend_below(figure, 1.2 + PANEL[0] * columns)
    figure.set_size_inches(1.2 + PANEL[0] * columns, PANEL[1] * ceil(len(panels) / columns) + 0.18 * lines + 0.3)
    return figure


def _comparable(part: pd.DataFrame) -> bool:
    return bool((part["verdict99"].ne("baseline") & part["paired"].notna()).any())


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was run."""
    parser = argparse.ArgumentParser(prog="kvexp plot quality", description=__doc__.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", help="default: the task's first")
    add_choice(parser)
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw(table(args.outputs, chosen_by(args)), args.metric))
