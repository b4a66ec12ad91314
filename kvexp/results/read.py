"""What the table needs of a run folder, and which folders it is asked for."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import kvexp
from kvexp.errors import ConfigError
from kvexp.record import Refusal, Run, refusals, runs
from kvexp.record.baseline_check import check_of
from kvexp.results.question_place import question_of

Row = dict[str, Any]

BASELINE, EXPERIMENT = "full", "experiment"
ORDER = ("model", "task", "method", "kv_ratio", "tokens", "setting")  # labels by which runs stand in a table
LISTED = 24  # values of a label that an error names


@dataclass(frozen=True)
class Folder:
    """A run as it lies on disk now. status: done, partial (unfinished, perhaps still going), failed or refused.

    asked: every set of labels it was asked for under; labels: the one shown, the latest unless another was chosen.
    questions: of a task whose examples count only where the full cache answers them, how many were asked; None for any
    other task, and where the full cache's answers are not known.
    """

    run: Run
    rows: list[Row]
    status: str
    problem: str  # what is wrong with a run that is not done, else ""
    asked: list[dict[str, Any]]
    labels: dict[str, Any]
    questions: int | None = None

    def of_first(self, number: int | None) -> "Folder":
        """With the rows of the task's first examples alone; None: with all."""
        return (
            self if number is None else replace(self, rows=[row for row in self.rows if row.get("index", 0) < number])
        )

    def of_answered(self, baseline: "Folder | None") -> "Folder":
        """With the examples alone that the full cache answers, where the task counts no others (`answered` in rows).

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

    @property
    def is_baseline(self) -> bool:
        return bool(self.labels.get("method") == BASELINE) and not self.refused

    @property
    def baseline_check(self) -> str:
        """What `kvexp yardstick` found of its model's full cache: checked, off by ..., or unchecked."""
        return check_of(self.run.path.parent, self.run.config.get("model"), self.run.numerics)

    @property
    def question(self) -> str | None:
        """in_prompt or after_eviction: whether eviction has seen what is asked; None where nothing is asked."""
        return question_of(self.run.config)

    @property
    def own(self) -> dict[str, Any]:
        """What it can be chosen by beside its labels."""
        return {"hash": self.run.hash, "status": self.status, "question": self.question}

    @property
    def refused(self) -> bool:
        """Whether it never had a folder: it has no rows to compare and will have none."""
        return self.status == "refused"

    @property
    def also(self) -> str:
        """The other names of this run, by the labels in which they differ from the one shown."""
        names = [
            ", ".join(f"{key}={value}" for key, value in other.items() if value != self.labels.get(key))
            for other in ({k: v for k, v in labels.items() if k != EXPERIMENT} for labels in self.asked)
        ]
        return "; ".join(dict.fromkeys(name for name in names if name))

    @cached_property
    def unscored(self) -> dict[str, str]:
        """Example -> why it has no score."""
        return {row["example"]: _why(row) for row in self.rows if row["example"] not in self.scored}

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
        """In the order in which the task wrote them: the first one is the headline."""
        return list(dict.fromkeys(name for row in self.scored.values() for name in row["metrics"]))

    @property
    def void(self) -> bool:
        """Whether eviction was asked for and no example ever evicted: its quality says nothing about the method.

        Quantised keys and values are a loss of their own.
        """
        if self.is_baseline or self.run.config.get("quantization") is not None:
            return False
        return bool(self.scored) and not any(evicted(row) for row in self.scored.values())


def evicted(row: Row) -> bool:
    return (row.get("receipt") or {}).get("first_eviction_step") is not None


def number(value: Any) -> float:
    """A finite number as a float, else NaN."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else math.nan


def _why(row: Row) -> str:
    return str(row.get("skipped") or "no metrics")


def folders(outputs_dir: str | Path) -> list[Folder]:
    """Every run, then every job that was refused one."""
    if not Path(outputs_dir).is_dir():
        raise ConfigError(f"no folder {outputs_dir}; name the outputs_dir of your runs, or run: kvexp run")
    return [*map(_folder, runs(outputs_dir)), *map(_refused, refusals(outputs_dir))]


def _folder(run: Run) -> Folder:
    asked = run.asked
    try:
        # Shards write their rows as they come; what is drawn from rows (a bootstrap) must not depend on that.
        rows = sorted(run.rows(), key=lambda row: row.get("index", 0))
    except ConfigError as error:  # shown without a number: its other rows would give another one
        return Folder(run, [], "failed", f"failed: {error}", asked, _shown(asked, asked[-1]))
    finished, failure = run.finished, run.failure()
    status, problem = "partial", f"partial: {len(rows)} rows so far; run it again to go on"
    if finished:
        status, problem = "done", ""
    elif not rows and ((run.command or {}).get("config") or {}).get("divergence") == "only":
        problem = "no answers (divergence=only): divergence=true adds them"
    elif failure is not None:
        status, problem = "failed", f"failed: {failure.get('error', 'error')}: {_first_line(failure.get('message'))}"
    return Folder(run, rows, status, problem, asked, _shown(asked, asked[-1]))


def _refused(refusal: Refusal) -> Folder:
    """As a run without a folder; `hash` is the name of its file."""
    run = Run(refusal.path, refusal.path.stem, kvexp.NUMERICS, {}, refusal.labels, None)
    problem = f"refused: {refusal.error}: {_first_line(refusal.message)}"
    return Folder(run, [], "refused", problem, [refusal.labels], refusal.labels)


def _first_line(message: Any) -> str:
    return str(message or "").strip().split("\n")[0]


def _shown(asked: list[dict[str, Any]], labels: dict[str, Any]) -> dict[str, Any]:
    """These labels, with every experiment that asked for the run: a baseline belongs to all of them."""
    names = dict.fromkeys(str(each[EXPERIMENT]) for each in asked if each.get(EXPERIMENT) is not None)
    return labels | ({EXPERIMENT: ", ".join(names)} if names else {})


def chosen(folders: list[Folder], where: Mapping[str, Any]) -> list[Folder]:
    """Those whose labels, hash or status have the values asked for; a list of values means any of them.

    A run that was asked for under several names is found, and shown, under each.
    """
    names = {name for folder in folders for labels in folder.asked for name in labels}
    names |= {name for folder in folders for name in folder.own}
    for name in where:
        if folders and name not in names:
            raise ConfigError(f"cannot choose runs by {name}; their labels are {', '.join(sorted(names))}")
    found = []
    for folder in folders:
        for labels in reversed(folder.asked):
            if all(_matches(labels | folder.own, *item) for item in where.items()):
                found.append(replace(folder, labels=_shown(folder.asked, labels)))
                break
    return found


def size_or_words(value: Any) -> tuple[int, float, str]:
    """By which values of a label are sorted: numbers by their size, all else behind them by its words."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))


def in_order(folders: Iterable[Folder]) -> list[Folder]:
    """As a table shows them: by model and task, the full cache first, then by method and budget; numbers by size."""

    def place(folder: Folder) -> list[Any]:
        each = [size_or_words(folder.labels.get(name)) for name in ORDER]
        return [*each[:2], not folder.is_baseline, *each[2:], str(folder.question)]

    return sorted(folders, key=place)


def unmatched(outputs_dir: str | Path, where: Mapping[str, Any]) -> str:
    """Why no run was chosen: what there is for each label that none of them has with the value asked for."""
    found = folders(outputs_dir)
    if not found or not where:
        return f"no run under {outputs_dir}; run: kvexp run"
    lines = []
    for name, wanted in where.items():
        if not chosen(found, {name: wanted}):
            there = sorted({str(value) for folder in found for value in _values(folder, name) if value is not None})
            some = ",".join(there[:LISTED]) + (",..." if len(there) > LISTED else "")
            asked = ",".join(map(str, wanted)) if isinstance(wanted, list | tuple | set) else wanted
            lines.append(f"no run under {outputs_dir} has {name}={asked}; there are {name}={some}")
    return "; ".join(lines) or f"no run under {outputs_dir} has all of the labels of --where"


def _values(folder: Folder, name: str) -> list[Any]:
    return [(labels | folder.own).get(name) for labels in folder.asked]


def _matches(labels: Mapping[str, Any], name: str, wanted: Any) -> bool:
    found = labels.get(name)
    return any(_same(found, value) for value in (wanted if isinstance(wanted, list | tuple | set) else [wanted]))


def _same(found: Any, wanted: Any) -> bool:
    """Equal as numbers if both are numbers (0.5 is 0.50), else as text; null and none are None."""
    if found is None or wanted is None:
        return str(found).lower() == str(wanted).lower().replace("null", "none")
    try:
        return float(found) == float(wanted)
    except (TypeError, ValueError):
        return str(found) == str(wanted)
