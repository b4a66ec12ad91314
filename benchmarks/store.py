"""Results on disk: one JSON per benchmark, one cell per thing measured together, with machine and code."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def words(device: str) -> str:
    """What of the machine decides speed, as a text: part of every result's key."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = f"{_processor()}, {cores} cores"
    return f"{torch.cuda.get_device_name(device)}; {said}" if device.startswith("cuda") else said


def provenance(device: str) -> dict[str, Any]:
    """Everything else worth knowing: versions, commit, load, date."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "machine": words(device),
        "memory_gib": round(memory / 2**30, 1),
        "gpu_memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
        if device.startswith("cuda")
        else None,
        "threads": torch.get_num_threads(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "triton", "kvpress")},
        "cuda": torch.version.cuda,
        "commit": commit(),
        "sources": sources(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit, with + where the tree differs from it; "unknown" outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "kvexp"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else "unknown"


def sources() -> str:
    """A hash of kvexp's code: says whether two results are of the same code where there is no commit to ask."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kvexp").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
        known = self.find(key)
        if known is not None and not again:
            return known, True
        about, start = provenance(device), time.perf_counter()
        rows = measure()
        cell = {"key": key, "rows": rows, "seconds": round(time.perf_counter() - start, 2), "from": about}
        self.cells = [other for other in self.cells if other is not known] + [cell]
        self._write()
        return cell, False

    def _write(self) -> None:
        """All or nothing: a reader, or a kill, never meets half a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(self.cells, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)
