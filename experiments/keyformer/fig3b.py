"""Keyformer, Fig. 3b: the share of the attention that the best-scored tokens hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.attention import attention_mass, full_attention
from experiments.lib.data import paper_numbers
from experiments.lib.draw import model_lines
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import above, all_hold, estimate, mean_columns
from kvexp.run.settings import Settings

SHARES = [share / 10 for share in range(1, 10)]
KEY, MOST = 0.4, 90.0


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    rows = []
    for number, ids in enumerate(prompts):
        held = attention_mass(full_attention(model, ids), SHARES)
        rows += [{"prompt": number, "share": s, "mass": m} for s, m in zip(SHARES, held, strict=True)]
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model and share of the tokens: percent of the accumulated attention, mean over prompts."""
    found = []
    for (model, task, share), part in frame.groupby(["model", "task", "share"], sort=False):
        row = {"model": model, "task": task, "share": share, "n": part["prompt"].nunique()}
        found.append(row | mean_columns("mass", part["mass"].tolist()))
    return pd.DataFrame(found)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    paper = paper_numbers("keyformer_fig3b")
    paper = paper.assign(share=100 * paper["kv_ratio"], mass=100 * paper["value"])
    axes = model_lines(table.assign(share=100 * table["share"]), paper, figure, "share", "mass")
    axes.axhline(MOST, color="0.4", linewidth=0.8, linestyle="--")
    axes.axvline(100 * KEY, color="0.4", linewidth=0.8, linestyle="--")
    axes.set_xlabel("tokens, best first (%)", fontsize=8)
    axes.set_ylabel("attention score (%)", fontsize=8)
    axes.set_ylim(0, 102)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """At least 90 % of the score on 40 % of the tokens, on every model."""
    rows = table[table["share"].sub(KEY).abs().lt(1e-9)]
    verdicts = [above(low, high, MOST) for low, high in zip(rows["mass_low"], rows["mass_high"], strict=True)]
    cells = [f"{r.model} {estimate(r.mass, r.mass_low, r.mass_high)} %" for r in rows.itertuples()]
    return all_hold(verdicts), f"40 % of the tokens hold {'; '.join(cells)} of the score"


EXHIBITS = {
    "fig3b": Exhibit(
        claim=(
            "Around 40 % of the tokens, the key tokens, hold 90 % of the attention score (arXiv:2403.09054, Fig. 3b)"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
