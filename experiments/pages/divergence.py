"""docs/divergence.md: KL and ROUGE-2 of 27 runs on the same 100 articles, with intervals and verdicts."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.pages import ROOT, blank, dots, log_nats, markdown
from kvexp.results import divergence, stats
from kvexp.run.store import EPSILON_KL

NAMES = {
    **{"ideal": "ideal choice", "pqcache": "PQCache", "keyformer": "Keyformer", "h2o": "H2O", "tova": "TOVA"},
    **{"a2sf": "A2SF", "snapkv": "SnapKV", "streaming_llm": "StreamingLLM", "window": "window"},
}
BUDGETS = ("0.7", "0.5", "0.2")
MARK = 99.0  # percent of full
VERDICTS = {"equivalent": "**{}**", "pass": "**{}**", "undecided": "*{}*"}  # others as they are


@functools.cache
def runs() -> dict[str, tuple[tuple[float, float, float], str, tuple[float, float, float], str]]:
    """Run -> KL with its 95 % interval and verdict, percent of full ROUGE-2 likewise; verdicts corrected for all."""
    rows = pd.read_csv(ROOT / "experiments" / "articles_100.csv").set_index(["measure", "example"])
    names = [f"{method} {budget}" for method in NAMES for budget in BUDGETS]
    levels = (stats.LEVEL, stats.corrected_level(len(names)))
    counts = [(level, stats.resamples_for(level)) for level in levels]
    found = {}
    for name in names:
        kl, score, full = (
            rows.loc[key][column].to_numpy() for key, column in (("kl", name), ("rouge2", name), ("rouge2", "full"))
        )
        ((near, certain),) = divergence.share_intervals([kl], np.ones(len(kl)), levels)
        means = stats.resampled_means(stats.ratio_moments(score, full), counts[-1][1])
        ratio, wide = (100 * np.array(ends) for ends in stats.ratio_intervals(score, full, means, counts))
        percent = 100 * score.mean() / full.mean()
        verdict = divergence.decide(certain, EPSILON_KL), stats.decide(wide[0], wide[1], MARK)
        found[name] = ((kl.mean(), *near), verdict[0], (percent, *ratio), verdict[1])
    return found


def draw() -> Figure:
    figure, panels = blank(2, height=4.6)
    labels = (f"KL, nats per token (limit {EPSILON_KL:g})", f"ROUGE-2, % of full (limit {MARK:g})")
    for place, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        rows = [(label, [runs()[f"{name} {budget}"][2 * place] for budget in BUDGETS]) for name, label in NAMES.items()]
        dots(axes, rows, [f"{budget} of the cache" for budget in BUDGETS])
        axes.axvline((EPSILON_KL, MARK)[place], color="black", linewidth=1)
        axes.set_xlabel(label)
        decided = sum(found[2 * place + 1] != divergence.UNDECIDED for found in runs().values())
        axes.set_title(f"{decided} of {len(runs())} runs decided", fontsize=10.5)
    nats, percent = panels
    log_nats(nats)
    percent.get_legend().remove()
    percent.tick_params(labelleft=False)
    return figure


def table() -> str:
    rows = []
    for name, label in NAMES.items():
        found = [runs()[f"{name} {budget}"] for budget in BUDGETS]
        nats = [VERDICTS.get(verdict, "{}").format(f"{kl[0]:.4f}") for kl, verdict, _, _ in found]
        rows.append(
            [label, *nats, *(VERDICTS.get(verdict, "{}").format(f"{of[0]:.0f}") for _, _, of, verdict in found)]
        )
    return markdown(["method", *(f"{what} at {at}" for what in ("KL", "ROUGE-2 %") for at in BUDGETS)], rows)
