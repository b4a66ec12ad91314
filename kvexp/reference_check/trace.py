"""Run a model step by step over recorded tokens and note, after each forward, what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.core import EvictionLayer
from kvexp.generate.loglikelihood import forward_last
from kvexp.models import EvictionCache


@dataclass
class Trace:
    """Per forward (0: the prompt): logits [B, V]; per layer the slots' positions, score and observed columns.

    kept, score, columns: [forward][layer] -> list over rows of list over heads of {position: value}.
    """

    logits: list[np.ndarray] = field(default_factory=list)
    score: list[list[Any]] = field(default_factory=list)
    kept: list[list[Any]] = field(default_factory=list)
    columns: list[list[Any]] = field(default_factory=list)


class _Tap:
    """Notes the column sums a layer is about to add, by position."""

    def __init__(self, state: EvictionLayer) -> None:
        self.state, self.add = state, state._accumulate
        self.last: list[list[dict[int, float]]] = []

    def __call__(self, slots: Any, spec: Any, sums: Tensor, query_positions: Tensor) -> None:
        self.last = by_position(slots.positions[:, :, : slots.length], sums)
        self.add(slots, spec, sums, query_positions)


def by_position(positions: Tensor, values: Tensor) -> list[list[dict[int, float]]]:
    """[B, H, S] positions and values -> per row and head {position: value}, dead slots left out."""
    return [
        [{p: v for p, v in zip(ps, vs, strict=True) if p >= 0} for ps, vs in zip(row_p, row_v, strict=True)]
        for row_p, row_v in zip(positions.tolist(), values.tolist(), strict=True)
    ]


def tapped(states: Sequence[Any]) -> list[_Tap]:
    """Install a tap on every layer of a fresh cache."""
    taps = [_Tap(state) for state in states]
    for tap in taps:
        tap.state._accumulate = tap  # type: ignore[method-assign]
    return taps


def note(trace: Trace, cache: EvictionCache, taps: list[_Tap]) -> None:
    """Add the state after a forward to the trace."""
    trace.columns.append([tap.last for tap in taps])
    trace.kept.append([state.kept_positions() for state in cache.layer_states])
    slots = [state.slots for state in cache.layer_states]
    trace.score.append(
        [by_position(s.positions[:, :, : s.length], s.score[:, :, : s.length]) for s in slots if s is not None]
    )


@torch.inference_mode()
def teacher_forced(cache: EvictionCache, model: Any, ids: Tensor, mask: Tensor, new_tokens: Tensor) -> Trace:
    """Prompt ids [B, T] with mask, then new_tokens [B, steps + 1] one by one (the last is not fed)."""
    trace, taps = Trace(), tapped(cache.layer_states)
    step = ids
    for j in range(new_tokens.shape[1]):
        trace.logits.append(forward_last(model, step, mask, cache).numpy())
        note(trace, cache, taps)
        step = new_tokens[:, j : j + 1]
        mask = torch.cat([mask, torch.ones_like(step)], dim=1)
    return trace
