"""A causal measurement as a picture: rank correlations of scores, by layer, and effect kept against divergence."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvexp.diagnose.causal.causal_tables import FIFTHS, CausalTables, mass_rows, score_rows
from kvexp.diagnose.classes import CLASSES
from kvexp.figures.style import color_of


def draw_causal(tables: CausalTables, title: str) -> Figure:
    """Four panels: correlation of every score, the same by layer, effect kept against KL, and where the effect is."""
    rows = score_rows(tables)
    figure = Figure(figsize=(13, 3.2 + 0.32 * len(rows)), layout="constrained")
    figure.suptitle(f"{title} (n = {len(tables.examples)})", fontsize=11)
    (bars, heat), (kept, where) = figure.subplots(2, 2, height_ratios=[1 + 0.06 * len(rows), 1])
    _bars(bars, rows)
    _by_layer(heat, tables, [str(row["method"]) for row in rows])
    _kept(kept, rows)
    _where(where, tables)
    return figure


def _bars(axis: Axes, rows: list[dict[str, object]]) -> None:
    values = np.array([row["rho"] for row in rows], dtype=float)
    ends = np.array([[row["rho_low"], row["rho_high"]] for row in rows], dtype=float)
    spread = np.abs(ends - values[:, None]).T
    places = np.arange(len(rows))[::-1]
    axis.barh(places, values, color=[color_of(str(row["method"])) for row in rows], height=0.7)
    if np.isfinite(spread).all():
        axis.errorbar(values, places, xerr=spread, fmt="none", ecolor="k", elinewidth=1, capsize=2)
    axis.set_yticks(places, [str(row["method"]) for row in rows], fontsize=8)
    axis.axvline(0, color="k", lw=0.8)
    axis.grid(axis="x", alpha=0.3)
    axis.set_title("rank correlation of the score with the effect of removing a token", fontsize=10)


def _by_layer(axis: Axes, tables: CausalTables, order: list[str]) -> None:
    means = tables.layers.groupby(["method", "layer"])["rho"].mean().unstack("layer").loc[order]
    image = axis.imshow(means.to_numpy(dtype=float), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="none")
    axis.set_yticks(range(len(order)), order, fontsize=8)
    axis.set_xlabel("layer")
    axis.set_title("the same, of the score in one layer", fontsize=10)
    assert axis.figure is not None
    solids = axis.figure.colorbar(image, ax=axis).solids
    assert solids is not None
    solids.set_rasterized(True)  # else 256 shapes in an .svg


def _kept(axis: Axes, rows: list[dict[str, object]]) -> None:
    for row in rows:
        mass, kl, name = float(str(row["mass"])), float(str(row["joint_kl"])), str(row["method"])
        if np.isfinite(mass) and np.isfinite(kl):
            axis.plot(100 * mass, kl, "o", color=color_of(name))
            axis.annotate(name, (100 * mass, kl), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axis.set_xlabel("effect kept (percent of the sum over tokens)")
    axis.set_ylabel("KL of all evicted (nats per token)")
    axis.grid(alpha=0.3)
    axis.set_title("does keeping the tokens with an effect keep the answer?", fontsize=10)


def _where(axis: Axes, tables: CausalTables) -> None:
    shares = {str(row["group"]): row for row in mass_rows(tables)}
    names = [name for name in (*CLASSES, *FIFTHS) if name in shares]
    places = np.arange(len(names))
    axis.bar(places - 0.2, [100 * shares[name]["weight"] for name in names], width=0.4, color="#999999", label="tokens")
    axis.bar(places + 0.2, [100 * shares[name]["mass"] for name in names], width=0.4, color="#d55e00", label="effect")
    axis.set_xticks(places, names, rotation=40, ha="right", fontsize=8)
    axis.set_ylabel("percent")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8)
    axis.set_title("where the effect is", fontsize=10)
