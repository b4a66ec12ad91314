"""Evictions undone: what a method would have answered without losing certain tokens in certain heads and steps.

Undoing an eviction means exactly this: from the step on at which the method evicted it, the token stays visible to
attention in that head, in addition to the budget, and the method neither chooses nor evicts it again. All other choices
remain the method's own, made anew with the token in sight: it takes its share of the attention, so scores may move.
With every eviction undone each query sees all there is, which is full attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core import CacheConfig, EvictionLayer, SequenceState
from kvexp.core.eviction_backend import Mask
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.slots import Slots
from kvexp.diagnose.case import Case
from kvexp.diagnose.watching import held_slots
from kvexp.errors import ConfigError
from kvexp.generate import PrefilledContext
from kvexp.models import EvictionCache

Place = tuple[int, int]  # layer, kv head


@dataclass(frozen=True)
class UndoneEvictions:
    """The evictions of these positions, in these places (layer, kv head), at steps first to last, both included."""

    positions: tuple[int, ...]
    places: tuple[Place, ...]
    first: int
    last: int


def check_undoing(cache: CacheConfig) -> None:
    """ConfigError for a cache in which no eviction can be undone."""
    if cache.quantization is not None:
        raise ConfigError(
            "undoing an eviction keeps every token in sight, and quantised slots drop what is evicted: explain a run "
            "of the same method with cache.bits=16 (its log and its twin are there with any cache.bits)"
        )


class UndoMask(Mask):
    """Mode mask with some evictions undone, row by row; none until `undo` is called.

    wanted [B, H, N] bool by position; first, last [B, 1, 1]: steps.
    """

    def __init__(self, layer: int, sequence: SequenceState) -> None:
        self.layer, self.sequence = layer, sequence
        self.wanted: Tensor | None = None
        self.first = self.last = torch.zeros(0)

    def undo(self, slots: Slots, trials: Sequence[UndoneEvictions], columns: int) -> None:
        """Let row i undo trials[i] from now on; what it names and is evicted already, at step 0, is visible again."""
        heads, device = slots.keys.shape[1], slots.keys.device
        wanted = torch.zeros(len(trials), heads, columns, dtype=torch.bool)
        for row, trial in enumerate(trials):
            mine = [head for layer, head in trial.places if layer == self.layer]
            if mine and trial.positions:
                wanted[row, torch.tensor(mine)[:, None], torch.tensor(trial.positions)] = True
        self.wanted = wanted.to(device)
        self.first, self.last = (
            torch.tensor([getattr(trial, name) for trial in trials], device=device)[:, None, None]
            for name in ("first", "last")
        )
        self._bring_back(slots, slots.valid() & ~held_slots(slots))

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        held = held_slots(slots)
        assert slots.visible is not None
        back = slots.visible[:, :, : slots.length] & ~held  # brought back before
        super().evict(slots, priority, protected, resolved, hidden_next_step)
        slots.visible[:, :, : slots.length] |= back
        self._bring_back(slots, held & ~held_slots(slots))

    def _bring_back(self, slots: Slots, gone: Tensor) -> None:
        """gone [B, H, S]: evicted at this very step."""
        if self.wanted is None:
            return
        assert slots.visible is not None
        step = self.sequence.seq_len - (self.sequence.prompt_columns or 0)
        named = self.wanted.gather(-1, slots.positions[:, :, : slots.length].clamp(min=0))
        slots.visible[:, :, : slots.length] |= gone & named & (self.first <= step) & (step <= self.last)

    def select_rows(self, rows: Tensor) -> None:
        assert self.wanted is None, "rows are chosen before evictions are undone"


class Replay:
    """Answers of one case with evictions undone; the prompt is prefilled once.

    size: trials at a time, rows of one batch, each with a copy of the whole prompt's keys and values. progress: is
    called with the number of trials made since its last call.
    """

    def __init__(self, case: Case, size: int = 8, progress: Callable[[int], None] | None = None) -> None:
        self.case, self.size, self.progress = case, size, progress
        self.trials = 0
        check_undoing(case.cache)
        self.context = case.prefill_prompt(prepare=_make_undoable, cache=dataclasses.replace(case.cache, mode="mask"))

    @property
    def everything(self) -> UndoneEvictions:
        """The undoing of every possible eviction, which is full attention."""
        heads = [
            state.require_slots().keys.shape[1]
            for state in self.context.cache.layer_states
            if isinstance(state, EvictionLayer)
        ]
        places = tuple((layer, head) for layer, count in enumerate(heads) for head in range(count))
        return UndoneEvictions(
            tuple(range(len(self.case.prompt) + self.case.max_tokens_to_come)), places, 0, self.case.max_tokens_to_come
        )

    def answers(self, trials: Sequence[UndoneEvictions]) -> list[list[int]]:
        """New tokens of each trial."""
        made: list[list[int]] = []
        for start in range(0, len(trials), self.size):
            made += self._answers(trials[start : start + self.size])
            if self.progress is not None:
                self.progress(len(trials[start : start + self.size]))
        self.trials += len(trials)
        return made

    def _answers(self, trials: Sequence[UndoneEvictions]) -> list[list[int]]:
        case = self.case
        context: PrefilledContext = self.context.fork([0] * len(trials))
        undo_in(context, trials, len(case.prompt) + case.max_tokens_to_come)
        return case.answer(context).tokens


def undo_in(context: PrefilledContext, trials: Sequence[UndoneEvictions], columns: int) -> None:
    """From now on row i of a replay's context undoes trials[i]. columns: all tokens to come, the prompt's included."""
    for state in context.cache.layer_states:
        assert isinstance(state, EvictionLayer) and isinstance(state.backend, UndoMask)
        state.backend.undo(state.require_slots(), trials, columns)


def _make_undoable(cache: EvictionCache) -> None:
    """Give every layer of a new cache an `UndoMask`."""
    for layer, state in enumerate(cache.layer_states):
        assert isinstance(state, EvictionLayer)
        state.backend = UndoMask(layer, cache.sequence)
