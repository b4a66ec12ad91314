"""Recorded results, experiments/measured.json, and the pages made of them, each by a command."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.exhibits import HERE
from kvexp.errors import ConfigError

MEASURED = HERE / "measured.json"
VERDICT = {True: "holds", False: "does not hold", None: "undecided"}
WAITS = "no GPU result yet"  # how the sentence of a speed exhibit without results begins
TITLES = {
    "keyformer": "Keyformer (arXiv:2403.09054)",
    "a2sf": "A2SF (arXiv:2407.20485)",
    "pqcache": "PQCache (arXiv:2407.12820)",
}


def recorded(scale: str) -> dict[str, dict[str, Any]]:
    """Exhibit -> {holds, words, seconds} as last recorded at this scale."""
    known: dict[str, Any] = json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {}
    found: dict[str, dict[str, Any]] = known.get(scale, {})
    return found


def record(name: str, scale: str, holds: bool | None, words: str, seconds: float | None) -> None:
    """Keep what came out of an exhibit. seconds: None where some rows were there already: the time on record stays."""
    known = json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {}
    before = known.get(scale, {}).get(name, {}).get("seconds")
    entry = {"holds": holds, "words": words, "seconds": before if seconds is None else round(seconds)}
    known.setdefault(scale, {})[name] = entry
    known = {one: dict(sorted(known[one].items())) for one in sorted(known)}
    MEASURED.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
