"""docs/index.md and README.md: KL of seven methods against the share of the cache, on 100 articles."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.pages import Curve, blank, curves
from experiments.pages.divergence import BUDGETS, NAMES, runs
from kvexp.run.store import EPSILON_KL

SHOWN = ("pqcache", "keyformer", "h2o", "tova", "snapkv", "streaming_llm", "window")


def draw() -> Figure:
    figure, (axes,) = blank(height=3.6)
    shares = [100 * float(budget) for budget in BUDGETS][::-1]
    lines = []
    for name in SHOWN:
        mean, low, high = zip(*(runs()[f"{name} {budget}"][0] for budget in reversed(BUDGETS)), strict=True)
        lines.append(Curve(NAMES[name], shares, mean, low, high))
    axes.axhline(EPSILON_KL, color="black", linewidth=1, linestyle="--")
    curves(axes, lines, "slots kept, % of the prompt", "KL from the full cache, nats per token")
    limit = f"limit {EPSILON_KL:g}, set beforehand"
    axes.annotate(limit, (shares[1], EPSILON_KL), (0, -12), textcoords="offset points", ha="center")
    return figure
