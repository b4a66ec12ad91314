"""How a model's full cache compared with published numbers: a file per model in the outputs, which tables read."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record.canonical_json import Json, canonical, load, pretty, setting
from kvexp.record.files import explained, locked, replace

FOLDER = ".yardstick"
ELSEWHERE = ("chat", "device")  # of a model's identity: what does not change the weights


def keep_check(outputs_dir: str | Path, model: Mapping[str, Any], content: Mapping[str, Any]) -> Path:
    """Write what was found of a model (as a run's identity has it); `content` has the text "verdict" and "numerics"."""
    file = _place(outputs_dir, model)
    with explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent):
            replace(file, pretty(setting(content, "yardstick")))
    return file


def check_of(outputs_dir: str | Path, model: Any, numerics: int) -> str:
    """The verdict on a model's full cache; "unchecked" where there is none of this NUMERICS, or no readable one."""
    if not isinstance(model, Mapping):
        return "unchecked"
    try:
        found: Json = load(_place(outputs_dir, model))
    except (OSError, ValueError, ConfigError):
        return "unchecked"
    verdict = found.get("verdict")
    return verdict if isinstance(verdict, str) and found.get("numerics") == numerics else "unchecked"


def _place(outputs_dir: str | Path, model: Mapping[str, Any]) -> Path:
    weights = {key: value for key, value in model.items() if key not in ELSEWHERE}
    name = hashlib.sha256(canonical(setting(weights, "model"))).hexdigest()[:16]
    return Path(outputs_dir) / FOLDER / f"{name}.json"
