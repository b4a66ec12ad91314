"""Which budget is safe for these prompts: promises about new prompts from recorded runs, `kvexp advise outputs/`.

A candidate is a run: a method at a budget. Half of the prompts choose: they rank the methods by how many bytes they are
likely to save with a promise that holds, and fix the order in which the budgets of the best are tested. The other half
tests them, in that order (`kvexp.results.promise`). What the first half saw cannot make a promise of the second too
good. No torch, but where bytes are asked for that no row holds; `kvexp.results.advise_search` makes rows.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from kvexp.results import promise
from kvexp.results.blocks import Column, numeric, plain, print_columns
from kvexp.results.divergence import per_example
from kvexp.results.read import Folder, Runs, baseline_of, number, read_runs, size_or_words, unmatched
from kvexp.results.read import where as labels_of_words
from kvexp.results.stats import Floats, lower_is_better
from kvexp.results.table import bytes_share
from kvexp.run.store import OWN
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, Range, keys_text, number_of, typed, typed_words
from kvexp.util.files import explained, locked, replace
from kvexp.util.output import Console, say, size, tells_errors, tells_warnings

FINALISTS = 3  # methods that get a promise at most, where nothing else is asked for: they share the error
LEFT_OUT = 12  # methods that an answer names as left out
BEFORE, BEHIND = 2, 1  # budgets tested before and behind the one that seems best
SEED = 57
WIDTH = 100  # where the console has none
FOLDER = ".advise"  # under the outputs: which prompts have chosen, and what they chose

ROUNDING = 1e-9  # a loss this close to the limit is at it: what sums and quotients of floats leave
CAP = 5  # times the limit: a KL beyond counts as this much in the mean, since a bound on a mean needs an end


@dataclass(frozen=True)
class Loss:
    """Kind of loss of one prompt's answer. within: a limit as text; most: how much a prompt counts at most in the mean.

    most: None for a multiple of the limit; digits: behind the point, in tables.
    """

    head: str
    within: str
    mean: str
    most: float | None
    digits: int


LOSSES = {
    "kl": Loss("KL", "within {limit:g} nats per token of the full cache", "mean KL", None, 3),
    "top1": Loss(
        "other tokens",
        "with the full cache's likeliest token at {agreed:g} or more of its answer's places",
        "mean of other tokens",
        1.0,
        3,
    ),
    "score_loss": Loss("points lost", "within {limit:g} points of the full cache's score", "mean loss", 100.0, 1),
}

OWN_WORDS: dict[str, tuple[Any, str]] = {
    "kl": (
        Annotated[float, Range(0, above=True)],
        "nats per token that a prompt may lose (0.1 where nothing is given)",
    ),
    "top1": (
        Annotated[float, Range(0, 1, above=True)],
        "in place of it: share of tokens whose likeliest stays the same",
    ),
    "score_loss": (Annotated[float, Range(0, 100)], "in place of it: points of the task's first metric"),
    "share": (Annotated[float, Range(0.01, 0.9999)], "of new prompts that stay within it (0.90)"),
    "confidence": (Annotated[float, Range(0.5, 0.9999)], "of the promises of a table, all together (0.95)"),
    "finalists": (
        Annotated[int, AtLeast(1)],
        "methods that get a promise (as many as cost the first one nothing, to 3)",
    ),
    "data": (str, "a file of your prompts: they are run"),
    "methods": (str, "that are tried, A,B; with a setting: h2o+cache.bits=4"),
    "budgets": (str, "that are tried, 0.9,0.7,0.5"),
}


@dataclass(frozen=True)
class Terms:
    """Terms of a promise, by a command line. words: those not of advise: labels of runs, or words for `kvexp run`."""

    loss: Literal["kl", "top1", "score_loss"] = "kl"
    limit: float = 0.1
    share: float = 0.9
    confidence: float = 0.95
    finalists: int | None = None
    data: str | None = None
    methods: tuple[str, ...] = ()
    budgets: tuple[float, ...] = ()
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> Terms:
        """Read KEY=VALUE words; ConfigError names the key and what is allowed."""
        values, rest = typed_words(words, OWN_WORDS)
        if wrong := [word for word in rest if "=" not in word]:
            raise ConfigError(f"advise takes a folder of runs or KEY=VALUE, got {wrong[0]!r}")
        if len(given := [name for name in LOSSES if name in values]) > 1:
            raise ConfigError(f"{' and '.join(given)} are two losses: give one")
        loss = given[0] if given else "kl"
        limit = values.pop(loss, 0.1)
        for name in {"methods", "budgets"} & values.keys():
            values[name] = tuple(filter(None, values[name].split(",")))
        budget = Annotated[float, Range(0, 1, above=True)]
        values["budgets"] = tuple(
            typed(number_of(word, "budgets"), budget, "budgets") for word in values.get("budgets", ())
        )
        return cls(**{**values, "loss": loss, "limit": limit, "words": tuple(rest)})

    @property
    def error(self) -> float:
        return 1 - self.confidence

    @property
    def beyond(self) -> float:
        """The largest loss that is still within the limit; of top1 the share of other tokens."""
        return 1 - self.limit if self.loss == "top1" else self.limit

    def is_beyond(self, losses: Floats) -> NDArray[np.bool_]:
        """Whether each loss [n] is more than the limit allows; one exactly at the limit is not."""
        return losses > self.beyond + ROUNDING

    @property
    def most(self) -> float:
        """What a prompt's loss counts at most in the mean."""
        most = LOSSES[self.loss].most
        return CAP * self.limit if most is None else most

    @property
    def within(self) -> str:
        """The limit as text, to follow "a new prompt stays"."""
        return LOSSES[self.loss].within.format(limit=self.limit, agreed=self.limit)

    def many(self, n: int) -> int:
        """How many methods get a promise from n prompts: what was asked for, else as many as the first one can spare.

        Each further method lowers the error of all. Where that would cost the best one a prompt that may be beyond the
        limit, it stays alone.
        """
        if self.finalists is not None:
            return self.finalists
        alone = promise.most_beyond(n, self.share, self.error)
        free = (m for m in range(FINALISTS, 1, -1) if promise.most_beyond(n, self.share, self.error / m) == alone)
        return next(free, 1)

    @property
    def needed(self) -> int:
        """How many prompts make a promise if none of them is beyond the limit."""
        return promise.prompts_needed(self.share, self.error / (self.finalists or 1))

    def check(self, n: int) -> None:
        """ConfigError where n prompts, half of them, cannot carry the promise even with none beyond the limit."""
        half, needed = n - n // 2, self.needed
        if half < needed:
            least = _rounded_down(promise.largest_share(half, self.error / (self.finalists or 1)))
            lower = f"share={least:g}" if least >= 0.01 else "more prompts"
            raise ConfigError(
                f"{n} prompts are too few: half of them chooses, and {half} can promise share={least:.3f} at "
                f"confidence={self.confidence:g} at most, with none of them beyond the limit. For share={self.share:g} "
                f"give {2 * needed} prompts ({needed} of them make the promise); or ask for {lower}"
            )

    def carries(self, n: int) -> str:
        """Text that says which shares n prompts can carry that make a promise."""
        error = self.error / (self.finalists or 1)
        may = promise.most_beyond(n, self.share, error)
        more = promise.prompts_needed(self.share, error, may + 1)
        none = "none" if may == 0 else f"at most {may}"
        return (
            f"{n} make the promise: at confidence {self.confidence:g} they carry shares up to "
            f"{_rounded_down(promise.largest_share(n, error)):.3f}, and {self.share:g} with {none} beyond the limit "
            f"({may + 1} would take {more} prompts)"
        )


# Judging: nothing here knows of runs.


@dataclass(frozen=True)
class Candidate:
    """A method at a budget. bytes_share: of the full cache's; losses: prompt -> what it loses; name: of its run."""

    method: str
    budget: str
    bytes_share: float
    losses: Mapping[str, float]
    name: str = ""

    def of(self, prompts: Collection[str]) -> Floats:
        """Losses of these prompts, as far as there are any, in the prompts' order."""
        return np.array([self.losses[name] for name in prompts if name in self.losses], dtype=np.float64)


@dataclass(frozen=True)
class Promise:
    """A candidate as it was tested: of n prompts, `beyond` lost more than the limit, `failed` of them as it failed.

    share_bound: of new prompts within the limit, NaN where the promise does not hold; mean_bound: of the mean loss.
    """

    candidate: Candidate
    n: int
    beyond: int
    failed: int
    holds: bool
    share_bound: float
    mean: float
    mean_bound: float


@dataclass(frozen=True)
class Advice:
    """chains: of each method that was tested, its budgets from the dearest; left_out: methods that were not tested."""

    terms: Terms
    choosing: list[str]
    promising: list[str]
    chains: list[list[Promise]]
    left_out: list[str]
    candidates: list[Candidate] = field(repr=False)

    @cached_property
    def answers(self) -> list[Promise | None]:
        """The cheapest budget of each chain whose promise holds; None where none does."""
        return [next((tested for tested in reversed(chain) if tested.holds), None) for chain in self.chains]

    def shown(self, at: int) -> Promise:
        """What is shown of a chain: its answer, or the dearest budget where none holds."""
        return self.answers[at] or self.chains[at][0]

    @cached_property
    def order(self) -> list[int]:
        """Places of the chains, the cheapest answer first, those without one last."""

        def cost(at: int) -> tuple[float, float]:
            answer = self.answers[at]
            return (answer.candidate.bytes_share, 0) if answer else (math.inf, self.chains[at][0].candidate.bytes_share)

        return sorted(range(len(self.chains)), key=cost)

    def needed(self, chain: Sequence[Promise]) -> int | None:
        """Prompts, choosing ones included, that would let the dearest budget hold at the rate seen so far; None: none.

        With all losses of both halves: an estimate, no promise.
        """
        first = chain[0].candidate
        losses = first.of([*self.choosing, *self.promising])
        rate = float(self.terms.is_beyond(losses).mean())
        error = self.terms.error / max(1, len(self.chains))
        for n in np.unique(np.geomspace(10, 5000, 60).astype(int)).tolist():
            if n > chain[0].n and promise.most_beyond(n, self.terms.share, error) >= math.ceil(rate * n):
                return 2 * int(n)
        return None


def judged(
    candidates: Sequence[Candidate],
    choosing: Sequence[str],
    promising: Sequence[str],
    terms: Terms,
    chains: Sequence[Sequence[str]] | None = None,
) -> Advice:
    """The promises of these candidates. chains: names of those that the choosing prompts chose, if that is known.

    Candidates without a loss of a promising prompt are left out of the choice.
    """
    ready = [budget for budget in candidates if len(budget.of(promising))]
    if chains is None:
        tested = chosen(ready, choosing, len(promising), terms)
    else:
        by_name = {budget.name: budget for budget in candidates}
        tested = [[by_name[name] for name in chain if name in by_name] for chain in chains]
    counted = [
        [(losses := budget.of(promising), int(terms.is_beyond(losses).sum())) for budget in chain] for chain in tested
    ]
    p = [[promise.share_p_value(beyond, len(losses), terms.share) for losses, beyond in chain] for chain in counted]
    held = promise.held(p, terms.error)
    all_hold = held == list(map(len, tested))
    error = terms.error / max(1, sum(map(len, tested)))  # of a bound of any budget that was tested
    chains_tested = []
    for chain, counts, many in zip(tested, counted, held, strict=True):
        promises = []
        for place, (candidate, (losses, beyond)) in enumerate(zip(chain, counts, strict=True)):
            capped = np.clip(losses, 0, terms.most)
            # The answer is chosen by the prompts that the bound counts. Where some budget fails, the error is spent on
            # the promises; only where all hold may it be spent on more than `share` (Strassburger and Bretz 2008,
            # doi:10.1002/sim.3338): promises and bounds are then right together.
            bound = max(terms.share, promise.share_bound(beyond, len(losses), error) if all_hold else 0.0)
            promises.append(
                Promise(
                    *(candidate, len(losses), beyond, int(np.isinf(losses).sum())),
                    *(place < many, bound if place < many else math.nan),
                    *(float(capped.mean()), terms.most * promise.mean_bound(capped / terms.most, error)),
                )
            )
        chains_tested.append(promises)
    left = {budget.method for budget in candidates} - {chain[0].method for chain in tested if chain}
    return Advice(terms, list(choosing), list(promising), chains_tested, sorted(left), list(candidates))


def chosen(candidates: Sequence[Candidate], choosing: Sequence[str], n: int, terms: Terms) -> list[list[Candidate]]:
    """Chains of the methods that are most likely to save bytes with a promise of n further prompts that holds.

    A method counts by the largest product of the bytes a budget saves and the chance that it, and all dearer ones,
    hold: the chance is that of n further prompts by the rate seen, with Jeffreys' prior. Its chain has the budgets
    around that one, from the dearest.
    """
    ranked = []
    for budgets in by_method(candidates).values():
        saved, best = hope(budgets, choosing, n, terms)
        ranked.append((saved, budgets[max(0, best - BEFORE) : best + BEHIND + 1]))
    ranked.sort(key=lambda pair: -pair[0])
    return [chain for _, chain in ranked[: terms.many(n)]]


def hope(budgets: Sequence[Candidate], choosing: Sequence[str], n: int, terms: Terms) -> tuple[float, int]:
    """(share of the bytes that a method is likely to save with a promise, place of the budget that does).

    budgets: of one method, from the dearest.
    """
    may = promise.most_beyond(n, terms.share, terms.error / terms.many(n))
    chances = np.minimum.accumulate([_chance(budget.of(choosing), n, may, terms) for budget in budgets])
    saved = np.array([1 - budget.bytes_share for budget in budgets]) * chances
    return float(saved.max()), int(saved.argmax())


def _chance(losses: Floats, n: int, may: int, terms: Terms) -> float:
    return promise.chance(int(terms.is_beyond(losses).sum()), len(losses), n, may)


def by_method(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates of each method, from the dearest to the cheapest."""
    by_name: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda item: (-item.bytes_share, size_or_words(item.budget), item.name)):
        by_name[candidate.method].append(candidate)
    return dict(by_name)


# Runs as candidates.


@dataclass(frozen=True)
class Recorded:
    """Runs of one model and task that one promise is made of. prompts: those with a loss, in the task's order."""

    title: str
    baseline: Folder
    folders: dict[str, Folder]
    candidates: list[Candidate]
    prompts: list[str]

    @property
    def place(self) -> Path:
        """The file that says which prompts have chosen."""
        return self.baseline.run.path.parent / FOLDER / f"{self.baseline.run.hash}.json"

    def halves(self) -> tuple[list[str], list[str]]:
        """(prompts that choose, prompts that promise): as a search has split them, else drawn by their ids alone."""
        known = self.plan.get("choosing")
        if known is None:
            order = np.random.default_rng(SEED).permutation(sorted(self.prompts))
            known = order[: len(order) // 2].tolist()
        taken = set(known)
        rest = self.plan.get("promising") or [name for name in self.prompts if name not in taken]
        return [name for name in self.prompts if name in taken], rest

    def check(self, terms: Terms) -> None:
        """ConfigError where the prompts are too few for these terms, or a search by them has not come to its end."""
        if terms_key(terms) in self.plan.get("done", {}):
            return  # then prompts without rows are those that could not change the answer
        promising = self.halves()[1]
        terms.check(max(len(self.prompts), 2 * len(promising)))
        promised, needed, outputs = len({*self.prompts} & {*promising}), terms.needed, self.baseline.run.path.parent
        if self.plan and promised < needed:
            raise ConfigError(
                f"the search in {outputs} is not done: {promised} of the prompts that make the promise have rows, and "
                f"share={terms.share:g} at confidence={terms.confidence:g} needs {needed}; give the command again that "
                f"began it (model=…, data=… or task=…, outputs_dir={outputs}), which goes on where it stopped"
            )

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What a search has kept of these prompts; empty without one."""
        return kept_plan(self.place)

    def advice(self, terms: Terms) -> Advice:
        """The promises that its rows carry."""
        chains = self.plan.get("chains", {}).get(terms_key(terms))
        return judged(self.candidates, *self.halves(), terms, chains)


def kept_plan(place: Path) -> dict[str, Any]:
    """What a search has kept, empty without one: choosing, chains by the terms they were chosen for, and tried.

    tried: hash of a run -> shard -> [first, end) of the prompts, by their index in the task, that it was run on.
    """
    try:
        plan: dict[str, Any] = json.loads(place.read_bytes())
        return plan
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: {error}; remove it, and its rows are judged as any others") from error


def terms_key(terms: Terms) -> str:
    """Text of the terms that decide which candidates are chosen."""
    return f"{terms.loss}={terms.limit:g} share={terms.share:g} confidence={terms.confidence:g} {terms.finalists}"


def keep_plan(place: Path, changes: Mapping[str, Any]) -> None:
    """Keep what a search chose, before any promising prompt is looked at."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with explained(place), locked(place.parent):
        before = json.loads(place.read_bytes()) if place.exists() else {}
        replace(place, json.dumps(_merged(before, changes), indent=1).encode() + b"\n")


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with the changes' values; of a key that maps in both, its own keys are merged so too."""
    both = {key: _merged(before[key], value) for key, value in changes.items() if isinstance(before.get(key), dict)}
    return {**before, **changes, **both}


def recorded(runs: Runs, loss: str) -> list[Recorded]:
    """The runs shown that have this loss, by model, task, place of the question and full cache."""
    groups: dict[tuple[str, str | None, str], list[Folder]] = defaultdict(list)
    for folder in runs.ran:
        if folder.run.baseline in runs.known and not folder.is_baseline:
            groups[folder.family, folder.question, folder.run.baseline].append(folder)
    records = []
    for (_, _, key), folders in groups.items():
        baseline = runs.known[key]
        tried = kept_plan(baseline.run.path.parent / FOLDER / f"{key}.json").get("tried", {})
        losses = {item.run.hash: losses_of(item, runs.known, loss, tried.get(item.run.hash, {})) for item in folders}
        lossy = [folder for folder in folders if losses[folder.run.hash]]
        if not lossy:
            continue
        candidates = [_candidate(folder, baseline, losses[folder.run.hash]) for folder in lossy]
        # In the task's order, as far as the runs with most of them know it: an early end leaves out the last ones.
        most_first = sorted(losses.values(), key=len, reverse=True)
        prompts = list(dict.fromkeys(name for known in most_first for name in known))
        title = f"{baseline.labels['model']} on {baseline.labels['task']}"
        records.append(Recorded(title, baseline, {folder.run.hash: folder for folder in lossy}, candidates, prompts))
    return records


def losses_of(
    folder: Folder, known: Mapping[str, Folder], loss: str, tried: Mapping[str, Sequence[int]] | None = None
) -> dict[str, float]:
    """Prompt -> loss; infinite where the full cache answers and the run, which was tried there, failed.

    kl: nats per token along the full cache's answer, mean over the tokens predicted after the eviction; top1: share of
    those with another likeliest token; score_loss: points (nats of an nll) below the full cache, in the first metric.
    tried: [first, end) of prompts that the run was tried on, of each shard, as far as its rows do not say so.
    """
    baseline = baseline_of(folder, known)
    if loss == "score_loss":
        losses = _score_losses(folder, baseline)
    else:
        measured = per_example(folder.run, OWN)
        means = None if measured is None else (measured.kl if loss == "kl" else measured.differs) / measured.tokens
        losses = {} if measured is None or means is None else dict(zip(measured.names, means.tolist(), strict=True))
    if baseline is None or not (losses or (folder.unscored and not folder.scored)):  # a run of which all failed counts
        return losses
    answers = baseline.of_answered(baseline).scored if loss == "score_loss" else baseline.scored
    for name, row in answers.items():
        # The token behind the prompt is predicted before the eviction: an answer of one token has no KL.
        can_lose = loss == "score_loss" or number(row.get("new_tokens")) >= 2
        was_tried = any(first <= row["index"] < end for first, end in (tried or {}).values())
        if can_lose and (was_tried or name in folder.unscored):
            losses.setdefault(name, math.inf)
    return losses


def _score_losses(folder: Folder, baseline: Folder | None) -> dict[str, float]:
    if baseline is None or not baseline.metrics or not folder.rows:
        return {}
    metric, counted = baseline.metrics[0], baseline.of_answered(baseline).scored
    sign = -1 if lower_is_better(metric) else 1
    losses = {}
    for name in (row["example"] for row in folder.rows if row["example"] in counted):
        score, full = (
            number((side.get(name) or {"metrics": {}})["metrics"].get(metric)) for side in (folder.scored, counted)
        )
        losses[name] = math.inf if math.isnan(score) else sign * (full - score)
    return losses


def _candidate(folder: Folder, baseline: Folder, losses: Mapping[str, float]) -> Candidate:
    from kvexp.run.labels import QUANTISED_FULL  # late: Hydra

    labels = folder.labels
    common = str(baseline.labels.get("setting") or "").split()  # of the task, which all have
    words = [word for word in str(labels.get("setting") or "").split() if word not in common]
    keys = (*BUDGET_KEYS, "cache.bits=") if labels.get("method") == QUANTISED_FULL else BUDGET_KEYS
    method = " ".join([str(labels.get("method")), *(w for w in words if not w.startswith((*keys, "budget=")))])
    ratio = labels.get("kv_ratio")
    budget = [f"kv_ratio={ratio:g}"] if ratio is not None else []
    budget += [word for word in words if word.startswith(keys)]
    share = bytes_share(folder, baseline)
    if math.isnan(share):
        share = _planned_share(folder, baseline)
    return Candidate(method, " ".join(budget) or "-", share, losses, folder.run.hash)


def _planned_share(folder: Folder, baseline: Folder) -> float:
    """Share of the bytes by the run's settings: rows of divergence=only hold none.

    Its kv_ratio where those are lost, or the full cache has no rows either.
    """
    from kvexp.results.advise_search import planned_share  # late: torch

    try:
        return planned_share(folder.run, baseline.rows)
    except ConfigError:
        if folder.labels.get("kv_ratio") is None or folder.run.config.get("quantization") is not None:
            raise
        return float(folder.labels["kv_ratio"])


BUDGET_KEYS = ("budget.tokens=", "bytes_ratio=", "budget.threshold=")  # in a setting: they tell budgets apart


# The command.

ABOUT = """usage: kvexp advise OUTPUTS [KEY=VALUE ...]
           from rows that exist
       kvexp advise model=MODEL data=FILE [KEY=VALUE ...] [--dry-run]
           from prompts: runs what is needed

Which method may keep how little of the cache, with a promise about new
prompts (docs/advise.md).
"""


def usage() -> str:
    """What `kvexp advise --help` prints."""
    rest = (
        "Other words: with OUTPUTS, labels of the runs to take (task=news\n"
        "method=h2o,keyformer); with data= or task=, settings of kvexp run (model=,\n"
        "task.max_new_tokens=, limit=, outputs_dir=)."
    )
    return f"{ABOUT}\n{keys_text(OWN_WORDS)}\n\n{rest}"


@tells_warnings
@tells_errors(ConfigError, OSError)
def main(words: list[str]) -> int:
    """Run `kvexp advise`; exit code 0 with an answer, "none of these" included, 2 for a wrong request."""
    if not words or words[0] in ("-h", "--help"):
        say(usage())
        return 0 if words else 2
    folders = [word for word in words if "=" not in word and not word.startswith("-")]
    options_ = [word for word in words if word.startswith("-")]
    terms = Terms.of([word for word in words if word not in (*folders, *options_)])
    if wrong := [word for word in options_ if word != "--dry-run"]:
        raise ConfigError(f"advise has no option {wrong[0]}; it has --dry-run and --help")
    if len(folders) > 1:
        raise ConfigError(f"advise takes one folder of runs, got {' '.join(folders)}")
    if folders:
        if terms.data or terms.methods or terms.budgets or options_:
            raise ConfigError(
                "data=, methods=, budgets= and --dry-run are for prompts that are to be run: leave out the folder "
                f"{folders[0]} (outputs_dir={folders[0]} says where the runs go), or choose rows by method=A,B"
            )
        record: Recorded | None = of_folder(folders[0], terms)
    else:
        from kvexp.results.advise_search import search  # late: torch

        record = search(terms, dry_run=bool(options_))
    if record is None:
        return 0
    print_advice(record, terms, Console(markup=False, width=None if sys.stdout.isatty() else WIDTH), words)
    return 0


def of_folder(outputs: str, terms: Terms) -> Recorded:
    """The runs of a folder that these words choose; ConfigError where there are none, several, or too few prompts."""
    where = labels_of_words(terms.words)
    runs = read_runs(outputs, where)
    records = recorded(runs, terms.loss)
    if not records:
        missing = "scores of a run and its full cache" if terms.loss == "score_loss" else "divergence=true, or only"
        nothing = f"no run under {outputs} has what {terms.loss}= is about: it needs {missing}"
        raise ConfigError(nothing if runs.ran else unmatched(outputs, where))
    if len(records) > 1:
        names = ", ".join(
            f"{record.title}{f' ({record.candidates[0].name})' if record.title in titles else ''}"
            for titles, record in ((_twice(records), record) for record in records)
        )
        raise ConfigError(f"{outputs} has runs of several models, tasks or data: {names}; name one, as in task=news")
    record = records[0]
    record.check(terms)
    return record


def _twice(records: Sequence[Recorded]) -> set[str]:
    titles = [record.title for record in records]
    return {title for title in titles if titles.count(title) > 1}


def print_advice(record: Recorded, terms: Terms, console: Console, words: Sequence[str]) -> None:
    """The answer on one screen: a line per method, the promise as a sentence, its assumption and its limits.

    words: of the command line, from which the next one is made.
    """
    advice = record.advice(terms)
    console.print(Text(f"{record.title}: {terms.share:g} of new prompts {terms.within}", style="bold"))
    n = len(advice.promising)
    rest = terms.carries(n) if advice.chains else f"the other {n}, which make promises, had nothing to test"
    console.print(f"{len(advice.choosing)} prompts chose methods and budgets; {rest}.\n")
    if rows := [_answer_row(advice, at, record, terms) for at in advice.order]:
        print_columns(rows, _columns(terms, rows), 2, console)
    for line in said(advice, record, words):
        console.print(Text(line), soft_wrap=not console.is_terminal)


def _answer_row(advice: Advice, at: int, record: Recorded, terms: Terms) -> dict[str, Any]:
    """What a line of the table says of a chain: its answer, or the dearest budget where none holds."""
    shown, answer = advice.shown(at), advice.answers[at]
    candidate, full = shown.candidate, _mean_bytes(record.baseline)
    budget = candidate.budget if answer else f"none of {len(advice.chains[at])}"
    row: dict[str, Any] = {"method": candidate.method, "budget": budget}
    row |= {
        "share": candidate.bytes_share if answer else math.nan,
        "saved": full * (1 - candidate.bytes_share) if answer else math.nan,
    }
    row |= {"beyond": f"{shown.beyond} of {shown.n}", "least": _rounded_down(shown.share_bound)}
    row |= {"mean": _mean_rounded_up(shown, terms) if answer else math.nan}
    return row


def _columns(terms: Terms, rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    at_most = f"{LOSSES[terms.loss].mean}\nat most"
    return [
        *(plain("method", "method", right=False), plain("budget", "budget", right=False)),
        *(numeric("% of\nKV", "share", 0, 100), Column("saved per\nsequence", "saved", size)),
        *(plain("beyond", "beyond\nthe limit"), numeric("within it,\nat least", "least", 3)),
        numeric(at_most, "mean", LOSSES[terms.loss].digits),
    ]


def _mean_bytes(baseline: Folder) -> float:
    sizes = [number((row.get("receipt") or {}).get("kv_bytes")) for row in baseline.scored.values()]
    known = [value for value in sizes if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def said(advice: Advice, record: Recorded, words: Sequence[str]) -> list[str]:
    """The lines below the table: the promise, its assumption, what would change it, what was not tried.

    words: of the command line, from which the next one is made.
    """
    lines, terms = [], advice.terms
    held = [answer for answer in advice.answers if answer is not None]
    error = terms.confidence
    if held:
        best = next(answer for at in advice.order if (answer := advice.answers[at]) is not None)
        name = f"{best.candidate.method} {best.candidate.budget}"
        lines.append(
            f"Promise: under {name} a new prompt of this kind stays {terms.within} with probability at least "
            f"{terms.share:g}, at confidence {error:g} for all lines that hold together; "
            f"{LOSSES[terms.loss].mean} at most {_mean_rounded_up(best, terms):.{LOSSES[terms.loss].digits}f}, at "
            f"confidence {error:g} by itself (a prompt counts at most {terms.most:g})."
        )
    else:
        lines.append(f"None of these: no budget that was tested holds the promise of {terms.share:g} {terms.within}.")
        if not advice.chains:
            lines.append("On the prompts that chose, every budget lost too much to be worth a test.")
    for at in advice.order:
        shown, answer = advice.shown(at), advice.answers[at]
        name = f"{shown.candidate.method} {shown.candidate.budget}"
        if lacking := len(advice.promising) - shown.n:
            ended = answer is None and record.plan  # a search ends there
            why = "it can no longer hold" if ended else "not run, or an answer of a single token"
            lines.append(f"{name}: judged by {shown.n} prompts; the other {lacking} that promise have no loss ({why}).")
        if shown.failed:
            lines.append(f"{name}: on {shown.failed} of the {shown.beyond} prompts beyond the limit it failed.")
        if answer is None:
            needed = advice.needed(advice.chains[at])
            more = f"about {needed} prompts might change that" if needed else "too many are beyond it for any number"
            lines.append(
                f"{shown.candidate.method}: {shown.beyond} of {shown.n} beyond the limit at {shown.candidate.budget}: "
                f"{more}."
            )
    if not held:
        lines += _next_step(advice, words)
    if without := len({row["example"] for row in record.baseline.rows} - {*record.prompts}):
        lines.append(
            f"{without} of {len(record.baseline.rows)} prompts count nowhere, as no method has a loss there: not run, "
            "no answer of the full cache, or one of a single token."
        )
    if held:
        lines.append("It assumes that new prompts are exchangeable with these: drawn alike, in no order.")
    if others := len(record.plan.get("chains", {}).keys() - {terms_key(terms)}):
        lines.append(f"The same prompts have answered {others} other question(s): the confidence is of each by itself.")
    lines.append(_not_tried(advice))
    return lines


def _next_step(advice: Advice, words: Sequence[str]) -> list[str]:
    """Which candidate came nearest on the prompts that chose, and the command that asks for what it reached there.

    The prompts that promise have no say in it: the promise that the command makes is as good as the first would be.
    """
    terms, may = advice.terms, 0.0
    if advice.promising:
        may = max(0, promise.most_beyond(len(advice.promising), terms.share, terms.error)) / len(advice.promising)
    tried = [(np.sort(losses), best) for best in advice.candidates if len(losses := best.of(advice.choosing))]
    reached = [(float(losses[len(losses) - 1 - int(may * len(losses))]), losses, best) for losses, best in tried]
    if not reached:
        return []
    limit, losses, best = min(reached, key=lambda item: (item[0], -len(item[1])))
    failed, beyond = int(np.isinf(losses).sum()), int(terms.is_beyond(losses).sum())
    lines = [
        f"Nearest on the prompts that chose: {best.method} {best.budget}, {beyond} of {len(losses)} beyond the limit"
        + (f" ({failed} of them failed)" if failed else "")
        + f"; {LOSSES[terms.loss].head}: median {np.median(losses):.2g}, most {losses[-1]:.2g}."
    ]
    value = _rounded_up(limit)
    value = round(1 - value, 4) if terms.loss == "top1" else value
    if not terms.is_beyond(np.array(limit)):
        lines.append("That would do: next, the same command with more prompts.")
    elif math.isfinite(limit) and value > 0:
        kept = [word for word in words if word.partition("=")[0] not in LOSSES]
        command = shlex.join(["kvexp", "advise", *kept, f"{terms.loss}={value:g}"])
        lines.append(f"What it reached there may hold for new prompts; next: {command}")
    else:
        lines.append("Next: other methods= or budgets= (kvexp methods), or longer prompts.")
    return lines


def _rounded_down(share: float) -> float:
    """A share to three digits that is no larger: what is promised is not more than what holds."""
    return math.floor(1000 * share + ROUNDING) / 1000 if share == share else share


def _mean_rounded_up(tested: Promise, terms: Terms) -> float:
    """The bound of the mean loss, to the digits that are shown, no smaller."""
    scale = 10.0 ** LOSSES[terms.loss].digits
    return float(math.ceil(scale * tested.mean_bound - ROUNDING) / scale)


def _rounded_up(value: float) -> float:
    """The next number of two digits."""
    if not value > 0 or math.isinf(value):
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / step - ROUNDING) * step:.6g}")


def _not_tried(advice: Advice) -> str:
    from kvexp.run.compose import options  # late: Hydra

    tried = by_method(advice.candidates)
    names = {method.partition(" ")[0] for method in tried}
    rest = [name for name in options("method") if name not in names and name != "full"]
    few, more = advice.left_out[:LEFT_OUT], len(advice.left_out) - LEFT_OUT
    left = [f"left out on the first half: {', '.join(few)}{f' and {more} more' if more > 0 else ''}"] if few else []
    budgets = sorted({candidate.budget for candidate in advice.candidates}, key=size_or_words, reverse=True)
    return "; ".join(
        [*left, f"not tried: {len(rest)} other methods (kvexp methods), budgets but {', '.join(budgets)}."]
    )
