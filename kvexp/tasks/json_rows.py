"""Rows of .json and .jsonl files, as they are written there: no type is inferred, no field filled in or renamed.

Read without `datasets`: its reader guesses a type for every column from the first rows (a text that looks like a date
becomes one) and, on some lines that hold no object, takes the process down with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError

Row = dict[str, Any]


def json_rows(path: Path) -> Iterator[Row]:
    """A list of objects, or one object per line (empty lines are none); ConfigError names the line or row."""
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"task.data_files: {path} is empty; name a file with at least one row")
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            if path.suffix == ".json" and not _is_lines(file.readline()):
                file.seek(0)
                yield from _whole(file.read(), path)
                return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield json_row(line, f"line {number} of {path}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"task.data_files: {path} is not UTF-8 text ({error}); save it in that encoding") from error
    except OSError as error:
        raise ConfigError(f"task.data_files: cannot read {path}: {error.strerror or error}") from error


def json_row(line: str | bytes, where: str) -> Row:
    """The object on a line; ConfigError that starts with `where`."""
    try:
        text = line if isinstance(line, str) else line.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}; correct or remove the line") from error
    return _row(value, where)


def _is_lines(first: str) -> bool:
    """Whether a .json file holds an object per line after all."""
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _whole(text: str, path: Path) -> Iterator[Row]:
    try:
        value = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"task.data_files: cannot read {path}: {error}; give a list of objects (.json) or one per line (.jsonl)"
        ) from error
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield _row(row, f"row {number} of {path}")


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ConfigError(f"{where} is no object with fields but of type {kind}; correct or remove it")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(f"{where} has half of a character, {half} alone; correct or remove it") from error
    return value


def _constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")
