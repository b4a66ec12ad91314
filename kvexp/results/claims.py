"""`kvexp claim`: what a paper says of a method, as one file that anybody can run, judge and check again.

A claim is a YAML file with the fields of `Claim`. Both of its sides are words of `kvexp run`; the prompts are the same,
so a verdict comes from the interval of one paired difference. Rows that were computed before stand in ROWS of the
same folder, under a digest of the claim's words: a claim that is changed is measured anew.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import html
import io
import itertools
import json
import math
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from string import Template
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import yaml

import kvexp
from kvexp.results import stats
from kvexp.results.blocks import count as in_short
from kvexp.results.blocks import fixed
from kvexp.results.divergence import per_example, share_interval
from kvexp.results.read import Folder, number, read_runs
from kvexp.results.report import asset
from kvexp.run.store import OWN
from kvexp.util.errors import ConfigError, did_you_mean
from kvexp.util.fields import MISSING, AtLeast, defaults_of, field_types, typed
from kvexp.util.files import check_writable, replace
from kvexp.util.output import say, tells_errors, tells_warnings

Pairs: TypeAlias = dict[str, tuple[float, float]]  # example -> number of the method, of the rival

FOLDER = Path("experiments/claims")
PAGE = Path("docs/claims.md")
ROWS = "rows.csv"  # in the folder of the claims
HEAD = ("claim", "words", "model", "numerics", "example", "method", "rival")
KL, FULL = "kl", "full"
FEWEST = 16  # examples; an interval is at least as wide as Student's
SHOWN = 9  # claims on the page; the board has all
OWN_PAPER = "kvexp"  # how `paper` begins of what this repository says itself
HOLDS, CONTRADICTED, UNDECIDED, MISSING_ROWS = VERDICTS = "holds", "contradicted", "undecided", "not measured"
# A row that another machine computes may differ by so many nats or points, and by this share (docs/recheck.md).
ABSOLUTE, RELATIVE = 3.3e-4, 0.01


@dataclass(frozen=True)
class Claim:
    """One comparison that somebody published, and how it is measured here.

    file: where it stands; sentence: what the paper says, in our words; source: its table or figure, with model and task
    there. task, method, rival: a name and further words of `kvexp run`; rival may be `full`. budget: words that both
    sides get. metric: `kl`, nats per token from the full cache along its own answer, or a metric of the task.
    holds: what its interval has to show of the method's lead over the rival: above the margin (ahead), above minus the
    margin (level), or between both (alike). limits: what this measurement cannot say. recorded: the file that its rows
    come from; command: what made them, where that was not `kvexp run`.
    """

    file: Path
    paper: str
    year: Annotated[int, AtLeast(2017)]
    source: str
    sentence: str
    models: tuple[str, ...]
    task: str
    budget: str
    method: str
    rival: str
    metric: str
    holds: Literal["ahead", "level", "alike"]
    margin: Annotated[float, AtLeast(0)]
    examples: Annotated[int, AtLeast(FEWEST)]
    limits: str = ""
    recorded: str = ""
    command: str = ""

    @classmethod
    def read(cls, file: Path) -> Claim:
        """The claim of a file; ConfigError names the file, the field and what is allowed."""
        try:
            given = yaml.safe_load(file.read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        this: Any = cls  # which mypy takes for unhashable
        fields, kinds = defaults_of(cls), field_types(this)
        del fields["file"]
        if not isinstance(given, dict):
            raise ConfigError(f"{file} must hold fields, a line each: {', '.join(fields)}")
        for name in given:
            if name not in fields:
                near = did_you_mean(str(name), fields) or f"; fields are {', '.join(fields)}"
                raise ConfigError(f"{file}: a claim has no field {name}{near}")
        if lacking := [name for name, value in fields.items() if value == MISSING and name not in given]:
            raise ConfigError(f"{file} lacks {', '.join(lacking)}")
        values = {name: typed(value, kinds[name], f"{file}: {name}") for name, value in given.items()}
        for name in ("task", "method", "rival", "paper", "sentence", "source", "models"):
            if not values[name] or not str(values[name]).strip():
                raise ConfigError(f"{file}: {name} is empty")
        for name in ("task", "method", "rival", "budget"):
            for word in values[name].split()[name != "budget" :]:
                if "=" not in word or word.startswith(("limit=", "model=")):
                    raise ConfigError(f"{file}: {name}: {word} must be KEY=VALUE (limit, model: examples, models)")
        claim = cls(file, **values)
        if claim.against_full and claim.holds == "ahead":
            raise ConfigError(f"{file}: holds must be level: no cache is ahead of the full one in kl, got ahead")
        return claim

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.file.stem

    @property
    def sides(self) -> list[str]:
        """Method and rival, but for a full cache, whose KL from itself is 0."""
        return [self.method] if self.against_full else [self.method, self.rival]

    @property
    def against_full(self) -> bool:
        return self.rival == FULL and self.metric == KL

    @cached_property
    def digest(self) -> str:
        """Digest of all that decides what a row of it is."""
        words = [self.task, self.budget, self.method, self.rival, self.metric]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]

    @property
    def limit(self) -> int:
        """Examples of each of the tasks that it names."""
        return self.examples // len(list(expanded(self.task.split()[1:])))

    def words(self, side: str, model: str) -> list[str]:
        """The words of `kvexp run -m` that make one side's rows; A,B in a value is a run of each."""
        (task, *of_task), (method, *more) = self.task.split(), side.split()
        budget = [] if method == FULL else self.budget.split()
        only = "divergence=only" if self.metric == KL else "divergence=false"
        limit = f"limit={self.limit}"
        return [f"model={model}", f"task={task}", *of_task, f"method={method}", *more, *budget, only, limit]

    def asks(self) -> str:
        """What is compared and what would count as holding, in a line."""
        if self.against_full:
            return f"kl of {self.method}; holds below {self.margin:g}"
        sides = (self.rival, self.method) if self.metric == KL else (self.method, self.rival)
        mark = {
            "ahead": f"above {self.margin:g}",
            "level": f"above -{self.margin:g}",
            "alike": f"within {self.margin:g}",
        }
        return f"{self.metric} of {' less that of '.join(sides)}; holds {mark[self.holds]}"


def expanded(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of each run of a sweep: A,B is two values, [A,B] one."""
    pairs = [word.partition("=")[::2] for word in words]
    swept = [[value] if value.startswith("[") else value.split(",") for _, value in pairs]
    for values in itertools.product(*swept):
        yield [f"{key}={value}" for (key, _), value in zip(pairs, values, strict=True)]


@dataclass(frozen=True)
class Judged:
    """A claim on one model. ahead, low, high: the method's lead and its 95 % interval; of a full cache the KL itself.

    needed: examples after which an undecided one is likely to be decided; why: of one that was not measured.
    """

    claim: Claim
    model: str
    verdict: str
    n: int = 0
    ahead: float = math.nan
    low: float = math.nan
    high: float = math.nan
    needed: float = math.nan
    numerics: str = ""
    why: str = ""

    def words(self) -> str:
        """Verdict, number and interval; of an undecided one how many examples would decide."""
        if self.verdict == MISSING_ROWS:
            return f"{self.verdict}: {self.why}"
        sign = "" if self.claim.against_full else "+"
        ends = "..".join(fixed(end, 3, sign) for end in (self.low, self.high))
        more = f"; decides: n={in_short(self.needed)}" if self.verdict == UNDECIDED else ""
        return f"{self.verdict} {fixed(self.ahead, 3, sign)} ({ends}), n={self.n}{more}"


def judged(claim: Claim, model: str, numerics: str, pairs: Pairs) -> Judged:
    """The verdict of these rows: of the 95 % interval of the mean paired difference, examples resampled."""
    method, rival = np.array(list(pairs.values()), dtype=np.float64).T
    margin, n = claim.margin, len(pairs)
    if claim.against_full:  # skewed as all KL is, and never negative
        ahead, (least, most) = -float(method.mean()), share_interval(method, np.ones(n), stats.LEVEL)
        low, high, gaps = -most, -least, -method
    else:
        gaps = rival - method if claim.metric == KL or stats.lower_is_better(claim.metric) else method - rival
        ahead, (low, high) = float(gaps.mean()), stats.interval_of_mean(gaps, FEWEST)
    marks = {"ahead": (margin, math.inf), "level": (-margin, math.inf), "alike": (-margin, margin)}[claim.holds]
    if low > marks[0] and high < marks[1]:
        verdict = HOLDS
    elif high <= marks[0] or low >= marks[1]:
        verdict = CONTRADICTED
    else:
        verdict = UNDECIDED
    needed = stats.n_needed(min(abs(ahead - mark) for mark in marks), float(gaps.std(ddof=1)))
    shown = (-ahead, -high, -low) if claim.against_full else (ahead, low, high)
    return Judged(claim, model, verdict, n, *shown, needed, numerics)


# Rows that are recorded in the claims' folder, and rows of runs.


class NotMeasured(RuntimeError):
    """Why rows could not be computed here, which says nothing against the claim."""


class Recorded:
    """The rows of one folder of claims: (claim, digest of its words, model) -> NUMERICS and pairs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ROWS
        self.rows: dict[tuple[str, str, str], tuple[str, Pairs]] = {}
        try:
            for line in csv.DictReader(io.StringIO(self.file.read_text("utf-8"))):
                pairs = self.rows.setdefault((line["claim"], line["words"], line["model"]), (line["numerics"], {}))[1]
                pairs[line["example"]] = float(line["method"]), float(line["rival"])
        except FileNotFoundError:
            return
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.file} is damaged ({error}); take the file from git again") from error

    def of(self, claim: Claim, model: str) -> tuple[str, Pairs] | None:
        """What is recorded of a claim as it stands; None where that has too few examples."""
        rows = self.rows.get((claim.name, claim.digest, model))
        return rows if rows is not None and len(rows[1]) >= claim.examples else None

    def add(self, claim: Claim, model: str, numerics: str, pairs: Pairs) -> None:
        """Take these rows in place of what stands there of the claim and model; `write` keeps them."""
        self.rows = {key: rows for key, rows in self.rows.items() if key[::2] != (claim.name, model)}
        self.rows[claim.name, claim.digest, model] = (numerics, pairs)

    def write(self) -> None:
        """Write the file."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(HEAD)
        for key, (of, values) in sorted(self.rows.items()):
            writer.writerows(
                [*key, of, example, f"{method:.6g}", f"{rival:.6g}"] for example, (method, rival) in values.items()
            )
        replace(self.file, text.getvalue().encode())


def measured(claim: Claim, model: str, outputs: str, example: str | None = None) -> Pairs:
    """Both sides by example, run as far as rows are missing; example: this one alone, by id or by place.

    ConfigError for words that cannot be, before a model loads; NotMeasured for a job that failed.
    """
    from kvexp.results.curves import job_of  # late: torch
    from kvexp.run.compose import with_places, with_user_classes
    from kvexp.run.jobs import interruptible, run_jobs, runs_of
    from kvexp.run.session import Session, active
    from kvexp.run.store import run_hash

    if claim.command:
        raise ConfigError(f"{claim.file}: its rows are made by another program: {claim.command}")
    session, jobs, sides = Session(), [], [list[str]() for _ in claim.sides]
    with active(session), interruptible(session):
        for side, hashes in zip(claim.sides, sides, strict=True):
            for words in expanded(claim.words(side, model)):
                try:
                    words = [f"outputs_dir={outputs}", *with_user_classes(with_places(words))]
                    (settings,) = runs_of(job_of(words), session)
                    if claim.metric not in (known_metrics := (KL, *settings.task.metric_names())):
                        raise ConfigError(f"metric must be one of {', '.join(known_metrics)}, got {claim.metric}")
                    if example is not None:
                        ids = [prompt.id for prompt in settings.task.examples()]
                        if example not in ids and not example.isdecimal():
                            continue  # of another of its tasks
                        words.append(f"shard={ids.index(example) if example in ids else example}/{len(ids)}")
                except ConfigError as error:
                    raise ConfigError(f"{claim.file}: {side}: {error}") from error
                hashes.append(run_hash(settings.identity))
                jobs.append(job_of(words))
        session.begun = True
        run_jobs(jobs, session)
    if session.failures:
        raise NotMeasured(session.failures[0].why)
    known = read_runs(outputs, {"hash": list(itertools.chain(*sides))}, claim.limit, alone=True).known
    budgets = len(list(expanded(claim.budget.split())))
    means = []
    for side_runs in sides:
        values = defaultdict[str, list[float]](list)
        for run in side_runs:
            for name, value in _numbers(known[run], claim).items():
                values[name].append(value)
        means.append({name: float(np.mean(of)) for name, of in values.items() if len(of) == budgets})
    method, rival = means if len(means) > 1 else (means[0], dict.fromkeys(means[0], 0.0))
    return {name: (value, rival[name]) for name, value in method.items() if name in rival}


def _numbers(folder: Folder, claim: Claim) -> dict[str, float]:
    """Example -> a run's number."""
    if claim.metric == KL:
        lines = per_example(folder.run, OWN, claim.limit)
        return {} if lines is None else dict(zip(lines.names, lines.kl / lines.tokens, strict=True))
    return {name: number(row["metrics"][claim.metric]) for name, row in folder.scored.items()}


def judge(claim: Claim, model: str, recorded: Recorded, outputs: str, record: bool) -> Judged:
    """The verdict of rows that are recorded, else of runs; record: keep the rows of those."""
    if (rows := recorded.of(claim, model)) is None:
        try:
            pairs = measured(claim, model, outputs)
            if len(pairs) < FEWEST:
                raise NotMeasured(f"{len(pairs)} examples have both sides, {FEWEST} are needed")
        except NotMeasured as error:
            return Judged(claim, model, MISSING_ROWS, why=str(error))
        rows = str(kvexp.NUMERICS), pairs
        if record:
            recorded.add(claim, model, *rows)
            recorded.write()
    return judged(claim, model, *rows)


def recheck(claim: Claim, model: str, recorded: Recorded, outputs: str, seed: int) -> bool:
    """Whether a drawn example of a recorded claim, computed anew, is within the tolerance; prints both."""
    if (rows := recorded.of(claim, model)) is None:
        raise ConfigError(f"{claim.file}: nothing is recorded of it for {model}: leave out --recheck")
    example = Random(f"{seed} {claim.name} {model}").choice(sorted(rows[1]))
    before, computed = rows[1][example], measured(claim, model, outputs, example)
    name, anew = next(item for item in computed.items() if item[0] == example or example.isdecimal())
    both = list(zip(claim.sides, before, anew, strict=False))
    within = all(abs(old - new) <= ABSOLUTE + RELATIVE * abs(old) for _, old, new in both)
    said = "; ".join(f"{side} {old:.5g} recorded, {new:.5g} now" for side, old, new in both)
    verdict = f"{'within' if within else 'OUTSIDE'} {ABSOLUTE:g} + {100 * RELATIVE:g} %"
    say(f"{claim.name}, {model}, example {name}: {said}: {verdict}")
    return within


# What is shown: a line of each verdict, the card of one claim, docs/claims.md and its board.


def card(claim: Claim, judgements: Sequence[Judged]) -> Iterator[str]:
    """The lines of one claim: what the paper says, what was measured, verdicts and commands."""
    yield f"{claim.name}: {claim.paper} ({claim.year}), {claim.source}"
    yield f"  says      {claim.sentence}"
    yield f"  measured  {claim.task}, {claim.budget}: {claim.asks()}"
    for of in judgements:
        yield f"  {of.model}: {of.words()}"
    yield f"  rows      {claim.recorded or 'runs'}, NUMERICS {' '.join({of.numerics: None for of in judgements})}"
    yield f"  command   {command_of(claim)}"
    if claim.limits:
        yield f"  limits    {claim.limits}"


def command_of(claim: Claim) -> str:
    """The command that makes a claim's rows."""
    if claim.command:
        return claim.command
    model = claim.models[0] if len(claim.models) == 1 else "MODEL"
    return "; ".join(shlex.join(["kvexp", "run", "-m", *claim.words(side, model)]) for side in claim.sides)


def counted(judgements: Iterable[Judged]) -> str:
    """How many have which verdict: "14 hold, 9 are contradicted, 12 are undecided"."""
    times = Counter(of.verdict for of in judgements)
    words = {HOLDS: "hold", **{verdict: f"are {verdict}" for verdict in VERDICTS[1:]}}
    return ", ".join(f"{times[verdict]} {said}" for verdict, said in words.items() if times[verdict])


def page(judgements: Sequence[Judged], folder: Path) -> dict[str, str]:
    """Ending -> text: of a page (.md) with a claim of each of the newest papers, and of a board (.html) with all.

    folder: where they will stand.
    """
    by_claim: dict[Claim, dict[str, Judged]] = {}
    for of in judgements:
        by_claim.setdefault(of.claim, {})[of.model] = of
    models = list(dict.fromkeys(of.model for of in judgements))
    field = [claim for claim in by_claim if not claim.paper.startswith(OWN_PAPER + ",")]
    counts = []
    for model in models:
        verdicts = [by_claim[claim][model] for claim in field if model in by_claim[claim]]
        counts.append(f"of {len(verdicts)} claims on {model} {counted(verdicts)}")
    newest = sorted(field, key=lambda claim: (-claim.year, claim.paper, -len(by_claim[claim])))
    first = {claim.paper: claim for claim in reversed(newest)}
    head = ["paper", "it says", "measured", *models]
    table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for claim in list(reversed(first.values()))[:SHOWN]:
        title = f"[{claim.paper.partition(',')[0]}]({os.path.relpath(claim.file, folder)})"
        cells = [by_claim[claim][model].words() if model in by_claim[claim] else "-" for model in models]
        table.append(f"| {' | '.join([title, claim.sentence, measured_in_short(claim), *cells])} |")
    about = {
        "counts": "; ".join(counts).capitalize(),
        "papers": len(first),
        "years": " to ".join(str(end([claim.year for claim in field], default="-")) for end in (min, max)),
        "table": "\n".join(table),
        "heads": "".join(f"<th>{html.escape(name)}</th>" for name in head),
        "rows": "\n".join(_board_row(claim, models, of_models) for claim, of_models in by_claim.items()),
    }
    templates = {".md": "claims.txt", ".html": "claims.html"}
    return {ending: Template(asset(name)).substitute(about) for ending, name in templates.items()}


def measured_in_short(claim: Claim) -> str:
    """Both sides, task and budget in a few words."""
    hidden = ", hidden" if "task.question=after_eviction" in claim.task else ""
    return f"{claim.method} / {claim.rival}: {claim.task.partition(' ')[0]}{hidden}, {claim.budget}"


def _board_row(claim: Claim, models: Sequence[str], of_models: Mapping[str, Judged]) -> str:
    """A claim as a row of the board, with everything its card says."""
    methods = " ".join(dict.fromkeys(side.split()[0] for side in (claim.method, claim.rival)))
    said = "\n".join(card(claim, list(of_models.values())))
    first = f"<details><summary>{html.escape(claim.paper)}</summary><pre>{html.escape(said)}</pre></details>"
    cells = [first, *map(html.escape, (claim.sentence, measured_in_short(claim)))]
    for model in models:
        of = of_models.get(model)
        cells.append(f'<span class="{of.verdict.split()[0]}">{html.escape(of.words())}</span>' if of else "-")
    return f'<tr data-methods="{methods}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def files_of(places: Sequence[Path]) -> list[Path]:
    """The files of claims that are meant: files, or all of folders; ConfigError where there is none."""
    files = [file for place in places for file in (sorted(place.glob("*.yaml")) if place.is_dir() else [place])]
    if not files:
        raise ConfigError(f"no claim in {', '.join(map(str, places))}: give a file NAME.yaml, or a folder of them")
    return files


@tells_warnings
@tells_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvexp claim`; exit code 0, 1 where a claim was not measured or left its tolerance, 2 for a wrong claim."""
    args = parser().parse_args(argv)
    if args.page is not None:
        check_writable(args.page.parent)
    claims = sorted(
        map(Claim.read, files_of(args.place or [FOLDER])), key=lambda claim: (claim.year, claim.paper, claim.name)
    )
    recorded = {folder: Recorded(folder) for folder in {claim.file.parent for claim in claims}}
    pairs = [(claim, model) for claim in claims for model in args.model or claim.models]
    if args.recheck is not None:
        outputs = str(Path(args.outputs) / "recheck")
        return 0 if all([recheck(*of, recorded[of[0].file.parent], outputs, args.recheck) for of in pairs]) else 1
    judgements = [judge(*of, recorded[of[0].file.parent], args.outputs, args.record) for of in pairs]
    if len(claims) == 1:
        say("\n".join(card(claims[0], judgements)))
    else:
        width = max(len(claim.name) for claim in claims)
        for of in judgements:
            say(f"{of.claim.name:<{width}}  {of.model}  {of.words()}")
        say(f"{len(claims)} claims, {len(judgements)} verdicts: {counted(judgements)}")
    if args.page is not None:
        for ending, text in page(judgements, args.page.parent).items():
            args.page.with_suffix(ending).write_text(text, encoding="utf-8")
            say(f"wrote {args.page.with_suffix(ending)}")
    return 1 if any(of.verdict == MISSING_ROWS for of in judgements) else 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="kvexp claim", description="a paper's claim, measured and judged: docs/claims.md", allow_abbrev=False
    )
    add = result.add_argument
    add("place", nargs="*", type=Path, metavar="FILE", help=f"claims, or folders of them (default: {FOLDER})")
    add("--model", type=lambda names: names.split(","), metavar="NAME,NAME", help="in place of the claim's models")
    add("--outputs", default="outputs", metavar="FOLDER", help="of runs (default: outputs)")
    add("--record", action="store_true", help=f"keep the rows of runs in {ROWS} of the claim's folder")
    add("--recheck", nargs="?", const=0, type=int, metavar="SEED", help="compute one recorded example of each again")
    add("--page", nargs="?", const=PAGE, type=Path, metavar="FILE", help=f"write {PAGE} and its board")
    return result
