"""Keyformer, section 4.4.5 and appendix A.7: attention sinks and a recent window against key tokens."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import points
from experiments.lib.draw import curves, panels_of
from experiments.lib.stats import all_hold, better, ends, estimate

CLAIM = (
    "StreamingLLM, four sinks and a recent window in 60 % of the KV cache, struggles where Keyformer keeps the summary "
    "(ROUGE-1 1.4 against 38.7; arXiv:2403.09054, Table 3 and section 4.4.5)"
)
RATIO = 0.6


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return points(frame, "rouge1", rival="streaming_llm")


def draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table, figure, "keyformer_table3")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Keyformer's paired difference to StreamingLLM above 0 on every model."""
    verdicts, found = [], []
    for model, task in panels_of(table):
        at = table[table["model"].eq(model) & table["task"].eq(task) & table["kv_ratio"].eq(RATIO)]
        if set(at["method"]) != {"keyformer", "streaming_llm"}:
            return None, f"keyformer and streaming_llm at {RATIO} were not run"
        ours, sinks = (at[at["method"].eq(name)].iloc[0] for name in ("keyformer", "streaming_llm"))
        verdicts.append(better(ours["ahead_low"], ours["ahead_high"]))
        found.append(
            f"{model}: streaming_llm {estimate(*ends(sinks, 'of_full'))} % of full, "
            f"keyformer {estimate(*ends(ours, 'ahead'), sign=True)} ROUGE-1 points from it"
        )
    return all_hold(verdicts), "; ".join(found)
