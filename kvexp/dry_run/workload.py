"""How much a run has to read and write: its examples, the tokens of their prompts, the tokens of their answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvexp.config.model_spec import ModelSpec, config_of_spec, tokenizer_of
from kvexp.config.settings import Settings
from kvexp.dry_run.published import DATA, MODELS
from kvexp.errors import ConfigError
from kvexp.evaluate.budget_check import check_length
from kvexp.evaluate.example_prompts import check_beforehand
from kvexp.evaluate.preflight import fitted
from kvexp.evaluate.tokenized_examples import tokenise
from kvexp.models.model_size import ModelSize, shape_of
from kvexp.tasks import Example, LMEval, Task

SAMPLED = 32  # prompts that are tokenised to know the mean: enough for a plan
LETTERS = 4  # per token of English, where no tokenizer is at hand


@dataclass(frozen=True)
class Workload:
    """examples: ids, or None each where the data are not at hand; prompt_tokens, new_tokens: means per example, the
    latter at most; source: how they are known; asked: the examples themselves, where they are at hand."""

    examples: tuple[str | None, ...]
    prompt_tokens: float
    new_tokens: float
    source: str
    asked: tuple[Example, ...] = ()


@functools.lru_cache
def model_config(spec: ModelSpec) -> tuple[Any, str]:
    """(the model's configuration or None, how it is known): its own, else the published one of its hub id."""
    from kvexp.models.load import random_config

    try:
        return config_of_spec(spec), "its configuration"
    except ConfigError:
        if spec.path not in MODELS:
            return None, "unknown: neither the hub nor its cache has the model's configuration"
    family, config = MODELS[spec.path]
    return random_config(family, **config), "the published configuration"


@functools.lru_cache
def model_shape(spec: ModelSpec) -> ModelSize | None:
    config, _ = model_config(spec)
    return None if config is None else shape_of(config)


def workload(settings: Settings) -> Workload:
    """Of one run; reads local data as the run would (ConfigError for a bad row), the hub's from its cache alone."""
    key = json.dumps([settings.identity[name] for name in ("task", "data", "generation")], sort_keys=True, default=str)
    place = key, settings.model, settings.limit
    if place not in _known:
        _known[place] = _workload(settings)
    return _known[place]


_known: dict[Any, Workload] = {}  # by what the runs of a sweep have in common


def check_workload(settings: Settings) -> None:
    """ConfigError where none of the examples can be run, as far as data, tokenizer and configuration are at hand."""
    work, config = workload(settings), model_config(settings.model)[0]
    if not work.asked:
        if config is not None and settings.budget is not None and settings.budget.tokens is not None:
            check_length(settings, settings.budget, config, int(work.prompt_tokens), [int(work.new_tokens)])
        return
    try:
        words, _ = tokenizer_of(settings.model), config_of_spec(settings.model)
    except ConfigError:  # not at hand: the run will load it, and look then
        return
    check_beforehand(settings, words, work.asked)


def _workload(settings: Settings) -> Workload:
    task = settings.task
    local = task.generated and not isinstance(task, LMEval)
    if not (local or task.data_files is not None or getattr(task, "data_dir", None)):
        return _typical(settings)
    task.check()
    examples = list(task.examples())
    step = max(1, len(examples) // SAMPLED)
    some = examples[::step][:SAMPLED]
    try:
        words: Any = tokenizer_of(settings.model)
        how = "tokenised" if step == 1 else f"{len(some)} of {len(examples)} prompts tokenised"
    except ConfigError:
        words, how = None, f"letters / {LETTERS}"
    if words is not None:
        some = [example for _, example in fitted(settings, words, list(enumerate(some)))]
    sizes = [_size(settings, example, words) for example in some]
    prompt, new = fmean(size[0] for size in sizes), fmean(size[1] for size in sizes)
    return Workload(tuple(example.id for example in examples), prompt, new, how, tuple(examples))


def _size(settings: Settings, example: Example, words: Any) -> tuple[float, float]:
    """(prompt tokens, new tokens) of an example as it will be asked."""
    given = example.choices or ((example.continuation,) if settings.task.needs_nll else ())
    if isinstance(settings.task, LMEval):
        given = ()
    new = 0 if settings.task.only_nll or example.choices else settings.decoding.max_new_tokens
    room = _room(settings, new)
    if words is None and type(settings.task).fit is not Task.fit:  # its prompts have the length it says, in tokens
        return min(float(example.info.get("length", room)), room), float(new)
    if words is None:
        return min(len(example.prompt + example.question) / LETTERS, room), new + _letters(given)
    asked = tokenise(example, settings.task, words, 1 << 40, chat=settings.model.chat)
    fed = sum(len(words(text, add_special_tokens=False).input_ids) for text in given)
    return min(asked.size, room), new + fed


def _room(settings: Settings, new: int) -> float:
    shape = model_shape(settings.model)
    holds = float("inf") if settings.cache.beyond_context or shape is None else shape.positions - new
    return max(1, min(holds, settings.task.max_prompt_tokens or float("inf")))


def _letters(texts: Sequence[str]) -> float:
    return sum(map(len, texts)) / LETTERS


def _typical(settings: Settings) -> Workload:
    """From the table of published sizes; a data set that is not in it counts as `limit` rows of a full prompt."""
    task, name = settings.task, settings.task.name
    new = float(settings.decoding.max_new_tokens)
    if isinstance(task, LMEval):
        name, new = f"lm_eval {task.tasks[0]}", 0.0
    elif hasattr(task, "subset"):
        name = f"longbench {task.subset}"
    room = _room(settings, int(new))
    if name not in DATA:
        count = settings.limit or 1000
        return Workload((None,) * count, min(room, 2048), new, f"guessed: {count} rows, full prompts")
    rows, tokens = DATA[name]
    count = min(settings.limit or rows, rows)
    if isinstance(task, LMEval):
        tokens *= 1 + (task.num_fewshot or 0)
    elif task.only_nll:
        tokens, new = getattr(task, "prefill_tokens", tokens), float(getattr(task, "total_tokens", 0))
        new -= tokens
    return Workload((None,) * count, min(tokens, room), new, "published sizes of the data set")
