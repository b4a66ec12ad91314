"""The order of slots: by priority, and of equal ones the newer is kept. Every choice of slots sorts or picks here."""

from __future__ import annotations

import torch
from torch import Tensor

INT32_MAX, INT64_MAX, INT64_MIN = (
    torch.iinfo(torch.int32).max,
    torch.iinfo(torch.int64).max,
    torch.iinfo(torch.int64).min,
)


def keep_order(priority: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
    """Slot indices [B, H, S] in the order of keeping: protected, then by priority, then newer first; dead slots last.

    priority [B, H, S] float32; positions [B, H, S], -1 for dead slots; protected [B, H, S] bool.
    """
    # A live slot of priority -inf is kept before a dead one: dead positions (-1) sort last among equals.
    return best_first(priority.masked_fill(protected, torch.inf).masked_fill(positions < 0, -torch.inf), positions)


def best_first(priority: Tensor, positions: Tensor) -> Tensor:
    """Slot indices [B, H, S] by priority, and of equal ones newer first; both [B, H, S]."""
    index = positions.argsort(dim=-1, descending=True, stable=True)
    return index.gather(-1, priority.gather(-1, index).argsort(dim=-1, descending=True, stable=True))


def select_keep(
    priority: Tensor, positions: Tensor, protected: Tensor, keep: Tensor, max_keep: int
) -> tuple[Tensor, Tensor]:
    """The first keep slots of every row or head in `keep_order`, sorted by position, padded to `max_keep`.

    priority, positions, protected: as of `keep_order`; keep [B] or [B, H]. Returns their indices [B, H, max_keep], and
    bool [B, H, max_keep]: False for padding.
    """
    index = keep_order(priority, positions, protected)[..., :max_keep]
    chosen = torch.arange(index.shape[-1], device=index.device) < keep.view(len(keep), -1, 1)
    chosen = chosen & (positions.gather(-1, index) >= 0)
    order = positions.gather(-1, index).masked_fill(~chosen, INT64_MAX).argsort(dim=-1, stable=True)
    return index.gather(-1, order), chosen.gather(-1, order)


def kept_mask(priority: Tensor, positions: Tensor, protected: Tensor, keep: Tensor, max_keep: int) -> Tensor:
    """The slots that `select_keep` returns, as bool [B, H, S], found without putting all slots in order.

    Arguments as of `select_keep`; no two live slots of a head have the same position.
    """
    if priority.dtype != torch.float32:
        index, chosen = select_keep(priority, positions, protected, keep, max_keep)
    else:
        key = order_key(priority.masked_fill(protected, torch.inf), positions)
        key = key.masked_fill_(positions < 0, INT64_MIN)
        # One row, or one budget: the order within the chosen does not matter.
        best, index = key.topk(max_keep, dim=-1, sorted=len(keep) > 1)
        chosen = best != INT64_MIN
        if len(keep) > 1:
            chosen = chosen & (torch.arange(max_keep, device=key.device) < keep[:, None, None])
    return torch.zeros_like(protected).scatter_(-1, index, chosen)


def order_key(priority: Tensor, positions: Tensor) -> Tensor:
    """One int64 per slot, in the order of priority (float32) and then position: the float's bits above, position below.

    NaN comes first, as torch sorts it; -0.0 is 0.0.
    """
    bits = (priority + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & INT32_MAX)).masked_fill_(priority.isnan(), INT32_MAX)
    return (ordered.to(torch.int64) << 32) | positions


def lowest(positions: Tensor, count: int) -> Tensor:
    """The slots [.., count] of the lowest positions [.., S], the lowest first."""
    return positions.argmin(-1, keepdim=True) if count == 1 else positions.argsort(dim=-1, stable=True)[..., :count]


def lowest_slots(priority: Tensor, positions: Tensor, count: int) -> Tensor:
    """The slots [.., H, count] of the lowest priorities, among equals of the lowest positions; both [.., H, S]."""
    if count == 1:
        higher = priority != priority.amin(dim=-1, keepdim=True)
        return lowest(positions.masked_fill(higher, INT64_MAX), 1)
    index = positions.argsort(dim=-1, stable=True)
    worst = priority.gather(-1, index).argsort(dim=-1, stable=True)
    return index.gather(-1, worst)[..., :count]


def select_evict(priority: Tensor, positions: Tensor, protected: Tensor, out_of_budget: Tensor, count: int) -> Tensor:
    """The `count` slots of every head to free: dead ones first, then the lowest priority, among equals the older.

    priority [B, H, S] float32; positions [B, H, S], -1 for dead slots; protected [B, H, S] bool; out_of_budget [B, 1
    or H, S] bool: slots that a row's budget does not reach, never freed. Returns indices [B, H, count].
    """
    priority = priority.masked_fill(positions < 0, -torch.inf).masked_fill(protected, torch.inf)
    priority = priority.masked_fill(out_of_budget.expand_as(priority), torch.inf)
    # A slot outside the budget can tie with a protected one at +inf, never win.
    return lowest_slots(priority, positions, count)


def topk_slots(priority: Tensor, candidates: Tensor, counts: list[int], max_keep: int) -> Tensor:
    """The candidates of highest relevance in every head, counts[i] in row i, ascending: [B, H, max_keep], -1: none.

    priority [B, H, S] float32, NaN last; candidates [B, 1 or H, S] bool; max_keep is at most S. For caches in which
    slot = position: among equals the newer slot is chosen.
    """
    place = torch.arange(priority.shape[-1], device=priority.device)
    key = order_key(priority.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), place)
    key = key.masked_fill_(~candidates, INT64_MIN)
    alike = min(counts) == max_keep  # then the order within the chosen does not matter
    top_keys = key.topk(max_keep, dim=-1, sorted=not alike).values
    if alike and key.device.type == "cpu" and max_keep and int(top_keys.amin()) != INT64_MIN:
        return (top_keys & 0xFFFFFFFF).sort(dim=-1).values
    counts_t = torch.tensor(counts, device=key.device)[:, None, None]
    chosen = (top_keys != INT64_MIN) & (torch.arange(max_keep, device=key.device) < counts_t)
    slots = torch.where(chosen, top_keys & 0xFFFFFFFF, INT64_MAX).sort(dim=-1).values
    return slots.masked_fill(slots == INT64_MAX, -1)
