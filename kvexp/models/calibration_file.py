"""The files that hold a model's calibration: in the cache folder, known by the model's digest, never half written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvexp.cache_folder import cache_folder
from kvexp.core.head_scores import HeadScores
from kvexp.core.query_calibration import QueryCalibration
from kvexp.errors import ConfigError

STATISTICS = 1  # raised by a change after which the same model and texts would give other statistics
HEAD_SCORES = 1  # the same of scores of heads
TENSORS = ("direction", "mean", "size")
Made = TypeVar("Made", QueryCalibration, HeadScores)
ABOUT = "kvexp"  # the one entry of the file's metadata: safetensors writes several in any order


def calibration_file(model: str) -> Path:
    """Where the calibration of a model lies, be it there or not. model: what stands for its weights."""
    return _file_of(f"queries{STATISTICS}", model)


def head_scores_file(model: str) -> Path:
    """Where the scores of a model's heads lie, be they there or not. model: what stands for its weights."""
    return _file_of(f"heads{HEAD_SCORES}", model)


def _file_of(kind: str, model: str) -> Path:
    name = hashlib.sha256(model.encode()).hexdigest()[:32]
    return cache_folder() / "calibration" / f"{kind}-{name}.safetensors"


def write_calibration(made: QueryCalibration, model: str, about: Mapping[str, Any]) -> Path:
    """Write a model's calibration to its file, whole or not at all, in place of an older one; returns the file.

    about: what it was made of, for readers. ConfigError where the file cannot be written.
    """
    notes = {"version": STATISTICS, "model": model, "digest": made.digest, "about": dict(about)}
    return _write(calibration_file(model), {name: getattr(made, name) for name in TENSORS}, notes)


def write_head_scores(made: HeadScores, model: str, about: Mapping[str, Any]) -> Path:
    """The same for the scores of a model's heads."""
    notes = {"version": HEAD_SCORES, "model": model, "digest": made.digest, "about": dict(about)}
    return _write(head_scores_file(model), {"scores": made.scores}, notes)


def read_calibration(model: str) -> QueryCalibration | None:
    """A model's calibration; None where it has none. ConfigError for a file that is not what was written for it."""
    return _read(calibration_file(model), TENSORS, QueryCalibration.of, STATISTICS, model)


def read_head_scores(model: str) -> HeadScores | None:
    """The same for the scores of a model's heads."""
    return _read(head_scores_file(model), ("scores",), HeadScores.of, HEAD_SCORES, model)


def _write(file: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Path:
    """Write tensors and notes to a file, whole or not at all; returns it. ConfigError where it cannot be written."""
    content = save({name: each.contiguous() for name, each in tensors.items()}, {ABOUT: json.dumps(notes)})
    return write_whole(file, content)


def write_whole(file: Path, content: bytes) -> Path:
    """Write a file of the cache folder, whole or not at all; returns it. ConfigError where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
        try:
            with open(opened, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.chmod(temporary, 0o644)  # mkstemp writes for its owner alone, and a cache may be shared
            os.replace(temporary, file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file} ({error.strerror or error}): make room, or set KVEXP_CACHE to a folder that can be "
            "written"
        ) from error
    return file


def _read(file: Path, names: Sequence[str], make: Callable[..., Made], version: int, model: str) -> Made | None:
    """What `make` makes of a file's tensors; None where there is no file. ConfigError as of `read_calibration`."""
    try:
        with safe_open(file, "pt") as opened:
            notes = json.loads((opened.metadata() or {})[ABOUT])
            made = make(*(opened.get_tensor(name) for name in names))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, ConfigError) as error:
        raise ConfigError(f"{file} is no calibration ({error})") from error
    if (notes.get("version"), notes.get("model"), notes.get("digest")) != (version, model, made.digest):
        raise ConfigError(f"{file} was written for another model, by another version, or changed since")
    return made
