"""Batches of a group: one prefill each, then the members' answers and the texts they are forced.

What does not fit into memory or time is tried with half as many members; one alone is left to its own turn.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvexp.config.settings import Settings
from kvexp.evaluate.context_outputs import outputs_from_context_shared
from kvexp.evaluate.example_prompts import IndexedPrompts as Prompts
from kvexp.evaluate.example_prompts import answerable, prompts_of
from kvexp.evaluate.forced_texts import ForcedTexts
from kvexp.evaluate.limits import (
    Items,
    Rows,
    TimeLimit,
    TimeLimitExceeded,
    failure_kind,
    fit_together,
    free_memory,
    partition_by_memory,
)
from kvexp.evaluate.model_output import NO_TIMES
from kvexp.evaluate.outputs import SharedBatch, generate_outputs_of_batches, generate_outputs_shared
from kvexp.evaluate.rows import row_of, skipped_row
from kvexp.record.divergence_lines import Line
from kvexp.record.run_name import run_name
from kvexp.sweep.group_run import GroupRun, Numbered
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer


def held_beside(members: Sequence[GroupRun], batch: Numbered) -> dict[str, Any]:
    """What `partition_by_memory` counts beside these runs' own caches: copies for the texts, and the full cache's."""
    texts = {text for m in members for text in m.to_force(example.id for _, example in batch)}
    if not texts:
        return {}
    full = [] if any(m.settings.is_baseline for m in members) else [members[0].settings.baseline()]
    return {"copies": len(texts) + any(m.answers(batch) for m in members), "beside": full}


def rows_and_lines(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Numbered, time_limit: TimeLimit, processes: int
) -> Iterable[tuple[GroupRun, list[dict[str, Any]], list[Line]]]:
    """Rows and divergences of a batch, for every member that is not left to its own turn."""
    if not members:
        return
    prompts = prompts_of(members[0].settings, model, tokenizer, batch)
    held: dict[GroupRun, Prompts] = {}
    # A budget may be too small for some of the prompts: only runs that skip the same ones go on together.
    alike: dict[tuple[int, ...], tuple[list[GroupRun], Prompts]] = {}
    for member in members:
        held[member], runnable = answerable(member.settings, model, tokenizer, prompts)
        alike.setdefault(tuple(index for index, _ in runnable), ([], runnable))[0].append(member)
    for together, runnable in alike.values():
        for member, made, lines in _shared(together, model, tokenizer, runnable, time_limit, processes):
            rows = [made.get(index) or skipped_row(member.settings, index, prompt) for index, prompt in held[member]]
            yield member, rows, lines


def rows_and_lines_of_batches(
    batches: Sequence[tuple[list[GroupRun], Numbered]],
    model: Model,
    tokenizer: Tokenizer,
    time_limit: TimeLimit,
    processes: int,
) -> Iterable[tuple[GroupRun, list[dict[str, Any]], list[Line]]]:
    """`rows_and_lines` of several batches, each with the members that lack some of it.

    They are decoded in the same steps where memory holds them all and nothing goes wrong; else one after the other.
    """
    made = _decoded_together(batches, model, tokenizer, processes) if len(batches) > 1 else None
    if made is not None:
        yield from made
        return
    for members, batch in batches:
        going = [member for member in members if not member.failed]  # one may have failed at a batch before
        yield from rows_and_lines(going, model, tokenizer, batch, time_limit, processes)


def _decoded_together(
    batches: Sequence[tuple[list[GroupRun], Numbered]], model: Model, tokenizer: Tokenizer, processes: int
) -> list[tuple[GroupRun, list[dict[str, Any]], list[Line]]] | None:
    """None where the batches have to be taken one after the other."""
    parts = []
    for members, batch in batches:
        prompts = prompts_of(members[0].settings, model, tokenizer, batch)
        each = [answerable(member.settings, model, tokenizer, prompts) for member in members]
        runnable = each[0][1]
        same = all([index for index, _ in other] == [index for index, _ in runnable] for _, other in each)
        if not runnable or not same or any(prompt.question_ids or prompt.choices for _, prompt in runnable):
            return None
        parts.append((members, [held for held, _ in each], runnable))
    needs = [([m.settings for m in ms], some, held_beside(ms, _numbered(some))) for ms, _, some in parts]
    if not fit_together(needs, model, processes):
        return None
    forced = [_forced(members, some) for members, _, some in parts]
    shared = [SharedBatch(runs, some, texts) for (runs, texts), (_, _, some) in zip(forced, parts, strict=True)]
    try:
        outputs = generate_outputs_of_batches(model, tokenizer, shared)
    except Exception:  # one after the other finds whose it is
        outputs = None
    if outputs is None:
        free_memory()  # outside of the handler, as in `_answers`
        return None
    found = []
    for (members, held, some), (_, texts), answers in zip(parts, forced, outputs, strict=True):
        made = _rows_of(members, model, tokenizer, some, texts, _untimed(answers), 0)
        for member, prompts, (rows, lines) in zip(members, held, made, strict=True):
            found.append(
                (member, [rows.get(i) or skipped_row(member.settings, i, prompt) for i, prompt in prompts], lines)
            )
    return found


def _shared(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Prompts, time_limit: TimeLimit, processes: int
) -> Iterable[tuple[GroupRun, Rows, list[Line]]]:
    """The answers of members to the same prompts, as many members at a time as memory allows."""
    if not batch:
        yield from ((member, {}, []) for member in members)
        return
    held = held_beside(members, _numbered(batch))
    for part in partition_by_memory([member.settings for member in members], model, batch, processes, **held):
        yield from _answers([members[place] for place in part], model, tokenizer, batch, time_limit)


def _numbered(batch: Items) -> Numbered:
    return [(index, prompt.example) for index, prompt in batch]


def _answers(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Items, time_limit: TimeLimit, halved: int = 0
) -> Iterable[tuple[GroupRun, Rows, list[Line]]]:
    """Each member with its rows; half as many at a time where memory or time is short, or to find one that fails.

    One that fails is named on stderr and has no rows.
    """
    made: list[tuple[Rows, list[Line]]] | None = None
    passes = sum(m.answers(_numbered(batch)) + len(m.to_force(p.example.id for _, p in batch)) for m in members)
    try:
        with time_limit.of(batch, max(passes, 1)):
            made = _made(members, model, tokenizer, batch, halved)
    except (Exception, TimeLimitExceeded) as error:
        if len(members) == 1 and failure_kind(error) is None:
            members[0].fail(error)
            # Its own turn, which says more, comes when the group is done, and that can be hours from now.
            name = run_name(members[0].settings.labels)
            say(f"{name} failed beside the other runs, which go on: {members[0].error}", file=sys.stderr)
    if made is not None:
        yield from ((member, *each) for member, each in zip(members, made, strict=True))
        return
    free_memory()  # outside of the handler, where the traceback no longer holds what the failed attempt had allocated
    if len(members) > 1:  # one alone is left to its own turn
        half = len(members) // 2
        yield from _answers(members[:half], model, tokenizer, batch, time_limit, halved + 1)
        yield from _answers(members[half:], model, tokenizer, batch, time_limit, halved + 1)


def _made(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Items, halved: int
) -> list[tuple[Rows, list[Line]]]:
    """Rows by index and divergences, for each member."""
    settings, forced = _forced(members, batch)
    each = _together(settings, model, tokenizer, batch, forced)
    return _rows_of(members, model, tokenizer, batch, forced, each, halved)


def _rows_of(
    members: list[GroupRun],
    model: Model,
    tokenizer: Tokenizer,
    batch: Items,
    forced: ForcedTexts | None,
    each: list[dict[int, Any]],
    halved: int,
) -> list[tuple[Rows, list[Line]]]:
    """Rows by index and divergences, for each member; each: the answers of each run, the full cache's too if added."""
    return [
        (
            {
                i: {**row_of(member.settings, model, tokenizer, i, prompt, answers[i]), "halved": halved}
                for i, prompt in batch
                if i in answers
            },
            forced.lines.get(place, []) if forced is not None else [],
        )
        for place, (member, answers) in enumerate(zip(members, each[: len(members)], strict=True))
    ]


def _forced(members: Sequence[GroupRun], batch: Items) -> tuple[list[Settings], ForcedTexts | None]:
    """The runs that share the prefill, and what is forced on which; the full cache's run is added where it lacks."""
    settings = [member.settings for member in members]
    names, texts = [prompt.example.id for _, prompt in batch], dict[str, list[int]]()
    for place, member in enumerate(members):
        for text in member.to_force(names):
            texts.setdefault(text, []).append(place)
    if not texts:
        return settings, None
    answering = [place for place, member in enumerate(members) if member.answers(_numbered(batch))]
    full = next((place for place, one in enumerate(settings) if one.is_baseline), len(settings))
    if full == len(settings):
        settings.append(settings[0].baseline())
    return settings, ForcedTexts(answering, full, texts)


def _together(
    runs: list[Settings], model: Model, tokenizer: Tokenizer, batch: Items, forced: ForcedTexts | None
) -> list[dict[int, Any]]:
    """Index -> answer, for each run."""
    straight = [(i, prompt) for i, prompt in batch if not prompt.question_ids and not prompt.choices]
    others = [(i, prompt) for i, prompt in batch if prompt.question_ids or prompt.choices]
    made: list[dict[int, Any]] = [{} for _ in runs]
    if straight:
        for mine, more in zip(made, generate_outputs_shared(runs, model, tokenizer, straight, forced), strict=True):
            mine |= more
    if others:
        for mine, more in zip(made, outputs_from_context_shared(runs, model, tokenizer, others, forced), strict=True):
            mine |= more
    return _untimed(made)


def _untimed(made: list[dict[int, Any]]) -> list[dict[int, Any]]:
    """The answers without times: a step taken in company says nothing about the time of one taken alone."""
    return [{i: dataclasses.replace(answer, seconds=NO_TIMES.copy()) for i, answer in mine.items()} for mine in made]
