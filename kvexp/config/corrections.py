"""Corrections of NUMERICS 10 that move rows: the identity of each run that one touches names it; others keep theirs.

The next NUMERICS holds them all, and this file goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvexp.config.divergence_options import generates
from kvexp.config.model_spec import facts_of_template, generation_config_of, moving_rope, stretches_context
from kvexp.generate.generation_params import MODEL_PROCESSORS, set_fields
from kvexp.methods import CUR
from kvexp.tasks import LMEval
from kvexp.tasks.lm_eval.definition import written_after
from kvexp.tasks.summarization import SummaryTask

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


def writes_text(settings: Settings) -> bool:
    """Whether the run's answers are generated, those of lm-eval's tasks included."""
    if isinstance(settings.task, LMEval):
        return any(written_after(name) is not None for name in settings.task.tasks)
    return generates(settings)


def _stop_begins_in_prompt(settings: Settings) -> bool:
    """Whether a stop string may begin in a prompt, whose end once counted as written."""
    task = settings.task
    if isinstance(task, LMEval):
        found = [made for name in task.tasks if (made := written_after(name)) is not None]
    elif generates(settings):
        known = task.truncate != "right" and not settings.model.chat
        end = task.around()[1] if isinstance(task, SummaryTask) and known else ""
        found = [(end, list(settings.decoding.stop_strings))]
    else:
        return False
    return any(_begins(stop, end) for end, stops in found for stop in stops)


def _begins(stop: str, end: str) -> bool:
    """Whether a prompt may end with the beginning of a stop string; end: what all prompts end with, "" where unknown.

    A space in front counts as well: some tokenizers leave it out where a text begins.
    """
    parts = [stop[:count] for count in range(1, len(stop))]
    return stop.startswith(" ") or any(end.endswith(part) or part.endswith(end) for part in parts)


def _model_changes_logits(settings: Settings) -> bool:
    """Whether the model's generation_config.json holds what changes a greedy answer, which once was left out."""
    if not writes_text(settings):
        return False
    own = generation_config_of(settings.model)
    return bool(set_fields(own, MODEL_PROCESSORS)) or bool(own.stop_strings and not settings.decoding.stop_strings)


def _moving_rope(settings: Settings) -> bool:
    """Rows of a batch, of a shared prefill and of the runs before chose each other's RoPE frequencies."""
    return moving_rope(settings.model) is not None


def _rope_context(settings: Settings) -> bool:
    """Prompts were cut to, or skipped by, the length that the model had before its RoPE was stretched."""
    return stretches_context(settings.model)


# Name of the correction -> whether it can move a row of a run with these settings. No model is loaded for the answer.
CORRECTIONS: dict[str, Callable[[Settings], bool]] = {
    "stop_in_prompt": _stop_begins_in_prompt,
    "generation_config": _model_changes_logits,
    "moving_rope": _moving_rope,
    "rope_context": _rope_context,
    # Chat templates that wrote the day's date are given one date for ever.
    "template_clock": lambda settings: settings.templated and facts_of_template(settings.model).changes,
    # Answers are scored without the thinking before them, where the chat template has tags for it.
    "thinking": lambda settings: settings.thinking is not None,
    # Its scores were of another scale in every head where heads are compared.
    "cur_heads": lambda settings: isinstance(settings.method, CUR) and settings.cache.compares_heads,
}


def corrections_of(settings: Settings) -> list[str]:
    """Sorted names of the corrections that can move rows of a run with these settings."""
    return sorted(name for name, touches in CORRECTIONS.items() if touches(settings))
