"""Recorded results, experiments/measured.json and measured_real.json, and the pages made of them, each by a command."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.lib.exhibits import HERE
from kvexp.util import ConfigError

if TYPE_CHECKING:
    from experiments.lib.made import Made

MEASURED, MEASURED_REAL = HERE / "measured.json", HERE / "measured_real.json"
VERDICT = {True: "holds", False: "does not hold", None: "undecided"}
WAITS = "no GPU result yet"  # how the sentence of a speed exhibit without results begins
TITLES = {
    "keyformer": "Keyformer (arXiv:2403.09054)",
    "a2sf": "A2SF (arXiv:2407.20485)",
    "pqcache": "PQCache (arXiv:2407.12820)",
}


def recorded(scale: str) -> dict[str, dict[str, Any]]:
    """Exhibit -> {holds, words, seconds} as recorded at this scale; of a real one also divergence and provenance."""
    known = _read(MEASURED_REAL if scale == "real" else MEASURED)
    found: dict[str, dict[str, Any]] = known.get("exhibits" if scale == "real" else scale, {})
    return found


def examples_of(entry: dict[str, Any]) -> str:
    """How many examples a real exhibit has: 24, or of several tasks 5 of each of 4, or 24 cnn_dailymail, 12 news_qa."""
    known = _read(MEASURED_REAL).get("rows", {})
    counts = [(known[key]["task"], len(known[key]["ids"])) for key in entry.get("rows", ())]
    if len(counts) < 2:
        return str(entry.get("n", "-"))
    if len({count for _, count in counts}) == 1:
        return f"{counts[0][1]} of each of {len(counts)} tasks"
    return ", ".join(f"{count} {task}" for task, count in counts)


def _read(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return known


def _write(path: Path, known: dict[str, Any]) -> None:
    known = {one: dict(sorted(known[one].items())) for one in sorted(known)}
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def record(name: str, scale: str, holds: bool | None, words: str, seconds: float | None) -> None:
    """Keep what came out of an exhibit. seconds: None where some rows were there already: the time on record stays."""
    known = _read(MEASURED)
    before = known.get(scale, {}).get(name, {}).get("seconds")
    entry = {"holds": holds, "words": words, "seconds": before if seconds is None else round(seconds)}
    known.setdefault(scale, {})[name] = entry
    _write(MEASURED, known)


def record_real(made: Made) -> None:
    """The same of the real scale: with both verdicts, and where the numbers come from. Ids of rows are kept once.

    Several processes may record at once. seconds: the most CPU time one call took for what it did not find there.
    """
    with (HERE / "__init__.py").open("rb") as lock:  # any file that is always there
        fcntl.flock(lock, fcntl.LOCK_EX)
        _record_real(made)


def _record_real(made: Made) -> None:
    known = _read(MEASURED_REAL)
    exhibits, rows = known.setdefault("exhibits", {}), known.setdefault("rows", {})
    seconds = max(round(made.seconds), exhibits.get(made.name, {}).get("seconds", 0))
    entry: dict[str, Any] = {"holds": made.holds, "words": made.words, "seconds": seconds}
    if made.divergence is not None:
        entry["divergence"] = {"holds": made.divergence[0], "words": made.divergence[1]}
    if made.provenance is not None:
        keys = []
        for each in made.provenance.rows:
            ids = list(each.ids)
            key = f"{each.task} {hashlib.sha256(json.dumps([each.data, ids]).encode()).hexdigest()[:8]}"
            rows[key] = {"task": each.task, "data": each.data, "ids": ids}
            keys.append(key)
        entry |= {**made.provenance.plain(), "rows": keys}
    exhibits[made.name] = entry
    used = {key for each in exhibits.values() for key in each.get("rows", ())}
    known["rows"] = {key: value for key, value in rows.items() if key in used}
    _write(MEASURED_REAL, known)


def status(entry: dict[str, Any]) -> str:
    """What became of a claim, from its entry in measured.json."""
    return "waits for a GPU" if entry["words"].startswith(WAITS) else VERDICT[entry["holds"]]


def write_or_check(
    text: Callable[[], str], page: Path, command: str, arguments: Sequence[str] | None, title: str | None
) -> int:
    """Write what `text` makes to `page`, or with --check see whether it is there: 0, 1 if not, 2 if it cannot be made.

    command: what to type; title: the docstring of who types it.
    """
    parser = argparse.ArgumentParser(prog=command, description=inspect.cleandoc(title or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help=f"write nothing; 1 if {page.name} is not current")
    check = parser.parse_args(arguments).check
    try:
        now = text()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if check:
        current = page.exists() and page.read_text("utf-8") == now
        print("current" if current else f"not current; run: {command}")
        return 0 if current else 1
    page.write_text(now, encoding="utf-8")
    print(f"wrote {page}")
    return 0
