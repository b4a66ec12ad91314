"""The cache layer that evicts: store, attend, observe, evict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvexp.core import config as bounded_prefill
from kvexp.core import decode_stack as fast_step
from kvexp.core import observe as accumulate
from kvexp.core.attention import (
    AttentionInputs,
    AttentionParams,
    LocalAttention,
    apply_probs,
    sdpa_attention,
    with_renumbered_positions,
)
from kvexp.core.backends import Compacting, InPlace, make_backend
from kvexp.core.budget import Budget
from kvexp.core.budget_resolution import ResolvedBudget, resolve_budget
from kvexp.core.budget_shares import LayerAllocation, ModelHeadBudgets, RankedSlots
from kvexp.core.config import CacheConfig
from kvexp.core.decode_stack import CrossLayerBuffers
from kvexp.core.method import AttentionScoreSpec, EvictionContext, Method, Needs, checked
from kvexp.core.observe import CrossLayerScore, PromptSums
from kvexp.core.quantized import QuantizedSlots, settled
from kvexp.core.ranking import DueEviction, RetainedAttention, rank
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import RaggedSlots, Slots
from kvexp.core.statistics import HeadScoreSums, LastQueries, QueryStatistics, QuerySums
from kvexp.util import CacheError, ConfigError

# Protocols of one attention layer's cache: what every kind offers, and what kinds with batch rows offer besides.
#
# The kinds: `EvictionLayer` and `RetrievalLayer` (a cache of one method), `MaskedLayer` (one masked forward),
# `MultiLayer` (one layer of several caches) and diagnose's `TwinLayer` (a method's layer and the full cache's).


class LayerCache(Protocol):
    """The cache of one attention layer: it holds keys and values and attends to them."""

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, padding included."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Take Q new tokens and attend.

        query [B, H * G, Q, D] and key [B, H, Q, D] with positions applied as the model does, value [B, H, Q, Dv];
        padding: [B, columns so far] with 0 for padding, or None. Returns [B, H * G, Q, Dv].
        """

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: every row stays one of its own prompt (beams)."""

    def reset(self) -> None:
        """Drop everything held; the next forward starts a prompt."""


class RowsCache(LayerCache, Protocol):
    """The cache of one layer under one method, whose batch rows can be inspected and copied into another cache."""

    slots: Slots | None
    first_eviction: list[int | None]

    @property
    def retained_attention(self) -> Tensor | None:
        """[B]: share of the last prompt query's attention whose slots survived the first eviction; None without one."""

    @property
    def heavy_buffers(self) -> list[Any]:
        """The large buffers: a copy of the cache leaves them out, `copy_rows_from` copies the wanted rows of them."""

    def copy_rows_from(self, other: Self, rows: Tensor) -> None:
        """Copy what batch rows `rows` [n] of another layer hold; that layer stays as it is."""

    def kept_positions(self, rows: slice = ...) -> list[list[list[int]]]:
        """Position ids held (or last attended to), per batch row and kv head, ascending."""


# Byte accounting of a cache: keys and values resident on the device and offloaded, per layer and in all.


class MemoryTracker:
    """Key and value bytes of all layers, now and at the peak. Python integers only: no host sync.

    bytes, peak_bytes: of all layers together; layer_bytes, layer_peak_bytes, layer_offloaded_bytes: by layer.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.reset()

    def reset(self) -> None:
        """Set all numbers to 0, the peaks too."""
        layers = self.layers
        self.layer_bytes = [0] * layers
        self.layer_peak_bytes = [0] * layers
        self.bytes = 0
        self.peak_bytes = 0
        self.layer_offloaded_bytes = [0] * layers

    def set_resident(self, layer: int, now: int, transient: int = 0) -> None:
        """Layer `layer` holds `now` bytes on the device, and held at most `transient` bytes since the last call."""
        self.bytes += now - self.layer_bytes[layer]
        self.layer_bytes[layer] = now
        top = max(now, transient)
        self.layer_peak_bytes[layer] = max(self.layer_peak_bytes[layer], top)
        self.peak_bytes = max(self.peak_bytes, self.bytes - now + top)

    def set_offloaded(self, layer: int, *, offloaded: int) -> None:
        """Layer `layer` keeps `offloaded` bytes in CPU memory beside the device.

        On a CPU these are the bytes that would be offloaded from a GPU.
        """
        self.layer_offloaded_bytes[layer] = offloaded

    @property
    def offloaded_bytes(self) -> int:
        """Bytes offloaded by all layers."""
        return sum(self.layer_offloaded_bytes)

    def scale_peak_from(self, other: MemoryTracker, samples: int, among: int) -> None:
        """Set the peaks to `samples` of the `among` equal parts of another tracker's peaks.

        For a cache of some prompts (samples) out of a batch of `among` that was prefilled together.
        """
        self.layer_peak_bytes = [peak * samples // among for peak in other.layer_peak_bytes]
        self.peak_bytes = other.peak_bytes * samples // among


# The slots of one layer: new tokens are stored in them, rows of them chosen, their bytes counted.


class StoredLayer:
    """What one layer of a cache holds, and how new tokens come in. What is dropped: `BudgetedLayer`.

    config: of the whole cache; index: the layer's number, of `layers`; sequence, memory_tracker: common to all layers.
    slots: None before the first forward; backend: where new tokens are written, and how slots are dropped; seq_len:
    tokens seen, padding included; predicted [B, H, Q]: scores of the next forward's tokens, see `take_input`.
    """

    def __init__(
        self, config: CacheConfig, index: int, layers: int, sequence: SequenceState, memory_tracker: MemoryTracker
    ) -> None:
        self.config, self.index, self.layers = config, index, layers
        self.sequence, self.memory_tracker = sequence, memory_tracker
        self.surrogate = None if config.surrogate is None else config.surrogate.layer(index)

    def reset(self) -> None:
        """Drop all slots; the next forward starts a prompt."""
        self.slots: Slots | None = None
        self.seq_len = 0
        self.predicted: Tensor | None = None
        self.backend = make_backend(self.config.mode, self.config.evict_every)
        self.memory_tracker.set_resident(self.index, 0)

    def advance(self, key: Tensor, padding: Tensor | None) -> Tensor:
        """Join the forward in progress and return the position ids [B, Q] of its new tokens, -1 for padding.

        key [B, H, Q, D]; padding as of `forward`.
        """
        sequence = self.sequence
        positions = sequence.advance(self.seq_len, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.seq_len = sequence.seq_len
        return positions

    def take_input(self, hidden: Tensor) -> None:
        """Let the surrogate predict the scores of the next forward's tokens from the layer's input [B, Q, n]."""
        if self.surrogate is not None and self.config.method.needs.surrogate:
            self.surrogate = self.surrogate.on(hidden.device)  # once: a copy at every step would stop the host
            self.predicted = self.surrogate.scores(hidden)

    def _initial_score(self, key: Tensor, positions: Tensor) -> Tensor:
        """Score [B, H, Q] float32 that new tokens start with: predicted, the method's `initial_score`, or 0."""
        if self.config.method.needs.surrogate:
            predicted, self.predicted = self.predicted, None
            if predicted is None or predicted.shape != key.shape[:3]:
                raise CacheError(
                    f"method {self.config.method.name} scores tokens by what the attention layers get, which this "
                    "forward did not tell: make the cache after kvexp.hf.patch_model(model)"
                )
            return predicted.to(key.device)
        initial_score = self.config.method.initial_score(key, positions, self.sequence.seeds.to(key.device), self.index)
        if initial_score is None:
            return torch.zeros(key.shape[:3], device=key.device)
        return checked(initial_score, key.shape[:3], self.config.method, "initial_score", "[B, H, Q]")

    @property
    def is_bounded(self) -> bool:
        """Whether prompts are evicted between the chunks they are fed in."""
        return self.config.bounded_chunk is not None

    @property
    def preallocated(self) -> bool:
        """Whether this cache never evicts and its final length is known, so that it is allocated once."""
        return self._final_length() > 0

    def share_prefill(self, inputs: AttentionInputs, key: Tensor, value: Tensor, padding: Tensor | None) -> None:
        """In place of `store`: share the buffers of another cache that has stored the same prompt and made `inputs`.

        They are shared until a slot is evicted or added here. key [B, H, T, D], value [B, H, T, Dv]: of the prompt.
        """
        positions = self.advance(key, padding)
        if self._final_length():  # it will only grow: in buffers of its own from the start
            self._write_slots(key, value, positions)
            return
        self.slots = Slots.empty_like(key, value, masked=self.config.mode == "mask")
        self.slots.alias(inputs.keys, inputs.values, positions, self._initial_score(key, positions))

    def require_slots(self) -> Slots:
        """The slots; an AssertionError before the first forward."""
        assert self.slots is not None
        return self.slots

    def _write_slots(self, key: Tensor, value: Tensor, positions: Tensor) -> Slots:
        """Write the new tokens to the free slot, or append them; returns all slots.

        key [B, H, Q, D], value [B, H, Q, Dv], positions [B, Q].
        """
        if self.slots is None:
            self.slots = Slots.empty_like(key, value, masked=self.config.mode == "mask")
        slots, sequence = self.slots, self.sequence
        born = self._initial_score(key, positions)
        if key.shape[2] > 1 and not sequence.in_prompt:
            self.backend.reset_layout()
        free_slot = self.backend.next_slot() if key.shape[2] == 1 and not sequence.in_prompt else None
        if free_slot is not None:
            slots.write(free_slot, key, value)
            slots.set_metadata(free_slot, positions, born)
        else:
            # Of a prompt that is evicted between chunks, no chunk brings room for more than itself.
            exact = slots.length + key.shape[2] if self.is_bounded and sequence.in_prompt else self._final_length()
            slots.append(key, value, positions, born, reserve=exact)
        return slots

    def _final_length(self) -> int:
        """The final length of a cache that never evicts; 0 where it is not known or slots are evicted."""
        sequence = self.sequence
        if self.config.method.evicts or sequence.max_new_tokens is None or sequence.prompt_columns is None:
            return 0
        return sequence.prompt_columns + sequence.max_new_tokens

    def _quantize(self) -> None:
        """Quantise the tokens that have left the window, after a forward and its eviction; a prompt's once it ends."""
        quantization, newest = self.config.quantization, self.sequence.num_real
        if quantization is not None and self.sequence.prompt_complete:
            slots = self.require_slots()
            assert newest is not None
            self.slots = settled(slots, quantization, newest.to(slots.positions.device) - 1)

    def _count_bytes(self) -> None:
        """Tell the memory tracker what the slots hold, and held at most since the last call."""
        slots = self.require_slots()
        self.memory_tracker.set_resident(self.index, slots.kv_bytes, slots.take_peak_bytes())

    @property
    def bytes_at_16(self) -> int | None:
        """Bytes held with unquantised numbers as 16 bits each; None where nothing is quantised."""
        return self.slots.bytes_at_16 if isinstance(self.slots, QuantizedSlots) else None

    def copy_rows_from(self, other: StoredLayer, rows: Tensor) -> None:
        """Copy the slots of batch rows `rows` [n] from another layer, which stays as it is."""
        if other.slots is not None:
            self.slots = other.slots.index_rows(rows)
            self.backend.select_rows(rows)
            self.memory_tracker.set_resident(self.index, self.slots.kv_bytes)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows: keys, values, positions and score together; as of `LayerCache`."""
        if self.slots is not None:
            self.slots.select_rows(rows)
            self.backend.select_rows(rows)
            self.memory_tracker.set_resident(self.index, self.slots.kv_bytes, self.slots.take_peak_bytes())

    def kept_positions(self, rows: slice = slice(None)) -> list[list[list[int]]]:
        """Position ids of the slots held, per batch row and kv head, ascending (in mask mode: of visible slots)."""
        if self.slots is None:
            raise CacheError("this layer has not seen a prompt yet")
        slots = self.slots
        positions = slots.positions[:, :, : slots.length]
        if slots.visible is not None:
            positions = positions.masked_fill(~slots.visible[:, :, : slots.length], -1)
        return [[sorted(p for p in head if p >= 0) for head in row] for row in positions[rows].tolist()]


# The slots of one layer brought back to their budget: the budget row by row, and evictions by known priorities.


class BudgetedLayer(StoredLayer):
    """A layer whose slots can be dropped until each row holds its budget. When, and by what: `EvictionLayer`.

    resolved_budget: None until the prompt's length is known; has_evicted: whether there was an eviction.
    first_eviction: per row, decode tokens seen when the first slot was lost; None: not yet.
    """

    def reset(self) -> None:
        super().reset()
        self.resolved_budget: ResolvedBudget | None = None
        self.has_evicted = False
        self.first_eviction: list[int | None] = []

    @property
    def _budget(self) -> Budget:
        """The budget of a cache that evicts."""
        assert self.config.budget is not None
        return self.config.budget

    def _resolve(self, preferences: Sequence[Sequence[float]] | None = None) -> ResolvedBudget:
        """The budget in slots, from the real lengths of the prompts; preferences: as of `granted_slots.granted`."""
        sequence = self.sequence
        assert sequence.prompt_columns is not None and self.slots is not None
        lengths, new, device = sequence.prompt_lengths_ahead(), sequence.max_new_tokens, self.slots.positions.device
        return resolve_budget(
            self.config, lengths, sequence.prompt_columns, new, self.index, self.layers, device, preferences
        )

    def _evicts_after_chunk(self) -> bool:
        """Whether this forward is a chunk of a prompt that goes on, and some row holds more than its budget now."""
        if not self.is_bounded or not self.sequence.in_prompt:
            return False
        if self.sequence.padded:
            raise CacheError(
                "prompts with padding cannot be evicted between chunks: give one, or several of one length"
            )
        if self.resolved_budget is None:
            self.resolved_budget = self._resolve()
        return bounded_prefill.evicts_after_chunk(self.config, self.sequence, self.resolved_budget.keep)

    def _should_evict(self) -> bool:
        """Whether this forward ends with an eviction: the cadence says so, and some row holds more than its budget."""
        sequence, every = self.sequence, self.config.evict_every
        if not self.config.method.evicts or not sequence.prompt_complete:
            return False
        if self.resolved_budget is None:
            self.resolved_budget = self._resolve()
        if self.config.method.per_query:
            return False
        if sequence.in_prompt:
            due = self.config.cadence.at_prefill
        else:
            width = sequence.seq_len - sequence.past_len
            due = every is not None and (sequence.decode_steps + width) // every > sequence.decode_steps // every
        decoded = sequence.seq_len - (sequence.prompt_columns or 0)
        over = any(
            n + decoded > kept for n, kept in zip(sequence.prompt_lengths, self.resolved_budget.least, strict=True)
        )
        by_threshold = sequence.in_prompt and self._budget.threshold is not None
        return due and (over or by_threshold or self.has_evicted)

    @property
    def _lacks_room(self) -> bool:
        """Whether more tokens are to follow the prompt than were announced when retrieval heads got their room."""
        resolved = self.resolved_budget
        return resolved is not None and resolved.lacks_room(self.sequence.max_new_tokens)

    def _make_room(self) -> None:
        """Give retrieval heads room for all tokens to come; the next eviction lays the slots out anew.

        A prefilled context learns only with the question how many tokens follow its prompt.
        """
        if self._lacks_room and not self.sequence.in_prompt:
            assert self.resolved_budget is not None and self.sequence.max_new_tokens is not None
            self.resolved_budget.make_room(self.sequence.max_new_tokens)
            self.backend.reset_layout()

    def _share_out(self, by_head: Tensor | None) -> None:
        """From now on kv heads hold by_head [B, H] slots in rows that lose some, and the uniform number elsewhere.

        None: the uniform number everywhere.
        """
        resolved, slots = self.resolved_budget, self.require_slots()
        assert resolved is not None and self.sequence.num_real is not None
        if by_head is not None:
            over = self.sequence.num_real.to(by_head.device) > resolved.keep_t
            if self._budget.threshold is not None:
                over = torch.ones_like(over)
            by_head = torch.where(over[:, None], by_head, resolved.keep_t[:, None])
        resolved.share_out(by_head, slots.positions.shape[1])

    def _drop(self, ranked: RankedSlots) -> None:
        """Evict by priorities that are known, and record the first eviction of each row.

        Where heads hold different numbers, slots become ragged, except in mode mask, which leaves them all in place.
        """
        slots = self.require_slots()
        if self.config.is_ragged and self.config.mode != "mask" and not isinstance(slots, RaggedSlots):
            self.slots = slots = RaggedSlots.of(slots)
        assert self.resolved_budget is not None and self.sequence.num_real is not None
        self.backend.evict(slots, ranked, self.resolved_budget)
        self._update_after_eviction(slots)
        self.backend.at_budget = self._all_at_budget()
        self.backend.no_padding_slots = self.backend.at_budget and slots.length == min(self.resolved_budget.least) + (
            self.config.evict_every or 0
        )
        self.note_first_eviction()

    def _drop_after_chunk(self, ranked: RankedSlots) -> None:
        """Evict from a prompt that goes on: the slots are not laid out for decode steps yet."""
        slots = self.require_slots()
        assert self.resolved_budget is not None
        Compacting().evict(slots, ranked, self.resolved_budget)
        self._update_after_eviction(slots)

    def _update_after_eviction(self, slots: Slots) -> None:
        """Change the scores of what is left as the method says."""
        method = self.config.method
        assert self.resolved_budget is not None and self.sequence.num_real is not None
        # A row or head within its budget has lost nothing, whatever its neighbours lose.
        if type(method).after_eviction is not Method.after_eviction:
            tokens = self.sequence.num_real.to(slots.positions.device)
            reduced = (tokens[:, None] > self.resolved_budget.keep_by_head)[..., None]
            after = checked(
                method.after_eviction(slots.score), slots.score.shape, method, "after_eviction", "[B, H, S]"
            )
            slots.score.copy_(torch.where(reduced, after, slots.score))
        self.has_evicted = True

    def _all_at_budget(self) -> bool:
        """Whether every row holds as many tokens as its budget allows."""
        assert self.resolved_budget is not None
        sequence = self.sequence
        decoded = sequence.seq_len - (sequence.prompt_columns or 0)
        return all(
            n + decoded >= kept for n, kept in zip(sequence.prompt_lengths, self.resolved_budget.most, strict=True)
        )

    def note_first_eviction(self) -> None:
        """Record for every row at which decode step its first slot was evicted."""
        if not self.first_eviction or None in self.first_eviction:
            assert self.resolved_budget is not None
            self.first_eviction = self.sequence.first_eviction_steps(self.first_eviction, self.resolved_budget.least)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        super().select_rows(rows, same_prompts=same_prompts)
        if self.resolved_budget is not None:
            self.resolved_budget.select_rows(rows, same_prompts=same_prompts)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in rows.tolist()] if self.first_eviction else []


# The attention of one layer's forward over the slots in use: its inputs, and its output in the cheapest exact way.


def attention_inputs(
    slots: Slots,
    query: Tensor,
    positions: Tensor,
    params: AttentionParams,
    config: CacheConfig,
    sequence: SequenceState,
    *,
    has_evicted: bool,
) -> AttentionInputs:
    """The inputs of a forward's attention: query [B, H * G, Q, D] at positions [B, Q], over all slots in use."""
    b, h, s = query.shape[0], slots.positions.shape[1], slots.length
    hides_nothing = sequence.in_prompt or config.method.per_query  # mask mode, but no slot was evicted yet
    inputs = AttentionInputs(
        query=query.unflatten(1, (h, query.shape[1] // h)),
        keys=slots.keys[:, :, :s],
        values=slots.values[:, :, :s],
        positions=slots.broadcast_positions(),
        query_positions=positions,
        params=params,
        visible=None if slots.visible is None or hides_nothing else slots.visible[:, :, :s],
        in_column_order=slots.same_order,
        padded=sequence.padded or (sequence.in_prompt and not sequence.prompt_complete),
        all_visible=hides_nothing and _sees_all(slots, query, params, sequence),
    )
    if config.renumbered and has_evicted:
        inputs = with_renumbered_positions(inputs, slots.positions[:, :, :s].expand(b, h, s))
    return inputs


def _sees_all(slots: Slots, query: Tensor, params: AttentionParams, sequence: SequenceState) -> bool:
    """Whether one new token per row, query [B, H * G, 1, D], sees every slot: none is dead, hidden or padding."""
    plain = slots.same_order and not sequence.padded and params.sliding_window is None
    return plain and query.shape[2] == 1 and not sequence.in_prompt


def attend_slots(
    inputs: AttentionInputs, config: CacheConfig, *, in_prompt: bool, hide: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B, H, G, Q, Dv], and probabilities [B, H, G, Q, S] float32 of a decode step.

    None in place of the probabilities where a fused kernel computed the output, which returns none. hide: the logits
    [B, H, G, Q, S] of a decode step with slots hidden from queries, for methods that choose slots per query.
    """
    method, count = config.method, inputs.query.shape[3]
    unobserved = method.score_spec is None and not method.per_query
    # For one query on a CPU, SDPA takes longer than the two matrix products.
    if in_prompt or (unobserved and (count > 1 or inputs.query.device.type != "cpu")):
        return sdpa_attention(inputs), None
    x = inputs.logits(slice(0, count), inputs.keys.shape[2])
    if method.per_query:
        x = hide(x)
    probabilities = torch.softmax(x, dim=-1)
    return apply_probs(probabilities, inputs.values), probabilities


def hide_by_query(
    x: Tensor, config: CacheConfig, newest: Tensor, context: Callable[[Tensor], EvictionContext]
) -> Tensor:
    """Logits x [B, H, G, Q, S] of a decode step, -inf where the method's `query_mask` hides a slot from a query.

    newest [B, Q]: position ids of the queries; context: of the slots, as a query at newest [B] sees them.
    """
    method, full = config.method, torch.softmax(x, dim=-1).sum(2)
    rows = []
    for j in range(x.shape[3]):
        mask = method.query_mask(full[:, :, j], context(newest[:, j]))
        if mask is not None:
            mask = checked(mask, full[:, :, j].shape, method, "query_mask", "[B, H, S]", mask=True)
        rows.append(x[..., j, :] if mask is None else x[..., j, :].masked_fill(~mask[:, :, None], -torch.inf))
    return torch.stack(rows, dim=3)


# What methods need of queries, gathered forward by forward until the evictions that go by it.


class PromptStatistics:
    """Statistics of one layer's queries, each None until the first forward that adds to it, and where none needs it.

    queries: moments over the prompt's queries; local: attention within chunks of the prompt; last: the newest queries.
    """

    def __init__(self) -> None:
        self.queries: QueryStatistics | None = None
        self.local: LocalAttention | None = None
        self.last: LastQueries | None = None

    def add(self, inputs: AttentionInputs, needs: Needs, window: int, sequence: SequenceState) -> None:
        """Add the queries of one forward, as the method needs them; window: newest queries that others need."""
        if needs.queries_after is not None and sequence.in_prompt:
            if self.queries is None:
                self.queries = QueryStatistics(needs.queries_after, inputs)
            self.queries.add(inputs)
        if needs.local_chunks is not None and sequence.in_prompt:
            if self.local is None:
                self.local = LocalAttention(needs.local_chunks, inputs)
            self.local.add(inputs, complete=sequence.prompt_complete)
        number = max(needs.last_queries, window)
        if number:
            if self.last is None:
                self.last = LastQueries(number, inputs)
            self.last.add(inputs)

    def forget_prompt(self) -> None:
        """Drop what was gathered of the prompt alone."""
        self.queries = self.local = None

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        for gathered in (self.queries, self.last, self.local):
            if gathered is not None:
                gathered.select_rows(rows)


# The eviction cache of one layer: store the new tokens, attend, update the score, evict.


class EvictionLayer(BudgetedLayer):
    """The eviction cache of one attention layer, a `RowsCache`.

    Rows are independent unless the method adds up their scores. config: of the whole cache; index: the layer's number,
    of `layers`; sequence, memory_tracker, shared, buffers: common to all layers of the cache. statistics: of queries.
    retained_attention [B]: see `RetainedAttention`; None until there was an eviction at the end of the prompt.
    output_factors: of this layer, as in `EvictionContext`.
    model_head_budgets: of all layers, where they share out their slots together.
    output_projection [H, G, n, Dv]: blocks of this layer's, for `SlotSelection`; None: not needed.
    layer_allocation: common to all layers, where their budgets depend on what all of them look at; None: they do not.
    due_eviction: the eviction at the end of the prompt while it waits for a budget or a second pass; None: none waits.
    """

    _stack: fast_step.StackedLayer | None

    def __init__(
        self,
        config: CacheConfig,
        index: int,
        layers: int,
        sequence: SequenceState,
        memory_tracker: MemoryTracker,
        shared: CrossLayerScore | None,
        buffers: CrossLayerBuffers | None = None,
        output_factors: Tensor | None = None,
        model_head_budgets: ModelHeadBudgets | None = None,
        layer_allocation: LayerAllocation | None = None,
        output_projection: Tensor | None = None,
    ) -> None:
        super().__init__(config, index, layers, sequence, memory_tracker)
        self.cross_layer_score = shared
        self.cross_layer_buffers = CrossLayerBuffers(1) if buffers is None else buffers  # of all layers of this cache
        self.output_factors, self.model_head_budgets = output_factors, model_head_budgets
        self.layer_allocation, self.output_projection = layer_allocation, output_projection
        needed = config.calibration if config.method.needs.calibration else None
        self.calibration = None if needed is None else needed.layer(index)
        self.score_spec = config.method.score_spec
        if config.shares_by_preference and layer_allocation is None:
            raise ConfigError(
                "layers that share slots by what they look at need one LayerAllocation in common: make the cache with "
                "kvexp.hf.EvictionCache"
            )
        self.fast_path_allowed = fast_step.supports_fast_decode(config, shared is not None)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._leave_fast_path()
        self.retained_attention: Tensor | None = None
        self.statistics = PromptStatistics()
        self.due_eviction: DueEviction | None = None
        if self.model_head_budgets is not None:
            self.model_head_budgets.reset()
        if self.layer_allocation is not None:
            self.layer_allocation.reset()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        if fast_step.can_fast_decode(self, query, padding):
            return self._single_stack().forward(query, key, value, params)
        self._leave_fast_path()
        inputs = self.store(query, key, value, params, padding)
        out, probabilities = self.attend(inputs)
        self.update(inputs, probabilities, {})
        return out.flatten(1, 2)

    def _single_stack(self) -> fast_step.StackedLayer:
        """This layer alone as a `StackedLayer`, made anew when its buffers have been replaced."""
        self.require_slots().own()  # it is about to overwrite a slot
        if self._stack is None or self._stack.keys is not self.require_slots().key_buffer:
            self._stack = fast_step.StackedLayer([self], self.cross_layer_buffers)
        return self._stack

    @property
    def decode_stacks(self) -> list[fast_step.StackedLayer] | None:
        """What takes the next decode step, once fast steps have been taken; None: no fast step has been, or will be."""
        stack = self._stack
        steady = stack is not None and self.is_steady and stack.keys is self.require_slots().key_buffer
        return [stack] if stack is not None and steady else None

    def _leave_fast_path(self) -> None:
        """Drop the stacked layer and the merged buffers: this forward is computed by `store`, `attend` and `update`."""
        self._stack = None
        self.cross_layer_buffers.reset()

    def advance(self, key: Tensor, padding: Tensor | None) -> Tensor:
        if self.due_eviction is not None:
            raise CacheError(
                f"method {self.config.method.name} evicts after a second pass over the prompt, and there was none: "
                "feed the prompt as token ids (input_ids) to a model patched by kvexp.hf.patch_model"
            )
        return super().advance(key, padding)

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> AttentionInputs:
        """The first part of `forward`, with its arguments: store the new tokens, return their attention's inputs."""
        positions = self.advance(key, padding)
        slots = self._write_slots(key, value, positions)
        return attention_inputs(
            slots, query, positions, params, self.config, self.sequence, has_evicted=self.has_evicted
        )

    def attend(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """As `attend_slots`: output [B, H, G, Q, Dv], and probabilities [B, H, G, Q, S] float32 of a decode step."""
        return attend_slots(inputs, self.config, in_prompt=self.sequence.in_prompt, hide=self._hide_by_query)

    def _hide_by_query(self, x: Tensor) -> Tensor:
        """As `hide_by_query`: logits x [B, H, G, Q, S] of a decode step, -inf where a slot is hidden from a query."""
        assert self.resolved_budget is not None
        self.first_eviction = self.sequence.first_eviction_steps(self.first_eviction, self.resolved_budget.slots)
        newest = self.sequence.positions(x.device)
        return hide_by_query(x, self.config, newest, partial(self._context, self.require_slots()))

    def update(self, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums) -> None:
        """The last part of `forward`, after `attend`: update the score and evict.

        probabilities: what `attend` returned. seen: column sums of this layer that other caches of the same prefill
        have computed; the ones computed here are added.
        """
        slots, sequence = self.require_slots(), self.sequence
        self._update_score(slots, inputs, probabilities, seen)
        needs = self.config.method.needs
        allocation = self.layer_allocation if sequence.in_prompt else None
        self.statistics.add(inputs, needs, 0 if allocation is None else allocation.how.window, sequence)
        self._make_room()
        between_chunks = self._evicts_after_chunk()
        if between_chunks or self._should_evict():
            logits = None if self.statistics.last is None else self.statistics.last.logits(inputs)
            ends_prompt = sequence.in_prompt and not self.is_bounded
            before = RetainedAttention.before(inputs, slots) if ends_prompt else None
            due = DueEviction.of(inputs, probabilities, needs, logits, before)
            if between_chunks:
                self._drop_after_chunk(self._ranked(slots, due, None))
            elif allocation is None and needs.second_pass is None:
                self._evict(slots, due, None)
            else:
                self.due_eviction = due
            if allocation is not None and logits is not None:
                self.memory_tracker.set_resident(self.index, slots.kv_bytes)  # the last layer's add evicts from all
                allocation.add(self, allocation.how.preference(logits, sequence.prompt_lengths))
        self._settle()
        sequence.layer_done()

    def _settle(self) -> None:
        """Quantise what is due, unless an eviction waits, and count the bytes."""
        if self.due_eviction is None:
            self._quantize()
        self._count_bytes()

    def take_budget(self, preferences: Sequence[Sequence[float]]) -> None:
        """Set the budget, which waited for preferences [B][L] of all layers, and evict unless a second pass comes."""
        self.resolved_budget = self._resolve(preferences)
        if not self.config.method.needs.last_queries:
            self.statistics.last = None
        if self.config.method.needs.second_pass is None:
            self._evict_due(None, 0)

    def evict_after_second_pass(self, attention: Tensor, peak_bytes: int) -> None:
        """Carry out the eviction that waited for a second pass over the prompt.

        attention [B, H, G, S]: `EvictionContext.second_pass_attention`; peak_bytes: the pass's, beside the slots.
        """
        self._evict_due(attention, peak_bytes)

    def _evict_due(self, attention: Tensor | None, peak_bytes: int) -> None:
        """Carry out the eviction that waited; arguments of `evict_after_second_pass`, attention None without a pass."""
        slots, due = self.require_slots(), self.due_eviction
        assert due is not None
        self.due_eviction = None
        self.memory_tracker.set_resident(self.index, slots.kv_bytes, slots.kv_bytes + peak_bytes)
        self._evict(slots, due, attention)
        self._settle()

    @property
    def is_steady(self) -> bool:
        """Whether the next token fits into a free slot and its eviction frees exactly one, as the fast step needs."""
        steady = self.fast_path_allowed and isinstance(self.backend, InPlace) and self.backend.is_steady
        return steady and not self._lacks_room

    def _update_score(
        self, slots: Slots, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums
    ) -> None:
        """Sum up this forward's attention as the method's `score_spec` says and add it to the score; see `update`."""
        spec, sequence, config = self.score_spec, self.sequence, self.config
        if spec is None or (not sequence.in_prompt and not config.method.evicts_while_decoding):
            return
        sums = accumulate.shared_column_sums(config, spec, inputs, probabilities, sequence, self.index, seen)
        self._accumulate(slots, spec, accumulate.pool_sums(spec, sums, sequence), inputs.query_positions)

    def _accumulate(self, slots: Slots, spec: AttentionScoreSpec, sums: Tensor, query_positions: Tensor) -> None:
        """Add pooled column sums [B, H, S] to the slots' scores, as `accumulate.add_to_score`."""
        accumulate.add_to_score(slots, spec, sums, query_positions, self.sequence, self.cross_layer_score)

    def _context(
        self, slots: Slots, newest: Tensor, due: DueEviction | None = None, second: Tensor | None = None
    ) -> EvictionContext:
        """The `EvictionContext` of these slots; newest [B]: position id of the newest token; see `_evict`."""
        resolved = self.resolved_budget
        assert resolved is not None
        needs = self.config.method.needs
        if self.calibration is not None:
            self.calibration = self.calibration.to(newest.device)
        return EvictionContext(
            slots,
            self.index,
            resolved.slots_t,
            resolved.recent_t,
            newest,
            self.sequence.seeds.to(newest.device),
            newest_attention=None if due is None else due.newest_attention,
            query_statistics=self.statistics.queries,
            output_factors=self.output_factors,
            last_logits=None if due is None else due.last_logits,
            calibration=self.calibration,
            local_attention=None if self.statistics.local is None else self.statistics.local.sums,
            rope=due.params.rope if due is not None and (self.calibration is not None or needs.rope) else None,
            second_pass_attention=second,
            compares_heads=self.config.compares_heads,
        )

    def _evict(self, slots: Slots, due: DueEviction, second: Tensor | None) -> None:
        """Evict by the method's priority, and record the first eviction of each row.

        second [B, H, G, S]: attention of the second pass, where the method needs it. Where slots of all layers are
        shared out among all heads, the last layer's call carries out every layer's.
        """
        ranked, resolved = self._ranked(slots, due, second), self.resolved_budget
        assert resolved is not None
        if not self.config.is_ragged or resolved.head_keep is not None:
            self._carry_out(ranked, due)
        elif not self.sequence.in_prompt:
            self._share_out(None)
            self._carry_out(ranked, due)
        elif self.model_head_budgets is not None:
            self.model_head_budgets.add(ranked, resolved.keep, partial(self._evict_shared, ranked, due))
        else:
            self._evict_shared(ranked, due, ranked.share(resolved.keep, self._budget))

    def _ranked(self, slots: Slots, due: DueEviction, second: Tensor | None) -> RankedSlots:
        """What these slots are evicted by, as `rank`; second: as of `_evict`."""
        resolved, sequence = self.resolved_budget, self.sequence
        assert resolved is not None and sequence.num_real is not None
        ctx = self._context(slots, sequence.num_real.to(slots.positions.device) - 1, due, second)
        return rank(self.config, ctx, resolved, sequence, due.params.sliding_window, self.output_projection)

    def _evict_shared(self, ranked: RankedSlots, due: DueEviction, by_head: Tensor) -> None:
        """Evict until the heads of rows that lose slots hold by_head [B, H] of them, at the end of the prompt."""
        self._share_out(by_head)
        self._carry_out(ranked, due)
        self._count_bytes()

    def _carry_out(self, ranked: RankedSlots, due: DueEviction) -> None:
        """Evict by priorities that are known, and note what survived of the last prompt query's attention."""
        self._drop(ranked)
        if due.before is not None:
            self.retained_attention = due.before.after(self.require_slots())
        if not self.config.method.evicts_while_decoding:
            self.statistics.forget_prompt()

    @property
    def heavy_buffers(self) -> list[Slots | fast_step.StackedLayer | None]:
        """The large buffers: a copy of the cache leaves them out, and `copy_rows_from` copies wanted rows of them."""
        return [self.slots, self._stack]

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        self._leave_fast_path()
        super().select_rows(rows, same_prompts=same_prompts)
        self.statistics.select_rows(rows)
        if not same_prompts and self.retained_attention is not None:
            self.retained_attention = self.retained_attention[rows.to(self.retained_attention.device)]


# One layer of a calibration pass: ordinary causal attention over one sequence, whose queries are added up.


class CalibrationLayer:
    """A `LayerCache` that keeps nothing but sums over queries: each forward is a whole sequence, `reset` between them.

    sums, head_scores: over all sequences so far.
    """

    def __init__(self) -> None:
        self.sums, self.head_scores, self.seq_len = QuerySums(), HeadScoreSums(), 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Attend with all tokens of one sequence, B = 1, no padding; arguments and result of `LayerCache.forward`."""
        if self.seq_len or key.shape[0] > 1 or (padding is not None and not bool(padding.all())):
            raise CacheError("a calibration pass takes one sequence in one forward, without padding")
        h, self.seq_len = key.shape[1], key.shape[2]
        positions = torch.arange(self.seq_len, device=key.device)
        grouped = query.unflatten(1, (h, query.shape[1] // h))
        self.sums.add(grouped[0], positions, params.rope)
        self.head_scores.add(grouped[0], key[0], positions, params)
        inputs = AttentionInputs(
            query=grouped,
            keys=key,
            values=value,
            positions=positions[None, None],
            query_positions=positions[None],
            params=params,
            in_column_order=True,
            padded=False,
        )
        return sdpa_attention(inputs).flatten(1, 2)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: a calibration pass has one row."""
        raise CacheError("a calibration pass takes one sequence: rows cannot be reordered")

    def reset(self) -> None:
        """The next forward is another sequence; the sums stay."""
        self.seq_len = 0
