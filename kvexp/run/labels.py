"""Labels of a run, and what the root of a configuration says; read before torch is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvexp.run.build import KIVI, STORAGE, build, codec_keys
from kvexp.run.compose import option, root_values
from kvexp.run.store import EPSILON_KL, EPSILON_TOP1, OWN, TEXTS, WORSE_KL
from kvexp.util.errors import ConfigError, Rule, reason_against
from kvexp.util.fields import AtLeast, Range, typed
from kvexp.util.files import CONF, model_folder, path_of

if TYPE_CHECKING:
    from kvexp.run.settings import Settings
    from kvexp.tasks import Task


# What a table shows of a run: short names, the x axis, and every setting made by hand that has no column.


GROUPS = ("model", "task", "method", "model_task")  # choices with a label of their own
# Overrides that say how a job is carried out, and nothing of what is asked for.
EXECUTION_KEYS = (
    *("limit", "batch_size", "shard", "retry", "outputs_dir", "threads", "log"),
    *("diagnose", "cache.graph"),
    *("divergence", "divergence_text", "epsilon_kl", "epsilon_top1", "worse_kl", "control"),
)
# Overrides that have a label of their own or change no number.
NEUTRAL = (*EXECUTION_KEYS, "model.path", "model.device", "experiment")
IN_THE_TASK = ("task.subset", "task.extended", "task.tasks")  # Task.label shows them
# Shown by name, wherever they lie.
FILES = ("task.data_files", "task.haystack", "task.prompt_file", "task.data_dir", "model.tokenizer")
DEFAULT_OPTIONS = ("budget=ratio", "prefill=whole", "keep=null", "engine=none")
# Overrides that the full cache does not know.
OF_EVICTION = ("method.", "budget", "bytes_ratio=", "cache.", "select.", "score.", "prefill", "keep=", "seed=")
OF_AN_ENGINES_CACHE = ("engine.cache_", "engine.flash=", "engine.rotate=")  # llama.cpp's; its full cache is in f32
QUOTES = "\"'"
FULL, QUANTISED_FULL = "full", "full_quantised"  # the full cache, and the same in fewer bits, which is no baseline
PACKAGED = CONF.parent.parent  # the folder that relative paths in conf/ start from
MOVING = "main (moving)"  # what a hub id without a revision stands for; the results look for the word


def model_label(choice: str, path: str | None) -> str:
    """Name of a model: its option, or its folder or file where another path was given."""
    known = option("model", choice).get("path")
    if path is None or (choice and known is None) or path in (known, str(PACKAGED / str(known))):
        return choice
    name = Path(path).name
    return name if name not in ("", "..") else Path(path).resolve().name


def override_label(overrides: Sequence[str]) -> str:
    """The overrides that no other label shows, sorted."""
    words = [word.lstrip("+~") for word in overrides]
    shown = [word for word in words if word.partition("=")[0] not in (*GROUPS, *NEUTRAL, *IN_THE_TASK, "kv_ratio")]
    shown = [word for word in shown if not word.startswith(("log.", "diagnose.")) and word not in DEFAULT_OPTIONS]
    named = [(word, *word.partition("=")[::2]) for word in shown]
    return " ".join(sorted(f"{key}={Path(v.strip(QUOTES)).name}" if key in FILES else word for word, key, v in named))


def labels_of(settings: Settings, choices: Mapping[str, str], overrides: Sequence[str]) -> dict[str, Any]:
    """The labels of a run. choices: group -> the option taken; overrides: what was set by hand."""
    task, model, budget = settings.task, settings.model, settings.budget
    method = choices.get("method", settings.method.name)
    if budget is None:  # of a method that evicts nothing
        overrides = [word for word in overrides if not word.lstrip("+").startswith("bytes_ratio=")]
    labels = {
        "model": model_label(choices.get("model", ""), model.path),
        "task": task.label(choices.get("task", task.name)),
        "method": QUANTISED_FULL if method == FULL and not settings.is_baseline else method,
        "kv_ratio": budget.kv_ratio if budget is not None else None,
        "tokens": budget.tokens if budget is not None else None,
        "setting": override_label(overrides),
    }
    source = task.source
    moves = source.data_files is None and source.hub_id and source.revision is None
    marks = {
        "revision": ", ".join(filter(None, [model.shown_revision(), f"data {MOVING}" if moves else None])),
        "weights": model.gguf[1] if model.gguf else model.scheme,
        "chat": model.chat and task.uses_chat_template,
    }
    return labels | _experiment(choices) | {name: value for name, value in marks.items() if value}


def labels_of_baseline(labels: Mapping[str, Any]) -> dict[str, Any]:
    """Labels of a run's baseline, which knows no method, budget, cache options or (unless it samples) seed."""
    words = [w for w in labels["setting"].split() if not w.startswith((*OF_EVICTION, *OF_AN_ENGINES_CACHE))]
    return {**labels, "method": FULL, "kv_ratio": None, "tokens": None, "setting": " ".join(words)}


def labels_from_overrides(
    choices: Mapping[str, str], overrides: Sequence[str], *, kv_ratio: Any, path: Any
) -> dict[str, Any]:
    """The labels of a job whose configuration cannot be built: as they were given, nothing checked."""
    number = isinstance(kv_ratio, int | float) and not isinstance(kv_ratio, bool) and math.isfinite(kv_ratio)
    words = [override_label(overrides), "" if number or kv_ratio is None else f"kv_ratio={kv_ratio}"]
    labels: dict[str, Any] = {group: choices.get(group) for group in ("model", "task", "method")}
    if isinstance(path, str):
        labels["model"] = model_label(str(labels["model"] or ""), path)
    labels |= {"kv_ratio": kv_ratio if number else None, "setting": " ".join(word for word in words if word)}
    return labels | _experiment(choices)


def request_key(overrides: Sequence[str]) -> list[str]:
    """The overrides that identify what is asked for: those that change no number are left out, the others sorted."""
    words = (word for word in overrides if not word.startswith(("log.", "diagnose.")))
    return sorted(word for word in words if word.partition("=")[0] not in EXECUTION_KEYS)


def _experiment(choices: Mapping[str, str]) -> dict[str, str]:
    return {"experiment": choices["experiment"]} if choices.get("experiment") else {}


# The settings at the root of a configuration: their values, a run's share of the examples.
#
# Checked by themselves: a mistake is reported before torch is imported.


ROOT: dict[str, Any] = {
    "outputs_dir": str,
    "limit": Annotated[int, AtLeast(1)] | None,
    "seed": Annotated[int, AtLeast(0)],
    "batch_size": Annotated[int, AtLeast(1)],
    "retry": bool,
    "threads": Annotated[int, AtLeast(1)] | None,
    "bytes_ratio": Annotated[float, Range(0, 1, above=True)] | None,
    "questions": Literal["each", "all"],
    "samples": Annotated[int, AtLeast(1)],
}


def check_values(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """ConfigError that names the key. choices: group -> the option taken. Older runs have not recorded all keys."""
    for name, kind in ROOT.items():
        if name in config:
            typed(config[name], kind, name)
    protocol, chosen = config.get("protocol"), choices.get("task", "")
    if protocol is not None and chosen not in protocol["tasks"]:  # it would be half a preset
        raise ConfigError(
            f"protocol={protocol['paper']} has no settings for task={chosen}; it has for {', '.join(protocol['tasks'])}"
        )
    budget = config.get("budget")
    if isinstance(budget, Mapping):
        _check_budget(budget, config.get("kv_ratio"), choices.get("budget"))


def check_places(config: Mapping[str, Any]) -> None:
    """ConfigError for a model folder or a data file that is not there."""
    for group in ("model", "task"):
        typed(config.get(group), dict, group)
    path = with_packaged_path(config["model"], "model.path").get("path")
    if isinstance(path, str) and not path_of(path, "model.path").is_file():
        model_folder(path, ("config.json", "adapter_config.json"))
    task = task_of(config)
    if getattr(task, "data_files", None) is not None:
        task.source.places()


def task_of(config: Mapping[str, Any]) -> Task:
    """The task of a resolved configuration; ConfigError names the key."""
    node = {**with_packaged_path(config["task"], "task.data_files"), "limit": config["limit"]}
    task: Task = build(node, "task", within="kvexp.tasks")
    return task


def with_packaged_path(node: dict[str, Any], option: str) -> dict[str, Any]:
    """Make a relative path of packaged files absolute, so that runs may start in any folder."""
    key = option.rpartition(".")[2]
    path = node.get(key)
    if isinstance(path, str) and not path_of(path, option).exists() and (PACKAGED / path).exists():
        return {**node, key: str(PACKAGED / path)}
    return node


def check_idle(config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]) -> None:
    """ConfigError for an option of a number of slots, or of their storage, that was asked for and would do nothing.

    overrides: what was typed or is swept. A kv_ratio other than conf/config.yaml's stands in a file that was named.
    """
    typed_keys = {word.lstrip("+").partition("=")[0] for word in overrides}
    _check_idle_storage(config.get("cache"), typed_keys)
    if config.get("bytes_ratio") is not None and "kv_ratio" in typed_keys:
        raise ConfigError(
            f"kv_ratio has no effect with bytes_ratio={config['bytes_ratio']}: leave out "
            f"kv_ratio={config.get('kv_ratio')}"
        )
    budget = config.get("budget")
    if not isinstance(budget, Mapping):
        return
    given = next((name for name in ("tokens", "threshold") if budget.get(name) is not None), None)
    if given is None:
        return
    ratio, option = config.get("kv_ratio"), choices.get("budget", given)
    if budget.get("kv_ratio") is None and ("kv_ratio" in typed_keys or ratio != root_values()["kv_ratio"]):
        raise ConfigError(
            f"kv_ratio has no effect with budget={option}; leave out kv_ratio={ratio}, or take budget=ratio instead of "
            f"budget.{given}={budget[given]}"
        )
    if given == "tokens" and "budget.of" in typed_keys and budget.get("of") != "generated":
        raise ConfigError(
            f"budget.of has no effect with budget={option}, a number of slots for prompts of any length; leave it out, "
            "or take budget=ratio"
        )


def _check_idle_storage(cache: Any, typed_keys: Collection[str]) -> None:
    """ConfigError for an option of quantised slots where bits were not asked for. cache: the group `cache`."""
    bits = ("bits", "key_bits", "value_bits")
    given = [name for name in STORAGE if f"cache.{name}" in typed_keys]
    if not isinstance(cache, Mapping) or not given:
        return  # without the codecs, which import torch
    codec, codecs = str(cache.get("codec", KIVI)), codec_keys()
    for name in given:
        if name not in ("codec", "residual", *codecs.get(codec, ())):
            reader = next(other for other, names in codecs.items() if name in names)
            raise ConfigError(
                f"cache.{name} has no effect with cache.codec={codec}: leave out cache.{name}={cache[name]}, or take "
                f"cache.codec={reader}"
            )
    if codec != KIVI or set(given) & set(bits):
        return
    if cache.get("bits", 16) != 16 or cache.get("key_bits") or cache.get("value_bits"):
        return
    name = given[0]
    raise ConfigError(
        f"cache.{name} has no effect with cache.bits=16, where nothing is quantised: add cache.bits=8, 4 or 2, "
        f"or leave out cache.{name}={cache[name]}"
    )


def _check_budget(budget: Mapping[str, Any], at_root: Any, option: str | None) -> None:
    ratio, tokens = budget.get("kv_ratio"), budget.get("tokens")
    if ratio is not None and tokens is not None:
        if option == "tokens":
            raise ConfigError(f"budget=tokens takes no ratio, got budget.kv_ratio={ratio}: leave out one of the two")
        raise ConfigError(f"budget.tokens={tokens} needs budget=tokens; budget={option or 'ratio'} takes a ratio")
    if ratio is None:
        return
    name = "kv_ratio" if ratio == at_root else "budget.kv_ratio"
    try:
        typed(ratio, Annotated[float, Range(0, 1, above=True)], name)
    except ConfigError as error:
        if isinstance(ratio, int | float) and 2 <= ratio <= 100:
            raise ConfigError(f"{error}; {ratio:g} % is {name}={ratio / 100:g}") from error
        raise


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of `of` of a run's examples; neighbours, which may ask about one context, stay together."""

    index: int = 0
    of: int = 1

    @classmethod
    def read(cls, value: Any) -> Shard:
        """The configuration's `shard`; null is all examples."""
        if value is None:
            return cls()
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value) if isinstance(value, str) else None
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"shard must be null or i/n with i from 0 to n - 1, as in shard=0/4, got {value!r}")
        return cls(int(match[1]), int(match[2]))

    @property
    def whole(self) -> bool:
        return self.of == 1

    @property
    def name(self) -> str | None:
        """Suffix of this shard's lock, such as "2-of-8"; None for a run of all examples."""
        return None if self.whole else f"{self.index}-of-{self.of}"

    def takes(self, total: int) -> range:
        """Which of so many examples are its own; the shards of one `of` share them out without rest."""
        return range(total * self.index // self.of, total * (self.index + 1) // self.of)


# Whether and how a run's divergence from the full cache is measured: no part of what identifies the run.


AUTO, ONLY, BOTH = "auto", "only", "both"


@dataclass(frozen=True)
class DivergenceOptions:
    """Measured divergence. texts: kinds of text that are forced, none for no divergence; only: no answers are made."""

    texts: tuple[str, ...] = ()
    only: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DivergenceOptions:
        """Read a composed configuration, which of older runs has none; ConfigError names the key.

        "auto" is true here: whoever knows that a run is no part of a sweep has put `decided` in its place.
        """
        value = typed(config.get("divergence", False), bool | Literal["auto", "only"], "divergence")
        text = typed(config.get("divergence_text", OWN), Literal[(*TEXTS, BOTH)], "divergence_text")
        for name, default in (("epsilon_kl", EPSILON_KL), ("epsilon_top1", EPSILON_TOP1), ("worse_kl", WORSE_KL)):
            typed(config.get(name, default), Annotated[float, Range(0, above=True)], name)
        return cls((TEXTS if text == BOTH else (text,)) if value else (), only=value == ONLY)


# Of two methods that keep the prompt, random slots say whether either's score is worth anything (docs/decoding.md).
CONTROL = ("method=random", "method.redraw=true", "method.protect_recent=8")


def with_controls(jobs: Sequence[Sequence[str]], every: Sequence[Sequence[str]]) -> list[list[str]]:
    """These jobs of a sweep, as words, with the control of each setting in which a job of `every` keeps the prompt.

    None where control=false is typed, or a job is of random slots already.
    """
    rest: dict[tuple[str, ...], None] = {}
    for words in every:
        if "keep=prompt" in words and "control=false" not in words and "method=full" not in words:
            rest[tuple(word for word in words if not word.lstrip("+").startswith(("method=", "method.")))] = None
    if any("method=random" in words for words in every):
        rest.clear()
    return [*map(list, jobs), *([*CONTROL, *words] for words in rest)]


def decided(config: Mapping[str, Any], overrides: Sequence[str], *, sweep: bool) -> Any:
    """The value of `divergence` for a job of a command: auto is true in a sweep and false of a single run.

    overrides: as typed; ConfigError where they name a text that no run would be forced.
    """
    value = config.get("divergence", False)
    if value != AUTO:
        return value
    if not sweep and any(word.lstrip("+").partition("=")[0] == "divergence_text" for word in overrides):
        raise ConfigError(
            f"divergence_text={config.get('divergence_text')} has no effect: divergence=auto measures nothing of a "
            "single run; add divergence=true, or leave divergence_text out"
        )
    return sweep


def refusal(settings: Settings) -> str | None:
    """Why a run has no divergence, as the user is to read it; None if it has one."""
    from kvexp.hf.load import one_row_per_forward

    if one_row_per_forward(settings.model.dtype, settings.model.resolved_device()):
        half = "in half precision on a CPU rows of one batch round otherwise than alone (model.dtype=float32)"
        return reason_against(settings, WITHOUT_DIVERGENCE) or half
    return reason_against(settings, WITHOUT_DIVERGENCE)


WITHOUT_DIVERGENCE: tuple[Rule[Settings], ...] = (
    (
        lambda c: c.engine is not None and not c.engine.gives_logits,
        "engine={c.engine.name} gives tokens and no distribution over them; method={c.engine.name} without an engine "
        "is its twin",
    ),
    (lambda c: c.is_baseline, "the full cache is what divergence is measured from"),
    (
        lambda c: c.task.name == "lm_eval",
        "lm-eval's items are scored under their own protocol: their flips are counted from the rows",
    ),
    (
        lambda c: c.task.has_turns,
        "rows of task={c.task.name} say how far each turn is from the full cache (info.kl)",
    ),
    (
        lambda c: not generates(c),
        "task={c.task.name} scores given texts itself: flips and divergence over choices come from the rows",
    ),
    (
        lambda c: c.decoding.num_beams > 1,
        "beams take over one another's caches: there is no one path to compare (generation=greedy)",
    ),
    (
        lambda c: c.decoding.sample,
        "sampled answers differ by chance: divergence follows the greedy answer (generation=greedy)",
    ),
    (
        lambda c: c.decoding.prefill_chunk is not None,
        "prompts are prefilled in chunks, which runs cannot share (generation.prefill_chunk=null)",
    ),
    (
        lambda c: c.method.modifies_prefill,
        "{c.method.name} changes what the prompt's own tokens attend to: its prefill cannot be shared",
    ),
)


def generates(settings: Settings) -> bool:
    """Whether the task's answers are generated: only they are a text along which methods can be compared."""
    from kvexp.tasks import LMEval, Task

    task = settings.task
    return not (isinstance(task, LMEval) or task.only_nll or type(task).score_choices is not Task.score_choices)
