"""The speeds measured on a machine (`speed_model.Speed`), kept in the cache folder: a file per model and machine."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvexp import NUMERICS
from kvexp.cache_folder import cache_folder
from kvexp.config.model_spec import ModelSpec
from kvexp.dry_run.speed_model import Speed
from kvexp.errors import ConfigError

FORMAT = 1  # of the file
_NO_SPEED = ("chat", "tokenizer", "template_args", "strip_thinking")  # what of a model changes no speed


@dataclass(frozen=True)
class KeptSpeed:
    """What was measured, and when.

    speeds: for each number of processes that a sweep of this machine may use; start_s: seconds of a command until its
    model is loaded; base_bytes: held by the process without the model; date: as YYYY-MM-DD.
    """

    speeds: tuple[Speed, ...]
    start_s: float
    base_bytes: int
    date: str

    def of(self, processes: int) -> Speed:
        """The speed with so many processes, else with the nearest number that was measured."""
        return min(self.speeds, key=lambda speed: abs(speed.processes - processes))


def surroundings(spec: ModelSpec, device: str) -> dict[str, Any]:
    """Everything a speed depends on: another model, dtype, device, number of threads, torch or kvexp is measured anew.

    device: its name, as `kvexp.evaluate.rows.environment` gives it.
    """
    import torch

    model = {name: value for name, value in spec.identity().items() if name not in _NO_SPEED}
    return {
        "format": FORMAT,
        "model": model,
        "device": device,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numerics": NUMERICS,
    }


def place_of(key: dict[str, Any]) -> Path:
    """The file of these surroundings."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return cache_folder() / "speeds" / f"{name}.json"


def keep(key: dict[str, Any], measured: KeptSpeed) -> Path:
    """Write the file, whole or not at all; returns its path. ConfigError where nothing can be written."""
    place = place_of(key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fd, draft = tempfile.mkstemp(dir=place.parent, suffix=".tmp")
        try:
            with open(fd, "w", encoding="utf-8") as file:
                json.dump({"of": key, "measured": asdict(measured)}, file, default=str)
            os.replace(draft, place)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise ConfigError(
            f"the measured speeds cannot be kept in {place.parent} ({error.strerror or error}): set KVEXP_CACHE to a "
            "folder that can be written to"
        ) from error
    return place


def kept(key: dict[str, Any]) -> KeptSpeed | None:
    """What was measured in these surroundings; None where nothing was.

    ConfigError for a file that does not hold what it should, such as one that was cut off.
    """
    place = place_of(key)
    try:
        text = place.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_damaged(place, str(error))) from error
    try:
        found = json.loads(text)
        if found["of"] != json.loads(json.dumps(key, default=str)):
            raise ValueError("it is of another model or machine")
        return kept_of(found["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(_damaged(place, f"{type(error).__name__}: {error}")) from error


def _damaged(place: Path, why: str) -> str:
    return (
        f"{place} does not hold measured speeds ({why}): --dry-run=measure measures them again, or remove the file and "
        "the time is estimated"
    )


def kept_of(plain: dict[str, Any]) -> KeptSpeed:
    speeds = tuple(
        Speed(
            int(one["processes"]),
            int(one["threads"]),
            _numbers(one["prefill_s"], 3),
            _number(one["score_s"]),
            _number(one["variant_s"]),
            tuple((_number(rows), _number(seconds)) for rows, seconds in one["step_s"]),
            _number(one["slot_s"]),
            _number(one["forced_s"]),
        )
        for one in plain["speeds"]
    )
    if not speeds or not all(speed.step_s for speed in speeds):
        raise ValueError("it has no speeds")
    return KeptSpeed(speeds, _number(plain["start_s"]), int(plain["base_bytes"]), str(plain["date"]))


def _number(value: Any) -> float:
    made = float(value)
    if not 0 <= made < float("inf"):
        raise ValueError(f"{value!r} is no duration")
    return made


def _numbers(values: Any, count: int) -> Any:
    made = tuple(_number(value) for value in values)
    if len(made) != count:
        raise ValueError(f"{len(made)} numbers where {count} are")
    return made


def _processor() -> str:
    """The processor's name; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
