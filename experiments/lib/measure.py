"""Measurements inside the model, which no score can show: each job of a sweep hands over its model and prompts."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import kvexp
from experiments.lib.data import KEYS, spelled, without
from experiments.lib.exhibits import HERE, Exhibit, load, module_of
from experiments.lib.sweep import jobs
from kvexp.run.model_spec import load as load_model
from kvexp.run.prompts import prompt_of
from kvexp.run.settings import Settings
from kvexp.run.store import identity


def measured(
    name: str, experiment: str, overrides: Sequence[str], folder: Path, given: Sequence[str] = ()
) -> pd.DataFrame:
    """What an exhibit's `measure` finds of every job of a sweep, with the job's labels in front.

    folder: where it is kept, and read if it is there. given: those of the overrides that are no setting of the
    exhibit's own, as in `experiments.lib.data.frame_of`.
    """
    frames = []
    for settings in jobs(experiment, overrides):
        path = folder / f"{name}-{_key(name, settings)}.csv"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            _measure(load(name), settings).to_csv(draft, index=False)
            draft.replace(path)
        frame = pd.read_csv(path)
        labels = {key: settings.labels.get(key) for key in KEYS}
        labels |= {"setting": without(spelled(settings.labels.get("setting")), given)}
        frames.append(pd.concat([pd.DataFrame([labels] * len(frame), columns=KEYS), frame], axis=1))
    return pd.concat(frames, ignore_index=True)


def _key(name: str, settings: Settings) -> str:
    """Changes with whatever can change a number: the run, its length, the module that measures and those it uses."""
    parts = (identity(settings.identity), str(settings.limit), str(kvexp.NUMERICS), *sources(module_of(name)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def sources(module: str) -> list[str]:
    """The text of a module of `experiments` and of all those it imports, directly or not, by name."""
    found: dict[str, str] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        path = HERE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name not in found and path.exists():
            found[name] = path.read_text(encoding="utf-8")
            wanted += _imports(found[name])
    return [found[name] for name in sorted(found)]


def _imports(source: str) -> list[str]:
    """What may be a module of `experiments`: A.B and A.B.NAME of `from A.B import NAME`, A.B of `import A.B`."""
    words: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            words += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            words += [each.name for each in node.names]
    return [word for word in words if word.startswith("experiments.")]


def _measure(exhibit: Exhibit, settings: Settings) -> pd.DataFrame:
    assert exhibit.measure is not None
    settings.task.check()
    model, tokenizer = load_model(settings.model)
    prompts = [prompt_of(settings, model, tokenizer, example) for example in settings.task.examples()]
    return exhibit.measure(model, [p.ids for p in prompts if p.skipped is None], settings)
