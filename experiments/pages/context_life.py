"""docs/context_life.md: right answers with the question seen or hidden, and instructions followed with spans kept."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.pages import ROOT, blank, dots, markdown

NAMES = {
    **{"snapkv": "SnapKV", "tova": "TOVA", "keyformer": "Keyformer", "expected_attention": "ExpectedAttention"},
    **{"streaming_llm": "StreamingLLM", "h2o": "H2O", "window": "window", "a2sf": "A2SF"},
}
QUESTIONS = {"0.5 in_prompt": "seen", "0.5 after_eviction": "hidden"}
SPANS = {"none": "none", "fair": "fair share", "span": "all"}


def recorded() -> pd.DataFrame:
    """value, low, high of every (part, method, setting)."""
    return pd.read_csv(ROOT / "docs" / "context_life.csv").set_index(["part", "method", "setting"])


def draw() -> Figure:
    figure, panels = blank(2, height=4.2)

    def show(axes: Axes, part: str, settings: dict[str, str], title: str, label: str) -> None:
        cells = recorded().loc[part]
        shown = [name for name in NAMES if name in cells.index]
        values = [(NAMES[name], [tuple(cells.loc[(name, setting)]) for setting in settings]) for name in shown]
        dots(axes, values, [*settings.values()])
        axes.get_legend().set_loc("center right")
        axes.set_xlim(-4, 118)
        axes.set_title(title, fontsize=10.5)
        axes.set_xlabel(label)

    show(panels[0], "questions", QUESTIONS, "the question: seen or hidden", "right answers, % of full")
    show(panels[1], "followed", SPANS, "system prompt kept (keep=)", "instructions followed, % of full")
    return figure


def table() -> str:
    cells, rows = recorded(), []
    for name, label in NAMES.items():
        row = [label]
        for setting in (*QUESTIONS, "0.2 in_prompt", "0.2 after_eviction"):
            value, low, high = cells.loc[("questions", name, setting)]
            row.append(f"{value:.0f} ({low:.0f}..{high:.0f})")
        rows.append([*row, *(f"{cells.loc[('kl', name, setting), 'value']:.2f}" for setting in QUESTIONS)])
    head = ["% of full", "half, seen", "half, hidden", "a fifth, seen", "a fifth, hidden", "KL at half, seen", "hidden"]
    return markdown(head, rows)
