"""docs/head_budgets.md: KL under shared and under adaptive head budgets against equal ones, paired by article."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.pages import ROOT, blank, dots, markdown
from kvexp.results.divergence import share_interval
from kvexp.results.stats import LEVEL, interval_of_mean

NAMES = {"h2o": "H2O", "expected_attention": "ExpectedAttention", "snapkv": "SnapKV"}
BUDGETS = {"adaptive": "adaptive budgets", "union": "one set of tokens"}


def cells() -> pd.DataFrame:
    """KL of every article (lines) under (method, head budgets)."""
    rows = pd.read_csv(ROOT / "experiments" / "head_budgets.csv")
    return rows.pivot_table(index="example", columns=["method", "heads"], values="kl")


def gap(method: str, heads: str) -> tuple[float, float, float]:
    """KL more than with equal budgets, nats per token: mean and 95 % interval."""
    more = (cells()[method, heads] - cells()[method, "uniform"]).to_numpy()
    return float(more.mean()), *interval_of_mean(more)


def draw() -> Figure:
    figure, (axes,) = blank(height=2.6)
    dots(axes, [(label, [gap(name, heads) for heads in BUDGETS]) for name, label in NAMES.items()], [*BUDGETS.values()])
    axes.axvline(0, color="black", linewidth=1)
    axes.set_xlabel("nats per token farther from the full cache than with equal budgets")
    return figure


def table() -> str:
    rows = []
    for name, label in NAMES.items():
        row = [label]
        for heads in ("uniform", *BUDGETS):
            kl = cells()[name, heads].to_numpy()
            low, high = share_interval(kl, np.ones(len(kl)), LEVEL)
            row.append(f"{kl.mean():.2f} ({low:.2f}..{high:.2f})")
        rows.append(row + ["{:+.3f} ({:+.3f}..{:+.3f})".format(*gap(name, heads)) for heads in BUDGETS])
    more = [f"{label}, difference" for label in BUDGETS.values()]
    return markdown(["KL", "equal budgets", *BUDGETS.values(), *more], rows)
