"""The eviction cache of one layer: store the new tokens, attend, update the score, evict."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.budgeted_layer import BudgetedLayer
from kvexp.core.cache_config import CacheConfig
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.decode import fast_step
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.due_eviction import DueEviction
from kvexp.core.eviction_backend import InPlace
from kvexp.core.head_budgets import ModelHeadBudgets, RankedSlots
from kvexp.core.layer_allocation import LayerAllocation
from kvexp.core.layer_attention import attend_slots, attention_inputs, hide_by_query
from kvexp.core.memory_tracker import MemoryTracker
from kvexp.core.method import EvictionContext
from kvexp.core.observe import accumulate
from kvexp.core.observe.accumulate import PromptSums
from kvexp.core.prompt_statistics import PromptStatistics
from kvexp.core.ranking import rank
from kvexp.core.retained_attention import RetainedAttention
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.errors import CacheError, ConfigError


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
                "kvexp.models.EvictionCache"
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
                "feed the prompt as token ids (input_ids) to a model patched by kvexp.models.patch_model"
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
