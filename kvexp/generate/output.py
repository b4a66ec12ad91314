"""The result of a generation, and the checks before it is returned."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvexp.core import MemoryTracker
from kvexp.errors import CacheError, NotFinite
from kvexp.generate.eviction_stats import EvictionStats
from kvexp.generate.finish_reason import Ending
from kvexp.models import EvictionCache


@dataclass
class Timing:
    """Seconds from the call to the first and second token, then per output token; NaN for too few tokens."""

    ttft_s: float = float("nan")
    tt2t_s: float = float("nan")
    tpot_s: float = float("nan")

    @classmethod
    def of(cls, start: float, stamps: list[float]) -> Timing:
        """The times of tokens known at `stamps`, counted from `start`; both in `time.perf_counter()` seconds."""
        nan = float("nan")
        first = stamps[0] - start if stamps else nan
        second = stamps[1] - start if len(stamps) > 1 else nan
        per_token = (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else nan
        return cls(first, second, per_token)


@dataclass
class Generation:
    """The answers to a batch of B prompts.

    tokens: new token ids per row, cut after the end token or stop string. endings: how each row ended.
    sequences [B, columns]: prompts and new tokens, padded. timing: of the whole batch. memory_tracker: bytes.
    cache: as the last step left it. beam_scores: one per row, with beams. logits: [B, V] per step, if asked for.
    early_stats: statistics, by row, of rows that ended before the batch did, as of then (`receipts` takes them).
    cuda_graph: what became of cache.graph=auto, in plain words; None where it is off, and on a CPU.
    """

    tokens: list[list[int]]
    endings: list[Ending]
    sequences: Tensor
    timing: Timing
    memory_tracker: MemoryTracker
    cache: EvictionCache
    beam_scores: list[float] | None = None
    logits: tuple[Tensor, ...] = field(default=(), repr=False)
    early_stats: dict[int, EvictionStats] = field(default_factory=dict, repr=False)
    cuda_graph: str | None = None


def check_finite(cache: EvictionCache) -> None:
    """NotFinite where logits or scores held NaN or inf: tokens or slots were then chosen by no meaningful number."""
    if not cache.logits_were_finite():
        raise NotFinite("the logits of this run hold NaN or inf, no number can be trusted")
    if not cache.scores_are_finite():
        raise NotFinite("the scores of this run hold NaN: the model produced NaN or inf, no number can be trusted")


def check_seq_length(cache: EvictionCache, prompt: int, steps: int) -> None:
    """CacheError where the cache has not seen the prompt's `prompt` columns and `steps` new tokens but the last."""
    seen = cache.get_seq_length()
    if seen != prompt + steps - 1:
        raise CacheError(
            f"the cache has seen {seen} columns, {prompt + steps - 1} were expected: this version of transformers "
            "feeds the model differently, no number of this run can be trusted"
        )
