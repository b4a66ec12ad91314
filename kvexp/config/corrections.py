"""Corrections of NUMERICS 10 that move rows: the identity of each run that one touches names it, all others keep theirs.

The next NUMERICS holds them all, and this file goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvexp.config.settings import Settings

# Name of the correction -> whether it can move a row of a run with these settings. No model is loaded for the answer.
CORRECTIONS: dict[str, Callable[[Settings], bool]] = {}


def corrections_of(settings: Settings) -> list[str]:
    """Sorted names of the corrections that can move rows of a run with these settings."""
    return sorted(name for name, touches in CORRECTIONS.items() if touches(settings))
