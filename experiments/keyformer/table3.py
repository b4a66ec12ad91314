"""Keyformer, Table 3: methods, positions and score functions at 60 % of the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import option, points
from experiments.lib.divergence import Closer, by_divergence, of
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, better, ends, estimate

OURS = "cache.positions=original method.score_scope=layer"
NEW = "cache.positions=renumbered method.score_scope=layer"
SHARED = "cache.positions=original method.score_scope=shared"
ORDER = ("full", "window", "h2o", "streaming_llm", f"keyformer {NEW}", f"keyformer {OURS}", f"keyformer {SHARED}")
PARTS = {"layer less shared": "shared", "original less new positions": "renumbered", "new positions less H2O": "h2o"}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """ROUGE-2 as drawn, with the other two beside it; columns of the three differences that the claim is about."""
    over = {"shared": ("keyformer", SHARED), "renumbered": ("keyformer", NEW), "h2o": ("h2o", "")}
    made = points(frame, "rouge2", over=over).assign(rouge1=frame["rouge1"], rougeL=frame["rougeL"], bar=_names(frame))
    order = (frame["method"] + " " + frame["setting"]).str.strip()
    places = order.map(lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return made.assign(_place=places).sort_values("_place", kind="stable", ignore_index=True).drop(columns="_place")


def _names(frame: pd.DataFrame) -> list[str]:
    """The table's own words for a row."""
    named = []
    for method, setting in zip(frame["method"], frame["setting"], strict=True):
        new = "new pos" if option(setting, "cache.positions") == "renumbered" else "org pos"
        scope = "shared" if option(setting, "method.score_scope") == "shared" else "per layer"
        named.append(f"keyformer {new} {scope}" if method == "keyformer" else method.replace("_", " "))
    return named


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """The paper writes a default setting as none."""
    words = table["setting"].str.replace("cache.positions=original", "").str.replace("method.score_scope=layer", "")
    bars(table.assign(setting=words.str.strip()), figure, "keyformer_table3", columns=1, width=6.0)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """The three differences, each above 0 on every model."""
    verdicts, found = [], []
    for model, part in table.groupby("model", sort=False):
        rows = part.set_index("setting")
        for name, column in PARTS.items():
            which = NEW if column == "h2o" else OURS
            if which not in rows.index:
                return None, f"keyformer {which} was not run"
            gap = ends(rows.loc[which], column)
            verdicts.append(better(*gap[1:]))
            found.append(f"{model} {name} {estimate(*gap, sign=True)}")
    return all_hold(verdicts), "ROUGE-2 points: " + "; ".join(found)


EXHIBITS = {
    "table3": Exhibit(
        claim=(
            "At 60 % of the KV cache a score function per layer is better than one shared by all layers, original "
            "positions are better than new ones, and even with new positions Keyformer is better than H2O "
            "(arXiv:2403.09054, Table 3)"
        ),
        sweeps=("keyformer_table3", "keyformer_table3_variants"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(
            Closer("layer than shared", of("keyformer", OURS), of("keyformer", SHARED)),
            Closer("original than new positions", of("keyformer", OURS), of("keyformer", NEW)),
            Closer("new positions than H2O", of("keyformer", NEW), of("h2o")),
        ),
    ),
}
