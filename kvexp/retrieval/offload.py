"""Where keys and values live: all of them at home, which is CPU memory beside a GPU; near ones on the device too."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvexp.retrieval.block_cache import BlockCache
from kvexp.retrieval.copy_streams import lanes_of, on_host, rows_at_home
from kvexp.retrieval.offload_config import Layout, Traffic, leaves
from kvexp.retrieval.resident import Near

GROWTH = 64  # positions added at a time where the final length is not known


class Memory:
    """One layer's tokens, slot = position in every row; rows may differ in length.

    keys [B, H, P, D], values [B, H, P, Dv] at home: every token. lengths: tokens held, per row. On a CPU, or with
    offload=False, home is the device and no copy needs a stream; the code is the same.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int], layout: Layout) -> None:
        """Take a prompt in columns, padding on the left. On CUDA this returns while the copies are under way."""
        self.layout, self.lengths = layout, list(lengths)
        self.apart = leaves(layout, keys.device)
        self.lanes = lanes_of(keys.device, self.apart)
        self.device = self.lanes.device
        home, room = torch.device("cpu") if self.apart else keys.device, max(layout.room, max(lengths))
        self.keys, pinned = on_host((*keys.shape[:2], room, keys.shape[3]), keys, home, pinned=self.apart)
        self.values, also = on_host((*values.shape[:2], room, values.shape[3]), values, home, pinned=self.apart)
        self.pinned = pinned and also
        self.near = Near(keys, values, lengths, layout.sinks, layout.local)
        self.lanes.leaving(keys, values)
        with self.lanes.outwards():
            for target, source in ((self.keys, keys), (self.values, values)):
                for row, length in enumerate(lengths):
                    for head in range(source.shape[1]):  # contiguous pieces: only those are copied asynchronously
                        target[row, head, :length].copy_(source[row, head, -length:], non_blocking=True)
        self._offloaded = self.lanes.mark_out()
        self._arriving: list[tuple[torch.cuda.Event | None, Tensor, Tensor, list[int]]] = []
        self.traffic = [Traffic(out=length * self._token * keys.shape[1] * layout.offload) for length in lengths]
        self.cache: BlockCache | None = None
        if layout.cache is not None and layout.offload:
            self.cache = BlockCache(layout.cache, layout.sinks, self.keys, self.values, self.device)

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Positions of the longest row."""
        return max(self.lengths)

    @property
    def _token(self) -> int:
        """Bytes of one token's key and value in one kv head."""
        return (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size()

    @property
    def home_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def near_bytes(self) -> int:
        """What is on the device beside home: sinks, window, cached blocks."""
        return self.near.nbytes + (self.cache.nbytes if self.cache is not None else 0)

    # -- tokens coming in ---------------------------------------------------------------------------------------------

    def add(self, key: Tensor, value: Tensor) -> None:
        """One more token in every row: key [B, H, 1, D], value [B, H, 1, Dv]."""
        at = list(self.lengths)
        self._grow(max(at) + 1)
        self.near.add(key, value, at)
        if self.apart:
            self._send(key, value, at)
        else:
            self._write(key, value, at)
        self.lengths = [p + 1 for p in at]
        for row in self.traffic:
            row.out += self._token * key.shape[1] * self.layout.offload

    def _send(self, key: Tensor, value: Tensor, at: list[int]) -> None:
        """Start copying one token per row to the host, from where `settle` stores it in its place."""
        self.lanes.leaving(key, value)
        parts = [on_host(tuple(x.shape), x, self.keys.device, pinned=self.pinned)[0] for x in (key, value)]
        with self.lanes.outwards():
            for part, source in zip(parts, (key, value), strict=True):
                part.copy_(source, non_blocking=True)
        self._arriving.append((self.lanes.mark_out(), parts[0], parts[1], at))

    def _write(self, key: Tensor, value: Tensor, at: list[int]) -> None:
        rows, place = torch.arange(len(at)), torch.tensor(at)
        self.keys[rows, :, place] = key[:, :, 0]
        self.values[rows, :, place] = value[:, :, 0]

    def settle(self) -> None:
        """Wait until everything sent home has arrived: before the host reads."""
        if self._offloaded is not None:
            self._offloaded.synchronize()
            self._offloaded = None
        for event, key, value, at in self._arriving:
            if event is not None:
                event.synchronize()
            self._write(key, value, at)
        self._arriving.clear()

    def _grow(self, need: int) -> None:
        if need <= self.keys.shape[2]:
            return
        self.settle()
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            shape = (*old.shape[:2], need + GROWTH, old.shape[3])
            new, fine = on_host(shape, old, old.device, pinned=self.apart and self.pinned)
            new[:, :, : old.shape[2]] = old
            self.pinned = self.pinned and fine
            setattr(self, name, new)

    # -- tokens going out ---------------------------------------------------------------------------------------------

    def fetch(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, N, D] and values of the slots [B, H, N] (-1: zeros), from the block cache or from home.

        On CUDA this is where a step waits: the slots must be known on the host to be gathered there.
        """
        wanted = slots.to(self.keys.device)
        self.settle()
        out = tuple(x.new_zeros(*slots.shape, x.shape[3], device=self.device) for x in (self.keys, self.values))
        missing = wanted >= 0
        asked = missing.sum((1, 2)).tolist()
        if self.cache is not None:
            self.lanes.join(self.cache.ready)
            held = self.cache.lookup(wanted)
            missing = missing & (held < 0)
            self._copy(out, (self.cache.keys, self.cache.values), held)
        b, h, p = self.keys.shape[:3]
        head = torch.arange(b * h, device=wanted.device).view(b, h, 1) * p
        self._copy(out, (self.keys, self.values), torch.where(missing, head + wanted, -1))
        for row, pairs, missed in zip(self.traffic, asked, missing.sum((1, 2)).tolist(), strict=True):
            row.asked += pairs
            row.hits += pairs - missed
            row.into += missed * self._token * self.layout.offload
        if self.cache is not None:
            self._note(self.cache, wanted)
        return out[0], out[1]

    def _copy(self, out: tuple[Tensor, ...], buffers: tuple[Tensor, Tensor], source: Tensor) -> None:
        """Rows `source` [B, H, N] (-1: none) of the flattened buffers to their places in `out`."""
        flat = source.flatten()
        place = (flat >= 0).nonzero()[:, 0]
        if not len(place):
            return
        at, rows = place.to(self.device), flat[place]
        for target, buffer in zip(out, buffers, strict=True):
            table = buffer.view(-1, buffer.shape[3])
            if buffer.device == self.device:
                found = table[rows.to(self.device)]
            else:
                staged, _ = on_host((len(rows), table.shape[1]), table, table.device, pinned=self.pinned)
                torch.index_select(table, 0, rows, out=staged)
                with self.lanes.inwards():
                    found = staged.to(self.device, non_blocking=True)
                self.lanes.join(self.lanes.mark_in(), found)
            target.view(-1, target.shape[3]).index_copy_(0, at, found)

    def _note(self, cache: BlockCache, slots: Tensor) -> None:
        """Tell the block cache what was asked for, after it has been used."""
        fixed = [length - 1 - local for length, local in zip(self.lengths, self.layout.local, strict=True)]
        came = cache.note(slots, fixed, self.keys, self.values, self.lanes)
        for row, blocks in zip(self.traffic, came, strict=True):
            row.into += blocks * cache.spec.block * self.keys.shape[1] * self._token

    def shipped(self, per_token: int) -> None:
        """Note that `per_token` bytes of every token came to the device."""
        for row, length in zip(self.traffic, self.lengths, strict=True):
            row.into += length * per_token * self.layout.offload

    def all_keys(self) -> Tensor:
        """[B, H, used, D] on the device: every key, fetched from home."""
        self.settle()
        self.shipped(self.keys.shape[1] * self.keys.shape[3] * self.keys.element_size())
        return self.keys[:, :, : self.used].to(self.device)

    def components(self, dims: Tensor) -> Tensor:
        """[B, H, used, R]: components dims [B, H, R] of every key, gathered at home and fetched."""
        self.settle()
        index = dims.to(self.keys.device)[:, :, None].expand(-1, -1, self.used, -1)
        self.shipped(dims.shape[1] * dims.shape[2] * self.keys.element_size())
        return self.keys[:, :, : self.used].gather(3, index).to(self.device)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def picked(self, rows: Tensor) -> Memory:
        """These rows, which may repeat, in a memory of their own."""
        self.settle()
        other, chosen = copy.copy(self), rows.tolist()
        other._arriving = []
        other.lengths = [self.lengths[i] for i in chosen]
        other.traffic = [copy.copy(self.traffic[i]) for i in chosen]
        other.layout = replace(self.layout, local=[self.layout.local[i] for i in chosen])
        pinned = self.apart and self.pinned
        other.keys, fine = rows_at_home(self.keys, rows, pinned=pinned)
        other.values, also = rows_at_home(self.values, rows, pinned=pinned)
        other.pinned = self.pinned and fine and also
        other.near = self.near.picked(rows)
        other.cache = self.cache.picked(rows, self.lanes) if self.cache is not None else None
        return other
