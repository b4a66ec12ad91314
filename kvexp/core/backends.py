"""Three ways to drop slots that keep the same ones (overwrite, compact, mask), and one that records any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvexp.core.budget_resolution import LayerSlots
from kvexp.core.ranking import RankedSlots
from kvexp.core.slot_order import select_evict, select_keep
from kvexp.core.slots import RaggedSlots, Slots

# On a CPU, MKL sums the last columns of a product in another order where their number is no multiple of this.
CPU_WIDTH_MULTIPLE = 4
DEVICE_COLUMNS = 256  # by which the columns grow that are read on a GPU


class EvictionBackend:
    """How evicted slots are dropped, and where new tokens are written. This base appends new tokens and holds no state.

    at_budget: after the last eviction every row held as many tokens as its budget allows, so dead slots are those
    outside the budget. no_padding_slots: at_budget, and no slot was outside a row's budget.
    """

    at_budget = False
    no_padding_slots = False

    def next_slot(self) -> Tensor | None:
        """The slot [B, H, 1] that the next single token is written to; None: it is appended."""
        return None

    def reset_layout(self) -> None:
        """Give up the fixed layout, because several tokens come at once: they are appended, and the next eviction
        compacts.
        """

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        """Evict until every row holds `allowed.kept` tokens."""
        raise NotImplementedError

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""


class InPlace(EvictionBackend):
    """Mode overwrite: buffers of fixed size, in which a new token takes the slot of an evicted one.

    They hold the budget's slots and `every` free ones, the decode steps between evictions. New tokens fill the free
    slots; when none is left, the next eviction frees `every` slots again, and no other slot moves. Before that, slots
    are appended until a row exceeds its budget: the first eviction compacts once, into this layout. every=None: no
    eviction while decoding. There are as many slots as `stackable_width` says; those beyond the budget are never used.

    free_slots [B, H, every]: the slots of the next tokens, of which the first num_free are free; None without layout.
    out_of_budget [B, 1 or H, C] bool: slots beyond a row's or head's own budget.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.free_slots: Tensor | None = None
        self.out_of_budget: Tensor | None = None
        self.num_free = 0

    def next_slot(self) -> Tensor | None:
        """The next free slot [B, H, 1], taken from now on; None where none is left, or before the first eviction."""
        if self.free_slots is None or not self.num_free:
            return None
        taken = self.free_slots[..., :1]
        self.free_slots, self.num_free = self.free_slots.roll(-1, -1), self.num_free - 1
        return taken

    def has_slot(self, decode_steps: int) -> bool:
        """Whether the next token has a free slot, and the last free one is taken by a step that ends with an eviction.

        decode_steps: those taken so far. Several tokens at once may have led out of step.
        """
        if self.every is None or self.free_slots is None or self.out_of_budget is None:
            return False
        return self.num_free == self.every - decode_steps % self.every

    def count_step(self) -> None:
        """Count a token that took the first free slot, and the eviction that freed `every` again if it was the last."""
        assert self.every is not None
        self.num_free = self.num_free - 1 or self.every

    def set_free(self, free: Tensor) -> None:
        """Declare the slots [B, H, every] free: the next tokens are written to them."""
        self.free_slots, self.num_free = free, free.shape[-1]

    def reset_layout(self) -> None:
        self.free_slots = self.out_of_budget = None

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        """Free `every` slots of the fixed layout; before there is one, compact into it."""
        if (
            self.free_slots is not None
            and self.out_of_budget is not None
            and slots.length == self.out_of_budget.shape[-1]
        ):
            count = self.free_slots.shape[-1]
            self.set_free(select_evict(ranked.priority, slots.positions, ranked.protected, self.out_of_budget, count))
            slots.invalidate(self.free_slots)
            return
        if self.every is None:
            compact(slots, ranked, allowed, 0)
            return
        # Room for the longest row or head, even if it has not filled its budget yet.
        most = max(allowed.most)
        width = most + self.every
        device = slots.positions.device
        width = stackable_width(width, device) if allowed.by_head is None else ragged_width(width)
        compact(slots, ranked, allowed, width - min(most, slots.length), free=self.every)
        index = torch.arange(slots.length, device=slots.positions.device)
        first = allowed.kept_by_head[..., None]
        self.out_of_budget = index >= first + self.every
        free = first + index[: self.every]
        self.set_free(free.expand(-1, slots.positions.shape[1], -1).contiguous())

    def select_rows(self, rows: Tensor) -> None:
        if self.free_slots is not None and self.out_of_budget is not None:
            rows = rows.to(self.free_slots.device)
            self.free_slots, self.out_of_budget = self.free_slots[rows], self.out_of_budget[rows]


class Compacting(EvictionBackend):
    """Mode compact: copies the kept slots into new buffers, in order of position, at every eviction.

    Slower than `InPlace` and simpler, so tests compare `InPlace` with it.
    """

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        if ranked.kept is None:
            compact(slots, ranked, allowed, 0)
        elif not torch.equal(ranked.kept, slots.valid()):
            # Dead slots in front, so that every row's slots and the tokens to come lie one behind the other.
            order = ranked.positions.masked_fill(~ranked.kept, -1).argsort(dim=-1, stable=True)
            index = order[..., slots.length - int(ranked.kept.sum(-1).max()) :]
            slots.gather(index, ranked.kept.gather(-1, index), 0)


class Mask(EvictionBackend):
    """Mode mask, a simulation: nothing is dropped; evicted slots are no longer visible and their score stays -inf."""

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        score, positions = slots.score[:, :, : slots.length], slots.positions[:, :, : slots.length]
        assert slots.visible is not None
        visible, hidden = slots.visible[:, :, : slots.length], ranked.hidden
        candidates = score > -torch.inf
        if hidden is not None:
            candidates = candidates & ~hidden
        eligible, protected = positions.masked_fill(~candidates, -1), ranked.protected & candidates
        most = min(max(allowed.most), slots.length)
        index, keep = select_keep(ranked.priority, eligible, protected, allowed.kept_by_head, most)
        visible.zero_()
        visible.scatter_(-1, index, keep)
        stays = visible if hidden is None else visible | (hidden & (score > -torch.inf))
        score.masked_fill_(~stays, -torch.inf)


def compact(slots: Slots, ranked: RankedSlots, allowed: LayerSlots, reserve: int, free: int = 0) -> None:
    """Keep the first `allowed.kept_by_head` slots of every row, in order of position, with `reserve` dead ones behind.

    free: where heads keep different numbers, dead slots behind each head's own, for tokens to come. Heads that lose a
    slot are rewritten where the method does so.
    """
    max_keep = min(max(allowed.most), slots.length)
    positions = slots.positions[:, :, : slots.length]
    index, keep = select_keep(ranked.priority, positions, ranked.protected, allowed.kept_by_head, max_keep)
    if isinstance(slots, RaggedSlots):
        assert allowed.by_head is not None
        slots.pack(index, keep, reserve, [[kept + free for kept in heads] for heads in allowed.by_head])
        return
    rewritten = None if ranked.rewrite is None else ranked.rewrite(index, keep)
    loses = ((positions >= 0).sum(-1) > keep.sum(-1))[..., None]
    slots.gather(index, keep, reserve)
    if rewritten is not None:
        slots.rewrite(rewritten, keep & loses)


def stackable_width(slots: int, device: torch.device) -> int:
    """`slots`, on a CPU rounded up to a multiple of CPU_WIDTH_MULTIPLE.

    Then dead slots behind its own, which a cache has in a stack with a larger one, change no bit of its logits (nor of
    its probabilities, from 16 slots on: torch sums a softmax of fewer in another order).
    """
    return -(-slots // CPU_WIDTH_MULTIPLE) * CPU_WIDTH_MULTIPLE if device.type == "cpu" else slots


def growing_width(slots: int, device: torch.device) -> int:
    """Columns that a step of caches which grow reads, where `slots` are in use.

    On a GPU they are many, so that shapes stay the same for as many steps, which are captured together.
    """
    return stackable_width(slots, device) if device.type == "cpu" else -(-slots // DEVICE_COLUMNS) * DEVICE_COLUMNS


def ragged_width(slots: int) -> int:
    """`slots` rounded up to a multiple of 16: columns of positions and score where heads keep different numbers.

    Then a softmax, which torch sums by 16 on some processors, does not depend on the widest head of the batch.
    """
    return -(-slots // 16) * 16


@dataclass(frozen=True)
class SlotsBefore:
    """One layer's slots as an eviction found them, all [B, H, S], and which of them it kept.

    held: the slots that held a token; positions: their position ids, -1 elsewhere; priority, protected: by which the
    method had them evicted; kept: held after the eviction, wherever they lie then.
    """

    held: Tensor
    positions: Tensor
    priority: Tensor
    protected: Tensor
    kept: Tensor


class RecordingBackend(EvictionBackend):
    """The backend `inner`, which calls `on_evict` with the `SlotsBefore` of every eviction.

    reprioritise: the priority to evict by, made of the method's and of the slots held [B, H, S] bool; what is recorded
    remains the method's. None: the method's. Slots that a simulation hides for one step alone count as kept.
    """

    def __init__(
        self,
        inner: EvictionBackend,
        on_evict: Callable[[SlotsBefore], Any],
        reprioritise: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.inner, self.on_evict, self.reprioritise = inner, on_evict, reprioritise

    def next_slot(self) -> Tensor | None:
        return self.inner.next_slot()

    def reset_layout(self) -> None:
        self.inner.reset_layout()

    def select_rows(self, rows: Tensor) -> None:
        self.inner.select_rows(rows)

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        held = held_slots(slots)
        positions = slots.positions[:, :, : slots.length].masked_fill(~held, -1)
        if self.reprioritise is None:
            self.inner.evict(slots, ranked, allowed)
        else:
            self.inner.evict(slots, replace(ranked, priority=self.reprioritise(ranked.priority, held)), allowed)
        self.on_evict(SlotsBefore(held, positions, ranked.priority, ranked.protected, _still_held(slots, positions)))


def held_slots(slots: Slots) -> Tensor:
    """[B, H, S] bool: the slots that are not evicted; a simulation (mode=mask) marks the others by their score."""
    live = slots.valid()
    return live if slots.visible is None else live & (slots.score[:, :, : slots.length] > -torch.inf)


def _still_held(slots: Slots, positions: Tensor) -> Tensor:
    """[B, H, S] bool: of positions [B, H, S] that were held, those that are held now, wherever their slot is."""
    current = slots.positions[:, :, : slots.length].masked_fill(~held_slots(slots), -1)
    last = int(positions.max()) + 1
    table = torch.zeros(*current.shape[:2], last + 1, dtype=torch.bool, device=current.device)
    table.scatter_(-1, torch.where(current < 0, last, current), True)
    return table.gather(-1, positions.clamp(min=0)) & (positions >= 0)


def make_backend(name: str, every: int | None) -> EvictionBackend:
    """The backend of cache.mode=name; every: decode steps between evictions, None for never."""
    if name == "overwrite":
        return InPlace(every)
    return Compacting() if name == "compact" else Mask()
