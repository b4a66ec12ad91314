"""EpiKV: tokens that change the hidden state more than the tokens before them did are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core import EvictionContext, Method, Needs
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class EpiKV(Method):
    """d_l[t] = ||h_l[t] - h_l[t-1]||_2, h_l the hidden state that layer l gets; z_l[t] = (d_l[t] - mean) / (std + 1e-6)
    over the last `window` generated tokens up to t; s[t] = z_rises[t] - z_falls[t]; keep = prompt U newest U top of s,
    one set for the model.

    Source: Kolawole and Smith, arXiv:2606.26472, and the authors' code at d424208, class DetrendendHSVarianceEviction
    (EpiKV-Flat; behind layers 10 and 21 of R1-Distill-Llama-8B's 32, the newest 128 or a quarter of the budget): for
    other models the same shares of the depth. Needs `keep=prompt`. Departures: the newest `protect_recent` stay at any
    budget; where several tokens are fed at once, all of the newest forward stay until the next. Left out:
    EpiKV-Seg, and the reserve for large values.
    """

    name: ClassVar[str] = "epikv"
    window: Annotated[int, AtLeast(2)] = 64  # generated tokens, before and with a token, that it is compared with
    rises: Annotated[float, Range(0, 1)] = 0.34375  # share of the depth, 11 of 32: large changes there are kept
    falls: Annotated[float, Range(0, 1)] = 0.6875  # 22 of 32: large changes there go
    protect_recent: Annotated[int, AtLeast(2)] = 128  # counts the token being generated

    @property
    def needs(self) -> Needs:
        return Needs(state_changes=(self.rises, self.falls))

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.state_changes is not None and ctx.kept_prompt is not None
        rises, falls = rolling_z(ctx.state_changes, self.window).unbind(1)
        score = pad((rises - falls).float(), (0, 1), value=torch.inf)  # the last entry is for tokens without a score
        step = ctx.positions - ctx.kept_prompt[:, None, None]
        step = torch.where(step < 0, score.shape[-1] - 1, step).clamp_max(score.shape[-1] - 1)
        return score[:, None].expand(-1, step.shape[1], -1).gather(-1, step)


def rolling_z(x: Tensor, window: int) -> Tensor:
    """z-score [..., n] float64 of every number of x [..., n] among itself and the window - 1 before it."""
    x = x.double()
    last = torch.arange(1, x.shape[-1] + 1, device=x.device)
    first = (last - window).clamp_min(0)
    sums, squares = (pad(y.cumsum(-1), (1, 0)) for y in (x, x.square()))
    mean = (sums[..., last] - sums[..., first]) / (last - first)
    variance = (squares[..., last] - squares[..., first]) / (last - first) - mean.square()
    return (x - mean) / (variance.clamp_min(0).sqrt() + 1e-6)
