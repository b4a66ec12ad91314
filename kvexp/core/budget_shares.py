"""How a budget is shared out over layers and heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvexp.core.budget import Budget, CakeLayers, LayerBudgets, PyramidLayers, floor_share
from kvexp.core.method import Method
from kvexp.core.slots import INT64_MAX, INT64_MIN, order_key
from kvexp.core.statistics import HeadScores
from kvexp.util import ConfigError

# How a run shares its budget out over layers, and the layers of one cache that wait for it at the prompt's end.


class WaitingLayer(Protocol):
    """A layer whose eviction waits for its budget; `index`: its number."""

    index: int

    def take_budget(self, preferences: Sequence[Sequence[float]]) -> None:
        """Go on with the eviction; preferences [B][L]: of every row, those of all layers."""


class LayerAllocation:
    """Preferences of one cache's layers, until the last of `layers` has one and all can be told.

    how: by which slots are shared out. One for all layers of a cache.
    """

    def __init__(self, how: LayerBudgets, layers: int) -> None:
        self.how, self.layers = how, layers
        self._waiting: dict[int, tuple[WaitingLayer, list[float]]] = {}

    def reset(self) -> None:
        """Forget the layers that wait."""
        self._waiting = {}

    def add(self, layer: WaitingLayer, preference: list[float]) -> None:
        """A layer's preference, one number per batch row. With the last layer's, every layer takes its budget."""
        self._waiting[layer.index] = (layer, preference)
        if len(self._waiting) < self.layers:
            return
        told = [self._waiting[index] for index in range(self.layers)]
        self._waiting = {}
        rows = [list(row) for row in zip(*(each for _, each in told), strict=True)]
        for waiting, _ in told:
            waiting.take_budget(rows)


BY_NAME: dict[str, LayerBudgets] = {"uniform": LayerBudgets(), "pyramid": PyramidLayers(), "cake": CakeLayers()}


def layer_budgets_of(method: Method, budget: Budget) -> LayerBudgets:
    """How a budget is shared out over layers: as it says itself, else as the method's paper does.

    A method whose own way is of the kind that is asked for goes by its own settings.
    """
    own = method.layer_budgets
    if budget.layers is None:
        return BY_NAME["uniform"] if budget.among_all_layers else own
    asked = BY_NAME[budget.layers]
    return own if type(own) is type(asked) else asked


# How the slots of kv heads are shared out by their priorities (`Budget.heads`): per layer, or over all layers.


RANKED_BY = ("priority", "candidates", "protected")


def union_priority(priority: Tensor, *, logarithmic: bool = False) -> Tensor:
    """The mean over kv heads of priority [B, H, S], in every head: then all heads keep the same positions.

    logarithmic: the priority is a logarithm (`log_share` of `Method.priority_kind`), and the mean is of what it is the
    logarithm of; so it is the logarithm of the mean. A slot that one head ranks at -inf, as it does for NaN and behind
    a sliding window, is last for all.
    """
    if logarithmic:
        mean = priority.double().logsumexp(1, keepdim=True) - math.log(priority.shape[1])
        mean = mean.to(priority.dtype).masked_fill((priority == -torch.inf).any(1, keepdim=True), -torch.inf)
    else:
        mean = priority.mean(1, keepdim=True)
    return mean.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).expand_as(priority)


def slots_by_head(priority: Tensor, positions: Tensor, protected: Tensor, keep: list[int], floor: float) -> Tensor:
    """How many slots each head keeps, [B, H] int64, where the heads of a row keep H * keep[b] slots together.

    Every head has its protected slots, and of its best the `floor` share of keep[b], rounded down; what is left goes to
    the best of all heads. Equal priorities go to the newer position, then to the lower head. This is AdaKV's
    allocation (arXiv:2407.11550, algorithm 1) as in kvpress's AdaKVPress; the authors' release gives the best of all
    heads their share of 1 - floor instead, and so other numbers.

    priority [B, H, S] float32; positions [B, H, S], -1 for dead slots; protected [B, H, S] bool. Heads of several
    layers may stand side by side.
    """
    b, h, s = priority.shape
    key = order_key(priority.masked_fill(protected, torch.inf), positions).masked_fill_(positions < 0, INT64_MIN)
    # From here on a slot is its rank within its head: which of a head's slots stay follows from their number.
    key = key.sort(dim=-1, descending=True).values
    sure = protected.sum(-1)[..., None]
    least = torch.tensor([floor_share(floor, kept) for kept in keep], device=key.device)[:, None, None]
    rank = torch.arange(s, device=key.device)
    key = key.masked_fill((rank < torch.maximum(sure, least)) & (key != INT64_MIN), INT64_MAX)
    best = key.flatten(1).sort(dim=-1, descending=True, stable=True)
    most = torch.tensor([h * kept for kept in keep], device=key.device)[:, None]
    chosen = (torch.arange(h * s, device=key.device) < most) & (best.values != INT64_MIN)
    counts = torch.zeros(b, h, dtype=torch.int64, device=key.device)
    return counts.scatter_add_(1, best.indices // s, chosen.long())


@dataclass(frozen=True)
class StreamingHeads:
    """Which kv heads hold sinks and newest tokens whatever the method says: heads [B, H] bool; sinks: of each."""

    heads: Tensor
    sinks: int

    def of_rows(self, rows: Tensor) -> StreamingHeads:
        """Of these batch rows."""
        return replace(self, heads=self.heads[rows.to(self.heads.device)])


def retrieval_heads(budget: Budget, slots: int, length: int, new: int | None, scores: HeadScores) -> Tensor:
    """DuoAttention's retrieval heads, [L, H] bool: as many of the highest scores as the budget has room for.

    slots: of every head on average; at the end of the prompt a retrieval head takes its `length` tokens, every other
    one `budget.stream`. ConfigError where that is more than `slots`, and where the number of tokens to come, `new`, is
    None: retrieval heads have room for them too.
    """
    if new is None:
        raise ConfigError(
            "budget.heads=duo gives retrieval heads room for the whole answer: say max_new_tokens, how many tokens "
            "will be generated"
        )
    heads, (sinks, recent) = scores.scores.numel(), budget.stream
    if slots >= length:
        return scores.best(heads)
    if slots < sinks + recent:
        raise ConfigError(
            f"budget of {slots} slots cannot hold a streaming head's {sinks} sinks + {recent} newest tokens of "
            "budget.heads=duo; raise kv_ratio (or budget.tokens), or lower budget.stream_sinks or budget.stream_recent"
        )
    return scores.best((slots - sinks - recent) * heads // (length - sinks - recent))


@dataclass(frozen=True)
class RankedSlots:
    """What one layer's slots are evicted by, all [B, H, S]; hidden: see `Method.hidden_next_step`.

    threshold: what a priority must reach where slots are shared out by `Budget.threshold`, else None.
    """

    priority: Tensor
    positions: Tensor
    protected: Tensor
    hidden: Tensor | None
    threshold: float | None = None

    def share(self, keep: list[int], budget: Budget) -> Tensor:
        """How many slots each head keeps, [B, H], where a row's heads keep keep[b] on average; or by a threshold."""
        if self.threshold is None:
            return slots_by_head(self.priority, self.candidates, self.protected, keep, budget.floor)
        return ((self.candidates >= 0) & ((self.priority >= self.threshold) | self.protected)).sum(-1)

    @property
    def candidates(self) -> Tensor:
        """The positions that may stay, -1 for others."""
        return self.positions if self.hidden is None else self.positions.masked_fill(self.hidden, -1)


class ModelHeadBudgets:
    """Evictions of one cache at the end of a prompt, which wait until all layers have ranked their slots.

    layers: their number.
    """

    def __init__(self, layers: int, budget: Budget) -> None:
        self.layers, self.budget = layers, budget
        self._waiting: list[tuple[RankedSlots, Callable[[Tensor], None]]] = []

    @classmethod
    def of(cls, budget: Budget | None, layers: int) -> ModelHeadBudgets | None:
        """For a cache of so many layers under this budget; None where no layer waits for another."""
        return cls(layers, budget) if budget is not None and budget.heads == "global" else None

    def reset(self) -> None:
        """Forget evictions that wait."""
        self._waiting = []

    def add(self, ranked: RankedSlots, keep: list[int], evict: Callable[[Tensor], None]) -> None:
        """Let the next layer's eviction wait; with the last layer's, all are carried out.

        keep: slots that a row's heads keep on average, the same in all layers; evict: is called with how many slots
        [B, H] each head of the layer keeps.
        """
        self._waiting.append((ranked, evict))
        if len(self._waiting) < self.layers:
            return
        waiting, self._waiting = self._waiting, []
        home = waiting[0][0].priority.device
        priority, candidates, protected = (
            torch.cat([getattr(one, name).to(home) for one, _ in waiting], dim=1) for name in RANKED_BY
        )
        whole = RankedSlots(priority, candidates, protected, None)
        shares = whole.share(keep, self.budget).chunk(self.layers, dim=1)
        for (one, evict_layer), share in zip(waiting, shares, strict=True):
            evict_layer(share.to(one.priority.device))
