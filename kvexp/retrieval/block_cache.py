"""Copies, on the device, of the blocks that are asked for most: what they hold need not be fetched again."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.errors import ConfigError
from kvexp.retrieval.copy_streams import Lanes
from kvexp.retrieval.policies import Policy, policy_of


@dataclass(frozen=True)
class CacheSpec:
    """tokens: capacity per kv head; block: tokens per block; policy: lfu or lru; per_step: blocks noted per step.

    A step notes the `per_step` blocks in which most of its selected tokens lie (the paper's k_cache).
    """

    tokens: int = 4096
    block: int = 128
    policy: str = "lfu"
    per_step: int = 32

    def __post_init__(self) -> None:
        policy_of(self.policy, 1)
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
    """keys [B, H, places * block, D], values likewise on the device; `table` [B, blocks] on the host: place or -1.

    Block j holds positions first + j * block and on, the same for all kv heads of a row; rows have policies of their
    own, so none depends on its neighbours. Only blocks whose tokens can no longer change come in (departure: in the
    release the last, half filled block may enter and is then read stale).
    """

    def __init__(self, spec: CacheSpec, first: int, keys: Tensor, values: Tensor, device: torch.device) -> None:
        """keys, values: the memory's, for shapes and dtype."""
        self.spec, self.first = spec, first
        limit = spec.tokens // spec.block
        self.policies: list[Policy] = [policy_of(spec.policy, limit) for _ in range(keys.shape[0])]
        self.table = torch.full((keys.shape[0], 0), -1, dtype=torch.int64)
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3], device=device) for x in (keys, values))
        self.ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.keys.nbytes + self.values.nbytes

    def lookup(self, slots: Tensor) -> Tensor:
        """Where the wanted slots [B, H, N] (host; -1: none) lie in the flattened buffers, -1 where they are not."""
        b, h = self.keys.shape[:2]
        if not self.table.shape[1] or not self.keys.shape[2]:
            return torch.full_like(slots, -1)
        offset = slots - self.first
        block = offset // self.spec.block
        known = block.clamp(min=0, max=self.table.shape[1] - 1)
        place = self.table.gather(1, known.flatten(1)).view_as(slots)
        place = place.masked_fill((slots < self.first) | (block != known), -1)
        head = torch.arange(b * h).view(b, h, 1) * self.keys.shape[2]
        return torch.where(place >= 0, head + place * self.spec.block + offset % self.spec.block, -1)

    def note(self, slots: Tensor, fixed: list[int], keys: Tensor, values: Tensor, lanes: Lanes) -> list[int]:
        """Take in the blocks most asked for by slots [B, H, N] (host) and return how many came in, per row.

        fixed: per row the first position that may still change or lies in the recent window. keys, values: the
        memory's, on the host. On CUDA the copies run on a stream of their own and are waited for at the next lookup.
        """
        came = []
        for row, wanted in enumerate(slots):
            complete = max(0, (fixed[row] - self.first) // self.spec.block)
            blocks = ((wanted[wanted >= self.first] - self.first) // self.spec.block).flatten()
            counts = torch.bincount(blocks[blocks < complete], minlength=complete)
            # Among equals the newer block first, as everywhere.
            order = counts.flip(0).argsort(descending=True, stable=True)[: self.spec.per_step]
            order = order[: int((counts > 0).sum())]
            came.append(self._insert(row, (complete - 1 - order).tolist(), complete, keys, values, lanes))
        self.ready = lanes.mark_in()
        lanes.filling(self.keys, self.values)
        return came

    def _insert(self, row: int, chosen: list[int], blocks: int, keys: Tensor, values: Tensor, lanes: Lanes) -> int:
        policy, size = self.policies[row], self.spec.block
        before = dict(policy.places)
        for block in chosen:
            policy.insert(block)
        new = [(block, place) for block, place in policy.places.items() if before.get(block) != place]
        self._room(max((place for _, place in new), default=-1) + 1, blocks, lanes)
        with lanes.inwards():
            for block, place in new:
                start, at = self.first + block * size, place * size
                for source, target in ((keys, self.keys), (values, self.values)):
                    for head in range(source.shape[1]):  # contiguous pieces: only those are copied asynchronously
                        target[row, head, at : at + size].copy_(
                            source[row, head, start : start + size], non_blocking=True
                        )
        self.table[row] = -1
        self.table[row, list(policy.places)] = torch.tensor(list(policy.places.values()), dtype=torch.int64)
        return len(new)

    def _room(self, places: int, blocks: int, lanes: Lanes) -> None:
        """Grow to so many places on the device and so many blocks in the table."""
        if blocks > self.table.shape[1]:
            self.table = torch.nn.functional.pad(self.table, (0, blocks - self.table.shape[1]), value=-1)
        have = self.keys.shape[2] // self.spec.block
        if places > have:
            lanes.join(lanes.mark_in())  # what came for the rows before is still on its way into the old buffers
            places = min(max(places, 2 * have), self.spec.tokens // self.spec.block)
            for name in ("keys", "values"):
                old: Tensor = getattr(self, name)
                new = old.new_empty(*old.shape[:2], places * self.spec.block, old.shape[3])
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def picked(self, rows: Tensor, lanes: Lanes) -> BlockCache:
        """These rows, which may repeat, in a cache of their own."""
        lanes.join(self.ready)
        other = copy.copy(self)
        other.ready = None
        other.policies = [copy.deepcopy(self.policies[i]) for i in rows.tolist()]
        other.table = self.table[rows]
        place = rows.to(self.keys.device)
        other.keys, other.values = self.keys.index_select(0, place), self.values.index_select(0, place)
        return other
