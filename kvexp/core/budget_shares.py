"""How a budget is shared out over layers and heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from kvexp.core.attention import attention_probs
from kvexp.core.budget import Budget, floor_share
from kvexp.core.slot_order import INT64_MAX, INT64_MIN, order_key
from kvexp.core.statistics import HeadScores
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, Range, check_fields

if TYPE_CHECKING:
    from kvexp.core.method import Method
    from kvexp.core.ranking import RankedSlots

SMALL = 1e-10  # is added to a probability before its logarithm is taken, as in CAKE's release


@dataclass(frozen=True)
class LayerBudgets:
    """Equal budgets for all layers; the base of other ways to share a budget out.

    Every way gives whole numbers that add up to `layers` times the budget, row by row.

    window: how many of the prompt's newest queries are observed in every layer before slots are shared out, so that
    nothing is evicted before the last layer has seen the prompt; 0: the shares do not depend on the text.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def window(self) -> int:
        return 0

    def share(
        self, slots: int, length: int, least: int, layers: int, preferences: Sequence[float] | None = None
    ) -> list[int]:
        """Slots per kv head of every layer, from the first to the last; their sum is slots * layers.

        slots: the budget of a row; length: its real prompt tokens; least: the fewest slots that hold what the method
        protects; preferences: of every layer, where `window` is above 0; None: not known yet, and every layer has
        `slots`. A budget that holds the whole prompt, or nothing but what is protected, is not shared out.
        """
        if layers == 1 or slots >= length or slots <= least:
            return [slots] * layers
        return self._share(slots, length, least, layers, preferences)

    def _share(
        self, slots: int, length: int, least: int, layers: int, preferences: Sequence[float] | None
    ) -> list[int]:
        """Share out a budget with least < slots < length over several layers; arguments of `share`."""
        return [slots] * layers

    def preference(self, logits: Tensor, lengths: Sequence[int], sinks: Tensor | None = None) -> list[float]:
        """One number per batch row, to which a layer's share of the slots is proportional.

        logits [B, H, G, n, S] of the newest n queries, newest last, slots in the order of the prompt's columns; lengths
        [B]: real prompt tokens; sinks: of `attention_probs`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PyramidLayers(LayerBudgets):
    """PyramidKV: a layer's slots fall linearly with its depth, from the bottom layer to the top one.

    With m the slots that the method protects and k the budget, the top layer gets m + (k - m) / `beta` slots and the
    bottom one as much above k as that is below it, but not more than the prompt has tokens. Source: Cai et al.,
    arXiv:2406.02069, and the authors' code, in which m is the observing window and comes on top of the budget, and
    steps are whole numbers; here m is part of the budget, and the steps are rounded so that the sum stays.
    `form="kvpress"`: as in kvpress's PyramidKVPress, where the window counts within every share, and budgets whose
    top layer could not hold it are not shared out at all.
    """

    beta: Annotated[float, AtLeast(1)] = 20.0
    form: Literal["paper", "kvpress"] = "paper"

    def _share(
        self, slots: int, length: int, least: int, layers: int, preferences: Sequence[float] | None
    ) -> list[int]:
        outside = least if self.form == "paper" else 0
        mean, most = slots - outside, length - least
        top = mean / self.beta
        bottom = 2 * mean - top
        if bottom > most:
            bottom, top = most, 2 * mean - most
        if self.form == "kvpress" and not bottom >= top >= least:
            return [slots] * layers
        step = (bottom - top) / (layers - 1)
        lower = [round(bottom - layer * step) for layer in range(layers // 2)]
        middle = [mean] * (layers % 2)
        upper = [2 * mean - share for share in reversed(lower)]
        return [outside + share for share in (*lower, *middle, *upper)]


@dataclass(frozen=True)
class CakeLayers(LayerBudgets):
    """CAKE: a layer's share is as its preference, P = E^(1 / tau1) * V^(1 / tau2).

    E: the entropy of the attention that the prompt's newest `observed` queries pay to the tokens before them, summed
    over queries and query heads; V: the variance of that attention over the queries, summed over tokens and query
    heads. Every layer has the window, or what the method protects, if that is more; the rest of the slots is shared out
    by P, nowhere more than the prompt has tokens, and what is left over goes evenly to the other layers.
    Source and departures: `kvexp.methods.CAKE`.
    """

    tau1: Annotated[float, Range(0, above=True)] = 1.0
    tau2: Annotated[float, Range(0, above=True)] = 1.0
    observed: Annotated[int, AtLeast(2)] = 32

    @property
    def window(self) -> int:
        return self.observed

    def preference(self, logits: Tensor, lengths: Sequence[int], sinks: Tensor | None = None) -> list[float]:
        preferences = []
        for row, length in zip(logits, lengths, strict=True):
            # Row by row over its own tokens alone: sums over padding would round otherwise.
            probabilities = attention_probs(row[..., -length:].double(), sinks)[..., -min(self.observed, length) :, :]
            before = probabilities[..., : -probabilities.shape[-2]].contiguous()
            entropy = -(before * (before + SMALL).log()).sum()
            can_vary = before.shape[-2] > 1 and before.shape[-1] > 0  # queries to differ, tokens before them to look at
            variance = before.var(dim=-2).sum() if can_vary else torch.zeros(())
            preferences.append(float(entropy.clamp_min(0)) ** (1 / self.tau1) * float(variance) ** (1 / self.tau2))
        return preferences

    def _share(
        self, slots: int, length: int, least: int, layers: int, preferences: Sequence[float] | None
    ) -> list[int]:
        base = max(least, min(self.observed, slots))
        if preferences is None or slots <= base or not 0 < sum(preferences) < float("inf"):
            return [slots] * layers
        total, most, whole = (slots - base) * layers, length - base, sum(map(Fraction, preferences))
        wanted = [int(Fraction(preference) / whole * total) for preference in preferences]
        shares = [min(share, most) for share in wanted]
        shares = _spread(shares, sum(wanted) - sum(shares), most)
        shares = _spread(shares, total - sum(shares), most)  # what rounding down has left
        return [base + share for share in shares]


def _spread(shares: Sequence[int], rest: int, most: int) -> list[int]:
    """The shares with `rest` more: one for each that is below `most`, from the first on, again and again."""
    new_shares = list(shares)
    while rest:
        below = [i for i, share in enumerate(new_shares) if share < most]
        even = max(1, min(rest // len(below), min(most - new_shares[i] for i in below)))
        for i in below[:rest]:
            new_shares[i] += even
        rest -= even * len(below[:rest])
    return new_shares


BY_NAME: dict[str, LayerBudgets] = {"uniform": LayerBudgets(), "pyramid": PyramidLayers(), "cake": CakeLayers()}


def layer_budgets_of(method: Method, budget: Budget) -> LayerBudgets:
    """The way in which a budget is shared out over layers: `budget.layers`, else that of the method's paper.

    A method whose own way is of the kind that is asked for keeps its own settings.
    """
    of_method = method.layer_budgets
    if budget.layers is None:
        return BY_NAME["uniform"] if budget.fixes_layer_budgets else of_method
    of_budget = BY_NAME[budget.layers]
    return of_method if type(of_method) is type(of_budget) else of_budget


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


def share_among_heads(ranked: Sequence[RankedSlots], kept: list[int], floor: float) -> list[Tensor]:
    """How many slots each head of each layer keeps, [B, H] each; kept: of a row's heads on average, in all layers."""
    home = ranked[0].priority.device
    priority, candidates, protected = (
        torch.cat([getattr(layer, name).to(home) for layer in ranked], dim=1)
        for name in ("priority", "candidates", "protected")
    )
    shares = slots_by_head(priority, candidates, protected, kept, floor).chunk(len(ranked), dim=1)
    return [share.to(layer.priority.device) for layer, share in zip(ranked, shares, strict=True)]


def share_among_layers(preferences: Sequence[list[float]]) -> list[list[list[float]]]:
    """Preferences [L][B] of all layers as [B][L], once for each layer."""
    return [[list(row) for row in zip(*preferences, strict=True)]] * len(preferences)


class LastLayer:
    """Evictions of one cache, which wait until the last of its `layers` has seen the prompt, or the newest token."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.reset()

    def reset(self) -> None:
        """Forget evictions that wait."""
        self._waiting: list[tuple[Any, Callable[[Any], None]]] = []

    def wait(self, found: Any, evict: Callable[[Any], None], share_out: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Let the next layer's eviction wait; with the last layer's, all are carried out.

        found: what the layer knows; share_out: makes every layer's share of what all have found, in their order; evict:
        is called with this layer's share.
        """
        self._waiting.append((found, evict))
        if len(self._waiting) < self.layers:
            return
        waiting, self._waiting = self._waiting, []
        shares = share_out([finding for finding, _ in waiting])
        for (_, evict_layer), share in zip(waiting, shares, strict=True):
            evict_layer(share)


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
