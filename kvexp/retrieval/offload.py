"""Offloaded keys and values: all tokens in CPU memory beside a GPU; sinks and recent window on the device as well."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvexp.retrieval.block_cache import BlockCache
from kvexp.retrieval.copy_streams import empty_host, get_streams, index_select_host
from kvexp.retrieval.offload_config import OffloadConfig, TransferStats, should_offload
from kvexp.retrieval.resident import ResidentKV, write_token
from kvexp.retrieval.step_layout import step_layout

GROWTH = 64  # positions added at a time where the final length is not known


class OffloadedKV:
    """All keys and values of one layer, slot = position in every row; rows may differ in length.

    keys [B, H, C, D], values [B, H, C, Dv]: every token, in CPU memory (offloaded), or on the device on a CPU or with
    offload=False; on a CPU `read` takes all from there, to the same numbers and counts. lengths: tokens held, per row.
    resident: sinks and recent window on the device. traffic: bytes moved, per row. pinned: whether all CPU memory could
    be pinned.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int], config: OffloadConfig) -> None:
        """Take a prompt's keys [B, H, S, D] and values, padded on the left.

        On CUDA this returns before copies are done.
        """
        self.config, self.lengths = config, list(lengths)
        self.offloaded = should_offload(config, keys.device)
        self.copy_streams = get_streams(keys.device, self.offloaded)
        self.device = self.copy_streams.device
        home, room = torch.device("cpu") if self.offloaded else keys.device, max(config.room, max(lengths))
        self.keys, pinned = empty_host((*keys.shape[:2], room, keys.shape[3]), keys, home, pinned=self.offloaded)
        self.values, also = empty_host((*values.shape[:2], room, values.shape[3]), values, home, pinned=self.offloaded)
        self.pinned = pinned and also
        self.resident = ResidentKV(keys, values, lengths, config.sinks, config.local)
        self.copy_streams.record_read(keys, values)
        with self.copy_streams.d2h():
            for target, source in ((self.keys, keys), (self.values, values)):
                for row, length in enumerate(lengths):
                    for head in range(source.shape[1]):  # contiguous pieces: only those are copied asynchronously
                        target[row, head, :length].copy_(source[row, head, -length:], non_blocking=True)
        self._offloaded = self.copy_streams.record_d2h()
        self._in_flight: list[tuple[torch.cuda.Event | None, Tensor, Tensor, list[int]]] = []
        self.traffic = [TransferStats(d2h=length * self._token * keys.shape[1] * config.offload) for length in lengths]
        self.cache: BlockCache | None = None
        if config.cache is not None and config.offload:
            self.cache = BlockCache(config.cache, config.sinks, self.keys, self.values, self.device)

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens held by the longest row."""
        return max(self.lengths)

    @property
    def _token(self) -> int:
        """Bytes of one token's key and value in one kv head."""
        return (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size()

    @property
    def host_bytes(self) -> int:
        """Bytes of all keys and values, room to grow included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device: sinks, recent window, cached blocks."""
        return self.resident.nbytes + (self.cache.nbytes if self.cache is not None else 0)

    # -- tokens coming in ---------------------------------------------------------------------------------------------

    def add(self, key: Tensor, value: Tensor) -> None:
        """Append one token to every row: key [B, H, 1, D], value [B, H, 1, Dv]."""
        positions = list(self.lengths)
        self._grow(max(positions) + 1)
        self.resident.add(key, value, positions)
        if self.offloaded:
            self._copy_out_async(key, value, positions)
        else:
            self._write(key, value, positions)
        self.lengths = [p + 1 for p in positions]
        for row in self.traffic:
            row.d2h += self._token * key.shape[1] * self.config.offload

    def _copy_out_async(self, key: Tensor, value: Tensor, positions: list[int]) -> None:
        """Start copying one token per row to the host; `flush` stores it at positions[i] of row i."""
        self.copy_streams.record_read(key, value)
        parts = [empty_host(tuple(x.shape), x, self.keys.device, pinned=self.pinned)[0] for x in (key, value)]
        with self.copy_streams.d2h():
            for part, source in zip(parts, (key, value), strict=True):
                part.copy_(source, non_blocking=True)
        self._in_flight.append((self.copy_streams.record_d2h(), parts[0], parts[1], positions))

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
            new, fine = empty_host(shape, old, old.device, pinned=self.offloaded and self.pinned)
            new[:, :, : old.shape[2]] = old
            self.pinned = self.pinned and fine
            setattr(self, name, new)

    # -- tokens going out ---------------------------------------------------------------------------------------------

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Keys [B, H, N, D], values and positions [B, H, N] (-1: none) of sinks, slots [B, H, n], window and new token.

        Last, whether it is known that every position holds a token. On a CPU all are gathered at once from where all
        tokens are, and what a GPU would move is counted.
        """
        if self.device.type == "cpu" and not self.offloaded:
            return self._read_at_once(slots)
        first, last = self.resident.read(self.lengths)
        middle = (*self.fetch(slots), slots)
        places = [p if p.ndim == 3 else p[:, None].expand(-1, slots.shape[1], -1) for *_, p in (first, middle, last)]
        keys, values = (torch.cat([first[i], middle[i], last[i]], dim=2) for i in (0, 1))
        return keys, values, torch.cat(places, dim=2), False

    def _read_at_once(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        """`read` on a CPU: one gather of whole rows for keys, one for values."""
        b, h, capacity = self.keys.shape[:3]
        layout = step_layout(self.lengths, self.config.local, self.config.sinks, slots.device)
        near = [part[:, None].expand(-1, h, -1) for part in (layout.first, layout.last)]
        positions = torch.cat([near[0], slots, near[1]], dim=2)
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
        """Count as fetched the slots [B, H, N] (-1: none; complete: there is no such) that no cached block holds."""
        whole = [slots.shape[1] * slots.shape[2]] * len(slots)
        asked = whole if complete else (slots >= 0).sum((1, 2)).tolist()
        counts = self.cache.count(slots) if self.cache is not None else []
        hits = self.cache.hits(counts) if self.cache is not None else [0] * len(slots)
        for row, pairs, hit in zip(self.traffic, asked, hits, strict=True):
            row.lookups += pairs
            row.hits += hit
            row.h2d += (pairs - hit) * self._token * self.config.offload
        if self.cache is not None:
            self._note(self.cache, counts)

    def fetch(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, N, D] and values of the slots [B, H, N] (-1: zeros), from the block cache or CPU memory.

        On CUDA this is where a step waits: the host must know the slots to gather them.
        """
        wanted = slots.to(self.keys.device)
        self.flush()
        out = tuple(x.new_zeros(*slots.shape, x.shape[3], device=self.device) for x in (self.keys, self.values))
        missing = wanted >= 0
        asked = missing.sum((1, 2)).tolist()
        if self.cache is not None:
            self.copy_streams.wait(self.cache.ready)
            held = self.cache.lookup(wanted)
            missing = missing & (held < 0)
            self._copy(out, (self.cache.keys, self.cache.values), held)
        b, h, p = self.keys.shape[:3]
        head = torch.arange(b * h, device=wanted.device).view(b, h, 1) * p
        self._copy(out, (self.keys, self.values), torch.where(missing, head + wanted, -1))
        for row, pairs, missed in zip(self.traffic, asked, missing.sum((1, 2)).tolist(), strict=True):
            row.lookups += pairs
            row.hits += pairs - missed
            row.h2d += missed * self._token * self.config.offload
        if self.cache is not None:
            self._note(self.cache, self.cache.count(wanted))
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
                found = table[rows.to(self.device)]
            else:
                staged, _ = empty_host((len(rows), table.shape[1]), table, table.device, pinned=self.pinned)
                torch.index_select(table, 0, rows, out=staged)
                with self.copy_streams.h2d():
                    found = staged.to(self.device, non_blocking=True)
                self.copy_streams.wait(self.copy_streams.record_h2d(), found)
            target.view(-1, target.shape[3]).index_copy_(0, targets, found)

    def _note(self, cache: BlockCache, counts: list[list[int]]) -> None:
        """Update the block cache with the slots that this step has read, counted per row and block."""
        fixed = [length - 1 - local for length, local in zip(self.lengths, self.config.local, strict=True)]
        came = cache.insert(counts, fixed, self.keys, self.values, self.copy_streams)
        for row, blocks in zip(self.traffic, came, strict=True):
            row.h2d += blocks * cache.config.block * self.keys.shape[1] * self._token

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
        pinned = self.offloaded and self.pinned
        other.keys, fine = index_select_host(self.keys, rows, pinned=pinned)
        other.values, also = index_select_host(self.values, rows, pinned=pinned)
        other.pinned = self.pinned and fine and also
        other.resident = self.resident.index_rows(rows)
        other.cache = self.cache.index_rows(rows, self.copy_streams) if self.cache is not None else None
        return other
