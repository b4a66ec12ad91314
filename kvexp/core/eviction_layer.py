"""The eviction cache of one layer: store the new tokens, attend, update the score, evict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvexp.core import bounded_prefill, spans
from kvexp.core.attention import (
    AttentionInputs,
    AttentionParams,
    apply_probs,
    sdpa_attention,
    with_renumbered_positions,
)
from kvexp.core.budget import Budget
from kvexp.core.cache_config import CacheConfig
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.decode import fast_step
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.eviction_backend import (
    Compacting,
    InPlace,
    ResolvedBudget,
    make_backend,
    masked_priority,
    protected_mask,
)
from kvexp.core.head_budgets import ModelHeadBudgets, RankedSlots, union_priority
from kvexp.core.last_queries import LastQueries
from kvexp.core.layer_allocation import LayerAllocation
from kvexp.core.local_attention import LocalAttention
from kvexp.core.memory_tracker import MemoryTracker
from kvexp.core.method import EvictionContext, Method, checked
from kvexp.core.needs import newest_attention
from kvexp.core.observe import accumulate
from kvexp.core.quantized_slots import QuantizedSlots, settled
from kvexp.core.query_statistics import QueryStatistics
from kvexp.core.ragged_slots import RaggedSlots
from kvexp.core.retained_attention import RetainedAttention
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.deprecation import OldName
from kvexp.errors import CacheError, ConfigError

# Column sums of a prompt by (sums_key, observe, block), so that caches sharing the prefill share them too.
PromptSums = dict[tuple[AttentionScoreSpec, str, int | None], Tensor]


@dataclass(frozen=True)
class DueEviction:
    """What an eviction goes by besides the slots: tensors of the forward that it follows, None where not needed.

    params: of that forward; newest_attention, last_logits: as in `EvictionContext`; before: None while decoding.
    """

    params: AttentionParams
    newest_attention: Tensor | None
    last_logits: Tensor | None
    before: RetainedAttention | None


class EvictionLayer:
    """The eviction cache of one attention layer, a `RowsCache`.

    Rows are independent unless the method adds up their scores. config: of the whole cache; index: the layer's number,
    of `layers`; sequence, memory_tracker, shared, buffers: common to all layers of the cache. first_eviction: per row,
    decode tokens seen when the first slot was lost; None: not yet. retained_attention [B]: see `RetainedAttention`;
    None until there was an eviction at the end of the prompt. output_factors: of this layer, as in `EvictionContext`.
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
        self.config, self.index, self.layers = config, index, layers
        self.sequence, self.memory_tracker, self.cross_layer_score = sequence, memory_tracker, shared
        self.cross_layer_buffers = CrossLayerBuffers(1) if buffers is None else buffers  # of all layers of this cache
        self.output_factors, self.model_head_budgets = output_factors, model_head_budgets
        self.layer_allocation, self.output_projection = layer_allocation, output_projection
        needed = config.calibration if config.method.needs.calibration else None
        self.calibration = None if needed is None else needed.layer(index)
        self.surrogate = None if config.surrogate is None else config.surrogate.layer(index)
        self.score_spec = config.method.score_spec
        if config.shares_by_preference and layer_allocation is None:
            raise ConfigError(
                "layers that share slots by what they look at need one LayerAllocation in common: make the cache with "
                "kvexp.models.EvictionCache"
            )
        self.fast_path_allowed = fast_step.supports_fast_decode(config, shared is not None)
        self.reset()

    def reset(self) -> None:
        """Drop all slots; the next forward starts a prompt."""
        self.slots: Slots | None = None
        self._leave_fast_path()
        self.resolved_budget: ResolvedBudget | None = None
        self.seq_len = 0
        self.has_evicted = False
        self.first_eviction: list[int | None] = []  # see above
        self.retained_attention: Tensor | None = None  # [B], see RetainedAttention
        self.query_statistics: QueryStatistics | None = None  # of the prompt, until the last eviction that needs it
        self.last_queries: LastQueries | None = None  # where the method needs them
        self.local_attention: LocalAttention | None = None  # of the prompt, until its eviction
        self.predicted: Tensor | None = None  # [B, H, Q] of the tokens of the forward in progress, see `take_input`
        self.due_eviction: DueEviction | None = None  # see above
        if self.model_head_budgets is not None:
            self.model_head_budgets.reset()
        if self.layer_allocation is not None:
            self.layer_allocation.reset()
        self.backend = make_backend(self.config.mode, self.config.evict_every)
        self.memory_tracker.set_resident(self.index, 0)

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

    def _leave_fast_path(self) -> None:
        """Drop the stacked layer and the merged buffers: this forward is computed by `store`, `attend` and `update`."""
        self._stack = None
        self.cross_layer_buffers.reset()

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> AttentionInputs:
        """The first part of `forward`, with its arguments: store the new tokens, return their attention's inputs."""
        positions = self.advance(key, padding)
        return self._inputs(self._write_slots(key, value, positions), query, positions, params)

    def update(self, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums) -> None:
        """The last part of `forward`, after `attend`: update the score and evict.

        probabilities: what `attend` returned. seen: column sums of this layer that other caches of the same prefill
        have computed; the ones computed here are added.
        """
        slots, sequence = self.require_slots(), self.sequence
        self._update_score(slots, inputs, probabilities, seen)
        needs = self.config.method.needs
        if needs.queries_after is not None and sequence.in_prompt:
            if self.query_statistics is None:
                self.query_statistics = QueryStatistics(needs.queries_after, inputs)
            self.query_statistics.add(inputs)
        if needs.local_chunks is not None and sequence.in_prompt:
            if self.local_attention is None:
                self.local_attention = LocalAttention(needs.local_chunks, inputs)
            self.local_attention.add(inputs, complete=sequence.prompt_complete)
        allocation = self.layer_allocation if sequence.in_prompt else None
        number = max(needs.last_queries, 0 if allocation is None else allocation.how.window)
        if number:
            if self.last_queries is None:
                self.last_queries = LastQueries(number, inputs)
            self.last_queries.add(inputs)
        between_chunks = self._evicts_after_chunk()
        if between_chunks or self._should_evict():
            logits = None if self.last_queries is None else self.last_queries.logits(inputs)
            due = DueEviction(
                inputs.params,
                newest_attention(inputs, probabilities) if needs.newest_attention else None,
                None if logits is None or not needs.last_queries else logits[..., -needs.last_queries :, :],
                RetainedAttention.before(inputs, slots) if sequence.in_prompt and not self.is_bounded else None,
            )
            if between_chunks:
                self._drop_after_chunk(self._ranked(slots, due, None))
            elif allocation is None and needs.second_pass is None:
                self._evict(slots, due, None)
            else:
                self.due_eviction = due
            if allocation is not None and logits is not None:
                self.memory_tracker.set_resident(self.index, slots.kv_bytes)  # the last layer's add evicts from all
                allocation.add(self, allocation.how.preference(logits, sequence.prompt_lengths))
        self._quantize()
        self._count_bytes()
        sequence.layer_done()

    def _quantize(self) -> None:
        """Quantise the tokens that have left the window, after a forward and its eviction; a prompt's once it ends."""
        quantization, newest = self.config.quantization, self.sequence.num_real
        if quantization is not None and self.sequence.prompt_complete and self.due_eviction is None:
            slots = self.require_slots()
            assert newest is not None
            self.slots = settled(slots, quantization, newest.to(slots.positions.device) - 1)

    def take_budget(self, preferences: Sequence[Sequence[float]]) -> None:
        """Set the budget, which waited for preferences [B][L] of all layers, and evict unless a second pass comes."""
        self.resolved_budget = self._resolve(preferences)
        if not self.config.method.needs.last_queries:
            self.last_queries = None
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
        self._quantize()
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Tell the memory tracker what the slots hold, and held at most since the last call."""
        slots = self.require_slots()
        self.memory_tracker.set_resident(self.index, slots.kv_bytes, slots.take_peak_bytes())

    # -- storing ------------------------------------------------------------------------------------------------------

    def advance(self, key: Tensor, padding: Tensor | None) -> Tensor:
        """Join the forward in progress and return the position ids [B, Q] of its new tokens, -1 for padding.

        key [B, H, Q, D]; padding as of `forward`.
        """
        if self.due_eviction is not None:
            raise CacheError(
                f"method {self.config.method.name} evicts after a second pass over the prompt, and there was none: "
                "feed the prompt as token ids (input_ids) to a model patched by kvexp.models.patch_model"
            )
        sequence = self.sequence
        positions = sequence.advance(self.seq_len, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.seq_len = sequence.seq_len
        return positions

    def take_input(self, hidden: Tensor) -> None:
        """Let the surrogate predict the scores of the next forward's tokens from the layer's input [B, Q, n]."""
        if self.surrogate is not None and self.config.method.needs.surrogate:
            self.predicted = self.surrogate.scores(hidden)

    def _initial_score(self, key: Tensor, positions: Tensor) -> Tensor:
        """Score [B, H, Q] float32 that new tokens start with: predicted, the method's `initial_score`, or 0."""
        if self.config.method.needs.surrogate:
            predicted, self.predicted = self.predicted, None
            if predicted is None or predicted.shape != key.shape[:3]:
                raise CacheError(
                    f"method {self.config.method.name} scores tokens by what the attention layers get, which this "
                    "forward did not tell: make the cache after kvexp.models.patch_model(model)"
                )
            return predicted.to(key.device)
        initial_score = self.config.method.initial_score(key, positions, self.sequence.seeds.to(key.device), self.index)
        if initial_score is None:
            return torch.zeros(key.shape[:3], device=key.device)
        return checked(initial_score, key.shape[:3], self.config.method, "initial_score", "[B, H, Q]")

    @property
    def is_steady(self) -> bool:
        """Whether the next token fits into a free slot and its eviction frees exactly one, as the fast step needs."""
        return self.fast_path_allowed and isinstance(self.backend, InPlace) and self.backend.is_steady

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

    # -- attending ----------------------------------------------------------------------------------------------------

    def _inputs(self, slots: Slots, query: Tensor, positions: Tensor, params: AttentionParams) -> AttentionInputs:
        """The inputs of this forward's attention: query [B, H * G, Q, D] at positions [B, Q], over all slots in use."""
        b, h, s, sequence = query.shape[0], slots.positions.shape[1], slots.length, self.sequence
        hides_nothing = sequence.in_prompt or self.config.method.per_query  # mask mode, but no slot was evicted yet
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
            all_visible=hides_nothing and self._sees_all(slots, query, params),
        )
        if self.config.renumbered and self.has_evicted:
            inputs = with_renumbered_positions(inputs, slots.positions[:, :, :s].expand(b, h, s))
        return inputs

    def _sees_all(self, slots: Slots, query: Tensor, params: AttentionParams) -> bool:
        """Whether one new token per row, query [B, H * G, 1, D], sees every slot: none is dead, hidden or padding."""
        plain = slots.same_order and not self.sequence.padded and params.sliding_window is None
        return plain and query.shape[2] == 1 and not self.sequence.in_prompt

    def attend(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """Attention output [B, H, G, Q, Dv], and probabilities [B, H, G, Q, S] float32 of a decode step.

        None in place of the probabilities where a fused kernel computed the output, which returns none.
        """
        method, count = self.config.method, inputs.query.shape[3]
        unobserved = self.score_spec is None and not method.per_query
        # For one query on a CPU, SDPA takes longer than the two matrix products.
        if self.sequence.in_prompt or (unobserved and (count > 1 or inputs.query.device.type != "cpu")):
            return sdpa_attention(inputs), None
        x = inputs.logits(slice(0, count), inputs.keys.shape[2])
        if method.per_query:
            x = self._apply_query_mask(x)
        probabilities = torch.softmax(x, dim=-1)
        return apply_probs(probabilities, inputs.values), probabilities

    def _apply_query_mask(self, x: Tensor) -> Tensor:
        """Logits x [B, H, G, Q, S] of a decode step, -inf where the method's `query_mask` hides a slot from a query."""
        assert self.slots is not None and self.resolved_budget is not None
        method, full = self.config.method, torch.softmax(x, dim=-1).sum(2)
        self.first_eviction = self.sequence.first_eviction_steps(self.first_eviction, self.resolved_budget.slots)
        newest = self.sequence.positions(x.device)
        rows = []
        for j in range(x.shape[3]):
            mask = method.query_mask(full[:, :, j], self._context(self.slots, newest[:, j]))
            if mask is not None:
                mask = checked(mask, full[:, :, j].shape, method, "query_mask", "[B, H, S]", mask=True)
            rows.append(x[..., j, :] if mask is None else x[..., j, :].masked_fill(~mask[:, :, None], -torch.inf))
        return torch.stack(rows, dim=3)

    # -- observing ----------------------------------------------------------------------------------------------------

    def _update_score(
        self, slots: Slots, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums
    ) -> None:
        """Sum up this forward's attention as the method's `score_spec` says and add it to the score; see `update`."""
        spec, sequence, config = self.score_spec, self.sequence, self.config
        if spec is None or (not sequence.in_prompt and not config.method.evicts_while_decoding):
            return
        key = (spec.sums_key, config.observe, config.block) if sequence.in_prompt else None
        sums = seen.get(key) if key is not None else None
        if sums is None:
            sums = accumulate.forward_column_sums(config, spec, inputs, probabilities, sequence, self.index)
        if key is not None:
            seen[key] = sums
        self._accumulate(slots, spec, accumulate.pool_sums(spec, sums, sequence), inputs.query_positions)

    def _accumulate(self, slots: Slots, spec: AttentionScoreSpec, sums: Tensor, query_positions: Tensor) -> None:
        """Add pooled column sums [B, H, S] to the slots' scores, as `accumulate.add_to_score`."""
        accumulate.add_to_score(slots, spec, sums, query_positions, self.sequence, self.cross_layer_score)

    # -- evicting -----------------------------------------------------------------------------------------------------

    @property
    def is_bounded(self) -> bool:
        """Whether prompts are evicted between the chunks they are fed in."""
        return self.config.bounded_chunk is not None

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
    def _budget(self) -> Budget:
        """The budget of a cache that evicts."""
        assert self.config.budget is not None
        return self.config.budget

    def _resolve(self, preferences: Sequence[Sequence[float]] | None = None) -> ResolvedBudget:
        """The budget in slots, from the real lengths of the prompts; preferences: as of `eviction_backend.granted`."""
        sequence = self.sequence
        assert sequence.prompt_columns is not None and self.slots is not None
        lengths, new, device = sequence.prompt_lengths_ahead(), sequence.max_new_tokens, self.slots.positions.device
        return ResolvedBudget.from_config(
            self.config, lengths, sequence.prompt_columns, new, self.index, self.layers, device, preferences
        )

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
            query_statistics=self.query_statistics,
            output_factors=self.output_factors,
            last_logits=None if due is None else due.last_logits,
            calibration=self.calibration,
            local_attention=None if self.local_attention is None else self.local_attention.sums,
            rope=due.params.rope if due is not None and (self.calibration is not None or needs.rope) else None,
            second_pass_attention=second,
        )

    def _evict(self, slots: Slots, due: DueEviction, second: Tensor | None) -> None:
        """Evict by the method's priority, and record the first eviction of each row.

        second [B, H, G, S]: attention of the second pass, where the method needs it. Where slots of all layers are
        shared out among all heads, the last layer's call carries out every layer's.
        """
        ranked, resolved = self._ranked(slots, due, second), self.resolved_budget
        assert resolved is not None
        if not self.config.is_ragged or resolved.head_keep is not None:
            self._drop(ranked, due)
        elif not self.sequence.in_prompt:
            self._share_out(None)
            self._drop(ranked, due)
        elif self.model_head_budgets is not None:
            self.model_head_budgets.add(ranked, resolved.keep, partial(self._evict_shared, ranked, due))
        else:
            self._evict_shared(ranked, due, ranked.share(resolved.keep, self._budget))

    def _ranked(self, slots: Slots, due: DueEviction, second: Tensor | None) -> RankedSlots:
        """What these slots are evicted by: the method's priority, what it protects, and marked spans that are spared.

        second: as of `_evict`.
        """
        assert self.resolved_budget is not None and self.sequence.num_real is not None
        newest = self.sequence.num_real.to(slots.positions.device) - 1
        ctx = self._context(slots, newest, due, second)
        method = self.config.method
        # Renumbered survivors stay within a sliding window whatever their age.
        window = due.params.sliding_window if self.config.positions == "original" else None
        priority = masked_priority(method, ctx, window)
        hidden = method.hidden_next_step(ctx)
        if hidden is not None:
            if self.config.mode != "mask":
                raise ConfigError(
                    f"{type(method).__qualname__}.hidden_next_step hides slots for a step, which cache.mode="
                    f"{self.config.mode} cannot: set cache.mode=mask, or let the method's simulation_only be True"
                )
            hidden = checked(hidden, ctx.positions.shape, method, "hidden_next_step", "[B, H, S]", mask=True)
        protected = protected_mask(method, ctx, self.resolved_budget)
        keep, most = self.resolved_budget.keep_t, max(self.resolved_budget.keep)
        priority = self.config.select.priorities(
            method, ctx, priority, protected, keep, most, self.sequence.seq_len, self.output_projection
        )
        resolved = self.resolved_budget
        priority = resolved.by_stream(priority, ctx.positions)
        if self.config.is_union:
            priority = union_priority(priority)
        if self.config.keep is not None and self.sequence.spans is not None:
            marked, held = self.sequence.spans, ctx.held()
            priority, protected = spans.spare(
                self.config.keep, marked, priority, protected, held, ctx.positions, resolved, method.sinks
            )
        return RankedSlots(priority, ctx.positions, protected, hidden)

    def _evict_shared(self, ranked: RankedSlots, due: DueEviction, by_head: Tensor) -> None:
        """Evict until the heads of rows that lose slots hold by_head [B, H] of them, at the end of the prompt."""
        self._share_out(by_head)
        self._drop(ranked, due)
        self._count_bytes()

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

    def _drop(self, ranked: RankedSlots, due: DueEviction) -> None:
        """Evict by priorities that are known, and record the first eviction of each row.

        Where heads hold different numbers, slots become ragged, except in mode mask, which leaves them all in place.
        """
        slots, method = self.require_slots(), self.config.method
        if self.config.is_ragged and self.config.mode != "mask" and not isinstance(slots, RaggedSlots):
            self.slots = slots = RaggedSlots.of(slots)
        assert self.resolved_budget is not None and self.sequence.num_real is not None
        self.backend.evict(slots, ranked.priority, ranked.protected, self.resolved_budget, ranked.hidden)
        self._update_after_eviction(slots)
        self.backend.at_budget = self._all_at_budget()
        self.backend.no_padding_slots = self.backend.at_budget and slots.length == min(self.resolved_budget.least) + (
            self.config.evict_every or 0
        )
        self.note_first_eviction()
        if due.before is not None:
            self.retained_attention = due.before.after(slots)
        if not method.evicts_while_decoding:
            self.query_statistics = self.local_attention = None

    def _drop_after_chunk(self, ranked: RankedSlots) -> None:
        """Evict from a prompt that goes on: the slots are not laid out for decode steps yet."""
        slots = self.require_slots()
        assert self.resolved_budget is not None
        Compacting().evict(slots, ranked.priority, ranked.protected, self.resolved_budget, ranked.hidden)
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

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def bytes_at_16(self) -> int | None:
        """Bytes held with unquantised numbers as 16 bits each; None where nothing is quantised."""
        return self.slots.bytes_at_16 if isinstance(self.slots, QuantizedSlots) else None

    @property
    def heavy_buffers(self) -> list[Slots | fast_step.StackedLayer | None]:
        """The large buffers: a copy of the cache leaves them out, and `copy_rows_from` copies wanted rows of them."""
        return [self.slots, self._stack]

    def copy_rows_from(self, other: EvictionLayer, rows: Tensor) -> None:
        """Copy the slots of batch rows `rows` [n] from another layer, which stays as it is."""
        if other.slots is not None:
            self.slots = other.slots.index_rows(rows)
            self.backend.select_rows(rows)
            self.memory_tracker.set_resident(self.index, self.slots.kv_bytes)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows: keys, values, positions, score and bookkeeping together."""
        self._leave_fast_path()
        if self.slots is not None:
            self.slots.select_rows(rows)
            self.backend.select_rows(rows)
            self.memory_tracker.set_resident(self.index, self.slots.kv_bytes, self.slots.take_peak_bytes())
        if self.resolved_budget is not None:
            self.resolved_budget.select_rows(rows, same_prompts=same_prompts)
        if self.query_statistics is not None:
            self.query_statistics.select_rows(rows)
        if self.last_queries is not None:
            self.last_queries.select_rows(rows)
        if self.local_attention is not None:
            self.local_attention.select_rows(rows)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in rows.tolist()] if self.first_eviction else []
            if self.retained_attention is not None:
                self.retained_attention = self.retained_attention[rows.to(self.retained_attention.device)]

    def kept_positions(self, rows: slice = slice(None)) -> list[list[list[int]]]:
        """Position ids of the slots held, per batch row and kv head, ascending (in mask mode: of visible slots)."""
        if self.slots is None:
            raise CacheError("this layer has not seen a prompt yet")
        slots = self.slots
        positions = slots.positions[:, :, : slots.length]
        if slots.visible is not None:
            positions = positions.masked_fill(~slots.visible[:, :, : slots.length], -1)
        return [[sorted(p for p in head if p >= 0) for head in row] for row in positions[rows].tolist()]

    kept = OldName("kept_positions")
