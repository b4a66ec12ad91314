"""Corrections of NUMERICS 10 that move rows: the identity of each run that one touches names it; others keep theirs.

The next NUMERICS holds them all, and this file goes with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvexp.config.divergence_options import generates
from kvexp.config.model_spec import facts_of_template, generation_config_of, moving_rope, stretches_context
from kvexp.errors import ConfigError
from kvexp.generate.generation_params import MODEL_PROCESSORS, set_fields
from kvexp.methods import CUR
from kvexp.models.adapter import beside_weights
from kvexp.tasks import ContextQA, LMEval, Needle, Perplexity, Stories, Task
from kvexp.tasks.haystack import has_plain_sentences
from kvexp.tasks.lm_eval.definition import written_after
from kvexp.tasks.metrics import is_unspaced
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
    # A LoRA adapter beside the weights is merged into them, where it was left out.
    "adapter": lambda settings: settings.model.kind == "pretrained" and beside_weights(settings.model.path),
    # Depths, answers and words go by the scripts of the texts, which were taken for English.
    "needle_depth": lambda settings: _known(_stands_elsewhere, settings.task),
    "unicode_answers": lambda settings: _known(_has_answers_beyond_ascii, settings.task),
    "unspaced_words": lambda settings: _known(_has_unspaced_texts, settings.task),
    # Its scores were of another scale in every head where heads are compared.
    "cur_heads": lambda settings: isinstance(settings.method, CUR) and settings.cache.compares_heads,
}


_FOUND: dict[tuple[Callable[[Task], bool], str, str], bool] = {}


def _known(holds: Callable[[Task], bool], task: Task) -> bool:
    """Whether it holds of a task, whose texts are read once for all runs of a sweep, whatever their `limit`."""
    if not isinstance(task, ContextQA | Needle | Perplexity | Stories):
        return False
    task = dataclasses.replace(task, limit=None, sample="first")
    key = (holds, repr(task), task.pinned)
    if key not in _FOUND:
        try:
            _FOUND[key] = holds(task)
        except ConfigError:  # bad rows or options: `Task.check` says what is wrong
            return False
    return _FOUND[key]


def _stands_elsewhere(task: Task) -> bool:
    """Whether needles went by the ends of English sentences in a text that has no, or not only, such ends."""
    if not isinstance(task, Needle):
        return False
    longest = max((length for length in task.lengths if isinstance(length, int)), default=0)
    whole = f"{task.text}\n\n{task.text}"  # repeats begin elsewhere and go on with what was in front
    return longest > 0 and not has_plain_sentences(task.text[: 20 * longest] if task.repeats == 1 else whole)


def _has_answers_beyond_ascii(task: Task) -> bool:
    """Whether answers were compared by SQuAD's normalisation, which knows ASCII alone, and are not any more."""
    if isinstance(task, Needle):
        return task.beyond_ascii
    return isinstance(task, ContextQA) and _in_rows(task, lambda row: "words" in task.example(row, "").info)


def _has_unspaced_texts(task: Task) -> bool:
    """Whether the words of a text went by white space that its script does not have."""
    if not isinstance(task, Stories | Perplexity):
        return False
    return _in_rows(task, lambda row: is_unspaced(str(row.get(task.text_field))))


def _in_rows(task: Task, holds: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether it holds of a row of the task's files. Of the hub the task's own data set is known: of none there."""
    if task.data_files is None:
        return task.hub_id != type(task).hub_id
    return any(holds(row) for _, row in task.rows())


def corrections_of(settings: Settings) -> list[str]:
    """Sorted names of the corrections that can move rows of a run with these settings."""
    return sorted(name for name, touches in CORRECTIONS.items() if touches(settings))
