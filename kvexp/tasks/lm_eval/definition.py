"""lm-eval's own definition of a task (prompts, choices, metrics), by name, over the hub's data or local files."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvexp.digests import Stamp, stamp
from kvexp.errors import ConfigError
from kvexp.hub import forbidden, unreachable
from kvexp.paths import path_of
from kvexp.tasks.lm_eval import local
from kvexp.tasks.lm_eval.package import quiet, require

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
    found: Mapping[str, Any] = manager.task_index
    return found


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


def digest(name: str, data_dir: str | None) -> str:
    """Changes with the definition (lm-eval's version for its own, the text of the file for another's) and the data."""
    config = config_of(name)
    version = f"lm_eval {require()} {config['task']}"
    if own := _own_files(name):
        version += f" {local.digest(own)}"
    if data_dir is not None or _reads_files(config):
        return f"{version} files:{local.digest(_data_files(name, data_dir))}"
    return f"{version} hub:{config['dataset_path']}/{config.get('dataset_name')}"


def places(name: str, data_dir: str | None) -> list[Path]:
    """The local files that the task is made from."""
    return [*_own_files(name).values(), *_data_files(name, data_dir).values()]


def _own_files(name: str) -> local.Files:
    """A definition that is not lm-eval's: its file, and all beside it that it may include or call."""
    if not name.endswith(".yaml"):
        return {}
    path = path_of(name, "task.tasks")
    if not re.search(r"^include:|!function", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        return {"definition": path}
    beside = [other for ending in ("*.yaml", "*.py") for other in path.parent.glob(ending) if other != path]
    return {"definition": path, **{f"beside {other.name}": other for other in beside}}


def _data_files(name: str, data_dir: str | None) -> local.Files:
    config = config_of(name)
    if data_dir is not None:
        return local.files_of(config, data_dir)
    return local.named_in(config) if _reads_files(config) else {}


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

    cache_dir: where `datasets` may leave what it makes of the local files, which then are held in memory.
    """
    config = config_of(name)
    if "class" in config and data_dir is not None:
        raise ConfigError(
            f"task.data_dir: lm-eval's task {name} reads its data in Python; local files cannot replace it"
        )
    files = local.files_of(config, data_dir) if data_dir is not None else None
    changes = local.overrides(config, files, shots, fewshot_split, excludes_item)
    if cache_dir is not None and (files is not None or _reads_files(config)):
        given = changes.get("dataset_kwargs") or config.get("dataset_kwargs") or {}
        changes["dataset_kwargs"] = {**given, "cache_dir": cache_dir, "keep_in_memory": True}
    return local.write_task(folder, _entry(name).yaml_path, config["task"], changes)


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
    own = config.get("num_fewshot")
    wanted = (own or 0) if shots is None else shots
    if own == 0 and wanted:
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
    return config.get("dataset_path") in (None, *local.KINDS.values())


def check_rows(task: Any) -> None:
    """Refuse what cannot be asked row by row."""
    config = task.config
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"lm-eval's task {config.task} runs code that a model wrote: kvexp does not")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"lm-eval's task {config.task} needs images or sound, kvexp's models read text")
    if config.repeats > 1:
        raise ConfigError(f"lm-eval's task {config.task} asks {config.repeats} times per item: use kvexp lm-eval")


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
