"""Tiles, warps and stages of the Triton kernels. What each choice did is in docs/gpu.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at a time.

    rows, slots: query rows and slots of the tile. warps: that share it. stages: tiles whose loads are in flight.
    """

    rows: int
    slots: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The launch's constants and options."""
        return {"M": self.rows, "N": self.slots, "num_warps": self.warps, "num_stages": self.stages}


def prompt_tile(kernel: str, head_size: int, element_size: int) -> Tile:
    """The tile of `row_log_sum_exp` or `column_sums`.

    head_size: D; element_size: bytes of a number in a product (4 where logits are computed in float32).
    """
    sums = kernel == "column_sums"
    if element_size == 4:  # these products take no tensor cores: every number of the tile lies in registers
        if head_size > 128:
            return Tile(16, 16, 8, 2) if sums else Tile(16, 16, 4, 1)
        return Tile(32, 32, 8 if head_size > 64 else 4, 3)
    if sums and (head_size <= 64 or head_size > 128):
        return Tile(32, 64, 4, 3)
    return Tile(64, 64, 8, 3)


def kv_tile(head_size: int, element_size: int) -> int:
    """Slots of a tile of `split_kv_attention` and `combine_splits`.

    head_size: D; element_size: bytes of a query's numbers.
    """
    return 32 if element_size == 4 and head_size > 128 else 64


def decode_options(head_size: int, element_size: int) -> dict[str, int]:
    """Warps and stages of `split_kv_attention`. Arguments as of `prompt_tile`."""
    if element_size == 4 and head_size > 64:
        return {"num_warps": 8, "num_stages": 2}
    return {"num_warps": 4 if head_size <= 128 else 8, "num_stages": 3}
