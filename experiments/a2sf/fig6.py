"""A2SF, Fig. 6: attention, A2S and A2SF of single tokens over the steps, and which foresees the next queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from experiments.lib.attention import accumulated, full_attention
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import ends, estimate, interval_columns, mean_columns, paired_gap, positive
from experiments.lib.titles import model_words
from kvexp.methods import A2SF
from kvexp.run.settings import Settings
from kvexp.util import ConfigError

NEXT = 16  # rows after the pruning point whose attention is to be foreseen
TOKENS = 3  # followed besides the first token
SCORES = ("attention", "A2S", "A2SF")
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73")


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    """Per prompt and score: percent of the attention of the NEXT rows, to tokens born before, that its top B hold.

    Mean over layers and heads; the first token counts like any other. Of the first prompt also the curves, in the head
    whose next rows differ most from its accumulated past: a row per token, from its birth on.
    """
    method = settings.method
    if not isinstance(method, A2SF) or settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement is of method=a2sf with a kv_ratio; A2S is measured along with it")
    rows: list[dict[str, Any]] = []
    for number, ids in enumerate(prompts):
        now = full_attention(model, ids)
        each = dict(zip(SCORES, (now, accumulated(now, 1.0), accumulated(now, method.alpha)), strict=True))
        at, keep = len(ids) - NEXT, max(1, int(settings.budget.kv_ratio * len(ids)))
        for name, score in each.items():
            held = _foreseen(now, score[..., at - 1, :at], at, keep).mean()
            rows.append({"prompt": number, "score": name, "held": 100 * float(held)})
        if number == 0:
            rows += _curves(now, each, at, keep)
    return pd.DataFrame(rows)


def _foreseen(now: Tensor, score: Tensor, at: int, keep: int) -> Tensor:
    """[layers, heads]: the share of later rows' attention to the first `at` tokens that lies on the top of score."""
    later = now[..., at:, :at].sum(-2)
    return later.gather(-1, score.topk(keep, dim=-1).indices).sum(-1) / later.sum(-1)


def _curves(now: Tensor, each: dict[str, Tensor], at: int, keep: int) -> list[dict[str, Any]]:
    missed = 1 - _foreseen(now, each["A2S"][..., at - 1, :at], at, keep)
    layer, head = divmod(int(missed.argmax()), now.shape[1])
    later = now[layer, head, at:, 1:at].sum(0)
    tokens = [0, *sorted((later.topk(TOKENS).indices + 1).tolist())]
    return [
        {"prompt": 0, "score": name, "layer": layer, "head": head, "token": token, "pruned": at}
        | {"curve": " ".join(f"{value:.4g}" for value in score[layer, head, token:, token].tolist())}
        for name, score in each.items()
        for token in tokens
    ]


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts ("held" rows), and the curves of one prompt and head of the first model ("curve" rows)."""
    held = frame[frame["held"].notna()]
    rows = []
    for (model, setting, score), part in held.groupby(["model", "setting", "score"]):
        row: dict[str, Any] = {"model": model, "setting": setting, "score": score, "prompts": len(part)}
        rows.append(row | mean_columns("held", part["held"].tolist()))
    ahead = paired_gap(held, "held", held["score"] == "A2SF", held["score"] == "A2S", ("prompt",))
    curves = frame[frame["curve"].notna() & (frame["model"] == frame["model"].iloc[0])]
    curves = curves.drop(columns=["held", "prompt", "task", "method", "kv_ratio"])
    return pd.concat([pd.DataFrame(rows), curves], ignore_index=True).assign(**interval_columns("ahead", ahead))


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """True if A2SF's choice holds more of the next rows' attention than A2S's, by more than chance."""
    first = table.iloc[0]
    means = table[table["held"].notna()].groupby("score")["held"].mean()
    named = ", ".join(f"{name} {means[name]:.1f} %" for name in SCORES)
    ahead = estimate(*ends(first, "ahead"), sign=True)
    sentence = f"of the next {NEXT} queries' attention is on what would be kept by {named}; A2SF - A2S {ahead} points"
    return positive(first["ahead_low"], first["ahead_high"]), sentence


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """Three panels as in the paper, of one head of the first model; the red line is where pruning would happen."""
    curves = table[table["curve"].notna()]
    first = curves.iloc[0]
    figure.set_layout_engine("constrained")
    figure.set_size_inches(9.6, 2.9)
    for place, name in enumerate(SCORES):
        axes = figure.add_subplot(1, len(SCORES), place + 1)
        part = curves[curves["score"] == name]
        for token, color in zip(sorted(set(part["token"])), COLORS, strict=False):
            values = [float(value) for value in part[part["token"] == token]["curve"].iloc[0].split()]
            label = "first token (sink)" if token == 0 else f"token {token:.0f}"
            steps = [int(token) + i for i in range(len(values))]
            axes.plot(steps, values, color=color, linewidth=1.0, label=label)
        axes.axvline(first["pruned"], color="#c00000", linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step (query)", fontsize=8)
    figure.axes[0].set_ylabel("score", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    place = f"layer {first['layer'] + 1:.0f}, head {first['head'] + 1:.0f}"
    figure.suptitle(f"{model_words(first['model'])}: {place}", fontsize=9)


EXHIBITS = {
    "fig6": Exhibit(
        claim=(
            "A late token that is attended to strongly has a small accumulated score, so that pruning by A2S "
            "removes it; A2SF keeps it (arXiv:2407.20485, Fig. 6): of the next queries' attention, more lies on "
            "what A2SF would keep"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
