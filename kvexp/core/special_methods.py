"""Classes between `Method` and a few methods: each adds hooks that the core calls for its subclasses alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvexp.core.method import EvictionContext, Method
from kvexp.core.slots import Rewritten


class KeepsEverything(Method):
    """Retrieval: nothing is dropped, and the budget counts the slots that a query attends to."""


class Simulated(Method):
    """A method of which some variant exists only as a simulation that drops nothing (cache.mode=mask)."""

    per_query: ClassVar[bool] = False  # each query attends to its own choice of everything seen

    @property
    def simulation_only(self) -> bool:
        """Whether this variant is one."""
        return self.per_query

    def hidden_next_step(self, ctx: EvictionContext) -> Tensor | None:
        """Slots [B, H, S] bool that the next step does not see but later ones may (H2O's released mask); None: none."""
        return None

    def query_mask(self, probabilities: Tensor, ctx: EvictionContext) -> Tensor | None:
        """The slots [B, H, S] bool that one query attends to, given its full attention; None: all visible.

        probabilities [B, H, S]: the query's softmax over everything seen, summed over the query heads of a kv head.
        """
        return None


class ChangesScores(Method):
    """A method that goes on with other scores after an eviction."""

    def after_eviction(self, score: Tensor) -> Tensor:
        """Score [B, H, S] with which rows go on, made of their score before."""
        raise NotImplementedError


class RenewsScores(Method):
    """A method that makes its score anew before every eviction, of the score so far and what it then looks at."""

    def renewed_score(self, ctx: EvictionContext) -> Tensor:
        """Score [B, H, S] that `priority` then reads as `ctx.score`, and with which rows go on."""
        raise NotImplementedError


class ChoosesSlots(Method):
    """A method that says itself which slots stay; they lie in the order of their positions (cache.mode=compact)."""

    def kept(self, ctx: EvictionContext, priority: Tensor) -> Tensor:
        """The slots [B, H, S] bool that stay; priority [B, H, S].

        Heads of a row keep equally many; what the core protects is left to the method.
        """
        raise NotImplementedError


class GrantsSlots(Method):
    """A method that holds more or fewer slots than the budget says."""

    def effective_budget(self, budget: int, tokens: int) -> int:
        """Slots granted for a budget of `budget` slots and a prompt of `tokens` tokens."""
        raise NotImplementedError


class JoinsLayers(Method):
    """A method whose eviction can wait for the last layer, to use what it makes of all layers' priorities."""

    @property
    def joins_layers(self) -> bool:
        """Whether it does so with these settings."""
        return True

    def join_layers(self, priorities: Tensor) -> Tensor:
        """Priorities [L, B, H, S] of all layers' slots, by position, as those to evict by; same shape.

        All layers hold the same positions in a kv head, and go on doing so.
        """
        raise NotImplementedError


class Rewrites(Method):
    """A method that gives the slots it keeps at the end of a prompt other numbers, which stand for what is dropped."""

    evicts_while_decoding: ClassVar[bool] = False

    @property
    def rewrites(self) -> tuple[str, ...]:
        """What it changes with these settings: of bias, values and keys; empty: nothing, it drops slots like others."""
        return ("bias", "values", "keys")

    def rewrite(self, ctx: EvictionContext, index: Tensor, keep: Tensor) -> Rewritten:
        """What the slots index [B, H, N] of `ctx` become; keep [B, H, N] bool: False where a row keeps fewer.

        A row or head that loses nothing stays as it is, whatever is returned for it.
        """
        raise NotImplementedError
