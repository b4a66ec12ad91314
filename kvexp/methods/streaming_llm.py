"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from kvexp.core import EvictionContext, Method
from kvexp.core.method import recency
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class StreamingLLM(Method):
    """keep = the first `n_sinks` tokens U the newest k - n_sinks.

    Source: Xiao et al., arXiv:2309.17453, section 3.2; survivors get the positions they have inside the cache
    (`positions=renumbered`; models with learned positions need original). Departure: sinks are real tokens; in
    Keyformer's release of this baseline they may be padding.
    """

    name: ClassVar[str] = "streaming_llm"
    is_window: ClassVar[bool] = True
    positions: ClassVar[str] = "renumbered"
    n_sinks: Annotated[int, AtLeast(0)] = 4  # arXiv:2309.17453 section 3.2

    def priority(self, ctx: EvictionContext) -> Tensor:
        return recency(ctx)
