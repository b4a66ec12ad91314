"""Keyformer, section 4.4.5 and appendix A.7: attention sinks and a recent window against key tokens."""

from __future__ import annotations

from functools import partial

from experiments.lib.data import points
from experiments.lib.divergence import Closer, Near, by_divergence, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.verdicts import Part, beats_rival, each_panel

EXHIBITS = {
    "streaming": Exhibit(
        claim=(
            "StreamingLLM, four sinks and a recent window in 60 % of the KV cache, struggles where Keyformer "
            "keeps the summary (ROUGE-1 1.4 against 38.7; arXiv:2403.09054, Table 3 and section 4.4.5)"
        ),
        table=partial(points, metric="rouge1", rival="streaming_llm"),
        draw=partial(curves, paper="keyformer_table3"),
        holds=each_panel(
            "{model}: streaming_llm {0} % of full, keyformer {1} ROUGE-1 points from it",
            Part("streaming_llm", 0.6),
            beats_rival("keyformer", 0.6),
        ),
        divergence=by_divergence(
            Near("streaming_llm at 0.6", of("streaming_llm", kv_ratio=0.6), judged=False),
            Closer(
                "keyformer than streaming_llm at 0.6", of("keyformer", kv_ratio=0.6), of("streaming_llm", kv_ratio=0.6)
            ),
        ),
    ),
}
