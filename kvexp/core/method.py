"""What an eviction method is: a frozen description that ranks slots. All state is the core's `score` tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.slots import Slots
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class EvictionContext:
    """What a method may look at when it ranks: one layer's slots after a forward.

    budget [B]: slots per kv head of each row; recent [B]: how many of the newest tokens in the cache are protected (one
    less than the method's window where the budget counts the coming token); newest [B]: position id of the newest
    token; seeds [B]. Tensors of shape [B, H, S] come from `positions` and `score`.
    """

    slots: Slots
    layer: int
    budget: Tensor
    recent: Tensor
    newest: Tensor
    seeds: Tensor

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64, -1 for dead slots."""
        return self.slots.positions[:, :, : self.slots.used]

    @property
    def score(self) -> Tensor:
        """[B, H, S] float32."""
        return self.slots.score[:, :, : self.slots.used]

    def age(self) -> Tensor:
        """[B, H, S]: 0 for the newest token, 1 for the one before."""
        return self.newest[:, None, None] - self.positions

    def leaving(self) -> Tensor:
        """[B, H, S] bool: the token that has just left the recent window."""
        return self.age() == self.recent[:, None, None]


@dataclass(frozen=True)
class Method:
    """Base of every eviction method. Subclasses declare a `view` or override `birth` and `rank`.

    keep = sinks U recent window U top of rank. `recent` counts the token being generated where the budget does.
    """

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True  # False: nothing is ever dropped (the baseline)
    evicts_while_decoding: ClassVar[bool] = True
    keeps_everything: ClassVar[bool] = False  # the budget counts what is attended to; nothing is dropped
    keeps_newest: ClassVar[bool] = False  # its sinks and the newest tokens, in every row and head, and nothing else
    per_query: ClassVar[bool] = False  # each query chooses for itself from everything seen; nothing is dropped
    positions: ClassVar[str] = "original"  # the position ids the method's paper gives to survivors

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that says no name is called as its class."""
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @property
    def view(self) -> AttentionScoreSpec | None:
        """What to accumulate from attention; None: nothing."""
        return None

    @property
    def needs_mask(self) -> bool:
        """Does this variant exist only as a simulation that drops nothing (mode=mask)?"""
        return self.per_query

    @property
    def alters_prompt(self) -> bool:
        """Do prompt tokens attend otherwise than in the model, so that the prefill serves no other method?"""
        return False

    @property
    def sinks(self) -> int:
        """First real tokens that are never evicted."""
        return 0

    def recent(self, budget: int) -> int:
        """Newest tokens that are never evicted, out of a budget of so many slots."""
        return 0

    def allowance(self, budget: int, tokens: int) -> int:
        """Slots really granted where the budget says `budget` for a prompt of `tokens` (H2O(C) is given more)."""
        return budget

    def birth(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor | None:
        """Score [B, H, Q] float32 of new slots with keys [B, H, Q, D] at positions [B, Q]; None: zero."""
        return None

    def rank(self, now: EvictionContext) -> Tensor:
        """[B, H, S] float32, higher is kept longer. Protection of sinks and recents is the core's business."""
        return now.score

    @property
    def ranks_by_score(self) -> bool:
        """Is `rank` the score itself?"""
        return type(self).rank is Method.rank

    def after_eviction(self, score: Tensor) -> Tensor:
        """The score of the survivors once a reduction has happened."""
        return score

    def limbo(self, now: EvictionContext) -> Tensor | None:
        """Mask mode: slots [B, H, S] that stay in memory but are not seen in the next step (H2O's released mask)."""
        return None

    def attended(self, probabilities: Tensor, now: EvictionContext) -> Tensor | None:
        """Mask mode: the slots [B, H, S] this very query may see, given its full row [B, H, S]; None: all visible."""
        return None


def checked(made: Tensor, shape: tuple[int, ...] | torch.Size, method: Method, hook: str, axes: str) -> Tensor:
    """What a hook of the method returned; ConfigError where it is no tensor of this shape.

    A wrong shape could broadcast, and every head or row would then be judged by another's scores. axes: the shape in
    the letters of the docstrings, as in "[B, H, S]".
    """
    if not isinstance(made, Tensor) or made.shape != shape:
        got = f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ConfigError(
            f"{type(method).__qualname__}.{hook} must return a tensor of shape {axes} = {list(shape)}, got {got}"
        )
    return made


def newest_first(now: EvictionContext) -> Tensor:
    """Rank by position: the newest tokens stay."""
    return now.positions.to(torch.float32)
