"""Needle in a haystack as a heat-map: length across, depth down, greener is better.

kvexp plot-heatmap outputs/HASH needle.png
"""

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from kvexp.errors import ConfigError
from kvexp.figures.picture import write_picture
from kvexp.record.run_name import run_name
from kvexp.results.question_place import titled
from kvexp.results.read import folders

LETTER = 0.085  # inches of a letter in the title


def grid(rows: Iterable[Mapping[str, Any]], metric: str = "word_recall") -> pd.DataFrame:
    """Rows of a needle run -> mean of the metric in percent, index depth (percent), columns length (tokens).

    Repeats and questions of a cell are averaged; a cell of which nothing was scored, or skipped as too long, is NaN.
    `attrs["depths"]`: the words for each depth, with the measured one where needles stand elsewhere.
    """
    rows = list(rows)
    cells = [
        {**{key: row["info"][key] for key in ("length", "depth")}, metric: row["metrics"].get(metric)}
        for row in rows
        if {"length", "depth"} <= set(row.get("info") or {})
    ]
    if not cells:
        raise ConfigError("no row has a length and a depth: a heat-map is of task=needle, needle_multi or passkey")
    frame = pd.DataFrame(cells).astype({metric: float})
    if frame[metric].isna().all():
        raise ConfigError(f"no row has the metric {metric!r}: either all were skipped, or it is word_recall or exact")
    table = frame.pivot_table(metric, "depth", "length", aggfunc="mean", dropna=False)
    table.attrs["depths"] = [_depth(depth, rows) for depth in table.index]
    return table


def _depth(depth: float, rows: Iterable[Mapping[str, Any]]) -> str:
    """A depth as it was asked for, and from where to where needles really stand, where that is another place."""
    infos = [row["info"] for row in rows if (row.get("info") or {}).get("depth") == depth]
    found = [info["depth_measured"] for info in infos if info.get("depth_measured") is not None]
    if not found or max(abs(each - depth) for each in found) < 0.5:
        return f"{depth:g}"
    low, high = f"{min(found):.0f}", f"{max(found):.0f}"
    return f"{depth:g} ({low if low == high else f'{low}-{high}'})"


def heatmap(cells: pd.DataFrame, axes: Axes, title: str = "", bar: bool = True) -> AxesImage:
    """Draw a `grid` into axes, 0 red to 100 green; a cell without a number stays grey.

    bar=False: without a colour bar, for one that several of them share.
    """
    axes.set_facecolor("0.8")
    image = axes.imshow(cells.to_numpy(dtype=float), cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(cells.shape[1]), [f"{length:g}" for length in cells.columns])
    depths = cells.attrs.get("depths") or [f"{depth:g}" for depth in cells.index]
    axes.set_yticks(range(cells.shape[0]), depths)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth (measured), %" if "(" in "".join(depths) else "depth (%)")
    axes.set_title(title, fontsize=9)
    assert axes.figure is not None
    if bar:
        axes.figure.colorbar(image, ax=axes, label=cells.attrs.get("metric", "%"))
    return image


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what a run found at each length and depth."""
    parser = argparse.ArgumentParser(prog="kvexp plot heatmap", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run: outputs/HASH")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", default="word_recall", choices=("word_recall", "exact"))
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw(args.run, args.metric))


def draw(run: Path, metric: str) -> Figure:
    """The grid of one run's folder; ConfigError where it has none."""
    found = [folder for folder in folders(run.parent) if folder.run.path.name == run.name]
    if not found:
        raise ConfigError(f"{run} is no run; name its folder, as in outputs/HASH")
    cells = grid(found[0].rows, metric)
    labels = found[0].labels
    cells.attrs["metric"] = f"{metric} (%)"
    wide = 2.2 + 0.6 * cells.shape[1]
    figure = Figure(figsize=(wide, 1.9 + 0.35 * cells.shape[0]), layout="constrained")
    title = titled(f"{run_name(labels)}, {labels['model']}", [found[0].question])
    heatmap(cells, figure.add_subplot(), textwrap.fill(title, int(wide / LETTER)))
    return figure
