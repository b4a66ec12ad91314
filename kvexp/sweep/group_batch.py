"""Batches of a group: one prefill each, then the members' answers and the texts they are forced.

What does not fit into memory or time is tried with half as many members; one alone is left to its own turn.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvexp.config.settings import Settings
from kvexp.evaluate.context_outputs import outputs_from_context_shared
from kvexp.evaluate.example_prompts import IndexedPrompts as Prompts
from kvexp.evaluate.example_prompts import answerable, prompts_of
from kvexp.evaluate.forced_texts import ForcedTexts
from kvexp.evaluate.limits import (
    Items,
    Pace,
    TimeLimit,
    TimeLimitExceeded,
    failure_kind,
    fit_together,
    free_memory,
    partition_by_memory,
)
from kvexp.evaluate.model_output import NO_TIMES, ModelOutput
from kvexp.evaluate.outputs import SharedBatch, SharedOutputs, generate_outputs_of_batches, generate_outputs_shared
from kvexp.evaluate.rows import row_of, skipped_row
from kvexp.record.divergence_lines import Line
from kvexp.record.run_name import run_name
from kvexp.sweep.group_run import GroupRun, Numbered
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

Part = tuple[GroupRun, list[dict[str, Any]], list[Line]]  # of what a run makes of a batch: rows, divergences


def held_beside(members: Sequence[GroupRun], batch: Numbered) -> dict[str, Any]:
    """What `partition_by_memory` counts beside these runs' own caches: copies for the texts, and the full cache's."""
    texts = {text for m in members for text in m.to_force(example.id for _, example in batch)}
    if not texts:
        return {}
    full = [] if any(m.settings.is_baseline for m in members) else [members[0].settings.baseline()]
    return {"copies": len(texts) + any(m.answers(batch) for m in members), "beside": full}


def rows_and_lines(
    members: list[GroupRun],
    model: Model,
    tokenizer: Tokenizer,
    batch: Numbered,
    time_limit: TimeLimit,
    processes: int,
    pace: Pace,
) -> Iterator[Part]:
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
        parts = _shared(together, model, tokenizer, runnable, time_limit, processes, pace)
        yield from _with_skipped(parts, held)


def rows_and_lines_of_batches(
    batches: Sequence[tuple[list[GroupRun], Numbered]],
    model: Model,
    tokenizer: Tokenizer,
    time_limit: TimeLimit,
    processes: int,
    pace: Pace,
) -> Iterator[Part]:
    """`rows_and_lines` of several batches, each with the members that lack some of it.

    They are decoded in the same steps where memory holds them all and nothing goes wrong; else one after the other.
    What is yielded is to be written before the next is asked for.
    """
    if len(batches) > 1 and (yield from _decoded_together(batches, model, tokenizer, processes, pace)):
        return
    for members, batch in batches:
        # One may have failed at a batch before, or have been written before the batches were parted.
        going = [member for member in members if not member.failed and member.has_pending(batch)]
        yield from rows_and_lines(going, model, tokenizer, batch, time_limit, processes, pace)


def _decoded_together(
    batches: Sequence[tuple[list[GroupRun], Numbered]],
    model: Model,
    tokenizer: Tokenizer,
    processes: int,
    pace: Pace,
) -> Generator[Part, None, bool]:
    """Returns False where what is left of the batches has to be taken one after the other."""
    parts = []
    for members, batch in batches:
        prompts = prompts_of(members[0].settings, model, tokenizer, batch)
        each = [answerable(member.settings, model, tokenizer, prompts) for member in members]
        runnable = each[0][1]
        same = all([index for index, _ in other] == [index for index, _ in runnable] for _, other in each)
        if not runnable or not same or any(prompt.question_ids or prompt.choices for _, prompt in runnable):
            return False
        parts.append((members, dict(zip(members, (held for held, _ in each), strict=True)), runnable))
    needs = [([m.settings for m in ms], some, held_beside(ms, _numbered(some))) for ms, _, some in parts]
    if not fit_together(needs, model, processes):
        return False
    forced = [_forced(members, some) for members, _, some in parts]
    shared = [SharedBatch(runs, some, texts) for (runs, texts), (_, _, some) in zip(forced, parts, strict=True)]
    try:
        for made in generate_outputs_of_batches(model, tokenizer, shared, pace):
            members, held, some = parts[made.batch]
            yield from _with_skipped(_parts_of(members, model, tokenizer, some, [made], 0), held)
    except Exception:  # one after the other finds whose it is
        failed = True
    else:
        failed = False
    if failed:
        free_memory()  # outside of the handler, as in `_answers`
    return not failed


def _with_skipped(parts: Iterable[Part], held: dict[GroupRun, Prompts]) -> Iterator[Part]:
    """The parts, the first of each run with rows for the prompts that its budget cannot hold; empties `held`."""
    for member, rows, lines in parts:
        skipped = [one for one in held.pop(member, ()) if one[1].skipped is not None]
        more = [skipped_row(member.settings, *one) for one in skipped]
        yield member, sorted([*rows, *more], key=lambda row: int(row["index"])), lines


def _shared(
    members: list[GroupRun],
    model: Model,
    tokenizer: Tokenizer,
    batch: Prompts,
    time_limit: TimeLimit,
    processes: int,
    pace: Pace,
) -> Iterator[Part]:
    """The answers of members to the same prompts, as many members at a time as memory allows."""
    if not batch:
        yield from ((member, [], []) for member in members)
        return
    held = held_beside(members, _numbered(batch))
    for part in partition_by_memory([member.settings for member in members], model, batch, processes, **held):
        yield from _answers([members[place] for place in part], model, tokenizer, batch, time_limit, pace)


def _numbered(batch: Items) -> Numbered:
    return [(index, prompt.example) for index, prompt in batch]


def _answers(
    members: list[GroupRun],
    model: Model,
    tokenizer: Tokenizer,
    batch: Items,
    time_limit: TimeLimit,
    pace: Pace,
    halved: int = 0,
) -> Iterator[Part]:
    """Each member's rows and lines; half as many at a time where memory or time is short, or to find one that fails.

    One that fails is named on stderr and has no rows.
    """
    numbered, done, limited = _numbered(batch), False, time_limit.timeout_s is not None
    passes = sum(m.answers(numbered) + len(m.to_force(p.example.id for _, p in batch)) for m in members)
    settings, forced = _forced(members, batch)
    parts = _parts_of(
        members, model, tokenizer, batch, _together(settings, model, tokenizer, batch, forced, pace), halved
    )
    try:
        with time_limit.of(batch, max(passes, 1)):
            # An alarm must not ring while rows are written: where it may, all of them are made before.
            parts = iter(list(parts)) if limited else parts
            if not limited:
                yield from parts
        done = True
    except (Exception, TimeLimitExceeded) as error:
        if len(members) == 1 and failure_kind(error) is None:
            members[0].fail(error)
            # Its own turn, which says more, comes when the group is done, and that can be hours from now.
            name = run_name(members[0].settings.labels)
            say(f"{name} failed beside the other runs, which go on: {members[0].error}", file=sys.stderr)
    if done:
        yield from parts
        return
    free_memory()  # outside of the handler, where the traceback no longer holds what the failed attempt had allocated
    if len(members) > 1:  # one alone is left to its own turn
        half = len(members) // 2
        for some in (members[:half], members[half:]):
            some = [member for member in some if member.has_pending(numbered)]
            if some:
                yield from _answers(some, model, tokenizer, batch, time_limit, pace, halved + 1)


def _parts_of(
    members: list[GroupRun],
    model: Model,
    tokenizer: Tokenizer,
    batch: Items,
    made: Iterable[SharedOutputs],
    halved: int,
) -> Iterator[Part]:
    """What members made of a batch as rows and lines; that of the full cache's run is left out where it was added."""
    for one in made:
        if one.run < len(members):
            member = members[one.run]
            rows = [
                {**row_of(member.settings, model, tokenizer, i, prompt, _untimed(one.answers[i])), "halved": halved}
                for i, prompt in batch
                if i in one.answers
            ]
            yield member, rows, one.lines


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
    runs: list[Settings],
    model: Model,
    tokenizer: Tokenizer,
    batch: Items,
    forced: ForcedTexts | None,
    pace: Pace,
) -> Iterator[SharedOutputs]:
    straight = [(i, prompt) for i, prompt in batch if not prompt.question_ids and not prompt.choices]
    others = [(i, prompt) for i, prompt in batch if prompt.question_ids or prompt.choices]
    if straight:
        yield from generate_outputs_shared(runs, model, tokenizer, straight, forced, pace)
    if others:
        yield from outputs_from_context_shared(runs, model, tokenizer, others, forced, pace)


def _untimed(answer: ModelOutput) -> ModelOutput:
    """The answer without times: a step taken in company says nothing about the time of one taken alone."""
    return dataclasses.replace(answer, seconds=NO_TIMES.copy())
