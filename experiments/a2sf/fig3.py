"""A2SF, Fig. 3: accuracy of multiple choice against the share of the cache, one shot; and ROUGE-2 of summaries."""

from __future__ import annotations

from functools import partial

import pandas as pd

from experiments.lib.data import ahead, points
from experiments.lib.divergence import Closer, by_divergence, count_closer, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, interval_columns, pooled_difference, positive, runs_of

NEAR = 0.4  # the share of the cache from which A2SF is said to approach the ideal choice


def compared(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The points, with what a2sf is ahead of h2o and of ideal, run by run and over all of them."""
    made = points(frame, metric, rival="h2o").assign(**ahead(frame, metric, "ideal", name="to_ideal"))
    overall = interval_columns("overall", pooled_difference(frame, runs_of("a2sf"), runs_of("h2o"), metric))
    window = interval_columns("overall_window", pooled_difference(frame, runs_of("a2sf"), runs_of("window"), metric))
    return made.assign(**overall, **window)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Two parts: a2sf leads h2o over all examples of all models and budgets, and at most points by the means."""
    rows, first = table[table["method"].eq("a2sf")], table.iloc[0]
    better_at, worse_at = int((rows["ahead_low"] > 0).sum()), int((rows["ahead_high"] < 0).sum())
    leads = int((rows["ahead"] > 0).sum())
    late = rows[rows["kv_ratio"] >= NEAR]
    short = int((late["to_ideal_high"] < 0).sum())
    lead, window = (ends(first, name) for name in ("overall", "overall_window"))
    return all_hold([positive(lead[1], lead[2]), 2 * leads > len(rows)]), (
        f"a2sf - h2o is {estimate(*lead, sign=True)} points over all; it leads at {leads} of {len(rows)} points (by "
        "more than "
        f"chance at {better_at}, and is behind so at {worse_at}). From {NEAR} on it is below ideal by more than "
        "chance at "
        f"{short} of {len(late)}; a2sf - window is {estimate(*window, sign=True)} (neither is part of the verdict)"
    )


EXHIBITS = {
    "fig3": Exhibit(
        title="A2SF, Fig. 3: accuracy of multiple choice against the share of the cache, one shot",
        claim=(
            "In most cases A2SF is more accurate than H2O, from a tenth to four fifths of the cache; from 0.4 on "
            "it can come near the ideal choice (arXiv:2407.20485, Fig. 3 and section 4.2)"
        ),
        table=partial(compared, metric="acc"),
        draw=partial(curves, paper="a2sf_fig3", xlabel="cache ratio (%)"),
        holds=holds,
    ),
    "fig3_rouge": Exhibit(  # the same methods and budgets on summaries, which the paper does not have
        title="A2SF, Fig. 3 with summaries, which the paper does not have: ROUGE-2 against the share of the cache",
        claim=(
            "A2SF is better than H2O in generation as well (arXiv:2407.20485 claims it of multiple choice alone, "
            "in section 4.2; this is Fig. 3 with summaries)"
        ),
        table=partial(compared, metric="rouge2"),
        draw=partial(curves, xlabel="cache ratio (%)"),
        holds=holds,
        divergence=by_divergence(
            Closer("a2sf than h2o, over all budgets", of("a2sf"), of("h2o")),
            Closer("a2sf than window, over all budgets", of("a2sf"), of("window"), judged=False),
            told=count_closer("a2sf", "h2o"),
        ),
    ),
}
