"""Requests measured under the row mask: one forward each, and what the mask did to the last row."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.core import CacheConfig
from kvexp.core.masked_layer import MaskedLayer
from kvexp.generate import EvictionStats, Token
from kvexp.lm_eval.requests import Ask, Judged
from kvexp.lm_eval.row_mask_protocol import mask_fn_of
from kvexp.models import RowMaskCache


@dataclass(frozen=True)
class Masked:
    """A model, method and budget, and the row mask's settings (`kvexp.tasks.lm_eval.Protocol`)."""

    model: Any
    cache: CacheConfig
    mask: str
    whole_text: bool
    dtype: torch.dtype

    def measure(self, asks: Sequence[Ask]) -> list[Judged]:
        """One per ask, in order. A question is a part of the context here."""
        return [self._one(ask) for ask in asks]

    @torch.no_grad()
    def _one(self, ask: Ask) -> Judged:
        fed = ask.ids if self.whole_text else ask.ids[:-1]
        rule = mask_fn_of(
            self.cache.method,
            self.cache.budget,
            self.mask,
            ask.base or len(fed),
            seed=ask.seed,
            dtype=self.dtype,
        )
        cache = RowMaskCache(self.model, rule)
        device = self.model.get_input_embeddings().weight.device
        start = time.perf_counter()
        logits = self.model(torch.tensor([fed], device=device), past_key_values=cache, use_cache=True).logits[0]
        first = len(ask.ids) - len(ask.continuation) - 1
        tokens = judge(logits[first : len(ask.ids) - 1], ask.continuation)
        return Judged(tokens, receipt_of(cache.layer_states), time.perf_counter() - start)


def judge(logits: Tensor, continuation: Sequence[int]) -> list[Token]:
    """logits [N, V] of the N tokens they predict."""
    chosen = logits.float().log_softmax(-1)[range(len(continuation)), list(continuation)].tolist()
    return [Token(p, t == best) for p, t, best in zip(chosen, continuation, logits.argmax(-1).tolist(), strict=True)]


def receipt_of(states: Sequence[MaskedLayer]) -> EvictionStats:
    """What the last row could see, per query head; the bytes are those of a full cache, which a simulation holds."""
    rows = [state.mask[0, :, -1] for state in states if state.mask is not None]
    by_layer = [float(row.sum(-1).float().mean()) for row in rows]
    held = [[head.nonzero()[:, 0].tolist() for head in row] for row in rows]
    size = sum(state.kv_bytes for state in states)
    return EvictionStats(
        slots=sum(by_layer) / len(by_layer),
        slots_by_layer=by_layer,
        kv_bytes=size,
        peak_kv_bytes=size,
        first_eviction_step=0 if any(_hides(state) for state in states) else None,
        kept_digest=hashlib.sha256(repr(held).encode()).hexdigest()[:16],
        attention_kept=None,
        batch_size=1,
    )


def _hides(state: MaskedLayer) -> bool:
    assert state.mask is not None
    n = state.mask.shape[-1]
    return int(state.mask.sum()) < state.mask[..., 0, 0].numel() * n * (n + 1) // 2
