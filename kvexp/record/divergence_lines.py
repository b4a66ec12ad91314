"""divergence.jsonl of a run folder: one line per example and kind of text, appended wholly or not at all."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record import Run
from kvexp.record.files import explained, locked, write_all

NAME = "divergence.jsonl"
OWN, REFERENCE = "own", "reference"  # the full cache's greedy answer; the example's reference answer
TEXTS = (OWN, REFERENCE)
EPSILON_KL = 0.05  # nats per token; docs/divergence.md says what else moves a model by as much
EPSILON_TOP1 = 0.05  # share of tokens whose likeliest token is another one
NUMBERS = ("kl", "full_logprob", "logprob")

Line = dict[str, Any]


def read(run: Run) -> dict[tuple[str, str], Line]:
    """(example, kind of text) -> its line, the first of each. A line that no measurement wrote is a warning."""
    file = run.path / NAME
    found: dict[tuple[str, str], Line] = {}
    try:
        lines = file.read_bytes().split(b"\n")[:-1]  # a last line without its end was cut off by a kill
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if why := wrong(line):
                raise ValueError(why)
        except ValueError as error:
            warnings.warn(f"{file}:{number}: left out: {error}; remove the line, it is measured again", stacklevel=2)
            continue
        found.setdefault((line["example"], line["text"]), line)
    return found


def append(run: Run, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines durably, all wholly or none."""
    content = b"".join(json.dumps(_short(line), separators=(",", ":")).encode() + b"\n" for line in lines)
    file = run.path / NAME
    with explained(file), locked(run.path):
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.lseek(fd, 0, os.SEEK_END)
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.ftruncate(fd, os.pread(fd, size, 0).rfind(b"\n") + 1)
            write_all(fd, content)
        finally:
            os.close(fd)


def _short(line: Mapping[str, Any]) -> Line:
    """Numbers to seven digits, about what float32 holds: a line is half as long."""
    return {name: [float(f"{v:.7g}") for v in value] if name in NUMBERS else value for name, value in line.items()}


def wrong(line: Any) -> str | None:
    """Why this is no line of a divergence.jsonl; None if it is one."""
    if not isinstance(line, dict):
        return "it must be a group of fields"
    if not isinstance(line.get("example"), str) or line.get("text") not in TEXTS:
        return f"example must be a text and text one of {', '.join(TEXTS)}"
    count = len(line["tokens"]) if isinstance(line.get("tokens"), list) else 0
    for name in (*NUMBERS, "same_top1"):
        values = line.get(name)
        if not isinstance(values, list) or len(values) != count or not count:
            return f"{name} must be a list as long as tokens"
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            return f"{name} must hold finite numbers"
    return None
