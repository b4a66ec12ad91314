"""What methods say of a prompt's tokens when it ends: their priority in every layer and head, and what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core import CacheConfig, EvictionLayer
from kvexp.core.eviction_backend import EvictionBackend
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.slots import Slots
from kvexp.diagnose.case import Case
from kvexp.diagnose.watching import held_slots, still_held
from kvexp.generate import forward_last
from kvexp.generate.prefilled_context import new_cache
from kvexp.models import EvictionCache, MultiMethodCache
from kvexp.models.removal import Removal


@dataclass(frozen=True)
class PromptScores:
    """One method at the end of a prompt of S tokens.

    priority [L, H, S] float32: higher is kept longer; protected [L, H, S]: sinks and recent window, kept whatever their
    priority; kept [L, H, S]: held after the eviction. Where a layer evicts nothing all of it is kept, at priority 0.
    """

    priority: Tensor
    protected: Tensor
    kept: Tensor


class ScoredEviction(EvictionBackend):
    """The backend `inner` of one layer and row, with its first eviction noted: priority, protected, kept [H, S]."""

    def __init__(self, inner: EvictionBackend, tokens: int) -> None:
        self.inner, self.tokens = inner, tokens
        self.noted: tuple[Tensor, Tensor, Tensor] | None = None

    def next_slot(self) -> Tensor | None:
        return self.inner.next_slot()

    def reset_layout(self) -> None:
        self.inner.reset_layout()

    def select_rows(self, rows: Tensor) -> None:
        self.inner.select_rows(rows)

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        held = held_slots(slots)
        positions = slots.positions[:, :, : slots.length].masked_fill(~held, -1)
        self.inner.evict(slots, priority, protected, resolved, hidden_next_step)
        if self.noted is None:
            kept = still_held(slots, positions)
            self.noted = (
                _by_position(priority, positions, self.tokens),
                _by_position(protected, positions, self.tokens),
                _by_position(kept, positions, self.tokens),
            )


def _by_position(values: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[H, S] by position, of one row's values [1, H, C] by slot; slots at position -1 are left out."""
    made = values.new_zeros(*values.shape[1:2], tokens + 1)
    made.scatter_(-1, torch.where(positions[0] < 0, tokens, positions[0]), values[0])
    return made[:, :tokens].cpu()


@torch.no_grad()
def prompt_scores(case: Case, methods: Mapping[str, CacheConfig]) -> dict[str, PromptScores]:
    """The scores of every method at the end of the case's prompt, its question not yet fed.

    Methods that read a prompt as the model does share one forward of it.
    """
    apart = [name for name, config in methods.items() if config.method.modifies_prefill]
    together = [name for name in methods if name not in apart]
    found: dict[str, PromptScores] = {}
    for names in ([together] if together else []) + [[name] for name in apart]:
        found |= _scores(case, {name: methods[name] for name in names})
    return {name: found[name] for name in methods}


def _scores(case: Case, methods: Mapping[str, CacheConfig]) -> dict[str, PromptScores]:
    """`prompt_scores` of methods that share a forward."""
    model, prompt = case.model, case.prompt
    ids = torch.tensor([prompt], device=model.get_input_embeddings().weight.device)
    caches: dict[str, EvictionCache] = {}
    for name, config in methods.items():
        caches[name] = new_cache(
            model,
            [prompt],
            config,
            len(prompt),
            case.max_tokens_to_come,
            [case.seed],
            tokenizer=case.tokenizer,
            spans=[case.spans],
        )
        for state in caches[name].layer_states:
            if isinstance(state, EvictionLayer):
                state.backend = ScoredEviction(state.backend, len(prompt))
    forward_last(model, ids, torch.ones_like(ids), MultiMethodCache(list(caches.values()), 1))
    return {name: _noted(cache, len(prompt)) for name, cache in caches.items()}


def _noted(cache: EvictionCache, tokens: int) -> PromptScores:
    layers = []
    for state in cache.layer_states:
        assert isinstance(state, EvictionLayer) and isinstance(state.backend, ScoredEviction)
        heads = state.require_slots().positions.shape[1]
        nothing = (torch.zeros(heads, tokens), torch.zeros(heads, tokens, dtype=torch.bool))
        layers.append(state.backend.noted or (*nothing, ~nothing[1]))
    priority, protected, kept = (torch.stack(each) for each in zip(*layers, strict=True))
    return PromptScores(priority.float(), protected, kept)


def everything_evicted(scores: PromptScores) -> list[Removal]:
    """What a method did not keep, as removals: one for each layer and kv head that lost something."""
    return [
        Removal(tuple((~kept).nonzero()[:, 0].tolist()), ((layer, head),))
        for layer, heads in enumerate(scores.kept)
        for head, kept in enumerate(heads)
        if not bool(kept.all())
    ]
