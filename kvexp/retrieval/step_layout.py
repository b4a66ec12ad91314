"""Where the sinks, candidates and window of a decode step lie: the same in every layer, so it is made once a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

HELD = 64  # layouts kept: one per cache that decodes in the same steps


@dataclass(frozen=True)
class StepLayout:
    """The positions of one decode step. Tensors are shared by layers and caches: nothing may write to them.

    first [B, n]: of the sinks; last [B, W]: of the recent window and the newest token, ascending; -1: none. candidates
    [B, 1, S] bool: slots in between; hidden [B, 1, S] bool: the others.
    """

    first: Tensor
    last: Tensor
    candidates: Tensor
    hidden: Tensor


def step_layout(lengths: list[int], local: list[int], sinks: int, device: torch.device) -> StepLayout:
    """The layout of the newest token of every row.

    lengths: tokens held, the newest included, per row; local: past tokens of the recent window, per row.
    """
    return _step_layout(tuple(lengths), tuple(local), sinks, device, torch.is_inference_mode_enabled())


@lru_cache(maxsize=HELD)
def _step_layout(
    lengths: tuple[int, ...], local: tuple[int, ...], sinks: int, device: torch.device, inference: bool
) -> StepLayout:
    """As `step_layout`; inference: torch's mode, since a tensor made in it is of no use to autograd."""
    width = max(local) + 1
    ends = torch.tensor(lengths, device=device)[:, None]
    oldest = ends - 1 - torch.tensor(local, device=device)[:, None]
    first = torch.arange(sinks, device=device).expand(len(lengths), -1)
    last = ends - width + torch.arange(width, device=device)
    slots = torch.arange(max(lengths), device=device)
    candidates = ((slots >= sinks) & (slots < oldest))[:, None]
    return StepLayout(
        first=first.masked_fill(first >= ends, -1),
        last=last.masked_fill((last < oldest) | (last < sinks), -1),
        candidates=candidates,
        hidden=~candidates,
    )
