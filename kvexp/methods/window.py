"""Sliding window over the newest tokens ("local attention")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvexp.core import EvictionContext, Method
from kvexp.core.method import recency


@dataclass(frozen=True)
class Window(Method):
    """keep = the newest k tokens.

    Source: the "Window Attention" baseline of Keyformer (arXiv:2403.09054, section 4.1, recent ratio 100 %) and the
    "Local" one of A2SF (arXiv:2407.20485, Table 1). The released A2SF mask attends one token more.
    """

    name: ClassVar[str] = "window"
    is_window: ClassVar[bool] = True

    def priority(self, ctx: EvictionContext) -> Tensor:
        return recency(ctx)
