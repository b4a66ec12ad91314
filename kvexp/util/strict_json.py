"""What JSON can hold, written in one way only: the same content has the same bytes, and so the same digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.util.errors import ConfigError

Json = dict[str, Any]


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_no_constant)


def parse(data: bytes) -> Json:
    """A JSON object in strict JSON, or ValueError."""
    try:
        value = _STRICT.decode(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def load(path: Path) -> Json:
    return parse(path.read_bytes())


def json_object(value: Mapping[str, Any], where: str) -> Json:
    try:
        return dict(plain(value, where))
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


def plain(value: Any, where: str) -> Any:
    """The value in dicts, lists and scalars that JSON gives back unchanged; ValueError says where anything else is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ValueError(f"{where} is {value}, which JSON cannot hold; use a finite number or null")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; keys must be strings, write {str(key)!r}")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    allowed = "null, bool, int, float, str, list and dict are allowed"
    raise ValueError(f"{where} is of type {type(value).__name__}; {allowed}: convert it")


def digest(config: Json, numerics: int) -> str:
    return hashlib.sha256(canonical({"config": config, "numerics": numerics})).hexdigest()[:16]


def canonical(value: Any, sort_keys: bool = True) -> bytes:
    """One line of pure ASCII: no text in it, whatever a model wrote, can break the line or fail to encode."""
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False).encode("ascii")


def pretty(value: Json) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")
