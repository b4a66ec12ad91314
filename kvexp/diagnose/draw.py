"""Twin runs as pictures: a heat-map of layers and heads, and curves over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvexp.diagnose.folders import rows_of
from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import TWIN, has, read_table
from kvexp.record import Run

# measure -> (title, the end of the color scale, color map)
SHOWN = {
    "lost": ("attention on evicted slots", 1.0, "magma_r"),
    "lost_ideal": ("the same, had it kept the ideal set", 1.0, "magma_r"),
    "overlap": ("overlap with the ideal set", 1.0, "viridis"),
    "error": ("output error, layers below included", None, "magma_r"),
    "error_here": ("output error of this head alone", None, "magma_r"),
}
KINDS = (".png", ".svg", ".pdf")
CURVES = ("lost", "overlap", "error", "error_here")


def losses(run: Run, examples: Sequence[str] | None = None) -> pd.DataFrame:
    """The twin rows of these examples (None: of all that have some), with a column `example`."""
    names = list(rows_of(run)) if examples is None else list(examples)
    if examples is None:
        names = [name for name in names if has(run, name, TWIN)]
    if not names:
        raise ConfigError(f"{run.path} has no twin: run the same command again with diagnose=twin (its rows stay)")
    frame = pd.concat([read_table(run, name, TWIN).assign(example=name) for name in names], ignore_index=True)
    if frame.empty:
        raise ConfigError(f"{run.path}: no answer has a second token, so no query saw what was evicted")
    return frame


def heatmaps(frame: pd.DataFrame, title: str) -> Figure:
    """Layer down, head across, means over steps and then over examples; one panel per measure."""
    whole = frame.groupby(["example", "layer", "head"])[list(SHOWN)].mean().groupby(["layer", "head"]).mean()
    layers, heads = (len(whole.index.unique(level)) for level in ("layer", "head"))
    size = (1.6 + min(max(0.42 * heads, 1.4), 7), 1.3 + min(max(0.34 * layers, 1.0), 8))
    figure = Figure(figsize=(size[0] * 3, size[1] * 2), layout="constrained")
    axes = list(figure.subplots(2, 3).flat)
    worst = max(float(whole[["error", "error_here"]].max().max()), 1e-9)  # of both, so that they compare
    for axis, (measure, (words, top, colors)) in zip(axes, SHOWN.items(), strict=False):
        _heatmap(axis, whole[measure].unstack("head"), words, top or worst, colors)
    axes[-1].axis("off")
    examples, steps = frame["example"].nunique(), frame.groupby("example")["step"].nunique().mean()
    note = f"{title}\n\n{examples} example{'s' if examples > 1 else ''},\nmean of {steps:.1f} steps each"
    axes[-1].text(0.02, 0.95, note.replace(", ", ",\n"), va="top", fontsize=11)
    return figure


def _heatmap(axis: Axes, cells: pd.DataFrame, words: str, top: float, colors: str) -> None:
    axis.set_facecolor("0.8")
    image = axis.imshow(cells.to_numpy(dtype=float), cmap=colors, vmin=0, vmax=top, aspect="auto", interpolation="none")
    for set_ticks, labels in ((axis.set_xticks, cells.columns), (axis.set_yticks, cells.index)):
        each = max(1, -(-len(labels) // 16))
        set_ticks(range(0, len(labels), each), [str(label) for label in labels[::each]])
    if cells.size <= 64:
        for (row, column), value in np.ndenumerate(cells.to_numpy(dtype=float)):
            dark = (value / top > 0.55) != (colors == "viridis")
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="w" if dark else "k", fontsize=8)
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.set_title(words, fontsize=10)
    assert axis.figure is not None
    solids = axis.figure.colorbar(image, ax=axis).solids
    assert solids is not None
    solids.set_rasterized(True)  # else 256 shapes in an .svg


def curves(frame: pd.DataFrame, title: str) -> Figure:
    """One line per layer, mean over heads and examples; what ends earlier than the longest answer leaves the mean."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    layers = sorted(frame["layer"].unique())
    for axis, measure in zip(figure.subplots(2, 2, sharex=True).flat, CURVES, strict=True):
        for layer in layers:
            line = frame[frame["layer"] == layer].groupby("step")[measure].mean()
            shade = 0.05 + 0.8 * layer / max(layers[-1], 1)
            color = matplotlib.colormaps["plasma"](shade)
            marker = "o" if len(line) == 1 else None
            axis.plot(line.index, line.to_numpy(), color=color, label=f"layer {layer}", lw=1.4, marker=marker)
        if measure == "lost":
            ideal = frame.groupby("step")["lost_ideal"].mean()
            axis.plot(ideal.index, ideal.to_numpy(), "k--", lw=1, label="ideal set, all layers")
        axis.set_title(SHOWN[measure][0], fontsize=10)
        axis.set_ylim(0, 1.02 if measure in ("lost", "overlap") else None)
        axis.grid(alpha=0.3)
        axis.set_xlabel("decode step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].legend(fontsize=7, ncols=1 + len(layers) // 9)
    return figure


def check_picture(file: Path) -> None:
    """ConfigError for a kind of picture there is not."""
    if file.suffix not in KINDS:
        raise ConfigError(f"{file} must end in {', '.join(KINDS)}")


def save(figure: Figure, file: Path) -> None:
    """Write the figure; errors as `check_picture`. In an .svg letters stay letters, which makes it smaller."""
    check_picture(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, dpi=110)
