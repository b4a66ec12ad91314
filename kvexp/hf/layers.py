"""The layers of a cache that a model is given: kvexp's where every token is kept, and what other layers keep.

A layer with a sliding window or in chunks keeps its newest tokens, as without kvexp, and evicts nothing by score.
States of linear attention and convolution are transformers' own objects; they are picked, joined and handed out by row
together with the slots of the other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvexp.core import RoPE, SequenceState
from kvexp.core.attention import AttentionInputs, AttentionParams, Index, compute_attention
from kvexp.core.config import Sliding
from kvexp.core.eviction import LayerCache
from kvexp.core.second_pass import RepeatedChunk
from kvexp.hf.patch import LAYER_ATTR, LayerInput, check_patched
from kvexp.hf.traits import Layer, text_config, traits_of
from kvexp.util.errors import CacheError


@dataclass(frozen=True)
class _Read:
    """What the queries of one forward see of one cache's layer, for later layers that share its keys.

    keys [B, H, S, D], values [B, H, S, Dv]: slots held before the forward, then the new tokens; positions [B, H or 1,
    S]: their position ids; query_positions [B, Q]; in_order: whether no slots were held before.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    query_positions: Tensor
    in_order: bool

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        """Attention output [B, H * G, Q, Dv] of the newest queries [B, H * G, Q, D]."""
        heads = self.keys.shape[1]
        inputs = AttentionInputs(
            query=query.unflatten(1, (heads, query.shape[1] // heads)),
            keys=self.keys,
            values=self.values,
            positions=self.positions,
            query_positions=self.query_positions[:, -query.shape[2] :],
            params=params,
            in_column_order=self.in_order,
        )
        return compute_attention(inputs).flatten(1, 2)


class EvictionCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer as Hugging Face's `Cache` sees it. Lengths are columns seen, never slots held.

    state: what the layer holds, of kvexp's core or a `WindowLayer`; rope: the model's RoPE where cached keys are
    rotated (renumbered positions); layer_input: of the model, where the method scores tokens by it; kind: what the
    model says the layer sees. attended: how often the forward in progress has attended to its keys; shared: whether
    later layers of the model attend to them as well. latent: whether slots hold latents, as values, and their rotary
    keys, as keys; fresh: rotary keys and latents of the forward in progress until its attention has taken them, marked;
    index: what chooses among slots in that forward, None: nothing.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        state: LayerCache,
        rope: RoPE | None,
        model_config: Any,
        layer_input: LayerInput | None = None,
        kind: Layer = Layer("full"),  # noqa: B008  frozen
        shared: bool = False,
        latent: bool = False,
    ) -> None:
        super().__init__()
        self.state, self.rope, self.model_config, self.layer_input = state, rope, model_config, layer_input
        self.kind, self.shared, self.latent = kind, shared, latent
        self.fresh: tuple[Tensor, Tensor] | None = None
        self.index: Index | None = None
        self.is_sliding = isinstance(state, WindowLayer | JoinedWindows)
        self.is_initialized = True
        self.attended = 0
        self._reads: list[_Read] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the core makes its slots at the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys, tagged with this layer: the attention function stores them.

        Latents and their rotary keys come back as they are, for the module to expand, which no tag outlives: the
        attention function asks for them (`fresh`).
        """
        check_patched(self.model_config)
        hidden = None if self.layer_input is None else self.layer_input.take()
        if hidden is not None:
            self.state.take_input(hidden, self.layer_input.state)  # type: ignore[attr-defined, union-attr]
        self.attended, self._reads = 0, []
        keys = value_states if self.latent else key_states
        tagged = keys.view_as(keys)
        setattr(tagged, LAYER_ATTR, self)
        if self.latent:
            self.fresh = tagged, key_states
            return key_states, value_states
        return tagged, value_states

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        """Keep the index's keys [B, Q, n] of the new tokens with their latents; returns one: it is asked again."""
        assert self.fresh is not None
        rotary, latents = self.fresh
        self.fresh = rotary, torch.cat([latents, index_keys[:, None]], dim=-1)
        return index_keys[:, :1]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Store the new tokens and attend, as `LayerCache.forward`; a later layer that shares the keys only attends."""
        self.attended += 1
        if self.attended > 1:
            parts = query.split([len(read.query_positions) for read in self._reads])
            return torch.cat([read.attend(q, params) for read, q in zip(self._reads, parts, strict=True)])
        if params.rope is None and self.rope is not None:
            params = replace(params, rope=self.rope)
        if not self.shared:
            return self.state.forward(query, key, value, params, padding)
        states, before = states_of(self.state), self.state.seq_len
        held = [_held(state) for state in states] if before else []
        out = self.state.forward(query, key, value, params, padding)
        if before == 0:  # a prompt comes once, to all caches
            self._reads = [_read(states[0], None, key, value)]
        else:
            rows = getattr(self.state, "rows", [len(key)])
            parts = zip(states, held, key.split(rows), value.split(rows), strict=True)
            self._reads = [_read(*arguments) for arguments in parts]
        return out

    def end_forward(self) -> None:
        """Drop the keys and values that layers share within one forward."""
        self._reads = []

    def get_seq_length(self, *_: Any) -> int:
        return self.state.seq_len

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(Columns a mask must span, 0 columns of offset), for a forward of so many new tokens."""
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.state.seq_len + count, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.select_rows(beam_idx, same_prompts=True)


class HybridLayer(EvictionCacheLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer of attention, which kvexp holds, and of a state, which is transformers' own."""

    is_compileable = False

    def __init__(self, *given: Any, number_of_states: int = 1, **more: Any) -> None:
        EvictionCacheLayer.__init__(self, *given, **more)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *given: Any, **more: Any) -> None:
        """Make the states; the core makes its slots at the first forward."""
        if more:
            LinearAttentionLayer.lazy_initialization(self, **more)

    def reset(self) -> None:
        EvictionCacheLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        EvictionCacheLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


class WindowLayer:
    """A layer whose queries see a window or their chunk, a `LayerCache`: it keeps the newest tokens.

    kind: window (`size` newest tokens, its own included) or chunk (tokens whose position // size is the query's);
    layers: how many layers of the cache evict, by which a forward is known to be whole.
    """

    def __init__(self, kind: Layer, sequence: SequenceState, layers: int) -> None:
        assert kind.size is not None
        self.kind, self.size, self.sequence, self.layers = kind, kind.size, sequence, layers
        self.reset()

    def reset(self) -> None:
        """Drop everything held; the next forward starts a prompt."""
        self.seq_len = 0
        self.positions: Tensor | None = None  # [B, S] of what is held
        self.window = DynamicSlidingWindowLayer(sliding_window=self.size)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        return self.attend(*self.store(key, value, padding), query, params)

    def store(self, key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keep the new tokens; returns keys and values that they see, their positions [B, S], and the new ones' [B, Q].

        Arguments as of `forward`.
        """
        new = self.sequence.advance(self.seq_len, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.seq_len = self.sequence.seq_len
        keys, values = self.window.update(key, value)
        places = new if self.positions is None else torch.cat([self.positions, new], dim=1)
        self.positions = places[:, places.shape[1] - self.window.keys.shape[2] :]
        return keys, values, places, new

    def attend(
        self, keys: Tensor, values: Tensor, places: Tensor, new: Tensor, query: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attention output [B, H * G, Q, Dv]: query as of `forward`, the others as of `store`."""
        heads = keys.shape[1]
        inputs = AttentionInputs(
            query=query.unflatten(1, (heads, query.shape[1] // heads)),
            keys=keys,
            values=values,
            positions=places[:, None],
            query_positions=new,
            params=params,
            in_column_order=True,
            padded=self.padded,
        )
        out = _attend_in_chunks(inputs, self.size) if self.kind.kind == "chunk" else compute_attention(inputs)
        return out.flatten(1, 2)

    @property
    def padded(self) -> bool:
        """Whether padding may be among what is attended to."""
        return self.sequence.padded or not self.sequence.prompt_complete

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return self.numbers * self.window.keys.element_size() if self.numbers else 0

    @property
    def numbers(self) -> int:
        """How many numbers the keys and values held are."""
        held = (self.window.keys, self.window.values)
        return sum(tensor.numel() for tensor in held if isinstance(tensor, Tensor))

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows."""
        if self.positions is not None:
            rows = rows.to(self.positions.device)
            self.positions = self.positions[rows]
            self.window.keys, self.window.values = self.window.keys[rows], self.window.values[rows]

    @property
    def shareable(self) -> list[Tensor]:
        """Tensors that copies of this layer may share: none of them is ever written to."""
        held = (self.positions, self.window.keys, self.window.values)
        return [tensor for tensor in held if isinstance(tensor, Tensor)]


class RepeatedWindow(WindowLayer):
    """A window as a second pass over the prompt sees it: at the prompt's end, in forwards that store nothing.

    chunk: the forward in progress, as of `kvexp.core.second_pass`.
    """

    padded = True

    def __init__(self, window: WindowLayer) -> None:
        super().__init__(window.kind, window.sequence, window.layers)
        self.window, self.positions, self.seq_len = window.window, window.positions, window.seq_len
        self.chunk: RepeatedChunk | None = None

    def store(self, key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `WindowLayer.store`, of the rows of the chunk in progress; padding is known from its positions."""
        assert self.chunk is not None and self.positions is not None
        rows, fed = self.chunk.rows.to(key.device), self.chunk.positions.to(key.device)
        keys, values = (
            torch.cat([held[rows], new], dim=2) for held, new in ((self.window.keys, key), (self.window.values, value))
        )
        return keys, values, torch.cat([self.positions[rows], fed], dim=1), fed


def _attend_in_chunks(inputs: AttentionInputs, size: int) -> Tensor:
    """Attention output [B, H, G, Q, Dv] of queries that see the tokens of their chunk: `position // size` is equal."""
    queries, slots = inputs.query_positions, inputs.positions.shape[2]
    number = torch.where(queries < 0, -1, queries // size)
    out = inputs.values.new_zeros(*inputs.query.shape[:-1], inputs.values.shape[-1])
    for chunk in number.unique().tolist():
        if chunk < 0:
            continue  # padding
        in_chunk = number == chunk
        columns = in_chunk.any(0).nonzero()[:, 0]
        first, end = int(columns[0]), int(columns[-1]) + 1
        seen = slots - queries.shape[1] + end
        places = inputs.positions[:, :, :seen]
        chunk_inputs = replace(
            inputs,
            query=inputs.query[..., first:end, :],
            keys=inputs.keys[:, :, :seen],
            values=inputs.values[:, :, :seen],
            positions=torch.where((places >= 0) & (places // size == chunk), places, -1),
            query_positions=torch.where(in_chunk, queries, -1)[:, first:end],
            padded=True,
        )
        rows = in_chunk[:, None, None, first:end, None]
        out[..., first:end, :] = torch.where(rows, compute_attention(chunk_inputs), out[..., first:end, :])
    return out


class JoinedWindows:
    """One layer of several caches, as one `LayerCache`: `MultiLayer` of layers that evict nothing.

    states: this layer of each cache; rows: batch rows of each cache.
    """

    def __init__(self, states: list[WindowLayer], rows: list[int]) -> None:
        self.states, self.rows = states, rows

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, padding included."""
        return int(self.states[0].seq_len)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`: a prompt comes once, to all caches; later rows are of one cache after the other."""
        if self.seq_len == 0:
            stored = [state.store(key, value, padding) for state in self.states]
            return self.states[0].attend(*stored[0], query, params)
        parts = [x.split(self.rows) for x in (query, key, value)]
        masks = [None] * len(self.rows) if padding is None else padding.split(self.rows)
        outputs = []
        for state, q, k, v, mask in zip(self.states, *parts, masks, strict=True):
            if state.sequence.by_token:
                state.sequence.restart_chunk()
                tokens = zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True)
                outputs.append(torch.cat([state.forward(*token, params, mask) for token in tokens], dim=2))
            else:
                outputs.append(state.forward(q, k, v, params, mask))
        return torch.cat(outputs)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: the rows belong to several caches."""
        raise CacheError("caches that decode together keep their rows: pick rows of each cache (fork), then join those")

    def reset(self) -> None:
        """Always a CacheError: each cache is reset by itself."""
        raise CacheError("caches that decode together are reset one by one: call reset() of each")


class SplitLayer(JoinedWindows):
    """One layer of several caches, of which some evict in it and others keep its window, as one `LayerCache`.

    parts: indices of caches, and what joins this layer of them: each cache in one part; states, rows: of `parts`, by
    cache.
    """

    def __init__(self, parts: Sequence[tuple[list[int], Any]], rows: list[int]) -> None:
        by_member = {
            member: state for members, joined in parts for member, state in zip(members, joined.states, strict=True)
        }
        super().__init__([by_member[member] for member in range(len(rows))], rows)
        self.parts = parts

    def take_input(self, *inputs: Tensor) -> None:
        """Hand what this layer gets, as `EvictionLayer.take_input`, to the parts that evict."""
        for members, joined in self.parts:
            if hasattr(joined, "take_input"):
                parts = (x.split(self.rows) for x in inputs)
                of_members = (
                    [torch.cat([rows[member] for member in members]) for rows in parts] if self.seq_len else inputs
                )
                joined.take_input(*of_members)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `JoinedWindows.forward`; a prompt's output is the first part's, which the others' equal up to rounding."""
        if self.seq_len == 0:
            outputs = [joined.forward(query, key, value, params, padding) for _, joined in self.parts]
            first: Tensor = outputs[0]
            return first
        new = [x.split(self.rows) for x in (query, key, value)]
        masks = None if padding is None else padding.split(self.rows)
        by_member: dict[int, Tensor] = {}
        for members, joined in self.parts:
            q, k, v = (torch.cat([states[member] for member in members]) for states in new)
            mask = None if masks is None else torch.cat([masks[member] for member in members])
            sizes = [self.rows[member] for member in members]
            by_member |= zip(members, joined.forward(q, k, v, params, mask).split(sizes), strict=True)
        return torch.cat([by_member[member] for member in range(len(self.rows))])


def states_of(state: Any) -> list[Any]:
    """The layers that a joined one consists of; else the layer itself."""
    return list(getattr(state, "states", [state]))


def _held(state: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Copies of keys, values and position ids [B, H or 1, S] that a layer holds; None before its first forward."""
    if isinstance(state, WindowLayer):
        if state.positions is None:
            return None
        return state.window.keys, state.window.values, state.positions[:, None]
    slots = state.slots
    if slots is None:
        return None
    s = slots.length
    positions = slots.visible_positions()
    return slots.keys[:, :, :s].clone(), slots.values[:, :, :s].clone(), positions[:, :, :s].clone()


def _read(state: Any, held: tuple[Tensor, Tensor, Tensor] | None, key: Tensor, value: Tensor) -> _Read:
    """What the forward that has just ended saw of this layer: what was held before, and the new tokens."""
    if hasattr(state, "sequence"):
        new = state.sequence.positions(key.device)
    else:  # layers of one forward, for calibration say, count no tokens
        new = torch.arange(key.shape[2], device=key.device).expand(len(key), -1)
    if held is None:
        return _Read(key, value, new[:, None], new, in_order=True)
    keys, values, positions = held
    # Fast steps note the new token in all layers at once, in slots that it is not written to yet.
    positions = torch.where(positions < new[:, :1, None], positions, -1)
    fresh = new[:, None].expand(-1, positions.shape[1], -1)
    keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
    return _Read(keys, values, torch.cat([positions, fresh], dim=2), new, in_order=False)


# -- a whole cache's layers --------------------------------------------------------------------------------------------


def compose(
    model_config: Any,
    held: Sequence[LayerCache],
    sequence: SequenceState | None = None,
    ropes: Sequence[RoPE | None] | None = None,
    layer_input: LayerInput | None = None,
    sliding: Sliding = "auto",
) -> list[Any]:
    """The layers of a cache for this model: `held` where kvexp holds keys, else windows and transformers' own states.

    sequence: of the cache, by which windows know positions; None: a new one. ropes: of each layer that is held.
    sliding: as of `held_layers`.
    """
    traits = traits_of(model_config, sliding)
    stock = DynamicCache(config=text_config(model_config)).layers
    sequence = SequenceState() if sequence is None else sequence
    rest = dict(zip(traits.held, zip(held, ropes or [None] * len(held), strict=True), strict=True))
    layers: list[Any] = []
    for number, (kind, native) in enumerate(zip(traits.layers, stock, strict=True)):
        shared = number in traits.shared
        if number in rest:
            state, rope = rest[number]
            given = (state, rope, model_config, layer_input, kind, shared, traits.latent)
            hybrid = kind.kind == "hybrid"
            layers.append(
                HybridLayer(*given, number_of_states=native.number_of_states) if hybrid else EvictionCacheLayer(*given)
            )
        elif kind.kind in ("window", "chunk"):
            window = WindowLayer(kind, sequence, len(held))
            layers.append(EvictionCacheLayer(window, None, model_config, None, kind, shared, traits.latent))
        else:
            layers.append(native)
    return layers


def join(parts: Sequence[Any], held: Sequence[tuple[list[int], LayerCache]], rows: list[int]) -> Any:
    """One layer of several caches as a layer of one.

    parts: this layer of each; held: indices of caches that hold it, and their slots joined; the others keep its window.
    """
    first = parts[0]
    if not isinstance(first, EvictionCacheLayer):
        if not isinstance(first, LinearAttentionLayer):
            return first
        return _join_states(LinearAttentionLayer(first.number_of_states), parts)
    others = [member for member in range(len(parts)) if not any(member in members for members, _ in held)]
    if others:
        windows = JoinedWindows([parts[member].state for member in others], [rows[member] for member in others])
        held = [(others, windows), *held]
    state: LayerCache = held[0][1] if len(held) == 1 else SplitLayer(held, rows)
    rope = next((layer.rope for layer in parts if layer.rope is not None), None)
    inputs = next((layer.layer_input for layer in parts if layer.layer_input is not None), None)
    given = (state, rope, first.model_config, inputs, first.kind, first.shared, first.latent)
    if isinstance(first, HybridLayer):
        return _join_states(HybridLayer(*given, number_of_states=first.number_of_states), parts)
    return EvictionCacheLayer(*given)


STATES = ("conv_states", "recurrent_states")
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


def _join_states(whole: Any, parts: Sequence[Any]) -> Any:
    """Join the states of several caches into `whole`, of which the caches then hold views: they see what is written."""
    first = parts[0]
    _copy_flags(first, whole)
    for name in STATES:
        for index, state in getattr(first, name).items():
            if state is None or not first.has_previous_state[index]:
                continue
            by_layer = [getattr(layer, name)[index] for layer in parts]
            getattr(whole, name)[index] = together = torch.cat(by_layer)
            for layer, view in zip(parts, together.split([len(rows) for rows in by_layer]), strict=True):
                getattr(layer, name)[index] = view
    return whole


def hand_out(whole: Any, parts: Sequence[Any]) -> None:
    """Give each cache a copy of the states that a prompt, which came once, has left."""
    if not isinstance(whole, LinearAttentionLayer):
        return
    for layer in parts:
        _copy_flags(whole, layer)
        for name in STATES:
            states = getattr(whole, name).items()
            setattr(layer, name, {index: None if state is None else state.clone() for index, state in states})


def _copy_flags(source: Any, target: Any) -> None:
    for name in _FLAGS:
        setattr(target, name, dict(getattr(source, name)))
    target.device, target.dtype = source.device, source.dtype


def select_states(layer: Any, rows: Tensor) -> None:
    """Keep, repeat or reorder batch rows of a layer's states; nothing for a layer without."""
    if isinstance(layer, LinearAttentionLayer):
        for name in STATES:
            states = getattr(layer, name)
            for index, state in states.items():
                if state is not None:
                    states[index] = state.index_select(0, rows.to(state.device))


def _states(layer: Any) -> list[Tensor]:
    """A layer's states; none of a layer without."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    return [state for name in STATES for state in getattr(layer, name).values() if state is not None]


def state_bytes(layer: Any) -> int:
    """Bytes of a layer's states."""
    return sum(state.numel() * state.element_size() for state in _states(layer))


def state_numbers(layer: Any) -> int:
    """How many numbers a layer's states are."""
    return sum(state.numel() for state in _states(layer))
