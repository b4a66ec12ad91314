"""A twin that keeps everything and is asked what the run lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvexp.core import AttentionParams, EvictionLayer
from kvexp.core.attention import AttentionInputs, apply_probs, expanded, token_share
from kvexp.core.eviction import LayerCache
from kvexp.core.slot_order import keep_order
from kvexp.diagnose.case import Case
from kvexp.diagnose.log import ColumnRecord
from kvexp.generate.inputs import RowProcessors, eos_ids
from kvexp.generate.prefill import decode_step
from kvexp.hf import MultiMethodCache
from kvexp.hf.cache import MultiLayer
from kvexp.retrieval.layer import RetrievalLayer

# The method and the full cache on the same tokens: what each head lost at each step, and what that did.
#
# Both caches are rows of one batch and take every token together. Of a step nothing is kept but one number per head, so
# memory is that of the two caches: linear in length.


MEASURES = ("lost", "lost_ideal", "overlap", "error", "error_here")


class Losses(ColumnRecord):
    """One row per step, layer and kv head; a step is the number of decode tokens fed, its query's own included.

    kept: slots that the query could see in this head, itself included; of a retrieval method those that it attended to
    (by which a step judges one selection; where each query head selects for itself, the largest of them).
    lost: share of the full cache's attention that falls on what it could not see, mean over the head's query heads.
    lost_ideal: the same had it kept the ideal set: itself and the exact top kept - 1 of that attention, summed over
    the query heads (`method=ideal`); less than that no choice of as many slots can lose.
    overlap: share of the ideal set that was kept.
    error: relative L2 distance of the head's attention output from the full cache's, both in their own run, so it holds
    what layers below and steps before have done. error_here: the same with the full cache's own query, keys and values,
    less what was evicted: what this head's evictions alone do. Outputs of all query heads of the kv head as one vector.
    Where survivors are renumbered, `error` holds what that does too.
    """

    kinds: ClassVar[dict[str, torch.dtype]] = {
        **{"step": torch.int32, "layer": torch.int16, "head": torch.int16, "kept": torch.int32},
        **dict.fromkeys(MEASURES, torch.float32),
    }


class TwinLayer:
    """A `LayerCache` of two layers, the method's and the full cache's, for decode steps of one row each."""

    def __init__(self, joined: MultiLayer, layer: int, into: Losses) -> None:
        self.joined, self.layer, self.into = joined, layer, into
        method, full = joined.states
        assert isinstance(full, EvictionLayer)
        self.method, self.full = method, full

    @property
    def seq_len(self) -> int:
        return self.joined.seq_len

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        method = self.method
        before = visible_positions(method) if isinstance(method, EvictionLayer) else None
        out = self.joined.forward(query, key, value, params, padding)
        full = self.full
        slots, newest = full.require_slots(), full.sequence.positions(query.device)
        where = slots.broadcast_positions()
        seen = torch.zeros(key.shape[1], slots.length + 1, dtype=torch.bool, device=query.device)
        if before is not None:
            seen.scatter_(1, torch.where(before < 0, slots.length, before), True)
        elif isinstance(method, RetrievalLayer):
            seen = attended(method, seen)
        seen[..., newest[0, 0]] = True
        inputs = AttentionInputs(
            query=query[1:].unflatten(1, (key.shape[1], -1)),
            keys=slots.keys[:, :, : slots.length],
            values=slots.values[:, :, : slots.length],
            positions=where,
            query_positions=newest,
            params=params.split([1, 1])[1],
            in_column_order=slots.same_order,
            padded=False,
        )
        self._note(expanded(inputs), seen[..., : slots.length], *out.unflatten(1, (key.shape[1], -1)).flatten(2))
        return out

    def take_input(self, *inputs: Tensor) -> None:
        """Hand on what this layer gets, as `MultiLayer`."""
        self.joined.take_input(*inputs)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError, as by `MultiLayer`."""
        self.joined.select_rows(rows, same_prompts=same_prompts)

    def reset(self) -> None:
        """Always a CacheError, as by `MultiLayer`."""
        self.joined.reset()

    def _note(self, inputs: AttentionInputs, seen: Tensor, out: Tensor, full: Tensor) -> None:
        """Measure one step. seen [H, S]: positions the method saw; out, full [H, G * Dv]: outputs of both caches.

        seen [H, G, S]: of a method that selects for every query head by itself.
        """
        x = inputs.logits(slice(0, 1), seen.shape[-1])
        rows = torch.softmax(x, dim=-1)  # [1, H, G, 1, S]; with sinks too, the shares are of what goes to tokens
        mass = rows[0, :, :, 0].mean(1)
        seen_by_query = seen if seen.ndim == 3 else seen[:, None]
        kept = seen_by_query.sum(-1).amax(1)
        ideal = ideal_set(mass, inputs.query_positions[0, 0], kept)
        left = rows * seen_by_query[None, :, :, None]
        if seen.ndim == 2:
            lost = mass.masked_fill(seen, 0).sum(-1)
        else:
            lost = rows[0, :, :, 0].masked_fill(seen, 0).sum(-1).mean(1)
        left = left / left.sum(-1, keepdim=True)
        if (sinks := inputs.params.sinks) is not None:
            left *= token_share(x.masked_fill(~seen_by_query[None, :, :, None], -torch.inf), sinks)
        here = apply_probs(left, inputs.values)[0].flatten(1)
        head = torch.arange(len(kept), device=kept.device)
        step = self.full.sequence.seq_len - (self.full.sequence.prompt_columns or 0)
        self.into.add(
            step=torch.full_like(head, step),
            layer=torch.full_like(head, self.layer),
            head=head,
            kept=kept,
            lost=lost,
            lost_ideal=mass.masked_fill(ideal, 0).sum(-1),
            overlap=(ideal[:, None] & seen_by_query).sum(-1).float().mean(1) / kept,
            error=_distance(out, full),
            error_here=_distance(here, full),
        )


def attended(state: RetrievalLayer, nothing: Tensor) -> Tensor:
    """[H, S + 1] bool: the positions that the newest token of a cache of one row attended to.

    [H, G, S + 1] where each query head selects for itself. nothing [H, S + 1]: all False.
    """
    rows = state.kept_positions()[0]
    rows = rows * len(nothing) if len(rows) == 1 else rows  # one list where all heads attended to the same
    seen = nothing[:, None].repeat(1, len(rows) // len(nothing), 1).flatten(0, 1)
    for head, positions in enumerate(rows):
        seen[head, positions] = True
    return seen if len(rows) == len(nothing) else seen.unflatten(0, (len(nothing), -1))


def visible_positions(state: EvictionLayer) -> Tensor:
    """[H, S]: positions that the next query can see in a cache of one row, -1 for dead and hidden slots; a copy."""
    slots = state.require_slots()
    positions = slots.positions[0, :, : slots.length].clone()
    return positions if slots.visible is None else positions.masked_fill(~slots.visible[0, :, : slots.length], -1)


def ideal_set(mass: Tensor, newest: Tensor, counts: Tensor) -> Tensor:
    """[H, S] bool: the newest token and the best counts [H] - 1 others of attention mass [H, S], slot = position."""
    positions = torch.arange(mass.shape[1], device=mass.device).expand_as(mass)
    best = keep_order(mass[None], positions[None], (positions == newest)[None])[0]
    chosen = torch.arange(mass.shape[1], device=mass.device) < counts[:, None]
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(1, best, chosen)


def _distance(out: Tensor, full: Tensor) -> Tensor:
    """[H] relative L2 distance of rows [H, *]."""
    out, full = out.float(), full.float()
    distance: Tensor = (out - full).norm(dim=-1) / full.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return distance


@torch.no_grad()
def twin(case: Case, answer: Sequence[int]) -> tuple[Losses, list[bool]]:
    """Feed question and answer to the method's cache and to a full one, token by token.

    Returns what was lost, and for each token of the answer whether the full cache would have written it at that place.
    The prompt is prefilled for each; eviction follows it in the method's cache alone.
    """
    method, full = case.prefill_prompt(), case.full().prefill_prompt()
    cache = MultiMethodCache([method.cache, full.cache], 1)
    into = Losses()
    for layer, layer_cache in enumerate(cache.layers[number] for number in cache.held):
        joined: LayerCache = TwinLayer(layer_cache.state, layer, into)
        layer_cache.state = joined
    written: list[int] = []
    logits, position = full.logits, len(case.prompt)
    fed = [*case.question, *answer]
    read = torch.tensor([[*case.prompt, *fed]], device=full.ids.device)
    before = read[:, : len(case.prompt) + len(case.question)]
    ends = eos_ids(case.model, case.decoding.eos)
    warp = RowProcessors.of(case.model, case.decoding, before, torch.ones_like(before), ends)
    for place, token in enumerate(fed):
        if place >= len(case.question):
            last = logits[-1:].float()
            written.append(int((last if warp is None else warp(read[:, : len(case.prompt) + place], last)).argmax()))
        if place == len(fed) - 1:  # the last token is never fed
            break
        step = torch.tensor([[token], [token]], device=full.ids.device)
        logits = decode_step(case.model, step, torch.full_like(step, position), cache)
        position += 1
    return into, [token == other for token, other in zip(written, answer, strict=True)]
