"""Keyformer, Fig. 5: damping the accumulated scores at half the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.data import option, points
from experiments.lib.draw import HEIGHT, finish, legend, levels, line_of, panels_of
from experiments.lib.stats import above, ends, estimate

CLAIM = (
    "With half the KV cache and 20 % of it recent, no damping factor of the accumulated attention reaches full "
    "attention's quality (arXiv:2403.09054, Fig. 5 and section 2.3.3; the figure's numbers are not published)"
)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    made = points(frame, "rouge2", rival="h2o_damping", setting="method.damping=1.0")
    damping = pd.to_numeric(made["setting"].map(lambda words: option(words, "method.damping")), errors="coerce")
    return made.assign(damping=damping).sort_values(["model", "damping"], na_position="first", ignore_index=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    panels = panels_of(table)
    figure.set_size_inches(3.4 * len(panels), HEIGHT + 0.6)
    figure.set_layout_engine("constrained")
    for place, (model, task) in enumerate(panels):
        axes: Axes = figure.add_subplot(1, len(panels), place + 1)
        part = table[table["model"].eq(model) & table["task"].eq(task)]
        levels(axes, float(part[part["method"].eq("full")]["value"].iloc[0]))
        label = "h2o with damping"
        line_of(part[part["damping"].notna()], axes, "damping", "h2o_damping", label)
        axes.set_title(f"{model}, {task} (n = {int(part['n'].min())})", fontsize=8)
        finish(axes, "damping factor (1: none)", "ROUGE-2")
    legend(figure)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Every factor's interval below 99 % of full."""
    runs = table[table["damping"].notna()]
    reached = [above(low, high, 99.0) for low, high in zip(runs["of_full_low"], runs["of_full_high"], strict=True)]
    best = runs.loc[runs["of_full"].idxmax()]
    sentence = (
        f"the best of {len(runs)} factors, {best['damping']:g}, reaches {estimate(*ends(best, 'of_full'))} % of full"
    )
    if best["damping"] != 1 and not pd.isna(best["ahead"]):
        gap = estimate(*ends(best, "ahead"), sign=True)
        sentence += f", {gap} ROUGE-2 points from no damping"
    return (False if True in reached else True if None not in reached else None), sentence
