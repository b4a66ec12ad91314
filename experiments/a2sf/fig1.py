"""A2SF, Fig. 1: where in the prompt accumulated attention lies: plain (A2S) and with a forgetting factor (A2SF)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from experiments.lib.attention import accumulated, full_attention
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import ends, estimate, interval_columns, mean_columns, paired_gap, positive
from experiments.lib.titles import model_words
from kvexp.methods import A2SF
from kvexp.results.plots import color_of
from kvexp.run.settings import Settings
from kvexp.util import ConfigError

BINS = 16  # parts of the prompt, oldest first
EVEN = 50.0  # percent of the score that the older half would hold if age did not matter


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    """Percent of the score, and of the tokens a budget would keep by it, in each of BINS parts of the prompt.

    Mean over layers and heads, each of which shares out 100. The first token, the sink, is left out: it is kept by any
    score, and would hide the rest.
    """
    method = settings.method
    if not isinstance(method, A2SF) or settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement is of method=a2sf with a kv_ratio; method.alpha=1 is plain accumulation")
    rows = []
    for number, ids in enumerate(prompts):
        score = accumulated(full_attention(model, ids), method.alpha)[..., -1, 1:]
        keep = max(1, int(settings.budget.kv_ratio * len(ids)))
        kept = torch.zeros_like(score).scatter(-1, score.topk(keep, dim=-1).indices, 1.0)
        for name, values in (("score", score), ("kept", kept)):
            parts = (100 * values / values.sum(-1, keepdim=True)).mean((0, 1)).tensor_split(BINS)
            rows += [{"prompt": number, "of": name, "bin": i, "percent": float(p.sum())} for i, p in enumerate(parts)]
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model, factor, quantity and part of the prompt; and what the older half holds, of all models."""
    rows = []
    for key, part in frame.groupby(["model", "method", "kv_ratio", "setting", "of", "bin"]):
        row: dict[str, Any] = dict(zip(("model", "method", "kv_ratio", "setting", "of", "bin"), key, strict=True))
        rows.append(row | {"prompts": part["prompt"].nunique()} | mean_columns("percent", part["percent"].tolist()))
    return pd.DataFrame(rows).assign(**_older_half(frame, "score"), **_older_half(frame, "kept"))


def _older_half(frame: pd.DataFrame, of: str) -> dict[str, float]:
    """What it holds under either factor, and how much nearer to even the second comes, over prompts of all models."""
    old = frame[(frame["bin"] < BINS // 2) & (frame["of"] == of)]
    old = old.groupby(["model", "setting", "prompt"], as_index=False)["percent"].sum()
    old = old.assign(off=(old["percent"] - EVEN).abs())
    plain = old["setting"].str.endswith("alpha=1.0")
    made = interval_columns(f"{of}_closer", paired_gap(old, "off", plain, ~plain, ("prompt",)))
    for name, part in (("plain", old[plain]), ("forgetting", old[~plain])):
        made |= mean_columns(f"{of}_{name}", part["percent"].tolist())
    return made


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """True if forgetting brings the older half's share of the score nearer to one half, by more than chance."""
    first = table.iloc[0]

    def said(name: str, sign: bool = False) -> str:
        return estimate(*ends(first, name), sign=sign)

    return positive(first["score_closer_low"], first["score_closer_high"]), (
        f"the older half of a prompt holds {said('score_plain')} % of A2S and {said('score_forgetting')} % of A2SF, "
        f"{said('score_closer', True)} points nearer to even; of the tokens that would be kept "
        f"{said('kept_plain')} % and "
        f"{said('kept_forgetting')} %, {said('kept_closer', True)} points nearer (not part of the verdict)"
    )


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A row per model, a column per factor: bars are scores, red marks the tokens that a budget would keep."""
    models, settings = sorted(set(table["model"])), sorted(set(table["setting"]), reverse=True)
    figure.set_layout_engine("constrained")
    figure.set_size_inches(3.6 * len(settings), 1.9 * len(models) + 0.5)
    top = 1.05 * table["percent_high"].fillna(table["percent"]).max()
    for row, model in enumerate(models):
        for column, setting in enumerate(settings):
            axes = figure.add_subplot(len(models), len(settings), row * len(settings) + column + 1)
            part = table[(table["model"] == model) & (table["setting"] == setting)]
            score, kept = (part[part["of"] == name].sort_values("bin") for name in ("score", "kept"))
            reach = score[["percent_low", "percent_high"]].sub(score["percent"], axis=0).abs().T.to_numpy()
            color = color_of("h2o" if setting.endswith("=1.0") else "a2sf")
            axes.bar(score["bin"], score["percent"], yerr=reach, color=color, error_kw={"elinewidth": 0.7})
            axes.plot(kept["bin"], kept["percent"], "_", color="#c00000", markersize=9, markeredgewidth=2)
            axes.axhline(100 / BINS, color="black", linewidth=0.8, linestyle=":")
            axes.set_ylim(0, top)
            alpha = setting.rpartition("=")[2]
            name = "A2S, alpha 1" if alpha == "1.0" else f"A2SF, alpha {alpha}"
            axes.set_title(f"{name}: {model_words(model)}", fontsize=8)
            axes.set_xticks([0, BINS - 1], ["oldest", "newest"], fontsize=8)
            if column == 0:
                axes.set_ylabel("% of score", fontsize=8)
    figure.supxlabel("sixteenths of the prompt; red: tokens a fifth of the cache would keep; dotted: even", fontsize=8)


EXHIBITS = {
    "fig1": Exhibit(
        claim=(
            "Accumulated attention compares tokens of a decoder unfairly, since old ones were counted more often; "
            "with a forgetting factor scores are spread evenly over old and new tokens (arXiv:2407.20485, Fig. "
            "1; its panel of an encoder has no counterpart here)"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
