"""A run folder back to its settings, its examples and the model: what a case is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kvexp.diagnose.case import Case
from kvexp.diagnose.folders import Row
from kvexp.errors import ConfigError
from kvexp.evictions.files import read_asked
from kvexp.record import Run, identity
from kvexp.runner.fitting import fitted, with_ends
from kvexp.runner.model import load, tokenizer_of
from kvexp.runner.padding import budget_of
from kvexp.runner.run import prompt_of
from kvexp.runner.seeds import noise_seed
from kvexp.runner.settings import Settings, settings_of
from kvexp.tasks import Example


def settings_at(run: Run) -> Settings:
    """As the run was asked for when it was diagnosed; ConfigError where code or files have changed since."""
    asked = read_asked(run)
    config = {**asked["config"], "outputs_dir": str(run.path.parent)}
    settings = settings_of(config, asked["choices"], asked["overrides"])
    if identity(settings.identity) != run.hash:
        raise ConfigError(
            f"{run.path} was made with other files or another version of kvexp: model, data or settings are not those "
            "of its rows any more; run it again"
        )
    return settings


def cases(settings: Settings, rows: list[Row]) -> Iterator[tuple[Row, Case, Example]]:
    """The case of every row, in the order of the task; loads the model."""
    wanted = {row["example"]: row for row in rows}
    settings = _as_many(settings, 1 + max(row["index"] for row in rows))
    todo = [(i, example) for i, example in enumerate(settings.task.examples()) if example.id in wanted]
    if settings.task.pinned != settings.identity["data"]:
        raise ConfigError(f"{settings.task.source} has changed since; start again when nothing writes to it")
    if missing := wanted.keys() - {example.id for _, example in todo}:
        raise ConfigError(f"the task has no example {sorted(missing)[0]} any more: its data or task.size have changed")
    todo = fitted(settings, tokenizer_of(settings.model), todo)
    model, tokenizer = load(settings.model)
    settings = with_ends(settings, model, tokenizer)
    for _, example in todo:
        prompt = prompt_of(settings, model, tokenizer, example)
        yield (
            wanted[example.id],
            Case(
                model=model,
                prompt=prompt.ids,
                question=prompt.question,
                method=settings.method,
                budget=budget_of(settings, [len(prompt.ids)]),
                decoding=settings.decoding,
                tokenizer=tokenizer,
                seed=noise_seed(settings, prompt.example, asked=bool(prompt.question)),
                plan=settings.plan(),
            ),
            example,
        )


def _as_many(settings: Settings, count: int) -> Settings:
    """With a limit of `count` examples, where a limit takes the first: rows may have been made under several."""
    if settings.task.sample != "first":
        return settings
    return dataclasses.replace(settings, limit=count, task=dataclasses.replace(settings.task, limit=count))
