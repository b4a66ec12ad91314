"""PQCache, Fig. 9a: quality of a longer answer against the share of tokens that are attended to."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import points
from experiments.lib.divergence import Closer, by_divergence, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, interval_columns, pooled_difference, positive, runs_of

RIVALS = ("h2o_c", "sparq", "infllm")
EXCEPT = ("h2o_c", 0.1)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points, and at each budget what pqcache is ahead of each rival."""
    metric = "rouge2" if "rouge2" in frame else str(frame["headline"].iloc[0])  # GSM8K's is exact
    made = points(frame, metric)
    for rival in RIVALS:
        for ratio in sorted(made["kv_ratio"].dropna().unique()):
            found = pooled_difference(frame, runs_of("pqcache", kv_ratio=ratio), runs_of(rival, kv_ratio=ratio), metric)
            made = made.assign(**interval_columns(f"over_{rival}_{ratio:g}", found))
    return made


def draw(table: pd.DataFrame, figure: Figure) -> None:
    # Of InfLLM's block, which has a name of its own in another sweep, nothing is varied here.
    curves(table.assign(setting=""), figure, xlabel="tokens attended to (%)")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """At every budget and against every rival; the exception that the paper makes is told and left out."""
    first, verdicts, found = table.iloc[0], [], []
    for rival in RIVALS:
        cells = []
        for ratio in sorted(table["kv_ratio"].dropna().unique()):
            each = ends(first, f"over_{rival}_{ratio:g}")
            cells.append(f"{estimate(*each, sign=True)} at {ratio:g}")
            if (rival, ratio) != EXCEPT:
                verdicts.append(positive(each[1], each[2]))
        found.append(f"over {rival} {', '.join(cells)}")
    return all_hold(verdicts), "pqcache is " + "; ".join(found)


EXHIBITS = {
    "fig9a": Exhibit(
        claim=(
            "PQCache is better than H2O(C), SPARQ and InfLLM at every share of the tokens, but for H2O(C) at "
            "1/10, which may attend to more (arXiv:2407.12820, Fig. 9a and section 4.2.3, GSM8K; summaries stand "
            "for it here)"
        ),
        sweeps=("pqcache_fig9a", "pqcache_fig9a_infllm"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(
            *(
                Closer(
                    *(f"pqcache than {rival} at {ratio:g}", of("pqcache", kv_ratio=ratio), of(rival, kv_ratio=ratio)),
                    judged=(rival, ratio) != EXCEPT,
                )
                for ratio in (0.1, 0.2, 0.3)
                for rival in RIVALS
            )
        ),
    ),
}
