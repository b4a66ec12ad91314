"""Pictures of one method's settings: a line over one of them, or a grid over two."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.curves import HEIGHT, METRICS, WIDTH, finish, legend, levels, line_of, panels_of


def settings_curves(table: pd.DataFrame, figure: Figure, x: str, xlabel: str) -> None:
    """A panel per model and task: the metric over a numeric column of the setting, NaN for full."""
    panels = panels_of(table)
    figure.set_size_inches(WIDTH * len(panels) + 0.3, HEIGHT + 0.55)
    figure.set_layout_engine("constrained")
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        part = table[table["model"].eq(model) & table["task"].eq(task)]
        levels(axes, float(part[part["method"].eq("full")]["value"].iloc[0]))
        runs = part[part[x].notna()]
        for (method, ratio), line in runs.groupby(["method", "kv_ratio"]):
            line_of(line, axes, x, str(method), f"{method} at {100 * ratio:g} %")
        axes.set_title(f"{model}, {task}\n(n = {int(part['n'].min())})", fontsize=8)
        finish(axes, xlabel, METRICS.get(str(table["metric"].iloc[0]), "") if place == 0 else "")
    legend(figure)


def settings_grid(table: pd.DataFrame, figure: Figure, down: str, across: str) -> None:
    """A panel per model and task: percent of full in each cell of two settings, with half the width of its interval."""
    panels = panels_of(table)
    figure.set_size_inches((WIDTH + 0.2) * len(panels) + 0.6, HEIGHT + 0.3)
    figure.set_layout_engine("constrained")
    runs = table[table[down].notna()]
    reach = (float(runs["of_full"].min()), float(runs["of_full"].max()))
    image = None
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        part = runs[runs["model"].eq(model) & runs["task"].eq(task)]
        cells = part.pivot_table(index=down, columns=across, values="of_full")
        spread = part.assign(half=(part["of_full_high"] - part["of_full_low"]) / 2)
        half = spread.pivot_table(index=down, columns=across, values="half", dropna=False)
        image = axes.imshow(cells.to_numpy(), cmap="cividis", vmin=reach[0], vmax=reach[1], aspect="auto")
        middle = sum(reach) / 2
        for i, row in enumerate(cells.to_numpy()):
            for j, cell in enumerate(row):
                color = "white" if cell < middle else "black"
                wide = half.to_numpy()[i][j]  # NaN of too few examples
                text = f"{cell:.0f}" if np.isnan(wide) else f"{cell:.0f}\n±{wide:.0f}"
                axes.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(cells.shape[1]), [f"{value:g}" for value in cells.columns], fontsize=7)
        axes.set_yticks(range(cells.shape[0]), [f"{value:g}" for value in cells.index], fontsize=7)
        axes.set_xlabel(across, fontsize=8)
        axes.set_ylabel(down if place == 0 else "", fontsize=8)
        axes.set_title(f"{model}, {task}\n(n = {int(part['n'].min())})", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.9).set_label(
            "% of full's " + str(runs["metric"].iloc[0]), fontsize=8
        )


def best_of(runs: pd.DataFrame, column: str) -> str:
    """The setting of the highest value on each model, in words."""
    best = runs.loc[runs.groupby("model", sort=False)["value"].idxmax()]
    return ", ".join(
        f"{model} {at if isinstance(at, str) else f'{at:g}'}"
        for model, at in zip(best["model"], best[column], strict=True)
    )
