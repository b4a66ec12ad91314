"""Keyformer, Fig. 7 and appendix A.5: ROUGE against the share of the cache, summaries above, conversation below."""

from __future__ import annotations

from functools import partial
from typing import Any

from experiments.lib.data import points
from experiments.lib.divergence import Near, by_divergence, count_closer, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.verdicts import each_panel, leads, reaches, stays_below

SHARED: dict[str, Any] = {  # ROUGE-1 and ROUGE-L are of the runs of Fig. 7
    "sweeps": ("keyformer_fig7", "keyformer_fig7_soda"),
    "real_sweeps": ("keyformer_fig7",),  # of SODA a folder of samples has too few rows
    "draw": partial(curves, paper="keyformer_fig7"),
    "holds": each_panel(
        "{model}, {task}: keyformer at 0.7 {0}; h2o at 0.9 {1}; window at 0.9 {2}.",
        reaches("keyformer", 0.7),
        stays_below("h2o", 0.9),
        stays_below("window", 0.9),
        before="% of full: ",
        between=" ",
        after=leads("keyformer", "h2o"),
    ),
}

EXHIBITS = {
    "fig7": Exhibit(
        title="Keyformer, Fig. 7: ROUGE-2 against the share of the cache, summaries above and conversation below",
        claim=(
            "Keyformer reaches 99 % of full attention's ROUGE-2 with 70 % of the KV cache, while window attention "
            "and H2O stay below it even with 90 % (arXiv:2403.09054, Fig. 7 and section 4.1)"
        ),
        table=partial(points, metric="rouge2", rival="h2o"),
        divergence=by_divergence(
            Near("keyformer at 0.7", of("keyformer", kv_ratio=0.7)),
            Near("h2o at 0.9", of("h2o", kv_ratio=0.9), within=False),
            Near("window at 0.9", of("window", kv_ratio=0.9), within=False),
            told=count_closer("keyformer", "h2o"),
        ),
        **SHARED,
    ),
    "fig7_rouge1": Exhibit(
        title="Keyformer, appendix A.5: Fig. 7 in ROUGE-1, from the runs of Fig. 7",
        claim=(
            "What Fig. 7 shows in ROUGE-2 (keyformer at 70 % of the KV cache reaches 99 % of full attention; "
            "window and H2O at 90 % do not) holds in ROUGE-1 (arXiv:2403.09054, section 4.1 and appendix A.5)"
        ),
        table=partial(points, metric="rouge1", rival="h2o"),
        **SHARED,
    ),
    "fig7_rougeL": Exhibit(
        title="Keyformer, appendix A.5: Fig. 7 in ROUGE-L, from the runs of Fig. 7",
        claim=(
            "What Fig. 7 shows in ROUGE-2 (keyformer at 70 % of the KV cache reaches 99 % of full attention; "
            "window and H2O at 90 % do not) holds in ROUGE-L (arXiv:2403.09054, section 4.1 and appendix A.5)"
        ),
        table=partial(points, metric="rougeL", rival="h2o"),
        **SHARED,
    ),
}
