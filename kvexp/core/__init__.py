"""The eviction core: tensors in, tensors out; imports torch and nothing else.

Axis letters in every docstring: B batch rows, H kv heads, G query heads per kv head, Q queries of one forward, S slots,
C slots allocated (S of them in use), N slots kept, D head dimension of queries and keys, Dv of values, T prompt tokens,
L layers, R rows of several caches stacked for one decode step, V vocabulary, n a number said in the text. "Columns" of
a batch are its tokens, padding included; a "column sum" is the attention that one slot received, summed over query
rows.
"""

from kvexp.core.attention import AttentionParams, RoPE
from kvexp.core.budget import Budget, Cadence
from kvexp.core.bytes_budget import BytesBudget
from kvexp.core.cache_config import CacheConfig
from kvexp.core.cache_settings import CacheOptions
from kvexp.core.eviction_layer import EvictionLayer
from kvexp.core.head_scores import HeadScores
from kvexp.core.memory_tracker import MemoryTracker
from kvexp.core.method import EvictionContext, Method
from kvexp.core.needs import Needs
from kvexp.core.observe.noise import Noise
from kvexp.core.quantization import Quantization
from kvexp.core.query_calibration import QueryCalibration
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.second_pass import SecondPass
from kvexp.core.selection import SlotSelection
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.core.surrogate import Surrogate

__all__ = [
    "AttentionParams",
    "AttentionScoreSpec",
    "Budget",
    "BytesBudget",
    "CacheConfig",
    "CacheOptions",
    "Cadence",
    "EvictionContext",
    "EvictionLayer",
    "HeadScores",
    "MemoryTracker",
    "Method",
    "Needs",
    "Noise",
    "Quantization",
    "QueryCalibration",
    "RoPE",
    "SecondPass",
    "SequenceState",
    "SlotSelection",
    "Slots",
    "Surrogate",
]
