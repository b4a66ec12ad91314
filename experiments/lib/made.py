"""What came out of one exhibit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.lib.provenance import Provenance


@dataclass(frozen=True)
class Made:
    """One exhibit: its table, what became of the claim, and the CPU seconds it took now (less where runs existed).

    CPU seconds (of all threads, user and system) say what an exhibit costs whatever else the machine does.
    """

    name: str
    table: pd.DataFrame
    holds: bool | None
    words: str
    seconds: float
    folder: Path
    divergence: tuple[bool | None, str] | None = None  # the claim judged again, where its runs have a divergence
    provenance: Provenance | None = None  # at the real scale
