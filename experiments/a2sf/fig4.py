"""A2SF, Fig. 4: attention maps under row masks: what is left of the prompt in the eyes of each query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from experiments.lib.attention import attention
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import above, all_hold, ends, estimate, interval_columns, mean_columns, paired_gap, positive
from experiments.lib.titles import model_words
from kvexp.lm_eval import check_row_mask
from kvexp.run.settings import Settings
from kvexp.util import ConfigError

CELLS = 72  # a map is drawn with so many cells on a side
ORDER = (("ideal", ""), ("window", ""), ("h2o", ""), ("a2sf", "method.alpha=0.1"), ("a2sf", "method.alpha=0.5"))
SINK_KEPT = 95.0  # percent of pruned rows that see the first token, for it to count as a sink, and as kept


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    """Per prompt, over pruned rows, all layers and heads, in percent: rows that see the first token, attention to the
    middle half of a row's past. Of the first prompt also the maps of the first and the last layer, mean over heads."""
    check_row_mask(settings.cache, "local")
    if settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement is of row masks with a kv_ratio")
    rows: list[dict[str, Any]] = []
    for number, ids in enumerate(prompts):
        layers = attention(model, ids, settings.method, settings.budget)
        first = int(settings.budget.kv_ratio * len(ids)) + 1
        seen, held = (torch.stack(each) for each in zip(*layers, strict=True))
        sink = 100 * float(seen[..., first:, 0].float().mean())
        rows.append({"prompt": number, "sink": sink, "middle": 100 * float(_middle(held)[..., first:].mean())})
        if number == 0:
            rows += [{"prompt": 0, "layer": i + 1, "map": _map(held[i])} for i in (0, len(layers) - 1)]
    return pd.DataFrame(rows)


def _middle(held: Tensor) -> Tensor:
    """[..., n]: of every row, the attention on keys between a quarter and three quarters of its past."""
    n = held.shape[-1]
    key, row = torch.arange(n), torch.arange(n)[:, None]
    return (held * ((4 * key >= row) & (4 * key < 3 * row))).sum(-1)


def _map(held: Tensor) -> str:
    """CELLS x CELLS thousandths, rows parted by semicolons: the largest attention in each cell."""
    cells = adaptive_max_pool2d(held.mean(0)[None, None], min(CELLS, held.shape[-1]))[0, 0]
    return ";".join(" ".join(f"{1000 * value:.0f}" for value in row) for row in cells.tolist())


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts per model and mask, the maps of the first model, and how near to ideal each middle comes."""
    frame = frame.assign(setting=frame["setting"].fillna("").astype(str))
    counted, maps = frame[frame["sink"].notna()], frame[frame["map"].notna()]
    rows = []
    for (model, method, setting), part in counted.groupby(["model", "method", "setting"]):
        row: dict[str, Any] = {"model": model, "method": method, "setting": setting, "prompts": len(part)}
        rows.append(row | mean_columns("sink", part["sink"].tolist()) | mean_columns("middle", part["middle"].tolist()))
    shown = maps[maps["model"] == maps["model"].iloc[0]][["model", "method", "setting", "layer", "map"]]
    ideal = counted[counted["method"] == "ideal"][["model", "prompt", "middle"]]
    off = counted.merge(ideal, on=["model", "prompt"], suffixes=("", "_ideal"))
    off = off.assign(off=(off["middle"] - off["middle_ideal"]).abs())
    mine = (off["method"] == "a2sf") & (off["setting"] == "method.alpha=0.1")
    nearer = interval_columns("nearer", paired_gap(off, "off", off["method"] == "h2o", mine, ("prompt",)))
    return pd.concat([pd.DataFrame(rows), shown], ignore_index=True).assign(**nearer)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Two parts, of alpha 0.1: its middle is nearer to the ideal's than H2O's is, and it keeps the sink, where there is
    one: a model whose ideal choice has no use for the first token cannot say."""
    counted, first = table[table["sink"].notna()], table.iloc[0]
    middle = counted.groupby(["method", "setting"])["middle"].mean()
    named = ", ".join(f"{m} {s.rpartition('=')[2]} {v:.1f}".replace("  ", " ") for (m, s), v in middle.items())
    sinks, kept = [], []
    for model, part in counted.groupby("model"):
        mine = part[part["setting"] == "method.alpha=0.1"].iloc[0]
        ideal = part[part["method"] == "ideal"].iloc[0]
        sinks.append(above(mine["sink_low"], mine["sink_high"], SINK_KEPT) if ideal["sink"] >= SINK_KEPT else None)
        kept.append(
            f"{model} {mine['sink']:.1f} (ideal {ideal['sink']:.1f}{'' if ideal['sink'] >= SINK_KEPT else ': no sink'})"
        )
    nearer = ends(first, "nearer")
    return all_hold([positive(nearer[1], nearer[2]), *sinks]), (
        f"% of attention on the middle of the past: {named}; a2sf 0.1 is {estimate(*nearer, sign=True)} points nearer "
        "to the "
        f"ideal than h2o. It keeps the first token in % of rows: {', '.join(kept)}"
    )


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A row per layer, a column per mask; the color is the cube root of attention, as in the paper."""
    maps = table[table["map"].notna()]
    layers = sorted(set(maps["layer"]))
    figure.set_layout_engine("constrained")
    figure.set_size_inches(2.1 * len(ORDER), 2.2 * len(layers) + 0.3)
    for row, layer in enumerate(layers):
        for column, (method, setting) in enumerate(ORDER):
            axes = figure.add_subplot(len(layers), len(ORDER), row * len(ORDER) + column + 1)
            found = maps[(maps["layer"] == layer) & (maps["method"] == method) & (maps["setting"] == setting)]
            axes.set_xticks([])
            axes.set_yticks([])
            if found.empty:
                continue
            cells = np.array([line.split() for line in found["map"].iloc[0].split(";")], dtype=float) / 1000
            axes.imshow(np.cbrt(cells), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"{method} {setting.removeprefix('method.')}".strip(), fontsize=9)
            if column == 0:
                axes.set_ylabel(f"layer {layer:.0f}\nquery", fontsize=8)
            if row == len(layers) - 1:
                axes.set_xlabel("key", fontsize=8)
    figure.suptitle(model_words(str(maps["model"].iloc[0])), fontsize=9)


EXHIBITS = {
    "fig4": Exhibit(
        claim=(
            "H2O's mask is lambda-shaped: the middle of the past disappears from it, while A2SF's looks like the "
            "ideal one and keeps the first token, the sink, unprotected (arXiv:2407.20485, Fig. 4 and section "
            "4.3)"
        ),
        sweeps=("a2sf_fig4", "a2sf_fig4_alpha"),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
