"""kvexp: which tokens may a language model forget while it generates, and what does that cost and win?

    model, tokenizer = kvexp.load("smollm2_135m")                     a model and its tokenizer
    kvexp.generate("A text.", method="h2o", kv_ratio=0.5)             the answer under a method
    kvexp.compare(["h2o", "snapkv"], "news", kv_ratio=[0.2, 0.5])     methods on a task, as a DataFrame
    kvexp.list_methods(), list_models(), list_tasks()                 the names there are

Methods as classes: `kvexp.methods`. More: docs/python.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvexp.core import Method
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.results.curves import Curves
    from kvexp.tasks import Task

__version__ = "0.3.0"

# Bumped by every change that can move a number; part of the identity of a run.
NUMERICS = 12

PUBLIC = ("compare", "generate", "list_methods", "list_models", "list_tasks", "load")
PACKAGES = ("core", "generate", "hf", "methods", "results", "retrieval", "tasks")


# Nothing heavy is imported before it is used: `import kvexp`, its names, signatures and docstrings need no torch.


def load(name: str = "smollm2_135m", **settings: Any) -> tuple[Model, Tokenizer]:
    """Load a model that attends through kvexp, and its tokenizer; kept until another is asked for or its files change.

    name: one of `kvexp.list_models()`, a folder, a GGUF file or a hub id. settings: keys of `model` on the command
    line, as in dtype="bfloat16", device="cuda". Returns (model, tokenizer). ConfigError for what cannot be loaded.
    """
    model_and_tokenizer: tuple[Model, Tokenizer] = importlib.import_module("kvexp.run.notebook").load(name, **settings)
    return model_and_tokenizer


def compare(
    methods: Sequence[Method | type[Method] | str],
    task: Task | type[Task] | str | None = None,
    kv_ratio: float | Sequence[float] = (0.2, 0.5),
    *,
    prompts: Sequence[Any] | None = None,
    data: str | None = None,
    model: str | None = None,
    outputs_dir: str = "outputs",
    **settings: Any,
) -> Curves:
    """Run methods on a task at every kv_ratio, with full attention; returns a DataFrame of the runs.

    methods: names of `kvexp.list_methods()` (MODULE.CLASS and FILE.py too), and method objects or classes that stand in
        a file.
    task: a name of `kvexp.list_tasks()`, or a task of your own like a method; model: a name of `kvexp.list_models()`, a
        folder or a hub id; None: what `kvexp run` takes.
    prompts: texts of your own in place of a task, or rows {"prompt": TEXT, "answer": TEXT}.
    data: a file of such rows (.jsonl, .json or .parquet).
    settings: any other setting of `kvexp run`, as in limit=9; a dot in its name is written `__`
        (task__max_new_tokens=8); what is not given is as `kvexp run` has it.

    Runs share their prefills; what was run before is not run again. ConfigError for what cannot be run, a job that
    failed included.
    """
    given = {"prompts": prompts, "data": data, "model": model, "outputs_dir": outputs_dir}
    runs: Curves = importlib.import_module("kvexp.results.curves").compare(methods, task, kv_ratio, **given, **settings)
    return runs


def list_methods() -> dict[str, str]:
    """Names that `method=` takes, each with what it is."""
    return _described("method")


def list_models() -> dict[str, str]:
    """Names that `model=` takes, each with what it is; a folder, a GGUF file or a hub id does as well."""
    return _described("model")


def list_tasks() -> dict[str, str]:
    """Names that `task=` takes, each with what it is."""
    return _described("task")


def _described(group: str) -> dict[str, str]:
    names: dict[str, str] = importlib.import_module("kvexp.cli").described(group)
    return names


def __dir__() -> list[str]:
    return sorted({*PUBLIC, *PACKAGES, "Curves", "NUMERICS", *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """A package of kvexp, imported when it is asked for; another name is answered with the place that has it."""
    if name in PACKAGES:
        return importlib.import_module(f"kvexp.{name}")
    if name == "Curves":
        return importlib.import_module("kvexp.results.curves").Curves
    if name[:1].isupper() or name in ("load_model", "load_tokenizer", "patch_model"):
        for place in ("methods", "retrieval", "core", "hf"):
            module = importlib.import_module(f"kvexp.{place}")
            if name in module.__all__:
                raise AttributeError(f"kvexp has no {name}: write from kvexp.{place} import {name}")
    raise AttributeError(f"module 'kvexp' has no attribute {name!r}; it has {', '.join(PUBLIC)}")
