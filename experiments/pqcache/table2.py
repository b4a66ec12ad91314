"""PQCache, Table 2: a model with grouped heads on many tasks, with a fifth and a tenth of the tokens."""

from __future__ import annotations

from experiments.pqcache.many_tasks import draw, holds, table

CLAIM = (
    "With 1/5 and 1/10 of the tokens and as little to read for the choice, PQCache is better on average than H2O(C), "
    "InfLLM and SPARQ: by 3.88 and 6.21 points over the best of them on LongBench, and no worse than full attention at "
    "1/5 (arXiv:2407.12820, Table 2, Mistral-7B; tasks of the testbed stand for LongBench's)"
)
SWEEPS = ("pqcache_table2", "pqcache_table2_infllm")
__all__ = ["CLAIM", "SWEEPS", "draw", "holds", "table"]
