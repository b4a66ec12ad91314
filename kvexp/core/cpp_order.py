"""Orders in which the C++ library of GCC leaves equal elements: std::sort and std::partial_sort are not stable.

An engine written in C++ breaks ties by them, and a twin that is to keep the same tokens has to break them so too.
Source: the algorithms of libstdc++ (bits/stl_algo.h, bits/stl_heap.h): introsort with the median of three and runs of
16 (its way out after 2 log2(n) rounds is left out: no keys met here need it), and selection by a heap.
"""

from __future__ import annotations

from collections.abc import Sequence

RUN = 16  # elements that are left to insertion


def ascending(keys: Sequence[float]) -> list[int]:
    """Indices of `keys` as std::sort puts them that compares keys by <."""
    order = list(range(len(keys)))
    _partition(keys, order, 0, len(order))
    for place in range(1, len(order)):  # by insertion, which moves nothing past an equal element
        index, hole = order[place], place
        while hole and keys[index] < keys[order[hole - 1]]:
            order[hole] = order[hole - 1]
            hole -= 1
        order[hole] = index
    return order


def _partition(keys: Sequence[float], order: list[int], first: int, last: int) -> None:
    """Bring order[first:last] into runs of at most RUN, each no larger than the next."""
    while last - first > RUN:
        _median_first(keys, order, first, (first + 1, first + (last - first) // 2, last - 1))
        pivot, low, high = keys[order[first]], first + 1, last
        while True:
            while keys[order[low]] < pivot:
                low += 1
            high -= 1
            while pivot < keys[order[high]]:
                high -= 1
            if low >= high:
                break
            order[low], order[high] = order[high], order[low]
            low += 1
        _partition(keys, order, low, last)
        last = low


def _median_first(keys: Sequence[float], order: list[int], first: int, places: tuple[int, int, int]) -> None:
    """Swap the median of three places to the first; of equal ones that which the library takes."""
    a, b, c = places
    x, y, z = (keys[order[place]] for place in places)
    low, middle, high = (x < y, y < z, x < z)
    chosen = (b if middle else c if high else a) if low else (a if high else c if middle else b)
    order[first], order[chosen] = order[chosen], order[first]


def largest(keys: Sequence[float], count: int) -> set[int]:
    """Indices of the `count` elements that std::partial_sort puts in front, which compares keys by >."""
    if not count:
        return set()
    heap = list(range(count))
    for parent in reversed(range(count // 2)):
        _sift(keys, heap, parent, heap[parent])
    for index in range(count, len(keys)):
        if keys[index] > keys[heap[0]]:
            _sift(keys, heap, 0, index)
    return set(heap)


def _sift(keys: Sequence[float], heap: list[int], top: int, index: int) -> None:
    """Put an element into the heap, smallest first, whose place `top` is free: down to the end, and up again."""
    hole, child = top, 2 * top + 2
    while child < len(heap):
        if keys[heap[child]] > keys[heap[child - 1]]:
            child -= 1
        heap[hole], hole, child = heap[child], child, 2 * child + 2
    if child == len(heap):
        heap[hole], hole = heap[child - 1], child - 1
    while hole > top and keys[heap[(hole - 1) // 2]] > keys[index]:
        heap[hole], hole = heap[(hole - 1) // 2], (hole - 1) // 2
    heap[hole] = index
