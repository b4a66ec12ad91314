"""Rows for `kvexp advise` made with as few prompts as its question takes, and bytes that no row holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from kvexp.results.advise import Asked, Recorded
from kvexp.run.batches import settings_at
from kvexp.run.compose import option
from kvexp.run.model_spec import ModelSpec
from kvexp.run.plan import model_shape, slots_bytes, slots_of
from kvexp.run.store import Run
from kvexp.util import ConfigError


def planned_share(run: Run, rows: Iterable[Mapping[str, Any]]) -> float:
    """Bytes of a run's cache over the full cache's, for a prompt as long as these rows' are in the mean, at 16 bits."""
    prompts = [row["prompt_tokens"] for row in rows if row.get("prompt_tokens")]
    settings = settings_at(run)
    kept, full = _bytes(run, settings.model, fmean(prompts))
    return kept / full


def target_bytes(run: Run, target: str, context: int) -> tuple[int, int]:
    """(bytes kept, bytes of the full cache) of one sequence of `context` tokens, if a model had the run's cache.

    target: an option of `model`, whose published configuration is enough: no weights, no network.
    """
    return _bytes(run, ModelSpec.of(dict(option("model", target))), context)


def _bytes(run: Run, model: ModelSpec, tokens: float) -> tuple[int, int]:
    settings = settings_at(run)
    shape = model_shape(model)
    if shape is None:
        raise ConfigError(f"the shape of {model.path} is not known here; name another target")
    task = replace(settings.task, max_new_tokens=1, min_new_tokens=0)
    decoding = replace(settings.decoding, max_new_tokens=1, min_new_tokens=0)
    at = replace(settings, model=replace(settings.model, dtype="bfloat16"), task=task, decoding=decoding)
    full = replace(at, cache=settings.baseline().cache)
    return (
        slots_bytes(shape, at, slots_of(at, tokens)),
        slots_bytes(shape, full, slots_of(full, tokens)),
    )


def search(asked: Asked, *, dry_run: bool) -> Recorded | None:
    """Run what the question takes."""
    raise ConfigError("name a folder of runs: kvexp advise outputs/")
