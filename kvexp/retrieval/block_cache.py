"""The block cache of offloaded keys and values: the most used blocks stay on the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.errors import ConfigError
from kvexp.retrieval.copy_streams import CopyStreams
from kvexp.retrieval.policies import Policy, make_policy


@dataclass(frozen=True)
class BlockCacheConfig:
    """Settings of the block cache.

    tokens: capacity per kv head; block: tokens per block; policy: lfu or lru; per_step: each step counts as uses the
    `per_step` blocks in which most of its selected tokens lie (k_cache of PQCache, arXiv:2407.12820).
    """

    tokens: int = 4096
    block: int = 128
    policy: str = "lfu"
    per_step: int = 32

    def __post_init__(self) -> None:
        make_policy(self.policy, 1)
        if self.block < 1 or self.per_step < 1:
            raise ConfigError(
                f"cache_block and cache_blocks_per_step must be at least 1, got {self.block} and {self.per_step}"
            )
        if self.tokens < self.block:
            raise ConfigError(
                f"a block cache of cache_tokens={self.tokens} cannot hold one block of {self.block} tokens: "
                "raise cache_tokens, lower the size of a block (cache_block; block), or set cache_tokens=0 for no cache"
            )


class BlockCache:
    """Cached blocks on the device: keys [B, H, n * block, D], values [B, H, n * block, Dv] of n cache slots.

    block_table [B, blocks] on the host: the cache slot of each block, -1 where it is not cached. Block j holds the
    `config.block` positions from first + j * block on, the same for all kv heads of a row; each row has a policy of its
    own, so no row depends on its neighbours. Only blocks whose tokens can no longer change are cached. (A departure
    from PQCache's release, where the last, half filled block may enter and its later tokens are then missing.)
    """

    def __init__(
        self, config: BlockCacheConfig, first: int, keys: Tensor, values: Tensor, device: torch.device
    ) -> None:
        """Make an empty cache.

        keys, values: the buffers in CPU memory, for shapes and dtype; first: position of the first block.
        """
        self.config, self.first = config, first
        limit = config.tokens // config.block
        self.policies: list[Policy] = [make_policy(config.policy, limit) for _ in range(keys.shape[0])]
        self.block_table = torch.full((keys.shape[0], 0), -1, dtype=torch.int64)
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3], device=device) for x in (keys, values))
        self.ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values on the device."""
        return self.keys.nbytes + self.values.nbytes

    def lookup(self, slots: Tensor) -> Tensor:
        """Indices of slots [B, H, N] (-1: none) into the buffers flattened over rows and heads; -1: not cached.

        slots: on the host.
        """
        b, h = self.keys.shape[:2]
        if not self.block_table.shape[1] or not self.keys.shape[2]:
            return torch.full_like(slots, -1)
        offset = slots - self.first
        block = offset // self.config.block
        known = block.clamp(min=0, max=self.block_table.shape[1] - 1)
        place = self.block_table.gather(1, known.flatten(1)).view_as(slots)
        place = place.masked_fill((slots < self.first) | (block != known), -1)
        head = torch.arange(b * h).view(b, h, 1) * self.keys.shape[2]
        return torch.where(place >= 0, head + place * self.config.block + offset % self.config.block, -1)

    def update(
        self, slots: Tensor, fixed: list[int], keys: Tensor, values: Tensor, copy_streams: CopyStreams
    ) -> list[int]:
        """Cache the blocks that hold most of the selected slots [B, H, N] (host); returns the number copied, per row.

        fixed: per row the first position that may still change or lies in the recent window. keys, values: all tokens'
        in CPU memory. On CUDA the copies run on a stream of their own and are waited for at the next lookup.
        """
        return self.insert(self.count(slots), fixed, keys, values, copy_streams)

    def count(self, slots: Tensor) -> list[list[int]]:
        """How many of the slots [B, H, N] (host; -1: none) lie in each block: per row, one number per block."""
        block = torch.div(slots - self.first, self.config.block, rounding_mode="floor") + 1
        return [row.flatten().bincount().tolist()[1:] for row in block.clamp_(min=0)]

    def hits(self, counts: list[list[int]]) -> list[int]:
        """How many of the counted slots (`count`) lie in cached blocks, per row."""
        pairs = zip(counts, self.policies, strict=True)
        return [sum(n for block, n in enumerate(row) if block in policy.slots) for row, policy in pairs]

    def insert(
        self, counts: list[list[int]], fixed: list[int], keys: Tensor, values: Tensor, copy_streams: CopyStreams
    ) -> list[int]:
        """As `update`, for slots that have been counted (`count`)."""
        came = []
        for row, counted in enumerate(counts):
            complete = max(0, (fixed[row] - self.first) // self.config.block)
            used = [block for block, n in enumerate(counted[:complete]) if n]
            # Among equals the newer block first, as everywhere.
            used.sort(key=lambda block: (-counted[block], -block))
            came.append(self._insert(row, used[: self.config.per_step], complete, keys, values, copy_streams))
        self.ready = copy_streams.record_h2d()
        copy_streams.record_write(self.keys, self.values)
        return came

    def _insert(
        self, row: int, chosen: list[int], blocks: int, keys: Tensor, values: Tensor, copy_streams: CopyStreams
    ) -> int:
        """Cache the blocks `chosen` of one row, by its policy; returns the number of blocks copied to the device.

        blocks: number of blocks of the row; keys, values: all tokens' in CPU memory.
        """
        policy, size = self.policies[row], self.config.block
        before = dict(policy.slots)
        for block in chosen:
            policy.insert(block)
        new = [(block, place) for block, place in policy.slots.items() if before.get(block) != place]
        self._reserve(max((place for _, place in new), default=-1) + 1, blocks, copy_streams)
        if not new:
            return 0
        with copy_streams.h2d():
            for block, place in new:
                start, at = self.first + block * size, place * size
                for source, target in ((keys, self.keys), (values, self.values)):
                    for head in range(source.shape[1]):  # contiguous pieces: only those are copied asynchronously
                        target[row, head, at : at + size].copy_(
                            source[row, head, start : start + size], non_blocking=True
                        )
        self.block_table[row] = -1
        self.block_table[row, list(policy.slots)] = torch.tensor(list(policy.slots.values()), dtype=torch.int64)
        return len(new)

    def _reserve(self, places: int, blocks: int, copy_streams: CopyStreams) -> None:
        """Grow to `places` cache slots on the device and `blocks` blocks in the table."""
        if blocks > self.block_table.shape[1]:
            self.block_table = torch.nn.functional.pad(
                self.block_table, (0, blocks - self.block_table.shape[1]), value=-1
            )
        have = self.keys.shape[2] // self.config.block
        if places > have:
            copy_streams.wait(
                copy_streams.record_h2d()
            )  # what came for the rows before is still on its way into the old buffers
            places = min(max(places, 2 * have), self.config.tokens // self.config.block)
            for name in ("keys", "values"):
                old: Tensor = getattr(self, name)
                new = old.new_empty(*old.shape[:2], places * self.config.block, old.shape[3])
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def index_rows(self, rows: Tensor, copy_streams: CopyStreams) -> BlockCache:
        """A copy of the cache for batch rows `rows` [n], which may repeat."""
        copy_streams.wait(self.ready)
        other = copy.copy(self)
        other.ready = None
        other.policies = [copy.deepcopy(self.policies[i]) for i in rows.tolist()]
        other.block_table = self.block_table[rows]
        place = rows.to(self.keys.device)
        other.keys, other.values = self.keys.index_select(0, place), self.values.index_select(0, place)
        return other
