"""A causal measurement as a picture: a row per score with four measures side by side, and where the effect is."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvexp.diagnose.causal.causal_tables import FIFTHS, CausalTables, mass_rows, score_rows
from kvexp.diagnose.causal.removal_effects import ANSWER_SCORES
from kvexp.diagnose.classes import CLASSES

METHOD, YARDSTICK, EFFECT, TOKENS = "#4477aa", "#aaaaaa", "#d55e00", "#bbbbbb"
HEIGHT = 0.24  # inches of a row
Row = dict[str, Any]


def draw_causal(tables: CausalTables, title: str) -> Figure:
    """Of every score: rank correlation, the same by layer, effect kept, KL of all evicted; then where the effect is."""
    rows = score_rows(tables)
    figure = Figure(figsize=(12, 4.2 + HEIGHT * len(rows)), layout="constrained")
    figure.suptitle(f"{title} (n = {len(tables.examples)}, bars: 95 % over examples)", fontsize=11)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.2 + HEIGHT * len(rows), 2.6])
    above, below = parts
    bars, heat, kept, kl = above.subplots(1, 4, sharey=True, width_ratios=[1.1, 1.1, 1, 1])
    names = [str(row["method"]) for row in rows]
    _bars(bars, rows)
    _by_layer(heat, tables, names)
    _kept(kept, rows)
    _divergence(kl, rows)
    bars.set_yticks(range(len(rows)), names, fontsize=8)
    bars.set_ylim(len(rows) - 0.5, -0.5)
    _where(below, tables)
    return figure


def _bars(axis: Axes, rows: list[Row]) -> None:
    colors = [YARDSTICK if row["method"] in ANSWER_SCORES else METHOD for row in rows]
    axis.barh(range(len(rows)), _values(rows, "rho"), color=colors, height=0.7)
    _intervals(axis, rows, "rho")
    axis.axvline(0, color="k", lw=0.8)
    axis.grid(axis="x", alpha=0.3)
    axis.set_title("rank correlation of the score\nwith the effect of a token", fontsize=9)


def _by_layer(axis: Axes, tables: CausalTables, order: list[str]) -> None:
    means = tables.layers.groupby(["method", "layer"])["rho"].mean().unstack("layer").loc[order]
    image = axis.imshow(means.to_numpy(dtype=float), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="none")
    axis.set_xlabel("layer", fontsize=8)
    axis.set_title("the same,\nof the score in one layer", fontsize=9)
    assert axis.figure is not None
    solids = axis.figure.colorbar(image, ax=axis, location="bottom", aspect=30).solids
    assert solids is not None
    solids.set_rasterized(True)  # else 256 shapes in an .svg


def _kept(axis: Axes, rows: list[Row]) -> None:
    scaled = [{key: 100 * row[key] for key in ("mass", "mass_low", "mass_high", "kept")} for row in rows]
    _dots(axis, scaled, "mass", EFFECT, "effect")
    axis.plot(_values(scaled, "kept"), range(len(rows)), "|", color="k", ms=8, label="tokens")
    axis.legend(fontsize=7, loc="upper center")  # beside the yardsticks, which keep nothing
    axis.set_title("effect kept\n(percent of the sum over tokens)", fontsize=9)


def _divergence(axis: Axes, rows: list[Row]) -> None:
    axis.set_xscale("log")
    _dots(axis, rows, "joint_kl", METHOD, "")
    axis.set_title("KL of all evicted\n(nats per token)", fontsize=9)


def _dots(axis: Axes, rows: list[Row], key: str, color: str, label: str) -> None:
    axis.plot(_values(rows, key), range(len(rows)), "o", color=color, ms=5, label=label)
    _intervals(axis, rows, key, color)
    axis.grid(alpha=0.3)


def _intervals(axis: Axes, rows: list[Row], key: str, color: str = "k") -> None:
    low, high = (_values(rows, f"{key}_{end}") for end in ("low", "high"))
    some = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    # On a log scale an interval that reaches 0 ends at a third of the smallest value.
    least = np.nanmin(_values(rows, key)) / 3 if axis.get_xscale() == "log" else -np.inf
    axis.hlines(some, np.maximum(low[some], least), high[some], color=color, lw=1)


def _values(rows: list[Row], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], dtype=float)


def _where(below: Any, tables: CausalTables) -> None:
    shares = {str(row["group"]): row for row in mass_rows(tables)}
    for axis, groups, words in zip(
        below.subplots(1, 2, sharey=True), (CLASSES, FIFTHS), ("class", "place in the prompt"), strict=True
    ):
        names = [name for name in groups if name in shares]
        places = np.arange(len(names))
        for shift, key, color, label in ((-0.2, "weight", TOKENS, "tokens"), (0.2, "mass", EFFECT, "effect")):
            axis.bar(places + shift, [100 * shares[name][key] for name in names], width=0.4, color=color, label=label)
        axis.set_xticks(places, names, fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.set_title(f"where the effect is: {words} (percent)", fontsize=9)
        axis.legend(fontsize=7)
