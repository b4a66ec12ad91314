"""Full attention: nothing is evicted. The baseline of every other method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.core import Method


@dataclass(frozen=True)
class Full(Method):
    """keep = everything. Takes no budget."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False
