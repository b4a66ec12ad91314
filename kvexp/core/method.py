"""What an eviction method is: a frozen description that gives slots a priority. The core keeps its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core.attention import RoPE
from kvexp.core.layer_budgets import LayerBudgets
from kvexp.core.needs import NOTHING, Needs, output_norms
from kvexp.core.query_calibration import LayerCalibration
from kvexp.core.query_statistics import QueryStatistics
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.slots import Slots
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class EvictionContext:
    """What a method may look at when it orders slots: one layer's slots after a forward.

    slots: keys, values, positions, scores; layer: its number; budget [B]: slots per kv head; recent [B]: how many of
    the newest tokens in the cache are protected (one less than the method's window where the budget counts the coming
    token); newest [B]: position id of the newest token; seeds [B]: of the method's own noise. newest_attention
    [B, H, G, S]: the newest query's softmax in each query head; query_statistics: of the prompt; output_factors
    [H, G, n, Dv]: see `output_norms`; last_logits [B, H, G, n, S]: of the newest queries, newest last, -inf where they
    do not look; calibration: of this layer; rope: the model's (None: it has none); local_attention [B, H, S]: the sums
    of `LocalAttention`; second_pass_attention [B, H, G, S]: of the queries that repeat the prompt, the largest to
    every slot, 0 for slots that were not repeated. All are None where the method's `needs` do not declare them.
    compares_heads: whether priorities of different kv heads are held against each other, or against one threshold.
    """

    slots: Slots
    layer: int
    budget: Tensor
    recent: Tensor
    newest: Tensor
    seeds: Tensor
    newest_attention: Tensor | None = None
    query_statistics: QueryStatistics | None = None
    output_factors: Tensor | None = None
    last_logits: Tensor | None = None
    calibration: LayerCalibration | None = None
    local_attention: Tensor | None = None
    rope: RoPE | None = None
    second_pass_attention: Tensor | None = None
    compares_heads: bool = False

    @property
    def positions(self) -> Tensor:
        """Position ids [B, H, S] int64 of all slots in use, -1 for dead slots."""
        return self.slots.positions[:, :, : self.slots.length]

    @property
    def score(self) -> Tensor:
        """Scores [B, H, S] float32 of all slots in use."""
        return self.slots.score[:, :, : self.slots.length]

    def held(self) -> Tensor:
        """[B, H, S] bool: the slots that hold a token which is not evicted; mask mode leaves evicted ones in place."""
        return (self.positions >= 0) & (self.score > -torch.inf)

    def age(self) -> Tensor:
        """Age [B, H, S] int64 of every slot in tokens: 0 for the newest token, 1 for the one before."""
        return self.newest[:, None, None] - self.positions

    def output_norms(self) -> Tensor:
        """||W v_j||_2 [B, H, G, S] float32: every value's size behind each query head's block of the output projection.

        ConfigError where the cache was made without a model.
        """
        if self.output_factors is None:
            raise ConfigError(
                "the size of projected values needs the model's output projection: declare Needs(output_norms=True) "
                "and make the cache with kvexp.models.EvictionCache"
            )
        return output_norms(self.slots.values[:, :, : self.slots.length], self.output_factors)

    def just_left_window(self) -> Tensor:
        """[B, H, S] bool: the slot of the token that has just left the recent window."""
        return self.age() == self.recent[:, None, None]


@dataclass(frozen=True)
class Method:
    """Base of every eviction method. Subclasses declare a `score_spec`, or override `initial_score` and `priority`.

    keep = sinks U recent window U the slots of highest priority. `recent` counts the token being generated where the
    budget does. A method remembers nothing: the core accumulates, moves and drops the scores.
    """

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True  # False: no slot is ever dropped (the baseline)
    evicts_while_decoding: ClassVar[bool] = True
    full_cache: ClassVar[bool] = False  # retrieval: nothing is dropped, the budget counts attended slots
    is_window: ClassVar[bool] = False  # keeps sinks and the newest tokens in every row and head, and nothing else
    per_query: ClassVar[bool] = False  # each query attends to its own choice of everything seen; nothing is dropped
    positions: ClassVar[str] = "original"  # the position ids the method's paper gives to survivors
    needs_whole_prompt: ClassVar[str] = (
        ""  # what `priority` does with a whole prompt, in words behind the method's name
    )

    def __init_subclass__(cls, **options: Any) -> None:
        """Name the subclass after its class unless it says a `name`."""
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        """The attention statistic that the core accumulates as score; None: no attention is observed."""
        return None

    @property
    def needs(self) -> Needs:
        """What `priority` looks at beside keys, values, positions and score; the core computes nothing undeclared."""
        return NOTHING

    @property
    def simulation_only(self) -> bool:
        """Whether this variant exists only as a simulation that drops nothing (cache.mode=mask)."""
        return self.per_query

    @property
    def modifies_prefill(self) -> bool:
        """Whether prompt tokens attend otherwise than in the model, so that no other method can share the prefill."""
        return False

    @property
    def layer_budgets(self) -> LayerBudgets:
        """How the budget is shared out over layers where the configuration does not say (budget.layers=null)."""
        return LayerBudgets()

    @property
    def sinks(self) -> int:
        """How many of the first real tokens are never evicted."""
        return 0

    def recent(self, budget: int) -> int:
        """How many of the newest tokens are never evicted, for a budget of `budget` slots."""
        return 0

    def effective_budget(self, budget: int, tokens: int) -> int:
        """Slots granted for a budget of `budget` slots and a prompt of `tokens` tokens; H2O(C) is given more."""
        return budget

    def initial_score(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor | None:
        """Score [B, H, Q] float32 that new tokens start with; None: 0.

        keys [B, H, Q, D] as cached, RoPE applied; positions [B, Q], -1 for padding; seeds [B] of the method's own
        noise; layer: its number.
        """
        return None

    def priority(self, ctx: EvictionContext) -> Tensor:
        """Priority [B, H, S] float32 of every slot: higher is kept longer.

        The core protects sinks and recent window by itself, and takes NaN as the lowest priority.
        """
        return ctx.score

    @property
    def priority_is_score(self) -> bool:
        """Whether `priority` is the score itself."""
        return type(self).priority is Method.priority

    @property
    def priority_kind(self) -> Literal["score", "share", "log_share", "order"]:
        """What `priority` is, for wrappers that weigh priorities (`SlotSelection`) or compare those of several heads.

        score: attention added up as the score is, at least 0. share: an attention probability, or made of some, at
        least 0. log_share: its logarithm. order: numbers of which only the order is known.
        """
        return "score" if self.score_spec is not None and self.priority_is_score else "order"

    def threshold_as_priority(self, threshold: float) -> float:
        """What `priority` of a slot must reach where the method's score, as documented, must reach a threshold.

        threshold: `Budget.threshold`. The same number, unless the priority is another function of the score.
        """
        return threshold

    def after_eviction(self, score: Tensor) -> Tensor:
        """Score [B, H, S] with which rows go on after an eviction, made of their score before it."""
        return score

    def hidden_next_step(self, ctx: EvictionContext) -> Tensor | None:
        """Mask mode: slots [B, H, S] bool that the next step does not see but later ones may (H2O's released mask)."""
        return None

    def query_mask(self, probabilities: Tensor, ctx: EvictionContext) -> Tensor | None:
        """Mask mode: the slots [B, H, S] bool that one query attends to, given its full attention; None: all visible.

        probabilities [B, H, S]: the query's softmax over everything seen, summed over the query heads of a kv head.
        """
        return None


def checked(
    made: Tensor, shape: tuple[int, ...] | torch.Size, method: Method, hook: str, axes: str, *, mask: bool = False
) -> Tensor:
    """The tensor that a hook of the method returned; ConfigError where it is no tensor of this shape and dtype.

    A wrong shape could broadcast, and every head or row would then be judged by another's scores. axes: the shape in
    the letters of the docstrings, as in "[B, H, S]". mask: it must be bool.
    """
    if not isinstance(made, Tensor) or made.shape != shape:
        got = f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ConfigError(
            f"{type(method).__qualname__}.{hook} must return a tensor of shape {axes} = {list(shape)}, got {got}"
        )
    if mask and made.dtype != torch.bool:
        raise ConfigError(
            f"{type(method).__qualname__}.{hook} must return a tensor of dtype torch.bool, got {made.dtype}; "
            "compare, as in probabilities > 0.1"
        )
    return made


def recency(ctx: EvictionContext) -> Tensor:
    """Priority [B, H, S] float32 by position: the newest tokens stay."""
    return ctx.positions.to(torch.float32)
