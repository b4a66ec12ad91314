"""What cannot be diagnosed: an error before a model loads, or a run of a sweep that is passed over."""

from __future__ import annotations

from kvexp.config.model_spec import moving_rope
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.tasks import LMEval, Task


def check(settings: Settings) -> None:
    """ConfigError for runs whose answers are not one greedy path of tokens."""
    decoding, task = settings.decoding, settings.task
    if decoding.num_beams > 1:
        raise ConfigError(
            f"diagnose follows one path of tokens, generation.num_beams={decoding.num_beams} follows several that take "
            "over one another's caches: set generation=greedy, or diagnose=none"
        )
    if decoding.sample:
        raise ConfigError(
            "diagnose asks which eviction changed an answer; with generation.sample=true chance changes it too: set "
            "generation=greedy, or diagnose=none"
        )
    if settings.cache.bounded_chunk is not None:
        raise ConfigError(
            "diagnose logs evictions from the prompt's end on, prefill=bounded evicts before: set prefill=whole, or "
            "diagnose=none"
        )
    if (moving := moving_rope(settings.model)) is not None:
        raise ConfigError(
            f"diagnose feeds answers in one forward, and {moving.why}: set diagnose=none, or take another model"
        )
    chooses = type(task).score_choices is not Task.score_choices
    if isinstance(task, LMEval) or task.only_nll or chooses:
        raise ConfigError(
            f"diagnose needs answers that are generated, task={task.name} compares probabilities of given texts: set "
            "diagnose=none"
        )


def nothing_to_log(settings: Settings) -> str | None:
    """The reason why a run has no evictions to log; None where it has some."""
    method = settings.method
    if not method.evicts:
        return f"{method.name} evicts nothing"
    if method.per_query or method.full_cache:
        return f"{method.name} keeps everything and chooses anew for every token: there is no eviction"
    return None
