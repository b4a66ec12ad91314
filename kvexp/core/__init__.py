"""The eviction core: tensors in, tensors out; imports torch and nothing else.

Axis letters in every docstring: B batch rows, H kv heads, G query heads per kv head, Q queries of one forward, S slots,
C slots allocated (S of them in use), N slots kept, D head dimension of queries and keys, Dv of values, T prompt tokens,
L layers, R rows of several caches stacked for one decode step, V vocabulary, n a number said in the text. "Columns" of
a batch are its tokens, padding included; a "column sum" is the attention that one slot received, summed over query
rows.
"""

from __future__ import annotations

from kvexp.core.attention import AttentionParams, RoPE
from kvexp.core.budget import Budget, BytesBudget, Cadence
from kvexp.core.config import CacheConfig
from kvexp.core.eviction import CacheState, EvictionLayer, MemoryTracker
from kvexp.core.method import AttentionScoreSpec, EvictionContext, Method, Needs, SecondPass
from kvexp.core.noise import Noise
from kvexp.core.quantized import EngineQuantization, Quantization
from kvexp.core.selection import SlotSelection
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Rewritten, Slots
from kvexp.core.special_methods import (
    ChangesScores,
    ChoosesSlots,
    GrantsSlots,
    JoinsLayers,
    KeepsEverything,
    RenewsScores,
    Rewrites,
    Simulated,
)
from kvexp.core.statistics import HeadScores, QueryCalibration, Surrogate

__all__ = [
    "AttentionParams",
    "AttentionScoreSpec",
    "Budget",
    "BytesBudget",
    "CacheConfig",
    "CacheState",
    "Cadence",
    "ChangesScores",
    "ChoosesSlots",
    "EngineQuantization",
    "EvictionContext",
    "EvictionLayer",
    "GrantsSlots",
    "HeadScores",
    "JoinsLayers",
    "KeepsEverything",
    "MemoryTracker",
    "Method",
    "Needs",
    "Noise",
    "Quantization",
    "QueryCalibration",
    "RenewsScores",
    "Rewrites",
    "Rewritten",
    "RoPE",
    "SecondPass",
    "SequenceState",
    "Simulated",
    "SlotSelection",
    "Slots",
    "Surrogate",
]
