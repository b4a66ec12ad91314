"""docs/benchmarks.md: what methods lose on RULER, and which conclusions of published boards hold."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.claims import FOLDER, claims
from experiments.pages import ROOT, blank, dots, markdown
from experiments.studies.ruler_board import HIDDEN, METHODS, SEEN, by_length, mean_of, read_wide
from kvexp.results.claims import Recorded, judged


def short() -> pd.DataFrame:
    """The recorded rows of prompts of 1,024 and 2,048 tokens, as many of each task."""
    return next(iter(by_length(read_wide(ROOT / "docs" / "ruler_board.csv")).values()))


def draw() -> Figure:
    figure, panels = blank(2, height=4.6)
    rows = short()
    order = sorted(METHODS, key=lambda method: mean_of(rows, method, HIDDEN, 0.25))
    for axes, (ratio, title) in zip(panels, {0.5: "half of the cache", 0.25: "a quarter"}.items(), strict=True):
        values = [(name, [mean_of(rows, name, question, ratio) for question in (SEEN, HIDDEN)]) for name in order]
        dots(axes, values, ["question seen", "question hidden"])
        axes.set(xscale="log", xlim=(0.19, 5), title=title, xlabel="KL, nats per token")
        axes.set_xticks([0.2, 0.5, 1, 2, 4], ["0.2", "0.5", "1", "2", "4"], minor=False)
        axes.set_xticks([], minor=True)
        axes.get_legend().set_loc("lower left")
    panels[1].set_yticklabels([])
    panels[1].get_legend().remove()
    return figure


def table() -> str:
    recorded, lines = Recorded(FOLDER), []
    for claim in (claim for claim in claims() if claim.recorded == "docs/ruler_board.csv"):
        (model,) = claim.models
        of = judged(claim, model, *recorded.of(claim, model))
        lead = f"{of.ahead:+.2f} ({of.low:+.2f}..{of.high:+.2f})"
        said = f"{claim.sentence} `{claim.method.split()[0]}`, `{claim.rival.split()[0]}`"
        lines.append((said, claim.paper.partition(", ")[2], of.verdict, lead))
    return markdown(("claim: method, rival", "source", "here", "more KL of the rival"), lines)
