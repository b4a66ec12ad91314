"""PQCache, Figs. 1b and 5: how a query's attention is shared out over its past."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.attention import full_attention
from experiments.lib.draw import legend
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import above, ends, estimate, mean_columns
from experiments.lib.titles import model_words
from kvexp.run.settings import Settings

PLACES = 16  # (layer, head, query) drawn from every prompt
SHOWN = 4  # of them are drawn, as in the paper
TOP = 0.1  # of the tokens
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of the places that are drawn


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    """One row per place, drawn from the later half of each prompt; `top`: the percent that the TOP tokens hold.

    How well a power law and an exponential fit the sorted scores: R2 of a line in log-log and in semi-log axes.
    """
    rows = []
    for number, ids in enumerate(prompts):
        rng, held = Random(f"{settings.seed} {number}"), full_attention(model, ids).numpy()
        for place in range(PLACES):
            layer, head = rng.randrange(held.shape[0]), rng.randrange(held.shape[1])
            query = rng.randrange(len(ids) // 2, len(ids))
            scores = np.sort(held[layer, head, query, : query + 1].astype(np.float64))[::-1]
            top = 100 * float(scores[: max(1, round(TOP * len(scores)))].sum())
            row = {"prompt": number, "layer": layer, "head": head, "query": query, "top": top, **_fits(scores)}
            if number == 0 and place < SHOWN:
                row["scores"] = " ".join(f"{score:.3g}" for score in scores)
            rows.append(row)
    return pd.DataFrame(rows)


def _fits(scores: np.ndarray) -> dict[str, float]:
    """R2 of straight lines through log score, against log rank and against rank; of scores that float32 resolves."""
    kept = scores[scores > 1e-12]
    rank, height = np.arange(1, len(kept) + 1), np.log(kept)
    power, exponential = (float(np.corrcoef(x, height)[0, 1] ** 2) for x in (np.log(rank), rank))
    return {"power": power, "exponential": exponential, "power_better": 100.0 * (power > exponential)}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Per model, means over prompts; and the places that are drawn."""
    rows = []
    for model, part in frame.groupby("model"):
        each = part.groupby("prompt")[["top", "power", "exponential", "power_better"]].mean()
        row: dict[str, Any] = {"model": model, "prompts": len(each)}
        for name in each:
            row |= mean_columns(str(name), each[name].tolist())
        rows.append(row)
    shown = frame[frame["scores"].notna()][["model", "layer", "head", "query", "scores"]]
    return pd.concat([pd.DataFrame(rows), shown], ignore_index=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per model: sorted scores of single queries in log-log axes, where a power law is a straight line."""
    shown = table[table["scores"].notna()]
    models = sorted(set(shown["model"]))
    figure.set_layout_engine("constrained")
    figure.set_size_inches(3.6 * len(models), 3.1)
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1)
        for color, (_, row) in zip(COLORS, shown[shown["model"].eq(model)].iterrows(), strict=False):
            scores = np.array(row["scores"].split(), dtype=float)
            label = f"{model_words(model)}: layer {row['layer'] + 1:.0f}, head {row['head'] + 1:.0f}"
            axes.loglog(range(1, len(scores) + 1), scores, color=color, linewidth=1.2, label=label)
        axes.set_title(model_words(model), fontsize=8)
        axes.set_xlabel("rank of the token", fontsize=8)
        axes.set_ylabel("attention score" if place == 0 else "", fontsize=8)
        axes.set_ylim(1e-8, 1.2)
    legend(figure)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Whether a power law fits more than half of the places better than an exponential does, in every model."""
    verdicts, found = [], []
    for _, row in table[table["prompts"].notna()].iterrows():
        verdicts.append(above(row["power_better_low"], row["power_better_high"], 50.0))
        share = estimate(*ends(row, "power_better"))
        top = estimate(*ends(row, "top"))
        found.append(
            f"{row['model']}: a power law is the better fit at {share} % of the places (R2 {row['power']:.2f} against "
            f"{row['exponential']:.2f}); a tenth of the tokens holds {top} % of the attention"
        )
    verdict = None if None in verdicts else all(verdicts)
    return verdict, "; ".join(found)


EXHIBITS = {
    "fig5": Exhibit(
        claim=(
            "Attention scores generally follow a power law: few tokens matter much more than all others, which is "
            "why a query can do with some of them (arXiv:2407.12820, Figs. 1b and 5, section 3.1)"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
