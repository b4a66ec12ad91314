"""examples.jsonl: one row per line, appended wholly or not at all; a line that is no row is moved out of the way."""

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record.canonical_json import Json, canonical, parse, plain
from kvexp.record.files import explained, locked, replace, sync_folder, trouble, write_all
from kvexp.record.row_schema import wrong_row

NAME, QUARANTINE = "examples.jsonl", "quarantine.jsonl"


def rows(folder: Path) -> list[Json]:
    """The rows of a run folder, as `Run.rows` promises them."""
    file = folder / NAME
    with explained(file, "read"):
        lines = _lines(file)
    found, bad = _scan(lines, file)
    if not bad:
        return found
    what = f"moved to {QUARANTINE}"
    try:
        with locked(folder):
            lines = _lines(file)  # again: another process may have moved them, or appended
            found, bad = _scan(lines, file)
            if bad:
                _quarantine(folder, lines, bad)
    except OSError as error:
        what = f"left out; {trouble(error, 'move it to', folder / QUARANTINE)}"
    for number, why in bad.items():
        warnings.warn(f"{file}:{number}: not a row ({why}); {what}", stacklevel=3)
    return found


def append(folder: Path, *rows: Mapping[str, Any]) -> None:
    """Write rows, as `Run.append` promises it."""
    for row in rows:
        if not isinstance(row.get("example"), str):
            raise ValueError(f"a row needs its example's id as a string, got example={row.get('example')!r}")
    if not rows:
        return
    file = folder / NAME
    line = b"".join(canonical(plain(row, "row"), sort_keys=False) + b"\n" for row in rows)
    with explained(file), locked(folder):
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            end = _cut_truncated(fd)
            try:
                write_all(fd, line)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, end)  # what this cannot cut the next append does
                raise
        finally:
            os.close(fd)
        if not end:
            sync_folder(folder)


def _lines(file: Path) -> list[bytes]:
    """The lines that have an end."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_bytes().split(b"\n")[:-1]
    return []


def _scan(lines: list[bytes], file: Path) -> tuple[list[Json], dict[int, str]]:
    """(rows, one of each example; line number, from 1 -> why it is no row). Blank lines are neither.

    ConfigError for a row that somebody edited into what no run writes: moved out of the way, it would change numbers.
    """
    found: dict[str, Json] = {}
    bad: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse(line) if line.strip() else None
        except ValueError as error:
            bad[number] = str(error)
            continue
        if row is not None and not isinstance(row.get("example"), str):
            bad[number] = "no example id"
        elif row is not None:
            if why := wrong_row(row):
                raise ConfigError(
                    f"{file}:{number}: {why}; correct the line, or remove it and run the same command again, which "
                    "makes that row anew"
                )
            before = found.get(row["example"])
            if before is None or before.get("failed"):
                found[row["example"]] = row
    return list(found.values()), bad


def _quarantine(folder: Path, lines: list[bytes], bad: dict[int, str]) -> None:
    """Move lines, under the lock. Killed half way, a line is in both files and moves again."""
    file, moved = folder / QUARANTINE, b""
    for number, why in bad.items():
        text = lines[number - 1].decode("utf-8", "surrogateescape")  # encode likewise to get the bytes back
        moved += canonical({"file": NAME, "line": number, "why": why, "text": text}) + b"\n"
    replace(file, (file.read_bytes() if file.exists() else b"") + moved)
    replace(folder / NAME, b"".join(line + b"\n" for number, line in enumerate(lines, 1) if number not in bad))


def _cut_truncated(fd: int) -> int:
    """Cut off a last line without its end, under the lock; returns the size in bytes."""
    end = size = os.lseek(fd, 0, os.SEEK_END)
    if size and os.pread(fd, 1, size - 1) != b"\n":
        end = os.pread(fd, size, 0).rfind(b"\n") + 1
        os.ftruncate(fd, end)
    return end
