"""Retrieval methods: keep every key and value, attend to few; one file each."""

from __future__ import annotations

from kvexp.retrieval.infllm import InfLLM
from kvexp.retrieval.oracle import Oracle
from kvexp.retrieval.pqcache import PQCache
from kvexp.retrieval.quest import Quest
from kvexp.retrieval.sparq import SparQ

__all__ = ["InfLLM", "Oracle", "PQCache", "Quest", "SparQ"]
