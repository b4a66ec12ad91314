"""What a retrieval method is, and its queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, attention_probs, compute_attention, softcapped
from kvexp.core.budget import floor_share
from kvexp.core.method import is_users, nan_error
from kvexp.core.slot_order import topk_slots
from kvexp.core.special_methods import KeepsEverything
from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.offload import BlockCacheConfig, OffloadedKV, step_layout
from kvexp.util.fields import AtLeast, Range

Combine = Literal["softmax_sum", "raw_sum", "max"]  # of the logits of a kv head's query heads


@dataclass(frozen=True)
class RetrievalQuery:
    """One query per row, and everything a method may use to select slots for it.

    query [B, H, G, D]; positions [B]: the queries' position ids; candidates [B, 1, S] bool: slots that may be selected,
    neither sinks nor recent window nor the future (slot = position); counts: how many to select in each row, at most
    `max_k`. index: what the method has indexed; memory: all keys and values; params: of the layer's attention.
    """

    query: Tensor
    positions: Tensor
    candidates: Tensor
    counts: list[int]
    index: KVIndex
    memory: OffloadedKV
    params: AttentionParams

    @classmethod
    def of(
        cls,
        query: Tensor,
        positions: Tensor,
        most: list[int],
        index: KVIndex,
        memory: OffloadedKV,
        params: AttentionParams,
    ) -> RetrievalQuery:
        """The query of the newest token of every row.

        query [B, H, G, D]; positions [B]; most: how many slots to select in each row, if there are as many candidates.
        """
        sinks = memory.config.sinks
        counts = [min(count, available) for count, available in zip(most, memory.candidate_counts, strict=True)]
        candidates = step_layout(memory.lengths, memory.config.local, sinks, query.device).candidates
        if params.sliding_window is not None:
            slots = torch.arange(memory.length, device=query.device)
            candidates = candidates & (slots > positions[:, None] - params.sliding_window)[:, None]
        return cls(query, positions, candidates, counts, index, memory, params)

    @property
    def max_k(self) -> int:
        """The largest number of slots to select in a row."""
        return max(self.counts)

    def all_candidates(self) -> Tensor | None:
        """All candidates as `Selection.slots` [B, H, N], where every row may select all of them; else None."""
        if self.counts != self.memory.candidate_counts:
            return None
        sinks = self.memory.config.sinks
        slots = torch.arange(self.memory.length, device=self.query.device).expand(*self.query.shape[:2], -1)
        return slots.masked_fill(~self.candidates, -1)[:, :, sinks : sinks + self.max_k]

    def logits(self, dots: Tensor, *, past: bool = False) -> Tensor:
        """Dot products [B, H, G, S] to float32 logits: scaled, softcapped, ALiBi added, -inf outside the candidates.

        past: everything up to the query itself is left unmasked, not only the candidates.
        """
        x = softcapped(dots.float() * self.params.scale, self.params.softcap)
        slots = torch.arange(x.shape[-1], device=x.device)
        if self.params.alibi is not None:
            slopes = self.params.alibi.to(x.device).view(1, *x.shape[1:3], 1)
            x = x + slopes * (slots - self.positions[:, None]).float()[:, None, None]
        seen = self.candidates
        if past:
            seen = (slots <= self.positions[:, None])[:, None]
            if self.params.sliding_window is not None:
                seen = seen & (slots > self.positions[:, None] - self.params.sliding_window)[:, None]
        return x.masked_fill(~seen[:, :, None], -torch.inf)

    def reduce_group(self, logits: Tensor, how: Combine) -> Tensor:
        """`reduce_group` for the heads of this layer."""
        return reduce_group(logits, how, self.params.sinks)

    def logits_of(self, keys: Tensor, *, past: bool = False) -> Tensor:
        """Exact logits [B, H, G, S] of the query with keys [B, H, S, D]; past: as in `logits`."""
        query = self.query
        if self.params.upcast:
            query, keys = query.float(), keys.float()
        return self.logits(torch.matmul(query, keys.transpose(-1, -2)), past=past)

    def exact_logits(self, *, past: bool = False) -> Tensor:
        """Exact logits [B, H, G, S] of the query with every key; fetches all keys to the device."""
        return self.logits_of(self.memory.all_keys(), past=past)

    def topk(self, relevance: Tensor) -> Tensor:
        """The slots [B, H, max_k] of highest relevance [B, H, S] among the candidates, ascending; -1: none."""
        return topk_slots(relevance, self.candidates, self.counts, min(self.max_k, relevance.shape[-1]))


def group_probs(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """`attention_probs` of logits [B, H, G, S]; same shape."""
    return attention_probs(logits[..., None, :], sinks)[..., 0, :]


def reduce_group(logits: Tensor, how: Combine, sinks: Tensor | None = None) -> Tensor:
    """One relevance [B, H, S] per kv head from the logits [B, H, G, S] of its query heads; sinks: of these heads."""
    if logits.shape[2] == 1:
        return logits[:, :, 0]  # a softmax keeps the order but may round neighbours into ties
    if how == "softmax_sum":
        return group_probs(logits, sinks).sum(2)
    return logits.sum(2) if how == "raw_sum" else logits.amax(2)


@dataclass(frozen=True)
class Selection:
    """A method's selection.

    slots [B, H, N]: candidates to attend to, no slot twice in a head, -1: none; extra: whatever else the method's
    `attend` needs.
    """

    slots: Tensor
    extra: Any = None


# What a retrieval method is: it keeps every token and selects, for each query, the tokens to attend to.


@dataclass(frozen=True)
class PrefillKV:
    """The keys and values of a whole prompt, to be indexed: slot = position, padding removed.

    keys [B, H, S, D], values [B, H, S, Dv]; lengths: real tokens per row (slots behind them hold nothing); recent: past
    tokens of the recent window, per row; capacity: positions that the index should have room for; host_device: where
    offloaded parts of the index live (None: nothing leaves the device); device: the model's; params: of the layer's
    attention; beams: number of adjacent rows that hold the same prompt (the beams of a sample); calibration: what
    `Retrieval.calibrate` returned.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    recent: list[int]
    capacity: int
    host_device: torch.device | None
    device: torch.device
    params: AttentionParams
    beams: int = 1
    calibration: Any = None

    def real(self) -> Tensor:
        """The slots that hold a token: [B, S] bool."""
        ends = torch.tensor(self.lengths, device=self.device)
        return torch.arange(self.keys.shape[2], device=self.device) < ends[:, None]


@dataclass(frozen=True)
class StoredPrompt:
    """One layer's prompt, or a chunk of it, which a cache has stored and not indexed yet.

    local: past tokens of the recent window; counts: slots to select; both per row, and empty before the prompt's end.
    """

    inputs: AttentionInputs
    index: KVIndex
    local: list[int]
    counts: list[int]


def left_aligned(x: Tensor, lengths: list[int]) -> Tensor:
    """x [B, H, S, D], padded on the left, moved to slot = position; slots behind a row's length hold nothing."""
    if min(lengths) == x.shape[2]:
        return x
    pads = x.shape[2] - torch.tensor(lengths, device=x.device)[:, None]
    index = (pads + torch.arange(x.shape[2], device=x.device)) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


@dataclass(frozen=True)
class Retrieval(KeepsEverything):
    """Base of every retrieval method. Subclasses say how relevant each slot is; all they remember is in the `KVIndex`.

    attended = sinks U recent window U current token U selected slots: budget slots in all, the current token included.
    Of the budget less sinks and current token, `recent_ratio` is the window (floored) and the rest is selected: at
    equal counts these are the halves of PQCache's release (arXiv:2407.12820), which grants int(ratio * (prompt -
    sinks)) and puts sinks and current token on top. Prefill attends in full.

    offload: keep all but sinks, window, block cache and index in CPU memory (on a CPU: report the bytes that would
    move).
    """

    whole_prompt: ClassVar[bool] = False  # whether it can only index a prompt that comes in one forward
    n_sinks: Annotated[int, AtLeast(0)] = 4  # 32: PQCache's release, for every method; 0: SparQ's authors
    recent_ratio: Annotated[float, Range(0, 1)] = 0.5  # of the budget less sinks and current token
    offload: bool = True  # false: everything stays on the device

    def recent(self, budget: int) -> int:
        return 1 + floor_share(self.recent_ratio, max(0, budget - self.n_sinks - 1))

    # -- what a method is made of -------------------------------------------------------------------------------------

    def build(self, index: KVIndex, prompt: PrefillKV) -> None:
        """Index a prompt: compute what the method needs of it, and register that with the index as tensors."""

    def extend(self, index: KVIndex, key: Tensor, value: Tensor, positions: list[int]) -> None:
        """Index the new token of every row.

        key [B, H, D], value [B, H, Dv]; positions: its position, one number per row.
        """

    def relevance(self, retrieval_query: RetrievalQuery) -> Tensor:
        """Relevance [B, H, S] float32 of every slot, higher is selected first; values of non-candidates are ignored."""
        raise NotImplementedError

    def select(self, retrieval_query: RetrievalQuery) -> Selection:
        """The slots to attend to in addition to sinks, window and current token: by default the most relevant ones."""
        relevance = self.relevance(retrieval_query)
        if is_users(type(self)) and bool((relevance.isnan() & retrieval_query.candidates).any()):
            raise nan_error(type(self), "relevance")
        return Selection(retrieval_query.topk(relevance))

    # -- what a method may do differently -----------------------------------------------------------------------------

    def attend(self, inputs: AttentionInputs, retrieval_query: RetrievalQuery, chosen: Selection) -> Tensor:
        """Attention output [B, H, G, 1, Dv] over `inputs`: sinks, selected slots, window, current token, in this order.

        chosen: what `select` returned.
        """
        return compute_attention(inputs)

    def attend_prompt(self, inputs: AttentionInputs, index: KVIndex, local: list[int], counts: list[int]) -> Tensor:
        """Attention output [B, H, G, Q, Dv] of prompt rows.

        local: past tokens of the recent window, per row; counts: slots to select, per row.
        """
        return compute_attention(inputs)

    @classmethod
    def observe_prompts(cls, prompts: Sequence[tuple[Self, StoredPrompt]]) -> None:
        """What `attend_prompt` leaves in the index, for caches of this class that share a prompt and need no output.

        By default outputs are computed for it, unless the class has no `attend_prompt` of its own.
        """
        if cls.attend_prompt is not Retrieval.attend_prompt:
            for method, prompt in prompts:
                method.attend_prompt(prompt.inputs, prompt.index, prompt.local, prompt.counts)

    @property
    def cache(self) -> BlockCacheConfig | None:
        """Settings of the block cache on the device; None: no block cache."""
        return None

    @property
    def indexes_on_host(self) -> bool:
        """Whether `build` runs on the CPU during a GPU's computation; the first new token waits for it."""
        return False

    @property
    def per_query_head(self) -> bool:
        """Whether every query head selects for itself: keys and values are then repeated for every query head."""
        return False

    @property
    def clamps_positions(self) -> bool:
        """Whether `attend` moves keys to other positions, for which it needs the model's RoPE."""
        return False

    def check_heads(self, dim: int) -> None:
        """ConfigError where the method cannot work with heads of `dim` dimensions."""

    def calibrate(self, seconds: Callable[[int], float], longest: int, heads: int, dim: int, device: str) -> Any:
        """Measure what the method needs to know of model and machine; called once per model, before the first prompt.

        seconds(n): time of one layer for n <= longest prompt tokens on this machine; heads: kv heads; dim: D; device:
        the model's. The result is `PrefillKV.calibration`.
        """
        return None

    def index_bits_per_token(self, dim: int) -> float:
        """Bits per token and kv head that selecting reads at every step, at 16 bits a component, as papers count."""
        return 0.0
