"""The slots of one layer: new tokens are stored in them, rows of them chosen, their bytes counted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.cache_config import CacheConfig
from kvexp.core.eviction_backend import make_backend
from kvexp.core.memory_tracker import MemoryTracker
from kvexp.core.method import checked
from kvexp.core.quantized_slots import QuantizedSlots, settled
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.errors import CacheError


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
                    "forward did not tell: make the cache after kvexp.models.patch_model(model)"
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
