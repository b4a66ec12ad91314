"""shard=1/4: the second quarter of a run's examples, so that several processes or machines share one run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """index: from 0 to of - 1. Neighbouring examples stay together, since they may ask about one context."""

    index: int = 0
    of: int = 1

    @classmethod
    def read(cls, value: Any) -> Shard:
        """The configuration's `shard`; null is all examples."""
        if value is None:
            return cls()
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value) if isinstance(value, str) else None
        if found is None or not int(found[1]) < int(found[2]):
            raise ConfigError(f"shard must be null or i/n with i from 0 to n - 1, as in shard=0/4, got {value!r}")
        return cls(int(found[1]), int(found[2]))

    @property
    def whole(self) -> bool:
        return self.of == 1

    @property
    def name(self) -> str | None:
        """Of its claim; None for all examples."""
        return None if self.whole else f"{self.index}-of-{self.of}"

    def takes(self, total: int) -> range:
        """Which of so many examples are its own; the shards of one `of` share them out without rest."""
        return range(total * self.index // self.of, total * (self.index + 1) // self.of)
