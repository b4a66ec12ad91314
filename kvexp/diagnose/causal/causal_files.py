"""Where a causal measurement lies: beside its run's other diagnoses, one set of files per example.

outputs/<hash>/diagnose/NAME.removals.parquet     every removal and its effect; written first
                        NAME.causal.parquet       every score at every removal
                        NAME.methods.parquet      one row per score, and one per score and layer
                        NAME.causal.json          the plan, and what the effects are over; written last
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import FOLDER, stem
from kvexp.record import Run
from kvexp.record.canonical_json import load
from kvexp.record.files import explained, replace

REMOVALS, SCORES, METHODS, MEASURED = "removals.parquet", "causal.parquet", "methods.parquet", "causal.json"


@dataclass(frozen=True)
class CausalExample:
    """NAME.causal.json.

    plan: of the removals; tokens, judged: of the prompt, and of the answer that effects are means over; floor: KL of a
    row from which nothing is removed, in nats: what rounding makes; seconds: the removals took; methods: of the scores.
    """

    example: str
    plan: dict[str, Any]
    tokens: int
    judged: int
    floor: float
    seconds: float
    methods: list[str]


def write_frame(run: Run, example: str, ending: str, frame: pd.DataFrame) -> None:
    """One table of an example's measurement."""
    sink = io.BytesIO()
    frame.to_parquet(sink, index=False, compression="zstd")
    _write(run, example, ending, sink.getvalue())


def read_frame(run: Run, example: str, ending: str) -> pd.DataFrame | None:
    """None where it is not there; ConfigError where it cannot be read."""
    start = stem(run, example)
    file = start.with_name(f"{start.name}.{ending}")
    if not file.exists():
        return None
    try:
        return pd.read_parquet(file)
    except (OSError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"cannot read {file}: {why}; remove it and run kvexp diagnose causal again") from error


def write_measured(run: Run, measured: CausalExample) -> None:
    """The file that says that an example is complete."""
    _write(run, measured.example, MEASURED, json.dumps(asdict(measured)).encode())


def read_measured(run: Run, example: str) -> CausalExample | None:
    """None where the example has no complete measurement."""
    start = stem(run, example)
    file = start.with_name(f"{start.name}.{MEASURED}")
    if not file.exists():
        return None
    try:
        return CausalExample(**load(file))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file}: {error}; remove it and run kvexp diagnose causal again") from error


def _write(run: Run, example: str, ending: str, data: bytes) -> None:
    start = stem(run, example)
    file = start.with_name(f"{start.name}.{ending}")
    with explained(file):
        (run.path / FOLDER).mkdir(exist_ok=True)
        replace(file, data)
