"""What a model put out for one prompt, as a row tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NO_TIMES: dict[str, float | None] = {"ttft": None, "tt2t": None, "tpot": None}


@dataclass(frozen=True)
class ModelOutput:
    """output and what it cost; logprobs and counts: summed log-probability and tokens of every choice, if any.

    finish_reason: "stop" or "length", stop_reason: the text of the end token or stop string; None of what was not
    generated. tokens: ids of a generated answer, its end token included. info: joins the row's.
    """

    output: str
    new_tokens: int
    receipt: dict[str, Any]
    seconds: dict[str, float | None] = field(default_factory=NO_TIMES.copy)
    logprobs: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
