"""What the fields of rows and labels hold, so that an edited file is told before a number is drawn from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NUMBER, WHOLE, TEXT, TRUTH, GROUP = "a number", "a whole number", "a text", "true or false", "a group of fields"
EACH = "*"  # every field of a group

ROW: dict[str, Any] = {
    **dict.fromkeys(("prompt_tokens", "question_tokens", "new_tokens", "halved"), WHOLE),
    **dict.fromkeys(("skipped", "failed", "output", "revision", "prompt_digest", "finish_reason", "stop_reason"), TEXT),
    **dict.fromkeys(("calibration", "surrogate", "question"), TEXT),
    **{"prompt_cut": TRUTH, "chat_template": TRUTH, "answered": TRUTH, "info": GROUP, "choices": GROUP},
    **{"answer": TEXT, "thinking_tokens": WHOLE, "thinking_cut": TRUTH, "continuation_digest": TEXT},
    "weights": {"gguf_sha256": TEXT, "quantisation": TEXT},
    "context": {"digest": TEXT, "question": WHOLE, "questions": WHOLE},
    "output_tokens": [WHOLE],
    **{"index": WHOLE, "metrics": {EACH: NUMBER}, "seconds": {EACH: NUMBER}},
    "receipt": {
        **dict.fromkeys(("slots", "kv_bytes", "peak_kv_bytes", "kv_bytes_at_16", "attention_kept"), NUMBER),
        **{"first_eviction_step": WHOLE, "batch_size": WHOLE, "kept_digest": TEXT, "slots_by_layer": [NUMBER]},
        "retrieval": {
            **dict.fromkeys(("offloaded_bytes", "moved_bytes", "cache_hit_rate", "search_share"), NUMBER),
            **{"kmeans_iterations": NUMBER, "notes": [TEXT]},
        },
    },
}
LABELS = {
    **dict.fromkeys(("model", "task", "method", "setting", "revision", "experiment", "weights"), TEXT),
    **{"kv_ratio": NUMBER, "chat": TRUTH},
}


def wrong_row(row: Mapping[str, Any]) -> str | None:
    """The first field that holds what no run writes: its name, what it must be and what was found; None if all fit.

    A field that is missing is none, for older rows have fewer; null stands for what could not be told.
    """
    if "index" in row and row["index"] is None:
        return _must("index", WHOLE, None)
    return _wrong(row, ROW, "")


def wrong_labels(labels: Any) -> str | None:
    """As `wrong_row`, of the labels of a run."""
    return _wrong(labels, LABELS, "") if isinstance(labels, Mapping) else _must("labels", GROUP, labels)


def _wrong(value: Any, kind: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(kind, dict):
        if not isinstance(value, Mapping):
            return _must(where, GROUP, value)
        fields = dict.fromkeys(value, kind[EACH]) if EACH in kind else kind
        within = {name: f"{where}.{name}".strip(".") for name in fields if name in value}
        return _first(_wrong(value[name], fields[name], place) for name, place in within.items())
    if isinstance(kind, list):
        if not isinstance(value, list):
            return _must(where, "a list", value)
        return _first(_wrong(item, kind[0], f"{where}[{number}]") for number, item in enumerate(value))
    return None if _fits(value, kind) else _must(where, kind, value)


def _first(found: Iterable[str | None]) -> str | None:
    return next((why for why in found if why), None)


def _must(where: str, kind: str, value: Any) -> str:
    return f"{where} must be {kind}, got {value!r:.60}"


def _fits(value: Any, kind: str) -> bool:
    if kind in (TEXT, GROUP, TRUTH):
        return isinstance(value, {TEXT: str, GROUP: Mapping, TRUTH: bool}[kind])
    if isinstance(value, bool) or not isinstance(value, int if kind == WHOLE else int | float):
        return False
    return abs(value) < 1 << (63 if kind == WHOLE else 1000)  # inf is not; larger ones fit no column of a table
