"""Keyformer, section 2.3: a recent window, key tokens, and a mixture of the two as in H2O."""

from __future__ import annotations

from functools import partial

import pandas as pd

from experiments.lib.data import points
from experiments.lib.divergence import Closer, Near, by_divergence, of
from experiments.lib.draw import settings_curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, better, ends, estimate

KEY = "method.recent_ratio"
CONTROLS = ("streaming_llm", "window", "random")
PLACED = "cache.positions=original"  # of the controls, so that they differ from H2O in the choice of tokens alone
HALF, NONE = f"{KEY}=0.5", f"{KEY}=0.0"
RATIOS = (0.3, 0.5)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with `recent`, the window's share of the budget: 0 to 0.9 of H2O, 1 of the two windows.

    over_CONTROL, over_none: the paired difference to each control, and to H2O without a recent window.
    """
    over = {f"over_{name}": (name, PLACED) for name in CONTROLS} | {"over_none": ("h2o", NONE)}
    made = points(frame, "rouge2", over=over, numbers={"recent": KEY})
    alone = made["method"].isin(["window", "streaming_llm"])
    made.loc[alone, "recent"] = 1.0
    made.loc[made["method"].eq("random"), "recent"] = 0.0
    return made


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """H2O, half of it recent, is better than the recent window with sinks and than key tokens alone, at each budget."""
    verdicts, found = [], []
    for _, row in table[table["setting"].eq(HALF)].iterrows():
        gaps = {name: ends(row, f"over_{name}") for name in ("streaming_llm", "none", "window", "random")}
        verdicts += [better(*gaps[name][1:]) for name in ("streaming_llm", "none")]
        cells = [f"{name} {estimate(*gap, sign=True)}" for name, gap in gaps.items()]
        found.append(f"{row['model']} at {row['kv_ratio']:g}: {', '.join(cells)}")
    return all_hold(verdicts), (
        "h2o, half of it recent, over the recent window with four sinks (streaming_llm), key tokens alone (none), and, "
        f"not part of the verdict, the window and a random choice, ROUGE-2 points: {'; '.join(found)}"
    )


def _parts() -> list[Near | Closer]:
    parts: list[Near | Closer] = []
    for ratio in RATIOS:
        mixed = of("h2o", HALF, kv_ratio=ratio)
        rivals = {"key tokens alone": of("h2o", NONE, kv_ratio=ratio)}
        rivals |= {name: of(name, PLACED, kv_ratio=ratio) for name in CONTROLS}
        parts.append(Near(f"h2o at {ratio:g}", mixed, judged=False))
        parts += [Near(f"{name} at {ratio:g}", runs, judged=False) for name, runs in rivals.items()]
        parts += [
            Closer(f"h2o than {name} at {ratio:g}", mixed, runs, judged=name in ("key tokens alone", "streaming_llm"))
            for name, runs in rivals.items()
        ]
    return parts


EXHIBITS = {
    "mixture": Exhibit(
        claim=(
            "Neither the newest tokens nor the key tokens are enough by themselves: a mixture of a recent window and "
            "key tokens, as H2O has it, is better than either with the same budget (arXiv:2403.09054, sections 2.3.1, "
            "3.1 and 4.4.4)"
        ),
        sweeps=("keyformer_mixture", "keyformer_mixture_controls"),
        table=table,
        draw=partial(settings_curves, x="recent", xlabel="recent window (share of the budget)"),
        holds=holds,
        divergence=by_divergence(*_parts()),
    ),
}
