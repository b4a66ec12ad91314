"""kvexp: which tokens may a language model forget while it generates, and what does that cost and win?"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0.dev0"

# Bumped by every change that can move a number; part of the identity of a run.
NUMERICS = 11


# Name -> its module, imported when it is asked for: `import kvexp` alone imports no torch.
_ON_DEMAND = {
    "generate": "kvexp.generate",
    "load": "kvexp.run.notebook",
    "compare": "kvexp.results.curves",
    "Curves": "kvexp.results.curves",
}


def __getattr__(name: str) -> Any:
    """`kvexp.load`, `kvexp.generate`, `kvexp.compare`; another name is answered with the place that has it."""
    if name in _ON_DEMAND:
        module = importlib.import_module(_ON_DEMAND[name])
        return module if name == "generate" else getattr(module, name)
    if name[:1].isupper() or name in ("load_model", "load_tokenizer", "patch_model"):
        for place in ("methods", "retrieval", "core", "hf"):
            module = importlib.import_module(f"kvexp.{place}")
            if name in module.__all__:
                raise AttributeError(f"kvexp has no {name}: write from kvexp.{place} import {name}")
    raise AttributeError(f"module 'kvexp' has no attribute {name!r}")
