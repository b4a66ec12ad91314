"""Decode steps as a CUDA graph: what hinders it, and inputs that stay in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvexp.core.config import CacheConfig
from kvexp.core.decode import cat_rows
from kvexp.core.decode_stack import StackedLayer, takes_step
from kvexp.core.method import reads
from kvexp.core.noise import Noise
from kvexp.core.slots import RaggedSlots

if TYPE_CHECKING:
    from kvexp.core.eviction import EvictionLayer


def capture_obstacle(config: CacheConfig) -> str | None:
    """Why no decode step of this configuration can be captured; None where steps can be, once the budget is full.

    A replay runs the same operators on the same addresses and shapes, without the host.
    """
    method, spec = config.method, config.score_spec
    if config.keeps_everything:
        return "every layer's choice is read by the host"
    if config.mode == "mask":
        return "a simulation drops nothing: shapes change from step to step"
    if config.mode == "compact":
        return "every eviction copies what is kept into new buffers"
    if config.quantization is not None:
        return "tokens that leave the window are quantised into new buffers"
    if spec is not None and spec.noise is not None and type(spec.noise) is not Noise:
        return "its noise is a recording that the host reads"
    if not takes_step(config):
        return "its layers are computed as prompts are, with shapes and schedules of the host"
    if method.needs.state_changes:
        return "its model's hidden states are noted by the host"
    if not config.plain_choice:
        return "slots that are spared, or chosen by chunks or values, are found in tables that grow with the text"
    if not config.only_grows and reads(method, "steps"):
        return "its priority reads the number of steps, which a graph would not count"
    return None


class ReplayableStep:
    """The coming decode steps of R rows of one or several caches that decode together, computed once, then replayed.

    All that a decode step leaves for the next one is written in place; what changes on the host from step to step
    (position ids, temperatures, offsets into the noise pool) is written into buffers of fixed address before the step.
    evicts: as of `evicting`.

    caches: the layers of each cache; stacks: per layer of the model, the stacks that take its step, of which all have
    taken a step before, as they are. positions [R, 1] int64: where a step reads the position ids of its tokens.
    """

    def __init__(self, caches: Sequence[Sequence[EvictionLayer]], stacks: Sequence[Sequence[StackedLayer]]) -> None:
        self.caches, self.stacks = caches, stacks
        first = [layers[0].require_slots().positions for layers in caches]
        self.positions = torch.zeros(sum(map(len, first)), 1, dtype=torch.int64, device=first[0].device)
        parts = self.positions.split([len(positions) for positions in first])
        self._rows = {id(layers[0].sequence): rows for layers, rows in zip(caches, parts, strict=True)}
        self._addresses = self.addresses()
        self.evicts = evicting(stacks)

    # -- a step of the host -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the forward of every cache, and put its position ids and other inputs where the step reads them."""
        for layers in self.caches:
            sequence = layers[0].sequence
            rows = self._rows[id(sequence)]
            sequence.start_forward(len(rows), 1, None, rows.device, len(layers))
            sequence.read_positions_from(rows)
        self._counts = [layer.step_counts for layer in self._layers]
        for stack in self._all:
            stack.hold_inputs(cat_rows([self._rows[id(state.sequence)] for state in stack.states]))

    def rewind(self) -> None:
        """Let the forward be computed once more: for the host no layer has taken part in it yet."""
        for layers in self.caches:
            layers[0].sequence.layers_done = 0
        for layer, counts in zip(self._layers, self._counts, strict=True):
            layer.rewind_step(counts)

    def count(self) -> None:
        """Count on the host what the layers count when they compute a step themselves, for one that was replayed."""
        for layers in self.caches:
            for layer in layers:
                layer.seq_len = layer.sequence.seq_len
                layer.begin_step()
                layer.end_step()

    def release(self) -> None:
        """End a step that has begun; one without `begin` then takes its inputs from the schedules."""
        for stack in self._all:
            stack.release_inputs()

    # -- what lives across steps --------------------------------------------------------------------------------------

    @property
    def _layers(self) -> Iterator[EvictionLayer]:
        return (layer for layers in self.caches for layer in layers)

    @property
    def _all(self) -> Iterator[StackedLayer]:
        return (stack for stacks in self.stacks for stack in stacks)

    def bookkeeping(self) -> list[Tensor]:
        """Position ids, scores, free slots and newest queries: what a step changes besides keys and values."""
        return [
            x
            for stack in self._all
            for x in (stack.slots.positions, stack.slots.score, stack.free_slots, *_queries(stack))
        ]

    def written(self) -> list[Tensor]:
        """Copies of the keys and values [R, H, 1, *] that a step has written; to be called before the next one.

        Where kv heads hold different numbers of slots: the whole buffers.
        """
        copies = []
        for stack in self._all:
            if isinstance(stack.slots, RaggedSlots):
                copies += [states.clone() for states in stack.slots.kv_buffers]
                continue
            newest = stack.slots.positions.argmax(-1)[..., None, None]
            for states in stack.slots.kv_buffers:
                copies.append(states.gather(2, newest.expand(-1, -1, -1, states.shape[-1])))
        return copies

    def addresses(self) -> dict[str, int]:
        """Name -> address of what one step leaves for the next, and the number of columns that it reads."""
        addresses: dict[str, int] = {}
        for number, stack in enumerate(self._all):
            buffers = [*stack.slots.kv_buffers, stack.slots.positions, stack.slots.score]
            named = zip(("keys", "values", "positions", "score"), buffers, strict=True)
            addresses |= {f"{name} of stack {number}": tensor.data_ptr() for name, tensor in named}
            addresses[f"free slots of stack {number}"] = stack.free_slots.data_ptr()
            addresses |= {f"queries {place} of stack {number}": x.data_ptr() for place, x in enumerate(_queries(stack))}
            addresses[f"columns of stack {number}"] = stack.columns(1)
        return addresses

    def is_current(self, stacks: Sequence[Sequence[StackedLayer]] | None) -> bool:
        """Whether the next step would be taken by the same stacks (`stacks`: those it would be taken by), in place."""
        if stacks is None or [[*map(id, layer)] for layer in stacks] != [[*map(id, layer)] for layer in self.stacks]:
            return False
        shared = any(state.require_slots().is_shared for stack in self._all for state in stack.states)
        return not shared and self.addresses() == self._addresses


def evicting(stacks: Sequence[Sequence[StackedLayer]]) -> tuple[bool, ...]:
    """Whether the next step of each stack of a layer ends with an eviction, which is so in all layers or in none."""
    return tuple(stack.eviction.is_due for stack in stacks[0])


def _queries(stack: StackedLayer) -> list[Tensor]:
    """The buffers of the newest queries of a stack's caches, where their methods look at them."""
    held = [state.statistics.last for state in stack.eviction.states]
    return [buffer for last in held if last is not None for buffer in last.buffers]
