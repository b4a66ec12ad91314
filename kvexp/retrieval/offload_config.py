"""Configuration of offloading for one layer, and counters of the bytes it moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvexp.retrieval.block_cache import BlockCacheConfig


@dataclass
class TransferStats:
    """Transfers between device and CPU memory for one batch row; on a CPU, those that a GPU would make.

    d2h: bytes of keys and values offloaded; h2d: bytes fetched (selected tokens, cached blocks, offloaded index);
    lookups: (kv head, token) pairs selected; hits: those of them found in the block cache.
    """

    d2h: int = 0
    h2d: int = 0
    lookups: int = 0
    hits: int = 0


@dataclass(frozen=True)
class OffloadConfig:
    """What of one layer is offloaded.

    sinks: first tokens that stay on the device; local: past tokens of the recent window, per row, newest token not
    included; room: positions to allocate; offload: whether the rest leaves the device; cache: the block cache, if any.
    """

    sinks: int
    local: list[int]
    room: int
    offload: bool = True
    cache: BlockCacheConfig | None = None


def should_offload(config: OffloadConfig, device: torch.device) -> bool:
    """Whether tokens are moved from `device` to CPU memory."""
    return config.offload and device.type == "cuda"
