"""Figures and tables of the pages of results, each made from its committed recording.

    python -m experiments.pages                  all pages
    python -m experiments.pages decoding gpu     these

A page NAME has a module here of the same name, with `draw() -> Figure` and `table() -> str` (Markdown), and `PAGE` if
the page is not docs/NAME.md; the first page, index, has a figure alone. The figure becomes docs/NAME.svg; the table
goes between the page's two marks. Pages have one form, which tests/test_pages.py holds: a question, its answer, the
figure, the table, what it does not say, how it was measured, the command.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.lib import tables

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- table: python -m experiments.pages {name} -->", "<!-- end of table -->"
# Okabe and Ito's colours, which the colour-blind can distinguish, without their yellow, which is too pale on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT = 7.2, 4.0  # inches; 700 px of a page show 10 points of a letter as 9.7 px
# A ground of its own makes a figure legible on a dark page too; the salt makes the same file again.
STYLE = {"font.size": 10.5, "svg.hashsalt": "kvexp", "savefig.facecolor": "white", "axes.spines.top": False}
STYLE |= {"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}


@dataclass(frozen=True)
class Curve:
    """A line of a figure, named at its right end. low, high: the ends of 95 % intervals at each x, if known."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def named() -> list[str]:
    """The pages that have a module here, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def path_of(name: str) -> Path:
    """The Markdown file of a page."""
    module = importlib.import_module(f"experiments.pages.{name}")
    return Path(getattr(module, "PAGE", DOCS / f"{name}.md"))


def blank(panels: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure of a page's width, and its panels side by side."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def curves(axes: Axes, lines: Sequence[Curve], xlabel: str, ylabel: str = "", log: str = "y") -> None:
    """Draw up to seven curves with intervals and name each at its end. log: axes with a log scale ("", "x", "xy")."""
    if len(lines) > len(COLORS):
        raise ValueError(f"{len(lines)} curves: a figure of a page has {len(COLORS)} at most")
    for line, color in zip(lines, COLORS, strict=False):
        axes.plot(line.x, line.y, "o-", color=color, markersize=4, linewidth=1.8)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, linewidth=0)
    for name, scale in (("x", axes.set_xscale), ("y", axes.set_yscale)):
        scale("log" if name in log else "linear")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    places = sorted({x for line in lines for x in line.x})
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if "y" in log:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: ""))
    name_ends(axes, lines)


def name_ends(axes: Axes, lines: Sequence[Curve], apart: float = 0.062) -> None:
    """Write the curves' names at their right ends, moved up or down until they are this share of the height apart."""
    low, high = (axes.transScale.transform((1, limit))[1] for limit in axes.get_ylim())
    ends = [(axes.transScale.transform((1, line.y[-1]))[1] - low) / (high - low) for line in lines]
    order = np.argsort(ends)
    places = np.array(ends)[order]
    for _ in range(200):  # neighbours that are too near push each other away
        gaps = apart - np.diff(places)
        push = np.where(gaps > 1e-4, gaps / 2, 0.0)
        places += np.append(0.0, push) - np.append(push, 0.0)
    for place, index in zip(places, order, strict=True):
        text = f" {lines[index].name}"
        axes.text(1.0, place, text, transform=axes.transAxes, va="center", color=COLORS[index], clip_on=False)


def dots(axes: Axes, rows: Sequence[tuple[str, Sequence[tuple[float, float, float]]]], names: Sequence[str]) -> None:
    """Draw values with intervals: a row for each (label, [(value, low, high) of each name]); the first row on top."""
    axes.set_ylim(0.5 - len(rows), 0.5)
    for place, (_, values) in enumerate(rows):
        axes.axhspan(-place - 0.5, -place + 0.5, color="white" if place % 2 else "0.95", linewidth=0)
        for index, (value, low, high) in enumerate(values):
            y = -place + 0.25 * ((len(names) - 1) / 2 - index) / max(1, len(names) - 1) * 2
            color = COLORS[index]
            axes.plot([low, high], [y, y], color=color, linewidth=1.6)
            axes.plot(value, y, "o", color=color, markersize=5, label=names[index] if place == 0 else None)
    axes.set_yticks([-place for place in range(len(rows))], [label for label, _ in rows])
    axes.grid(axis="y", visible=False)
    if len(names) > 1:
        axes.legend(frameon=False, loc="best", labelcolor="linecolor", handletextpad=0.2)


def log_nats(axes: Axes) -> None:
    """A log scale across, with plain numbers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as Markdown, columns after the first aligned right; at most twelve rows."""
    if len(rows) > 12:
        raise ValueError(f"{len(rows)} rows: a table of a page has 12 at most")
    return tables.markdown(head, *([str(cell) for cell in row] for row in rows), right=True)


def with_table(text: str, name: str, table: str) -> str:
    """A page's text with this table between its marks; ConfigError where it has no such marks."""
    return tables.between(text, BEGIN.format(name=name), END, table, f"docs/{name}.md")


def make(name: str) -> None:
    """Write docs/NAME.svg and the table of the page."""
    page, module = path_of(name), importlib.import_module(f"experiments.pages.{name}")
    with rc_context(STYLE):
        module.draw().savefig(DOCS / f"{name}.svg", metadata={"Date": None})
    if hasattr(module, "table"):
        page.write_text(with_table(page.read_text("utf-8"), name, module.table()), encoding="utf-8")
