"""docs/two_models.md: the mean places of 28 methods with two models, and how far the models' orders agree."""

from __future__ import annotations

import functools
from typing import Any

from matplotlib.figure import Figure

from experiments.pages import COLORS, ROOT, blank
from experiments.studies import KL_COLUMNS, read_wide
from experiments.studies.two_models import NAMES, agreements, blocks_of, moved, resampled


@functools.cache
def compared() -> tuple[Any, ...]:
    """Methods, blocks and their resampled means."""
    _, methods, blocks = blocks_of(read_wide(ROOT / "docs" / "two_models.csv", KL_COLUMNS, ["method"]))
    return methods, blocks, {key: resampled(block) for key, block in blocks.items()}


def draw() -> Figure:
    moves = moved(*compared())
    figure, (axes,) = blank(height=6.4)
    for row, move in moves.iterrows():
        style: Any = {"color": "black", "linewidth": 2.4} if move["sure"] else {"color": "0.75", "linewidth": 1.2}
        axes.plot([move["first"], move["second"]], [row, row], zorder=1, **style)
    for column, name, color in zip(("first", "second"), NAMES, COLORS, strict=False):
        axes.scatter(moves[column], moves.index, color=color, s=42, zorder=2)
        axes.text(moves[column].iloc[0], -1.2, name, color=color, ha="center", weight="bold")
    axes.set_yticks(moves.index, moves["method"])
    axes.set_ylim(len(moves) - 0.4, -1.9)
    axes.set_xlabel("mean place of 28 methods (1: nearest to the full cache)")
    axes.grid(axis="y", visible=False)
    return figure


def table() -> str:
    return agreements(*compared())
