"""The cache layer that evicts: store, attend, observe, evict."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvexp.core.attention import (
    AttentionInputs,
    AttentionParams,
    LocalAttention,
    apply_probs,
    attention_probs,
    compute_attention,
    expanded,
    with_renumbered_positions,
)
from kvexp.core.backends import Compacting, InPlace, make_backend
from kvexp.core.budget import Budget, PromptSizes
from kvexp.core.budget_resolution import LayerSlots, resolve_layer_slots
from kvexp.core.budget_shares import LastLayer, layer_budgets_of, share_among_heads, share_among_layers
from kvexp.core.config import CacheConfig
from kvexp.core.decode_stack import CrossLayerBuffers, StackedLayer, takes_step
from kvexp.core.method import AttentionScoreSpec, EvictionContext, Method, checked, is_users, newest_attention
from kvexp.core.noise import Noise
from kvexp.core.observe import (
    ColumnSums,
    CrossLayerScore,
    ObservedRows,
    PromptSums,
    SumsKey,
    column_sums_by,
    largest_ahead,
    pool_sums,
    weighted_column_sums,
)
from kvexp.core.quantized import QuantizedSlots, bytes_at_16, settled
from kvexp.core.ranking import RankedSlots, among_heads, float_priority, joined, rank
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import LatentSlots, RaggedSlots, Rewritten, Slots
from kvexp.core.special_methods import ChangesScores, JoinsLayers, RenewsScores, Rewrites, Simulated
from kvexp.core.statistics import LastQueries, QueryStatistics, StateChanges
from kvexp.util.errors import CacheError


class LayerCache(Protocol):
    """The cache of one attention layer: it holds keys and values and attends to them.

    The kinds: `EvictionLayer` and `RetrievalLayer` (a cache of one method), `MaskedLayer` (one masked forward),
    `MultiLayer` (one layer of several caches).
    """

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


class MemoryTracker:
    """Key and value bytes of all layers, now and at the peak. Python integers only: no host sync.

    bytes, peak_bytes: of all layers together; layer_bytes, layer_peak_bytes, layer_offloaded_bytes: by layer.
    groups: numbers of layers of which `group_peaks` are kept as well.
    """

    def __init__(self, layers: int, groups: Sequence[Sequence[int]] = ()) -> None:
        self.layers, self.groups = layers, groups
        self.reset()

    def reset(self) -> None:
        """Set all numbers to 0, the peaks too."""
        layers = self.layers
        self.layer_bytes = [0] * layers
        self.layer_peak_bytes = [0] * layers
        self.bytes = 0
        self.peak_bytes = 0
        self.group_peaks = [0] * len(self.groups)
        self.layer_offloaded_bytes = [0] * layers

    def set_resident(self, layer: int, now: int, transient: int = 0) -> None:
        """Note that layer `layer` holds `now` bytes on the device, and held at most `transient` since the last call."""
        self.bytes += now - self.layer_bytes[layer]
        self.layer_bytes[layer] = now
        top = max(now, transient)
        self.layer_peak_bytes[layer] = max(self.layer_peak_bytes[layer], top)
        self.peak_bytes = max(self.peak_bytes, self.bytes - now + top)
        for number, layers in enumerate(self.groups):
            if layer in layers:
                self.group_peaks[number] = max(self.group_peaks[number], self.bytes_of(layers) - now + top)

    def bytes_of(self, layers: Sequence[int]) -> int:
        """Bytes that these layers hold on the device."""
        return sum(self.layer_bytes[layer] for layer in layers)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that all layers keep in CPU memory; on a CPU, those that would be offloaded from a GPU."""
        return sum(self.layer_offloaded_bytes)

    def scale_peak_from(self, other: MemoryTracker, samples: int, among: int) -> None:
        """Set the peaks to `samples` of the `among` equal parts of another tracker's peaks.

        For a cache of some prompts (samples) out of a batch of `among` that was prefilled together.
        """
        self.layer_peak_bytes = [peak * samples // among for peak in other.layer_peak_bytes]
        self.peak_bytes = other.peak_bytes * samples // among
        self.group_peaks = [peak * samples // among for peak in other.group_peaks]


class CacheState:
    """What all `layers` of one cache have in common.

    memory_tracker: bytes; cross_layer_score: of a method whose one score spans all layers, else None; state_changes: of
    a method that needs them, else None; windows: as of `PromptSizes`; latent: whether slots hold latents
    (`AttentionParams.expand`); indexed: and an index chooses among them; cross_layer_buffers: of decode steps;
    last_layer: evictions that wait until every layer has seen the prompt.
    """

    def __init__(
        self,
        config: CacheConfig,
        layers: int,
        sequence: SequenceState,
        windows: Sequence[int | None] = (),
        latent: bool = False,
        indexed: bool = False,
    ) -> None:
        spec = config.method.score_spec
        self.layers, self.sequence, self.windows = layers, sequence, windows
        self.latent, self.indexed = latent, indexed
        sliding = [layer for layer, window in enumerate(windows) if window is not None]
        rest = [layer for layer in range(layers) if layer not in sliding]
        self.memory_tracker = MemoryTracker(layers, (rest, sliding) if sliding else ())
        self.cross_layer_score = CrossLayerScore(sequence) if spec is not None and spec.across_layers else None
        shares = config.method.needs.state_changes
        self.state_changes = StateChanges(shares, layers) if shares else None
        self.cross_layer_buffers = CrossLayerBuffers(layers)
        self.last_layer = LastLayer(layers)


@dataclass
class PromptStatistics:
    """Statistics of one layer's queries, gathered forward by forward; each None until a forward adds to it.

    queries: moments over the prompt's queries; local: attention within chunks of the prompt; last: the newest queries.
    """

    queries: QueryStatistics | None = None
    local: LocalAttention | None = None
    last: LastQueries | None = None

    def add(self, inputs: AttentionInputs, config: CacheConfig, window: int, sequence: SequenceState) -> None:
        """Add the queries of one forward that are needed; window: newest queries by which layers share slots."""
        needs = config.method.needs
        if needs.queries_after is not None and sequence.in_prompt:
            self.queries = self.queries or QueryStatistics(needs.queries_after, inputs)
            self.queries.add(inputs)
        if needs.local_chunks is not None and sequence.in_prompt:
            self.local = self.local or LocalAttention(needs.local_chunks, inputs)
            self.local.add(inputs, complete=sequence.prompt_complete)
        if number := max(needs.last_queries, window):
            self.last = self.last or LastQueries(number, inputs)
            self.last.add(inputs)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        for gathered in (self.queries, self.last, self.local):
            if gathered is not None:
                gathered.select_rows(rows)


@dataclass(frozen=True)
class DueEviction:
    """What an eviction needs of the forward that it follows, besides the slots: tensors, None where not needed.

    params: of that forward; newest_attention, last_logits: as in `EvictionContext`; by_position: at the end of a
    prompt, its last query's attention (`attention_by_position`).
    """

    params: AttentionParams
    newest_attention: Tensor | None = None
    last_logits: Tensor | None = None
    by_position: Tensor | None = None


def attention_by_position(inputs: AttentionInputs, slots: Slots) -> Tensor:
    """The last query row's softmax, mean over a kv head's query heads: [B, H, S + 1] by position, last: dead slots.

    Over tokens alone also where heads have sinks, so that `retained_share` is of what goes to tokens.
    """
    count = inputs.query.shape[3]
    row = torch.softmax(inputs.logits(slice(count - 1, count), inputs.keys.shape[2]), dim=-1)[..., 0, :].mean(2)
    positions = slots.positions[:, :, : slots.length]
    table = torch.zeros(*row.shape[:2], slots.length + 1, device=row.device)
    return table.scatter_add_(-1, torch.where(positions < 0, slots.length, positions), row.float())


def retained_share(by_position: Tensor, slots: Slots) -> Tensor:
    """The share [B] of `attention_by_position` whose slots survived an eviction, mean over kv heads."""
    positions = slots.visible_positions()
    held = by_position.gather(-1, torch.where(positions < 0, by_position.shape[-1] - 1, positions))
    return held.masked_fill(positions < 0, 0.0).sum(-1).mean(-1)


class EvictionLayer:
    """The eviction cache of one attention layer, a `LayerCache`. Rows are independent unless the method adds them up.

    config: of the whole cache; index: the layer's number; common: of all layers of the cache. output_factors: of this
    layer, as in `EvictionContext`; output_projection [H, G, n, Dv]: its blocks, for `SlotSelection`; None: not needed.

    slots: None before the first forward; seq_len: tokens seen, padding included; backend: where new tokens are written,
    and how slots are dropped. layer_slots: None until the prompt's length is known; has_evicted: whether there was an
    eviction; first_eviction: per row, decode tokens seen when the first slot was lost, None: not yet;
    due_eviction: the eviction at the end of the prompt while it waits for a budget or a second pass. predicted
    [B, H, Q]: scores of the next forward's tokens, see `take_input`. retained_attention [B]: the share of the last
    prompt query's attention that the eviction at the end of the prompt kept; None: there was none. failed [B, H] bool:
    as of `Rewritten`. nan_flag: as of `EvictionContext`, of a user's method.
    """

    _stack: StackedLayer | None  # this layer alone, as fast decode steps take it

    def __init__(
        self,
        config: CacheConfig,
        index: int,
        common: CacheState,
        output_factors: Tensor | None = None,
        output_projection: Tensor | None = None,
    ) -> None:
        self.config, self.index, self.common, self.layers = config, index, common, common.layers
        self.sequence, self.memory_tracker = common.sequence, common.memory_tracker
        self.cross_layer_buffers = common.cross_layer_buffers
        self.output_factors, self.output_projection = output_factors, output_projection
        needed = config.calibration if config.method.needs.calibration else None
        self.calibration = None if needed is None else needed.layer(index)
        self.surrogate = None if config.surrogate is None else config.surrogate.layer(index)
        self.score_spec = config.score_spec
        self.takes_step = takes_step(config) and not (common.indexed or (common.latent and config.renumbered))
        self.reset()

    def reset(self) -> None:
        """Drop all slots; the next forward starts a prompt."""
        self.slots: Slots | None = None
        self.seq_len = 0
        self.predicted: Tensor | None = None
        self.backend = make_backend(self.config.mode, self.config.evict_every)
        self.layer_slots: LayerSlots | None = None
        self.has_evicted = False
        self.first_eviction: list[int | None] = []
        self.retained_attention: Tensor | None = None
        self.failed: Tensor | None = None
        self.statistics = PromptStatistics()
        self.due_eviction: DueEviction | None = None
        self.nan_flag: Tensor | None = None
        self._kept: tuple[list[int], Tensor] | None = None
        self.memory_tracker.set_resident(self.index, 0)
        self._drop_stack()
        self.common.last_layer.reset()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        if self.can_step(query, padding):
            return self._single_stack().forward(query, key, value, params)
        self._drop_stack()
        inputs = self.store(query, key, value, params, padding)
        sums: dict[SumsKey, ColumnSums] = {}
        self.observe(inputs, sums)
        out, probabilities = self.attend(inputs, sums.values())
        self.update(inputs, probabilities, {key: column_sums.sums for key, column_sums in sums.items()})
        return out.flatten(1, 2)

    # -- store --------------------------------------------------------------------------------------------------------

    def store(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> AttentionInputs:
        """Store the new tokens and return their attention's inputs: the first part of `forward`, with its arguments."""
        positions, config, sequence = self.advance(key, padding), self.config, self.sequence
        slots = self._write_slots(key, value, positions)
        b, h, s = query.shape[0], slots.positions.shape[1], slots.length
        # In mask mode no slot was evicted yet.
        hides_nothing = slots.visible is None or sequence.in_prompt or config.per_query
        decodes_one = query.shape[2] == 1 and not sequence.in_prompt and params.sliding_window is None
        inputs = AttentionInputs(
            query=query.unflatten(1, (h, query.shape[1] // h)),
            keys=slots.keys[:, :, :s],
            values=slots.values[:, :, :s],
            positions=slots.broadcast_positions(),
            query_positions=positions,
            params=params,
            visible=slots.visible[:, :, :s] if not hides_nothing and slots.visible is not None else None,
            in_column_order=slots.same_order,
            padded=sequence.padded or (sequence.in_prompt and not sequence.prompt_complete),
            all_visible=hides_nothing and decodes_one and slots.same_order and not sequence.padded,
            bias=None if slots.bias is None else slots.bias[:, :, :s],
        )
        if config.renumbered and self.has_evicted:
            inputs = with_renumbered_positions(inputs, slots.positions[:, :, :s].expand(b, h, s))
        if isinstance(slots, QuantizedSlots):
            inputs = replace(inputs, query=slots.read_query(inputs.query))
        return expanded(inputs)

    def advance(self, key: Tensor, padding: Tensor | None) -> Tensor:
        """Join the forward in progress and return the position ids [B, Q] of its new tokens, -1 for padding.

        key [B, H, Q, D]; padding as of `forward`.
        """
        if self.due_eviction is not None:
            raise CacheError(
                f"method {self.config.method.name} evicts after a second pass over the prompt, and there was none: "
                "feed the prompt as token ids (input_ids) to a model patched by kvexp.hf.patch_model"
            )
        sequence = self.sequence
        positions = sequence.advance(self.seq_len, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.seq_len = sequence.seq_len
        return positions

    def _write_slots(self, key: Tensor, value: Tensor, positions: Tensor) -> Slots:
        """Write the new tokens to the free slot, or append them; returns all slots.

        key [B, H, Q, D], value [B, H, Q, Dv], positions [B, Q].
        """
        if self.slots is None:
            self.slots = Slots.empty_like(key, value, masked=self.config.mode == "mask")
        slots, sequence = self.slots, self.sequence
        born = self.initial_score(key, positions)
        if key.shape[2] > 1 and not sequence.in_prompt:
            self.backend.reset_layout()
        free_slot = self.backend.next_slot() if key.shape[2] == 1 and not sequence.in_prompt else None
        if free_slot is not None:
            slots.write(free_slot, key, value)
            slots.set_metadata(free_slot, positions, born)
        else:
            # Of a prompt that is evicted between chunks, no chunk brings room for more than itself.
            exact = slots.length + key.shape[2] if self.is_bounded and sequence.in_prompt else self.final_length
            slots.append(key, value, positions, born, reserve=exact)
        return slots

    @property
    def scores_new_tokens(self) -> bool:
        """Whether new tokens start with another score than 0."""
        return self.surrogate is not None or type(self.config.method).initial_score is not Method.initial_score

    def initial_score(self, key: Tensor, positions: Tensor) -> Tensor:
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

    def take_input(self, hidden: Tensor, state: Tensor) -> None:
        """Let the surrogate predict the scores of the next forward's tokens from the layer's input [B, Q, n].

        state [B, Q, n]: the hidden state that the input is made of.
        """
        if self.common.state_changes is not None:
            self.common.state_changes.note(self.index, state, self.sequence)
        if self.surrogate is not None and self.config.method.needs.surrogate:
            self.surrogate = self.surrogate.on(hidden.device)  # once: a copy at every step would stop the host
            self.predicted = self.surrogate.scores(hidden)

    def share_prefill(self, inputs: AttentionInputs, key: Tensor, value: Tensor, padding: Tensor | None) -> None:
        """Share the buffers of another cache, whose `store` of the same prompt returned `inputs`; replaces `store`.

        They are shared until a slot is evicted or added here. key [B, H, T, D], value [B, H, T, Dv]: of the prompt.
        """
        positions = self.advance(key, padding)
        if self.final_length:  # it will only grow: in buffers of its own from the start
            self._write_slots(key, value, positions)
            return
        self.slots = Slots.empty_like(key, value, masked=self.config.mode == "mask")
        states = (inputs.keys, inputs.values) if inputs.params.expand is None else (key, value)
        self.slots.alias(*states, positions, self.initial_score(key, positions))

    @property
    def final_length(self) -> int:
        """The final length of a cache that never evicts, which is allocated once; 0 where it is not known or evicts."""
        sequence = self.sequence
        if self.config.method.evicts or sequence.max_new_tokens is None or sequence.prompt_columns is None:
            return 0
        return sequence.prompt_columns + sequence.max_new_tokens

    @property
    def is_bounded(self) -> bool:
        """Whether prompts are evicted between the chunks they are fed in."""
        return self.config.bounded_chunk is not None

    def require_slots(self) -> Slots:
        """The slots; an AssertionError before the first forward."""
        assert self.slots is not None
        return self.slots

    # -- attend -------------------------------------------------------------------------------------------------------

    def attend(self, inputs: AttentionInputs, observers: Iterable[ColumnSums] = ()) -> tuple[Tensor, Tensor | None]:
        """Attention output [B, H, G, Q, Dv], and probabilities [B, H, G, Q, S] float32 of a decode step.

        None in place of the probabilities where they were not kept. observers: of a prompt, which fill here.
        """
        method, count = self.config.method, inputs.query.shape[3]
        unobserved = self.config.only_grows or (method.score_spec is None and not self.config.per_query)
        # For one query on a CPU, SDPA takes longer than the two matrix products.
        if self.sequence.in_prompt or (unobserved and (count > 1 or inputs.query.device.type != "cpu")):
            return compute_attention(inputs, list(observers)), None
        x = inputs.logits(slice(0, count), inputs.keys.shape[2])
        if self.config.per_query:
            x = self._hide_by_query(x, inputs.params)
        probabilities = attention_probs(x, inputs.params.sinks)
        return apply_probs(probabilities, inputs.values), probabilities

    def _score_sinks(self, params: AttentionParams) -> Tensor | None:
        """The sinks of the heads in what the method sees; None: none, or left out (`CacheConfig.score_sink`)."""
        return params.sinks if self.config.score_sink == "applied" else None

    def _hide_by_query(self, x: Tensor, params: AttentionParams) -> Tensor:
        """Logits x [B, H, G, Q, S] of a decode step, -inf where the method's `query_mask` hides a slot from a query."""
        assert self.layer_slots is not None
        self.first_eviction = self.sequence.first_eviction_steps(self.first_eviction, self.layer_slots.slots)
        newest, method = self.sequence.positions(x.device), self.config.method
        assert isinstance(method, Simulated)
        full = attention_probs(x, self._score_sinks(params)).sum(2)
        rows = []
        for j in range(x.shape[3]):
            mask = method.query_mask(full[:, :, j], self._context(newest[:, j], DueEviction(params)))
            if mask is not None:
                mask = checked(mask, full[:, :, j].shape, method, "query_mask", "[B, H, S]", mask=True)
            rows.append(x[..., j, :] if mask is None else x[..., j, :].masked_fill(~mask[:, :, None], -torch.inf))
        return torch.stack(rows, dim=3)

    # -- observe ------------------------------------------------------------------------------------------------------

    def observe(self, inputs: AttentionInputs, sums: dict[SumsKey, ColumnSums]) -> None:
        """Add to `sums` what is to be summed up while a prompt is attended to, unless another cache has added it.

        On a CPU alone; elsewhere, for observe=naive and for noise of another class, which may draw for the batch as a
        whole, `update` sums up afterwards.
        """
        spec, how = self.score_spec, self.config.observe
        if spec is None or how != "blocked" or not self.sequence.in_prompt or inputs.query.device.type != "cpu":
            return
        if spec.noise is not None and type(spec.noise) is not Noise:
            return
        if (key := (spec.sums_key, how)) not in sums:
            sums[key] = ColumnSums(inputs, self._observed(spec, inputs))

    def _observed(self, spec: AttentionScoreSpec, inputs: AttentionInputs) -> ObservedRows:
        """How the query rows of the forward in progress are observed."""
        sequence, left = self.sequence, None  # query rows of the prompt still to come before its eviction
        if sequence.in_prompt and sequence.prompt_columns is not None:
            left = 0 if self.is_bounded else sequence.prompt_columns - sequence.seq_len
        return ObservedRows.of(spec, inputs.query_positions, sequence, self.index, left)

    def update(self, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums) -> None:
        """Update the score and evict: the last part of `forward`, after `attend`.

        probabilities: what `attend` returned. seen: column sums of this layer that other caches of the same prefill
        have computed; the ones computed here are added.
        """
        config, sequence, needs = self.config, self.sequence, self.config.method.needs
        self._update_score(inputs, probabilities, seen)
        by_preference = sequence.in_prompt and config.shares_by_preference
        shares = layer_budgets_of(config.method, self._budget) if by_preference else None
        self.statistics.add(inputs, config, 0 if shares is None else shares.window, sequence)
        if self._lacks_room and not sequence.in_prompt:
            # A prefilled context learns only with the question how many tokens follow its prompt: retrieval heads get
            # room for them, and the next eviction lays the slots out anew.
            assert self.layer_slots is not None and sequence.max_new_tokens is not None
            self.layer_slots.make_room(sequence.max_new_tokens)
            self.backend.reset_layout()
        if self._evicts_now():
            logits = None if self.statistics.last is None else self.statistics.last.logits(inputs)
            ends_prompt = sequence.in_prompt and not self.is_bounded
            sinks = self._score_sinks(inputs.params)
            seen_by_method = probabilities if sinks is inputs.params.sinks else None
            due = DueEviction(
                inputs.params,
                newest_attention=newest_attention(inputs, seen_by_method, sinks) if needs.newest_attention else None,
                last_logits=None if logits is None or not needs.last_queries else logits[..., -needs.last_queries :, :],
                by_position=attention_by_position(inputs, self.require_slots()) if ends_prompt else None,
            )
            if shares is None and needs.second_pass is None:
                self._select(due)
            else:
                self.due_eviction = due
            if shares is not None and logits is not None:
                # The last layer's preference evicts from all.
                self.memory_tracker.set_resident(self.index, self.require_slots().kv_bytes)
                preference = shares.preference(logits, sequence.prompt_lengths, sinks)
                self.common.last_layer.wait(preference, self._take_share, share_among_layers)
        self._settle()
        sequence.layer_done()

    def _update_score(self, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums) -> None:
        """Sum up this forward's attention as the method's `score_spec` says and add it to the score; see `update`."""
        spec, sequence, config = self.score_spec, self.sequence, self.config
        if spec is None or (not sequence.in_prompt and (config.only_grows or not config.method.evicts_while_decoding)):
            return
        key = (spec.sums_key, config.observe)
        sums = seen.get(key) if sequence.in_prompt else None
        if sums is None:
            observed = self._observed(spec, inputs)
            if probabilities is not None and spec.is_plain and self._score_sinks(inputs.params) is inputs.params.sinks:
                sums = weighted_column_sums(probabilities, observed.weights)
            else:
                sums = column_sums_by(config.observe, inputs, observed)
            if sequence.in_prompt:
                seen[key] = sums
        self._accumulate(self.require_slots(), spec, pool_sums(spec, sums, sequence), inputs.query_positions)

    def _accumulate(self, slots: Slots, spec: AttentionScoreSpec, sums: Tensor, query_positions: Tensor) -> None:
        """Decay the slots' scores and add pooled column sums [B, H, S], in place.

        query_positions [B, Q]: position ids of the rows observed, -1 for padding: real rows decide how often to decay.
        """
        sequence, shared = self.sequence, self.common.cross_layer_score
        score = slots.score[:, :, : slots.length]
        if not sequence.in_prompt:
            sums = largest_ahead(sums, spec.pool_ahead)
        factor: Tensor | None = None
        if spec.decay < 1:
            new = (query_positions >= 0).sum(1).float()
            factor = torch.pow(torch.full((), spec.decay, device=new.device), new)[:, None, None]
        if shared is None or sequence.in_prompt:
            result = sums + (score if factor is None else score.masked_fill(score == -torch.inf, 0) * factor)
            if sequence.in_prompt and sequence.prompt_complete:  # whatever chunks it came in
                result = largest_ahead(result, spec.pool_ahead)
            sums = result
        if shared is not None and (not sequence.in_prompt or sequence.prompt_complete):
            # A prompt is added whole, at its end: else the chunks it came in would decide what a layer can know.
            result = shared.update(slots.positions[:, :, : slots.length], sums, None if sequence.in_prompt else factor)
        # In mask mode -inf marks an evicted slot and must survive decay and addition.
        score.copy_(result if slots.visible is None else torch.where(score == -torch.inf, score, result))

    def _settle(self) -> None:
        """Quantise the tokens that have left the window, a prompt's once it ends, and count the bytes.

        After a forward and its eviction; an eviction that waits comes first.
        """
        quantization, newest = self.config.quantization, self.sequence.num_real
        if self.due_eviction is None and quantization is not None and self.sequence.prompt_complete:
            slots = self.require_slots()
            assert newest is not None
            self.slots = settled(slots, quantization, newest.to(slots.positions.device) - 1)
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Report to the memory tracker what the slots hold, and held at most since the last call."""
        slots = self.require_slots()
        self.memory_tracker.set_resident(self.index, slots.kv_bytes, slots.take_peak_bytes())

    @property
    def bytes_at_16(self) -> int | None:
        """Bytes held with unquantised keys and values as 16 bits each; None where nothing is quantised or biased."""
        if isinstance(self.slots, QuantizedSlots):
            return self.slots.bytes_at_16
        if self.slots is None or self.slots.bias is None:
            return None
        return bytes_at_16(*self.slots.kv_buffers) + self.slots.bias_bytes

    # -- evict: when, how many slots, which ---------------------------------------------------------------------------

    def _evicts_now(self) -> bool:
        """Whether this forward ends with an eviction.

        It does where the cadence says so, or a bounded prompt goes on with another chunk, and some row holds more than
        its budget.
        """
        sequence, every, method = self.sequence, self.config.evict_every, self.config.method
        if self.is_bounded and sequence.in_prompt and sequence.padded:
            raise CacheError(
                "prompts with padding cannot be evicted between chunks: give one, or several of one length"
            )
        if not sequence.prompt_complete:  # rows of a bounded prompt have no padding, so all have seen as much
            return self.is_bounded and any(sequence.seq_len > kept for kept in self._known_slots().kept)
        if not method.evicts:
            return False
        allowed = self._known_slots()
        if self.config.per_query:
            return False
        if sequence.in_prompt:
            due = self.config.cadence.at_prefill
        else:
            width = sequence.seq_len - sequence.past_len
            due = every is not None and (sequence.decode_steps + width) // every > sequence.decode_steps // every
        over = any(n > kept for n, kept in zip(sequence.tokens_by_row, allowed.least, strict=True))
        by_threshold = sequence.in_prompt and self._budget.threshold is not None
        return due and (over or by_threshold or self.has_evicted)

    @property
    def _budget(self) -> Budget:
        """The budget; an AssertionError for a cache that does not evict."""
        assert self.config.budget is not None
        return self.config.budget

    def _known_slots(self, preferences: Sequence[Sequence[float]] | None = None) -> LayerSlots:
        """This layer's slots, resolved from the real lengths of the prompts at the first call.

        preferences [B][L]: of all layers, where their shares go by them; resolves anew.
        """
        if self.layer_slots is None or preferences is not None:
            sequence = self.sequence
            assert sequence.prompt_columns is not None and self.slots is not None
            lengths = sequence.prompt_lengths_ahead()
            sizes = (lengths, sequence.prompt_columns, sequence.max_new_tokens, self.layers)
            prompts = PromptSizes(*sizes, self.common.windows)
            device = self.slots.positions.device
            self.layer_slots = resolve_layer_slots(self.config, prompts, self.index, device, preferences)
        return self.layer_slots

    @property
    def _lacks_room(self) -> bool:
        """Whether more tokens are to follow the prompt than were announced when retrieval heads got their room."""
        return self.layer_slots is not None and self.layer_slots.lacks_room(self.sequence.max_new_tokens)

    def _take_share(self, preferences: Sequence[Sequence[float]]) -> None:
        """Take this layer's share by the preferences [B][L] of all layers, and evict unless a second pass comes."""
        self._known_slots(preferences)
        if not self.config.method.needs.last_queries:
            self.statistics.last = None
        if self.config.method.needs.second_pass is None:
            self.evict_due()

    def evict_due(self, attention: Tensor | None = None, peak_bytes: int = 0, logits: Tensor | None = None) -> None:
        """Carry out the eviction that waited for the other layers, or for a second pass over the prompt.

        attention [B, H, G, S]: `EvictionContext.second_pass_attention`; peak_bytes: of the pass, without the slots;
        logits [B, H, G, n, S]: of queries of the pass, if the method wants them.
        """
        slots, due = self.require_slots(), self.due_eviction
        assert due is not None
        self.due_eviction = None
        due = due if logits is None else replace(due, last_logits=logits)
        self.memory_tracker.set_resident(self.index, slots.kv_bytes, slots.kv_bytes + peak_bytes)
        self._select(due, attention)
        self._settle()

    def _context(self, newest: Tensor, due: DueEviction, second: Tensor | None = None) -> EvictionContext:
        """The `EvictionContext` of the slots; newest [B]: position id of the newest token; second: as of `_rank`."""
        allowed, needs, changes = self.layer_slots, self.config.method.needs, self.common.state_changes
        assert allowed is not None
        if self.calibration is not None:
            self.calibration = self.calibration.to(newest.device)
        if self.nan_flag is None and is_users(type(self.config.method)):
            self.nan_flag = torch.zeros((), dtype=torch.bool, device=newest.device)
        slots = self.require_slots()
        return EvictionContext(
            LatentSlots(slots) if self.common.latent else slots,
            self.index,
            allowed.slots_t,
            allowed.recent_t,
            newest,
            self.sequence.seeds.to(newest.device),
            newest_attention=due.newest_attention,
            query_statistics=self.statistics.queries,
            output_factors=self.output_factors,
            last_logits=due.last_logits,
            calibration=self.calibration,
            local_attention=None if self.statistics.local is None else self.statistics.local.sums,
            rope=due.params.rope if self.calibration is not None or needs.rope else None,
            second_pass_attention=second,
            compares_heads=self.config.compares_heads,
            sinks=self._score_sinks(due.params),
            kept_prompt=self._kept_prompt(newest.device),
            output_projection=self.output_projection,
            state_changes=None if changes is None else changes.before(self.sequence),
            steps=self.steps,
            layers=self.layers,
            nan_flag=self.nan_flag,
        )

    def _ranking_context(self, newest: Tensor, due: DueEviction, second: Tensor | None = None) -> EvictionContext:
        """As `_context`, for the one ranking of an eviction: a method that renews its scores has done so.

        A row or head within its budget loses nothing, so that its scores stay.
        """
        ctx, method, allowed = self._context(newest, due, second), self.config.method, self.layer_slots
        if isinstance(method, RenewsScores):
            assert allowed is not None
            renewed = checked(method.renewed_score(ctx), ctx.score.shape, method, "renewed_score", "[B, H, S]")
            over = (newest[:, None] >= allowed.kept_by_head)[..., None] & (ctx.score > -torch.inf)
            ctx.score.copy_(torch.where(over, renewed, ctx.score))
        return ctx

    def _kept_prompt(self, device: torch.device) -> Tensor | None:
        """Tokens [B] of each row's prompt, where it is never evicted; else None."""
        if self.config.keep != "prompt":
            return None
        lengths = self.sequence.prompt_lengths_ahead()
        if self._kept is None or self._kept[0] != lengths:  # made once: a copy at every step would stop the host
            self._kept = lengths, torch.tensor(lengths, device=device)
        return self._kept[1]

    def _rank(self, due: DueEviction, newest: Tensor, second: Tensor | None = None) -> RankedSlots:
        """What the slots are evicted by.

        newest [B]: as of `_context`; second [B, H, G, S]: attention of the second pass, if the method needs it.
        """
        assert self.layer_slots is not None
        ctx = self._ranking_context(newest, due, second)
        window, projection, method = due.params.sliding_window, self.output_projection, self.config.method
        ranked = rank(self.config, ctx, self.layer_slots, self.sequence, window, projection)
        rewrites = isinstance(method, Rewrites) and method.rewrites
        return replace(ranked, rewrite=partial(self._rewritten, ctx)) if rewrites else ranked

    def _rewritten(self, ctx: EvictionContext, index: Tensor, keep: Tensor) -> Rewritten:
        """What the method puts into the slots that it keeps, and note where it could not; as of `Rewrites.rewrite`."""
        assert isinstance(self.config.method, Rewrites)
        rewritten = self.config.method.rewrite(ctx, index, keep)
        self.failed = rewritten.failed
        return rewritten

    def _select(self, due: DueEviction, second: Tensor | None = None) -> None:
        """Rank the slots, decide how many each kv head keeps, and evict; second: as of `_rank`.

        Where slots of all layers are shared out among all heads, or are chosen by all priorities, the last layer's call
        evicts from every layer.
        """
        assert self.sequence.num_real is not None
        newest = self.sequence.num_real.to(self.require_slots().positions.device) - 1
        ranked, allowed, budget = self._rank(due, newest, second), self.layer_slots, self._budget
        assert allowed is not None
        if self.config.joins_layers:
            method = self.config.method
            assert isinstance(method, JoinsLayers)
            self.common.last_layer.wait(ranked, partial(self._evict, due), partial(joined, method))
        elif not self.config.is_ragged or allowed.by_head is not None or not self.sequence.in_prompt:
            self._evict(due, ranked)
        elif budget.heads == "global":
            share = partial(share_among_heads, kept=allowed.kept, floor=budget.floor)
            self.common.last_layer.wait(ranked, partial(self._evict, due, ranked), share)
        else:
            self._evict(due, ranked, ranked.share(allowed.kept, budget))

    def _evict(self, due: DueEviction, ranked: RankedSlots, by_head: Tensor | None = None) -> None:
        """Drop slots, change the scores of what is left, and note first evictions and what survived of the attention.

        by_head [B, H]: slots that heads keep from now on in rows that lose some; elsewhere, and where it is None, all
        heads keep the same number. Slots become ragged, except in mode mask, which leaves them all in place.
        """
        slots, allowed, method, sequence = self.require_slots(), self.layer_slots, self.config.method, self.sequence
        assert allowed is not None and sequence.num_real is not None
        tokens = sequence.num_real.to(slots.positions.device)
        if self.config.is_ragged and allowed.by_head is None:
            if by_head is not None:
                over = tokens > allowed.kept_t
                if self._budget.threshold is not None:
                    over = torch.ones_like(over)
                by_head = torch.where(over[:, None], by_head, allowed.kept_t[:, None])
            allowed.share_out(by_head, slots.positions.shape[1])
        if self.config.is_ragged and self.config.mode != "mask" and not isinstance(slots, RaggedSlots):
            self.slots = slots = RaggedSlots.of(slots)
        # Between chunks of a prompt slots are not laid out for decode steps yet.
        backend = self.backend if sequence.prompt_complete else Compacting()
        backend.evict(slots, ranked, allowed)
        if self.changes_scores:
            self.change_scores(slots.score, tokens)
        self.has_evicted = True
        if not sequence.prompt_complete:
            return
        full = all(n >= kept for n, kept in zip(sequence.tokens_by_row, allowed.most, strict=True))
        backend.at_budget = full
        backend.no_padding_slots = full and slots.length == min(allowed.least) + (self.config.evict_every or 0)
        self.note_first_eviction()
        if due.by_position is not None:
            self.retained_attention = retained_share(due.by_position, slots)
        if not method.evicts_while_decoding:
            self.statistics.queries = self.statistics.local = None
        if self.config.is_ragged or self.config.joins_layers:  # another layer's call may have led here
            self._count_bytes()

    @property
    def changes_scores(self) -> bool:
        """Whether the method changes the scores after every eviction."""
        return isinstance(self.config.method, ChangesScores)

    def change_scores(self, score: Tensor, tokens: Tensor) -> None:
        """Change score [B, H, S] in place as the method does after an eviction; tokens [B]: seen by each row.

        A row or head within its budget has lost nothing, whatever its neighbours lose.
        """
        method, allowed = self.config.method, self.layer_slots
        assert allowed is not None and isinstance(method, ChangesScores)
        reduced = (tokens[:, None] > allowed.kept_by_head)[..., None]
        after = checked(method.after_eviction(score), score.shape, method, "after_eviction", "[B, H, S]")
        score.copy_(torch.where(reduced, after, score))

    def note_first_eviction(self) -> None:
        """Record for every row at which decode step its first slot was evicted."""
        if not self.first_eviction or None in self.first_eviction:
            assert self.layer_slots is not None
            self.first_eviction = self.sequence.first_eviction_steps(self.first_eviction, self.layer_slots.least)

    # -- the decode step ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Tokens since the prompt."""
        return self.sequence.seq_len - (self.sequence.prompt_columns or 0)

    def can_step(self, query: Tensor, padding: Tensor | None) -> bool:
        """Whether this forward brings one real token to every row, with a slot for it, and no gradient is wanted.

        query [B, H * G, Q, D]; padding as of `forward`.
        """
        wants_gradients = query.requires_grad and torch.is_grad_enabled()
        return query.shape[2] == 1 and padding is None and self.has_slot and not wants_gradients

    @property
    def has_slot(self) -> bool:
        """Whether the next token has a slot of its own, behind those in use or one that an eviction has freed."""
        if not self.takes_step or self.slots is None:
            return False
        if self.config.only_grows:
            return self.sequence.prompt_complete and self.due_eviction is None
        if not isinstance(self.backend, InPlace) or self._lacks_room:
            return False
        return self.backend.has_slot(self.seq_len - (self.sequence.prompt_columns or 0))

    @property
    def evicts_by_score(self) -> bool:
        """Whether the score alone decides which slot goes next of those that nothing protects.

        A score that a user's method makes is looked at for NaN, as every priority is (`float_priority`).
        """
        allowed, method = self.layer_slots, self.config.method
        plain = method.priority_is_score and not self.config.is_union and self.config.plain_choice
        trusted = not is_users(type(method)) or not (self.scores_new_tokens or self.changes_scores)
        return plain and trusted and (allowed is None or allowed.streaming is None)

    def note_queries(self, query: Tensor, seen: Tensor, positions: Tensor, params: AttentionParams) -> DueEviction:
        """Add the queries of a decode step to the statistics; returns what the eviction after it needs of them.

        query [B, H, G, 1, D]; seen [B, H, G, 1, S]: their attention as the method sees it; positions [B, 1].
        """
        slots, needs, last = self.require_slots(), self.config.method.needs, self.statistics.last
        due = DueEviction(params, newest_attention=seen[..., 0, :] if needs.newest_attention else None)
        if last is None:
            return due
        count = slots.length
        keys, values, held = (x[:, :, :count] for x in (slots.keys, slots.values, slots.positions))
        inputs = expanded(AttentionInputs(query, keys, values, held, positions, params))
        last.add(inputs)
        return replace(due, last_logits=last.logits(inputs) if needs.last_queries else None)

    def step_priority(self, due: DueEviction | None, params: AttentionParams | None, newest: Tensor) -> Tensor:
        """The priority [B, H, S] float32 of every slot at the end of a decode step; newest [B]: as of `_context`.

        due: what `note_queries` returned; None: it was not called. Where more than the method's priorities decides
        (`CacheConfig.plain_choice`), what that protects is infinite.
        """
        allowed, config = self.layer_slots, self.config
        assert allowed is not None and params is not None
        due = due or DueEviction(params)
        if not config.plain_choice:
            ranked = self._rank(due, newest)
            return ranked.priority.masked_fill(ranked.protected, torch.inf)
        ctx = self._ranking_context(newest, due)
        return among_heads(config, allowed, float_priority(config.method, ctx), ctx.positions)

    def begin_step(self) -> None:
        """Count the new token's slot on the host, where the cache only grows."""
        if self.config.only_grows:
            self.require_slots().length += 1

    @property
    def step_counts(self) -> tuple[int, int]:
        """What a decode step counts on the host: slots in use, and how many are free until the next eviction."""
        return self.require_slots().length, self.backend.num_free if isinstance(self.backend, InPlace) else 0

    def rewind_step(self, counts: tuple[int, int]) -> None:
        """Go back to the `step_counts` of before a step, whose layers may or may not have been computed."""
        self.seq_len = self.sequence.past_len
        self.require_slots().length = counts[0]
        if isinstance(self.backend, InPlace):
            self.backend.num_free = counts[1]

    def end_step(self) -> None:
        """Count a decode step on the host, when its layer has been computed or replayed."""
        if isinstance(self.backend, InPlace) and not self.config.only_grows:
            self.backend.count_step()
            self.note_first_eviction()
        self.sequence.layer_done()

    @property
    def lacks_slot(self) -> bool:
        """Whether the buffers of a cache that grows are full."""
        return self.require_slots().length == self.require_slots().keys.shape[2]

    def grow(self) -> None:
        """Give a cache that grows room for another token."""
        self.require_slots().make_room(1, self.final_length)
        self._count_bytes()

    def _single_stack(self) -> StackedLayer:
        """This layer alone as a `StackedLayer`, made anew when its buffers have been replaced."""
        if not self.config.only_grows:
            self.require_slots().own()  # it is about to overwrite a slot
        elif self.lacks_slot:
            self.grow()
        # Where a chunk passes layer by layer, the layers of a cache are not at the same token.
        buffers = None if self.sequence.by_token else self.cross_layer_buffers
        stack = self._stack
        if stack is None or not stack.is_current or (buffers is None and stack.buffers is self.cross_layer_buffers):
            # By a proxy: if layer and stack held each other, the slots would stay until Python looks for cycles.
            self._stack = stack = StackedLayer([weakref.proxy(self)], buffers)
        return stack

    @property
    def decode_stacks(self) -> list[StackedLayer] | None:
        """What takes the next decode step, once one has been taken so; None: it is computed as a prompt is."""
        stack = self._stack
        return [stack] if stack is not None and self.has_slot and stack.is_current else None

    def _drop_stack(self) -> None:
        """Drop the stacked layer and the merged buffers: this forward is computed by `store`, `attend` and `update`."""
        self._stack = None
        self.cross_layer_buffers.reset()

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def heavy_buffers(self) -> list[Slots | StackedLayer | None]:
        """The large buffers: a copy of the cache leaves them out, and `copy_rows_from` copies wanted rows of them."""
        return [self.slots, self._stack]

    def copy_rows_from(self, other: EvictionLayer, rows: Tensor) -> None:
        """Copy the slots of batch rows `rows` [n] from another layer, which stays as it is."""
        if other.slots is not None:
            self.slots = other.slots.index_rows(rows)
            self.backend.select_rows(rows)
            self.memory_tracker.set_resident(self.index, self.slots.kv_bytes)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows: keys, values, positions and score together; as of `LayerCache`."""
        self._drop_stack()
        if self.slots is not None:
            self.slots.select_rows(rows)
            self.backend.select_rows(rows)
            self._count_bytes()
        if self.layer_slots is not None:
            self.layer_slots.select_rows(rows, same_prompts=same_prompts)
        self.statistics.select_rows(rows)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in rows.tolist()] if self.first_eviction else []
            if self.retained_attention is not None:
                self.retained_attention = self.retained_attention[rows.to(self.retained_attention.device)]
            if self.failed is not None:
                self.failed = self.failed[rows.to(self.failed.device)]

    def kept_positions(self, rows: slice = slice(None)) -> list[list[list[int]]]:
        """Position ids of the slots held, per batch row and kv head, ascending (in mask mode: of visible slots)."""
        if self.slots is None:
            raise CacheError("this layer has not seen a prompt yet")
        positions = self.slots.visible_positions()[rows].tolist()
        return [[sorted(p for p in head if p >= 0) for head in row] for row in positions]
