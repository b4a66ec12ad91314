"""Least squares by which kept slots are made to stand for dropped ones, all kv heads of a row at once.

In float64 on a CPU and float32 elsewhere. What cannot be solved is said by head, and is never NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fit_dtype(device: torch.device) -> torch.dtype:
    """The dtype that fits are computed in."""
    return torch.float64 if device.type == "cpu" else torch.float32


def least_squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The x [H, t, k] of least |a x - b|, of least norm where there are fewer equations; and where there is none, [H].

    a [H, n, t], b [H, n, k]. There is none where a has not full rank to the precision of its dtype: x is 0 there.
    """
    n, t = a.shape[-2:]
    if n >= t:  # the triangle of (a, b) holds a's triangle and, next to it, Q^T b: Q itself is not formed
        triangle, right = torch.linalg.qr(torch.cat([a, b], -1), mode="r").R[:, :t].split((t, b.shape[-1]), -1)
    else:
        q, triangle = torch.linalg.qr(a.transpose(-1, -2))
    diagonal = triangle.diagonal(dim1=-2, dim2=-1).abs()
    floor = torch.finfo(a.dtype).eps * max(n, t) * diagonal.amax(-1)
    failed = ~(diagonal.amin(-1) > floor)
    triangle = torch.where(failed[:, None, None], torch.eye(min(n, t), dtype=a.dtype, device=a.device), triangle)
    if n >= t:
        x = torch.linalg.solve_triangular(triangle, right, upper=True)
    else:
        x = q @ torch.linalg.solve_triangular(triangle.transpose(-1, -2), b, upper=False)
    failed = failed | ~x.isfinite().all(-1).all(-1)
    return torch.where(failed[:, None, None], 0.0, x), failed


def bounded_least_squares(a: Tensor, b: Tensor, least: float, most: float, steps: int) -> tuple[Tensor, Tensor]:
    """A w [H, t] within [least, most] of small |a w - b|, and where there is none, [H]; a [H, n, t], b [H, n].

    The solution without bounds, clamped, then `steps` steps of projected gradient descent, of size 1 / sigma^2, sigma
    the largest singular value by three power iterations from a vector of ones.
    """
    x, failed = least_squares(a, b[..., None])
    w = x[..., 0].clamp(least, most)
    if not steps:
        return w, failed
    u = torch.ones_like(w)[..., None]
    for _ in range(3):
        u = a.transpose(-1, -2) @ (a @ u)
        u = u / u.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    size = (a @ u).square().sum(-2)[..., 0].clamp_min(1e-6)  # sigma^2
    for _ in range(steps):
        slope = (a.transpose(-1, -2) @ (a @ w[..., None] - b[..., None]))[..., 0]
        w = (w - slope / size[:, None]).clamp(least, most)
    return w, failed


def matching_pursuit(a: Tensor, b: Tensor, count: int, most: float) -> Tensor:
    """Indices [H, count] of columns of a [H, n, S] whose nonnegative sum comes near b [H, n], the best first.

    Orthogonal matching pursuit: the column of largest product with what is left of b joins; the weights of all that
    have joined are solved anew, without bounds, and clamped to [1e-12, most]. Columns are held in an orthogonal basis.
    """
    h, n, _ = a.shape
    eps, tiny = torch.finfo(a.dtype).eps, torch.finfo(a.dtype).tiny
    basis, triangle = a.new_zeros(h, n, count), torch.eye(count, dtype=a.dtype, device=a.device).repeat(h, 1, 1)
    columns, chosen = torch.zeros_like(basis), torch.zeros(h, count, dtype=torch.int64, device=a.device)
    taken, left = torch.zeros(h, a.shape[-1], dtype=torch.bool, device=a.device), b
    for step in range(count):
        gain = (a.transpose(-1, -2) @ left[..., None])[..., 0].masked_fill(taken, -torch.inf)
        best = gain.argmax(-1, keepdim=True)
        chosen[:, step : step + 1] = best
        taken.scatter_(-1, best, True)
        column = a.gather(-1, best[:, None].expand(-1, n, -1))
        before, upto = basis[..., :step], slice(0, step + 1)
        along = before.transpose(-1, -2) @ column
        rest = column - before @ along
        again = before.transpose(-1, -2) @ rest  # what rounding has left along the basis
        rest = rest - before @ again
        size = rest.norm(dim=-2, keepdim=True)
        depends = size <= eps * n * column.norm(dim=-2, keepdim=True)
        columns[..., step : step + 1] = column
        basis[..., step : step + 1] = torch.where(depends, 0.0, rest / size.clamp_min(tiny))
        triangle[:, :step, step : step + 1] = along + again
        triangle[:, step : step + 1, step : step + 1] = torch.where(depends, 1.0, size)
        toward = basis[..., upto].transpose(-1, -2) @ b[..., None]
        weights = torch.linalg.solve_triangular(triangle[:, upto, upto], toward, upper=True).clamp(1e-12, most)
        left = b - (columns[..., upto] @ weights)[..., 0]
    return chosen
