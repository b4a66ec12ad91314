"""The smallest set of evictions whose undoing brings an answer back: spans, then layers, heads and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvexp.diagnose.undo import Place, Replay, UndoneEvictions

T = TypeVar("T")
Works = Callable[[list[list[T]]], list[bool]]
TOGETHER = 3  # needed tokens at most this far apart are of one span: "code ... 4711" is one thing lost


@dataclass(frozen=True)
class Cause:
    """The smallest set of evictions found whose undoing brings an answer back.

    undone: None where not even all evictions undone do; trials: answers that the search generated; whole: False where
    the trials ran out, so that `undone` may hold more than is needed.
    """

    undone: UndoneEvictions | None
    trials: int
    whole: bool

    @property
    def spans(self) -> list[list[int]]:
        """The positions of the cause, in groups of neighbours (at most TOGETHER apart)."""
        spans: list[list[int]] = []
        for position in self.undone.positions if self.undone else ():
            if spans and position - spans[-1][-1] <= TOGETHER:
                spans[-1].append(position)
            else:
                spans.append([position])
        return spans


def cause(
    replay: Replay,
    right: Callable[[list[int]], bool],
    trials: int = 1000,
    order: Sequence[int] | None = None,
) -> Cause:
    """Search, given that nothing undone is not `right` (of the new tokens). About log(tokens) trials per span lost.

    First the interval of positions: the shortest beginning of the prompt that is enough, of it the shortest end; where
    all positions are given in an `order`, the likeliest causes first, the shortest beginning of that instead. In it
    the tokens that are needed (delta debugging: Zeller and Hildebrandt 2002, in chunks of halves, quarters, ...), then
    likewise layers, heads within them, and the window of steps; at last positions once more. What is found works, and
    of its tokens, then of its layers and heads, none can be left out alone; a smaller set may exist elsewhere. The log
    has no part in it: with some evictions undone a method may make others.
    """
    best = replay.everything
    start = replay.trials

    def spent() -> bool:
        return replay.trials - start >= trials

    def works(make: Callable[[list[T]], UndoneEvictions]) -> Works[T]:
        def tested(candidates: list[list[T]]) -> list[bool]:
            if spent():
                return [False] * len(candidates)
            return [right(tokens) for tokens in replay.answers([make(candidate) for candidate in candidates])]

        return tested

    def of_positions(some: Sequence[int]) -> UndoneEvictions:
        return replace(best, positions=tuple(some))

    def of_places(some: Sequence[Place]) -> UndoneEvictions:
        return replace(best, places=tuple(some))

    def of_layers(some: Sequence[int]) -> UndoneEvictions:
        return replace(best, places=tuple(place for place in best.places if place[0] in some))

    def of_steps(some: Sequence[int]) -> UndoneEvictions:
        return replace(best, first=min(some), last=max(some))

    if not works(of_positions)([list(best.positions)])[0]:
        return Cause(None, replay.trials - start, True)
    if order is None:
        best = of_positions(interval(list(best.positions), works(of_positions), replay.size))
    else:
        best = of_positions(sorted(beginning(list(order), works(of_positions), replay.size)))
    best = of_positions(smallest(list(best.positions), works(of_positions)))
    best = of_layers(smallest(sorted({layer for layer, _ in best.places}), works(of_layers)))
    best = of_places(smallest(list(best.places), works(of_places)))
    best = of_steps(interval(list(range(best.first, best.last + 1)), works(of_steps), replay.size))
    best = of_positions(smallest(list(best.positions), works(of_positions)))
    return Cause(best, replay.trials - start, not spent())


def interval(items: list[T], works: Works[T], ways: int) -> list[T]:
    """The shortest beginning of items that works, of it the shortest end; all of them do. `ways` trials at a time."""
    begin = items[: _cut(len(items), lambda counts: works([items[:count] for count in counts]), ways)]
    return begin[len(begin) - _cut(len(begin), lambda n: works([begin[len(begin) - count :] for count in n]), ways) :]


def beginning(items: list[T], works: Works[T], ways: int) -> list[T]:
    """The shortest beginning of items that works, given that all of them do: 1, 2, 4, ... of them first.

    `ways` trials at a time; where what is needed stands far ahead, fewer trials are made than `interval` makes.
    """
    counts = [1 << power for power in range(len(items).bit_length()) if 1 << power < len(items)]
    fails, good = 0, len(items)
    for start in range(0, len(counts), ways):
        some = counts[start : start + ways]
        fine = works([items[:count] for count in some])
        if any(fine):
            place = start + fine.index(True)
            fails, good = counts[place - 1] if place else 0, counts[place]
            break
        fails = some[-1]
    least = _cut(good - fails, lambda more: works([items[: fails + count] for count in more]), ways)
    return items[: fails + least]


def _cut(count: int, works: Callable[[list[int]], list[bool]], ways: int) -> int:
    """The least number from 1 to `count` (which works) that works, if from there on all do."""
    fails, good = 0, count
    while good - fails > 1:
        between = sorted({fails + (good - fails) * way // (ways + 1) for way in range(1, ways + 1)} - {fails, good})
        for number, fine in zip(between, works(between), strict=True):
            if fine:
                good = number
                break
            fails = number
    return good


def smallest(items: list[T], works: Works[T]) -> list[T]:
    """A part of items, which work together, that works and does not without any single one of them."""
    parts = 2
    while len(items) > 1:
        chunks = [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]
        alone = [chunk for chunk, fine in zip(chunks, works(chunks), strict=True) if fine]
        if alone:
            items, parts = min(alone, key=len), 2
            continue
        rests = [[item for chunk in (*chunks[:i], *chunks[i + 1 :]) for item in chunk] for i in range(parts)]
        fine = works(rests) if parts > 2 else [False]
        if any(fine):
            items, parts = rests[fine.index(True)], max(parts - 1, 2)
        elif parts == len(items):
            break
        else:
            parts = min(2 * parts, len(items))
    return items
