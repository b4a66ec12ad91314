"""PQCache, Table 3: a model whose every query head has its own keys, otherwise as Table 2."""

from __future__ import annotations

from experiments.pqcache.many_tasks import draw, holds, table

CLAIM = (
    "The same holds where every query head has its own keys: PQCache is 1.61 and 1.60 points over the best of H2O(C), "
    "InfLLM and SPARQ with 1/5 and 1/10 of the tokens (arXiv:2407.12820, Table 3, LLaMA-2-7B-Chat)"
)
SWEEPS = ("pqcache_table3", "pqcache_table3_infllm")
__all__ = ["CLAIM", "SWEEPS", "draw", "holds", "table"]
