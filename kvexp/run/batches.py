"""Recorded runs: make the rows and divergences they lack, batch by batch, and write them as they come.

A run is a group of one. `evaluate_run` gives one run its rows by itself, timed, its baseline's first; `run_group` does
what several runs of the same prompts lack, before each is run alone, from one prefill per prompt; `measure_rest` and
`measure_claimed` force the texts that are missing of a divergence. All of them are `fill`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvexp.core import CacheConfig
from kvexp.hf.load import FULL, one_row_per_forward
from kvexp.methods import Full
from kvexp.run.answers import PromptBatch, outputs_of_batches, shares_score_across_batch
from kvexp.run.engine import check_installed, engine_answer
from kvexp.run.guard import check_stored
from kvexp.run.labels import DivergenceOptions, Shard, generates, refusal
from kvexp.run.model_spec import check_cache_fits_model, hub_commit, load, prepare_for_fork, rows_alone, tokenizer_of
from kvexp.run.prompts import (
    MAX_QUESTIONS_PER_CONTEXT,
    Batch,
    Items,
    Prompts,
    batches,
    check_beforehand,
    fit_examples,
    with_stop_tokens,
)
from kvexp.run.rows import (
    check_commit,
    check_prompts,
    check_threads,
    environment,
    failed_row,
    fit_together,
    free_memory,
    is_out_of_memory,
    row_of,
    skipped_row,
    validated_row,
)
from kvexp.run.session import Session
from kvexp.run.settings import Settings, batch_cache, settings_of
from kvexp.run.store import REFERENCE, TEXTS, Line, Run, run_hash, run_name
from kvexp.run.workers import ForkPool, num_workers
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item, LMEval
from kvexp.util.errors import CacheError, ConfigError, NotFinite
from kvexp.util.machine import LoadMeter, machine_load
from kvexp.util.output import say
from kvexp.util.progress import ANSWERS, PROMPTS, Progress
from kvexp.util.progress import TEXTS as FORCED

if TYPE_CHECKING:
    from kvexp.hf.load import Model, Tokenizer

PROMPT, NEW = 128, 3  # tokens of a warm-up: enough for every kind of call
# Places for batches in all rounds of the processes, over batches: a process per thread gains about as much.
MIN_UTILISATION = 4 / 3
# Rows of a decode step, above which reading the weights once for more of them gains little (DECISIONS.md).
MAX_DECODE_ROWS = 64
# Rows that are decoded or forced before they are written, about.
MAX_UNWRITTEN_ROWS: int | None = 64
# What a kill loses at most, about, on a CPU whose cores do so many operations per second. Counted, not timed: what is
# decoded together, and with it the last digit of a small model's KL, depends on no clock.
MAX_UNWRITTEN_S, CORE_FLOPS = 60.0, 4e10
# A step reads the weights in the time of so many rows: prompts are decoded together until that is this share of all.
WEIGHT_ROWS, WEIGHT_SHARE = 9, 0.06
ANSWER = "answer"  # what a row is of; the other kinds of work are TEXTS, which are forced

Row = dict[str, Any]


# Who is filled: a run by itself, or a group.


def evaluate_run(settings: Settings, session: Session | None = None) -> Run:
    """Rows for every example of the task (up to `limit`), and for the full-attention baseline; resumes what exists.

    session: of the command, whose counts it adds to. Raises what went wrong, after recording it in the run's folder.
    """
    session = session or Session()
    settings.task.check()
    # A run that cannot be is an error before weights are made or read, and before its baseline is run. One that has
    # rows can be. os.path raises nothing for a folder that may not be looked into: opening the run does.
    check_cache_fits_model(settings.model, settings.cache)
    check_installed(settings)
    prompts = Prompts(settings, _examples(settings, session))
    if not os.path.exists(settings.outputs_dir / run_hash(settings.identity) / "examples.jsonl"):
        check_beforehand(settings, prompts)
    if not settings.is_baseline:
        baseline = settings.baseline()
        _own_turn(baseline, prompts.seen_by(baseline), session)
    return _own_turn(settings, prompts, session)


def _examples(settings: Settings, session: Session) -> list[Example]:
    """The task's examples up to `limit`; says where there are fewer."""
    examples = list(settings.task.examples())
    if settings.limit is not None and len(examples) < settings.limit:
        more = "; task.size=N makes more" if hasattr(settings.task, "size") else ""
        counted = f"{len(examples)} example{'s' * (len(examples) != 1)}{more}"
        session.say_once(f"limit={settings.limit} is more than task={settings.labels['task']} has: {counted}")
    return examples


def _own_turn(settings: Settings, prompts: Prompts, session: Session) -> Run:
    ((_, run),) = opened([settings])
    with run.claim(waiting=waiting_notice(run), part=settings.shard.name):
        try:
            member = Member(settings, run, prompts.examples, {ANSWER})
            total, missing = len(settings.shard.takes(len(prompts.examples))), len(member.lacking)
            if missing < total and run.hash not in session.filled_ahead:
                say(f"{member.title}: {total - missing} of {total} rows are there already ({run.path})")
            fill([member], prompts, session)
        except Exception as error:  # an interruption is no failure: the rows so far stay and the next run goes on
            with contextlib.suppress(OSError):  # a full disk: what went wrong is raised, recorded or not
                run.fail(error)
            raise
        rows = {row["example"] for row in run.rows()}
        # Else other shards have rows to add, or a failure to be read.
        if settings.shard.whole or {example.id for example in prompts.examples} <= rows:
            run.clear_failure()
            run.finish(len(rows))
    return run


def run_group(settings: Sequence[Settings], session: Session, *, wait: bool = True) -> bool:
    """Write the rows and divergences that these runs lack, as far as that goes together.

    A run that fails here is retried alone, by `run_job`. False where another process works on one of them, and wait is
    not set: then nothing was done.
    """
    settings[0].task.check()
    pairs = opened(settings)
    with ExitStack() as claims:
        try:
            # In one order: no process waits for one that waits for it.
            for wanted, run in sorted(pairs, key=lambda pair: pair[1].hash):
                notice, shard = waiting_notice(run), wanted.shard.name
                claims.enter_context(run.claim(timeout=None if wait else 0, waiting=notice, part=shard))
        except TimeoutError:
            return False
        prompts = Prompts(settings[0], _examples(settings[0], session))
        members = []
        for pair in pairs:
            with contextlib.suppress(ConfigError):  # a damaged file: `run_job` reports it
                members.append(Member(*pair, prompts.examples))
        if members:
            fill(members, prompts, session)
        whole = [run.hash for wanted, run in pairs if not Member(wanted, run, prompts.examples).lacking]
    session.filled_ahead.update(run.hash for _, run in pairs)
    session.complete_ahead.update(whole)
    return True


def why_alone(settings: Settings) -> str | None:
    """Why a run cannot share its prefill with others and write the rows it would write alone; None where it can."""
    task, decoding, model, name = settings.task, settings.decoding, settings.model, settings.labels["method"]
    reasons = {
        "another engine answers": settings.engine is not None and not settings.engine.gives_logits,
        f"model.dtype={model.dtype} on a CPU takes one row at a time": one_row_per_forward(
            model.dtype, model.resolved_device()
        ),
        "lm-eval's items are scored one by one": isinstance(task, LMEval),
        "the task scores a given text": task.only_nll,
        f"generation.num_beams={decoding.num_beams}": decoding.num_beams > 1,
        f"generation.prefill_chunk={decoding.prefill_chunk}": decoding.prefill_chunk is not None,
        "conversations of several turns part after the first": task.has_turns,
        "the budget depends on each question's length": settings.budget is not None and settings.budget.counts_ahead,
        f"method.score_batch=sum_all of {name}": shares_score_across_batch(settings),
        f"method={name} changes the prefill": settings.method.modifies_prefill,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def prefill_groups(wanted: Iterable[Settings]) -> list[list[Settings]]:
    """The runs, with their baselines, that share prefills: several each, in the order they were asked for."""
    alike: dict[str, dict[str, Settings]] = defaultdict(dict)
    for settings in wanted:
        if why_alone(settings) is None:
            base = settings if settings.is_baseline else settings.baseline()
            for member in (base, settings):
                alike[group_key(member)].setdefault(str(member.identity), member)
    return [list(group.values()) for group in alike.values() if len(group) > 1]


def group_key(settings: Settings) -> str:
    """Equal for runs that see the same prompts through the same model."""
    same = {key: settings.identity[key] for key in ("model", "task", "data", "generation", "beyond_context")}
    same["engine"] = settings.engine and settings.engine.reference().identity()
    extra = (
        settings.shard,
        settings.limit,
        settings.batch_size,
        settings.seed,
        settings.outputs_dir,
        settings.model.path,
    )
    return repr((sorted(same.items()), extra, getattr(settings.task, "size", None)))


def opened(wanted: Sequence[Settings]) -> list[tuple[Settings, Run]]:
    """The runs with their folders, each once."""
    by_name = {}
    for settings in wanted:
        baseline = None if settings.is_baseline else run_hash(settings.baseline().identity)
        known = (settings.outputs_dir, settings.identity, settings.labels, environment())
        run = Run.open(*known, baseline=baseline, command=settings.command)
        by_name[run.hash] = (settings, run)
    return list(by_name.values())


def waiting_notice(record: Run) -> Callable[[float], None]:
    """For `Run.claim`: says once that another process is at the run."""
    said: list[float] = []

    def print_waiting(seconds: float) -> None:
        if seconds > 1 and not said:  # less is a process that only asks whether anybody works on it
            said.append(seconds)
            say(f"{record.path} is being worked on by another process; waiting for it", flush=True)

    return print_waiting


# Filling: what each run lacks, in batches, processes and halves.


class Member:
    """A run while it is filled: its settings, its folder, and what it lacks, as (example, kind of work).

    wanted: kinds of work that are to be done, ANSWER and TEXTS; None: those the settings ask for. within: the examples
    that may be forced a text; None: all. commit: of the model. error: why it will be retried alone, which will tell
    more; skipped: why examples were left out, of reasons that differ in numbers alone the first.
    """

    def __init__(
        self,
        settings: Settings,
        run: Run,
        examples: Sequence[Example],
        wanted: Collection[str] | None = None,
        within: Collection[str] | None = None,
    ) -> None:
        self.settings, self.run = settings, run
        self.commit: str | None = None
        self.error: str | None = None
        self.skipped = dict[str, str]()
        if wanted is None:
            wanted = (*(() if settings.divergence.only else (ANSWER,)), *settings.divergence.texts)
        mine = {examples[place].id for place in settings.shard.takes(len(examples))}
        rows = run.rows()
        answered = {row["example"] for row in rows if not (settings.retry and row.get("failed"))}
        self.lacking = {(name, ANSWER) for name in mine - answered} if ANSWER in wanted else set()
        texts = [text for text in settings.divergence.texts if text in wanted and refusal(settings) is None]
        if texts:
            mine -= {row["example"] for row in rows if row.get("skipped")}
            forced = [e for e in examples if e.id in mine and (within is None or e.id in within)]
            for text in texts:
                self.lacking |= {(e.id, text) for e in forced if text != REFERENCE or e.reference.strip()}
            self.lacking -= run.divergence().keys()

    @property
    def title(self) -> str:
        """The run's name for a line of progress."""
        return run_name(self.settings.labels)

    def fail(self, error: BaseException) -> None:
        """Leave the rest of this run to `run_job`, which retries it alone."""
        self.error = f"{type(error).__name__}: {error}".rstrip(": ")

    def kinds(self, names: Collection[str]) -> list[str]:
        """The kinds of work that any of these examples lacks; none of a run that will be retried alone."""
        kinds = () if self.error is not None else (ANSWER, *TEXTS)
        return [kind for kind in kinds if any((name, kind) in self.lacking for name in names)]

    def write(self, rows: Sequence[Row], lines: Sequence[Line]) -> Iterator[bool]:
        """Write what was missing; True for each row and False for each line. A skipped example is forced no text."""
        rows = [row for row in rows if (row["example"], ANSWER) in self.lacking]
        lines = [line for line in lines if (line["example"], line["text"]) in self.lacking]
        if rows:
            self.run.append(*(validated_row(row, self.commit) for row in rows))
        if lines:
            self.run.append_divergence(lines)
        self.lacking -= {(row["example"], ANSWER) for row in rows}
        self.lacking -= {(line["example"], line["text"]) for line in lines}
        yield from (True for _ in rows)
        yield from (False for _ in lines)

    def skip(self, prompts: Items) -> Iterator[bool]:
        """Write rows that say why these prompts are skipped; they are forced no text either."""
        yield from self.write([skipped_row(self.settings, *item) for item in prompts], [])
        for _, prompt in prompts:
            self.skipped.setdefault(re.sub(r"\d+", "", str(prompt.skipped)), str(prompt.skipped))
        self.lacking -= {(prompt.example.id, text) for _, prompt in prompts for text in TEXTS}


def fill(members: Sequence[Member], prompts: Prompts, session: Session) -> None:
    """Do what claimed runs of the same prompts lack, and write it as it comes.

    The answers of a run alone are timed, batch by batch in one process, and what goes wrong is raised. Several runs
    share each prefill, and one that fails is retried alone; where only one of them lacks anything, all is.
    """
    lead = members[0].settings
    shared = 1 if shares_score_across_batch(lead) else MAX_QUESTIONS_PER_CONTEXT
    # Batches of the whole task, not of the missing examples: the last digits of a float32 sum depend on the rows of a
    # batch, and a run that goes on is to write what it would have written undisturbed.
    every = batches(list(enumerate(prompts.examples)), lead.batch_size, shared)
    work = [batch for batch in every if any(m.kinds([example.id]) for m in members for _, example in batch)]
    names = [example.id for batch in work for _, example in batch]
    if sum(bool(m.kinds(names)) for m in members) < min(2, len(members)):
        return
    timed = len(members) == 1 and ANSWER in members[0].kinds(names)
    for member in members:
        engine = member.settings.engine
        check_threads(member.run, lead.model, environment()["threads"], engine.halves if engine else "")
        if not timed:
            try:
                check_beforehand(member.settings, prompts)
            except ConfigError as error:
                member.fail(error)
        check_prompts(member.settings, member.run, prompts)
    if not any(member.kinds(names) for member in members):
        return
    model, tokenizer = load(lead.model)
    prompts.use(model, tokenizer)
    commit = hub_commit(model)
    for member in members:
        check_commit(member.run, commit)
        member.settings, member.commit = with_stop_tokens(member.settings, model, tokenizer), commit
    size = 1 if timed else _processes(members, model, prompts, work)
    title = _title(members, names)
    title += f", in {size} processes" if size > 1 else ""
    filler = Filler(members, prompts, model, tokenizer, title, size, timed)
    if timed:
        runnable = (items for batch in work if (items := prompts.for_run(lead, batch)[0]))
        warm_up(members[0].settings, model, tokenizer, next(runnable, []))
    groups = [[batch] for batch in work]
    if not timed:
        groups = decode_groups(work, members, size, *_cost(members, model, prompts, work, size))
    lacking = [kind for member in members if member.error is None for _, kind in member.lacking]
    answers = lacking.count(ANSWER)
    prompts_read = len({example.prompt for batch in work for _, example in batch})
    parts = {PROMPTS: prompts_read, ANSWERS: answers, FORCED: len(lacking) - answers}
    with ForkPool(size, filler.made) as pool, Progress(title, len(lacking), 0, work=parts) as progress:
        for is_row in pool.imap(groups):
            progress.advance(kind=ANSWERS if is_row else FORCED)
            session.rows_written += is_row
            session.texts_measured += not is_row
    free_memory()


def _title(members: Sequence[Member], names: Collection[str]) -> str:
    """What is being done, for a line of progress."""
    kinds = [member.kinds(names) for member in members]
    answers = any(ANSWER in lacking for lacking in kinds)
    forced = sum(any(kind in TEXTS for kind in lacking) for lacking in kinds)
    labels = members[0].settings.labels
    if forced and not answers:
        return f"divergence of {forced} run{'s' * (forced != 1)}, {labels['model']}, {labels['task']}"
    if len(members) == 1:
        return members[0].title
    evicting = sum(not member.settings.is_baseline for member in members)
    full = " and the full cache" if evicting < len(members) else ""
    return f"{evicting} run{'s' * (evicting != 1)}{full} that share each prompt's prefill"


def decode_groups(
    work: Sequence[Batch], members: Sequence[Member], processes: int, seconds: float = 0.0, share: float = 1.0
) -> list[list[Batch]]:
    """The batches in groups whose answers are decoded in the same steps; seconds, share: of a batch, see `batch_cost`.

    Each batch by itself where prompts would change each other.
    """
    lead = members[0].settings
    most = 1 if rows_alone(lead.model) else max(1, MAX_DECODE_ROWS // (len(members) * lead.batch_size))
    ends = list(itertools.accumulate(group_sizes(len(work), processes, most, seconds, share), initial=0))
    return [list(work[start:end]) for start, end in itertools.pairwise(ends)]


def group_sizes(batches: int, processes: int, most: int, seconds: float = 0.0, share: float = 1.0) -> list[int]:
    """Batches of each group: as even as they go, enough for all processes, at most `most`.

    Where a batch takes over a second, the first of each process is a group by itself, so that rows come soon, and the
    others are as few together as WEIGHT_SHARE allows, and no more than MAX_UNWRITTEN_S does.
    """
    first = 0
    if seconds > 1:
        most = max(1, min(most, int(MAX_UNWRITTEN_S / seconds), math.ceil(share / WEIGHT_SHARE)))
        first = min(batches, processes)
    left = batches - first
    count = min(left, processes * -(-left // (processes * most)))
    return [1] * first + [left * (place + 1) // count - left * place // count for place in range(count)]


def batch_cost(parameters: int, tokens: float, new: int, cores: float) -> tuple[float, float]:
    """Seconds that a batch takes on so many CPU cores, and the share of them that reading the model's weights adds.

    tokens: read, written and forced, of all rows; new: of a row's answer.
    """
    return 2.0 * tokens * parameters / (CORE_FLOPS * cores), WEIGHT_ROWS * new / max(1.0, tokens)


def _cost(
    members: Sequence[Member], model: Model, prompts: Prompts, work: Sequence[Batch], processes: int
) -> tuple[float, float]:
    """`batch_cost` of the first batch of which a prompt can be answered; nothing on a GPU, which is fast."""
    if model.device.type != "cpu" or MAX_UNWRITTEN_ROWS is None:
        return 0.0, 1.0
    runnable = (items for batch in work if (items := prompts.for_run(members[0].settings, batch)[0]))
    items, new = next(runnable, []), members[0].settings.decoding.max_new_tokens
    kinds = sum(len(member.kinds([prompt.example.id for _, prompt in items])) for member in members)
    tokens = sum(prompt.size + kinds * new for _, prompt in items)
    return batch_cost(model.num_parameters(), tokens, new, environment()["threads"] / processes)


def _processes(members: Sequence[Member], model: Model, prompts: Prompts, work: Sequence[Batch]) -> int:
    """How many processes to share the batches among: one for every thread, or one that has all threads.

    One where processes would wait for work or for memory.
    """
    lead, several = members[0].settings, num_workers(model)
    rounds = -(-len(work) // several)
    if lead.engine is not None or several < 2 or rounds * several > MIN_UTILISATION * len(work):
        return 1
    prepare_for_fork(model)
    first = Piece(list(members), prompts.for_run(lead, work[0])[0])
    return several if fit_together([first.batch()], model, several) else 1


@dataclass(frozen=True)
class Piece:
    """Prompts of a batch that all of these runs can answer."""

    members: list[Member]
    prompts: Items

    @property
    def names(self) -> list[str]:
        """The examples' ids."""
        return [prompt.example.id for _, prompt in self.prompts]

    def pending(self) -> Piece:
        """The piece for the runs that still lack some of it."""
        return Piece([member for member in self.members if member.kinds(self.names)], self.prompts)

    def batch(self) -> PromptBatch:
        """Who answers and who is forced which texts; the full cache's run is added at the end where it lacks."""
        runs, answering, texts = [member.settings for member in self.members], list[int](), dict[str, list[int]]()
        for place, member in enumerate(self.members):
            for kind in member.kinds(self.names):
                (answering if kind == ANSWER else texts.setdefault(kind, [])).append(place)
        full = next((place for place, settings in enumerate(runs) if settings.is_baseline), len(runs))
        if texts and full == len(runs):
            runs.append(runs[0].baseline())
        return PromptBatch(runs, self.prompts, answering, texts, full)

    def halves(self) -> list[Piece]:
        """Half of the runs each; of a run alone half of the prompts each."""
        members, prompts = self.members, self.prompts
        if (middle := len(members) // 2) > 0:
            return [Piece(members[:middle], prompts), Piece(members[middle:], prompts)]
        middle = len(prompts) // 2
        return [Piece(members, prompts[:middle]), Piece(members, prompts[middle:])]


Part = tuple[Member, list[Row], list[Line]]  # what a run made of some prompts, to be written


class Filler:
    """Fills missing rows and KL texts of several runs; halves a batch that runs out of memory."""

    def __init__(
        self,
        members: Sequence[Member],
        prompts: Prompts,
        model: Model,
        tokenizer: Tokenizer,
        title: str,
        processes: int,
        timed: bool,
    ) -> None:
        self.members, self.prompts, self.model, self.tokenizer = members, prompts, model, tokenizer
        self.title, self.processes, self.timed = title, processes, timed
        self.told_halved = False
        lead = members[0].settings
        # In half precision a row's numbers depend on what it is decoded together with, so nothing is parted.
        self.most = MAX_UNWRITTEN_ROWS if lead.model.dtype == FULL else None

    def made(self, batches: Sequence[Batch]) -> Iterator[bool]:
        """Make and write what is lacking of the batches; yields True for each row, False for each text."""
        pieces: list[Piece] = []
        for batch in batches:
            alike: dict[tuple[int, ...], Piece] = {}
            for member in self.members:
                if member.kinds([example.id for _, example in batch]):
                    runnable, skipped = self.prompts.for_run(member.settings, batch)
                    yield from member.skip(skipped)
                    # A budget may be too small for some of the prompts: only runs that skip the same go together.
                    key = tuple(index for index, _ in runnable)
                    alike.setdefault(key, Piece([], runnable)).members.append(member)
            pieces += [piece for key, piece in alike.items() if key]
        for member, rows, lines in self._parts(pieces):
            yield from member.write(rows, lines)

    def _parts(self, pieces: list[Piece], halved: int = 0) -> Iterator[Part]:
        """What members make of the pieces, together or in halves; to be written before the next is asked for."""
        pieces = [piece for before in pieces if (piece := before.pending()).members]
        if not pieces:
            return
        members, items = pieces[0].members, pieces[0].prompts
        batches = [piece.batch() for piece in pieces]
        alone = len(pieces) == 1 and len(members) == 1
        if not alone and not self._fit(batches):
            for half in self._halves(pieces):
                yield from self._parts(half, halved)
            return
        try:
            yield from self._computed(pieces, batches, halved)
            return
        except Exception as error:
            too_large = is_out_of_memory(error)
            if alone and not too_large:
                if self.timed and isinstance(error, NotFinite):
                    raise self._located(error, pieces, batches) from error
                if self.timed:
                    raise
                members[0].fail(error)
                # It is retried alone, with a longer message, when the group is done, and that can be hours from now.
                say(f"{members[0].title} failed, the other runs go on: {members[0].error}", file=sys.stderr)
        free_memory()  # outside of the handler, where the traceback no longer holds what the failed attempt allocated
        if alone and self.timed and len(items) == 1:
            rows = [{**failed_row(members[0].settings, *items[0]), "halved": halved}]
            yield members[0], rows, []
        elif not alone or self.timed:  # one of a group is retried alone
            if too_large:
                self._tell_halved()
            for half in self._halves(pieces):
                yield from self._parts(half, halved + (len(pieces) == 1))

    def _fit(self, batches: Sequence[PromptBatch]) -> bool:
        """Whether there is memory for the batches together, if need be once what was freed is given back."""
        if fit_together(batches, self.model, self.processes):
            return True
        free_memory()
        fits = fit_together(batches, self.model, self.processes)
        if not fits:
            self._tell_halved()
        return fits

    def _tell_halved(self) -> None:
        """Say once that memory is too short for what was to be computed together."""
        if not self.told_halved:
            say(f"{self.title}: too little memory for all at once: in parts, which is slower", file=sys.stderr)
        self.told_halved = True

    @staticmethod
    def _halves(pieces: list[Piece]) -> list[list[Piece]]:
        """Half of several pieces each, or the two halves of the one."""
        if (middle := len(pieces) // 2) > 0:
            return [pieces[:middle], pieces[middle:]]
        return [[piece] for piece in pieces[0].halves()]

    def _computed(self, pieces: Sequence[Piece], batches: Sequence[PromptBatch], halved: int) -> Iterator[Part]:
        meter = LoadMeter() if self.timed and self.model.device.type == "cpu" else None
        for outputs in outputs_of_batches(self.model, self.tokenizer, batches, self.most):
            piece = pieces[outputs.batch]
            if outputs.run == len(piece.members):  # the full cache's, which was added for the texts
                continue
            member, rows = piece.members[outputs.run], []
            for index, prompt in piece.prompts:
                if index in outputs.answers and (prompt.example.id, ANSWER) in member.lacking:
                    answer = outputs.answers[index] if self.timed else outputs.answers[index].untimed
                    row = row_of(member.settings, self.model, self.tokenizer, index, prompt, answer)
                    load = None if meter is None else machine_load(meter)
                    rows.append({**row, "halved": halved} | ({} if load is None else {"load": load}))
            yield member, rows, outputs.lines

    def _located(self, error: NotFinite, pieces: Sequence[Piece], batches: Sequence[PromptBatch]) -> NotFinite:
        """The error, which also says the layer and the examples."""
        where = _first_not_finite(self.model, lambda: list(self._computed(pieces, batches, 0)))
        name = str(self.model.dtype).removeprefix("torch.")
        advice = "; float16 ends at 65504: try model.dtype=bfloat16 or float32" if name == "float16" else ""
        return NotFinite(f"{error} ({where}; examples {', '.join(pieces[0].names)}){advice}")


def _first_not_finite(model: Model, make: Callable[[], Any]) -> str:
    """Name the place where the first number that is not finite comes from, when `make` is called again."""
    from kvexp.hf.load import first_not_finite

    with first_not_finite(model) as modules:
        try:
            make()
        except NotFinite:
            pass
        else:
            return "but not when the same batch was run again: is this machine's memory sound?"
    if not modules:
        return "in no module's output, so in an attention score or in the cache"
    number = re.search(r"\.(\d+)(?:\.|$)", modules[0])
    return f"first in layer {number[1]}, module {modules[0]}" if number else f"first in module {modules[0]}"


def warm_up(settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items) -> None:
    """A short generation before the first that is timed: the beginnings of a batch's prompts under the run's method.

    What a process does once (reading weights in, laying them out, compiling kernels) is no part of any method's time;
    full, which runs first, would pay for all others.

    Under full attention where the budget of so short a prompt does not hold what the method protects. What else goes
    wrong will go wrong again with the batch itself, which tells.
    """
    # Choices, but lm-eval's, are judged from forks of one prefill: their rows hold no times.
    answerable = [prompt for _, prompt in batch if isinstance(prompt.example, Item) or not prompt.example.choices]
    if not answerable:
        return
    if settings.engine is not None:  # which compiles its kernels here, and loads the model
        few = replace(settings, decoding=replace(settings.decoding, max_new_tokens=NEW, min_new_tokens=0))
        for prompt in answerable:
            engine_answer(few, model, tokenizer, prompt.ids[:PROMPT], 0)
        return
    prompts = [prompt.ids[:PROMPT] for prompt in answerable]
    failed = True
    with contextlib.suppress(CacheError, MemoryError, RuntimeError):
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


def _generate_few(settings: Settings, model: Model, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    from kvexp.generate import generate

    decoding = dataclasses.replace(settings.decoding, max_new_tokens=NEW, min_new_tokens=0, eos=None)
    cache = batch_cache(settings, [len(ids) for ids in prompts])
    mask = [[1] * len(ids) for ids in prompts]
    generate(model, prompts, cache, attention_mask=mask, decoding=decoding, tokenizer=tokenizer)


# Divergences that no group of the sweep has measured: a run alone, against the full cache.


UNKNOWN = "prompts that its budget does not hold, or too little memory"  # said by a process that has ended


def measure_rest(settings: Settings, session: Session) -> Run:
    """Force the texts that one run lacks; says on stderr what cannot be. Returns the run.

    ConfigError where the divergence is all the run is for (divergence=only), and none of its texts could be forced.
    """
    only = settings.divergence.only  # then nothing else has made the baseline's folder
    run = opened([settings.baseline(), settings] if only else [settings])[-1][1]
    if (why := refusal(settings)) is not None:
        if generates(settings):
            session.add_unmeasured(run_name(settings.labels), why)
        return run
    with run.claim(waiting=waiting_notice(run), part=settings.shard.name):
        lines = measure([(settings, run)], session) or []
        for line in lines:
            say(line, file=sys.stderr)
    if lines and only and not run.divergence():
        raise ConfigError("no KL pass was made, so the run has no divergence, and divergence=only writes no answers")
    return run


def measure(
    pairs: Sequence[tuple[Settings, Run]], session: Session, within: Mapping[str, Collection[str]] | None = None
) -> list[str] | None:
    """Force the texts that claimed runs of one group lack; returns a line for each that some are missing of still.

    within: hash -> the examples that may be forced, of each run. None where no text was lacking.
    """
    prompts = Prompts(pairs[0][0], list(pairs[0][0].task.examples()))

    def members() -> list[Member]:
        known = (within or {}).get
        return [Member(*pair, prompts.examples, TEXTS, known(pair[1].hash)) for pair in pairs]

    lacking = [member for member in members() if member.lacking]
    if not lacking:
        return None
    fill(lacking, prompts, session)
    by_hash = {member.run.hash: member for member in lacking}
    lines = []
    for after in members():  # read again: other processes may have written
        if after.lacking:
            before = by_hash.get(after.run.hash, after)
            why = before.error or "; ".join(before.skipped.values()) or UNKNOWN
            lines.append(f"divergence of {after.title}: {len(after.lacking)} KL passes were not made ({why})")
    return lines


def measure_claimed(runs: Iterable[Run], texts: Sequence[str]) -> dict[str, str]:
    """Force recorded runs the texts that they lack, runs of the same prompts together.

    Returns hash -> why a run cannot have a divergence.
    """
    runs = sorted(runs, key=lambda run: run.hash)  # all processes in one order: none waits for one that waits for it
    refused: dict[str, str] = {}
    groups: dict[str, list[tuple[Settings, Run]]] = defaultdict(list)
    within: dict[str, set[str]] = {}
    with ExitStack() as claims:
        for run in runs:
            claims.enter_context(run.claim(waiting=waiting_notice(run), part="divergence"))
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
            _check_data(pairs[0][0])
            lines = measure(pairs, Session(), within)
            if lines is None:
                labels = pairs[0][0].labels
                title = f"divergence of {len(pairs)} runs, {labels['model']}, {labels['task']}"
                say(f"{title}: all KL passes are made already")
            for line in lines or []:
                say(line)
    return refused


# A run folder back to its settings and examples.


def settings_at(run: Run) -> Settings:
    """The settings of a run, as it was asked for (a baseline: as a run was of which it is the baseline).

    ConfigError where code or files have changed since.
    """
    command, again = run.command, "run the same command again (its rows stay as they are)"
    if command is None:
        raise ConfigError(f"{run.path} does not know how it was asked for: {again}")
    try:
        config, choices, overrides = (command[name] for name in ("config", "choices", "overrides"))
        if not (isinstance(config, dict) and isinstance(choices, dict)):
            raise ValueError("config and choices must be groups")
        if not (isinstance(overrides, list) and all(isinstance(word, str) for word in overrides)):
            raise ValueError("overrides must be a list of texts")
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{run.path / 'command.json'}: {type(error).__name__}: {error}; {again}") from error
    check_stored(config)
    given = ({**config, "outputs_dir": str(run.path.parent)}, choices, overrides)
    for variant in settings_of(*given).parts():
        for settings in (variant, variant.baseline()):
            if run_hash(settings.identity) == run.hash:
                return settings
    raise ConfigError(
        f"{run.path} was made with other files or another version of kvexp: model, data or settings have changed "
        "since its rows were written; run it again"
    )


def examples_of(settings: Settings, rows: list[Row]) -> list[Example]:
    """The examples of the rows, in the order of the task."""
    wanted = {row["example"] for row in rows}
    settings = with_limit_of(settings, 1 + max(row["index"] for row in rows))
    todo = [(i, example) for i, example in enumerate(settings.task.examples()) if example.id in wanted]
    _check_data(settings)
    if missing := wanted - {example.id for _, example in todo}:
        raise ConfigError(f"the task has no example {sorted(missing)[0]} any more: its data or task.size have changed")
    return [example for _, example in fit_examples(settings, tokenizer_of(settings.model), todo)]


def _check_data(settings: Settings) -> None:
    """ConfigError where the task's examples, once they were read, are not those that identify the run."""
    if settings.task.pinned != settings.identity["data"]:
        raise ConfigError(f"{settings.task.source} has changed since; start again when nothing writes to it")


def with_limit_of(settings: Settings, count: int) -> Settings:
    """The settings with a limit of `count` examples; rows may have been made under several limits.

    Only where a limit takes the first examples: other settings come back as they are.
    """
    if settings.task.sample != "first":
        return settings
    return dataclasses.replace(settings, limit=count, task=dataclasses.replace(settings.task, limit=count))
