"""What is asked of one layer's memory, and what it has moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvexp.retrieval.block_cache import CacheSpec


@dataclass
class Traffic:
    """Bytes that crossed between device and home for one batch row, and hits of the block cache.

    On a CPU nothing crosses: these are the bytes that would. out: keys and values offloaded; into: everything fetched
    (selected rows, cached blocks, whatever a method's index ships); asked, hits: (kv head, token) pairs selected, and
    those of them found in the block cache.
    """

    out: int = 0
    into: int = 0
    asked: int = 0
    hits: int = 0


@dataclass(frozen=True)
class Layout:
    """sinks: first tokens that stay on the device; local: past tokens of the recent window, per row (the newest token
    comes on top); room: positions to make room for; offload: the rest leaves the device; cache: of blocks."""

    sinks: int
    local: list[int]
    room: int
    offload: bool = True
    cache: CacheSpec | None = None


def leaves(layout: Layout, device: torch.device) -> bool:
    """Do tokens go to another device than the one they were made on?"""
    return layout.offload and device.type == "cuda"
