"""Budgets that differ by layer: how one budget is shared out over the layers, which in all hold as many slots as ever.

The sources allot slots to layers by rules of their own (linear in the depth, or by what a layer's attention looks
like); here every rule gives back whole numbers that add up to `layers` times the budget, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from kvexp.errors import ConfigError

SMALL = 1e-10  # is added to a probability before its logarithm is taken, as in CAKE's release


@dataclass(frozen=True)
class LayerBudgets:
    """The same budget for every layer; the base of other ways to share it out.

    window: how many of the prompt's newest queries are observed in every layer before slots are shared out, so that
    nothing is evicted before the last layer has seen the prompt; 0: the shares do not depend on the text.
    """

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
        """`share`, for least < slots < length and several layers."""
        return [slots] * layers

    def preference(self, logits: Tensor, lengths: Sequence[int]) -> list[float]:
        """What a layer's share of the slots goes by, one number per batch row.

        logits [B, H, G, n, S] of the newest n queries, newest last, slots in the order of the prompt's columns; lengths
        [B]: real prompt tokens.
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

    beta: float = 20.0
    form: Literal["paper", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ConfigError(f"beta must be at least 1, got {self.beta:g}")
        if self.form not in ("paper", "kvpress"):
            raise ConfigError(f"form must be paper or kvpress, got {self.form!r}")

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
        upper = [2 * mean - each for each in reversed(lower)]
        return [outside + each for each in (*lower, *middle, *upper)]


@dataclass(frozen=True)
class CakeLayers(LayerBudgets):
    """CAKE: a layer's share is as its preference, P = E^(1 / tau1) * V^(1 / tau2).

    E: the entropy of the attention that the prompt's newest `observed` queries pay to the tokens before them, summed
    over queries and query heads; V: the variance of that attention over the queries, summed over tokens and query
    heads. Every layer has the window, or what the method protects, if that is more; the rest of the slots is shared out
    by P, nowhere more than the prompt has tokens, and what is left over goes evenly to the other layers. Source: Qin et
    al., arXiv:2503.12491, and the authors' code (window 32; tau1 and tau2 are 1 for models without an entry in its
    table). Departures: layers wait for the last one's preference with the whole prompt in the cache, at a higher peak
    of memory, where the authors' cascade cuts them on the way and can so leave a layer one slot short; all slots are
    granted, where the authors' code can give a layer more than the prompt has and loses what is over.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    observed: int = 32

    def __post_init__(self) -> None:
        for name in ("tau1", "tau2"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.observed < 2:
            raise ConfigError(f"observed must be at least 2 queries, got {self.observed}")

    @property
    def window(self) -> int:
        return self.observed

    def preference(self, logits: Tensor, lengths: Sequence[int]) -> list[float]:
        found = []
        for row, length in zip(logits, lengths, strict=True):
            # Row by row over its own tokens alone: sums over padding would round otherwise.
            probabilities = row[..., -length:].double().softmax(-1)[..., -min(self.observed, length) :, :]
            before = probabilities[..., : -probabilities.shape[-2]].contiguous()
            entropy = -(before * (before + SMALL).log()).sum()
            some = before.shape[-2] > 1 and before.shape[-1] > 0  # queries to differ, tokens before them to look at
            variance = before.var(dim=-2).sum() if some else torch.zeros(())
            found.append(float(entropy.clamp_min(0)) ** (1 / self.tau1) * float(variance) ** (1 / self.tau2))
        return found

    def _share(
        self, slots: int, length: int, least: int, layers: int, preferences: Sequence[float] | None
    ) -> list[int]:
        base = max(least, min(self.observed, slots))
        if preferences is None or slots <= base or not 0 < sum(preferences) < float("inf"):
            return [slots] * layers
        total, most, whole = (slots - base) * layers, length - base, sum(map(Fraction, preferences))
        wanted = [int(Fraction(each) / whole * total) for each in preferences]
        shares = [min(each, most) for each in wanted]
        shares = _spread(shares, sum(wanted) - sum(shares), most)
        shares = _spread(shares, total - sum(shares), most)  # what rounding down has left
        return [base + each for each in shares]


def _spread(shares: Sequence[int], rest: int, most: int) -> list[int]:
    """The shares with `rest` more: one for each that is below `most`, from the first on, again and again."""
    made = list(shares)
    while rest:
        below = [i for i, each in enumerate(made) if each < most]
        even = max(1, min(rest // len(below), min(most - made[i] for i in below)))
        for i in below[:rest]:
            made[i] += even
        rest -= even * len(below[:rest])
    return made
