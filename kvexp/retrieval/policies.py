"""Replacement policies of the block cache: least frequently used, least recently used."""

from __future__ import annotations

from kvexp.errors import ConfigError


class Policy:
    """A set of at most `limit` cached blocks. slots: block number -> cache slot 0..limit-1."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.slots: dict[int, int] = {}

    def insert(self, block: int) -> None:
        """Count a use of the block; a block not cached is inserted, in place of another one where the cache is full."""
        if block in self.slots:
            self._touch(block)
            return
        room = len(self.slots) < self.limit
        self.slots[block] = len(self.slots) if room else self.slots.pop(self._evict())
        self._insert(block)

    def _touch(self, block: int) -> None:
        """Record a use of a cached block."""
        raise NotImplementedError

    def _insert(self, block: int) -> None:
        """Record a block that has just been cached."""
        raise NotImplementedError

    def _evict(self) -> int:
        """Choose the block to evict and remove it from the policy's own records."""
        raise NotImplementedError


class LFU(Policy):
    """Evicts the least frequently used block, among equals the one that reached its count first. Counts never age.

    As the block cache of PQCache's release (arXiv:2407.12820, section 3.4).
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.counts: dict[int, int] = {}
        self.by_count: dict[int, dict[int, None]] = {}  # count -> blocks, in the order in which they came to it

    def _touch(self, block: int) -> None:
        self._remove(block)
        self._note(block, self.counts[block] + 1)

    def _insert(self, block: int) -> None:
        self._note(block, 1)

    def _evict(self) -> int:
        block = next(iter(self.by_count[min(self.by_count)]))
        self._remove(block)
        del self.counts[block]
        return block

    def _note(self, block: int, count: int) -> None:
        """Record that the block has been used `count` times."""
        self.counts[block] = count
        self.by_count.setdefault(count, {})[block] = None

    def _remove(self, block: int) -> None:
        """Take the block out of the blocks of its count."""
        peers = self.by_count[self.counts[block]]
        del peers[block]
        if not peers:
            del self.by_count[self.counts[block]]


class LRU(Policy):
    """Evicts the least recently used block. Not in PQCache's release; its Fig. 10d compares both."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.order: dict[int, None] = {}

    def _touch(self, block: int) -> None:
        del self.order[block]
        self.order[block] = None

    def _insert(self, block: int) -> None:
        self.order[block] = None

    def _evict(self) -> int:
        block = next(iter(self.order))
        del self.order[block]
        return block


def make_policy(name: str, limit: int) -> Policy:
    """The policy called lfu or lru; ConfigError for other names."""
    if name not in ("lfu", "lru"):
        raise ConfigError(f"cache_policy must be lfu or lru, got {name!r}")
    return LFU(limit) if name == "lfu" else LRU(limit)
