"""KL divergence from the full cache on a log axis, a line per method, with epsilon and known changes of the model.

python -m kvexp.figures.divergence_curves outputs/ kl.png --x bytes
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvexp.errors import ConfigError
from kvexp.figures.picture import write_picture
from kvexp.figures.quality import PANEL, PANELS, dashes_of
from kvexp.figures.style import color_of, marker_of
from kvexp.record.divergence_lines import OWN, TEXTS, read
from kvexp.record.run_name import run_name
from kvexp.results.columns import n_words, parts, shared_settings, with_n
from kvexp.results.divergence_scale import scale_of
from kvexp.results.divergence_table import by_position, divergence_table
from kvexp.results.question_place import titled
from kvexp.results.read import Folder, chosen, folders
from kvexp.results.where import add_choice, chosen_by

X_AXES = {"kv_ratio": "kv_ratio (budget / prompt tokens)", "bytes": "KV cache at the end, MiB per row"}
POSITION = "position"
LINE = 0.05  # between the words of two levels, of the axis
LEAST = 1e-6  # nats: what float32 cannot tell from 0, and a log axis cannot hold
MIB = 2**20


def divergence(frame: pd.DataFrame, axes: Axes, x: str = "kv_ratio", scale: Sequence[dict[str, Any]] = ()) -> None:
    """Draw the runs of one model, task and text: rows of `divergence_table`; bars are 95 % intervals over examples.

    scale: rows of `scale_of`, as grey levels. Points of too few examples for an interval are hollow.
    """
    runs = frame.assign(x=frame["kv_bytes"] / MIB if x == "bytes" else frame["kv_ratio"])
    runs = runs[runs["x"].notna()]
    if runs.empty:
        raise ConfigError(f"no run with a divergence has a place on the axis {x}: nothing to draw")
    dashes = dashes_of(runs)
    _levels(frame, axes, scale)
    for (method, setting), line in runs.groupby(["method", "setting"], sort=True):
        line = line.sort_values("x")
        kl = line["kl"].clip(lower=LEAST)
        ends = (kl - line["kl_low"].clip(lower=LEAST), line["kl_high"] - kl)
        reach = [side.fillna(0).clip(lower=0).to_numpy() for side in ends]
        look: dict[str, Any] = {"color": color_of(str(method)), "marker": marker_of(str(method)), "markersize": 4}
        bars: dict[str, Any] = {"linewidth": 1.4, "elinewidth": 0.8, "capsize": 2}
        few = line["kl_low"].isna()
        axes.errorbar(
            line["x"],
            kl,
            reach,
            label=f"{method} {setting}".rstrip(),
            linestyle=dashes[str(method), str(setting)],
            **look,
            **bars,
        )
        axes.plot(line["x"][few], kl[few], linestyle="none", markerfacecolor="white", zorder=3, **look)
    axes.set_xlabel(X_AXES[x])


def along(runs: Sequence[Folder], text: str, frame: pd.DataFrame, axes: Axes) -> None:
    """Draw mean KL at each place of the text, a line per run; wider lines hold more."""
    _levels(frame, axes, ())
    for folder in runs:
        lines = [line for (_, kind), line in read(folder.run).items() if kind == text]
        each, method = by_position(lines), str(folder.labels["method"])
        ratio = folder.labels.get("kv_ratio")
        row = frame[frame["hash"] == folder.run.hash].iloc[0]
        label = run_name({str(name): value for name, value in row.items()})
        width = 0.6 + 1.6 * (0.5 if ratio is None else ratio)
        axes.plot(each["position"], each["kl"].clip(lower=LEAST), color=color_of(method), linewidth=width, label=label)
    axes.set_xlabel("place of the token in the text")


def _without_shared(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows with what of `setting` they do not share, and what they all do."""
    filled = frame.assign(setting=frame["setting"].fillna("").astype(str) if "setting" in frame else "")
    records: list[Any] = filled.to_dict("records")
    shared, rows = shared_settings(records)
    return filled.assign(setting=[row["setting"] for row in rows]), " ".join(shared)


def _levels(frame: pd.DataFrame, axes: Axes, scale: Sequence[dict[str, Any]]) -> None:
    """Epsilon and the scale as levels, and the look of the axes."""
    axes.set_yscale("log")
    axes.set_ylabel("KL from the full cache, nats per token")
    for _, value, color, style in _marks(frame, scale):
        axes.axhline(value, color=color, linewidth=1.0, linestyle=style)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _marks(frame: pd.DataFrame, scale: Sequence[dict[str, Any]]) -> list[tuple[str, float, str, str]]:
    """(words, nats, colour, line) of each level."""
    marks = [(f"epsilon {value:g}", float(value), "black", "--") for value in sorted(set(frame["epsilon"]))]
    return marks + [(row["change"], row["kl"], "0.35", ":") for row in scale if row["kl"] > LEAST]


def _name_levels(frame: pd.DataFrame, axes: Axes, scale: Sequence[dict[str, Any]]) -> None:
    """Words of the levels to the right of the axes, whose limits are final, one above the other where they are near."""
    low, high = np.log(axes.get_ylim())
    free = 0.0
    for words, value, color, _ in sorted(_marks(frame, scale), key=lambda mark: mark[1]):
        place = max(free, (np.log(value) - low) / (high - low))
        axes.annotate(words, (1.01, place), xycoords="axes fraction", color=color, fontsize=7, va="center")
        free = place + LINE


def draw(outputs: str | Path, wanted: dict[str, Any], x: str, text: str = OWN) -> Figure:
    """A panel per model and task of the folder, along one kind of text. x: kv_ratio, bytes or position."""
    shown = [folder for folder in chosen(folders(outputs), wanted) if not folder.refused]
    frame = divergence_table(shown)
    frame = frame[frame["text"] == text] if len(frame) else frame
    if frame.empty:
        raise ConfigError(f"no run here has a divergence along {text}: kvexp divergence {outputs} measures it")
    panels = [(title, part) for title, _, part in parts(frame.sort_values(["model", "task"], kind="stable"))]
    columns = min(PANELS, len(panels))
    size = ((PANEL[0] + 1.2) * columns, (PANEL[1] + 0.9) * ceil(len(panels) / columns))  # room for words and a legend
    figure = Figure(layout="constrained", figsize=size)
    for place, (title, part) in enumerate(panels):
        axes = figure.add_subplot(ceil(len(panels) / columns), columns, place + 1)
        runs = [folder for folder in shown if folder.run.hash in set(part["hash"])]
        runs.sort(key=lambda folder: (str(folder.labels["method"]), folder.labels.get("kv_ratio") or 0))
        part, shared = _without_shared(part)
        part = with_n(part)
        scale = [] if x == POSITION else scale_of(folder.run for folder in runs)
        if x == POSITION:
            along(runs, text, part, axes)
        else:
            divergence(part, axes, x, scale)
        _name_levels(part, axes, scale)
        title = f"{titled(title, part['question'])} {shared} ({n_words(part)})"
        axes.set_title(textwrap.fill(title, 52), fontsize=9)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was measured."""
    parser = argparse.ArgumentParser(prog="kvexp plot divergence", description=__doc__.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--x", choices=(*X_AXES, POSITION), default="kv_ratio", help="default: kv_ratio")
    parser.add_argument("--text", choices=TEXTS, default=OWN, help="the text that was forced (default: own)")
    add_choice(parser)
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw(args.outputs, chosen_by(args), args.x, args.text))
