"""What a table shows of a run: short names, the x axis, and every setting made by hand that has no column."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvexp.paths import CONF

GROUPS = ("model", "task", "method", "model_task")  # choices with a label of their own
# Overrides that say how a job is carried out, and nothing of what is asked for.
EXECUTION_KEYS = (
    *("limit", "batch_size", "shard", "timeout_s", "retry", "outputs_dir", "log", "objective", "diagnose"),
    "cache.graph",
    *("divergence", "divergence_text", "epsilon_kl", "epsilon_top1"),
)
# Overrides that have a label of their own or change no number.
NEUTRAL = (*EXECUTION_KEYS, "model.path", "model.device", "experiment")
IN_THE_TASK = ("task.subset", "task.extended", "task.tasks")  # Task.label shows them
# Shown by name, wherever they lie.
FILES = ("task.data_files", "task.haystack", "task.prompt_file", "task.data_dir", "model.tokenizer")
DEFAULT_OPTIONS = ("budget=ratio", "prefill=whole", "keep=null")
# Overrides that the full cache does not know.
OF_EVICTION = ("method.", "budget", "bytes_ratio=", "cache.", "select.", "prefill", "keep=", "seed=")
QUOTES = "\"'"
FULL, QUANTISED_FULL = "full", "full_quantised"  # the full cache, and the same in fewer bits, which is no baseline
MOVING = "main (moving)"  # what a hub id without a revision stands for; the results look for the word


@functools.cache
def of_option(group: str, choice: str, key: str) -> Any:
    """What conf/GROUP/CHOICE.yaml says of this key; None where there is no such file, or it says nothing."""
    file = CONF / group / f"{choice}.yaml"
    plain: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    return plain.get(key)


def model_label(choice: str, path: str | None) -> str:
    """The name of a model: its configuration's; the name of its folder or file where another path was given."""
    known = of_option("model", choice, "path")
    if path is None or (choice and known is None) or path in (known, str(CONF.parent.parent / str(known))):
        return choice
    name = Path(path).name
    return name if name not in ("", "..") else Path(path).resolve().name


def override_label(overrides: Sequence[str]) -> str:
    """What was set by hand and is shown nowhere else, in one order whatever the order of the command line."""
    words = [word.lstrip("+~") for word in overrides]
    shown = [word for word in words if word.partition("=")[0] not in (*GROUPS, *NEUTRAL, *IN_THE_TASK, "kv_ratio")]
    shown = [word for word in shown if not word.startswith(("log.", "diagnose.")) and word not in DEFAULT_OPTIONS]
    named = [(word, *word.partition("=")[::2]) for word in shown]
    return " ".join(sorted(f"{key}={Path(v.strip(QUOTES)).name}" if key in FILES else word for word, key, v in named))


def labels_of(
    choices: Mapping[str, str],
    overrides: Sequence[str],
    *,
    model: str,
    task: str,
    method: str,
    budget: Any,
    revision: str | None,
    weights: str | None = None,
    chat: bool = False,
    quantised: bool = False,
) -> dict[str, Any]:
    """The labels of a run. choices: group -> the option taken; budget: a Budget or None, whose ratio is the x axis.

    weights: the quantisation of a GGUF file; chat: whether prompts go through a chat template; quantised: whether keys
    and values are stored in fewer bits.
    """
    shown = choices.get("method", method)
    if budget is None:  # of a method that evicts nothing
        overrides = [word for word in overrides if not word.lstrip("+").startswith("bytes_ratio=")]
    labels = {
        "model": model,
        "task": choices.get("task", task),
        "method": QUANTISED_FULL if quantised and shown == FULL else shown,
        "kv_ratio": budget.kv_ratio if budget is not None else None,
        "tokens": budget.tokens if budget is not None else None,
        "setting": override_label(overrides),
    }
    some = {"revision": revision, "weights": weights, "chat": chat}
    return labels | _experiment(choices) | {name: value for name, value in some.items() if value}


def labels_of_baseline(labels: Mapping[str, Any]) -> dict[str, Any]:
    """The same with full attention, which knows no method, budget, cache options or (unless it samples) seed."""
    own = [w for w in labels["setting"].split() if not w.startswith(OF_EVICTION)]
    return {**labels, "method": FULL, "kv_ratio": None, "tokens": None, "setting": " ".join(own)}


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
    """The overrides that say what is asked for, without those that change no number."""
    asked = (word for word in overrides if not word.startswith(("log.", "diagnose.")))
    return sorted(word for word in asked if word.partition("=")[0] not in EXECUTION_KEYS)


def _experiment(choices: Mapping[str, str]) -> dict[str, str]:
    return {"experiment": choices["experiment"]} if choices.get("experiment") else {}
