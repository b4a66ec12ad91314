"""Keyformer, Fig. 4: the score of the tokens that stay, before and after the others are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from experiments.lib.attention import full_attention
from experiments.lib.draw import MODELS, in_order
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import above, all_hold, ends, estimate, mean_columns
from experiments.lib.titles import model_words
from kvexp.results.plots import color_of
from kvexp.run.settings import Settings
from kvexp.util import ConfigError

AFTER = 32  # query rows after the reduction, as many as tokens of an answer
RANKS = 20  # parts of the tokens that stay, best first
UNEVEN = 1.0  # percent of the kept tokens' score that must change hands for the gain to be called uneven


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    """Scores of the kept tokens over the last AFTER rows, as percent of those rows' attention, and what changes hands.

    Tokens are chosen by the attention accumulated before those rows; "before" is full attention, "after" the softmax
    over the kept tokens and those that came since, in the same rows: one layer's reduction by itself (eq. 3).
    """
    if settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement needs a method with a kv_ratio: how many tokens stay")
    found = []
    for number, ids in enumerate(prompts):
        rows = full_attention(model, ids)
        split = rows.shape[-1] - AFTER
        keep = int(settings.budget.kv_ratio * split)
        kept = rows[..., :split, :split].sum(-2).topk(keep, dim=-1).indices
        later = rows[..., split:, :]
        stays = torch.zeros(later.shape[:2] + later.shape[-1:]).scatter(-1, kept, 1.0)
        stays[..., split:] = 1.0
        reduced = later * stays[..., None, :]
        reduced = reduced / reduced.sum(-1, keepdim=True).clamp(min=1e-12)
        before, after = (100 * part.mean(-2).gather(-1, kept) for part in (later, reduced))
        shares = [part / part.sum(-1, keepdim=True) for part in (before, after)]
        uneven = float(50 * (shares[1] - shares[0]).abs().sum(-1).mean())
        lost = 100 - 100 * float((later * stays[..., None, :]).sum(-1).mean())
        order = before.argsort(dim=-1, descending=True)
        for name, part in (("before", before), ("after", after)):
            ranked = part.gather(-1, order).mean((0, 1)).tensor_split(RANKS)
            found += [
                {
                    "prompt": number,
                    "of": name,
                    "rank": place,
                    "score": float(piece.sum()),
                    "uneven": uneven,
                    "lost": lost,
                }
                for place, piece in enumerate(ranked)
            ]
    return pd.DataFrame(found)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model, before or after, and rank: percent of the attention; what was lost, what changed hands."""
    found = []
    for (model, of, rank), part in frame.groupby(["model", "of", "rank"], sort=False):
        whole = frame[frame["model"].eq(model)].groupby("prompt").first()
        row = {"model": model, "of": of, "rank": rank, "n": part["prompt"].nunique()}
        row |= mean_columns("score", part["score"].tolist()) | mean_columns("lost", whole["lost"].tolist())
        found.append(row | mean_columns("uneven", whole["uneven"].tolist()))
    return pd.DataFrame(found)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    models = in_order(table["model"].tolist(), MODELS)
    figure.set_size_inches(2.6 * len(models) + 0.3, 2.7)
    figure.set_layout_engine("constrained")
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1)
        for of, color, shift in (("before", color_of("full"), -0.2), ("after", color_of("h2o"), 0.2)):
            part = table[table["model"].eq(model) & table["of"].eq(of)].sort_values("rank")
            label = "full attention" if of == "before" else "after the reduction"
            reach = [part["score"] - part["score_low"], part["score_high"] - part["score"]]
            bars = {"color": color, "label": label, "width": 0.4, "error_kw": {"elinewidth": 0.6, "ecolor": "0.4"}}
            axes.bar(part["rank"] + shift, part["score"], yerr=reach, **bars)
        axes.set_yscale("log")
        axes.set_title(f"{model_words(model)} (n = {int(table['n'].min())})", fontsize=8)
        axes.set_xticks([0, RANKS - 1], ["best", "last"], fontsize=7)
        axes.set_xlabel("tokens that stay, by score", fontsize=8)
        axes.set_ylabel("attention (%)" if place == 0 else "", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=2, frameon=False
    )


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """At least UNEVEN percent of the kept tokens' score changes hands on every model: 0 if all gained alike."""
    verdicts, found = [], []
    for model, part in table.groupby("model", sort=False):
        row = part.iloc[0]
        verdicts.append(above(row["uneven_low"], row["uneven_high"], UNEVEN))
        found.append(
            f"{model}: {estimate(*ends(row, 'lost'))} % of the attention is dropped, and "
            f"{estimate(*ends(row, 'uneven'))} % of what stays changes hands"
        )
    return all_hold(verdicts), "; ".join(found)


EXHIBITS = {
    "fig4": Exhibit(
        claim=(
            "Dropping half the tokens spreads their attention unevenly over those that stay, so that scores are "
            "no longer what full attention would give (arXiv:2403.09054, Fig. 4, equations 2 and 3)"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
