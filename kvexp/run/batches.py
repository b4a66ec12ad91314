"""Fill what runs lack of rows and divergences, batch by batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvexp.core import CacheConfig
from kvexp.hf.load import FULL, one_row_per_forward
from kvexp.methods import Full
from kvexp.run import store as divergence_lines
from kvexp.run.answers import (
    NO_TIMES,
    ForcedTexts,
    ModelOutput,
    SharedBatch,
    SharedOutputs,
    conversation_outputs,
    generate_outputs,
    generate_outputs_of_batches,
    generate_outputs_shared,
    item_answers,
    outputs_from_context,
    outputs_from_context_shared,
    shares_score_across_batch,
)
from kvexp.run.guard import check_stored
from kvexp.run.labels import DivergenceOptions, Shard, generates, refusal
from kvexp.run.limits import (
    EXIT_HUNG,
    TIME,
    WRITE_EVERY_S,
    Items,
    Pace,
    TimeLimit,
    TimeLimitExceeded,
    failure_kind,
    fit_together,
    free_memory,
    partition_by_memory,
    restart_process,
    retry_in_halves,
)
from kvexp.run.model_spec import check_cache_fits_model, hub_commit, load, prepare_for_fork, rows_alone, tokenizer_of
from kvexp.run.prompts import (
    MAX_QUESTIONS_PER_CONTEXT,
    Batch,
    answerable,
    check_beforehand,
    fit_examples,
    pending_batches,
    prompts_of,
    with_stop_tokens,
)
from kvexp.run.prompts import IndexedPrompts as Prompts
from kvexp.run.rows import (
    check_commit,
    check_prompts,
    check_threads,
    environment,
    failed_row,
    row_of,
    skipped_row,
    validated_row,
)
from kvexp.run.settings import Settings, batch_cache, settings_of
from kvexp.run.store import REFERENCE, Line, Run, identity, run_name
from kvexp.run.workers import ForkPool, num_workers
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item, LMEval
from kvexp.util import CacheError, ConfigError, NotFinite, Progress, Session, say

if TYPE_CHECKING:
    from kvexp.hf.load import Model, Tokenizer


# One run: make sure its baseline exists, then generate, score and record what is missing.


PROMPT, NEW = 128, 3  # tokens: enough for every kind of call
Made = TypeVar("Made")


def evaluate_run(settings: Settings, session: Session | None = None) -> Run:
    """Rows for every example of the task (up to `limit`), and for the full-attention baseline; resumes what exists.

    session: of the command, whose counts it adds to. Raises what went wrong, after recording it in the run's folder.
    """
    settings.task.check()
    _check(settings)
    return _recorded(settings, session or Session())


def _check(settings: Settings) -> None:
    """An impossible run is told before weights are made or read, its baseline's too. One that has rows is possible."""
    check_cache_fits_model(settings.model, settings.cache)
    # os.path: a folder that may not be looked into is told of by opening the run.
    if not os.path.exists(settings.outputs_dir / identity(settings.identity) / "examples.jsonl"):
        check_beforehand(settings, tokenizer_of(settings.model), list(settings.task.examples()))


def _recorded(settings: Settings, session: Session) -> Run:
    baseline = None if settings.is_baseline else _recorded(settings.baseline(), session)
    record = Run.open(
        settings.outputs_dir,
        settings.identity,
        settings.labels,
        environment(),
        baseline=baseline.hash if baseline is not None else None,
        command=settings.command,
    )
    with record.claim(waiting=waiting_notice(record), part=settings.shard.name):
        try:
            complete = _run_missing(settings, record, session)
        except Exception as error:  # an interruption is no failure: the rows so far stay and the next run goes on
            with contextlib.suppress(OSError):  # a full disk: what went wrong is raised, recorded or not
                record.fail(error)
            raise
        if complete:  # else other shards have rows to add, or a failure to be read
            record.clear_failure()
            record.finish(len(record.rows()))
    return record


def waiting_notice(record: Run) -> Any:
    told: list[float] = []

    def print_waiting(seconds: float) -> None:
        if seconds > 1 and not told:  # less is a process that looks who is at it
            told.append(seconds)
            say(f"{record.path} is being worked on by another process; waiting for it", flush=True)

    return print_waiting


def _run_missing(settings: Settings, record: Run, session: Session) -> bool:
    """Run the examples of the shard that have no row yet; returns whether those of the whole run have theirs now."""
    examples = list(settings.task.examples())
    _run_shard(settings, record, examples, session)
    return settings.shard.whole or {example.id for example in examples} <= {row["example"] for row in record.rows()}


def _run_shard(settings: Settings, record: Run, examples: list[Example], session: Session) -> None:
    done = ids_without_work(settings, record, examples)
    shared = 1 if shares_score_across_batch(settings) else MAX_QUESTIONS_PER_CONTEXT
    work = pending_batches(examples, settings.batch_size, shared, lambda example: example.id not in done)
    total, missing = len(settings.shard.takes(len(examples))), sum(example.id not in done for example in examples)
    name = f"{settings.labels['method']} {settings.labels['setting']}".strip()
    ratio = settings.labels.get("kv_ratio")
    title = name if ratio is None else f"{name} kv_ratio={ratio:g}"
    if done and record.hash not in session.filled_ahead:
        say(f"{title}: {total - missing} of {total} rows are there already ({record.path})")
    if not work:
        return
    check_threads(record, settings.model, environment()["threads"])
    tokenizer = tokenizer_of(settings.model)
    check_prompts(settings, record, tokenizer, examples)
    work = [fit_examples(settings, tokenizer, batch) for batch in work]
    model, tokenizer = load(settings.model)
    settings = with_stop_tokens(settings, model, tokenizer)
    commit = hub_commit(model)
    check_commit(record, commit)

    def write(row: dict[str, Any]) -> None:
        if row["example"] not in done:
            record.append(validated_row(row, commit))
            progress.advance()

    def stuck(items: Items) -> None:  # called in another thread: this one has not come back
        for index, prompt in items:
            write(failed_row(settings, index, prompt, TIME, f", in a library's call on {len(items)} prompts"))
        say(f"{title}: a call did not come back within timeout_s; the command starts anew", file=sys.stderr)
        restart_process()

    time_limit = TimeLimit(settings.timeout_s, stuck)
    prompts = (prompts_of(settings, model, tokenizer, batch) for batch in work)
    runnable = (some for each in prompts if (some := answerable(settings, model, tokenizer, each)[1]))
    warm_up(settings, model, tokenizer, next(runnable, []), time_limit)
    with Progress(title, total, total - missing, session=session) as progress:
        for batch in work:
            make = functools.partial(_rows, settings, model, tokenizer, batch, time_limit)
            for row in with_nan_location(model, batch, make):
                write(row)
    free_memory()


def ids_without_work(settings: Settings, record: Run, examples: Sequence[Example]) -> set[str]:
    """Examples that need no work here: those of other shards, and failed ones, unless they are to be tried again."""
    mine = settings.shard.takes(len(examples))
    others = {example.id for place, example in enumerate(examples) if place not in mine}
    return others | {row["example"] for row in record.rows() if not (settings.retry and row.get("failed"))}


def _rows(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Batch, time_limit: TimeLimit
) -> list[dict[str, Any]]:
    """One row per example of a batch, in order."""
    prompts = prompts_of(settings, model, tokenizer, batch)
    prompts, runnable = answerable(settings, model, tokenizer, prompts)
    make = functools.partial(_generate, settings, model, tokenizer)
    failed = functools.partial(failed_row, settings)
    made = retry_in_halves(runnable, make, failed, time_limit) if runnable else {}
    return [made.get(index) or skipped_row(settings, index, prompt) for index, prompt in prompts]


def _generate(settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items) -> dict[int, dict[str, Any]]:
    """Index -> row."""
    if settings.task.only_nll:
        return {index: row_of(settings, model, tokenizer, index, prompt, None) for index, prompt in batch}
    if isinstance(settings.task, LMEval):
        answers = item_answers(settings, model, tokenizer, batch)
        return {index: row_of(settings, model, tokenizer, index, prompt, answers[index]) for index, prompt in batch}
    if settings.task.has_turns:
        answers_of_turns = conversation_outputs(settings, model, tokenizer, batch)
        return {i: row_of(settings, model, tokenizer, i, prompt, answers_of_turns[i]) for i, prompt in batch}
    straight = [(i, prompt) for i, prompt in batch if not prompt.question_ids and not prompt.choices]
    others = [(i, prompt) for i, prompt in batch if prompt.question_ids or prompt.choices]
    made = generate_outputs(settings, model, tokenizer, straight) if straight else {}
    made |= outputs_from_context(settings, model, tokenizer, others) if others else {}
    return {index: row_of(settings, model, tokenizer, index, prompt, made[index]) for index, prompt in batch}


def warm_up(settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items, time_limit: TimeLimit) -> None:
    """A short generation before the first that is timed: the beginnings of a batch's prompts under the run's method.

    What a process does once (reading weights in, laying them out, compiling kernels) is no part of any method's time;
    full, which runs first, would pay for all others.

    Under full attention where the budget of so short a prompt does not hold what the method protects. What else goes
    wrong will go wrong again with the batch itself, which tells.
    """
    prompts = [prompt.ids[:PROMPT] for _, prompt in batch if timed(prompt.example)]
    if not prompts:
        return
    failed = True
    with contextlib.suppress(CacheError, MemoryError, RuntimeError, TimeLimitExceeded), time_limit.of(batch):
        try:
            _generate_few(settings, model, tokenizer, prompts)
        except ConfigError:
            beyond = settings.cache.beyond_context
            full = dataclasses.replace(settings, cache=CacheConfig(Full(), beyond_context=beyond))
            with contextlib.suppress(ConfigError):
                _generate_few(full, model, tokenizer, prompts)
        failed = False
    if failed:  # outside of the handler, where the traceback no longer holds what the attempt had allocated
        free_memory()


def timed(example: Any) -> bool:
    """Whether the answer's row holds times; choices, but lm-eval's, are judged from forks of one prefill."""
    return isinstance(example, Item) or not example.choices


def _generate_few(settings: Settings, model: Model, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    from kvexp.generate import generate

    decoding = dataclasses.replace(settings.decoding, max_new_tokens=NEW, min_new_tokens=0, eos=None)
    cache = batch_cache(settings, [len(ids) for ids in prompts])
    mask = [[1] * len(ids) for ids in prompts]
    generate(model, prompts, cache, attention_mask=mask, decoding=decoding, tokenizer=tokenizer)


def with_nan_location(model: Model, batch: Batch, make: Callable[[], Made]) -> Made:
    """make(), whose NotFinite also says the layer and the examples."""
    try:
        return make()
    except NotFinite as error:
        names = ", ".join(example.id for _, example in batch)
        raise NotFinite(f"{error} ({_where(model, make)}; examples {names}){_advice(model)}") from error


def _where(model: Model, make: Callable[[], Any]) -> str:
    from kvexp.hf.load import first_not_finite

    with first_not_finite(model) as found:
        try:
            make()
        except NotFinite:
            pass
        else:
            return "but not when the same batch was run again: is this machine's memory sound?"
    if not found:
        return "in no module's output, so in an attention score or in the cache"
    number = re.search(r"\.(\d+)(?:\.|$)", found[0])
    return f"first in layer {number[1]}, module {found[0]}" if number else f"first in module {found[0]}"


def _advice(model: Model) -> str:
    name = str(model.dtype).removeprefix("torch.")
    return "; float16 ends at 65504: try model.dtype=bfloat16 or float32" if name == "float16" else ""


Row = dict[str, Any]


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


def with_limit_of(settings: Settings, count: int) -> Settings:
    """The settings with a limit of `count` examples; rows may have been made under several limits.

    Only where a limit takes the first examples: other settings come back as they are.
    """
    if settings.task.sample != "first":
        return settings
    return dataclasses.replace(settings, limit=count, task=dataclasses.replace(settings.task, limit=count))


# One run of a group that shares prefills: which examples lack a row, and which texts it has still to be forced.


Numbered = Sequence[tuple[int, Example]]


class GroupRun:
    """A run's settings, its folder, and what of its work is done: rows by example, texts by (example, kind of text).

    within: the examples that may be forced a text; None: all. failed: left to its own turn, which will say what is
    wrong with it; error: what was wrong. skipped: why an example was left out, each reason once.
    """

    def __init__(
        self, settings: Settings, run: Run, examples: Sequence[Example], within: Collection[str] | None = None
    ) -> None:
        self.settings, self.run = settings, run
        self.failed, self.error, self.skipped = False, "", dict[str, None]()
        answered = not settings.divergence.only
        self.done = ids_without_work(settings, run, examples) if answered else {example.id for example in examples}
        self.texts = settings.divergence.texts if refusal(settings) is None else ()
        self.forced = self._without_text(examples, within) if self.texts else set()

    def _without_text(self, examples: Sequence[Example], within: Collection[str] | None) -> set[tuple[str, str]]:
        """(example, kind of text) that is measured, or will not be: of other shards, skipped, without a reference."""
        mine = {examples[place].id for place in self.settings.shard.takes(len(examples))}
        mine -= {row["example"] for row in self.run.rows() if row.get("skipped")}
        if within is not None:
            mine &= set(within)
        left = {(e.id, text) for e in examples for text in self.texts if e.id not in mine or not _has(e, text)}
        return left | set(divergence_lines.read(self.run))

    def look(self, tokenizer: Tokenizer, examples: Sequence[Example]) -> None:
        """Leave it to its own turn where it cannot be."""
        try:
            check_beforehand(self.settings, tokenizer, examples)
        except ConfigError as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Leave it to its own turn."""
        self.failed, self.error = True, f"{type(error).__name__}: {error}".rstrip(": ")

    def lacks_row(self, example: str) -> bool:
        """Whether it is to answer this example."""
        return example not in self.done

    def lacks_text(self, example: str, text: str) -> bool:
        """Whether it is to be forced this text."""
        return text in self.texts and (example, text) not in self.forced

    def answers(self, batch: Numbered) -> bool:
        """Whether it lacks a row of the batch."""
        return not self.failed and any(self.lacks_row(example.id) for _, example in batch)

    def to_force(self, names: Iterable[str]) -> list[str]:
        """The kinds of text that it lacks for any of these examples."""
        each = list(names)
        return [text for text in self.texts if not self.failed and any(self.lacks_text(name, text) for name in each)]

    def has_pending(self, batch: Numbered) -> bool:
        """Whether it lacks anything of the batch."""
        return self.answers(batch) or bool(self.to_force(example.id for _, example in batch))

    def missing(self, batch: Numbered) -> int:
        """Rows and texts that it lacks."""
        rows = sum(self.lacks_row(example.id) for _, example in batch)
        return rows + sum(self.lacks_text(example.id, text) for _, example in batch for text in self.texts)

    def write(self, rows: list[dict[str, Any]], commit: str | None) -> list[Any]:
        """Those that were missing. An example that is skipped has no text to be forced either."""
        new = [row for row in rows if self.lacks_row(row["example"])]
        self.run.append(*(validated_row(row, commit) for row in new))
        self.done |= {row["example"] for row in new}
        self.skipped |= {row["skipped"]: None for row in rows if row["skipped"]}
        self.forced |= {(row["example"], text) for row in rows if row["skipped"] for text in self.texts}
        return new

    def write_lines(self, lines: list[Line]) -> list[Any]:
        """Those that were missing."""
        new = [line for line in lines if self.lacks_text(line["example"], line["text"])]
        if new:
            divergence_lines.append(self.run, new)
        self.forced |= {(line["example"], line["text"]) for line in new}
        return new


def _has(example: Example, text: str) -> bool:
    return text != REFERENCE or bool(example.reference.strip())


# Batches of a group: one prefill each, then the members' answers and the texts they are forced.
#
# What does not fit into memory or time is tried with half as many members; one alone is left to its own turn.


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


# The runs of a sweep that differ in method and budget alone: one prefill per example for all of them.
#
# This fills in rows ahead of the runs themselves, which then find them done. What goes wrong here is left to a run's
# own turn, where it is told and recorded as always.


# Places for batches in all rounds of the processes, over batches: a process per thread gains about as much.
MIN_UTILISATION = 4 / 3
# Rows of a decode step, above which reading the weights once for more of them gains little (docs/decisions/speed.md).
MAX_DECODE_ROWS = 64


def can_share(settings: Settings) -> bool:
    """Whether a run can share its prefill with others and still write the rows it would write alone."""
    task, decoding, model = settings.task, settings.decoding, settings.model
    if one_row_per_forward(model.dtype, model.resolved_device()):
        return False
    if isinstance(task, LMEval) or task.only_nll or decoding.num_beams > 1 or decoding.prefill_chunk is not None:
        return False
    if task.has_turns:  # each conversation goes its own way
        return False
    if settings.budget is not None and settings.budget.of == "sequence":  # it goes by what each question adds
        return False
    return not shares_score_across_batch(settings) and not settings.method.modifies_prefill


def prefill_groups(wanted: Iterable[Settings]) -> list[list[Settings]]:
    """The runs, with their baselines, that share prefills: several each, in the order they were asked for."""
    alike: dict[str, dict[str, Settings]] = defaultdict(dict)
    for settings in wanted:
        if can_share(settings):
            base = settings if settings.is_baseline else settings.baseline()
            for one in (base, settings):
                alike[group_key(one)].setdefault(str(one.identity), one)
    return [list(group.values()) for group in alike.values() if len(group) > 1]


def group_key(settings: Settings) -> str:
    """Equal for runs that see the same prompts through the same model."""
    same = {key: settings.identity[key] for key in ("model", "task", "data", "generation", "beyond_context")}
    extra = (
        settings.shard,
        settings.limit,
        settings.batch_size,
        settings.seed,
        settings.outputs_dir,
        settings.model.path,
    )
    return repr((sorted(same.items()), extra, getattr(settings.task, "size", None)))


def run_group(members: list[Settings], session: Session, *, wait: bool = True) -> bool:
    """Write the rows and divergences that these runs lack, as far as that goes together.

    False where another process works on one of them, and wait is not set: then nothing was done.
    """
    members[0].task.check()
    with ExitStack() as claims:
        pairs = opened(members)
        try:
            claim_all(pairs, claims, timeout=None if wait else 0)
        except TimeoutError:
            return False
        examples = list(members[0].task.examples())
        run_missing([GroupRun(*pair, examples) for pair in pairs], examples, session)
    session.filled_ahead.update(run.hash for _, run in pairs)
    return True


def opened(members: Sequence[Settings]) -> list[tuple[Settings, Run]]:
    """The runs with their folders, each once."""
    by_name = {}
    for settings in members:
        baseline = None if settings.is_baseline else identity(settings.baseline().identity)
        known = (settings.outputs_dir, settings.identity, settings.labels, environment())
        run = Run.open(*known, baseline=baseline, command=settings.command)
        by_name[run.hash] = (settings, run)
    return list(by_name.values())


def claim_all(pairs: Sequence[tuple[Settings, Run]], claims: ExitStack, timeout: float | None) -> None:
    """Hold these runs until `claims` ends; TimeoutError where another process does."""
    for settings, run in sorted(pairs, key=lambda pair: pair[1].hash):  # in one order: nobody waits for a waiting one
        claims.enter_context(run.claim(timeout=timeout, waiting=waiting_notice(run), part=settings.shard.name))


def run_missing(members: list[GroupRun], examples: Sequence[Example], session: Session, least: int = 2) -> None:
    """Do what claimed runs lack, where at least so many of them lack anything."""
    lead = members[0].settings
    shared = 1 if shares_score_across_batch(lead) else MAX_QUESTIONS_PER_CONTEXT
    work = pending_batches(
        examples, lead.batch_size, shared, lambda example: any(m.has_pending([(0, example)]) for m in members)
    )
    todo = [item for batch in work for item in batch]
    if sum(m.has_pending(todo) for m in members) < least:
        return
    tokenizer = tokenizer_of(lead.model)
    digests: dict[str, dict[str, Any]] = {}
    for member in members:
        member.look(tokenizer, examples)
        check_prompts(member.settings, member.run, tokenizer, examples, digests)
    work = [fit_examples(lead, tokenizer, batch) for batch in work]
    model, tokenizer = load(lead.model)
    commit = hub_commit(model)
    for member in members:
        check_commit(member.run, commit)
        member.settings = with_stop_tokens(member.settings, model, tokenizer)
    size = _processes(members, model, tokenizer, work)
    title = _title(members, todo) + (f", in {size} processes" if size > 1 else "")
    missing = sum(m.missing(todo) for m in members)
    answers = any(m.answers(todo) for m in members)

    def stuck(items: Items) -> None:  # called in another thread: this one has not come back
        if not answers:  # beginning anew would come to the same call
            say(f"{title}: a call did not come back within timeout_s; the same command goes on", file=sys.stderr)
            os._exit(EXIT_HUNG)
        more = f", in a library's call on {len(items)} prompts of {len(members)} runs"
        for member in members:
            member.write([failed_row(member.settings, *item, TIME, more) for item in items], commit)
        say(f"{title}: a call did not come back within timeout_s; the command starts anew", file=sys.stderr)
        restart_process()

    # In half precision a row's numbers go by what it is decoded together with, which the clock must not decide.
    pace = Pace(WRITE_EVERY_S if lead.model.dtype == FULL and lead.timeout_s is None else None)

    def make(some: Sequence[Numbered]) -> Iterator[bool]:  # whether it is a row, or else a text, that was written
        pairs = [([m for m in members if m.has_pending(batch)], batch) for batch in some]
        each, limit = [pair for pair in pairs if pair[0]], TimeLimit(lead.timeout_s, stuck)
        for member, rows, lines in rows_and_lines_of_batches(each, model, tokenizer, limit, size, pace):
            yield from (True for _ in member.write(rows, commit))
            yield from (False for _ in member.write_lines(lines))

    forces = any(m.to_force(example.id for _, example in todo) for m in members)
    what = "texts" if not answers else "rows and texts" if forces else "examples"
    with ForkPool(size, make) as crew, Progress(title, missing, 0, what) as progress:
        for is_row in crew.imap(decode_groups(work, members, size)):
            progress.advance()
            session.rows_written += is_row
            session.texts_measured += not is_row
    free_memory()


def decode_groups(work: Sequence[Numbered], members: Sequence[GroupRun], processes: int) -> list[list[Numbered]]:
    """The batches in groups whose answers are decoded in the same steps: as even as they go, enough for all processes.

    A group of several has at most MAX_DECODE_ROWS rows. Each batch by itself where the time per batch is limited, and
    where prompts would change each other.
    """
    lead = members[0].settings
    most = (
        1
        if lead.timeout_s is not None or rows_alone(lead.model)
        else max(1, MAX_DECODE_ROWS // (len(members) * lead.batch_size))
    )
    count = min(len(work), processes * -(-len(work) // (processes * most)))
    ends = [len(work) * (place + 1) // count for place in range(count)]
    return [list(work[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _title(members: Sequence[GroupRun], todo: Numbered) -> str:
    forced = sum(bool(m.to_force(example.id for _, example in todo)) for m in members)
    if not forced or any(m.answers(todo) for m in members):
        evicting = sum(not member.settings.is_baseline for member in members)
        full = " and the full cache" if evicting < len(members) else ""
        return f"{evicting} run{'s' * (evicting != 1)}{full} that share each prompt's prefill"
    labels = members[0].settings.labels
    return f"divergence of {forced} run{'s' * (forced != 1)}, {labels['model']}, {labels['task']}"


def _processes(members: list[GroupRun], model: Model, tokenizer: Tokenizer, work: Sequence[Numbered]) -> int:
    """How many processes to share the batches among: one for every thread, or one that has all threads.

    One where processes would wait for work or for memory, and where time is limited, which is that of a process alone.
    """
    settings, several = [member.settings for member in members], num_workers(model)
    rounds = -(-len(work) // several)
    if several < 2 or rounds * several > MIN_UTILISATION * len(work) or settings[0].timeout_s is not None:
        return 1
    prepare_for_fork(model)
    _, runnable = answerable(settings[0], model, tokenizer, prompts_of(settings[0], model, tokenizer, work[0]))
    held = held_beside(members, work[0])
    return several if len(partition_by_memory(settings, model, runnable, several, **held)) == 1 else 1


# What of a run's divergence no group of the sweep has measured: by itself, with the full cache beside it.


UNKNOWN = "prompts that its budget does not hold, or too little memory or time"  # said by a process that has ended


def measure_rest(settings: Settings, session: Session) -> Run:
    """Force the texts that one run lacks; says on stderr what cannot be. Returns the run.

    ConfigError where the divergence is all the run is for (divergence=only), and none of its texts could be forced.
    """
    members = [settings.baseline(), settings] if settings.divergence.only else [settings]
    pairs = opened(members)
    if (why := refusal(settings)) is not None:
        if generates(settings):
            session.add_unmeasured(run_name(settings.labels), why)
    else:
        with ExitStack() as claims:
            claim_all(pairs[-1:], claims, timeout=None)
            lines = measure(pairs[-1:], session)
            for line in lines:
                say(line, file=sys.stderr)
        if lines and settings.divergence.only and not divergence_lines.read(pairs[-1][1]):
            raise ConfigError("no text was forced, so the run has no divergence, and divergence=only writes no answers")
    return pairs[-1][1]


def measure(
    pairs: Sequence[tuple[Settings, Run]], session: Session, within: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Force the texts that claimed runs of one group lack; returns a line for each that some are missing of still.

    within: hash -> the examples that may be forced, of each run.
    """
    examples = list(pairs[0][0].task.examples())
    todo = list(enumerate(examples))

    def members() -> list[GroupRun]:
        made = [GroupRun(*pair, examples, (within or {}).get(pair[1].hash)) for pair in pairs]
        for member in made:
            member.done = {example.id for example in examples}  # rows are not what is wanted here
        return made

    working = members()
    run_missing(working, examples, session, least=1)
    told = []
    for before, after in zip(working, members(), strict=True):  # read again: other processes may have written
        if left := after.missing(todo):
            why = before.error or "; ".join(before.skipped) or UNKNOWN
            told.append(f"divergence of {run_name(after.settings.labels)}: {left} texts were not forced ({why})")
    return told


# Measure what recorded runs lack: runs of the same prompts are prefilled once, and all are forced the same text.


def measure_claimed(runs: Iterable[Run], texts: Sequence[str]) -> dict[str, str]:
    """Write the lines that these runs lack, holding each against other measurements; hash -> why a run has none."""
    runs = sorted(runs, key=lambda run: run.hash)  # all processes in one order: none waits for one that waits for it
    with ExitStack() as held:
        for run in runs:
            held.enter_context(run.claim(waiting=waiting_notice(run), part="divergence"))
        return _measured(runs, texts)


def _measured(runs: Sequence[Run], texts: Sequence[str]) -> dict[str, str]:
    refused: dict[str, str] = {}
    groups: dict[str, list[tuple[Settings, Run]]] = defaultdict(list)
    within: dict[str, set[str]] = {}
    for run in runs:
        rows = {row["example"]: row["index"] for row in run.rows() if not row.get("skipped")}
        if run.baseline is None or not rows:
            continue
        try:
            settings = with_limit_of(settings_at(run), 1 + max(rows.values()))
        except ConfigError as error:
            refused[run.hash] = str(error)
            continue
        if (why := refusal(settings)) is not None:
            refused[run.hash] = why
            continue
        settings = replace(settings, shard=Shard(), divergence=DivergenceOptions(tuple(texts), only=True))
        groups[group_key(settings)].append((settings, run))
        within[run.hash] = set(rows)
    for pairs in groups.values():
        _group(pairs, within)
    return refused


def _group(pairs: Sequence[tuple[Settings, Run]], within: dict[str, set[str]]) -> None:
    """Runs that share model, task and prompts."""
    settings = pairs[0][0]
    examples = list(settings.task.examples())
    if settings.task.pinned != settings.identity["data"]:
        raise ConfigError(f"{settings.task.source} has changed since; start again when nothing writes to it")
    missing = sum(GroupRun(*pair, examples, within[pair[1].hash]).missing(list(enumerate(examples))) for pair in pairs)
    if not missing:
        labels = settings.labels
        say(f"divergence of {len(pairs)} runs, {labels['model']}, {labels['task']}: all texts are measured already")
        return
    for line in measure(pairs, Session(), within):
        say(line)
