"""Quality against kv_ratio, one line per method, with the full cache's level and the 99 % mark.

python -m kvexp.figures.quality outputs/ quality.png --metric rouge2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvexp.errors import ConfigError
from kvexp.figures.style import MARK_COLOR, color_of, marker_of
from kvexp.results import table


def quality(frame: pd.DataFrame, metric: str, axes: Axes) -> None:
    """Draw one model and task's runs: `frame` as `kvexp.results.table` gives it, in percent of the baseline.

    The bars are the paired bootstrap's 95 % intervals. Methods with several settings get one line per setting.
    """
    runs = frame[frame["verdict99"].ne("baseline") & frame[f"{metric}_of_full"].notna() & frame["kv_ratio"].notna()]
    if runs.empty:
        raise ConfigError(f"no run has a kv_ratio and a percentage of its baseline in {metric}: nothing to draw")
    axes.axhline(100, color="black", linewidth=1.2, label="full")
    axes.axhline(99, color=MARK_COLOR, linewidth=1.0, linestyle="--", label="99 % of full")
    names = ["method", *(["setting"] if "setting" in runs and runs["setting"].fillna("").ne("").any() else [])]
    for key, line in runs.fillna({name: "" for name in names}).groupby(names, sort=True):
        method, line = str(key[0]), line.sort_values("kv_ratio")
        label = " ".join(str(part) for part in key if part)
        middle = line[f"{metric}_of_full"]
        reach = [(middle - line[f"{metric}_low"]).clip(lower=0), (line[f"{metric}_high"] - middle).clip(lower=0)]
        axes.errorbar(
            *(line["kv_ratio"], middle, reach),
            **{"color": color_of(method), "marker": marker_of(method), "label": label},
            **{"markersize": 4, "linewidth": 1.4, "elinewidth": 0.8, "capsize": 2},
        )
    axes.set_xlabel("kv_ratio (budget / prompt tokens)")
    axes.set_ylabel(f"{metric}, % of full")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def draw(frame: pd.DataFrame, metric: str | None) -> Figure:
    """One panel for each model and task in the table; metric: None takes the task's first."""
    panels = [(key, part) for key, part in frame.groupby(["model", "task"], sort=True) if _comparable(part)]
    if not panels:
        raise ConfigError("no finished runs with a baseline to draw; run a sweep over kv_ratio first")
    figure = Figure(figsize=(1.2 + 4.4 * len(panels), 3.6), layout="constrained")
    for place, ((model, task), part) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        own = metric or str(part["headline"].dropna().iloc[0])
        if f"{own}_of_full" not in part:
            raise ConfigError(f"{task} has no metric {own!r}")
        quality(part, own, axes)
        counts = part["n"].dropna()
        axes.set_title(f"{model}, {task} (n = {int(counts.min())})", fontsize=9)
    axes.legend(fontsize=7, loc="lower right")
    return figure


def _comparable(part: pd.DataFrame) -> bool:
    return bool((part["verdict99"].ne("baseline") & part["paired"].notna()).any())


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was run; 0, or 2 if there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m kvexp.figures.quality", description=__doc__.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", help="default: the task's first")
    parser.add_argument("--where", "-w", nargs="+", action="extend", default=[], metavar="LABEL=VALUE")
    args = parser.parse_args(argv)
    try:
        draw(table(args.outputs, _where(args.where)), args.metric).savefig(args.picture, dpi=150)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.picture}")
    return 0


def _where(pairs: Sequence[str]) -> Mapping[str, Any]:
    from kvexp.results.__main__ import where

    return where(pairs)


if __name__ == "__main__":
    sys.exit(main())
