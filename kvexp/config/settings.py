"""A composed configuration as checked objects, and what of it identifies a run. Nothing here loads a model."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvexp.build import ADDED_LATER, CACHE, build, build_cache, typed
from kvexp.config.bytes_ratio import budget_of_bytes
from kvexp.config.calibration_of_model import calibration_for, head_scores_for
from kvexp.config.corrections import corrections_of, writes_text
from kvexp.config.divergence_options import DivergenceOptions, refusal
from kvexp.config.group_checks import check_chat, check_keep, check_padding, check_turns
from kvexp.config.labels import MOVING, labels_of, labels_of_baseline, of_option
from kvexp.config.model_spec import ModelSpec, facts_of_template, generation_config_of, moving_rope, rows_alone
from kvexp.config.prefill_options import bounded_chunk, check_prefill
from kvexp.config.root_values import Shard, check_values
from kvexp.config.surrogate_of_model import surrogate_for
from kvexp.core import Budget, CacheConfig, Method
from kvexp.core.budget import DEFAULT_FLOORS
from kvexp.errors import ConfigError
from kvexp.generate import GenerationParams
from kvexp.generate.generation_params import check_generation_config
from kvexp.methods import Full
from kvexp.models.chat_template import Thinking
from kvexp.models.half_precision import batch_size_identifies_run
from kvexp.models.moving_rope import check_rope
from kvexp.paths import path_of
from kvexp.record import runs
from kvexp.tasks import LMEval, Task
from kvexp.tasks.questions import with_shared_context
from kvexp.user_methods import admitted, source_of

# Known by the data's fingerprint, by the generation settings, or unable to change a number.
_NOT_THE_TASK = (
    *("limit", "data_files", "streaming", "hub_id", "hub_config", "hub_file", "revision", "split"),
    *("haystack", "prompt_file"),
    "size",  # of a generated task: how many of its rows
    *("max_new_tokens", "min_new_tokens"),
    *("tasks", "data_dir"),
)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """Everything one run needs. `identity` holds all that can change a number and nothing else.

    command: what `settings_of` made it from (config, choices, overrides), to make it again from a run's folder.
    divergence: what is measured of it beside its rows, no part of its identity.
    """

    model: ModelSpec
    cache: CacheConfig
    task: Task
    decoding: GenerationParams
    seed: int
    limit: int | None
    batch_size: int
    shard: Shard
    timeout_s: float | None
    retry: bool
    outputs_dir: Path
    labels: dict[str, Any]
    identity: dict[str, Any]
    command: dict[str, Any]
    divergence: DivergenceOptions = field(default_factory=DivergenceOptions)

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
        asked = self.model.strip_thinking
        if asked is False or self.task.only_nll or not (self.templated or asked is True):
            return None
        found = facts_of_template(self.model).thinking
        return found if found is None or self.templated else dataclasses.replace(found, opened=False)

    @property
    def is_baseline(self) -> bool:
        return not self.method.evicts and self.cache.quantization is None

    def baseline(self) -> Settings:
        """The same run with full attention: what this one is measured against."""
        kept = {name: getattr(self.cache, name) for name in ("observe", "beyond_context", "graph")}
        cache = CacheConfig(Full(), **kept)
        return dataclasses.replace(self, cache=cache).identified(labels_of_baseline(self.labels))

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
                **_plain(self.task, without=(*_NOT_THE_TASK, *self.task.not_identifying())),
            },
            "data": self.task.pinned,
            "generation": _plain(self.decoding, without=("thinking",)),
            "method": {"name": self.method.name, **_plain(self.method)},
            "beyond_context": self.cache.beyond_context,
            "positions": self.cache.positions,
        }
        if self.model.strip_thinking is True and self.templated:
            del identity["model"]["strip_thinking"]  # as auto does
        if (source := _source_of_run(self.method, self.outputs_dir)) is not None:
            identity["method"]["source"] = source
        if self.cache.calibration is not None:
            identity["method"]["calibration"] = self.cache.calibration.digest
        if self.cache.surrogate is not None:
            identity["method"]["surrogate"] = self.cache.surrogate.digest
        if not self.is_baseline:
            cache = self.cache
            identity |= {"budget": _budget_identity(cache.budget) if cache.budget is not None else None}
            identity |= {"cadence": _plain(cache.cadence), "mode": cache.mode, "observe": cache.observe}
            if cache.quantization is not None:
                identity["quantization"] = _plain(cache.quantization)
            if cache.head_scores is not None:
                identity["head_scores"] = cache.head_scores.digest
            if not cache.select.plain:
                identity["select"] = _plain(cache.select)
            if cache.bounded_chunk is not None:  # else left out: every older run keeps its hash
                identity["prefill"] = {"bounded_chunk": cache.bounded_chunk}
            if cache.keep is not None:
                identity["keep"] = cache.keep
        if self.decoding.sample or not self.is_baseline:
            identity["seed"] = self.seed
        if batch_size_identifies_run(self.model.dtype, self.model.resolved_device()):
            identity["batch_size"] = self.batch_size
        if corrected := corrections_of(self):
            identity["corrected"] = corrected
        return dataclasses.replace(self, labels=labels, identity=identity)


def settings_of(config: dict[str, Any], choices: dict[str, str], overrides: Sequence[str] = ()) -> Settings:
    """Check a resolved configuration; ConfigError names the key.

    choices: group -> the option taken; overrides: what was set by hand; both for labels only.
    """
    groups = ("cache", "task", "method", "budget", "generation", "model")
    for group in (*groups, "select") if "select" in config else groups:  # older rows have no select
        if not isinstance(config.get(group), dict):
            raise ConfigError(f"{group} must be a group of settings, got {config.get(group)!r}")
    check_values(config, choices)
    _check_protocol(config.get("protocol"), choices.get("task", ""))
    for name, words in (("limit", "limit=N"), ("shared_context", "questions=all")):
        if name in config["task"]:
            raise ConfigError(f"task.{name} is set by {words}, without task. in front")
    own = {target: one.cls for target, one in admitted().items()}
    method: Method = build(config["method"], "method", within=("kvexp.methods", "kvexp.retrieval"), admitted=own)
    for name in CACHE:
        if name not in config["cache"] and name not in ADDED_LATER:
            raise ConfigError(f"cache.{name} is missing; put it back, or leave cache as conf/config.yaml has it")
    task: Task = build(
        {**_located(config["task"], "task.data_files"), "limit": config["limit"]}, "task", within="kvexp.tasks"
    )
    _check_targets_of_options(config, choices)
    if config.get("questions") == "all":
        task = with_shared_context(task, choices.get("task", task.name))
    model = ModelSpec.of(_located(config["model"], "model.path"))
    task = task.for_model(chat=model.chat)
    budget: Budget | None = None
    if method.evicts and config.get("bytes_ratio") is not None:
        budget = budget_of_bytes(config, model)
    else:  # that of a method without a budget is checked as well: a word may be misspelt
        asked: Budget = build(config["budget"], "budget", within="kvexp.core", keys={"kv_ratio": "kv_ratio"})
        budget = asked if method.evicts else None
    calibration = calibration_for(method, model, choices, overrides)
    head_scores = head_scores_for(budget, model, choices, overrides)
    surrogate = surrogate_for(method, model, task, choices, overrides)
    select = config.get("select", {})
    chunk, keep = (bounded_chunk(config), config.get("keep")) if method.evicts else (None, None)
    settings = Settings(
        model=model,
        cache=build_cache(method, budget, config["cache"], calibration, head_scores, select, surrogate, chunk, keep),
        task=task,
        decoding=_decoding(config["generation"], task),
        seed=config["seed"],
        limit=config["limit"],
        batch_size=1 if rows_alone(model) else config["batch_size"],
        shard=Shard.read(config.get("shard")),
        timeout_s=typed(config["timeout_s"], float | None, "timeout_s"),
        retry=config["retry"],
        outputs_dir=Path(config["outputs_dir"]).expanduser(),
        labels={},
        identity={},
        command={"config": config, "choices": choices, "overrides": list(overrides), **_code_of(method)},
        divergence=DivergenceOptions.read(config),
    )
    _check(settings)
    settings = settings.identified(_labels(settings, choices, overrides))
    return settings.baseline() if settings.is_baseline else settings


def _check_targets_of_options(config: dict[str, Any], choices: dict[str, str]) -> None:
    """ConfigError for a method or task that another class stands in for: it would be shown under the option's name."""
    for group in ("method", "task"):
        choice, target = choices.get(group, ""), config[group]["_target_"]
        if of_option(group, choice, "_target_") not in (None, target):
            raise ConfigError(
                f"{group}._target_={target} makes it another {group} than {group}={choice}, under whose name its rows "
                f"would be shown: leave it out and choose {group}=NAME"
            )


def _located(node: dict[str, Any], option: str) -> dict[str, Any]:
    """The node with a path that is found from any folder, where `option` names something that comes with kvexp."""
    key = option.rpartition(".")[2]
    path = node.get(key)
    if isinstance(path, str) and not path_of(path, option).exists() and (ROOT / path).exists():
        return {**node, key: str(ROOT / path)}
    return node


def _decoding(node: dict[str, Any], task: Task) -> GenerationParams:
    """Generation settings, with the task's lengths where the configuration leaves them open."""
    node, keys = dict(node), {}
    for name in ("max_new_tokens", "min_new_tokens"):
        if node.get(name) is None:
            node[name], keys[name] = getattr(task, name), f"task.{name}"
    decoding: GenerationParams = build(node, "generation", within="kvexp.generate", keys=keys)
    return decoding


def _check(settings: Settings) -> None:
    """What can be wrong without a model or data at hand."""
    spec = settings.method.score_spec
    if settings.batch_size > 1 and spec is not None and spec.batch == "sum_all":
        raise ConfigError(
            f"batch_size must be 1 with method.score_batch=sum_all, got {settings.batch_size}: it adds up the scores "
            "of all prompts of a batch"
        )
    if getattr(settings.task, "shared_context", False) and settings.budget is not None:
        _check_shared_budget(settings.budget)
    if settings.divergence.only and not settings.is_baseline and (why := refusal(settings)) is not None:
        raise ConfigError(f"divergence=only would measure nothing: {why}")
    if writes_text(settings):
        check_generation_config(generation_config_of(settings.model))
    check_padding(settings)
    check_prefill(settings)
    check_rope(moving_rope(settings.model), settings.cache)
    check_keep(settings)
    check_turns(settings)
    check_chat(settings)
    if isinstance(settings.task, LMEval):
        from kvexp.config.group_checks import check_item_settings

        check_item_settings(settings)


def _check_shared_budget(budget: Budget) -> None:
    """ConfigError for a budget that goes by what each question adds: there would be as many evictions as lengths."""
    if budget.of == "sequence":
        raise ConfigError(
            "questions=all evicts a context once for all of its questions, and budget.of=sequence counts each "
            "question's tokens: set budget.of=prompt, or questions=each"
        )


def _check_protocol(protocol: Any, task: str) -> None:
    """A paper's preset sets the switches of the paper's tasks: on another one it would be half a preset."""
    if protocol is not None and task not in protocol["tasks"]:
        raise ConfigError(
            f"protocol={protocol['paper']} has no settings for task={task}; it has for {', '.join(protocol['tasks'])}"
        )


def _labels(settings: Settings, choices: dict[str, str], overrides: Sequence[str]) -> dict[str, Any]:
    source = settings.task.source
    revisions = [settings.model.shown_revision()]
    if source.data_files is None and source.hub_id and source.revision is None:
        revisions.append(f"data {MOVING}")
    return labels_of(
        {**choices, "task": settings.task.label(choices.get("task", settings.task.name))},
        overrides,
        model=settings.model.label(choices.get("model", "")),
        task=settings.task.name,
        method=settings.method.name,
        budget=settings.budget,
        revision=", ".join(revision for revision in revisions if revision) or None,
        weights=settings.model.gguf[1] if settings.model.gguf else None,
        chat=settings.model.chat and settings.task.uses_chat_template,
        quantised=settings.cache.quantization is not None,
    )


def _code_of(method: Method) -> dict[str, Any]:
    """Where a user's method was found, for a reader of the run's folder; nothing is ever loaded by it."""
    found = [one for one in admitted().values() if one.cls is type(method)]
    return {"method_found_as": found[0].reference, "method_code": found[0].code} if found else {}


def _source_of_run(method: Method, outputs_dir: Path) -> dict[str, Any] | None:
    """What identifies the code of a user's method; None for kvexp's own.

    Where runs of outputs_dir were made by the same code with other comments, layout or docstrings, theirs: such an edit
    makes no new run.
    """
    source = source_of(type(method))
    if source is None:
        return None
    code = str(_code_of(method)["method_code"])
    return json.loads(_known_source(str(outputs_dir.absolute()), code, json.dumps(source)))  # type: ignore[no-any-return]


@functools.cache
def _known_source(outputs_dir: str, code: str, source: str) -> str:
    """`_source_of_run` as JSON, looked up once: what this process runs under one name keeps that name."""
    own, alike = json.loads(source), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unreadable folders, of which tables tell
        for run in runs(outputs_dir):
            found = (run.config.get("method") or {}).get("source")
            if found == own:
                return source
            if found and found.get("class") == own["class"] and (run.command or {}).get("method_code") == code:
                alike.append(found)
    return json.dumps(alike[0]) if alike else source


def _budget_identity(budget: Any) -> dict[str, Any]:
    """A budget's settings; those that came later only where they do anything, so that older runs keep their hashes."""
    later = ("heads", "head_floor", "stream_sinks", "stream_recent", "threshold", "threshold_recent", "layers")
    plain = _plain(budget, without=later)
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


def _plain(item: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(item).items() if k not in without}
