"""lm-eval's tasks as tasks of the harness: its prompts, choices and metrics; rows, resuming and receipts are ours.

lm-eval is imported late and quietly; without it the error says what to install. Its own definition of a task is read
by name, over the hub's data or over local files in their place.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

from kvexp.tasks.base import AFTER_EVICTION, Example, Positive, Rules, Task, When, filled
from kvexp.tasks.data import KINDS
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, check_fields
from kvexp.util.files import Stamp, file_digest, path_of, stamp
from kvexp.util.hub import forbidden, unreachable


def require() -> str:
    """lm-eval's version; ConfigError where it is not installed."""
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"lm-eval tasks need the package lm-eval ({error}); install it with: pip install kvexp[eval]"
        ) from error
    return _version()


@functools.cache
def _version() -> str:
    """The installed version, read once: every item's metrics ask for it."""
    return metadata.version("lm_eval")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval's log and the progress bars of `datasets` in the block."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, bars = logging.getLogger("lm_eval"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()


# Metrics that are shares of 1; others keep lm-eval's own scale.
PER_UNIT = {"word_perplexity": "word_nll", "byte_perplexity": "byte_nll", "bits_per_byte": "byte_nll"}
SHARES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1")


def is_share(metric: str) -> bool:
    """Whether a metric is a share of 1: one of SHARES, or an accuracy of IFEval's."""
    return metric in SHARES or metric.endswith("_acc")


@dataclass(frozen=True)
class Request:
    """A log-likelihood to measure: of `continuation` after context + question.

    question: the part of the prompt that arrives after the eviction; empty where the whole prompt is the context. A
    text alone (rolling) has no context.
    """

    continuation: str
    context: str = ""
    question: str = ""


@dataclass(frozen=True)
class Item(Example):
    """One item of an lm-eval task: document `number` of it.

    kind: loglikelihood (a request per choice; contexts may differ, as in winogrande), loglikelihood_rolling (one
    request), or generate_until (the prompt, with `generation` as lm-eval's generation_kwargs).
    """

    kind: str = "loglikelihood"
    number: int = 0
    requests: tuple[Request, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    instances: tuple[Any, ...] = field(default=(), repr=False, compare=False)


def items(task: Any, limit: int | None, after_eviction: bool) -> Iterator[Item]:
    """The items of an lm-eval task object, made exactly as its evaluator makes them.

    Examples are drawn item after item, so always from the first one on: fresh task objects give equal items.
    """
    for number, doc in task.doc_iterator(limit=limit):
        try:
            with quiet():
                item = _item(task, number, doc, after_eviction)
        except ConfigError:
            raise
        except Exception as error:  # jinja's, a missing key, the assertions of lm-eval: no common base
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            raise ConfigError(
                f"row {number + 1} of the data of lm-eval's task {task.config.task} cannot be asked ({reason}); it "
                f"has the columns {', '.join(doc)}"
            ) from error
        yield item


def _item(task: Any, number: int, doc: Any, after_eviction: bool) -> Item:
    config = task.config
    name, prefix = config.task, task.doc_to_prefix(doc)
    templates = [t for t in (config.doc_to_text, config.doc_to_target, config.doc_to_choice) if isinstance(t, str)]
    for column in (key for key, value in doc.items() if value is None):
        # Only some rows have it; of the others the prompt would hold the word None.
        if any(re.search(rf"\b{re.escape(column)}\b", template) for template in templates):
            raise ConfigError(f"row {number + 1} of the data of lm-eval's task {name} has no {column!r}")
    context = task.fewshot_context(doc, num_fewshot=config.num_fewshot or 0, gen_prefix=prefix)
    built = task.construct_requests(doc=doc, ctx=context, metadata=(name, number, config.repeats))
    instances = tuple(built) if isinstance(built, list) else (built,)
    shape = {"kind": instances[0].request_type, "number": number, "instances": instances}
    target = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(target, int) and config.doc_to_choice is not None:
        choices = task.doc_to_choice(doc)
        target = choices[target] if target < len(choices) else ""
    reference = str(target)
    if shape["kind"] == "generate_until":
        prompt, generation = instances[0].args[:2]
        question = _question(task, doc, prompt, prefix) if after_eviction else ""
        return Item(
            f"{name}/{number}",
            prompt.removesuffix(question),
            reference,
            question=question,
            generation=generation,
            **shape,
        )
    requests = tuple(_request(task, doc, instance.args, prefix, after_eviction) for instance in instances)
    return Item(f"{name}/{number}", requests[0].context, reference, requests=requests, **shape)


def _request(task: Any, doc: Any, args: Sequence[str], prefix: str | None, after_eviction: bool) -> Request:
    if len(args) == 1:
        if after_eviction:
            raise ConfigError(
                f"task.question=after_eviction: {task.config.task} measures whole texts, which hold no question"
            )
        return Request(args[0])
    context, continuation = args[:2]
    question = _question(task, doc, context, prefix) if after_eviction and context else ""
    return Request(continuation, context.removesuffix(question), question)


def _question(task: Any, doc: Any, prompt: str, prefix: str | None) -> str:
    """The end of a prompt that is this item's own, with the white space that parts it from the examples."""
    alone = task.fewshot_context(doc, num_fewshot=0, gen_prefix=prefix)
    described = len(task.resolve_field(doc, task.config.description) or "")
    ends = [text[described:] for text in ([alone] if isinstance(alone, str) else alone)]
    question = max((end for end in ends if prompt.endswith(end)), key=len, default="")
    if len(question) in (0, len(prompt)):
        raise ConfigError(
            f"task.question=after_eviction: an item of {task.config.task} cannot be parted from the examples before it"
        )
    before = prompt.removesuffix(question)
    return prompt[len(before.rstrip()) :]


Lists = dict[str, list[bool]]


def outcome(task: Any, item: Item, results: Sequence[Any]) -> tuple[dict[str, float], Lists]:
    """(lm-eval's metrics of one item, shares of 1 in percent; lists that it scores by, such as one bool for each
    instruction of IFEval). results: one per instance, as its models return them.

    The metric of a list is the share of it that is true. Metrics of a whole corpus (F1 over classes) cannot be an
    item's and are left out; perplexities become nats (per word, per byte, or of the answer), and any other metric of
    which less is better is left out too.
    """
    for instance, result in zip(item.instances, results, strict=True):
        instance.resps, instance.filtered_resps = [result], {}
    task._instances = list(item.instances)
    with quiet():
        task.apply_filters()
        metrics: dict[str, float] = {}
        lists: Lists = {}
        names = list(item.instances[0].filtered_resps)
        for name in names:
            doc = item.instances[0].doc
            with drawing_by(zlib.crc32(repr(doc).encode())):  # a grader that draws does so by the item alone
                values = task.process_results(doc, [i.filtered_resps[name] for i in item.instances])
            ending = "" if len(names) == 1 else f",{name}"
            for metric, value in values.items():
                if isinstance(value, list) and value and all(isinstance(element, bool) for element in value):
                    lists[f"{metric}{ending}"] = value
                    value = sum(value) / len(value)
                less = task.higher_is_better().get(metric) is False
                metrics |= {f"{key}{ending}": number for key, number in _numbers(metric, value, less).items()}
    return metrics, lists


def _numbers(metric: str, value: Any, less_is_better: bool) -> dict[str, float]:
    if metric == "perplexity" and isinstance(value, float):
        return {"nll": -value}
    if metric in PER_UNIT:
        loglikelihood, units = value
        return {PER_UNIT[metric]: -loglikelihood / units}
    if less_is_better or not (isinstance(value, bool | int | float) or getattr(value, "shape", None) == ()):
        return {}
    return {metric: 100.0 * float(value) if is_share(metric) else float(value)}


ONLY_MASKED = ("mask", "budget_length", "whole_text", "score_dtype")

# What the papers' lm-eval scripts do differently from lm-eval today and from each other.
# a2sf: arXiv:2407.20485, release of 2024 over lm-eval 0.4.0, fp16, batches of 2 padded on the right.
# h2o, keyformer: arXiv:2306.14048 and arXiv:2403.09054, whose scripts feed the whole text, last token included, and
# hand the mean log-probability per token to the scorer. H2O's LLaMA script has since 2024 the global mask.
PAPERS: dict[str, dict[str, Any]] = {
    "a2sf": {
        "add_bos": False,
        "fewshot_split": "validation",
        "fewshot_excludes_item": False,
        "budget_length": "padded",
        "padded_batch": 2,
        "score_dtype": "float16",
    },
    "h2o": {"add_bos": False, "whole_text": True, "per_token": True},
    "keyformer": {"add_bos": False, "whole_text": True, "per_token": True},
}
PROTOCOLS = ("prefill_then_step", "row_mask", *PAPERS)


@dataclass(frozen=True)
class Protocol:
    """How a log-likelihood is measured when the cache shrinks.

    mode prefill_then_step: prefill the context, evict, feed the continuation token by token. The budget comes from
    the context alone. The first token is judged by the full prefill, so answers of one token never feel eviction.

    mode row_mask: one forward over context and continuation under a mask per row (kvexp.core.row_mask); nothing is
    dropped. mask: local is causal, global sees future queries (H2O's LLaMA script). budget_length: tokens that
    ratios are of, the request's own or its length padded in a batch of `padded_batch` requests, longest first.
    whole_text: feed the last token too, whose output nobody reads but which counts for the budget. score_dtype: of the
    accumulated scores.

    Both: add_bos: put a start token in front (None: as the tokenizer does). per_token: score a continuation by its mean
    log-probability per token instead of the sum. fewshot_split: where examples come from (None: as the task says);
    fewshot_excludes_item: an item is never an example of itself.
    """

    mode: Literal["prefill_then_step", "row_mask"] = "prefill_then_step"
    mask: Literal["local", "global"] = "local"
    budget_length: Literal["own", "padded"] = "own"
    padded_batch: Positive = 2
    whole_text: bool = False
    score_dtype: Literal["float32", "float16"] = "float32"
    add_bos: bool | None = None
    per_token: bool = False
    fewshot_split: str | None = None
    fewshot_excludes_item: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mode == "prefill_then_step":
            for field in fields(self):
                if field.name in ONLY_MASKED and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"{field.name}={getattr(self, field.name)} belongs to protocol=row_mask; leave it out"
                    )


def protocol_of(name: str, **switches: Any) -> Protocol:
    """The protocol of this name, a mode or a paper, with the switches that are not None in place of its own."""
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {name!r}")
    switches_of = {"mode": "row_mask", **PAPERS[name]} if name in PAPERS else {"mode": name}
    return Protocol(**{**switches_of, **{k: v for k, v in switches.items() if v is not None}})


SPLITS = ("train", "validation", "test")

Files = dict[str, Path]


def splits_of(config: Mapping[str, Any]) -> list[str]:
    """The splits that a task's files may hold: the usual ones, and those that its definition names."""
    names = [config.get(f"{name}_split") for name in ("training", "validation", "test", "fewshot")]
    names.append((config.get("fewshot_config") or {}).get("split"))
    return list(dict.fromkeys([*filter(None, names), *SPLITS]))


def files_of(config: Mapping[str, Any], data_dir: str) -> Files:
    """Split -> file of a task in a folder, for the splits it has.

    A file is NAME.SPLIT.jsonl (or .json, .parquet; more words may stand before the ending). NAME is the task's, or its
    data set's on the hub: winogrande_xl, super_glue_copa.
    """
    if makes_rows(config):
        raise ConfigError(
            f"task.data_dir: lm-eval's task {config['task']} makes its rows in Python "
            f"({Path(config['custom_dataset']).name}), and reads no files; leave it out"
        )
    folder = path_of(data_dir, "task.data_dir")
    if not folder.is_dir():
        raise ConfigError(f"task.data_dir={data_dir} is no folder (seen from {Path.cwd()})")
    base, subset = str(config.get("dataset_path") or "").rpartition("/")[2], config.get("dataset_name")
    stems = [f"{base}_{subset}", *([subset] if subset.startswith(base) else [])] if subset else [base] if base else []
    names, splits = list(dict.fromkeys([config["task"], *stems])), splits_of(config)
    files: Files = {}
    for path in sorted(folder.iterdir()):
        name, split, *rest = [*path.name.split("."), "", ""]
        if path.suffix not in KINDS or name not in names or split not in splits:
            continue
        if "dataset_info" in rest:  # what `datasets` writes next to its data
            continue
        other = files.setdefault(split, path)
        if other != path:
            raise ConfigError(
                f"task.data_dir: {other.name} and {path.name} both hold the split {split} of {config['task']}; "
                "move one of them elsewhere"
            )
    if not files:
        raise ConfigError(
            f"task.data_dir={data_dir} holds no data of {config['task']}: expected {names[0]}.SPLIT.jsonl with SPLIT "
            f"one of {', '.join(splits)}" + (f" ({' or '.join(names[1:])} will do for the name)" if names[1:] else "")
        )
    if len({KINDS[path.suffix] for path in files.values()}) > 1:
        raise ConfigError(f"task.data_dir: the files of {config['task']} must be all JSON or all parquet")
    return files


def overrides(
    config: Mapping[str, Any], files: Files | None, shots: int, fewshot_split: str | None, excludes_item: bool = True
) -> dict[str, Any]:
    """Changes to a task's own definition, so that it reads these files and draws its shots where asked.

    excludes_item: an item is no example of itself where both come from one split. lm-eval sees to that only where the
    split is the test split, so that is what it is called then.
    """
    task, evaluated = config["task"], config.get("test_split") or config.get("validation_split")
    if not evaluated:
        raise ConfigError(f"lm-eval's task {task} has neither a test nor a validation split")
    changes: dict[str, Any] = {}
    if fewshot_split is not None:
        changes["fewshot_split"] = fewshot_split
        if excludes_item and fewshot_split == evaluated:
            changes["test_split"] = evaluated
    if files is None:
        return changes
    held = ", ".join(files)
    if evaluated not in files:
        raise ConfigError(
            f"{task} is evaluated on its split {evaluated}, task.data_dir holds {held}; add {task}.{evaluated}.jsonl"
        )
    pool_named = (config.get("fewshot_config") or {}).get("split") or config.get("fewshot_split")
    pool = fewshot_split or pool_named or config.get("training_split") or config.get("validation_split") or evaluated
    if shots and pool not in files:
        raise ConfigError(
            f"task.num_fewshot={shots}: {task} draws its examples from its split {pool}, task.data_dir holds {held}; "
            f"add {task}.{pool}.jsonl or set task.fewshot_split={evaluated} (the item asked about is left out)"
        )
    for key in ("training_split", "validation_split", "test_split"):
        if config.get(key) not in files:
            changes.setdefault(key, None)
    if pool not in files:  # no shots are asked for, yet lm-eval reads the pool
        changes["fewshot_split"] = evaluated
        if isinstance(config.get("fewshot_config"), dict):
            changes["fewshot_config"] = {k: v for k, v in config["fewshot_config"].items() if k != "split"}
    kind = KINDS[next(iter(files.values())).suffix]
    data = {split: str(path.resolve()) for split, path in files.items()}
    return changes | {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": data}}


def local_digest(files: Files) -> str:
    """16 hex digits of the splits and their files' bytes; the names of the files do not matter."""
    total = hashlib.sha256()
    for split in sorted(files):
        try:
            total.update(f"{split} {file_digest(files[split])}\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot read {files[split]}: {error}") from error
    return total.hexdigest()[:16]


# Reading all of lm-eval's fourteen thousand definitions takes seconds; the papers' seven are found at once.
FOLDERS = {
    "piqa": "piqa",
    "winogrande": "winogrande",
    "openbookqa": "openbookqa",
    "copa": "super_glue/copa",
    "mathqa": "mathqa",
    "arc_easy": "arc",
    "arc_challenge": "arc",
}


def _index(folder: Path | None) -> Mapping[str, Any]:
    """Name -> entry of the definitions in a folder, or of all of lm-eval's."""
    return _read(folder, tuple(stamp(path) for path in sorted(folder.glob("*.yaml"))) if folder else ())


@functools.cache
def _read(folder: Path | None, files: tuple[Stamp, ...]) -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    with quiet():
        manager = TaskManager() if folder is None else TaskManager(include_path=folder, include_defaults=False)
    index: Mapping[str, Any] = manager.task_index
    return index


def _entry(name: str) -> Any:
    """lm-eval's index entry of a task, group or tag, or of the task in a file NAME.yaml; None if there is none."""
    require()
    if name.endswith(".yaml"):
        path = path_of(name, "task.tasks").resolve()
        inside = _index(path.parent) if path.is_file() else {}
        return next((entry for entry in inside.values() if entry.yaml_path == path), None)
    import lm_eval.tasks

    near = _index(Path(lm_eval.tasks.__file__).parent / FOLDERS[name]) if name in FOLDERS else {}
    return near.get(name) or _index(None).get(name)


def names_of(name: str) -> list[str]:
    """The tasks a name stands for: itself, or the members of a group or tag. ConfigError for a name nobody has."""
    entry = _entry(name)
    if entry is None:
        if name.endswith(".yaml"):
            raise ConfigError(f"task.tasks: {name} is not the file of an lm-eval task (seen from {Path.cwd()})")
        near = difflib.get_close_matches(name, list(_index(None)), 5)
        hint = f"did you mean {', '.join(near)}?" if near else "kvexp lm-eval ls tasks lists them"
        raise ConfigError(f"task.tasks: lm-eval has no task {name!r}; {hint}")
    kind = entry.kind.name
    if kind == "TAG":
        return sorted(entry.tags)
    if kind != "GROUP":
        return [name]
    members = (entry.cfg or {}).get("task") or []
    if not all(isinstance(member, str) for member in members):
        raise ConfigError(
            f"task.tasks: lm-eval's group {name} changes its members; name the tasks themselves, or run it with "
            "kvexp lm-eval"
        )
    return [leaf for member in members for leaf in names_of(member)]


def config_of(name: str) -> dict[str, Any]:
    """The fields of one task's definition as they stand in its file, functions left as texts."""
    names_of(name)
    return dict(_entry(name).cfg or {"task": name})


def written_after(name: str) -> tuple[str, list[str]] | None:
    """What all prompts of a task end with ("" where the file does not say) and the stop texts of its answers.

    None for a task whose answers are not generated; a task of Python is taken for one whose prompts and stop texts,
    which nobody can see, go together badly.
    """
    config = config_of(name)
    if config.get("class") is not None:
        return "", ["\n\n"]
    if config.get("output_type") != "generate_until":
        return None
    until = (config.get("generation_kwargs") or {}).get("until", config.get("fewshot_delimiter") or "\n\n")
    stops = until if isinstance(until, list) else [until]
    prompt = str(config.get("gen_prefix") or config.get("doc_to_text") or "")
    end = re.split(r"[}%]}", prompt)[-1] if re.search(r"[}%]}", prompt) else ""  # else a column's name, or a function
    return end, [stop for stop in stops if isinstance(stop, str)]


def makes_rows(config: Mapping[str, Any]) -> bool:
    """Whether a task's rows are made by a function of its definition (lm-eval's RULER, BABILong, Graphwalks)."""
    return config.get("custom_dataset") is not None


def digest(name: str, data_dir: str | None) -> str:
    """Name of a task's data and definition: lm-eval's version for its own, the text of the file for another's."""
    config = config_of(name)
    version = f"lm_eval {require()} {config['task']}"
    if any(_later_share(metric.get("metric")) for metric in config.get("metric_list") or ()):
        version += " in percent"
    if files := _own_files(name):
        version += f" {local_digest(files)}"
    if data_dir is not None or _reads_files(config):
        return f"{version} files:{local_digest(_data_files(name, data_dir))}"
    return f"{version} hub:{config['dataset_path']}/{config.get('dataset_name')}"


def _later_share(metric: Any) -> bool:
    """Whether rows of older runs hold a share under this name as 0 to 1."""
    return isinstance(metric, str) and is_share(metric) and metric not in SHARES


def _own_files(name: str) -> Files:
    """The file of a definition that is not lm-eval's, and all in its folder that it may include or call."""
    if not name.endswith(".yaml"):
        return {}
    path = path_of(name, "task.tasks")
    if not re.search(r"^include:|!function", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        return {"definition": path}
    others = [other for ending in ("*.yaml", "*.py") for other in path.parent.glob(ending) if other != path]
    return {"definition": path, **{f"beside {other.name}": other for other in others}}


def _data_files(name: str, data_dir: str | None) -> Files:
    config = config_of(name)
    if data_dir is not None:
        return files_of(config, data_dir)
    if not _reads_files(config):
        return {}
    named = (config.get("dataset_kwargs") or {}).get("data_files") or {}  # what the definition names itself
    by_split = named if isinstance(named, dict) else {"data": named}
    lists = {split: paths if isinstance(paths, list) else [paths] for split, paths in by_split.items()}
    return {f"{split} {i}": Path(path).expanduser() for split, paths in lists.items() for i, path in enumerate(paths)}


def task_file(
    folder: Path,
    name: str,
    *,
    data_dir: str | None = None,
    shots: int = 0,
    fewshot_split: str | None = None,
    excludes_item: bool = True,
    cache_dir: str | None = None,
) -> Path:
    """Write into `folder` the task file that puts local data and the pool of examples into lm-eval's definition.

    It includes lm-eval's own file of the same name, and changes only this.
    cache_dir: where `datasets` may leave what it makes of the local files, which then are held in memory.
    """
    config = config_of(name)
    if "class" in config and data_dir is not None:
        raise ConfigError(
            f"task.data_dir: lm-eval's task {name} reads its data in Python; local files cannot replace it"
        )
    files = files_of(config, data_dir) if data_dir is not None else None
    changes = overrides(config, files, shots, fewshot_split, excludes_item)
    if cache_dir is not None and (files is not None or _reads_files(config)):
        given = changes.get("dataset_kwargs") or config.get("dataset_kwargs") or {}
        changes["dataset_kwargs"] = {**given, "cache_dir": cache_dir, "keep_in_memory": True}
    path = folder / f"{config['task']}.yaml"
    definition = {"include": str(_entry(name).yaml_path), "task": config["task"], **changes}
    path.write_text(json.dumps(definition, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def matching(pattern: str) -> list[str]:
    """The tasks whose names fit a pattern such as niah_*."""
    return sorted(name for name, entry in _index(None).items() if entry.kind.name == "TASK" and fnmatch(name, pattern))


def load(
    name: str,
    *,
    data_dir: str | None = None,
    shots: int | None = 0,
    fewshot_split: str | None = None,
    excludes_item: bool = True,
    seed: int = 1234,
) -> Any:
    """lm-eval's task object with its data, set to draw `shots` examples per item (None: as the task says itself)."""
    config = config_of(name)
    if makes_rows(config):
        raise ConfigError(
            f"lm-eval's task {config['task']} makes its rows in Python, of lengths that kvexp run does not set: take "
            "task=ruler or task=babilong, or run it with kvexp lm-eval --metadata"
        )
    shots_named = config.get("num_fewshot")
    wanted = (shots_named or 0) if shots is None else shots
    if shots_named == 0 and wanted:
        raise ConfigError(f"task.num_fewshot={wanted}, but lm-eval's task {name} takes no examples: set it to 0")
    with TemporaryDirectory() as scratch, quiet():
        path = task_file(
            Path(scratch),
            name,
            data_dir=data_dir,
            shots=wanted,
            fewshot_split=fewshot_split,
            excludes_item=excludes_item,
            cache_dir=scratch,
        )
        task = _made(path, config, data_dir is not None)
    task.set_config("num_fewshot", wanted)
    task.set_fewshot_seed(seed)
    _check_pool(task, wanted)
    return task


@functools.lru_cache(maxsize=32)
def load_once(files: tuple[Stamp, ...], name: str, **how: Any) -> Any:
    """As `load`, once per process for the same local files: the runs of a sweep ask the same tasks over and over.

    files: stamps of all that is read, so that a changed file is read again.
    """
    return load(name, **how)


@contextmanager
def drawing_by(seed: int) -> Iterator[None]:
    """Block in which random and numpy.random draw by `seed`, 32 bits. Afterwards they are where they were."""
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


BENCHMARKS = ("wonderwords", "nltk", "langdetect", "immutabledict")  # kvexp[benchmarks]


def mend(error: BaseException) -> str:
    """What mends a task that cannot be loaded for want of something that is not on this machine; "" if unknown."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    words = " ".join(str(link) for link in chain)
    if "antlr4" in words:
        return "It needs another antlr4 than Hydra does, and cannot be loaded together with it: take task=math500"
    for link in chain:
        if isinstance(link, ModuleNotFoundError) and link.name:
            package = link.name.partition(".")[0]
            return f"Install what it needs: pip install {'kvexp[benchmarks]' if package in BENCHMARKS else package}"
    if match := re.search(r"nltk\.download\('(\w+)'\)|Resource .{0,20}?(punkt\w*)", words):
        return f"Fetch what it needs once, with a network: python -m nltk.downloader {match[1] or match[2]}"
    return ""


def _made(path: Path, config: Mapping[str, Any], local_files: bool) -> Any:
    from lm_eval.tasks import TaskManager

    name, hub = config["task"], config.get("dataset_path")
    way = (
        "Make the hub reachable, or give a folder of local files with the same columns: task.data_dir=FOLDER, in it "
        f"{name}.SPLIT.jsonl"
    )
    if not local_files and not _reads_files(config) and not forbidden() and (offline := unreachable()):
        raise ConfigError(f"cannot load the data of lm-eval's task {name} ({hub} on the hub): {offline}. {way}")
    try:
        return TaskManager(include_path=path.parent, include_defaults=False).load([name])["tasks"][name]
    except Exception as error:  # datasets', the hub's, pyarrow's, jinja's and lm-eval's own: no common base
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        if how := mend(error):
            raise ConfigError(f"lm-eval's task {name} cannot be loaded ({reason}). {how}") from error
        if local_files:
            raise ConfigError(
                f"task.data_dir: lm-eval's task {name} cannot use these files ({reason}); they must have the columns "
                f"of {hub} on the hub"
            ) from error
        raise ConfigError(
            f"cannot load the data of lm-eval's task {name} ({hub} on the hub): {reason}. {way}"
        ) from error


def _reads_files(config: Mapping[str, Any]) -> bool:
    """Whether a definition names local files itself (or makes its data in Python)."""
    return config.get("dataset_path") in (None, *KINDS.values())


def check_rows(task: Any) -> None:
    """Refuse what cannot be asked row by row."""
    config = task.config
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"lm-eval's task {config.task} runs code that a model wrote: kvexp does not")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"lm-eval's task {config.task} needs images or sound, kvexp's models read text")
    if config.repeats > 1:
        raise ConfigError(f"lm-eval's task {config.task} asks {config.repeats} times per item: use kvexp lm-eval")


def check_feels_eviction(name: str, protocol: str) -> None:
    """ConfigError for a task of which no method could lose anything under this protocol."""
    if name.startswith("longbench2") and protocol == "prefill_then_step":
        raise ConfigError(
            f"lm-eval's task {name} asks for the log-probability of one letter, which is the full prefill's whatever "
            "is evicted afterwards: no method can lose anything there. Take task=longbench_v2, which generates answers"
        )


def _check_pool(task: Any, shots: int) -> None:
    if not shots:
        return
    config, pool, split = task.config, len(task.sampler.df), task.fewshot_cfg.split
    spare = int(split == config.test_split)  # lm-eval then draws one more, so that it can leave out the item itself
    if shots > pool - spare:
        where = split or config.training_split or config.validation_split
        raise ConfigError(
            f"task.num_fewshot={shots}, but the split {where} of {config.task} holds {pool} rows"
            f"{', of which the item asked about may be one' if spare else ''}; lower task.num_fewshot"
        )


# Options of every task that this one has no use for, and what they must stay at.
IDLE = {
    **{"data_files": None, "hub_id": "", "hub_config": None, "revision": None, "sample": "first", "seed": 12345},
    **{"max_new_tokens": 128, "min_new_tokens": 0, "max_prompt_tokens": None, "pad_to": None},
}
KEPT_ITEMS = 1000  # of a task are held for the runs to come; of more, each pass makes its own
SEVEN = tuple(FOLDERS)  # the papers' tasks


@dataclass(frozen=True, kw_only=True)
class LMEval(Task):
    """Tasks of EleutherAI's lm-eval, by name (a task, group or tag, or the file NAME.yaml of one): a run for each.

    An item's row holds lm-eval's own metrics, shares of 1 in percent, as `kvexp lm-eval` computes them from
    the same numbers. `limit` counts items per task.

    Data: the hub's, or `data_dir`, a folder of NAME.SPLIT.jsonl files in the hub's schema. Tasks that make their rows
    (lm-eval's RULER) are refused. `num_fewshot` examples (null: the task's own number) come from the split lm-eval
    takes or `fewshot_split`, drawn with `fewshot_seed`, the same for all methods. question=after_eviction: the examples
    are the context; the item's own question arrives after the eviction.

    protocol: prefill_then_step, row_mask, or a paper's (a2sf, h2o, keyformer: row_mask as its scripts have it). The
    switches below it belong to `Protocol`; null takes the protocol's own. truncate=left: prompts too long for the model
    lose their first tokens, as in lm-eval; skip: they are not asked. Answers that are generated have lm-eval's own
    length and stop texts: generation.* does not touch them.
    """

    name: ClassVar[str] = "lm_eval"
    generated: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("acc",)
    # lm-eval is asked for a template by kvexp lm-eval --apply_chat_template.
    uses_chat_template: ClassVar[bool] = False
    rules: ClassVar[Rules] = (
        filled("tasks"),
        (
            lambda c: any(getattr(c, option) != value for option, value in IDLE.items()),
            f"which rows lm-eval's tasks ask, and how long the answers are, they say themselves: leave task."
            f"{', task.'.join(IDLE)} alone",
        ),
        (
            lambda c: c.question == AFTER_EVICTION and c.protocol != "prefill_then_step",
            "task.question=after_eviction needs a real eviction, and task.protocol={c.protocol} masks one "
            "forward over the whole text: set task.protocol=prefill_then_step",
        ),
        (
            lambda c: c.question == AFTER_EVICTION and c.num_fewshot == 0,
            "task.question=after_eviction at task.num_fewshot=0: without examples there is no context to evict "
            "before the question; set task.num_fewshot to 1 or more",
        ),
    )

    tasks: tuple[str, ...] = SEVEN
    num_fewshot: Annotated[int, AtLeast(0)] | None = 0
    data_dir: str | None = None
    fewshot_seed: int = 1234
    question: When = "in_prompt"
    protocol: Literal["prefill_then_step", "row_mask", "a2sf", "h2o", "keyformer"] = "prefill_then_step"
    fewshot_split: str | None = None
    fewshot_excludes_item: bool | None = None
    add_bos: bool | None = None
    per_token: bool | None = None
    mask: str | None = None
    budget_length: str | None = None
    padded_batch: int | None = None
    whole_text: bool | None = None
    score_dtype: str | None = None
    truncate: Literal["left", "skip"] = "left"  # type: ignore[assignment]

    @property
    def measured(self) -> Protocol:
        """The protocol with this task's switches."""
        switches = {field.name: getattr(self, field.name) for field in fields(Protocol) if field.name != "mode"}
        return protocol_of(self.protocol, **switches)

    def corrected(self) -> tuple[str, ...]:
        """The letter that a checker of IFEval draws, which depended on the rows before."""
        return ("letter_draws",) if any("ifeval" in name for name in self.tasks) else ()

    def parts(self) -> Sequence[LMEval]:
        """One task per name, groups and tags taken apart."""
        names = [leaf for name in self.tasks for leaf in names_of(name)]
        return [replace(self, tasks=(name,)) for name in dict.fromkeys(names)]

    def label(self, choice: str) -> str:
        """The name of lm-eval's task, where this is one."""
        return str(config_of(self.tasks[0])["task"]) if len(self.tasks) == 1 else choice

    @functools.cached_property
    def definition(self) -> Any:
        """lm-eval's task object, with the answers' metrics."""
        if len(self.tasks) != 1:
            raise ConfigError(f"task.tasks holds {len(self.tasks)} tasks; one at a time is asked: LMEval.parts()")
        how = self.measured
        with self.unchanged() as files:
            task = load_once(
                tuple(files),
                self.tasks[0],
                data_dir=self.data_dir,
                shots=self.num_fewshot,
                fewshot_split=how.fewshot_split,
                excludes_item=how.fewshot_excludes_item,
                seed=self.fewshot_seed,
            )
        check_rows(task)
        return task

    def examples(self) -> Iterator[Item]:
        """The items, the first `limit` of the task."""
        self.check_options()
        yield from self._items(self.limit)

    def everything(self) -> Iterator[Item]:
        """All items of the task, whatever the limit."""
        return self._items(None)

    def _items(self, limit: int | None) -> Iterator[Item]:
        task = self.definition
        if self.question == "after_eviction" and not task.config.num_fewshot:
            raise ConfigError(
                "task.question=after_eviction needs examples as the context to evict from: set task.num_fewshot"
            )
        if limit is not None and limit <= KEPT_ITEMS:
            return iter(_listed(task, self.fewshot_seed, limit, self.question == "after_eviction"))
        task.set_fewshot_seed(self.fewshot_seed)  # every pass draws the same examples
        return items(task, limit, self.question == "after_eviction")

    def check(self) -> None:
        """Options, names, data, prompts of all items used, and whether an item has metrics of its own."""
        self.check_options()
        for task in self.parts():
            check_feels_eviction(task.tasks[0], self.protocol if self.question == "in_prompt" else "")
            if not task.metric_names():
                raise ConfigError(
                    f"task.tasks: all metrics of lm-eval's task {task.tasks[0]} are of the whole corpus, an item has "
                    "none: use kvexp lm-eval"
                )

    def metric_names(self) -> tuple[str, ...]:
        """The metrics of an item of one task, as a made-up answer to its first item has them; reads all items."""
        first = None
        for item in self.examples():
            first = first or item
        if first is None:
            raise ConfigError(f"task.tasks: lm-eval's task {self.tasks[0]} has no rows")
        answer = {"generate_until": "", "loglikelihood_rolling": -1.0}.get(first.kind, (-1.0, False))
        return tuple(self.score_item(first, [answer] * len(first.instances)))

    def fingerprint(self) -> str:
        """Name of the definitions and the data, local files by their bytes."""
        return "; ".join(digest(name, self.data_dir) for task in self.parts() for name in task.tasks)

    def places(self) -> list[Path]:
        names = [name for task in self.parts() for name in task.tasks]
        file_groups = [files for name in names for files in (_own_files(name), _data_files(name, self.data_dir))]
        return [path for files in file_groups for path in files.values()]

    def score_item(self, item: Item, results: Sequence[Any]) -> dict[str, float]:
        """lm-eval's metrics of one item; results as its models return them: (log-probability, greedy), or a text."""
        return self.outcome_of(item, results)[0]

    def outcome_of(self, item: Item, results: Sequence[Any]) -> tuple[dict[str, float], Lists]:
        """As `outcome`: the metrics of one item, and the lists that it is scored by."""
        return outcome(self.definition, item, results)

    def check_options(self) -> None:
        super().check_options()
        try:
            self.measured  # noqa: B018  # the switches of the protocol
        except ConfigError as error:
            raise ConfigError(f"task.{error}") from error


@functools.lru_cache(maxsize=32)
def _listed(task: Any, seed: int, limit: int, after_eviction: bool) -> tuple[Item, ...]:
    """The items of an lm-eval task object, which is one for all runs that ask the same (`definition.load_once`)."""
    task.set_fewshot_seed(seed)
    return tuple(items(task, limit, after_eviction))
