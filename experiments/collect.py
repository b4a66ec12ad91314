"""Measurements inside the model, which no score can show: each job of a sweep hands over its model and prompts."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd

import kvexp
from experiments.exhibits import name_of
from experiments.frame import KEYS, spelled
from experiments.sweep import jobs
from kvexp.record import identity
from kvexp.runner.model import load
from kvexp.runner.run import prompt_of
from kvexp.runner.settings import Settings


def collected(module: ModuleType, experiments: Sequence[str], overrides: Sequence[str], folder: Path) -> pd.DataFrame:
    """COLLECT of every job, one below the other, with the job's labels in front; what is in the folder is read."""
    frames = []
    for experiment in experiments:
        for settings in jobs(experiment, overrides):
            path = folder / f"{name_of(module)}-{_key(module, settings)}.csv"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_suffix(".draft")
                _collect(module, settings).to_csv(draft, index=False)
                draft.replace(path)
            frame = pd.read_csv(path)
            labels = {key: settings.labels.get(key) for key in KEYS}
            labels |= {"setting": spelled(settings.labels.get("setting"))}
            frames.append(pd.concat([pd.DataFrame([labels] * len(frame), columns=KEYS), frame], axis=1))
    return pd.concat(frames, ignore_index=True)


def _key(module: ModuleType, settings: Settings) -> str:
    """Changes with whatever can change a number: the run, its length, and the module that measures."""
    parts = (identity(settings.identity), str(settings.limit), str(kvexp.NUMERICS), inspect.getsource(module))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _collect(module: ModuleType, settings: Settings) -> pd.DataFrame:
    settings.task.check()
    model, tokenizer = load(settings.model)
    prompts = [prompt_of(settings, model, tokenizer, example) for example in settings.task.examples()]
    frame: pd.DataFrame = module.COLLECT(model, [p.ids for p in prompts if p.skipped is None], settings)
    return frame
