"""The fast decode step: what `EvictionLayer.forward` does for one new token per row, in as few operations as possible.

It takes caches that are steady: each kv head has exactly one free slot, which the next token fills, and the eviction
after it frees exactly one slot again (mode overwrite, an eviction at every step). "Stacked" caches share one step.
"""
