"""An entry of the league: one run as one JSON file, with the words that make it again and the numbers of every row.

An entry holds no code and no path: `words` are those of `kvexp run`, and whoever checks it composes them anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record.canonical_json import load
from kvexp.record.files import explained, replace

FORMAT, VERSION = "kvexp-league", 1
Entry = dict[str, Any]

# What of a command line is of this machine or changes no number, and no part of an entry.
LEFT_OUT = (
    "outputs_dir",
    "limit",
    "batch_size",
    "timeout_s",
    "retry",
    "shard",
    "log",
    "diagnose",
    "divergence",
    "hydra",
)
NUMBERS = ("kl", "full_logprob", "logprob")  # of a row: means over its judged tokens, teacher-forced
TEXTS = ("hash", "model", "task", "method")
OPTIONAL = ("kv_ratio", "tokens", "score", "full", "kl", "kl_low", "kl_high", "top1", "kv_bytes", "full_kv_bytes")


def words_of(overrides: list[str], choices: Mapping[str, Any] | None = None) -> list[str]:
    """The words of a command line that make the run on another machine.

    choices: group -> the option taken; model, task and method are said even where they are the defaults of today.
    """
    words = [word for word in overrides if word.lstrip("+~").partition("=")[0].split(".")[0] not in LEFT_OUT]
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    if "method_file" in typed:
        typed.add("method")
    taken = [f"{group}={(choices or {}).get(group)}" for group in ("model", "task", "method") if group not in typed]
    return [*(word for word in taken if not word.endswith("=None")), *words]


def write_entry(folder: Path, entry: Entry) -> Path:
    """Write an entry under a name that says what it is; ConfigError for one that could not be read again."""
    if why := wrong_entry(entry):
        raise ConfigError(f"the run makes no entry: {why}")
    size = entry["kv_ratio"] if entry["kv_ratio"] is not None else entry["tokens"]
    name = "-".join(_plain(str(part)) for part in (entry["model"], entry["task"], entry["method"], size, entry["hash"]))
    file = folder / f"{name}.json"
    with explained(file):
        folder.mkdir(parents=True, exist_ok=True)
        replace(file, (json.dumps(entry, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode())
    return file


def _plain(words: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in words)[:40]


def entries_in(folder: Path) -> Iterator[tuple[Path, Entry]]:
    """Every entry of a folder, by name; ConfigError where there is none, or a file that is none."""
    files = sorted(file for file in folder.glob("*.json") if file.name != "tolerance.json")
    if not files:
        raise ConfigError(f"{folder} has no entries: kvexp submit RUN makes one")
    for file in files:
        yield file, read_entry(file)


def read_entry(file: Path) -> Entry:
    """One entry; ConfigError for a file that is none."""
    try:
        entry = load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no entry of the league: {error}") from error
    if why := wrong_entry(entry):
        raise ConfigError(f"{file} is no entry of the league: {why}; make it again with kvexp submit")
    return entry


def wrong_entry(entry: Mapping[str, Any]) -> str | None:
    """Why this is no entry; None if it is one. It may come from anybody: nothing in it is trusted to have a type."""
    if (entry.get("format"), entry.get("version")) != (FORMAT, VERSION):
        return f"format and version must be {FORMAT} and {VERSION}"
    for name in TEXTS:
        if not isinstance(entry.get(name), str) or not entry[name]:
            return f"{name} must be a text"
    for name in OPTIONAL:
        if name not in entry or not (entry[name] is None or _finite(entry[name])):
            return f"{name} must be a number or null"
    if not isinstance(entry.get("numerics"), int):
        return "numerics must be a whole number"
    words = entry.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return "words must be a list of texts"
    rows = entry.get("rows")
    if not isinstance(rows, list) or not rows:
        return "rows must be a list with at least one row"
    return next((why for row in rows if (why := _wrong_row(row)) is not None), None)


def _wrong_row(row: Any) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("example"), str):
        return "a row must have the example's id"
    name, tokens = row["example"], row.get("tokens")
    if not isinstance(row.get("index"), int) or not isinstance(row.get("first_by_prefill"), bool):
        return f"row {name}: index must be a whole number and first_by_prefill true or false"
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        return f"row {name}: tokens must be a list of token ids"
    if not all(_finite(row.get(key)) for key in NUMBERS):
        return f"row {name}: {', '.join(NUMBERS)} must be finite numbers"
    return None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
