"""The cache layer that keeps everything and attends to what a method chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.budget import PromptSizes
from kvexp.core.budget_resolution import LayerSlots, resolve_layer_slots
from kvexp.core.config import CacheConfig
from kvexp.core.eviction import MemoryTracker
from kvexp.core.quantized import bytes_at_16
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.method import PrefillKV, Retrieval, RetrievalQuery, Selection, StoredPrompt, left_aligned
from kvexp.retrieval.offload import BackgroundTask, OffloadConfig, OffloadedKV
from kvexp.util.errors import CacheError, ConfigError

# Statistics of one layer's selections, updated at every new token, for the rows of results.


class SelectionStats:
    """What the new tokens of one layer attended to.

    steps: new tokens so far; num_resident: per row, sinks + window + current token, summed over the steps. attended [B,
    H, N]: positions that the newest token attended to, -1: none. retained_attention [B]: the share of the first new
    token's exact attention that was attended to, mean over kv heads; None where the keys are not on the device.
    has_nan: whether an output held NaN.
    """

    def __init__(self, rows: int) -> None:
        self.steps = 0
        self.num_resident = [0] * rows
        self.attended: Tensor | None = None
        self.retained_attention: Tensor | None = None
        self.has_nan: Tensor | None = None

    def update(self, inputs: AttentionInputs, retrieval_query: RetrievalQuery, sinks: int, out: Tensor) -> None:
        """Count one new token per row, which attended to `inputs` with output `out`; sinks: their number."""
        memory = retrieval_query.memory
        self.steps += 1
        for row, (length, local) in enumerate(zip(memory.lengths, memory.config.local, strict=True)):
            self.num_resident[row] += min(length, sinks + local + 1)
        self.attended = inputs.positions
        bad = out.isnan().any()
        self.has_nan = bad if self.has_nan is None else self.has_nan | bad
        if self.steps == 1 and not memory.offloaded:
            exact = torch.softmax(
                retrieval_query.logits_of(memory.keys[:, :, : memory.length], past=True), dim=-1
            ).mean(2)
            held = exact.gather(-1, inputs.positions.clamp(min=0)).masked_fill(inputs.positions < 0, 0.0)
            self.retained_attention = held.sum(-1).mean(-1)

    def positions(self, memory: OffloadedKV) -> list[list[list[int]]]:
        """Positions that the newest token attended to, per row and kv head, ascending; at first, all that are held."""
        if self.attended is None:
            return [[list(range(length))] * memory.keys.shape[1] for length in memory.lengths]
        return [[sorted(p for p in head if p >= 0) for head in row] for row in self.attended.tolist()]

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: only among beams, which share `retained_attention`."""
        self.num_resident = [self.num_resident[i] for i in rows.tolist()]
        self.attended = self.attended[rows.to(self.attended.device)] if self.attended is not None else None
        if self.retained_attention is not None and not same_prompts:
            self.retained_attention = self.retained_attention[rows.to(self.retained_attention.device)]


# The cache of one layer under a retrieval method: all tokens are kept, each new token attends to a selection.


@dataclass
class LayerGroup:
    """The layers of one cache, so that each can prefetch for the next; calibration: as of `PrefillKV`."""

    calibration: Any = None
    # By index; weak, or each layer would hold the others until Python looks for cycles, and all tokens with them.
    states: WeakValueDictionary[int, RetrievalLayer] = field(default_factory=WeakValueDictionary)


class RetrievalLayer:
    """One layer's cache under a retrieval method, a `LayerCache`; slot = position in every batch row."""

    def __init__(
        self,
        config: CacheConfig,
        index: int,
        layers: int,
        sequence: SequenceState,
        memory_tracker: MemoryTracker,
        group: LayerGroup,
    ) -> None:
        self.config, self.index, self.layers = config, index, layers
        self.sequence, self.memory_tracker, self.group = sequence, memory_tracker, group
        group.states[index] = self
        self.reset()

    @property
    def method(self) -> Retrieval:
        assert isinstance(self.config.method, Retrieval)
        return self.config.method

    def reset(self) -> None:
        """Drop everything held; the next forward starts a prompt."""
        self.slots: Slots | None = None  # the prompt, until it ends
        self.memory: OffloadedKV | None = None
        self.kv_index = KVIndex()
        self.layer_slots: LayerSlots | None = None
        self.selection_stats = SelectionStats(0)
        self.seq_len = 0
        self.first_eviction: list[int | None] = []  # per row: decode tokens seen when a token was first not attended to
        self.index_job: BackgroundTask | None = None
        self.memory_tracker.set_resident(self.index, 0)

    def require_memory(self) -> OffloadedKV:
        """The tokens held; CacheError before the prompt has ended."""
        if self.memory is None:
            raise CacheError("this layer has not seen a prompt yet")
        return self.memory

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        sequence = self.sequence
        query, key, value, positions = self._advance(query, key, value, padding)
        if sequence.in_prompt:
            prompt = self._store(query, key, value, params, positions)
            out = self.method.attend_prompt(prompt.inputs, prompt.index, prompt.local, prompt.counts)
            self._finish_prefill(prompt.inputs)
        else:
            if self.index == 0 and padding is not None and not bool(padding[:, -key.shape[2] :].all()):
                raise CacheError("a new token is masked out: every row takes a real token at every step")
            tokens = (x.split(1, dim=-2) for x in (query, key, value))
            steps = zip(*tokens, positions.split(1, dim=1), strict=True)
            out = torch.cat([self._step(q, k, v, params, p) for q, k, v, p in steps], dim=3)
        self._report()
        sequence.layer_done()
        return out.flatten(1, 2)

    def store_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> StoredPrompt:
        """As `forward` of a prompt whose output another cache computes, up to what its method observes.

        Then come `Retrieval.observe_prompts`, for all caches of one class, and `index_prompt`.
        """
        query, key, value, positions = self._advance(query, key, value, padding)
        return self._store(query, key, value, params, positions)

    def index_prompt(self, prompt: StoredPrompt) -> None:
        """Index a prompt that has been stored and observed."""
        self._finish_prefill(prompt.inputs)
        self._report()
        self.sequence.layer_done()

    def _advance(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Count new tokens: query [B, H, G, Q, D], key, value, and position ids [B, Q]; H heads that select apart."""
        groups = query.shape[1] // key.shape[1]
        positions = self.sequence.advance(self.seq_len, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.seq_len = self.sequence.seq_len
        if self.method.per_query_head and groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return query.unflatten(1, (key.shape[1], -1)), key, value, positions

    def _report(self) -> None:
        """Tell the memory tracker the bytes on the device and offloaded."""
        if self.memory is None:
            assert self.slots is not None
            self.memory_tracker.set_resident(self.index, self.slots.kv_bytes, self.slots.take_peak_bytes())
            return
        near = self.memory.resident_bytes + self.countable_index.nbytes(ship=False)
        far = self.memory.host_bytes + self.countable_index.nbytes(ship=True)
        away = self.method.offload
        self.memory_tracker.set_resident(self.index, near if away else near + far)
        self.memory_tracker.layer_offloaded_bytes[self.index] = far if away else 0

    @property
    def bytes_at_16(self) -> int | None:
        """Bytes on the device with floating-point numbers as 16 bits each; None before the prompt has ended.

        Codes and other whole numbers of the index count as they are, as in `MemoryTracker`.
        """
        if self.memory is None:
            return None
        half = self.memory.keys.element_size() / 2
        held, tensors = self.memory.resident_bytes, self.countable_index.tensors(ship=False)
        if not self.method.offload:
            held, tensors = held + self.memory.host_bytes, [*tensors, *self.countable_index.tensors(ship=True)]
        return round(held / half) + bytes_at_16(*tensors)

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def _store(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, positions: Tensor
    ) -> StoredPrompt:
        """Store a prompt, or a chunk of it, and resolve its rows' budgets at its end.

        Arguments as `_advance` returns them.
        """
        sequence, method = self.sequence, self.method
        if self.slots is None:
            if method.whole_prompt and not sequence.prompt_complete:
                raise ConfigError(
                    f"{method.name} reads a prompt in one forward: leave generation.prefill_chunk at null"
                )
            self.slots = Slots.empty_like(key, value, masked=False)
        slots = self.slots
        slots.append(key, value, positions, torch.zeros(key.shape[:3], device=key.device))
        if sequence.prompt_complete:
            assert sequence.prompt_columns is not None
            lengths, new = list(sequence.prompt_lengths), sequence.max_new_tokens
            prompts = PromptSizes(lengths, sequence.prompt_columns, new, self.layers)
            self.layer_slots = resolve_layer_slots(self.config, prompts, self.index, key.device)
        inputs = AttentionInputs(
            query=query,
            keys=slots.keys[:, :, : slots.length],
            values=slots.values[:, :, : slots.length],
            positions=slots.broadcast_positions(),
            query_positions=positions,
            params=params,
            in_column_order=True,
            padded=sequence.padded or not sequence.prompt_complete,
        )
        allowed = self.layer_slots
        local, counts = ([], []) if allowed is None else (allowed.recent, self._num_to_select())
        return StoredPrompt(inputs, self.kv_index, local, counts)

    def _num_to_select(self) -> list[int]:
        """How many slots the method selects, per row: the budget without sinks, window and current token."""
        assert self.layer_slots is not None
        pairs = zip(self.layer_slots.kept, self.layer_slots.recent, strict=True)
        return [max(0, kept - recent - self.method.n_sinks) for kept, recent in pairs]

    def _finish_prefill(self, inputs: AttentionInputs) -> None:
        """Offload the prompt and index it, if it has ended."""
        sequence, method, lengths = self.sequence, self.method, list(self.sequence.prompt_lengths)
        if not sequence.prompt_complete:
            return
        assert self.layer_slots is not None and self.slots is not None
        room = max(lengths) + (sequence.max_new_tokens or 0)
        layout = OffloadConfig(method.n_sinks, self.layer_slots.recent, room, method.offload, method.cache)
        memory = OffloadedKV(inputs.keys, inputs.values, lengths, layout)
        self.memory_tracker.set_resident(self.index, memory.resident_bytes, memory.resident_bytes + self.slots.kv_bytes)
        self.memory, self.slots, self.selection_stats = memory, None, SelectionStats(len(lengths))
        on_host = method.indexes_on_host
        prompt = PrefillKV(
            keys=memory.keys if on_host else left_aligned(inputs.keys, lengths),
            values=memory.values if on_host else left_aligned(inputs.values, lengths),
            lengths=lengths,
            recent=self.layer_slots.recent,
            capacity=memory.keys.shape[2],
            host_device=memory.keys.device if method.offload else None,
            device=memory.device,
            params=inputs.params,
            beams=sequence.num_beams,
            calibration=self.group.calibration,
        )
        kv_index = self.kv_index
        kv_index.copy_streams = memory.copy_streams

        def build() -> None:
            if on_host:
                memory.flush()
            method.build(kv_index, prompt)

        # On a CPU the index is built at the second token, so that the time to the first token is that of the prompt
        # alone.
        self.index_job = BackgroundTask(build, run_async=on_host and memory.offloaded)
        if not on_host:
            self.index_job.wait()

    # -- new tokens ---------------------------------------------------------------------------------------------------

    def _step(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, positions: Tensor) -> Tensor:
        """One new token: query [B, H, G, 1, D], key [B, H, 1, D], positions [B, 1] -> [B, H, G, 1, Dv]."""
        memory, method, kv_index = self.require_memory(), self.method, self.wait_for_index()
        assert self.layer_slots is not None
        following = self.group.states[(self.index + 1) % self.layers]
        if following.index_job is not None and following.index_job.done:
            following.kv_index.prefetch()
        new_positions = list(memory.lengths)
        memory.add(key, value)
        method.extend(kv_index, key[:, :, 0], value[:, :, 0], new_positions)
        retrieval_query = RetrievalQuery.of(
            query[..., 0, :], positions[:, 0], self._num_to_select(), kv_index, memory, params
        )
        everything = retrieval_query.all_candidates()
        chosen = method.select(retrieval_query) if everything is None else Selection(everything)
        keys, values, attended, complete = memory.read(chosen.slots)
        inputs = AttentionInputs(
            query=query,
            keys=keys,
            values=values,
            positions=attended,
            query_positions=positions,
            params=params,
            all_visible=complete and params.sliding_window is None,
        )
        out = method.attend(inputs, retrieval_query, chosen)
        self.selection_stats.update(inputs, retrieval_query, method.n_sinks, out)
        self.first_eviction = self.sequence.first_eviction_steps(
            self.first_eviction, [k + 1 for k in self.layer_slots.kept]
        )
        return out

    @property
    def countable_index(self) -> KVIndex:
        """The index, or an empty one while another thread may still build it, so that byte counts are deterministic."""
        return self.kv_index if self.index_job is None or self.index_job.joined else KVIndex()

    def wait_for_index(self) -> KVIndex:
        """The index, after waiting until it is built."""
        if self.index_job is not None:
            self.index_job.wait()
        return self.kv_index

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def heavy_buffers(self) -> list[Any]:
        """The large buffers: a copy of the cache leaves them out, and `copy_rows_from` copies wanted rows of them."""
        self.wait_for_index()
        return [self.slots, self.memory, self.kv_index]

    def copy_rows_from(self, other: RetrievalLayer, rows: Tensor) -> None:
        """Copy the tokens and index of batch rows `rows` [n] from another layer, which stays as it is."""
        self.group.states[self.index] = self  # copied with the rest of the cache, the group knows the originals
        self.slots = other.slots.index_rows(rows) if other.slots is not None else None
        self.memory = other.memory.index_rows(rows) if other.memory is not None else None
        self.kv_index = other.kv_index.index_rows(rows)
        self._report()

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows: tokens, index and bookkeeping together."""
        chosen = rows.tolist()
        if self.slots is not None:
            self.slots.select_rows(rows)
        if self.memory is not None and chosen != list(range(len(self.memory.lengths))):
            self.wait_for_index()
            self.memory, self.kv_index = self.memory.index_rows(rows), self.kv_index.index_rows(rows)
            self._report()
        if self.layer_slots is not None:
            self.layer_slots.select_rows(rows, same_prompts=same_prompts)
        self.selection_stats.select_rows(rows, same_prompts=same_prompts)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in chosen] if self.first_eviction else []

    @property
    def retained_attention(self) -> Tensor | None:
        """As of `SelectionStats`, [B]; None before the first new token."""
        return self.selection_stats.retained_attention

    def kept_positions(self, rows: slice = slice(None)) -> list[list[list[int]]]:
        """Position ids that the newest token attended to, per batch row and kv head, ascending.

        Before the first new token: all positions of the prompt.
        """
        return self.selection_stats.positions(self.require_memory())[rows]


def share_prompt(
    layers: Sequence[RetrievalLayer],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    padding: Tensor | None,
) -> None:
    """One layer of several caches stores and indexes a prompt whose output is computed elsewhere; see `forward`."""
    by_class: dict[type[Retrieval], list[tuple[RetrievalLayer, StoredPrompt]]] = {}
    for layer in layers:
        stored = layer.store_prompt(query, key, value, params, padding)
        by_class.setdefault(type(layer.method), []).append((layer, stored))
    for kind, members in by_class.items():
        kind.observe_prompts([(layer.method, prompt) for layer, prompt in members])
        for layer, prompt in members:
            layer.index_prompt(prompt)


# What retrieval cost a sample: `retrieval` in every row of results.


def retrieval_stats(states: Sequence[Any], rows: Sequence[int]) -> dict[str, Any] | None:
    """Statistics of one sample's batch rows over all layers; None for methods that evict.

    attended: keys per kv head and new token, mean. offloaded_bytes: kept off the device. moved_bytes: everything that
    crossed either way, fetched_bytes of it to the device; on a CPU what would cross. search_share: what the choice
    reads per step over the size of the keys, in the papers' accounting (codes of m * b bits, keys of 16 bits a
    component). cache_hit_rate: of the (kv head, token) pairs chosen, those found in the block cache. kmeans_iterations:
    mean. notes: fallbacks in plain words.
    """
    layers = [state for state in states if isinstance(state, RetrievalLayer) and state.memory is not None]
    if not layers:
        return None
    memories, method = [layer.require_memory() for layer in layers], layers[0].method
    dim = memories[0].keys.shape[3]
    traffic = [memory.traffic[row] for memory in memories for row in rows]
    steps = sum(layer.selection_stats.steps for layer in layers) * len(rows)
    near = sum(layer.selection_stats.num_resident[row] for layer in layers for row in rows)
    lookups, hits = sum(t.lookups for t in traffic), sum(t.hits for t in traffic)
    away = sum(memory.host_bytes for memory in memories)
    away += sum(layer.countable_index.nbytes(ship=True) for layer in layers)
    iterations = _noted(layers, "kmeans_iterations", rows)
    notes = []
    if any(_noted(layers, "exact", rows)):
        notes.append("no more tokens to cluster than centroids: searched exactly")
    if not all(layer.require_memory().pinned and layer.countable_index.pinned for layer in layers):
        notes.append("no more memory could be pinned: ordinary memory was used, copies wait for each other")
    return {
        "attended": (near + lookups / memories[0].keys.shape[1]) / steps if steps else None,
        "offloaded_bytes": away * len(rows) // len(memories[0].lengths) if method.offload else 0,
        "moved_bytes": sum(t.d2h + t.h2d for t in traffic),
        "fetched_bytes": sum(t.h2d for t in traffic),
        "search_share": method.index_bits_per_token(dim) / (16 * dim),
        "cache_hit_rate": hits / lookups if lookups and memories[0].cache is not None else None,
        "kmeans_iterations": sum(iterations) / len(iterations) if iterations else None,
        "notes": notes,
    }


def _noted(layers: list[RetrievalLayer], name: str, rows: Sequence[int]) -> list[Any]:
    """The notes called `name` of these batch rows in all layers' indices, as one list."""
    notes = [layer.countable_index.notes.get(name) for layer in layers]
    return [values[row] for values in notes if values is not None for row in rows]
