"""The runs under a folder of outputs, read once, and the choice among them that a command line makes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import json
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvexp
from kvexp.run.store import Refusal, Run, check_same_prompts, refusals, runs
from kvexp.run.user_code import BASES, ModulePlace, place_of, source_files
from kvexp.util.errors import ConfigError
from kvexp.util.machine import BUSY

if TYPE_CHECKING:
    import pandas as pd

# Where a question stands: in the prompt that is evicted, or behind the eviction.
IN_PROMPT, AFTER_EVICTION = "in_prompt", "after_eviction"
WORDS = {IN_PROMPT: "question in prompt", AFTER_EVICTION: "question after eviction"}
KEY = "task.question="
# Tasks that had an instruction before they had the option; their identities leave it out at in_prompt.
INSTRUCTED = ("cnn_dailymail", "govreport", "news", "soda", "testbed_dialogue", "testbed_summary", "xsum")


def question_of(identity: Mapping[str, Any]) -> str | None:
    """Place of the question by a run's identity: in_prompt or after_eviction; None for a task that asks nothing."""
    task = identity.get("task")
    if not isinstance(task, Mapping):
        return None
    if task.get("question") in WORDS:
        return str(task["question"])
    return IN_PROMPT if task.get("name") in INSTRUCTED else None


def question_words(values: Iterable[Any]) -> str:
    """What a title says of these runs: "question in prompt", "question in prompt and after eviction", or nothing."""
    places = {value for value in values if isinstance(value, str)}
    said = [WORDS[value] for value in WORDS if value in places]
    return " and ".join([*said[:1], *(words.removeprefix("question ") for words in said[1:])])


def titled(title: str, values: Iterable[Any]) -> str:
    """The title of a table or figure, with what is said of the question behind it."""
    return ", ".join(filter(None, [title, question_words(values)]))


Row = dict[str, Any]

BASELINE, EXPERIMENT = "full", "experiment"
QUANTISED_FULL = "full_quantised"  # as labels of runs say
ORDER = ("model", "task", "method", "kv_ratio", "tokens", "setting")  # labels by which runs stand in a table
LISTED = 24  # values of a label that an error names
FOUND = ("hash", "status", "question", "numerics", "code", "all_versions")  # in `where`: no label that was asked for
ALL_VERSIONS = "all_versions"  # in `where`: with runs of older code, and refused jobs that a later run made up for


@dataclass(frozen=True)
class Folder:
    """A run as it lies on disk now. status: done, partial (unfinished, perhaps still going), failed or refused.

    asked: every set of labels it was asked for under; labels: the one shown, the latest unless another was chosen.
    questions: of a task whose examples count only where the full cache answers them, how many were asked; None for any
    other task, and where the full cache's answers are not known. apart: the part of the setting shown that is there
    because no label distinguishes the run from another.
    """

    run: Run
    rows: list[Row]
    status: str
    problem: str  # what is wrong with a run that is not done, else ""
    asked: list[dict[str, Any]]
    labels: dict[str, Any]
    questions: int | None = None
    apart: str = ""

    def of_answered(self, baseline: Folder | None) -> Folder:
        """Run reduced to the examples that the full cache answers, where its task counts no others.

        baseline: the full cache's run, for itself too. All examples stay where its answers are not known.
        """
        known = baseline.answers if baseline is not None else {}
        if not self.answers or not known:
            return self
        rows = [row for row in self.rows if row["example"] not in self.answers or known.get(row["example"])]
        return replace(self, rows=rows, questions=sum(name in known for name in self.answers))

    @cached_property
    def answers(self) -> dict[str, bool]:
        """Example -> whether its answer is right by the task's rule; empty for tasks that count all examples."""
        return {name: row["answered"] for name, row in self.scored.items() if row.get("answered") is not None}

    @cached_property
    def sources(self) -> dict[str, dict[str, Any]]:
        """Group -> class and digests of the files, of a user's method and task, as the run's identity has them."""
        return sources_of(self.run)

    @cached_property
    def code(self) -> str | None:
        """Digests of the code of a user's method and task; None for kvexp's own."""
        return "+".join(map(_short, self.sources.values())) or None

    @cached_property
    def made(self) -> float:
        """When its last row was written, or else its beginning or its refusal, in seconds since 1970."""
        for file in (self.run.path / "examples.jsonl", self.run.path / "config.json", self.run.path):
            with contextlib.suppress(OSError):
                return file.stat().st_mtime
        return 0.0

    @property
    def is_baseline(self) -> bool:
        return bool(self.labels.get("method") == BASELINE) and not self.refused

    @property
    def question(self) -> str | None:
        """Place of the question, which says whether eviction has seen it; None where nothing is asked."""
        return question_of(self.run.config)

    @property
    def family(self) -> str:
        """Model, task and NUMERICS, which runs that are compared with each other have in common."""
        return repr([self.labels.get(name) for name in ("model", "task", "numerics")])

    @property
    def own(self) -> dict[str, Any]:
        """Further values, with its labels, that `where` can choose a run by."""
        return {"hash": self.run.hash, "status": self.status, "question": self.question}

    @property
    def refused(self) -> bool:
        """Whether the job was refused before it had a folder: it has no rows and will have none."""
        return self.status == "refused"

    @property
    def also(self) -> str:
        """Other names of this run: the labels in which they differ from the ones shown."""
        shown = {**self.labels, "setting": str(self.labels.get("setting") or "").removesuffix(self.apart).strip()}
        names = [
            ", ".join(f"{key}={value}" for key, value in other.items() if value != shown.get(key))
            for other in ({k: v for k, v in labels.items() if k != EXPERIMENT} for labels in self.asked)
        ]
        return "; ".join(dict.fromkeys(name for name in names if name))

    @cached_property
    def unscored(self) -> dict[str, str]:
        """Example -> why it has no score."""
        missing = (row for row in self.rows if row["example"] not in self.scored)
        return {row["example"]: str(row.get("skipped") or "no metrics") for row in missing}

    @property
    def reasons(self) -> str:
        """Why examples have no score, each reason with its number."""
        return ", ".join(f"{why} ({number})" for why, number in sorted(Counter(self.unscored.values()).items()))

    @property
    def revisions(self) -> set[str]:
        """The commits of a hub model its rows were made with; empty where there is none."""
        return {row["revision"] for row in self.rows if row.get("revision")}

    @cached_property
    def scored(self) -> dict[str, Row]:
        """The rows that have a score, by example; every other row counts as skipped."""
        return {row["example"]: row for row in self.rows if not row.get("skipped") and row.get("metrics")}

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics in the order in which the task wrote them: the first one is the headline.

        Where no row has a reference, none that compares with it (`task=prompts` takes rows without answers).
        """
        names = dict.fromkeys(name for row in self.scored.values() for name in row["metrics"])
        alone = all(row.get("reference") == "" for row in self.scored.values())
        return [name for name in names if not (alone and name.startswith("rouge"))]

    @property
    def void(self) -> bool:
        """Whether eviction was asked for and no example ever evicted: its quality says nothing about the method.

        Quantised keys and values are a loss of their own, also in an engine, whose full cache evicts nothing.
        """
        quantised = self.run.config.get("quantization") is not None or self.labels.get("method") == QUANTISED_FULL
        if self.is_baseline or quantised:
            return False
        return bool(self.scored) and not any(evicted(row) for row in self.scored.values())


def evicted(row: Row) -> bool:
    return (row.get("receipt") or {}).get("first_eviction_step") is not None


def answer_of(row: Mapping[str, Any]) -> str:
    """The text that was scored: without the thinking before it, where a row tells them apart."""
    return str(row.get("answer", row["output"]))


def number(value: Any) -> float:
    """A finite number as a float, else NaN."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else math.nan


@dataclass(frozen=True)
class Runs:
    """What one command reads of a folder of outputs: its tables, figures and pages are all made of this.

    everything: all runs; shown: those asked for; left_out: lines that say which versions of methods are not shown;
    first: the task's first examples alone are read, None: all.
    """

    outputs: Path
    everything: list[Folder]
    shown: list[Folder]
    left_out: list[str]
    first: int | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def known(self) -> dict[str, Folder]:
        """Hash -> run, baselines that are not shown included."""
        return {folder.run.hash: folder for folder in self.everything}

    @property
    def ran(self) -> list[Folder]:
        """The runs shown that are no refused jobs."""
        return [folder for folder in self.shown if not folder.refused]

    def compared(self) -> Iterator[tuple[Folder, Folder]]:
        """(run, its baseline) of the runs shown that have scores and are no baselines, in the order of a table."""
        for folder in in_order(self.ran):
            baseline = baseline_of(folder, self.known)
            if baseline is not None and folder.metrics and not folder.is_baseline:
                yield folder, baseline

    def frame(self, table: Callable[[Runs], pd.DataFrame]) -> pd.DataFrame:
        """`table(self)`, computed the first time it is asked for."""
        if table not in self._made:
            self._made[table] = table(self)
        return self._made[table]  # type: ignore[no-any-return]


def read_runs(
    outputs_dir: str | Path, where: Mapping[str, Any] | None = None, first: int | None = None, *, alone: bool = False
) -> Runs:
    """The runs under a folder, or one run by its own folder; where: label -> value or values, as `chosen` takes them.

    first: with the rows of the task's first examples alone. alone: no rows are read but of the runs that `where` leaves
    and of their baselines, unless others decide which those are. ConfigError without such a folder, or for a label
    that no run has.
    """
    if (Path(outputs_dir) / "config.json").is_file():  # the folder of one run
        run = Path(outputs_dir).resolve()
        outputs_dir, where = run.parent, {**(where or {}), "hash": [run.name]}
    everything = folders(outputs_dir, _named(outputs_dir, where or {}) if alone else None)
    if first is not None:
        rows = [[row for row in folder.rows if row.get("index", 0) < first] for folder in everything]
        everything = [replace(folder, rows=kept) for folder, kept in zip(everything, rows, strict=True)]
    return Runs(Path(outputs_dir), everything, *chosen_and_left_out(everything, where or {}), first)


def _named(outputs_dir: str | Path, where: Mapping[str, Any]) -> Collection[str] | None:
    """Hashes of the runs that may be shown; None where all have to be read to know which those are.

    All, that is, where runs by older code or refused jobs are left out because of other runs.
    """
    if (named := where.get("hash")) is not None:
        return [str(named)] if not isinstance(named, list | tuple | set) else [str(name) for name in named]
    labels = {name: value for name, value in where.items() if name not in FOUND}
    if not labels or any(True for _ in refusals(outputs_dir)):
        return None
    every = list(runs(outputs_dir))
    if any(map(sources_of, every)):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with names is said when the run is read
        hashes = {run.hash for run in every if any(_has(labels_of_run, labels) for labels_of_run in run.asked)}
    return hashes or None


def _has(labels: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(_matches(labels, *item) for item in wanted.items())


def score_pairs(folder: Folder, baseline: Folder) -> Iterator[tuple[Row, float, float]]:
    """(row, its score, the baseline's) in the headline metric, of the examples that count and both runs scored."""
    metric, full = folder.metrics[0], baseline.of_answered(baseline).scored
    for name, row in folder.of_answered(baseline).scored.items():
        if name in full:
            yield row, number(row["metrics"].get(metric)), number(full[name]["metrics"].get(metric))


def folders(outputs_dir: str | Path, only: Collection[str] | None = None) -> list[Folder]:
    """Every run, by hash, then every job that was refused one. only: hashes, of runs that are read with baselines."""
    if not Path(outputs_dir).is_dir():
        raise ConfigError(f"no folder {outputs_dir}; name the outputs_dir of your runs, or run: kvexp run")
    shown = list(runs(outputs_dir, only))
    if only is not None:
        baselines = {run.baseline for run in shown if run.baseline is not None}
        shown = sorted([*shown, *runs(outputs_dir, baselines.difference(only))], key=lambda run: run.path)
    labelled = [_labelled(folder, folder.asked[-1]) for folder in map(_folder, shown)]
    return [*labelled, *map(_refused, refusals(outputs_dir))]


def _folder(run: Run) -> Folder:
    labels = run.asked
    try:
        # Shards write their rows as they come; what is drawn from rows (a bootstrap) must not depend on that.
        rows = sorted(map(_timed, run.rows()), key=lambda row: row.get("index", 0))
    except ConfigError as error:  # shown without a number: its other rows would give another one
        return Folder(run, [], "failed", f"failed: {error}", labels, {})
    failure = run.failure()
    status, problem = "partial", f"partial: {len(rows)} rows so far; run it again to go on"
    if run.finished_with(rows):
        status, problem = "done", ""
    elif not rows and ((run.command or {}).get("config") or {}).get("divergence") == "only":
        problem = "no answers (divergence=only): divergence=true adds them"
    elif failure is not None:
        status, problem = "failed", f"failed: {failure.get('error', 'error')}: {_first_line(failure.get('message'))}"
    return Folder(run, rows, status, problem, labels, {})


def _timed(row: Row) -> Row:
    """The row, without its times where other processes took the cores meanwhile: they are of no use to anybody."""
    return {**row, "seconds": dict.fromkeys(row.get("seconds") or {})} if is_busy(row) else row


def is_busy(row: Row) -> bool:
    return number(row.get("load")) >= BUSY


def _refused(refusal: Refusal) -> Folder:
    """Refused job as a run without a folder; `hash` is the name of its file."""
    run = Run(refusal.path, refusal.path.stem, kvexp.NUMERICS, {}, refusal.labels, None)
    problem = f"refused: {refusal.error}: {_first_line(refusal.message)}"
    return Folder(run, [], "refused", problem, [refusal.labels], {**refusal.labels, "numerics": run.numerics})


def _first_line(message: Any) -> str:
    return str(message or "").strip().split("\n")[0]


def _labelled(folder: Folder, labels: dict[str, Any]) -> Folder:
    """Run under these labels, with its NUMERICS, the code of a user's classes and all experiments that asked for it."""
    names = dict.fromkeys(str(request[EXPERIMENT]) for request in folder.asked if request.get(EXPERIMENT) is not None)
    more: dict[str, Any] = {EXPERIMENT: ", ".join(names)} if names else {}
    more |= {"code": "+".join(code[:6] for code in folder.code.split("+"))} if folder.code else {}
    return replace(folder, labels=labels | {"numerics": folder.run.numerics} | more)


def baseline_of(folder: Folder, known: Mapping[str, Folder]) -> Folder | None:
    """The run that a run's rows are paired with, where it is known (by hash).

    ConfigError where any of their examples was sent with different tokens.
    """
    baseline = known.get(folder.run.baseline or "")
    if baseline is not None:
        check_pair(folder, baseline)
    return baseline


def check_pair(first: Folder, other: Folder) -> None:
    """ConfigError where rows of two runs, which are to be paired by example, were sent with different tokens."""
    if first.run.numerics == other.run.numerics:  # else they are not paired
        check_same_prompts(first.run.path, first.scored, other.run.path, other.scored)


def chosen(folders: list[Folder], where: Mapping[str, Any]) -> list[Folder]:
    """Runs whose labels, hash or status have the values asked for; a list of values means any of them.

    A run that was asked for under several names is found, and shown, under each. Runs of older code of a user's class,
    and refused jobs that a later run made up for, are left out unless where has ALL_VERSIONS or names hashes, of the
    latter also where it names a status. Runs with the same labels get what differs added to their setting.
    """
    return chosen_and_left_out(folders, where)[0]


def chosen_and_left_out(folders: list[Folder], where: Mapping[str, Any]) -> tuple[list[Folder], list[str]]:
    """`chosen`, and a line for each method or task of which versions were left out."""
    matching = _matching(folders, {name: value for name, value in where.items() if name != ALL_VERSIONS})
    said: list[str] = []
    if ALL_VERSIONS not in where and "hash" not in where:
        matching, said = _current(matching, folders)
        if "status" not in where:
            matching = [folder for folder in matching if not (folder.refused and _made_up_for(folder, folders))]
    return _distinguished(matching), said


def _matching(folders: list[Folder], where: Mapping[str, Any]) -> list[Folder]:
    names = {name for folder in folders for labels in (folder.labels, *folder.asked) for name in labels}
    names |= {name for folder in folders for name in folder.own}
    for name in where:
        if folders and name not in names:
            raise ConfigError(f"cannot choose runs by {name}; their labels are {', '.join(sorted(names))}")
    matching = []
    for folder in folders:
        own_labels = folder.own | {name: folder.labels[name] for name in ("numerics", "code") if name in folder.labels}
        for labels in reversed(folder.asked):
            if _has(labels | own_labels, where):
                matching.append(folder if folder.refused else _labelled(folder, labels))
                break
    return matching


def _current(matching: list[Folder], everything: list[Folder]) -> tuple[list[Folder], list[str]]:
    """Runs without those by older code of a user's method or task; lines that say so.

    The code it has now is what its file holds; where that cannot be found, or has not run, what ran last. everything:
    all runs of the folder, for whichever ran last may be hidden by a `where`.
    """
    versions: dict[tuple[str, str], list[Folder]] = defaultdict(list)
    for folder in everything:
        for group in folder.sources:
            versions[group, _class_of(folder, group)].append(folder)
    newest = {key: _newest(same_class, key[0]).sources[key[0]] for key, same_class in versions.items()}
    kept, older, said = [], defaultdict[str, set[str]](set), []
    for folder in matching:
        groups = [name for name, source in folder.sources.items() if source != newest[name, _class_of(folder, name)]]
        if groups:
            older[f"older code of {folder.labels.get(groups[0])}"].add(folder.run.hash)
        else:
            kept.append(folder)
    for name, hashes in older.items():
        said.append(f"left out: {len(hashes)} run{'s' * (len(hashes) != 1)} of {name}; --all-versions shows them too.")
    return kept, said


def sources_of(run: Run) -> dict[str, dict[str, Any]]:
    """Group -> what of a run's identity stands for the code of a user's class in it; of kvexp's own there is none."""
    nodes = {group: run.config.get(group) for group in BASES}
    sources = {group: node.get("source") for group, node in nodes.items() if isinstance(node, Mapping)}
    return {group: source for group, source in sources.items() if isinstance(source, dict)}


def _place_of_class(folder: Folder, group: str) -> ModulePlace | None:
    reference = (folder.run.command or {}).get(f"{group}_found_as")
    return place_of(reference) if isinstance(reference, str) else None


def _class_of(folder: Folder, group: str) -> str:
    """What the versions of a user's class have in common: its name, and the file that it was found in."""
    place = _place_of_class(folder, group)
    return f"{folder.sources[group].get('class')} {place.file.resolve() if place is not None else None}"


def _newest(versions: list[Folder], group: str) -> Folder:
    """A run by the code that the class has now."""
    latest = max(versions, key=lambda folder: folder.made)
    try:
        place = _place_of_class(latest, group)
        files = source_files(place) if place is not None else None
    except OSError:
        return latest
    return next((version for version in versions if files and files == version.sources[group].get("files")), latest)


def _made_up_for(refused: Folder, everything: Iterable[Folder]) -> bool:
    """Whether a later run of the same model, task and method has rows; one of these labels may be spelt nearly so."""

    def is_alike(folder: Folder) -> bool:
        pairs = [(str(refused.labels.get(name)), str(folder.labels.get(name))) for name in ORDER[:3]]
        near = all(_is_near(wrong, right) for wrong, right in pairs)
        return near and sum(wrong != right for wrong, right in pairs) <= 1

    return any(folder.scored and folder.made > refused.made and is_alike(folder) for folder in everything)


@functools.lru_cache(maxsize=4096)
def _is_near(wrong: str, right: str) -> bool:
    return bool(difflib.get_close_matches(wrong, [right], 1, cutoff=0.75))


def _distinguished(shown: list[Folder]) -> list[Folder]:
    """Runs with what differs between runs of equal labels, and the code of methods with several, in their settings.

    Where one run of a model and task needs it said (its data, say), all of them have it said.
    """
    families: dict[str, list[Folder]] = defaultdict(list)
    for folder in shown:
        if not folder.refused:
            families[folder.family].append(folder)
    more: dict[str, str] = {}
    for family in families.values():
        same: dict[str, list[Folder]] = defaultdict(list)
        codes: dict[str, set[str | None]] = defaultdict(set)
        for folder in family:
            labels = {name: value for name, value in folder.labels.items() if name != EXPERIMENT}
            same[_short([labels, folder.question])].append(folder)
            codes[str(folder.labels.get("method"))].add(folder.code)
        keys = sorted({key for alike in same.values() for key in _differing(alike)})
        for folder in family:
            said = [f"{key}={_said(folder.run.config[key])}" for key in keys if key in folder.run.config]
            said += [f"code={folder.labels['code']}"] if len(codes[str(folder.labels.get("method"))]) > 1 else []
            more[folder.run.hash] = " ".join(said)
    changed = []
    for folder in shown:
        if apart := more.get(folder.run.hash):
            setting = f"{folder.labels.get('setting') or ''} {apart}".strip()
            folder = replace(folder, labels={**folder.labels, "setting": setting}, apart=apart)
        changed.append(folder)
    return changed


def _differing(alike: list[Folder]) -> list[str]:
    """Keys of their configurations in which runs differ."""
    keys = {key for folder in alike for key in folder.run.config}
    return [key for key in keys if len({_short(folder.run.config.get(key)) for folder in alike}) > 1]


def _said(value: Any) -> str:
    """A plain value as it is, else six digits that stand for it."""
    return str(value) if isinstance(value, str | int | float) and len(str(value)) <= 12 else _short(value)[:6]


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def size_or_words(value: Any) -> tuple[int, float, str]:
    """Sort key of a value of a label: numbers by their size, all else behind them as text."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


def in_order(folders: Iterable[Folder]) -> list[Folder]:
    """Runs in a table's order: by model and task, the full cache first, then method and budget; numbers by size."""

    def place(folder: Folder) -> list[Any]:
        values = [size_or_words(folder.labels.get(name)) for name in ORDER]
        return [*values[:2], not folder.is_baseline, *values[2:], str(folder.question)]

    return sorted(folders, key=place)


def unmatched(outputs_dir: str | Path, where: Mapping[str, Any]) -> str:
    """Why no run was chosen: what there is for each label that none of them has with the value asked for."""
    everything = folders(outputs_dir)
    if not everything or not where:
        return f"no run under {outputs_dir}; run: kvexp run"
    lines = []
    for name, wanted in where.items():
        if name != ALL_VERSIONS and not chosen(everything, {name: wanted}):
            values = ((labels | folder.own).get(name) for folder in everything for labels in folder.asked)
            known = sorted({str(value) for value in values if value is not None})
            listed = ",".join(known[:LISTED]) + (",..." if len(known) > LISTED else "")
            wanted_words = ",".join(map(str, wanted)) if isinstance(wanted, list | tuple | set) else wanted
            lines.append(f"no run under {outputs_dir} has {name}={wanted_words}; there are {name}={listed}")
    return "; ".join(lines) or f"no run under {outputs_dir} has all of the labels of --where"


def _matches(labels: Mapping[str, Any], name: str, wanted: Any) -> bool:
    label = labels.get(name)
    return any(_same(label, value) for value in (wanted if isinstance(wanted, list | tuple | set) else [wanted]))


def _same(label: Any, wanted: Any) -> bool:
    """Whether two values are equal: as numbers if both are (0.5 is 0.50), else as text; null and none are None."""
    if label is None or wanted is None:
        return str(label).lower() == str(wanted).lower().replace("null", "none")
    try:
        return float(label) == float(wanted)
    except (TypeError, ValueError):
        return str(label) == str(wanted)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Arguments that choose the runs of a folder; `chosen_by` reads them."""
    parser.add_argument(
        *("--where", "-w"),
        nargs="+",
        action="extend",
        default=[],
        metavar="LABEL=VALUE",
        help="only these runs: method=h2o,keyformer kv_ratio=0.5 status=done",
    )
    parser.add_argument(
        "--all-versions",
        action="store_true",
        help="also runs by older code of a method of your own, and refused jobs that a later run made up for",
    )


def chosen_by(args: argparse.Namespace) -> dict[str, Any]:
    """What `kvexp.results.read.chosen` takes for the arguments of `add_choice`."""
    return where(args.where) | ({ALL_VERSIONS: True} if args.all_versions else {})


def where(pairs: Sequence[str]) -> dict[str, Any]:
    """Words after --where as a mapping: ["method=h2o,tova"] -> {"method": ["h2o", "tova"]}."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"--where takes LABEL=VALUE, got {pair!r}; name the outputs folder before --where")
        result.setdefault(name, []).extend(values.split(","))
    return result
