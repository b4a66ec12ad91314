"""Keyformer, Fig. 3a: how sparse full attention is, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.attention import full_attention, near_zero_share
from experiments.lib.data import paper_numbers
from experiments.lib.draw import model_lines
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, mean_columns
from kvexp.run.settings import Settings

BELOW = 0.01
MOST_TICKS = 12  # layers; of more every fifth is named


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    rows = []
    for number, ids in enumerate(prompts):
        shares = near_zero_share(full_attention(model, ids), BELOW).tolist()
        rows += [{"prompt": number, "layer": layer, "sparsity": share} for layer, share in enumerate(shares, 1)]
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model and layer: mean over prompts, with its interval."""
    found = []
    for (model, task, layer), part in frame.groupby(["model", "task", "layer"], sort=False):
        row = {"model": model, "task": task, "layer": layer, "n": part["prompt"].nunique()}
        found.append(row | mean_columns("sparsity", part["sparsity"].tolist()))
    return pd.DataFrame(found)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    paper = paper_numbers("keyformer_fig3a").rename(columns={"value": "sparsity"})
    axes = model_lines(table, paper, figure, "layer", "sparsity")
    layers = sorted(table["layer"].unique())
    axes.set_xticks(layers if len(layers) <= MOST_TICKS else [layers[0], *layers[4::5]])
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("attention sparsity (%)", fontsize=8)
    axes.set_ylim(0, 100)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """On every model the intervals of two layers do not touch. How sparse is sparse the paper does not say."""
    verdicts: list[bool | None] = []
    found = []
    for model, part in table.groupby("model", sort=False):
        most, least = part.loc[part["sparsity"].idxmax()], part.loc[part["sparsity"].idxmin()]
        verdicts.append(True if most["sparsity_low"] > least["sparsity_high"] else None)
        edges = [estimate(*ends(row, "sparsity")) for row in (least, most)]
        found.append(f"{model} from {edges[0]} % (layer {least['layer']}) to {edges[1]} % (layer {most['layer']})")
    return all_hold(verdicts), "; ".join(found)


EXHIBITS = {
    "fig3a": Exhibit(
        claim=(
            "Attention is sparse by itself, and how sparse varies with the model and from layer to layer "
            "(arXiv:2403.09054, Fig. 3a and section 2.2; its threshold is not stated, ours counts weights below 1 "
            "% of their row's largest)"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
