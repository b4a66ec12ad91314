"""The same methods and budgets on summaries, which the paper does not have: ROUGE-2."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.a2sf.fig3 import compared, holds
from experiments.lib.draw import curves

CLAIM = (
    "A2SF is better than H2O in generation as well (arXiv:2407.20485 claims it of multiple choice alone, in "
    "section 4.2; "
    "this is Fig. 3 with summaries)"
)
METRIC = "rouge2"
__all__ = ["CLAIM", "draw", "holds", "table"]


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return compared(frame, METRIC)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table, figure, xlabel="cache ratio (%)")
