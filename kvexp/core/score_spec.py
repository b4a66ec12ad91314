"""The attention statistic that a method scores slots by, as a declaration: the core chooses how to compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvexp.core.observe.noise import Noise
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class AttentionScoreSpec:
    """Column sums of a (tempered, noised) softmax over the query rows of a forward:

        S_t(k) = decay^m * S_{t-1}(k) + sum over the m new rows q of decay^(rows after q) * softmax_k((x + zeta) / tau)

    tau        (start, end): prompt rows use start, the j-th decode token start + j * (end - start) / max_new_tokens.
    noise      zeta, None for zero.
    decay      forgetting factor in [0, 1]; 0 remembers the newest row only (0**0 is 1).
    last_rows  only the newest so many prompt rows count (None: all).
    over       softmax over the slots that survive, or (mask mode only) over everything ever seen.
    pool_heads every kv head of a layer gets the layer's sum over heads.
    across_layers  one score by position for the whole model: every layer adds to it and selects from it.
    batch      whose scores are added up: each row's own, those of the beams of one sample, or the whole batch's.
    """

    tau: tuple[float, float] = (1.0, 1.0)
    noise: Noise | None = None
    decay: float = 1.0
    last_rows: int | None = None
    over: Literal["survivors", "full"] = "survivors"
    pool_heads: bool = False
    across_layers: bool = False
    batch: Literal["per_beam", "per_sample", "sum_all"] = "per_beam"

    def __post_init__(self) -> None:
        if min(self.tau) <= 0:
            raise ConfigError(f"tau must be positive, got tau_init={self.tau[0]:g} tau_end={self.tau[1]:g}")
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"the forgetting factor must be in [0, 1], got {self.decay:g}")
        if self.last_rows is not None and self.last_rows < 1:
            raise ConfigError(f"at least one query row must be observed, got last_rows={self.last_rows}")
        if self.over not in ("survivors", "full"):
            raise ConfigError(f"score_source must be survivors or full, got {self.over!r}")
        if self.batch not in ("per_beam", "per_sample", "sum_all"):
            raise ConfigError(f"score_batch must be per_sample, per_beam or sum_all, got {self.batch!r}")

    def check_lengths(self, prompt_lengths: Sequence[int]) -> None:
        """ConfigError where the scores of rows with prompts of these lengths cannot be added up."""
        if self.batch == "sum_all" and len(set(prompt_lengths)) > 1:
            raise ConfigError("score_batch=sum_all adds up rows column by column: prompts must be of equal length")

    @property
    def is_plain(self) -> bool:
        """Whether the observed probabilities are the model's attention itself: tau 1, no noise, over survivors."""
        return self.tau == (1.0, 1.0) and self.noise is None and self.over == "survivors"

    @property
    def sums_key(self) -> AttentionScoreSpec:
        """The fields that decide a prompt's column sums, as a key: methods of equal key share the sums."""
        start = self.tau[0]
        return replace(self, tau=(start, start), pool_heads=False, across_layers=False, batch="per_beam")

    def tau_at(self, step: int, max_new_tokens: int | None) -> float:
        """tau of the query row of decode step `step`; 0 is a prompt row. ConfigError past the schedule's end."""
        start, end = self.tau
        if start == end or step == 0:
            return start
        if max_new_tokens is None:
            raise ConfigError("a tau schedule needs max_new_tokens: say how many tokens will be generated")
        if step > max_new_tokens:
            raise ConfigError(
                f"decode step {step} is past max_new_tokens={max_new_tokens}, where the tau schedule ends: "
                "make the cache with the number of tokens that will really be generated"
            )
        return start + step * (end - start) / max_new_tokens

    def taus(self, steps: list[int], max_new_tokens: int | None, device: torch.device) -> Tensor:
        """tau [Q] float32 of query rows at consecutive steps, made on the device so that no copy is waited for."""
        first, last = (self.tau_at(step, max_new_tokens) for step in (steps[0], steps[-1]))
        if first == last:
            return torch.full((len(steps),), first, device=device)
        slope = (last - first) / (len(steps) - 1)
        return first + slope * torch.arange(len(steps), device=device)
