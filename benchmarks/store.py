"""Results on disk: one JSON per benchmark, one cell per thing measured together, measured once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance

RESULTS = Path(__file__).resolve().parent / "results"
Cell = dict[str, Any]


class Results:
    """The cells of one benchmark. A cell holds its key, its rows, where it comes from and how long it took."""

    def __init__(self, benchmark: str, folder: Path | str = RESULTS) -> None:
        self.path = Path(folder) / f"{benchmark}.json"
        self.cells: list[Cell] = json.loads(self.path.read_text("utf-8")) if self.path.exists() else []

    def find(self, key: Cell) -> Cell | None:
        """The cell of this very key."""
        plain = json.loads(json.dumps(key))
        return next((cell for cell in self.cells if cell["key"] == plain), None)

    def measured(self, key: Cell, measure: Callable[[], Any], device: str, again: bool = False) -> tuple[Cell, bool]:
        """The cell of this key, and whether it was there already; measured and written now if not, or if `again`."""
        found = self.find(key)
        if found is not None and not again:
            return found, True
        about, start = provenance(device), time.perf_counter()
        rows = measure()
        cell = {"key": key, "rows": rows, "seconds": round(time.perf_counter() - start, 2), "from": about}
        self.cells = [other for other in self.cells if other is not found] + [cell]
        self._write()
        return cell, False

    def _write(self) -> None:
        """All or nothing: a reader, or a kill, never meets half a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(self.cells, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)
