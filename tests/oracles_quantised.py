"""The slow truth of quantised slots, in plain Python: which tokens of a kv head are codes, and what codes stand for.

Written from KIVI (arXiv:2402.02750, section 3) and from docs/quantised_cache_details.md, one number at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Vector = list[float]


def half(x: float) -> float:
    """The float16 nearest to x."""
    return float(struct.unpack("e", struct.pack("e", x))[0])


def kivi_codes(group: Sequence[float], bits: int) -> list[int]:
    """Q(x) = round((x - z) / s), z = min x, s = (max x - min x) / (2^bits - 1)."""
    z = min(group)
    s = (max(group) - z) / (2**bits - 1)
    return [round((x - z) / s) for x in group]


def restored(group: Sequence[float], bits: int, symmetric: bool) -> Vector:
    """A group's numbers after they were codes; scale and zero are kept as float16."""
    if symmetric:
        top = 2 ** (bits - 1) - 1
        s = half(max(abs(x) for x in group) / top)
        codes = [max(-top, min(top, round(x / s))) if s else 0 for x in group]
        return [code * s for code in codes]
    z, s = half(min(group)), half((max(group) - min(group)) / (2**bits - 1))
    codes = [max(0, min(2**bits - 1, round((x - z) / s))) if s else 0 for x in group]
    return [code * s + z for code in codes]


@dataclass
class QuantisedHead:
    """Keys or values of one kv head. read: by position, what attention reads; waiting: positions in full precision."""

    bits: int
    axis: str
    group: int
    residual: int
    symmetric: bool = False
    read: dict[int, Vector] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)

    def made(self, vector: Vector) -> Vector:
        """What a token's vector is once it was codes, where scales belong to channels of one token."""
        parts = [vector[i : i + self.group] for i in range(0, len(vector), self.group)]
        return [number for part in parts for number in restored(part, self.bits, self.symmetric)]

    def born(self, position: int, vector: Vector) -> None:
        self.read[position] = list(vector)
        self.waiting.append(position)

    def forward_ends(self, held: Iterable[int], newest: int) -> None:
        """held: positions that are left after the forward's eviction; newest: of the newest token."""
        if self.bits == 16:
            return
        left = set(held)
        self.waiting = sorted(p for p in self.waiting if p in left)
        passed = [p for p in self.waiting if p <= newest - self.residual]
        size = self.group if self.axis == "channel" else 1
        while len(passed) >= size:
            some, passed = passed[:size], passed[size:]
            self.waiting = [p for p in self.waiting if p not in some]
            self.groups.append(some)
            if self.axis == "channel":
                columns = zip(*(self.read[p] for p in some), strict=True)
                made = [restored(column, self.bits, self.symmetric) for column in columns]
                for place, p in enumerate(some):
                    self.read[p] = [column[place] for column in made]
            else:
                self.read[some[0]] = self.made(self.read[some[0]])


@dataclass
class StoredHead(QuantisedHead):
    """Keys or values of one kv head in a format that stores every token by itself. store: what is read of a vector."""

    store: Callable[[Vector], Vector] = list

    def made(self, vector: Vector) -> Vector:
        return self.store(vector)
