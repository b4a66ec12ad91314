"""Keys and values kept off the device, and what is moved."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, check_fields

# Where the sinks, candidates and window of a decode step lie: the same in every layer, so it is made once a step.


@dataclass(frozen=True)
class StepLayout:
    """The positions of one decode step. Tensors are shared by layers and caches: nothing may write to them.

    first [B, 1, n]: of the sinks; last [B, 1, W]: of the recent window and the newest token, ascending; -1: none.
    candidates [B, 1, S] bool: slots in between.
    """

    first: Tensor
    last: Tensor
    candidates: Tensor


def step_layout(lengths: list[int], local: list[int], sinks: int, device: torch.device) -> StepLayout:
    """The layout of the newest token of every row.

    lengths: tokens held, the newest included, per row; local: past tokens of the recent window, per row.
    """
    return _step_layout(tuple(lengths), tuple(local), sinks, device, torch.is_inference_mode_enabled())


@lru_cache(maxsize=64)  # one per cache that decodes in the same steps
def _step_layout(
    lengths: tuple[int, ...], local: tuple[int, ...], sinks: int, device: torch.device, inference: bool
) -> StepLayout:
    """As `step_layout`; inference: torch's mode, since a tensor made in it is of no use to autograd."""
    width = max(local) + 1
    ends = torch.tensor(lengths, device=device)[:, None, None]
    oldest = ends - 1 - torch.tensor(local, device=device)[:, None, None]
    first = torch.arange(sinks, device=device).expand(len(lengths), 1, -1)
    last = ends - width + torch.arange(width, device=device)
    slots = torch.arange(max(lengths), device=device)
    return StepLayout(
        first=first.masked_fill(first >= ends, -1),
        last=last.masked_fill((last < oldest) | (last < sinks), -1),
        candidates=(slots >= sinks) & (slots < oldest),
    )


# CUDA streams for copies between a GPU and the CPU during the computation; on a CPU the same calls copy at once.

Way = Literal["d2h", "h2d"]  # from the device to the host, from the host to the device


class CopyStreams:
    """One copy stream for each `Way`; without streams, copies are synchronous and there are no events."""

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device = device
        ways: tuple[Way, ...] = ("d2h", "h2d")
        self.streams = {way: torch.cuda.Stream(device) for way in ways} if streams else {}

    def copying(self, way: Way) -> Any:
        """Context for copies; they start after everything issued so far."""
        if way not in self.streams:
            return contextlib.nullcontext()
        # What is copied was computed on the stream in progress, and what is overwritten may still be read there.
        self.streams[way].wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.streams[way])

    def record(self, way: Way) -> torch.cuda.Event | None:
        """An event that is reached when all copies of this way so far have arrived; None without streams."""
        return self.streams[way].record_event() if self.streams else None

    def wait(self, event: torch.cuda.Event | None, *arrived: Tensor) -> None:
        """Let the computation's stream wait for `event`.

        arrived: tensors made on a copy stream, which the computation uses from here on.
        """
        if event is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in arrived:
            tensor.record_stream(current)

    def hold(self, way: Way, *tensors: Tensor) -> None:
        """Keep the device memory of tensors that copies of this way use until these copies are done."""
        if self.streams:
            for tensor in tensors:
                tensor.record_stream(self.streams[way])


@lru_cache(maxsize=16)
def get_streams(device: torch.device, offloaded: bool) -> CopyStreams:
    """The copy streams of a device, shared by all layers and caches; offloaded: whether tokens live on the host."""
    return CopyStreams(device, streams=offloaded)


def empty_host(shape: tuple[int, ...], like: Tensor, device: torch.device, *, pinned: bool) -> Tensor:
    """An empty tensor of `like`'s dtype on `device`, in pinned memory if asked for.

    Where no more memory can be pinned, it is ordinary memory: copies are then slower and wait for each other.
    """
    with contextlib.suppress(RuntimeError):
        return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)
    return torch.empty(shape, dtype=like.dtype, device=device)


def index_select_host(x: Tensor, rows: Tensor, *, pinned: bool) -> Tensor:
    """Batch rows `rows` [n] of a host tensor as a new host tensor; pinned: as of `empty_host`."""
    selected = empty_host((len(rows), *x.shape[1:]), x, x.device, pinned=pinned)
    return torch.index_select(x, 0, rows.to(x.device), out=selected)


# The block cache of offloaded keys and values: the most used blocks stay on the device.


class BlockPolicy:
    """A set of at most `limit` cached blocks, and the rule by which a new block takes the slot of another.

    lfu: the least frequently used block goes, among equals the one that reached its count first. Counts never age. As
    the block cache of PQCache's release (arXiv:2407.12820, section 3.4). lru: the least recently used block goes. Not
    in the release; the paper's Fig. 10d compares both. slots: block number -> cache slot 0..limit-1.
    """

    def __init__(self, name: Literal["lfu", "lru"], limit: int) -> None:
        self.name, self.limit = name, limit
        self.slots: dict[int, int] = {}
        self.uses: dict[int, tuple[int, int]] = {}  # block -> (its count, always 0 under lru; time of its last use)
        self.time = 0

    def insert(self, block: int) -> None:
        """Count a use of the block; a block not cached is inserted, in place of another one where the cache is full."""
        if block not in self.slots:
            slot = len(self.slots)
            if slot == self.limit:
                least = min(self.uses, key=self.uses.__getitem__)
                del self.uses[least]
                slot = self.slots.pop(least)
            self.slots[block] = slot
        count, _ = self.uses.get(block, (0, 0))
        self.time += 1
        self.uses[block] = (count + (self.name == "lfu"), self.time)


@dataclass(frozen=True)
class BlockCacheConfig:
    """Settings of the block cache.

    tokens: capacity per kv head; block: tokens per block; policy: lfu or lru; per_step: each step counts as uses the
    `per_step` blocks in which most of its selected tokens lie (k_cache of PQCache, arXiv:2407.12820).
    """

    tokens: Annotated[int, AtLeast(0)] = 4096
    block: Annotated[int, AtLeast(1)] = 128
    policy: Literal["lfu", "lru"] = "lfu"
    per_step: Annotated[int, AtLeast(1)] = 32

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens < self.block:
            raise ConfigError(
                f"a block cache of cache_tokens={self.tokens} cannot hold one block of {self.block} tokens: "
                "raise cache_tokens, lower the size of a block (cache_block; block), or set cache_tokens=0 for no cache"
            )


class BlockCache:
    """Cached blocks on the device: keys [B, H, n * block, D], values [B, H, n * block, Dv] of n cache slots.

    Block j holds the `config.block` positions from first + j * block on, the same for all kv heads of a row; each row
    has a policy of its own, so no row depends on its neighbours. Only blocks whose tokens can no longer change are
    cached. (A departure from PQCache's release, where the last, half filled block may enter and its later tokens are
    then missing.)
    """

    def __init__(
        self, config: BlockCacheConfig, first: int, keys: Tensor, values: Tensor, device: torch.device
    ) -> None:
        """Make an empty cache.

        keys, values: the buffers in CPU memory, for shapes and dtype; first: position of the first block.
        """
        self.config, self.first = config, first
        limit = config.tokens // config.block
        self.policies = [BlockPolicy(config.policy, limit) for _ in range(keys.shape[0])]
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
        b, h, width = self.keys.shape[:3]
        known = 1 + max((block for policy in self.policies for block in policy.slots), default=-1)
        # The cache slot of each block; the last column stands for all later blocks.
        table = [[-1] * (known + 1) for _ in self.policies]
        for row, policy in zip(table, self.policies, strict=True):
            for number, at in policy.slots.items():
                row[number] = at
        offset = slots - self.first
        block = (offset // self.config.block).clamp(min=0, max=known)
        place = torch.tensor(table).gather(1, block.flatten(1)).view_as(slots).masked_fill(slots < self.first, -1)
        head = torch.arange(b * h).view(b, h, 1) * width
        return torch.where(place >= 0, head + place * self.config.block + offset % self.config.block, -1)

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
        """Cache the blocks that hold most of the slots counted (`count`); returns the number copied, per row.

        fixed: per row the first position that may still change or lies in the recent window. keys, values: all tokens'
        in CPU memory. On CUDA the copies run on a stream of their own and are waited for at the next lookup.
        """
        came = []
        for row, counted in enumerate(counts):
            complete = max(0, (fixed[row] - self.first) // self.config.block)
            used = [block for block, n in enumerate(counted[:complete]) if n]
            # Among equals the newer block first, as everywhere.
            used.sort(key=lambda block: (-counted[block], -block))
            came.append(self._insert(row, used[: self.config.per_step], keys, values, copy_streams))
        self.ready = copy_streams.record("h2d")
        copy_streams.hold("h2d", self.keys, self.values)
        return came

    def _insert(self, row: int, chosen: list[int], keys: Tensor, values: Tensor, copy_streams: CopyStreams) -> int:
        """Cache the blocks `chosen` of one row, by its policy; returns the number of blocks copied to the device.

        keys, values: all tokens' in CPU memory.
        """
        policy, size = self.policies[row], self.config.block
        before = dict(policy.slots)
        for block in chosen:
            policy.insert(block)
        new = [(block, place) for block, place in policy.slots.items() if before.get(block) != place]
        if not new:
            return 0
        self._reserve(max(place for _, place in new) + 1, copy_streams)
        with copy_streams.copying("h2d"):
            for block, place in new:
                start, at = self.first + block * size, place * size
                for source, target in ((keys, self.keys), (values, self.values)):
                    for head in range(source.shape[1]):  # contiguous pieces: only those are copied asynchronously
                        target[row, head, at : at + size].copy_(
                            source[row, head, start : start + size], non_blocking=True
                        )
        return len(new)

    def _reserve(self, places: int, copy_streams: CopyStreams) -> None:
        """Grow to `places` cache slots on the device."""
        have = self.keys.shape[2] // self.config.block
        if places > have:
            # What came for the rows before is still on its way into the old buffers.
            copy_streams.wait(copy_streams.record("h2d"))
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
        place = rows.to(self.keys.device)
        other.keys, other.values = self.keys.index_select(0, place), self.values.index_select(0, place)
        return other


@dataclass
class TransferStats:
    """Transfers between device and CPU memory for one batch row; on a CPU, those that a GPU would make.

    d2h: bytes of keys and values offloaded; h2d: bytes fetched (selected tokens, cached blocks, offloaded index);
    lookups: (kv head, token) pairs selected; hits: how many of them the block cache held.
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


class ResidentPart:
    """Sinks [B, H, n, D] of one layer's keys or values, and a ring buffer [B, H, W, D] of the newest tokens.

    Position p of a row is at p % W of its ring; W is the largest recent window and 1 for the newest token.
    """

    def __init__(self, prompt: Tensor, lengths: list[int], config: OffloadConfig) -> None:
        """Take the sinks and the recent window out of a prompt [B, H, S, D], padded on the left.

        lengths: real tokens per row.
        """
        width = max(config.local) + 1
        ends = torch.tensor(lengths, device=prompt.device)[:, None]
        place = torch.arange(width, device=prompt.device)
        newest = ends - 1 - (ends - 1 - place) % width  # the newest position that belongs at each place
        first = torch.arange(config.sinks, device=prompt.device).expand(len(lengths), -1)
        pads = prompt.shape[2] - ends
        self.sinks, self.ring = _gather_positions(prompt, pads + first), _gather_positions(prompt, pads + newest)

    @property
    def nbytes(self) -> int:
        """Bytes of sinks and ring."""
        return self.sinks.nbytes + self.ring.nbytes

    def add(self, new: Tensor, positions: list[int]) -> None:
        """Write the token at positions[i] of every row i: new [B, H, 1, D]."""
        write_token(self.ring, [p % self.ring.shape[2] for p in positions], new[:, :, 0])
        for row, p in enumerate(positions):
            if p < self.sinks.shape[2]:
                self.sinks[row, :, p] = new[row, :, 0]

    def window(self, lengths: Tensor) -> Tensor:
        """The recent window [B, H, W, D] in order of position. lengths [B] int64: tokens per row."""
        width = self.ring.shape[2]
        places = lengths[:, None] + torch.arange(width, device=self.ring.device)
        return _gather_positions(self.ring, places % width)

    def index_rows(self, rows: Tensor) -> ResidentPart:
        """A copy for batch rows `rows` [n], which may repeat."""
        other, chosen = copy.copy(self), rows.to(self.ring.device)
        other.sinks, other.ring = self.sinks.index_select(0, chosen), self.ring.index_select(0, chosen)
        return other


def write_token(buffer: Tensor, places: list[int], new: Tensor) -> None:
    """Write new [B, H, *] to place places[i] of axis 2 of every row i of the buffer [B, H, C, *], on its device."""
    if min(places) == max(places):
        buffer[:, :, places[0]] = new
        return
    rows, place = torch.arange(len(places), device=buffer.device), torch.tensor(places, device=buffer.device)
    buffer[rows, :, place] = new


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, S, D] gathered at columns index [B, n], the same for all heads; indices out of range are clamped."""
    index = index.clamp(min=0, max=x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


GROWTH = 64  # positions added at a time where the final length is not known


class OffloadedKV:
    """All keys and values of one layer, slot = position in every row; rows may differ in length.

    keys [B, H, C, D], values [B, H, C, Dv]: every token, in CPU memory (offloaded), or on the device on a CPU or with
    offload=False; on a CPU `read` takes all from there, to the same numbers and counts. lengths: tokens held, per row.
    resident: sinks and recent window on the device, of keys and of values. traffic: bytes moved, per row.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int], config: OffloadConfig) -> None:
        """Take a prompt's keys [B, H, S, D] and values, padded on the left.

        On CUDA this returns before copies are done.
        """
        self.config, self.lengths = config, list(lengths)
        self.offloaded = config.offload and keys.device.type == "cuda"
        self.copy_streams = get_streams(keys.device, self.offloaded)
        self.device = self.copy_streams.device
        home, room = torch.device("cpu") if self.offloaded else keys.device, max(config.room, max(lengths))
        self.keys, self.values = (
            empty_host((*x.shape[:2], room, x.shape[3]), x, home, pinned=self.offloaded) for x in (keys, values)
        )
        self.resident = [ResidentPart(x, lengths, config) for x in (keys, values)]
        self.copy_streams.hold("d2h", keys, values)
        with self.copy_streams.copying("d2h"):
            for target, source in ((self.keys, keys), (self.values, values)):
                for row, length in enumerate(lengths):
                    for head in range(source.shape[1]):  # contiguous pieces: only those are copied asynchronously
                        target[row, head, :length].copy_(source[row, head, -length:], non_blocking=True)
        self._offloaded = self.copy_streams.record("d2h")
        self._in_flight: list[tuple[torch.cuda.Event | None, Tensor, Tensor, list[int]]] = []
        self.traffic = [TransferStats(d2h=length * self._token * keys.shape[1]) for length in lengths]
        self.cache: BlockCache | None = None
        if config.cache is not None and config.offload:
            self.cache = BlockCache(config.cache, config.sinks, self.keys, self.values, self.device)

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens held by the longest row."""
        return max(self.lengths)

    @property
    def candidate_counts(self) -> list[int]:
        """How many tokens of every row are neither sinks nor in the recent window nor the newest one."""
        pairs = zip(self.lengths, self.config.local, strict=True)
        return [max(0, length - 1 - local - self.config.sinks) for length, local in pairs]

    @property
    def pinned(self) -> bool:
        """Whether all CPU memory that should be pinned is."""
        return not self.offloaded or (self.keys.is_pinned() and self.values.is_pinned())

    @property
    def _token(self) -> int:
        """Bytes that moving one token's key and value of one kv head takes; 0 where nothing leaves the device."""
        return (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size() * self.config.offload

    @property
    def host_bytes(self) -> int:
        """Bytes of all keys and values, room to grow included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device: sinks, recent window, cached blocks."""
        return sum(states.nbytes for states in self.resident) + (self.cache.nbytes if self.cache is not None else 0)

    # -- tokens coming in ---------------------------------------------------------------------------------------------

    def add(self, key: Tensor, value: Tensor) -> None:
        """Append one token to every row: key [B, H, 1, D], value [B, H, 1, Dv]."""
        positions = list(self.lengths)
        self._grow(max(positions) + 1)
        for states, new in zip(self.resident, (key, value), strict=True):
            states.add(new, positions)
        if self.offloaded:
            self._copy_out_async(key, value, positions)
        else:
            self._write(key, value, positions)
        self.lengths = [p + 1 for p in positions]
        for row in self.traffic:
            row.d2h += self._token * key.shape[1]

    def _copy_out_async(self, key: Tensor, value: Tensor, positions: list[int]) -> None:
        """Start copying one token per row to the host; `flush` stores it at positions[i] of row i."""
        self.copy_streams.hold("d2h", key, value)
        parts = [empty_host(tuple(x.shape), x, self.keys.device, pinned=True) for x in (key, value)]
        with self.copy_streams.copying("d2h"):
            for host_copy, source in zip(parts, (key, value), strict=True):
                host_copy.copy_(source, non_blocking=True)
        self._in_flight.append((self.copy_streams.record("d2h"), parts[0], parts[1], positions))

    def _write(self, key: Tensor, value: Tensor, positions: list[int]) -> None:
        """Store one token per row at positions[i] of row i: key [B, H, 1, D], value [B, H, 1, Dv]."""
        write_token(self.keys, positions, key[:, :, 0])
        write_token(self.values, positions, value[:, :, 0])

    def flush(self) -> None:
        """Wait until all copies to the host have arrived; to be called before the host reads."""
        if self._offloaded is not None:
            self._offloaded.synchronize()
            self._offloaded = None
        for event, key, value, positions in self._in_flight:
            if event is not None:
                event.synchronize()
            self._write(key, value, positions)
        self._in_flight.clear()

    def _grow(self, need: int) -> None:
        """Make room for `need` positions, and GROWTH more."""
        if need <= self.keys.shape[2]:
            return
        self.flush()
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            shape = (*old.shape[:2], need + GROWTH, old.shape[3])
            new = empty_host(shape, old, old.device, pinned=self.offloaded)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    # -- tokens going out ---------------------------------------------------------------------------------------------

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Keys [B, H, N, D], values and positions [B, H, N] (-1: none) of sinks, slots [B, H, n], window and new token.

        Last, whether it is known that every position holds a token. On a CPU all are gathered at once from where all
        tokens are, and what a GPU would move is counted.
        """
        b, h, capacity = self.keys.shape[:3]
        layout = step_layout(self.lengths, self.config.local, self.config.sinks, slots.device)
        positions = torch.cat([layout.first.expand(-1, h, -1), slots, layout.last.expand(-1, h, -1)], dim=2)
        if self.offloaded or self.device.type != "cpu":
            lengths = torch.tensor(self.lengths, device=slots.device)
            pairs = zip(self.resident, self.fetch(slots), strict=True)
            keys, values = (torch.cat([near.sinks, far, near.window(lengths)], dim=2) for near, far in pairs)
            return keys, values, positions, False
        complete = int(positions.amin()) >= 0
        rows = positions if complete else positions.clamp(min=0)
        rows = (rows + torch.arange(0, b * h * capacity, capacity).view(b, h, 1)).flatten()
        keys, values = (x.view(-1, x.shape[3]).index_select(0, rows) for x in (self.keys, self.values))
        keys, values = (x.view(*positions.shape, x.shape[1]) for x in (keys, values))
        if not complete:
            keys, values = (x.masked_fill_((positions < 0)[..., None], 0) for x in (keys, values))
        self._count_fetch(slots, complete)
        return keys, values, positions, complete

    def _count_fetch(self, slots: Tensor, complete: bool) -> None:
        """Count as fetched the slots [B, H, N] (-1: none) that no cached block holds, and update the block cache.

        complete: whether no slot is -1.
        """
        whole = [slots.shape[1] * slots.shape[2]] * len(slots)
        lookups = whole if complete else (slots >= 0).sum((1, 2)).tolist()
        counts = self.cache.count(slots) if self.cache is not None else []
        hits = self.cache.hits(counts) if self.cache is not None else [0] * len(slots)
        for row, pairs, hit in zip(self.traffic, lookups, hits, strict=True):
            row.lookups += pairs
            row.hits += hit
            row.h2d += (pairs - hit) * self._token
        if self.cache is not None:
            fixed = [length - 1 - local for length, local in zip(self.lengths, self.config.local, strict=True)]
            came = self.cache.insert(counts, fixed, self.keys, self.values, self.copy_streams)
            for row, blocks in zip(self.traffic, came, strict=True):
                row.h2d += blocks * self.cache.config.block * self.keys.shape[1] * self._token

    def fetch(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, N, D] and values of the slots [B, H, N] (-1: zeros), from the block cache or CPU memory.

        On CUDA this is where a step waits: the host must know the slots to gather them.
        """
        wanted = slots.to(self.keys.device)
        self.flush()
        out = tuple(x.new_zeros(*slots.shape, x.shape[3], device=self.device) for x in (self.keys, self.values))
        missing = wanted >= 0
        if self.cache is not None:
            self.copy_streams.wait(self.cache.ready)
            held = self.cache.lookup(wanted)
            missing = missing & (held < 0)
            self._copy(out, (self.cache.keys, self.cache.values), held)
        b, h, p = self.keys.shape[:3]
        head = torch.arange(b * h, device=wanted.device).view(b, h, 1) * p
        self._copy(out, (self.keys, self.values), torch.where(missing, head + wanted, -1))
        self._count_fetch(wanted, complete=False)
        return out[0], out[1]

    def _copy(self, out: tuple[Tensor, ...], buffers: tuple[Tensor, Tensor], source: Tensor) -> None:
        """Copy entries source [B, H, N] (-1: none) of the buffers, flattened over rows and heads, to `out`."""
        flat = source.flatten()
        place = (flat >= 0).nonzero()[:, 0]
        if not len(place):
            return
        targets, rows = place.to(self.device), flat[place]
        for target, buffer in zip(out, buffers, strict=True):
            table = buffer.view(-1, buffer.shape[3])
            if buffer.device == self.device:
                entries = table[rows.to(self.device)]
            else:
                staged = empty_host((len(rows), table.shape[1]), table, table.device, pinned=self.offloaded)
                torch.index_select(table, 0, rows, out=staged)
                with self.copy_streams.copying("h2d"):
                    entries = staged.to(self.device, non_blocking=True)
                self.copy_streams.wait(self.copy_streams.record("h2d"), entries)
            target.view(-1, target.shape[3]).index_copy_(0, targets, entries)

    def add_index_traffic(self, per_token: int) -> None:
        """Count `per_token` bytes of every token as copied to the device for the index."""
        for row, length in zip(self.traffic, self.lengths, strict=True):
            row.h2d += length * per_token * self.config.offload

    def all_keys(self) -> Tensor:
        """All keys [B, H, length, D] on the device, fetched from CPU memory."""
        self.flush()
        self.add_index_traffic(self.keys.shape[1] * self.keys.shape[3] * self.keys.element_size())
        return self.keys[:, :, : self.length].to(self.device)

    def components(self, dims: Tensor) -> Tensor:
        """Components dims [B, H, n] of every key, gathered on the host and fetched: [B, H, length, n]."""
        self.flush()
        index = dims.to(self.keys.device)[:, :, None].expand(-1, -1, self.length, -1)
        self.add_index_traffic(dims.shape[1] * dims.shape[2] * self.keys.element_size())
        return self.keys[:, :, : self.length].gather(3, index).to(self.device)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def index_rows(self, rows: Tensor) -> OffloadedKV:
        """A copy for batch rows `rows` [n], which may repeat."""
        self.flush()
        other, chosen = copy.copy(self), rows.tolist()
        other._in_flight = []
        other.lengths = [self.lengths[i] for i in chosen]
        other.traffic = [copy.copy(self.traffic[i]) for i in chosen]
        other.config = replace(self.config, local=[self.config.local[i] for i in chosen])
        other.keys = index_select_host(self.keys, rows, pinned=self.offloaded)
        other.values = index_select_host(self.values, rows, pinned=self.offloaded)
        other.resident = [states.index_rows(rows) for states in self.resident]
        other.cache = self.cache.index_rows(rows, self.copy_streams) if self.cache is not None else None
        return other


# A job on the CPU that runs during a GPU's computation until its result is needed.


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    """The one worker thread: jobs run in order, each with all the threads that torch gives to one operation."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvexp-index")


class BackgroundTask:
    """A job on the CPU that starts at once in the worker thread (run_async), or else when it is first waited for.

    On a CPU it would slow down the computation, so it is not started early.
    """

    def __init__(self, job: Callable[[], None], *, run_async: bool) -> None:
        inference = torch.is_inference_mode_enabled()  # torch keeps this per thread

        def run() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                job()

        self.job: Callable[[], None] | Future[None] | None = _worker().submit(run) if run_async else job

    @property
    def done(self) -> bool:
        """Whether the job has run, waited for or not."""
        return self.job is None or (isinstance(self.job, Future) and self.job.done())

    @property
    def joined(self) -> bool:
        """Whether `wait` has returned."""
        return self.job is None

    def wait(self) -> None:
        """Return once the job is done; raises what it raised."""
        job, self.job = self.job, None
        if isinstance(job, Future):
            job.result()
        elif job is not None:
            job()
