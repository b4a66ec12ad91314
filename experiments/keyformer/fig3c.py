"""Keyformer, Fig. 3c: full attention, window attention and the heaviest hitters at half the cache."""

from __future__ import annotations

from functools import partial

import pandas as pd

from experiments.lib.bars import bars
from experiments.lib.data import points
from experiments.lib.divergence import Near, by_divergence, of
from experiments.lib.draw import METHODS, in_order
from experiments.lib.exhibits import Exhibit
from experiments.lib.verdicts import below_mark, each_row


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points, methods in the papers' order."""
    made = points(frame, "rouge2")
    made = made.assign(bar=made["method"].str.replace("_", " "))
    order = in_order(made["method"].tolist(), METHODS)
    return made.sort_values("method", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)


EXHIBITS = {
    "fig3c": Exhibit(
        claim=(
            "With half the KV cache neither the newest tokens (window) nor those of the highest accumulated "
            "attention (H2O, key attention) give full attention's quality (arXiv:2403.09054, Fig. 3c and section "
            "2.3.1)"
        ),
        table=table,
        draw=partial(bars, paper="keyformer_fig3c"),
        holds=each_row(
            lambda table: table[table["method"].ne("full")],
            "of_full",
            below_mark,
            "{model} {method} {number}",
            "% of full: {}",
        ),
        divergence=by_divergence(*(Near(name, of(name), within=False) for name in ("window", "h2o", "key_attention"))),
    ),
}
