"""Jobs that failed before they had a run folder: what was asked, and why not. Nothing asked goes unrecorded."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.record.canonical_json import Json, canonical, load, pretty, setting
from kvexp.record.files import explained, locked, replace
from kvexp.record.row_schema import wrong_labels
from kvexp.record.run_folder import told

FOLDER = ".refused"


@dataclass(frozen=True)
class Refusal:
    """path: its file, whose name is the digest of the overrides; labels: as far as they can be known."""

    path: Path
    overrides: list[str]
    labels: Json
    error: str
    message: str


def refuse(
    outputs_dir: str | Path, overrides: Iterable[str], labels: Mapping[str, Any], error: BaseException
) -> Refusal:
    """Record that what these overrides ask for could not begin. An OSError says where it could not be written."""
    words = sorted(overrides)
    file = _file(outputs_dir, words)
    content: Json = {"overrides": words, "labels": setting(labels, "labels")} | told(error)
    with explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent):
            replace(file, pretty(content))
    return Refusal(file, words, content["labels"], content["error"], content["message"])


def accept(outputs_dir: str | Path, overrides: Iterable[str]) -> None:
    """What these overrides ask for has a run now: forget that it was refused once."""
    file = _file(outputs_dir, sorted(overrides))
    with explained(file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        file.unlink()


def refusals(outputs_dir: str | Path) -> Iterator[Refusal]:
    """Every readable refusal, by file name."""
    for file in sorted((Path(outputs_dir) / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a notice, not a number: an unreadable one is no loss
            found = load(file)
            if wrong_labels(found["labels"]):
                continue
            yield Refusal(file, *(found[name] for name in ("overrides", "labels", "error", "message")))


def _file(outputs_dir: str | Path, words: list[str]) -> Path:
    return Path(outputs_dir) / FOLDER / f"{hashlib.sha256(canonical(words)).hexdigest()[:16]}.json"
