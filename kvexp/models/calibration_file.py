"""The file that holds a model's calibration: in the cache folder, known by the model's digest, never half written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvexp.cache_folder import cache_folder
from kvexp.core.query_calibration import QueryCalibration
from kvexp.errors import ConfigError

STATISTICS = 1  # raised by a change after which the same model and texts would give other statistics
TENSORS = ("direction", "mean", "size")
ABOUT = "kvexp"  # the one entry of the file's metadata: safetensors writes several in any order


def calibration_file(model: str) -> Path:
    """Where the calibration of a model lies, be it there or not. model: what stands for its weights."""
    name = hashlib.sha256(model.encode()).hexdigest()[:32]
    return cache_folder() / "calibration" / f"queries{STATISTICS}-{name}.safetensors"


def write_calibration(made: QueryCalibration, model: str, about: Mapping[str, Any]) -> Path:
    """Write a model's calibration to its file, whole or not at all, in place of an older one; returns the file.

    about: what it was made of, for readers. ConfigError where the file cannot be written.
    """
    file = calibration_file(model)
    notes = {"version": STATISTICS, "model": model, "digest": made.digest, "about": dict(about)}
    content = save({name: getattr(made, name).contiguous() for name in TENSORS}, {ABOUT: json.dumps(notes)})
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


def read_calibration(model: str) -> QueryCalibration | None:
    """A model's calibration; None where it has none. ConfigError for a file that is not what was written for it."""
    file = calibration_file(model)
    try:
        with safe_open(file, "pt") as opened:
            notes = json.loads((opened.metadata() or {})[ABOUT])
            made = QueryCalibration.of(*(opened.get_tensor(name) for name in TENSORS))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, ConfigError) as error:
        raise ConfigError(f"{file} is no calibration ({error})") from error
    found = (notes.get("version"), notes.get("model"), notes.get("digest"))
    if found != (STATISTICS, model, made.digest):
        raise ConfigError(f"{file} was written for another model, by another version, or changed since")
    return made
