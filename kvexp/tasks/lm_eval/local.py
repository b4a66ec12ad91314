"""Local files in place of an lm-eval task's data: which file is which split, and the task file that says so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.digests import file_digest
from kvexp.errors import ConfigError
from kvexp.paths import path_of

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SPLITS = ("train", "validation", "test")

Files = dict[str, Path]


def files_of(config: Mapping[str, Any], data_dir: str) -> Files:
    """Split -> file of a task in a folder, for the splits it has.

    A file is NAME.SPLIT.jsonl (or .json, .parquet; more words may stand before the ending). NAME is the task's, or its
    data set's on the hub: winogrande_xl, super_glue_copa.
    """
    folder = path_of(data_dir, "task.data_dir")
    if not folder.is_dir():
        raise ConfigError(f"task.data_dir={data_dir} is no folder (seen from {Path.cwd()})")
    names = _names(config)
    found: Files = {}
    for path in sorted(folder.iterdir()):
        words = path.name.split(".")
        if path.suffix not in KINDS or len(words) < 3 or words[0] not in names or words[1] not in SPLITS:
            continue
        if "dataset_info" in words:  # what `datasets` writes beside its data
            continue
        other = found.setdefault(words[1], path)
        if other != path:
            raise ConfigError(
                f"task.data_dir: {other.name} and {path.name} both hold the split {words[1]} of {config['task']}; "
                "move one of them elsewhere"
            )
    if not found:
        raise ConfigError(
            f"task.data_dir={data_dir} holds no data of {config['task']}: expected {names[0]}.SPLIT.jsonl with SPLIT "
            f"one of {', '.join(SPLITS)}" + (f" ({' or '.join(names[1:])} will do for the name)" if names[1:] else "")
        )
    if len({KINDS[path.suffix] for path in found.values()}) > 1:
        raise ConfigError(f"task.data_dir: the files of {config['task']} must be all JSON or all parquet")
    return found


def _names(config: Mapping[str, Any]) -> list[str]:
    base = str(config.get("dataset_path") or "").rpartition("/")[2]
    part = config.get("dataset_name")
    candidates = [config["task"]]
    if part:
        candidates += [f"{base}_{part}", *([part] if part.startswith(base) else [])]
    elif base:
        candidates.append(base)
    return list(dict.fromkeys(candidates))


def needed(config: Mapping[str, Any]) -> str:
    """The split lm-eval evaluates the task on."""
    split = config.get("test_split") or config.get("validation_split")
    if not split:
        raise ConfigError(f"lm-eval's task {config['task']} has neither a test nor a validation split")
    return str(split)


def overrides(
    config: Mapping[str, Any], files: Files | None, shots: int, fewshot_split: str | None, excludes_item: bool = True
) -> dict[str, Any]:
    """What to change in a task's own definition, so that it reads these files and draws its shots where asked.

    excludes_item: an item is no example of itself where both come from one split. lm-eval sees to that only where the
    split is the test split, so that is what it is called then.
    """
    evaluated, task = needed(config), config["task"]
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
    pool = fewshot_split or _pool(config)
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


def _pool(config: Mapping[str, Any]) -> str:
    """The split lm-eval draws examples from unless told otherwise."""
    own = (config.get("fewshot_config") or {}).get("split") or config.get("fewshot_split")
    return str(own or config.get("training_split") or config.get("validation_split") or config.get("test_split"))


def write_task(folder: Path, definition: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """A task file of the same name as lm-eval's own that includes it and changes only this. JSON is YAML."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"include": str(definition), "task": name, **changes}, indent=1), encoding="utf-8")
    return path


def named_in(config: Mapping[str, Any]) -> Files:
    """The files that a definition names itself."""
    named = (config.get("dataset_kwargs") or {}).get("data_files") or {}
    each = named if isinstance(named, dict) else {"data": named}
    lists = {split: paths if isinstance(paths, list) else [paths] for split, paths in each.items()}
    return {f"{split} {i}": Path(path).expanduser() for split, paths in lists.items() for i, path in enumerate(paths)}


def digest(files: Files) -> str:
    """Changes whenever the bytes of a file do; names of files do not matter."""
    total = hashlib.sha256()
    for split in sorted(files):
        try:
            total.update(f"{split} {file_digest(files[split])}\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot read {files[split]}: {error}") from error
    return total.hexdigest()[:16]
