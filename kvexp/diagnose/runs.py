"""A run folder back to its settings, its examples and the model, of which a `Case` is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kvexp.config.group_checks import batch_cache
from kvexp.config.model_spec import load, tokenizer_of
from kvexp.config.settings import Settings, settings_of
from kvexp.config.target_allowlist import check_stored
from kvexp.diagnose.case import Case
from kvexp.diagnose.folders import Row
from kvexp.errors import ConfigError
from kvexp.evaluate.conversations import turns_fed
from kvexp.evaluate.example_prompts import prompt_of
from kvexp.evaluate.outputs import noise_seed
from kvexp.evaluate.preflight import fit_examples, with_stop_tokens
from kvexp.record import Run, identity
from kvexp.tasks import Example


def settings_at(run: Run) -> Settings:
    """The settings of a run, as it was asked for (a baseline: as a run was of which it is the baseline).

    ConfigError where code or files have changed since.
    """
    asked, again = run.command, "run the same command again (its rows stay as they are)"
    if asked is None:
        raise ConfigError(f"{run.path} does not know how it was asked for: {again}")
    try:
        config, choices, overrides = (asked[name] for name in ("config", "choices", "overrides"))
        if not (isinstance(config, dict) and isinstance(choices, dict)):
            raise ValueError("config and choices must be groups")
        if not (isinstance(overrides, list) and all(isinstance(word, str) for word in overrides)):
            raise ValueError("overrides must be a list of texts")
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{run.path / 'command.json'}: {type(error).__name__}: {error}; {again}") from error
    check_stored(config)
    given = ({**config, "outputs_dir": str(run.path.parent)}, choices, overrides)
    for part in settings_of(*given).parts():
        for settings in (part, part.baseline()):
            if identity(settings.identity) == run.hash:
                return settings
    raise ConfigError(
        f"{run.path} was made with other files or another version of kvexp: model, data or settings are not those of "
        "its rows any more; run it again"
    )


def examples_of(settings: Settings, rows: list[Row]) -> list[Example]:
    """The examples of the rows, in the order of the task."""
    wanted = {row["example"] for row in rows}
    settings = with_limit_of(settings, 1 + max(row["index"] for row in rows))
    todo = [(i, example) for i, example in enumerate(settings.task.examples()) if example.id in wanted]
    if settings.task.pinned != settings.identity["data"]:
        raise ConfigError(f"{settings.task.source} has changed since; start again when nothing writes to it")
    if missing := wanted - {example.id for _, example in todo}:
        raise ConfigError(f"the task has no example {sorted(missing)[0]} any more: its data or task.size have changed")
    return [example for _, example in fit_examples(settings, tokenizer_of(settings.model), todo)]


def cases(settings: Settings, rows: list[Row]) -> Iterator[tuple[Row, Case, Example]]:
    """The case of every row, in the order of the task; loads the model."""
    wanted = {row["example"]: row for row in rows}
    todo = examples_of(settings, rows)
    model, tokenizer = load(settings.model)
    settings = with_stop_tokens(settings, model, tokenizer)
    fed: dict[str, tuple[list[list[int]], int]] = {}  # of conversations, by their first message
    for example in todo:
        prompt = prompt_of(settings, model, tokenizer, example)
        question: list[int] = prompt.question_ids
        ahead: int | None = None
        if settings.task.has_turns:
            if example.prompt not in fed:
                last = max(one.number for one in todo if one.prompt == example.prompt)
                fed[example.prompt] = turns_fed(settings, model, tokenizer, prompt, last)
            questions, ahead = fed[example.prompt]
            question = questions[example.number]
        asked = settings.task.has_turns or bool(prompt.question_ids)
        yield (
            wanted[example.id],
            Case(
                model=model,
                prompt=prompt.ids,
                question=question,
                cache=batch_cache(settings, [len(prompt.ids)]),
                decoding=settings.decoding,
                tokenizer=tokenizer,
                seed=noise_seed(settings, prompt.example, asked=asked),
                spans=tuple(prompt.spans),
                ahead=ahead,
            ),
            example,
        )


def with_limit_of(settings: Settings, count: int) -> Settings:
    """The settings with a limit of `count` examples; rows may have been made under several limits.

    Only where a limit takes the first examples: other settings come back as they are.
    """
    if settings.task.sample != "first":
        return settings
    return dataclasses.replace(settings, limit=count, task=dataclasses.replace(settings.task, limit=count))
