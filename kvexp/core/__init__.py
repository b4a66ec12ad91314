"""The eviction core: tensors in, tensors out; imports torch and nothing else.

Axis letters in every docstring: B batch rows, H kv heads, G query heads per kv head, Q queries of this forward,
S slots, N kept, D head dim, T prompt tokens, L layers.
"""

from kvexp.core.attend import Geometry, Rotation
from kvexp.core.budget import Budget, Cadence
from kvexp.core.layer import LayerState
from kvexp.core.ledger import Ledger
from kvexp.core.method import Method, Moment
from kvexp.core.noise import Noise
from kvexp.core.plan import Plan
from kvexp.core.slots import Slots
from kvexp.core.timeline import Timeline
from kvexp.core.view import Attention

__all__ = [
    "Attention",
    "Budget",
    "Cadence",
    "Geometry",
    "LayerState",
    "Ledger",
    "Method",
    "Moment",
    "Noise",
    "Plan",
    "Rotation",
    "Slots",
    "Timeline",
]
