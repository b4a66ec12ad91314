"""Keyformer, Fig. 8: ROUGE-2 of long documents against the share of the cache."""

from __future__ import annotations

from functools import partial

from experiments.lib.data import points
from experiments.lib.divergence import Closer, Near, by_divergence, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.verdicts import Part, beats_rival, each_panel, reaches

EXHIBITS = {
    "fig8": Exhibit(
        claim=(
            "On long documents Keyformer keeps 99 % of full attention's ROUGE-2 with half the KV cache, and H2O "
            "is significantly lower at the same size (arXiv:2403.09054, Fig. 8 and section 4.1)"
        ),
        table=partial(points, metric="rouge2", rival="h2o"),
        draw=partial(curves, paper="keyformer_fig8"),
        holds=each_panel(
            "{model} at 0.5: keyformer {0} % of full, h2o {1} %, difference {2} ROUGE-2 points",
            reaches("keyformer", 0.5),
            Part("h2o", 0.5),
            beats_rival("keyformer", 0.5),
        ),
        divergence=by_divergence(
            Near("keyformer at 0.5", of("keyformer", kv_ratio=0.5)),
            Near("h2o at 0.5", of("h2o", kv_ratio=0.5), judged=False),
            Closer("keyformer than h2o at 0.5", of("keyformer", kv_ratio=0.5), of("h2o", kv_ratio=0.5)),
        ),
    ),
}
