"""One layer's cache: store the newcomers, attend, observe, evict. The only caller of everything else in the core."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, attend_prompt, attend_with, renumbered
from kvexp.core.cache_config import CacheConfig
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.decode import fast_step
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.eviction_backend import InPlace, ResolvedBudget, mode_of, protected, ranked
from kvexp.core.memory_tracker import MemoryTracker
from kvexp.core.method import EvictionContext, Method, checked
from kvexp.core.observe import accumulate
from kvexp.core.retained_attention import RetainedAttention
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.errors import CacheError

# Column sums of a prompt by what was observed and how, for caches that share it.
Columns = dict[tuple[AttentionScoreSpec, str, int | None], Tensor]


class EvictionLayer:
    """The cache of one attention layer, a `RowsCache`. Batch rows are independent unless the method says otherwise."""

    _stack: fast_step.StackedLayer | None

    def __init__(
        self,
        config: CacheConfig,
        index: int,
        layers: int,
        timeline: SequenceState,
        ledger: MemoryTracker,
        shared: CrossLayerScore | None,
        ladder: CrossLayerBuffers | None = None,
    ) -> None:
        self.config, self.index, self.layers = config, index, layers
        self.timeline, self.ledger, self.shared = timeline, ledger, shared
        self.ladder = CrossLayerBuffers(1) if ladder is None else ladder  # of all layers of this cache
        self.view = config.method.view
        self.quick = fast_step.allowed(config, shared is not None)
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next forward starts a prompt."""
        self.slots: Slots | None = None
        self._unstack()
        self.quota: ResolvedBudget | None = None
        self.columns = 0
        self.evicted = False
        self.first_eviction: list[int | None] = []  # per batch row: decode tokens seen when it first lost one
        self.attention_kept: Tensor | None = None  # [B], see RetainedAttention
        self.mode = mode_of(self.config.mode, self.config.evict_every)
        self.ledger.set(self.index, 0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        if fast_step.ready(self, query, padding):
            return self._alone().forward(query, key, value, geometry)
        self._unstack()
        sight = self.look(query, key, value, geometry, padding)
        out, probabilities = self.attend(sight)
        self.finish(sight, probabilities, {})
        return out.flatten(1, 2)

    def _alone(self) -> fast_step.StackedLayer:
        """A stack of this cache only, made anew when its buffers have become others."""
        if self._stack is None or self._stack.keys is not self.held().keys:
            self._stack = fast_step.StackedLayer([self], self.ladder)
        return self._stack

    def _unstack(self) -> None:
        self._stack = None
        self.ladder.clear()

    def look(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> AttentionInputs:
        """The first part of `forward`: store the newcomers and say what they see."""
        positions = self.join(key, padding)
        return self._sight(self._store(key, value, positions), query, positions, geometry)

    def finish(self, sight: AttentionInputs, probabilities: Tensor | None, seen: Columns) -> None:
        """The last part of `forward`, after `attend`: observe and evict. seen: sums that another layer has made."""
        slots, time = self.held(), self.timeline
        self._score(slots, sight, probabilities, seen)
        if self._due():
            watched = RetainedAttention.of(sight, slots) if time.in_prompt else None
            self._evict(slots, sight.geometry)
            if watched is not None:
                self.attention_kept = watched.kept(slots)
        self.ledger.set(self.index, slots.kv_bytes, slots.take_peak_bytes())
        time.arrive()

    # -- storing ------------------------------------------------------------------------------------------------------

    def join(self, key: Tensor, padding: Tensor | None) -> Tensor:
        time = self.timeline
        positions = time.join(self.columns, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.columns = time.end
        return positions

    def _born(self, key: Tensor, positions: Tensor) -> Tensor:
        birth = self.config.method.birth(key, positions, self.timeline.seeds.to(key.device), self.index)
        if birth is None:
            return torch.zeros(key.shape[:3], device=key.device)
        return checked(birth, key.shape[:3], self.config.method, "birth", "[B, H, Q]")

    @property
    def steady(self) -> bool:
        """Will the next real token overwrite a free slot, and its eviction free one again (decode.fast_step)?"""
        return self.quick and isinstance(self.mode, InPlace) and self.mode.steady

    @property
    def grows(self) -> bool:
        """Does this cache only grow, to a size that is known?"""
        return self._room() > 0

    def share(self, sight: AttentionInputs, key: Tensor, value: Tensor, padding: Tensor | None) -> None:
        """`look` where another cache has stored this whole prompt: hold its slots until one is evicted or added."""
        positions = self.join(key, padding)
        if self._room():  # it will only grow: in buffers of its own from the start
            self._store(key, value, positions)
            return
        self.slots = Slots.like(key, value, masked=self.config.mode == "mask")
        self.slots.borrow(sight.keys, sight.values, positions, self._born(key, positions))

    def held(self) -> Slots:
        assert self.slots is not None
        return self.slots

    def _store(self, key: Tensor, value: Tensor, positions: Tensor) -> Slots:
        if self.slots is None:
            self.slots = Slots.like(key, value, masked=self.config.mode == "mask")
        slots, time = self.slots, self.timeline
        born = self._born(key, positions)
        if key.shape[2] > 1 and not time.in_prompt:
            self.mode.loosen()
        place = self.mode.place() if key.shape[2] == 1 and not time.in_prompt else None
        if place is not None:
            slots.write(place, key, value)
            slots.enter(place, positions, born)
        else:
            slots.append(key, value, positions, born, room=self._room())
        return slots

    def _room(self) -> int:
        """The final size of a cache that only grows, so that it is allocated once; 0 where that is not known."""
        time = self.timeline
        if self.config.method.evicts or time.max_new_tokens is None or time.prompt_columns is None:
            return 0
        return time.prompt_columns + time.max_new_tokens

    # -- attending ----------------------------------------------------------------------------------------------------

    def _sight(self, slots: Slots, query: Tensor, positions: Tensor, geometry: AttentionParams) -> AttentionInputs:
        b, h, s = query.shape[0], slots.keys.shape[1], slots.used
        sight = AttentionInputs(
            query=query.unflatten(1, (h, query.shape[1] // h)),
            keys=slots.keys[:, :, :s],
            values=slots.values[:, :, :s],
            positions=slots.seen_positions(),
            query_positions=positions,
            geometry=geometry,
            visible=None if slots.visible is None or self.timeline.in_prompt else slots.visible[:, :, :s],
            in_order=slots.aligned,
            padded=self.timeline.padded or (self.timeline.in_prompt and not self.timeline.prompt_complete),
        )
        if self.config.renumbered and self.evicted:
            sight = renumbered(sight, slots.positions[:, :, :s].expand(b, h, s))
        return sight

    def attend(self, sight: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """Output [B, H, G, Q, D], and the probabilities where a decode step has them anyway."""
        method, count = self.config.method, sight.query.shape[3]
        unobserved = self.view is None and not method.per_query
        # SDPA is made for many queries: on a CPU, one takes it longer than the two products do.
        if self.timeline.in_prompt or (unobserved and (count > 1 or sight.query.device.type != "cpu")):
            return attend_prompt(sight), None
        x = sight.logits(slice(0, count), sight.keys.shape[2])
        if method.per_query:
            x = self._restrict(x)
        probabilities = torch.softmax(x, dim=-1)
        return attend_with(probabilities, sight.values), probabilities

    def _restrict(self, x: Tensor) -> Tensor:
        """Let the method choose, row by row, what each query of a decode step may see of x [B, H, G, Q, S]."""
        assert self.slots is not None and self.quota is not None
        full = torch.softmax(x, dim=-1).sum(2)
        self.first_eviction = self.timeline.note_losses(self.first_eviction, self.quota.slots)
        newest = self.timeline.positions(x.device)
        rows = []
        for j in range(x.shape[3]):
            mask = self.config.method.attended(full[:, :, j], self._moment(self.slots, newest[:, j]))
            rows.append(x[..., j, :] if mask is None else x[..., j, :].masked_fill(~mask[:, :, None], -torch.inf))
        return torch.stack(rows, dim=3)

    # -- observing ----------------------------------------------------------------------------------------------------

    def _score(self, slots: Slots, sight: AttentionInputs, probabilities: Tensor | None, seen: Columns) -> None:
        view, time, config = self.view, self.timeline, self.config
        if view is None or (not time.in_prompt and not config.method.evicts_while_decoding):
            return
        key = (view.observed, config.observe, config.block) if time.in_prompt else None
        columns = seen.get(key) if key is not None else None
        if columns is None:
            columns = accumulate.columns(config, view, sight, probabilities, time, self.index)
        if key is not None:
            seen[key] = columns
        self._accumulate(slots, view, accumulate.pooled(view, columns, time), sight.query_positions)

    def _accumulate(self, slots: Slots, view: AttentionScoreSpec, columns: Tensor, query_positions: Tensor) -> None:
        accumulate.accumulate(slots, view, columns, query_positions, self.timeline, self.shared)

    # -- evicting -----------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        time, every = self.timeline, self.config.evict_every
        if not self.config.method.evicts or not time.prompt_complete:
            return False
        if self.quota is None:
            self.quota = self._resolve()
        if self.config.method.per_query:
            return False
        if time.in_prompt:
            due = self.config.cadence.at_prefill
        else:
            width = time.end - time.seen
            due = every is not None and (time.steps + width) // every > time.steps // every
        decoded = time.end - (time.prompt_columns or 0)
        over = any(n + decoded > kept for n, kept in zip(time.prompt_lengths, self.quota.kept, strict=True))
        return due and (over or self.evicted)

    def _resolve(self) -> ResolvedBudget:
        time = self.timeline
        assert time.prompt_columns is not None and self.slots is not None
        lengths, new, device = time.prompt_lengths, time.max_new_tokens, self.slots.keys.device
        return ResolvedBudget.resolved(self.config, lengths, time.prompt_columns, new, self.index, self.layers, device)

    def _moment(self, slots: Slots, newest: Tensor) -> EvictionContext:
        assert self.quota is not None
        seeds = self.timeline.seeds.to(newest.device)
        return EvictionContext(slots, self.index, self.quota.slots_t, self.quota.recent_t, newest, seeds)

    def _evict(self, slots: Slots, geometry: AttentionParams) -> None:
        assert self.quota is not None and self.timeline.counts is not None
        newest = self.timeline.counts.to(slots.keys.device) - 1
        now = self._moment(slots, newest)
        method = self.config.method
        # Renumbered survivors stay within a sliding window whatever their age.
        window = geometry.sliding_window if self.config.positions == "original" else None
        rank = ranked(method, now, window)
        limbo = method.limbo(now)
        self.mode.evict(slots, rank, protected(method, now, self.quota), self.quota, limbo)
        # A row within its budget has lost nothing, whatever its neighbours lose.
        if type(method).after_eviction is not Method.after_eviction:
            reduced = (newest + 1 > self.quota.kept_t)[:, None, None]
            slots.score.copy_(torch.where(reduced, method.after_eviction(slots.score), slots.score))
        self.evicted = True
        self.mode.full = self._full()
        self.mode.dense = self.mode.full and slots.used == min(self.quota.kept) + (self.config.evict_every or 0)
        self.note_losses()

    def _full(self) -> bool:
        """Do all rows hold as many tokens as their budgets allow?"""
        assert self.quota is not None
        time = self.timeline
        decoded = time.end - (time.prompt_columns or 0)
        return all(n + decoded >= kept for n, kept in zip(time.prompt_lengths, self.quota.kept, strict=True))

    def note_losses(self) -> None:
        """Remember, row by row, when the first slot was lost."""
        if not self.first_eviction or None in self.first_eviction:
            assert self.quota is not None
            self.first_eviction = self.timeline.note_losses(self.first_eviction, self.quota.kept)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def large(self) -> list[Slots | fast_step.StackedLayer | None]:
        """What a copy of the whole cache leaves out and `take_over` brings."""
        return [self.slots, self._stack]

    def take_over(self, other: EvictionLayer, rows: Tensor) -> None:
        """Go on from these rows of another state, which stays as it is."""
        if other.slots is not None:
            self.slots = other.slots.picked(rows)
            self.mode.select_rows(rows)
            self.ledger.set(self.index, self.slots.kv_bytes)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows: keys, values, positions, score and bookkeeping together."""
        self._unstack()
        if self.slots is not None:
            self.slots.select_rows(rows)
            self.mode.select_rows(rows)
            self.ledger.set(self.index, self.slots.kv_bytes, self.slots.take_peak_bytes())
        if self.quota is not None:
            self.quota.select_rows(rows, same_prompts=same_prompts)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in rows.tolist()] if self.first_eviction else []
            if self.attention_kept is not None:
                self.attention_kept = self.attention_kept[rows.to(self.attention_kept.device)]

    def kept(self, rows: slice = slice(None)) -> list[list[list[int]]]:
        """Position ids held, per batch row and kv head, ascending (in mask mode: those still visible)."""
        if self.slots is None:
            raise CacheError("this layer has not seen a prompt yet")
        slots = self.slots
        positions = slots.positions[:, :, : slots.used]
        if slots.visible is not None:
            positions = positions.masked_fill(~slots.visible[:, :, : slots.used], -1)
        return [[sorted(p for p in head if p >= 0) for head in row] for row in positions[rows].tolist()]
