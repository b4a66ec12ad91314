"""Which blocks stay in a small cache: least frequently used, least recently used."""

from __future__ import annotations

from kvexp.errors import ConfigError


class Policy:
    """At most `limit` blocks by number, each in a place 0..limit-1 of its own. `places`: block -> place."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.places: dict[int, int] = {}

    def insert(self, block: int) -> None:
        """The block was used. One that is not there comes in, for another where there is no free place."""
        if block in self.places:
            self._used(block)
            return
        room = len(self.places) < self.limit
        self.places[block] = len(self.places) if room else self.places.pop(self._leave())
        self._enter(block)

    def _used(self, block: int) -> None:
        raise NotImplementedError

    def _enter(self, block: int) -> None:
        raise NotImplementedError

    def _leave(self) -> int:
        """The block to give up, forgotten by the policy's own books."""
        raise NotImplementedError


class LFU(Policy):
    """Least frequently used goes; among equals the one that came to its count first. Counts start at 1, never age.

    As the block cache of PQCache's release (arXiv:2407.12820, section 3.4), of which the recorded runs are.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.counts: dict[int, int] = {}
        self.by_count: dict[int, dict[int, None]] = {}  # count -> blocks, in the order in which they came to it

    def _used(self, block: int) -> None:
        self._forget(block)
        self._note(block, self.counts[block] + 1)

    def _enter(self, block: int) -> None:
        self._note(block, 1)

    def _leave(self) -> int:
        block = next(iter(self.by_count[min(self.by_count)]))
        self._forget(block)
        del self.counts[block]
        return block

    def _note(self, block: int, count: int) -> None:
        self.counts[block] = count
        self.by_count.setdefault(count, {})[block] = None

    def _forget(self, block: int) -> None:
        peers = self.by_count[self.counts[block]]
        del peers[block]
        if not peers:
            del self.by_count[self.counts[block]]


class LRU(Policy):
    """Least recently used goes. Not in PQCache's release; its Fig. 10d compares both."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.order: dict[int, None] = {}

    def _used(self, block: int) -> None:
        del self.order[block]
        self.order[block] = None

    def _enter(self, block: int) -> None:
        self.order[block] = None

    def _leave(self) -> int:
        block = next(iter(self.order))
        del self.order[block]
        return block


def policy_of(name: str, limit: int) -> Policy:
    """lfu or lru."""
    if name not in ("lfu", "lru"):
        raise ConfigError(f"cache_policy must be lfu or lru, got {name!r}")
    return LFU(limit) if name == "lfu" else LRU(limit)
