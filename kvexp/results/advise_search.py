"""Rows for `kvexp advise`, made of as few prompts as its question takes, and bytes that no row holds.

The first half of the prompts chooses: some of them, then half, then all, with fewer methods each time (successive
halving), and the budgets of a method bisected, as if less of a cache never lost less. What this half finds may be wrong
and only costs bytes: the other half tests the budgets around each method's last one, as `kvexp.results.advise` does
with any rows. Runs share their prefills and answer nothing (divergence=only), but where scores are asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kvexp.results import promise
from kvexp.results.advise import (
    FOLDER,
    Candidate,
    Recorded,
    Terms,
    hope,
    keep_plan,
    kept_plan,
    recorded,
    terms_key,
)
from kvexp.results.curves import job_of
from kvexp.results.read import read_runs
from kvexp.run.batches import settings_at
from kvexp.run.compose import ROWS, quoted, task_of_rows, with_places, with_user_classes
from kvexp.run.jobs import interruptible, run_jobs, runs_of
from kvexp.run.labels import OF_EVICTION, Shard
from kvexp.run.plan import Planned, PlannedGroup, Workload, model_shape, seconds_of, slots_bytes, slots_of, workload_of
from kvexp.run.session import Session, active, keys_of
from kvexp.run.settings import Settings
from kvexp.run.store import OWN, Run, run_hash
from kvexp.tasks.data import json_rows
from kvexp.util.errors import ConfigError
from kvexp.util.files import path_of
from kvexp.util.output import duration, say

METHODS = (
    *("keyformer", "h2o", "a2sf", "snapkv", "tova", "caote", "expected_attention", "kvzip", "streaming_llm"),
    "full_quantised",  # every token, in fewer bits
)
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
BITS = (8, 4, 2)
LEAST = 4  # prompts of the first round, if a quarter of all has as many
EIGHTHS = 8  # of all prompts, tested one after the other
BEFORE, BEHIND = 1, 1  # budgets tested before and behind the cheapest that the choosing half finds fine
TASKS = {field: task for field, task in ROWS.items() if task != "context_qa"}  # whose questions have an order


@functools.lru_cache(maxsize=4096)
def _settings_of(path: Path) -> Settings:
    return settings_at(Run.load(path))


def planned_share(run: Run, rows: Iterable[Mapping[str, Any]]) -> float:
    """Bytes of a run's cache over the full cache's, for a prompt as long as these rows' are in the mean, at 16 bits.

    ConfigError where no row has a length.
    """
    prompts = [row["prompt_tokens"] for row in rows if row.get("prompt_tokens")]
    if not prompts:  # the full cache of divergence=only answers nothing
        raise ConfigError(
            f"{run.path}: how many bytes it saves is not known, as its full cache has no rows: run both with "
            "divergence=true"
        )
    settings = _settings_of(run.path)
    shape = model_shape(settings.model)
    if shape is None:
        raise ConfigError(f"the shape of {settings.model.path} is not known here")
    task = replace(settings.task, max_new_tokens=1, min_new_tokens=0)
    decoding = replace(settings.decoding, max_new_tokens=1, min_new_tokens=0)
    at = replace(settings, model=replace(settings.model, dtype="bfloat16"), task=task, decoding=decoding)
    full = replace(at, cache=settings.baseline().cache)
    kept, whole = (slots_bytes(shape, run_at, slots_of(run_at, fmean(prompts))) for run_at in (at, full))
    return kept / whole


# The search.


@dataclass(frozen=True)
class Arm:
    """A method that is tried: what `methods=` calls it, and the words of each budget, from the dearest."""

    name: str
    words: tuple[str, ...]
    budgets: tuple[str, ...]

    @classmethod
    def of(cls, name: str, budgets: Sequence[float]) -> Arm:
        """Read METHOD, METHOD+SETTING=VALUE or full_quantised."""
        method, *settings = name.split("+")
        if method == "full_quantised":
            return cls(name, ("method=full", *settings), tuple(f"cache.bits={bits}" for bits in BITS))
        if method == "full":
            raise ConfigError(
                "methods: the full cache is what the others are compared with; full_quantised is it in bits"
            )
        ratios = tuple(f"kv_ratio={ratio:g}" for ratio in sorted(budgets, reverse=True))
        return cls(name, (f"method={method}", *settings), ratios)


@dataclass
class Bracket:
    """Budgets of an arm by what the prompts so far say: all to `fine` are fine, those from `bad` on are not."""

    fine: int
    bad: int

    @property
    def next(self) -> int | None:
        """The budget to try; None where the bracket is closed."""
        return None if self.bad - self.fine == 1 else (self.fine + self.bad) // 2

    def learn(self, at: int, is_fine: bool) -> None:
        """Narrow it by the budget at a place."""
        self.fine, self.bad = (max(self.fine, at), self.bad) if is_fine else (self.fine, min(self.bad, at))
        self.fine = min(self.fine, self.bad - 1)


class Search:
    """One question about prompts that are to be run. common: words of all of its jobs; arms: what is tried."""

    def __init__(self, terms: Terms, session: Session) -> None:
        self.terms, self.session = terms, session
        if refused := sorted(keys_of(terms.words) & {"method", "kv_ratio", "divergence"}):
            raise ConfigError(f"advise sets {refused[0]} itself: leave it out, and name methods= and budgets= to try")
        words = with_user_classes(with_places(terms.words))
        only = "divergence=false" if terms.loss == "score_loss" else "divergence=only"
        self.common = [*words, *_words_of_data(terms, words), only]
        self.arms = [Arm.of(name, terms.budgets or BUDGETS) for name in dict.fromkeys(terms.methods or METHODS)]
        self.budgets = {arm.name: arm.budgets for arm in self.arms}
        self.failed: dict[tuple[str, int], str] = {}
        self.known: dict[tuple[str, int], Settings] = {}
        known = [settings for arm in self.arms if (settings := self._checked(arm)) is not None]
        if not known:
            raise ConfigError(f"none of the methods can be tried: {next(iter(self.failed.values()))}")
        self.lead = known[0]
        self.arms = [arm for arm in self.arms if (arm.name, 0) not in self.failed]
        self.examples = [example.id for example in self.lead.task.examples()]
        self.hashes: dict[tuple[str, int], str] = {}  # of runs that there may be
        self.baseline = run_hash(self.lead.baseline().identity)
        self.plan = self.lead.outputs_dir / FOLDER / f"{self.baseline}.json"

    def _checked(self, arm: Arm) -> Settings | None:
        """The settings of an arm, before any model loads; None for one that cannot be, an error if it was named."""
        try:
            return self.settings(arm, 0)
        except ConfigError as error:
            if self.terms.methods:
                raise
            self.failed[arm.name, 0] = str(error)
            return None

    @property
    def choosing(self) -> list[str]:
        """The prompts of the first half of the parts."""
        return self.examples[: len(self.examples) // 2]

    @property
    def promising(self) -> list[str]:
        return self.examples[len(self.examples) // 2 :]

    @property
    def may(self) -> int:
        """How many promising prompts may be beyond the limit."""
        many = self.terms.many(len(self.promising))
        return promise.most_beyond(len(self.promising), self.terms.share, self.terms.error / many)

    def words(self, arm: Arm, at: int) -> list[str]:
        """The words of a run: an arm at the place of a budget."""
        return [*self.common, *arm.words, arm.budgets[at]]

    def settings(self, arm: Arm, at: int) -> Settings:
        """The settings of a run, checked."""
        if (arm.name, at) not in self.known:
            (self.known[arm.name, at],) = runs_of(job_of(self.words(arm, at)), self.session)
        return self.known[arm.name, at]

    def name(self, arm: Arm, at: int) -> str:
        """The hash of a run, by which chains name it."""
        return run_hash(self.settings(arm, at).identity)

    def run(self, wanted: Collection[tuple[Arm, int]], shard: str) -> None:
        """Make what these runs lack of a part of the prompts; one that fails is not tried again."""
        keys = {(arm.name, at): arm for arm, at in wanted if (arm.name, at) not in self.failed}
        jobs = {key: job_of([*self.words(arm, key[1]), f"shard={shard}"]) for key, arm in keys.items()}
        # The full cache first: its answers, which the others are forced along, are then rows with lengths and bytes.
        plain = [word for word in self.common[:-1] if not word.startswith(OF_EVICTION)]
        full = job_of([*plain, "method=full", "divergence=false", f"shard={shard}"])
        before = len(self.session.failures)
        run_jobs([full, *jobs.values()], self.session)
        why = {failure.job: failure.why for failure in self.session.failures[before:]}
        # Rows say nothing of a prompt on which a run failed: without a loss there, it is beyond any limit.
        prompts = Shard.read(shard).takes(len(self.examples))
        tried = {self.name(arm, key[1]): {shard: [prompts.start, prompts.stop]} for key, arm in keys.items()}
        keep_plan(self.plan, {"tried": tried})
        for key, job in jobs.items():
            if job.name in why:
                self.failed[key] = why[job.name]
            else:
                self.hashes[key] = self.name(keys[key], key[1])

    def found(self) -> Recorded:
        """The runs so far."""
        runs = read_runs(self.lead.outputs_dir, {"hash": [*self.hashes.values(), self.baseline]})
        records = [record for record in recorded(runs, self.terms.loss) if record.baseline.run.hash == self.baseline]
        if not records:
            reason = next(iter(self.failed.values()), "no answer has two tokens")
            raise ConfigError(f"none of the methods could be run on these prompts: {reason}")
        return records[0]

    def candidates(self) -> dict[tuple[str, int], Candidate]:
        """(arm, place of the budget) -> its losses so far."""
        by_hash = {candidate.name: candidate for candidate in self.found().candidates}
        return {key: by_hash[name] for key, name in self.hashes.items() if name in by_hash}

    def is_fine(self, candidate: Candidate, count: int) -> bool:
        """Whether the first prompts say a budget is worth a test: half as likely to hold as one that lost nothing."""
        losses, n = candidate.of(self.examples[:count]), len(self.promising)
        beyond = int(self.terms.is_beyond(losses).sum())
        best = promise.chance(0, len(losses), n, self.may)
        return promise.chance(beyond, len(losses), n, self.may) >= best / 2

    @property
    def rungs(self) -> list[tuple[int, int]]:
        """(n over the prompts, methods) of each round of the choosing half."""
        n, many, left = len(self.examples), self.terms.many(len(self.promising)), len(self.arms)
        first = next((parts for parts in (16, 8) if n // parts >= LEAST), 4)
        half = min(left, max(many + 1, math.ceil(left / 2)))
        return [(first, left), (4, half), (2, min(left, many))]

    def choose(self) -> list[list[str]]:
        """The chains to be tested, as hashes of runs, by the choosing half alone."""
        arms, brackets = list(self.arms), {arm.name: Bracket(-1, len(arm.budgets)) for arm in self.arms}
        for rung, (parts, most) in enumerate(self.rungs):
            arms, count = arms[:most], len(self.examples) // parts
            say(f"choosing by {count} prompts: {', '.join(arm.name for arm in arms)}", flush=True)
            if rung:  # more prompts: what seemed fine may not be, and what did not will not
                brackets = {arm.name: Bracket(-1, brackets[arm.name].fine + 1) for arm in arms}
            while wanted := _next(arms, brackets, latest=rung > 0):
                self.run(wanted, f"0/{parts}")
                losses = self.candidates()
                for arm, at in wanted:
                    candidate = losses.get((arm.name, at))  # none of a run that failed, or whose answers have no loss
                    brackets[arm.name].learn(at, candidate is not None and self.is_fine(candidate, count))
            arms = self._best(arms, count)
        return [
            [self.name(arm, at) for at in range(fine - BEFORE, fine + BEHIND + 1) if 0 <= at < len(arm.budgets)]
            for arm in arms
            if (fine := brackets[arm.name].fine) >= 0
        ]

    def _best(self, arms: Sequence[Arm], count: int) -> list[Arm]:
        """Arms by the bytes that they are likely to save with a promise, by the first prompts; most first."""
        tried: dict[str, list[Candidate]] = {arm.name: [] for arm in arms}
        for (name, _), candidate in sorted(self.candidates().items(), key=lambda item: item[0][1]):
            if name in tried:
                tried[name].append(candidate)
        first, n = self.examples[:count], len(self.promising)
        saved = {name: hope(chain, first, n, self.terms)[0] if chain else -math.inf for name, chain in tried.items()}
        return sorted(arms, key=lambda arm: -saved[arm.name])

    def test(self, chains: Sequence[Sequence[str]]) -> None:
        """Run the promising half, part by part, as long as a chain has a budget that may still hold."""
        places = {self.name(arm, at): (arm, at) for arm in self.arms for at in range(len(arm.budgets))}
        self.hashes |= {
            (arm.name, at): name for name, (arm, at) in places.items()
        }  # also what a command before has run
        left = [[places[name] for name in chain if name in places] for chain in chains]
        most = promise.most_beyond(len(self.promising), self.terms.share, self.terms.error)
        for eighth in range(EIGHTHS // 2, EIGHTHS):
            wanted = [key for chain in left for key in chain]
            if not wanted:
                break
            ends = (len(self.examples) * end // EIGHTHS for end in (eighth, eighth + 1))
            say(f"testing {len(wanted)} budget{'s' * (len(wanted) != 1)} with prompts {next(ends) + 1} to {next(ends)}")
            self.run(wanted, f"{eighth}/{EIGHTHS}")
            losses = self.candidates()
            lost = {key for key in wanted if self._beyond(losses.get((key[0].name, key[1]))) > most}
            # Behind the first that cannot hold any more nothing is tested.
            left = [list(itertools.takewhile(lambda key: key not in lost, chain)) for chain in left]  # noqa: B023

    def _beyond(self, candidate: Candidate | None) -> int:
        """How many promising prompts are beyond the limit so far; all of them of a run that failed."""
        if candidate is None:
            return len(self.promising)
        return int(self.terms.is_beyond(candidate.of(self.promising)).sum())

    def seconds(self) -> list[tuple[str, float | None]]:
        """(stage, seconds) of the whole search at most, but for rows that are there: by the plan of `kvexp run`."""
        n, first = len(self.examples), len(self.arms)
        steps = math.ceil(math.log2(max(len(arm.budgets) for arm in self.arms) + 1))
        stages, seen = [], 0
        for parts, methods in self.rungs:  # after the first: the budget that seemed fine, and one dearer
            count = n // parts
            prompts_and_steps = (count, steps) if not seen else (2 * count - seen, 1)
            stages.append((f"{methods} methods by {count} prompts", methods, *prompts_and_steps))
            seen = count
        (_, many), left = self.rungs[-1], n - n // 2
        stages.append((f"{many} methods tested with {left} prompts", many * (BEFORE + BEHIND + 1), left, 1))
        known: dict[Any, Workload] = {}
        stage_seconds: list[tuple[str, float | None]] = []
        for name, runs, prompts, times in stages:
            planned = []
            for place in range(runs):
                arm = self.arms[place % first]
                settings = self.settings(arm, len(arm.budgets) // 2)
                scored = self.terms.loss == "score_loss"
                lacks = (prompts, {}) if scored else (0, {OWN: prompts})
                planned.append(Planned(settings, workload_of(settings, known), *lacks))
            seconds, _ = seconds_of(PlannedGroup(planned))
            stage_seconds.append((name, None if seconds is None else seconds * times))
        return stage_seconds


def _next(arms: Sequence[Arm], brackets: Mapping[str, Bracket], *, latest: bool) -> list[tuple[Arm, int]]:
    """The budget that each arm is to be tried at; latest: the cheapest that may be fine, before any dearer one."""
    wanted = []
    for arm in arms:
        bracket = brackets[arm.name]
        if (at := bracket.next) is not None:
            wanted.append((arm, bracket.bad - 1 if latest else at))
    return wanted


def _words_of_data(terms: Terms, words: Sequence[str]) -> list[str]:
    """The words that `data=FILE` stands for: the task that reads such rows, all in an order drawn by a seed."""
    if terms.data is None:
        return []
    keys = {word.lstrip("+").partition("=")[0] for word in words}
    task_words = [] if "task" in keys else [f"task={task_of_rows(terms.data, 'data', TASKS)}"]
    task_words += [] if "limit" in keys else [f"limit={sum(1 for _ in json_rows(path_of(terms.data, 'data')))}"]
    return [*task_words, f"task.data_files={quoted(terms.data)}", "task.sample=shuffled"]


def search(terms: Terms, *, dry_run: bool) -> Recorded | None:
    """Run what the question takes and return the runs; None for a dry run, which says how long it takes at most."""
    session = Session(typed_keys=keys_of(terms.words))
    with active(session), interruptible(session):
        runner = Search(terms, session)
        n = len(runner.examples)
        terms.check(n)
        say(f"{n} prompts: {n // 2} choose; {terms.carries(n - n // 2)}")
        stages = runner.seconds()
        known = [seconds for _, seconds in stages if seconds is not None]
        say(f"at most about {duration(sum(known))} from nothing; rows that are there are not made again")
        if dry_run:
            for name, seconds in stages:
                say(f"  {name}: {'not known' if seconds is None else duration(seconds)}")
            return None
        keep_plan(runner.plan, {"choosing": runner.choosing, "promising": runner.promising})
        session.begun = True
        chains = kept_plan(runner.plan).get("chains", {}).get(terms_key(terms))
        if chains is None:  # else they are fixed, whatever has been seen since
            chains = runner.choose()
            keep_plan(runner.plan, {"chains": {terms_key(terms): chains}})
        runner.test(chains)
        keep_plan(runner.plan, {"done": {terms_key(terms): True}})
        for (name, at), why in runner.failed.items():
            say(f"not tried: {name} {runner.budgets[name][at]}: {why}")
        return runner.found()
