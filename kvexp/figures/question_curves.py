"""Percent of full against the number of questions asked of one evicted cache, a line per method and budget.

python -m kvexp.figures.question_curves outputs/ questions.png
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvexp.figures.picture import write_picture
from kvexp.figures.quality import PANEL
from kvexp.figures.style import color_of, marker_of
from kvexp.pipes import watch_pipes
from kvexp.record.run_name import run_name
from kvexp.results.columns import shared_settings, without_question
from kvexp.results.many_questions import read_questions
from kvexp.results.question_place import titled
from kvexp.results.where import where

SIDES = {"of_full": "% of full", "none_lost": "% of contexts with no answer lost"}


def draw(frame: pd.DataFrame) -> Figure:
    """A row of panels per model and task of a frame of `questions_table`: mean score, and contexts that lost nothing.

    Bars are 95 % intervals over contexts; where there are too few contexts for one, points are hollow.
    """
    panels = list(frame.groupby(["model", "task"], sort=True))
    figure = Figure(layout="constrained", figsize=(PANEL[0] * len(SIDES), PANEL[1] * len(panels)))
    every = figure.subplots(len(panels), len(SIDES), squeeze=False)
    for row, ((model, task), part) in zip(every, panels, strict=True):
        records: list[Any] = part.to_dict("records")
        shared, left = shared_settings(without_question(records))
        runs = pd.DataFrame(left)
        title = ", ".join([titled(f"{model}, {task}", runs["question"]), *shared])
        for axes, (column, words) in zip(row, SIDES.items(), strict=True):
            _lines(runs, column, axes)
            axes.set_ylabel(f"{runs['metric'].iloc[0]}, {words}" if column == "of_full" else words, fontsize=8)
            axes.set_title(textwrap.fill(f"{title} ({int(runs['contexts'].max())} contexts)", 52), fontsize=8)
    every[0][0].legend(fontsize=6, loc="best", framealpha=0.7)
    return figure


def _lines(runs: pd.DataFrame, column: str, axes: Axes) -> None:
    axes.axhline(100, color="black", linewidth=1.0)
    for _, line in runs.groupby("hash", sort=False):
        line = line.sort_values("asked")
        first = {str(name): value for name, value in line.iloc[0].items()}
        method, ratio = str(first["method"]), first.get("kv_ratio")
        look: dict[str, Any] = {"color": color_of(method), "marker": marker_of(method), "markersize": 4}
        wide = 0.6 + 1.6 * (0.5 if ratio is None or pd.isna(ratio) else ratio)
        axes.plot(line["asked"], line[column], linewidth=wide, label=run_name(first), **look)
        if column == "of_full":
            known = line[line["low"].notna()]
            axes.vlines(known["asked"], known["low"], known["high"], color=color_of(method), linewidth=0.8)
            few = line[line["low"].isna()]
            axes.plot(few["asked"], few[column], linestyle="none", markerfacecolor="white", zorder=3, **look)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("questions asked of one evicted cache", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what runs of questions=all answered."""
    parser = argparse.ArgumentParser(
        prog="python -m kvexp.figures.question_curves", description=__doc__.splitlines()[0]
    )
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--where", "-w", nargs="+", action="extend", default=[], metavar="LABEL=VALUE")
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw(read_questions(args.outputs, where(args.where))))


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
