"""Several caches over one prompt: computed once, observed by every method, decoded as rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvexp.core import EvictionLayer
from kvexp.core.attention import AttentionParams
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.decode.fast_step import StackedLayer, can_fast_decode
from kvexp.core.decode.noised_attention import stack_order
from kvexp.core.observe.accumulate import PromptSums
from kvexp.core.slots import Slots
from kvexp.errors import CacheError, ConfigError
from kvexp.models.cache import EvictionCache, EvictionCacheLayer
from kvexp.retrieval.retrieval_layer import RetrievalLayer, share_prompt

State = EvictionLayer | RetrievalLayer
MAX_PAD_BYTES = 8 << 20  # about what a step of another stack takes to read on a CPU: half a millisecond


class FastStepGroup:
    """The caches that take a decode step together: those of which every layer can take the fast step.

    states: the layers of each cache. eligible: indices of these caches, as of the step in progress.
    """

    def __init__(self, states: list[list[State]]) -> None:
        self.states = states
        self.eligible: list[int] = []
        self._buffers: dict[tuple[int, ...], CrossLayerBuffers] = {}

    def refresh(self, query: Tensor, padding: Tensor | None) -> None:
        """Find the eligible caches; called at a decode step's first layer, so that all its layers stack the same ones.

        query [R, H * G, 1, D]; padding as of `LayerCache.forward`.
        """
        eligible = [
            i
            for i, layers in enumerate(self.states)
            if all(_can_fast_decode(state, query, padding) for state in layers)
        ]
        if eligible != self.eligible:
            self.eligible = eligible
            self._buffers = {}

    def buffers(self, members: list[int]) -> CrossLayerBuffers:
        """The buffers that all layers of the stack of caches `members` (indices) share; made at the first call."""
        return self._buffers.setdefault(tuple(members), CrossLayerBuffers(len(self.states[0])))


def _can_fast_decode(state: State, query: Tensor, padding: Tensor | None) -> bool:
    """Whether one layer of a cache can take the fast step with others.

    No layer of a retrieval method can, and none whose heads hold different numbers of slots: that one takes the fast
    step by itself.
    """
    if not isinstance(state, EvictionLayer) or state.config.is_ragged:
        return False
    return can_fast_decode(state, query, padding)


class MultiLayer:
    """One layer of several caches, as one `LayerCache`.

    states: this layer of each cache; rows: batch rows of each cache. A prompt comes once, to caches of equally many
    rows, and is stored by every cache. Later forwards have the rows of the first cache, then those of the second …
    """

    def __init__(self, states: list[State], rows: list[int], fast_group: FastStepGroup) -> None:
        self.states, self.rows, self.fast_group = states, rows, fast_group
        self._eligible: list[int] = []
        self._stacks: list[tuple[list[int], StackedLayer]] = []

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, padding included."""
        return self.states[0].seq_len

    def take_input(self, hidden: Tensor) -> None:
        """Hand what this layer gets [rows, Q, n] to the caches whose methods score tokens by it."""
        parts = [hidden] * len(self.states) if self.seq_len == 0 else hidden.split(self.rows)
        for state, part in zip(self.states, parts, strict=True):
            if isinstance(state, EvictionLayer):
                state.take_input(part)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        if self.seq_len == 0:
            return self._prompt(query, key, value, params, padding)
        parts = [x.split(self.rows) for x in (query, key, value)]
        outputs: dict[int, Tensor] = {}
        for members, stack in self._stacked(query, padding):
            q, k, v = (torch.cat([part[member] for member in members]) for part in parts)
            sizes = [self.rows[member] for member in members]
            outputs |= zip(members, stack.forward(q, k, v, params).split(sizes), strict=True)
        for member, state in enumerate(self.states):
            if member not in outputs:
                mask = None if padding is None else padding.split(self.rows)[member]
                q, k, v = (part[member] for part in parts)
                outputs[member] = state.forward(q, k, v, params, mask)
        return torch.cat([outputs[member] for member in range(len(self.states))])

    def _stacked(self, query: Tensor, padding: Tensor | None) -> list[tuple[list[int], StackedLayer]]:
        """The stacks of caches that take this step together, as pairs (indices of the caches, their stacked layer).

        Made anew when other caches are eligible. Caches of renumbered positions have stacks of their own.
        """
        if self.states[0].index == 0:
            self.fast_group.refresh(query, padding)
        eligible = self.fast_group.eligible
        if eligible != self._eligible:
            slots = {i: state for i in eligible if isinstance(state := self.states[i], EvictionLayer)}
            apart = [[i for i in eligible if (slots[i].config.renumbered) == moved] for moved in (False, True)]
            several = [
                members
                for some in apart
                for members in bin_by_length({i: slots[i].require_slots() for i in some})
                if len(members) > 1
            ]
            ordered = [sorted(members, key=lambda i: stack_order(slots[i])) for members in several]
            buffers = self.fast_group.buffers
            self._stacks = [
                (members, StackedLayer([slots[i] for i in members], buffers(members))) for members in ordered
            ]
            self._eligible = eligible
        return self._stacks

    @property
    def decode_stacks(self) -> list[StackedLayer] | None:
        """As `EvictionLayer.decode_stacks`, of all caches; None where one of them takes another step."""
        together = {member for members, _ in self._stacks for member in members}
        stacks = [stack for _, stack in self._stacks]
        for member, state in enumerate(self.states):
            if not isinstance(state, EvictionLayer) or not state.is_steady:
                return None
            if member not in together:
                own = state.decode_stacks
                if own is None:
                    return None
                stacks += own
        return stacks

    def _prompt(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """The prompt's forward: attend once, then let every cache store and observe it; see `LayerCache.forward`."""
        slots = [state for state in self.states if isinstance(state, EvictionLayer)]
        retrieval = [state for state in self.states if isinstance(state, RetrievalLayer)]
        # Retrieval methods index the prompt in their own way, each in buffers of its own.
        alone = None if slots else retrieval.pop(0).forward(query, key, value, params, padding)
        share_prompt(retrieval, query, key, value, params, padding)
        if alone is not None:
            return alone
        # First the cache whose buffers have room for the tokens to come: no other needs the room.
        slots.sort(key=lambda state: not state.preallocated)
        first, *others = slots
        inputs = first.store(query, key, value, params, padding)
        out, _ = first.attend(inputs)
        for state in others:
            state.share_prefill(inputs, key, value, padding)
        seen: PromptSums = {}
        for state in slots:
            state.update(inputs, None, seen)
        return out.flatten(1, 2)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: the rows are those of several caches."""
        raise CacheError("caches that decode together keep their rows: pick rows of each cache (fork), then join those")

    def reset(self) -> None:
        """Always a CacheError: each cache is reset by itself."""
        raise CacheError("caches that decode together are reset one by one: call reset() of each")


def bin_by_length(held: dict[int, Slots]) -> list[list[int]]:
    """Indices of caches in groups of similar length, so that common buffers waste at most MAX_PAD_BYTES per layer.

    held: this layer's slots of each cache, by index.
    """
    return bin_by_bytes({member: (slots.length, slots.kv_bytes) for member, slots in held.items()})


def bin_by_bytes(held: dict[int, tuple[int, int]]) -> list[list[int]]:
    """`bin_by_length` from each cache's length and bytes of keys and values alone."""
    groups: list[list[int]] = []
    for member in sorted(held, key=lambda member: held[member][0], reverse=True):
        if groups:
            length, size = held[groups[-1][0]]
            spare = [size * (1 - held[i][0] / length) for i in (*groups[-1], member)]
            if sum(spare) <= MAX_PAD_BYTES:
                groups[-1].append(member)
                continue
        groups.append([member])
    return groups


class MultiMethodCache(Cache):  # type: ignore[misc]
    """Caches of one model, for a prefill of the same prompts in one forward and then for decoding together.

    rows: batch rows of every cache, or one number for all. All caches are new, or all have seen their prompt, which may
    be another one for each where forwards are given position ids. Each keeps and counts what it would alone.
    """

    def __init__(self, caches: list[EvictionCache], rows: int | Sequence[int]) -> None:
        sizes = [rows] * len(caches) if isinstance(rows, int) else list(rows)
        for cache in caches:
            if cache.config.method.modifies_prefill and cache.get_seq_length() == 0 and len(caches) > 1:
                raise ConfigError(f"{cache.config.method.name} computes prompts in its own way: prefill it apart")
            if cache.sequence.num_beams > 1:
                raise ConfigError("caches of beam searches cannot be decoded together: beams end at different times")
        self.caches = caches
        fast_group = FastStepGroup([[layer.state for layer in cache.layers] for cache in caches])
        layers = []
        for index in range(len(caches[0].layers)):
            each = [cache.layers[index] for cache in caches]
            rope = next((layer.rope for layer in each if layer.rope is not None), None)
            joined = MultiLayer([layer.state for layer in each], sizes, fast_group)
            told = next((layer.layer_input for layer in each if layer.layer_input is not None), None)
            layers.append(EvictionCacheLayer(joined, rope, each[0].model_config, told))
        super().__init__(layers=layers)

    def crop(self, *_: Any) -> None:
        """Always a CacheError: evicted tokens cannot come back."""
        self.caches[0].crop()
