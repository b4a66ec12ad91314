"""A composed configuration as checked objects, and what of it identifies a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvexp.core import Budget, BytesBudget, CacheConfig, EngineQuantization, Method
from kvexp.core.budget import DEFAULT_FLOORS, PromptSizes
from kvexp.core.quantized import AnyQuantization
from kvexp.generate import GenerationParams
from kvexp.generate.inputs import check_generation_config
from kvexp.hf.chat_template import Thinking
from kvexp.hf.load import batch_size_identifies_run
from kvexp.hf.moving_rope import check_rope
from kvexp.methods import Full
from kvexp.run.build import (
    ADDED_LATER,
    CACHE,
    build,
    build_budget,
    build_cache,
    build_method,
    made,
    quantization_of,
)
from kvexp.run.compose import option
from kvexp.run.engine import Options, check_engine, engine_of
from kvexp.run.labels import (
    DivergenceOptions,
    Shard,
    check_values,
    generates,
    labels_of,
    labels_of_baseline,
    refusal,
    task_of,
    with_packaged_path,
)
from kvexp.run.model_spec import (
    ModelSpec,
    calibrated,
    config_of_spec,
    evicts_in_windows,
    generation_config_of,
    has_sinks,
    moving_rope,
    quantization_of_model,
    rows_alone,
    thinking_of_model,
)
from kvexp.run.user_code import admitted, source_of
from kvexp.tasks import LMEval, Task
from kvexp.tasks.base import with_samples, with_shared_context
from kvexp.tasks.lm_eval import written_after
from kvexp.util.errors import ConfigError, Rule, refuse
from kvexp.util.fields import field_types, typed


def writes_text(settings: Settings) -> bool:
    """Whether the run's answers are generated, also by a task of lm-eval's."""
    if isinstance(settings.task, LMEval):
        return any(written_after(name) is not None for name in settings.task.tasks)
    return generates(settings)


# Settings of different groups that exclude each other, looked through before any model loads.


def _is_lm_eval(c: Settings) -> bool:
    return isinstance(c.task, LMEval)


def _pads_without_effect(c: Settings) -> bool:
    return c.task.pad_to is not None and c.budget is not None and c.budget.of != "padded"


def _budget_of_neighbours(c: Settings) -> bool:
    """Whether the longest prompt of a batch would set the budget of all."""
    whole = c.task.pad_to is not None and c.task.pad_to == c.task.max_prompt_tokens  # then all prompts are of one width
    return c.budget is not None and c.budget.of == "padded" and c.batch_size > 1 and not whole


REFUSED: tuple[Rule[Settings], ...] = (
    (
        lambda c: c.batch_size > 1 and (spec := c.method.score_spec) and spec.batch == "sum_all",
        "batch_size must be 1 with method.score_batch=sum_all, got {c.batch_size}: it adds up the scores of all "
        "prompts of a batch",
    ),
    (
        lambda c: getattr(c.task, "shared_context", False) and c.budget and c.budget.counts_ahead,
        "questions=all evicts a context once for all of its questions, and budget.of={c.budget.of} counts each "
        "question's tokens: set budget.of=prompt, or questions=each",
    ),
    (
        lambda c: getattr(c.task, "samples", 1) > 1 and not c.decoding.sample,
        "samples={c.task.samples} would give {c.task.samples} times the same greedy answer: add generation=sampling "
        "(generation.temperature=0.6 is usual), or leave samples out",
    ),
    # Pads.
    (
        lambda c: c.task.pad_to is not None and _is_lm_eval(c),
        "task.pad_to does not reach lm-eval's tasks: leave it at null",
    ),
    (
        lambda c: c.task.pad_to is not None and isinstance(c.budget, BytesBudget),
        "task.pad_to={c.task.pad_to} makes pads count towards a ratio of tokens, bytes_ratio={c.budget.bytes_ratio:g} "
        "is of the real prompt's bytes: set task.pad_to=null, or leave out bytes_ratio",
    ),
    (
        lambda c: _pads_without_effect(c) and c.budget and c.budget.tokens is not None,
        "task.pad_to={c.task.pad_to} has no effect with budget.tokens={c.budget.tokens}, a number of slots for prompts "
        "of any length: set task.pad_to=null",
    ),
    (
        _pads_without_effect,
        "task.pad_to={c.task.pad_to} makes pads count towards the budget, budget.of={c.budget.of} leaves them out: set "
        "budget.of=padded, or task.pad_to=null",
    ),
    (
        _budget_of_neighbours,
        "batch_size must be 1 with budget.of=padded, got {c.batch_size}: the longest prompt of a batch would set the "
        "budget of all (unless task.pad_to is task.max_prompt_tokens)",
    ),
    # Prompts read in chunks.
    (
        lambda c: c.cache.bounded_chunk is not None and c.decoding.prefill_chunk is not None,
        "generation.prefill_chunk={c.decoding.prefill_chunk} has no effect with prefill.chunk={c.cache.bounded_chunk}, "
        "which evicts after each chunk: set generation.prefill_chunk=null",
    ),
    (
        lambda c: c.cache.bounded_chunk is not None and c.decoding.num_beams > 1,
        "prefill=bounded reads a prompt in one row, got generation.num_beams={c.decoding.num_beams}",
    ),
    (
        lambda c: c.cache.bounded_chunk is not None and _is_lm_eval(c),
        "prefill=bounded does not reach lm-eval's tasks, which read a context whole: set prefill=whole",
    ),
    (
        lambda c: c.cache.bounded_chunk is not None and c.batch_size > 1,
        "batch_size must be 1 with prefill=bounded, got {c.batch_size}: padding would cut the chunks of a shorter "
        "prompt elsewhere",
    ),
    (
        lambda c: isinstance(c.task, LMEval) and c.task.measured.mode == "row_mask" and has_sinks(c.model),
        "row masks score tokens by softmaxes without sinks, and this model's heads have attention sinks: set "
        "task.protocol=prefill_then_step",
    ),
    # Marked spans.
    (
        lambda c: c.cache.keep is not None and _is_lm_eval(c),
        "keep={c.cache.keep} does not reach lm-eval's tasks, whose prompts have no marked spans: leave it out",
    ),
    (
        lambda c: c.cache.keep in ("span", "fair") and c.task.truncate == "halves",
        "keep={c.cache.keep} needs to know where a prompt's parts stand, which task.truncate=halves takes apart: set "
        "task.truncate=middle or skip",
    ),
    # Conversations.
    (
        lambda c: (
            c.task.has_turns
            and (c.decoding.num_beams > 1 or c.decoding.stop_strings or generation_config_of(c.model).stop_strings)
        ),
        "task={c.task.name} goes on behind an answer token by token, which generation.num_beams above 1 and "
        "generation.stop_strings (or the stop_strings of the model's generation_config.json) do not leave at "
        "its end: set generation=greedy, and use a model without stop_strings",
    ),
    (
        lambda c: c.task.has_turns and c.budget and c.budget.counts_ahead,
        "task={c.task.name} has tokens to come in every turn: set budget.of=prompt, got budget.of={c.budget.of}",
    ),
    # Chat templates.
    (
        lambda c: c.task.frame is not None and not c.model.chat,
        "task.chat_frame={c.task.frame!r} goes around a chat model's prompts, and model.chat=false: set "
        "model.chat=true or task.chat_frame=null",
    ),
    (
        lambda c: getattr(c.task, "chat_wrap", None) in (True, "always") and not c.model.chat,
        "task.chat_wrap={c.task.chat_wrap} puts a chat template around prompts, and model.chat=false: set "
        "model.chat=true or task.chat_wrap=false (longbench: never)",
    ),
)


def check_together(settings: Settings) -> None:
    """ConfigError where settings of different groups exclude each other, or the model, without weights or data."""
    if settings.divergence.only and not settings.is_baseline and (why := refusal(settings)) is not None:
        raise ConfigError(f"divergence=only would measure nothing: {why}")
    if writes_text(settings):
        check_generation_config(generation_config_of(settings.model))
    moving = moving_rope(settings.model)
    if moving is not None and not moving.has_sides and settings.decoding.prefill_chunk is not None:
        raise ConfigError(f"{moving.why}, so a prompt is read whole: set generation.prefill_chunk=null")
    check_rope(moving, settings.cache)
    refuse(settings, REFUSED)
    check_engine(settings)
    if isinstance(settings.task, LMEval):
        check_item_settings(settings)


def batch_cache(settings: Settings, lengths: Sequence[int]) -> CacheConfig:
    """The cache's configuration for a batch of prompts of these lengths: the run's, with the batch's budget."""
    return dataclasses.replace(settings.cache, budget=batch_budget(settings, lengths))


def batch_budget(settings: Settings, lengths: Sequence[int]) -> Budget | None:
    """The budget of a batch of prompts of these lengths.

    With task.pad_to it is a number of slots, the ratio of the padded prompt (floored): Keyformer's release
    (summarize.py, padding="max_length") pads every prompt on the left and takes its ratio of the whole. Pads are not
    fed: nothing sees them and they are the first to go. This leaves out what pads do in the release: a constant added
    to the scores of all real prompt tokens, and sinks of StreamingLLM (tests/reference_check.py reproduces both).
    """
    budget, pad_to = settings.budget, settings.task.pad_to
    if budget is None or pad_to is None or budget.kv_ratio is None:
        return budget
    widths = {max(pad_to, length) for length in lengths}
    if len(widths) > 1:
        raise ConfigError(f"prompts padded to {min(widths)} and {max(widths)} tokens in one batch: set batch_size=1")
    (slots,) = budget.resolve(PromptSizes([0], widths.pop(), None, 1), 0)
    return dataclasses.replace(budget, kv_ratio=None, tokens=slots)


def check_item_settings(settings: Settings) -> None:
    """ConfigError where lm-eval's tasks are given what they decide themselves, or the method has no row mask."""
    from kvexp.lm_eval import check_row_mask

    task, plain = settings.task, GenerationParams(max_new_tokens=settings.task.max_new_tokens)
    assert isinstance(task, LMEval)
    for param in dataclasses.fields(GenerationParams):
        if getattr(settings.decoding, param.name) != getattr(plain, param.name):
            raise ConfigError(
                f"generation.{param.name} does not reach lm-eval's tasks, which say themselves how they are answered: "
                "leave the group generation at greedy"
            )
    if task.measured.mode == "row_mask":
        check_row_mask(settings.cache, task.measured.mask)


def bounded_chunk(config: Mapping[str, Any]) -> int | None:
    """Tokens per chunk of a bounded prefill, None where prompts are read whole; of a resolved configuration.

    Older configurations have no group `prefill`. ConfigError names the key.
    """
    node = typed(config.get("prefill", {}), dict, "prefill")
    for name in node:
        if name != "chunk":
            raise ConfigError(f"prefill.{name} is not a setting of prefill; it has: chunk")
    chunk: int | None = typed(node.get("chunk"), field_types(CacheConfig)["bounded_chunk"], "prefill.chunk")
    return chunk


def budget_of_bytes(config: Mapping[str, Any], model: ModelSpec) -> BytesBudget:
    """The budget that `bytes_ratio`, the group `budget` and the bits of the group `cache` make for a model's head.

    config: a resolved configuration whose bytes_ratio is set. ConfigError names the key.
    """
    from kvexp.core.config import Sliding
    from kvexp.hf.traits import other_layers_of, traits_of

    share, node = config["bytes_ratio"], dict(config["budget"])
    for name, words in (("threshold", "budget=threshold"), ("tokens", f"budget.tokens={node.get('tokens')}")):
        if node.get(name) is not None:
            raise ConfigError(f"bytes_ratio={share} and {words} are two budgets: leave out one")
    sliding = typed(config["cache"].get("evict_sliding", "auto"), Sliding, "cache.evict_sliding")
    traits = traits_of(config_of_spec(model), sliding)
    width = traits.key_dim
    for name in ("_target_", "kv_ratio", "tokens", "threshold", "threshold_recent"):  # of a budget of another kind
        node.pop(name, None)
    node |= {
        "bytes_ratio": share,
        "key_dim": width,
        "value_dim": traits.value_dim if traits.composed or traits.latent else width,
        "others": other_layers_of(traits),
        "quantization": quantization_of(config["cache"]),
    }
    budget: BytesBudget = made(BytesBudget, node, "budget", {"bytes_ratio": "bytes_ratio"})
    return budget


# Options of a task that other words set.
OF_THE_RUN = {"limit": "limit=N", "shared_context": "questions=all", "samples": "samples=N"}

# Known by the data's fingerprint, by the generation settings, or unable to change a number.
_NOT_THE_TASK = (
    *("limit", "data_files", "streaming", "hub_id", "hub_config", "hub_file", "revision", "split"),
    *("haystack", "prompt_file"),
    "size",  # of a generated task: how many of its rows
    *("max_new_tokens", "min_new_tokens"),
    *("tasks", "data_dir"),
)


@dataclass(frozen=True)
class Settings:
    """Everything one run needs. `identity` holds all that can change a number and nothing else.

    command: what `settings_of` made it from (config, choices, overrides), to make it again from a run's folder.
    divergence: what is measured of it besides its rows, no part of its identity.
    """

    model: ModelSpec
    cache: CacheConfig
    task: Task
    decoding: GenerationParams
    seed: int
    limit: int | None
    batch_size: int
    shard: Shard
    retry: bool
    outputs_dir: Path
    labels: dict[str, Any]
    identity: dict[str, Any]
    command: dict[str, Any]
    divergence: DivergenceOptions = field(default_factory=DivergenceOptions)
    engine: Options | None = None  # in place of kvexp's own model and cache

    @property
    def method(self) -> Method:
        return self.cache.method

    @property
    def budget(self) -> Budget | None:
        return self.cache.budget

    @property
    def templated(self) -> bool:
        """Whether prompts go through the tokenizer's chat template."""
        return self.model.chat and self.task.uses_chat_template and self.task.frame is None

    @property
    def thinking(self) -> Thinking | None:
        """Tags of the thinking that is no part of a scored answer; None where answers are scored as they are."""
        strips = self.model.strip_thinking
        if strips is False or self.task.only_nll or not (self.templated or strips is True):
            return None
        tags = thinking_of_model(self.model)
        return tags if tags is None or self.templated else dataclasses.replace(tags, opened=False)

    @property
    def is_baseline(self) -> bool:
        plain = not self.method.evicts and self.cache.quantization is None
        return plain and (self.engine is None or self.engine == self.engine.reference())

    def baseline(self) -> Settings:
        """Settings of the run with full attention that this one is measured against."""
        kept = {name: getattr(self.cache, name) for name in ("observe", "beyond_context", "graph")}
        cache = CacheConfig(Full(), **kept)
        engine = None if self.engine is None else self.engine.reference()
        return dataclasses.replace(self, cache=cache, engine=engine).identified(labels_of_baseline(self.labels))

    def parts(self) -> list[Settings]:
        """One run for each of lm-eval's tasks, each with its name as its label; any other task is one run."""
        if not isinstance(self.task, LMEval):
            return [self]
        return [
            dataclasses.replace(self, task=task).identified({**self.labels, "task": task.label(task.name)})
            for task in self.task.parts()
        ]

    def identified(self, labels: dict[str, Any]) -> Settings:
        """Fill in labels and identity. Settings that cannot matter are left out, so that equal runs are one run."""
        identity: dict[str, Any] = {
            "model": self.model.identity(),
            "task": {
                "name": self.task.name,
                **_plain(self.task, without=(*_not_the_task(self.task), *self.task.not_identifying())),
            },
            "data": self.task.pinned,
            "generation": _plain(self.decoding, without=("thinking",)),
            "method": {"name": self.method.name, **_plain(self.method, without=_unused(self.method))},
            "beyond_context": self.cache.beyond_context,
            "positions": self.cache.positions,
        }
        if self.model.strip_thinking is True and self.templated:
            del identity["model"]["strip_thinking"]  # as auto does
        for group, item in (("method", self.method), ("task", self.task)):
            if (source := source_of(type(item))) is not None:
                identity[group]["source"] = source
        if corrected := self.task.corrected():
            identity["task"]["corrected"] = list(corrected)
        if self.cache.calibration is not None:
            identity["method"]["calibration"] = self.cache.calibration.digest
        if self.cache.surrogate is not None:
            identity["method"]["surrogate"] = self.cache.surrogate.digest
        if not self.is_baseline:
            cache = self.cache
            identity |= {"budget": _budget_identity(cache.budget) if cache.budget is not None else None}
            identity |= {"cadence": _plain(cache.cadence), "mode": cache.mode, "observe": cache.observe}
            if cache.quantization is not None:
                quantization = quantization_of_model(self.model, cache.quantization)
                identity["quantization"] = _quantization_identity(quantization)
            if cache.head_scores is not None:
                identity["head_scores"] = cache.head_scores.digest
            if not cache.select.plain:
                identity["select"] = _plain(cache.select)
            if cache.sees_attention and has_sinks(self.model):
                identity["score"] = {"sink": cache.score_sink}
            if cache.bounded_chunk is not None:  # else left out: every older run keeps its hash
                identity["prefill"] = {"bounded_chunk": cache.bounded_chunk}
            if cache.keep is not None:
                identity["keep"] = cache.keep
            if evicts_in_windows(self.model, cache):
                identity["evict_sliding"] = True
        if self.decoding.sample or not self.is_baseline:
            identity["seed"] = self.seed
        if batch_size_identifies_run(self.model.dtype, self.model.resolved_device()):
            identity["batch_size"] = self.batch_size
        if self.engine is not None:
            identity["engine"] = self.engine.identity()
        return dataclasses.replace(self, labels=labels, identity=identity)


def settings_of(config: dict[str, Any], choices: dict[str, str], overrides: Sequence[str] = ()) -> Settings:
    """Check a resolved configuration; ConfigError names the key.

    choices: group -> the option taken; overrides: what was set by hand; both for labels only.
    """
    groups = ("cache", "task", "method", "budget", "generation", "model")
    for group in (*groups, *(group for group in ("select", "score") if group in config)):  # older rows have neither
        typed(config.get(group), dict, group)
    check_values(config, choices)
    if config["budget"].get("pyramid") == 0:  # as runs of older versions have recorded it, which did nothing
        config = {**config, "budget": {name: value for name, value in config["budget"].items() if name != "pyramid"}}
    for name, words in OF_THE_RUN.items():
        if name in config["task"]:
            raise ConfigError(f"task.{name} is set by {words}, without task. in front")
    method = build_method(config["method"])
    for name in CACHE:
        if name not in config["cache"] and name not in ADDED_LATER:
            raise ConfigError(f"cache.{name} is missing; put it back, or leave cache as conf/config.yaml has it")
    task = task_of(config)
    # Where a user's classes were found, for a reader of the run's folder; nothing is ever loaded by it.
    classes = (type(method), type(task))
    places = {f"{users.group}_found_as": users.reference for users in admitted().values() if users.cls in classes}
    _check_targets_of_options(config, choices)
    if config.get("questions") == "all":
        task = with_shared_context(task, choices.get("task", task.name))
    if config.get("samples", 1) != 1:
        task = with_samples(task, choices.get("task", task.name), config["samples"])
    model = ModelSpec.of(with_packaged_path(config["model"], "model.path"))
    task = task.for_model(chat=model.chat)
    budget: Budget | None = None
    if method.evicts and config.get("bytes_ratio") is not None:
        budget = budget_of_bytes(config, model)
    else:  # that of a method without a budget is checked as well: a word may be misspelt
        checked = build_budget(config["budget"])
        budget = checked if method.evicts else None
    cache = build_cache(
        method,
        budget,
        config["cache"],
        config.get("select", {}),
        config.get("score", {}),
        **calibrated(method, budget, model, task, choices, overrides),
        bounded_chunk=bounded_chunk(config) if method.evicts else None,
        keep=config.get("keep") if method.evicts else None,
    )
    settings = Settings(
        model=model,
        cache=cache,
        task=task,
        decoding=_decoding(config["generation"], task),
        seed=config["seed"],
        limit=config["limit"],
        batch_size=1 if rows_alone(model) else config["batch_size"],
        shard=Shard.read(config.get("shard")),
        retry=config["retry"],
        outputs_dir=Path(config["outputs_dir"]).expanduser(),
        labels={},
        identity={},
        command={"config": config, "choices": choices, "overrides": list(overrides), **places},
        divergence=DivergenceOptions.read(config),
        engine=engine_of(config),
    )
    check_together(settings)
    settings = settings.identified(labels_of(settings, choices, overrides))
    return settings.baseline() if settings.is_baseline else settings


def _check_targets_of_options(config: dict[str, Any], choices: dict[str, str]) -> None:
    """ConfigError for a method or task that another class stands in for: it would be shown under the option's name."""
    for group in ("method", "task"):
        choice, target = choices.get(group, ""), config[group]["_target_"]
        if option(group, choice).get("_target_") not in (None, target):
            raise ConfigError(
                f"{group}._target_={target} makes it another {group} than {group}={choice}, under whose name its rows "
                f"would be shown: leave it out and choose {group}=NAME"
            )


def _decoding(node: dict[str, Any], task: Task) -> GenerationParams:
    """Generation settings, with the task's lengths where the configuration leaves them open."""
    node, keys = dict(node), {}
    for name in ("max_new_tokens", "min_new_tokens"):
        if node.get(name) is None:
            node[name], keys[name] = getattr(task, name), f"task.{name}"
    decoding: GenerationParams = build(node, "generation", within="kvexp.generate", keys=keys)
    return decoding


def _budget_identity(budget: Any) -> dict[str, Any]:
    """Settings of a budget; newer ones only where they do something, so that older runs keep their hashes."""
    later = ("heads", "head_floor", "stream_sinks", "stream_recent", "threshold", "threshold_recent", "layers")
    plain = _plain(budget, without=(*later, "others"))  # which the model says
    plain["pyramid"] = 0.0  # a setting that is no more: all others keep their hashes
    if plain.get("quantization") is not None:
        plain["quantization"] = _plain(budget.quantization, without=_OF_BLOCKS)
    if budget.threshold is not None:
        plain |= {"threshold": budget.threshold, "threshold_recent": budget.newest}
    if budget.heads != "uniform":
        plain["heads"] = budget.heads
    if budget.heads in DEFAULT_FLOORS:
        plain["head_floor"] = budget.floor
    if budget.heads == "duo":
        plain["stream_sinks"], plain["stream_recent"] = budget.stream
    if budget.layers is not None:
        plain["layers"] = budget.layers
    return plain


_OF_BLOCKS = ("rotate", "neighbours")  # fields of quantisation for llama.cpp's formats alone


def _quantization_identity(quantization: AnyQuantization) -> dict[str, Any]:
    """Settings of a quantisation; rotation and order of channels only where the format has them."""
    plain = _plain(quantization, without=_OF_BLOCKS)
    if isinstance(quantization, EngineQuantization) and quantization.in_blocks:
        plain |= {"rotate": quantization.rotate is not False, "neighbours": quantization.neighbours}
    return plain


def _not_the_task(task: Task) -> list[str]:
    """The fields of _NOT_THE_TASK that kvexp's own class gives the task: a user's field of such a name counts."""
    task_class = next(base for base in type(task).__mro__ if base.__module__.startswith("kvexp."))
    return [field.name for field in dataclasses.fields(task_class) if field.name in _NOT_THE_TASK]


def _unused(method: Method) -> tuple[str, ...]:
    """The settings of a method that were added after runs of it had been recorded, and are at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(method)}
    return tuple(name for name in method.later if getattr(method, name) == defaults[name])


def _plain(item: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(item).items() if k not in without}
