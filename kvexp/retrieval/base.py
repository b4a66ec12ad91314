"""What a retrieval method is: it keeps every token and says, for each query, which ones to attend to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, attend_prompt
from kvexp.core.budget import floor_share
from kvexp.core.method import Method
from kvexp.errors import ConfigError
from kvexp.retrieval.block_cache import CacheSpec
from kvexp.retrieval.kv_index import Index
from kvexp.retrieval.query import Chosen, RetrievalQuery


@dataclass(frozen=True)
class PrefillKV:
    """A prompt at its end, to be indexed: slot = position, left-aligned, whatever the padding was.

    keys [B, H, S, D], values [B, H, S, Dv]; lengths: real tokens per row (what lies behind them is nothing);
    local: past tokens of the recent window, per row; room: positions the index should have room for; home: where a
    shipped part of it lives (None: nothing leaves the device); samples: rows in a row that hold the same prompt (the
    beams of a sample); prepared: what `Retrieval.prepare` returned; device: the model's; geometry: the layer's.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    local: list[int]
    room: int
    home: torch.device | None
    device: torch.device
    geometry: AttentionParams
    samples: int = 1
    prepared: Any = None

    def left_aligned(self, x: Tensor) -> Tensor:
        """x [B, H, S, *] in columns, padding on the left -> slot = position, as `keys` and `values` are."""
        return left_aligned(x, self.lengths)

    def real(self) -> Tensor:
        """[B, S] bool: the slots that hold a token."""
        ends = torch.tensor(self.lengths, device=self.device)
        return torch.arange(self.keys.shape[2], device=self.device) < ends[:, None]


def left_aligned(x: Tensor, lengths: list[int]) -> Tensor:
    """x [B, H, S, D] in columns, padding on the left -> slot = position; what lies behind a row's end is nothing."""
    if min(lengths) == x.shape[2]:
        return x
    pads = x.shape[2] - torch.tensor(lengths, device=x.device)[:, None]
    index = (pads + torch.arange(x.shape[2], device=x.device)) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


@dataclass(frozen=True)
class Retrieval(Method):
    """Base of every retrieval method. Subclasses say how relevant each slot is; what they remember is the `Index`.

    attended = sinks U recent window U current token U chosen, budget slots in all, the current token included. Of the
    budget less sinks and current token, `recent_ratio` is the window (floored) and the rest is chosen: at equal counts
    these are the halves of PQCache's release (arXiv:2407.12820), which grants int(ratio * (prompt - sinks)) and puts
    sinks and current token on top. Prefill attends in full.

    offload: keep all but sinks, window, block cache and index in CPU memory (on a CPU: report what would move).
    """

    keeps_everything: ClassVar[bool] = True
    whole_prompt: ClassVar[bool] = False  # it cannot index a prompt that comes in chunks
    n_sinks: int = 4
    recent_ratio: float = 0.5
    offload: bool = True

    def __post_init__(self) -> None:
        if self.n_sinks < 0:
            raise ConfigError(f"n_sinks must be at least 0, got {self.n_sinks}")
        if not 0 <= self.recent_ratio <= 1:
            raise ConfigError(f"recent_ratio must be in [0, 1], got {self.recent_ratio:g}")

    @property
    def sinks(self) -> int:
        return self.n_sinks

    def recent(self, budget: int) -> int:
        return 1 + floor_share(self.recent_ratio, max(0, budget - self.n_sinks - 1))

    # -- what a method is made of -------------------------------------------------------------------------------------

    def build(self, index: Index, prompt: PrefillKV) -> None:
        """Index a prompt."""

    def extend(self, index: Index, key: Tensor, value: Tensor, at: list[int]) -> None:
        """Index the new token of every row: key [B, H, D], value [B, H, Dv] at position at[i]."""

    def relevance(self, asked: RetrievalQuery) -> Tensor:
        """[B, H, S] float32, higher is chosen first; what it says about other slots than candidates is ignored."""
        raise NotImplementedError

    def select(self, asked: RetrievalQuery) -> Chosen:
        """The slots to attend to, besides sinks, window and current token."""
        return Chosen(asked.top(self.relevance(asked)))

    # -- what a method may do differently -----------------------------------------------------------------------------

    def attend(self, sight: AttentionInputs, asked: RetrievalQuery, chosen: Chosen) -> Tensor:
        """Output [B, H, G, 1, Dv] over the slots of `sight`: sinks, chosen, window and current token, in this order."""
        return attend_prompt(sight)

    def attend_prompt(self, sight: AttentionInputs, index: Index, local: list[int], counts: list[int]) -> Tensor:
        """Output [B, H, G, Q, Dv] of prompt rows; local, counts: past window and slots to choose, per row."""
        return attend_prompt(sight)

    @property
    def cache(self) -> CacheSpec | None:
        """The block cache on the device; None: there is none."""
        return None

    @property
    def builds_on_host(self) -> bool:
        """`build` reads the keys at home, beside the computation on a GPU, and is waited for at the first new token."""
        return False

    @property
    def ungrouped(self) -> bool:
        """Every query head chooses for itself: its kv head is repeated for it, in memory too."""
        return False

    @property
    def clamps(self) -> bool:
        """`attend` moves keys to other positions, so it needs the model's rotation."""
        return False

    def check_heads(self, dim: int) -> None:
        """ConfigError if the method cannot work with heads of `dim` components."""

    def prepare(self, seconds: Callable[[int], float], longest: int, heads: int, dim: int, device: str) -> Any:
        """Once per model, before the first prompt; the result is handed to `build`.

        seconds(n): how long one layer takes for n <= longest prompt tokens on this machine; heads: kv heads.
        """
        return None

    def search_bits(self, dim: int) -> float:
        """Bits per token and kv head that the choice reads at every step, in the papers' accounting of 16-bit keys."""
        return 0.0
