"""In which order a search tries positions, where the effects of removing them are measured: the largest first."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvexp.diagnose.causal.causal_files import REMOVALS, read_frame, read_measured
from kvexp.diagnose.causal.removal_plan import SPAN, TOKEN
from kvexp.record import Run


def search_order(run: Run, example: str, positions: Sequence[int]) -> list[int] | None:
    """All of `positions`, those of largest effect first; None where the example has no causal measurement.

    A token that was not removed by itself has its share of its span's effect; positions behind the prompt come last.
    """
    removals = read_frame(run, example, REMOVALS) if read_measured(run, example) is not None else None
    return None if removals is None else ordered_by_effect(removals, positions)


def ordered_by_effect(removals: pd.DataFrame, positions: Sequence[int]) -> list[int]:
    """`search_order` of these removals."""
    effect: dict[int, float] = {}
    for span in removals[removals["kind"] == SPAN].itertuples():
        first, length = int(str(span.position)), int(str(span.length))
        effect |= dict.fromkeys(range(first, first + length), float(str(span.kl)) / length)
    for token in removals[removals["kind"] == TOKEN].itertuples():
        effect[int(str(token.position))] = float(str(token.kl))
    return sorted(positions, key=lambda position: (-effect.get(position, -1.0), position))
