"""OpenVINO GenAI's cache eviction: whole blocks of tokens go, the same in all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize, pad

from kvexp.core import AttentionScoreSpec, EvictionContext, Needs
from kvexp.core.attention import attention_probs
from kvexp.core.cpp_order import ascending, largest
from kvexp.core.special_methods import ChoosesSlots, GrantsSlots
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, Range

POOL = 7  # the engine's, which no setting changes
NEWEST = 8  # steps whose mean is Adaptive R-KV's score


@dataclass(frozen=True)
class OpenVINO(ChoosesSlots, GrantsSlots):
    """S[j] = sum over forwards of max over j..j+6 of the sum over all query heads, and over the last `window` rows of
    the prompt or the row of a step, of softmax(x_q); block score = sum over its tokens of S[j], or of S[j] / life[j];
    keep = `start_size` first U newest blocks of `recent_size` U top blocks, `budget` tokens in all.

    Source: OpenVINO GenAI 2026.4.1, `cache_eviction.cpp` and `kvcrush.cpp`; KVCrush after arXiv:2503.00022. life[j]: 1
    for the newest token, one more for each before it, up to `window` at the end of the prompt; then one more per step.
    Acts as soon as `budget` + `block` tokens are held, but after the first answer token has been read. Of equal blocks
    the later stays. KVCrush: `crush` more blocks, of those about to go, evenly spaced in the order of how far their
    tokens' bits (upper half of S or not) are from an anchor (ties: `kvexp.core.cpp_order`). aggregation=adaptive_rkv:
    mean of the last 8 rows in place of S; blocks by it up to `attention_mass`, then those least like the rest. That is
    by formula, unconfirmed: the engine refuses to run it on a CPU. Departures: an answer to a prompt shorter than
    `window` has other lives in the engine; its `apply_rotation` is left out.
    """

    name: ClassVar[str] = "openvino"
    aggregation: Literal["norm_sum", "sum", "adaptive_rkv"] = "norm_sum"
    start_size: Annotated[int, AtLeast(1)] = 32  # tokens
    recent_size: Annotated[int, AtLeast(1)] = 128  # tokens
    window: Annotated[int, AtLeast(0)] = 8  # last queries of the prompt that count; 0: all, which is H2O
    block: Annotated[int, AtLeast(1)] = 32  # tokens; 16: the engine on a GPU
    crush: Annotated[int, AtLeast(0)] = 0  # blocks that KVCrush keeps on top of the budget
    anchor: Literal["random", "zeros", "ones", "mean", "alternating"] = "random"
    crush_seed: Annotated[int, AtLeast(0)] = 0
    attention_mass: Annotated[float, Range(0, 1)] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("start_size", "recent_size"):
            if getattr(self, name) % self.block:
                raise ConfigError(f"{name}={getattr(self, name)} is not a multiple of block={self.block}")
        if self.crush and self.aggregation == "adaptive_rkv":
            raise ConfigError(f"crush={self.crush} does not go with aggregation=adaptive_rkv: set crush=0")

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec(last_rows=self.window or None, pool_heads=True, pool_ahead=POOL)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=NEWEST if self.aggregation == "adaptive_rkv" else 0)

    @property
    def reads_states(self) -> bool:
        return self.aggregation == "adaptive_rkv"

    @property
    def sinks(self) -> int:
        return self.start_size

    def recent(self, budget: int) -> int:
        return self.recent_size

    def effective_budget(self, budget: int, tokens: int) -> int:
        """What is held at most, and the token to come; ConfigError for a budget that leaves no block to choose."""
        size = self.size(budget)
        if size <= self.start_size + self.recent_size:
            raise ConfigError(
                f"budget of {budget} slots holds {size // self.block} blocks of {self.block} tokens, and must hold "
                f"more than start_size={self.start_size} and recent_size={self.recent_size} of openvino; raise "
                "kv_ratio (or budget.tokens), or lower method.start_size or method.recent_size"
            )
        return size + self.block

    def size(self, budget: int) -> int:
        """The engine's max_cache_size: whole blocks of a budget of `budget` tokens."""
        return budget // self.block * self.block

    def priority(self, ctx: EvictionContext) -> Tensor:
        if self.aggregation == "adaptive_rkv":
            return self._newest_mean(ctx)
        if self.aggregation == "sum":
            return ctx.score
        age = ctx.age() + 1
        return ctx.score / (age.clamp_max(self.window + ctx.steps) if self.window else age).clamp_min(1)

    def _newest_mean(self, ctx: EvictionContext) -> Tensor:
        """The mean [B, H, S] of the newest rows' attention, over all query heads, pooled."""
        assert ctx.last_logits is not None
        rows = attention_probs(ctx.last_logits, ctx.sinks).nan_to_num(0.0).sum((1, 2)).mean(1)
        pooled = max_pool1d(pad(rows, (0, POOL - 1), value=-torch.inf), POOL, stride=1)
        return pooled[:, None].expand_as(ctx.score)

    def kept(self, ctx: EvictionContext, priority: Tensor) -> Tensor:
        held = ctx.held()
        keep = held.clone()
        if ctx.steps == 0:
            return keep
        # The budget of the context is the effective one: what is held at most, and the token to come.
        for row, (count, limit) in enumerate(zip(held[:, 0].sum(-1).tolist(), ctx.budget.tolist(), strict=True)):
            if count >= limit:
                slots = held[row, 0].nonzero()[:, 0]
                evictable, gone = self._gone(ctx, priority, row, slots, limit - self.block)
                blocks = torch.tensor(gone, dtype=torch.int64, device=evictable.device)
                keep[row].index_fill_(-1, evictable.view(-1, self.block)[blocks].flatten(), False)
        return keep

    def _gone(
        self, ctx: EvictionContext, priority: Tensor, row: int, slots: Tensor, size: int
    ) -> tuple[Tensor, list[int]]:
        """The evictable slots of a batch row, and which of their blocks go; slots [N]: those held, in order."""
        evictable = slots[self.start_size : len(slots) // self.block * self.block - self.recent_size]
        capacity = (size - self.start_size - self.recent_size) // self.block
        scores = priority[row, 0, evictable].double().view(-1, self.block).sum(-1)
        if self.aggregation == "adaptive_rkv":
            alike = likeness(ctx.slots.keys[row, :, evictable], self.block)
            return evictable, least_diverse(scores, alike, self.attention_mass, capacity)
        gone = sorted(scores.argsort(stable=True)[: len(scores) - capacity].tolist())
        if 0 < self.crush <= len(gone):
            position, layers = int(ctx.newest[row]), ctx.layers
            # Before the first eviction there were as many tokens as the prompt has, or as are held at most.
            calls = min(ctx.steps - 1, position + 1 - size - self.block)
            gone = self._without_crushed(gone, ctx.score[row, 0, evictable], calls * layers + ctx.layer)
        return evictable, gone

    def _without_crushed(self, gone: list[int], score: Tensor, draw: int) -> list[int]:
        """The blocks that still go once KVCrush has taken some back; score [N] of the evictable tokens."""
        if len(gone) == self.crush:
            return []
        bits = torch.zeros(len(score), dtype=torch.int64)
        bits[list(largest(score.tolist(), len(score) // 2))] = 1
        by_block = bits.view(-1, self.block)
        far = (by_block != self._anchor(by_block, draw)).sum(-1)[gone].tolist()
        order = [gone[place] for place in ascending(far)]
        taken = order[:: len(order) // self.crush][: self.crush]
        return [block for block in gone if block not in taken]

    def _anchor(self, bits: Tensor, draw: int) -> Tensor:
        """The anchor [block] that blocks of bits [N, block] are compared with; draw: how many were drawn before."""
        if self.anchor == "mean":
            return (bits.double().mean(0) > 0.5).long()
        if self.anchor == "alternating":
            return torch.arange(self.block) % 2
        if self.anchor == "random":
            return random_bits(self.crush_seed, draw * self.block, self.block)
        return torch.full((self.block,), int(self.anchor == "ones"))


def likeness(keys: Tensor, block: int) -> Tensor:
    """How alike blocks are [N, N], symmetric or not; keys [H, N * block, D].

    Sums of cosines, mean over heads, of those that reach their row's mean.
    """
    unit = normalize(keys.double(), dim=-1)
    cosine = unit @ unit.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).zero_()
    cosine = cosine.masked_fill(cosine < cosine.mean(-1, keepdim=True), 0.0).mean(0)
    count = len(cosine) // block
    return cosine.view(count, block, count, block).sum((1, 3))


def least_diverse(scores: Tensor, alike: Tensor, attention_mass: float, capacity: int) -> list[int]:
    """Adaptive R-KV's blocks to go, of scores [N] and `likeness` [N, N], where `capacity` blocks stay."""
    order, total, mass, chosen = scores.argsort(descending=True, stable=True).tolist(), float(scores.sum()), 0.0, 0
    while mass < attention_mass * total and chosen < capacity:
        mass, chosen = mass + float(scores[order[chosen]]), chosen + 1
    rest = sorted(order[chosen:])
    by_likeness = alike[:, rest].sum(1).tolist()
    return sorted(sorted(rest, key=lambda block: by_likeness[block])[capacity - chosen :])


def random_bits(seed: int, first: int, count: int) -> Tensor:
    """Bits [count] int64 from number `first` on, as C++'s uniform_int_distribution(0, 1) draws of mt19937(seed)."""
    import numpy as np

    stream = np.random.RandomState(seed)
    drawn = stream.randint(0, 2**32, first + count, dtype=np.uint32)[first:]
    return torch.from_numpy((drawn >> 31).astype(np.int64))
