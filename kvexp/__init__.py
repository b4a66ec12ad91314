"""kvexp: which tokens may a language model forget while it generates, and what does that cost and win?"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0.dev0"

# Bumped by every change that can move a number; part of the identity of a run.
NUMERICS = 10


def __getattr__(name: str) -> Any:
    """`kvexp.compare` and `kvexp.Curves`, imported when they are asked for: `import kvexp` alone imports no torch."""
    if name in ("compare", "Curves"):
        return getattr(importlib.import_module("kvexp.results.curves"), name)
    raise AttributeError(f"module 'kvexp' has no attribute {name!r}")
