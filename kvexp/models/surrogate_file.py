"""The file that holds a model's surrogate: in the cache folder, known by the model's digest, never half written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvexp.cache_folder import cache_folder
from kvexp.core.surrogate import Surrogate
from kvexp.errors import ConfigError
from kvexp.models.calibration_file import write_whole

VERSION = 1  # raised by a change after which the same model and texts would give other weights
ABOUT = "kvexp"  # the one entry of the file's metadata


@dataclass(frozen=True)
class KeptSurrogate:
    """A surrogate with what it was made of: `about` as it was written, articles among it by id."""

    surrogate: Surrogate
    about: Mapping[str, Any]


def surrogate_file(model: str) -> Path:
    """Where the surrogate of a model lies, be it there or not. model: what stands for its weights."""
    name = hashlib.sha256(model.encode()).hexdigest()[:32]
    return cache_folder() / "surrogate" / f"kvzap{VERSION}-{name}.safetensors"


def write_surrogate(made: Surrogate, model: str, about: Mapping[str, Any]) -> Path:
    """Write a model's surrogate to its file, whole or not at all, in place of an older one; returns the file.

    about: what it was made of. ConfigError where the file cannot be written.
    """
    notes = {"version": VERSION, "model": model, "digest": made.digest, "about": dict(about)}
    tensors = {"weight": made.weight.contiguous(), "bias": made.bias.contiguous()}
    return write_whole(surrogate_file(model), save(tensors, {ABOUT: json.dumps(notes)}))


def read_surrogate(model: str) -> KeptSurrogate | None:
    """A model's surrogate; None where it has none. ConfigError for a file that is not what was written for it."""
    file = surrogate_file(model)
    try:
        with safe_open(file, "pt") as opened:
            notes = json.loads((opened.metadata() or {})[ABOUT])
            made = Surrogate.of(opened.get_tensor("weight"), opened.get_tensor("bias"))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, ConfigError) as error:
        raise ConfigError(f"{file} is no surrogate ({error})") from error
    found = (notes.get("version"), notes.get("model"), notes.get("digest"))
    if found != (VERSION, model, made.digest):
        raise ConfigError(f"{file} was written for another model, by another version, or changed since")
    return KeptSurrogate(made, notes["about"])
