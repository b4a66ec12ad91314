"""Traces of an eviction method for engines: what it scored, kept and dropped, step by step, layer by layer.

`kvexp trace` writes one; `trace_check`, which needs nothing but numpy, reads and checks it. docs/engines.md has the
format. Nothing is imported here.
"""
