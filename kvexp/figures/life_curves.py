"""The life of a context as curves: turns, distance of a fact, questions asked, chunks, long answers, instructions.

python -m kvexp.figures.life_curves outputs/ turns.png --of turns
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvexp.errors import ConfigError
from kvexp.figures.legend import legend_below
from kvexp.figures.picture import write_picture
from kvexp.figures.quality import PANEL
from kvexp.figures.style import DASHES, color_of, marker_of
from kvexp.results.context_life import VIEWS, Line, Side, Value, chart_of
from kvexp.results.where import add_choice, chosen_by

LEAST = 1e-6  # on a logarithmic axis, which cannot hold 0


def draw(outputs: str | Path, wanted: dict[str, Any], of: str) -> Figure:
    """A row of panels for each table that `kvexp` prints of this view (`kvexp.results.context_life`).

    Bars are 95 % intervals; points without one are hollow where others of the panel have one. ConfigError where no run
    is of this kind.
    """
    view = VIEWS[of]
    frame = view.read(outputs, wanted)
    blocks = [(title, rows) for title, rows, _, _ in view.blocks(frame)] if len(frame) else []
    panels = [(title, places, lines) for title, rows in blocks for places, lines in [chart_of(view, rows)] if lines]
    if not panels:
        raise ConfigError(f"no run under {outputs} has a place in this figure; kvexp {view.command} says what it needs")
    figure = Figure(layout="constrained")
    every = figure.subplots(len(panels), len(view.sides), squeeze=False)
    for row, (title, places, lines) in zip(every, panels, strict=True):
        for number, (axes, side) in enumerate(zip(row, view.sides, strict=True)):
            _side(axes, side, number, lines)
            axes.set_xticks(range(len(places)), places)
            axes.set_xlim(-0.4, len(places) - 0.6)
            axes.set_xlabel(view.x, fontsize=8)
            axes.set_title(textwrap.fill(title, 56), fontsize=8)
    width = PANEL[0] * len(view.sides)
    figure.set_size_inches(width, (PANEL[1] + 0.5) * len(panels) + 0.18 * legend_below(figure, width))
    return figure


def _side(axes: Axes, side: Side, number: int, lines: Sequence[Line]) -> None:
    """The lines of one axis, of the `number`-th value of their points."""
    if side.level is not None:
        axes.axhline(side.level, color="black", linewidth=1.0)
    least = LEAST if side.log else -math.inf
    bars = any(math.isfinite(values[number][1]) for line in lines for _, _, values in line.points)
    seen: dict[str, int] = {}
    for place, line in enumerate(lines):
        dash = DASHES[seen.setdefault(line.method, 0) % len(DASHES)]
        seen[line.method] += 1
        found = [(x, values[number]) for x, _, values in line.points if math.isfinite(values[number][0])]
        if not found:
            continue
        aside = 0.3 * ((place + 0.5) / len(lines) - 0.5)
        xs, ys = [x + aside for x, _ in found], [max(value[0], least) for _, value in found]
        look: dict[str, Any] = {"color": color_of(line.method), "marker": marker_of(line.method), "markersize": 4}
        reach = [[_reach(value, end, least) for _, value in found] for end in (1, 2)]
        axes.errorbar(xs, ys, reach, label=line.label, linestyle=dash, linewidth=1.2, elinewidth=0.8, capsize=2, **look)
        few = [math.isnan(value[1]) and bars for _, value in found]
        hollow = [(x, y) for x, y, is_few in zip(xs, ys, few, strict=True) if is_few]
        alone = [[point[end] for point in hollow] for end in (0, 1)]
        axes.plot(*alone, linestyle="none", markerfacecolor="white", zorder=3, **look)
    axes.set_ylabel(side.title, fontsize=8)
    axes.set_yscale("log") if side.log else axes.set_ylim(bottom=0)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _reach(value: Value, end: int, least: float) -> float:
    """From a value to an end of its interval; 0 without one."""
    return 0.0 if math.isnan(value[end]) else abs(max(value[end], least) - max(value[0], least))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was run."""
    parser = argparse.ArgumentParser(prog="kvexp plot life", description=__doc__.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--of", choices=tuple(VIEWS), required=True, help="which of the views")
    add_choice(parser)
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw(args.outputs, chosen_by(args), args.of))
