"""Several caches over one prompt: computed once, observed by every method, decoded as rows of one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvexp.core import EvictionLayer
from kvexp.core.attention import AttentionParams
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.decode.fast_step import StackedLayer, ready
from kvexp.core.decode.noised_attention import turn
from kvexp.core.eviction_layer import Columns
from kvexp.core.slots import Slots
from kvexp.errors import CacheError, ConfigError
from kvexp.models.cache import EvictionCache, EvictionCacheLayer
from kvexp.retrieval.retrieval_layer import RetrievalState

State = EvictionLayer | RetrievalState
WASTE = 8 << 20  # about what a step of another stack takes to read on a CPU: half a millisecond


class FastStepGroup:
    """Which caches take a step together: those whose layers are all in the steady state. `states`: by cache."""

    def __init__(self, states: list[list[State]]) -> None:
        self.states = states
        self.able: list[int] = []
        self._ladders: dict[tuple[int, ...], CrossLayerBuffers] = {}

    def gather(self, query: Tensor, padding: Tensor | None) -> None:
        """At the first layer of a step, for all its layers: none may be stacked otherwise while it is under way."""
        able = [i for i, layers in enumerate(self.states) if all(_ready(state, query, padding) for state in layers)]
        if able != self.able:
            self.able = able
            self._ladders = {}

    def ladder(self, places: list[int]) -> CrossLayerBuffers:
        """That of the same caches in all layers."""
        return self._ladders.setdefault(tuple(places), CrossLayerBuffers(len(self.states[0])))


def _ready(state: State, query: Tensor, padding: Tensor | None) -> bool:
    return isinstance(state, EvictionLayer) and ready(state, query, padding)


class MultiLayer:
    """A `LayerCache`: one layer of several caches.

    A prompt comes as the rows of one cache, B of them, and goes to all. Of later forwards each cache has its own rows,
    one cache's behind the other's.
    """

    def __init__(self, states: list[State], rows: int, company: FastStepGroup) -> None:
        self.states, self.rows, self.company = states, rows, company
        self._able: list[int] = []
        self._stacks: list[tuple[list[int], StackedLayer]] = []

    @property
    def columns(self) -> int:
        return self.states[0].columns

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        if self.columns == 0:
            return self._prompt(query, key, value, geometry, padding)
        parts = [x.split(self.rows) for x in (query, key, value)]
        outputs: dict[int, Tensor] = {}
        for places, stack in self._stacked(query, padding):
            q, k, v = (torch.cat([part[place] for place in places]) for part in parts)
            outputs |= zip(places, stack.forward(q, k, v, geometry).split(self.rows), strict=True)
        for place, state in enumerate(self.states):
            if place not in outputs:
                mask = None if padding is None else padding.split(self.rows)[place]
                q, k, v = (part[place] for part in parts)
                outputs[place] = state.forward(q, k, v, geometry, mask)
        return torch.cat([outputs[place] for place in range(len(self.states))])

    def _stacked(self, query: Tensor, padding: Tensor | None) -> list[tuple[list[int], StackedLayer]]:
        """The caches that take this step together: those in the steady state, in stacks of similar size."""
        if self.states[0].index == 0:
            self.company.gather(query, padding)
        able = self.company.able
        if able != self._able:
            slots = {i: state for i in able if isinstance(state := self.states[i], EvictionLayer)}
            apart = [[i for i in able if (slots[i].config.renumbered) == moved] for moved in (False, True)]
            several = [
                places for some in apart for places in grouped({i: slots[i].held() for i in some}) if len(places) > 1
            ]
            ordered = [sorted(places, key=lambda i: turn(slots[i])) for places in several]
            ladder = self.company.ladder
            self._stacks = [(places, StackedLayer([slots[i] for i in places], ladder(places))) for places in ordered]
            self._able = able
        return self._stacks

    def _prompt(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        slots = [state for state in self.states if isinstance(state, EvictionLayer)]
        # Retrieval methods index the prompt in their own way: they attend for themselves, to the same result.
        outputs = [
            state.forward(query, key, value, geometry, padding)
            for state in self.states
            if isinstance(state, RetrievalState)
        ]
        if not slots:
            return outputs[0]
        slots.sort(key=lambda state: not state.grows)  # its buffers have room for more tokens, which no other needs
        first, *others = slots
        sight = first.look(query, key, value, geometry, padding)
        out, _ = first.attend(sight)
        for state in others:
            state.share(sight, key, value, padding)
        seen: Columns = {}
        for state in slots:
            state.finish(sight, None, seen)
        return out.flatten(1, 2)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Refused: the rows are those of several caches."""
        raise CacheError("caches that decode together keep their rows: pick rows of each cache (fork), then join those")

    def reset(self) -> None:
        """Refused, for the same reason."""
        raise CacheError("caches that decode together are reset one by one: call reset() of each")


def grouped(held: dict[int, Slots]) -> list[list[int]]:
    """Which of these slots to put into common buffers: as many together as waste no more than WASTE bytes a layer."""
    groups: list[list[int]] = []
    for place in sorted(held, key=lambda place: held[place].used, reverse=True):
        if groups:
            largest = held[groups[-1][0]]
            spare = [largest.kv_bytes * (1 - held[i].used / largest.used) for i in (*groups[-1], place)]
            if sum(spare) <= WASTE:
                groups[-1].append(place)
                continue
        groups.append([place])
    return groups


class MultiMethodCache(Cache):  # type: ignore[misc]
    """Caches of one model and one batch of B prompts, for a prefill in one forward and then for decoding together.

    All are new, or all have seen as many columns. Each behaves and counts as it would alone.
    """

    def __init__(self, caches: list[EvictionCache], rows: int) -> None:
        for cache in caches:
            if cache.config.method.alters_prompt and cache.get_seq_length() == 0 and len(caches) > 1:
                raise ConfigError(f"{cache.config.method.name} computes prompts in its own way: prefill it apart")
            if cache.timeline.num_beams > 1:
                raise ConfigError("caches of beam searches cannot be decoded together: beams end at different times")
        self.caches = caches
        company = FastStepGroup([[layer.state for layer in cache.layers] for cache in caches])
        layers = []
        for index in range(len(caches[0].layers)):
            each = [cache.layers[index] for cache in caches]
            rotation = next((layer.rotation for layer in each if layer.rotation is not None), None)
            joined = MultiLayer([layer.state for layer in each], rows, company)
            layers.append(EvictionCacheLayer(joined, rotation, each[0].model_config))
        super().__init__(layers=layers)

    def crop(self, *_: Any) -> None:
        """Refused, as by each cache."""
        self.caches[0].crop()
