"""Statistics of queries from a calibration pass: what a model's queries are like in each head, whatever the prompt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvexp.core.attention import RoPE
from kvexp.errors import ConfigError

BLOCK = 1024  # query rows taken at a time: their copies in float64 are not larger


@dataclass(frozen=True)
class LayerCalibration:
    """The part of a `QueryCalibration` that is of one layer; its tensors without L, on the layer's device."""

    direction: Tensor
    mean: Tensor
    size: Tensor

    def to(self, device: torch.device) -> LayerCalibration:
        """The same on another device; itself where it lies there already."""
        if self.mean.device == device:
            return self
        return LayerCalibration(self.direction.to(device), self.mean.to(device), self.size.to(device))


@dataclass(frozen=True)
class QueryCalibration:
    """Statistics of all queries of a calibration pass, in each layer and query head; float32, on the CPU.

    direction [L, H, G, D]: the unit vector along which the queries, RoPE applied, have their largest mean square,
    pointed to the side of their mean. mean [L, H, G, D]: of the queries before RoPE. size [L, H, G, n]: the mean length
    of each of the n pairs of dimensions that RoPE turns; n is 0 for models without RoPE. digest: 16 hex digits of all
    numbers; calibrations with the same digest are equal.
    """

    digest: str
    direction: Tensor = field(compare=False, repr=False)
    mean: Tensor = field(compare=False, repr=False)
    size: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, direction: Tensor, mean: Tensor, size: Tensor) -> QueryCalibration:
        """The calibration with its digest; ConfigError for tensors that do not go together or hold no numbers."""
        given = {"direction": direction, "mean": mean, "size": size}
        if direction.ndim != 4 or mean.shape != direction.shape or size.shape[:3] != direction.shape[:3]:
            shapes = [list(one.shape) for one in given.values()]
            raise ConfigError(f"tensors of shapes {shapes} are not the statistics of one model's queries")
        total = hashlib.sha256()
        for name, one in given.items():
            if one.dtype != torch.float32 or not bool(one.isfinite().all()):
                raise ConfigError(f"{name} must be finite numbers in float32")
            total.update(f"{name} {list(one.shape)}\n".encode() + one.contiguous().numpy().tobytes())
        return cls(total.hexdigest()[:16], direction, mean, size)

    def layer(self, index: int) -> LayerCalibration:
        """The statistics of one layer."""
        return LayerCalibration(self.direction[index], self.mean[index], self.size[index])

    def check_shape(self, layers: int, heads: int, group: int, width: int) -> None:
        """ConfigError where the model has other numbers of layers, kv heads, query heads per kv head or dimensions."""
        wanted, found = [layers, heads, group, width], list(self.mean.shape)
        if wanted != found:
            raise ConfigError(
                f"this calibration has queries of shape [L, H, G, D] = {found}, the model's are {wanted}: it is of "
                "another model"
            )


class QuerySums:
    """Sums over the queries of one layer, added up sequence by sequence in float64, of which statistics are made."""

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.total = self.before = self.sizes = torch.zeros((), dtype=torch.float64)

    def add(self, query: Tensor, positions: Tensor, rope: RoPE | None) -> None:
        """Add queries [H, G, Q, D], RoPE applied, that stand at positions [Q]. rope: the model's; None: it has none."""
        self.count += query.shape[2]
        for part, at in zip(query.split(BLOCK, dim=2), positions.split(BLOCK), strict=True):
            rows = part.double()
            self.squares = self.squares + (rows.transpose(-1, -2) @ rows).cpu()
            self.total = self.total + rows.sum(-2).cpu()
            if rope is None:
                self.before, self.sizes = self.total, torch.zeros(*query.shape[:2], 0, dtype=torch.float64)
                continue
            # In float32 whatever the model's dtype: an angle in half precision is no angle.
            before = rope.rotate_by(part.float().flatten(0, 1)[None], -at[None, None])[0].view(part.shape)
            self.before = self.before + before.double().sum(-2).cpu()
            self.sizes = self.sizes + torch.linalg.vector_norm(rope.pairs(before.double()), dim=-1).sum(-2).cpu()

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """direction [H, G, D], mean [H, G, D], size [H, G, n], as in `QueryCalibration`; ConfigError for infinities."""
        if not bool(self.squares.isfinite().all()):
            raise ConfigError("the model's queries are not finite: calibrate in model.dtype=float32 or bfloat16")
        main = torch.linalg.eigh(self.squares).eigenvectors[..., -1]
        main = torch.where((main * self.total).sum(-1, keepdim=True) < 0, -main, main)
        return main.float(), (self.before / self.count).float(), (self.sizes / self.count).float()
