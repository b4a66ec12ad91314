"""Run folders and their rows, as the commands take them. Nothing here loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record import Run
from kvexp.results.question_place import question_of, titled
from kvexp.results.read import chosen as labelled
from kvexp.results.read import folders
from kvexp.results.stats import lower_is_better

Row = dict[str, Any]


def run_at(words: str) -> Run:
    """The run that OUTPUTS/HASH names, or OUTPUTS@LABEL=VALUE,...: the one run under OUTPUTS with these labels.

    ConfigError lists what there is where that is none, or several.
    """
    outputs, at, labels = words.rpartition("@")
    if not at:
        if not (Path(words) / "config.json").exists():
            raise ConfigError(f"{words} is no run: name its folder, outputs/HASH, or outputs@method=h2o,kv_ratio=0.3")
        return Run.load(words)
    pairs = [word.partition("=") for word in labels.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigError(f"{words}: labels are given as in outputs@method=h2o,kv_ratio=0.3")
    known = [folder for folder in folders(outputs) if not folder.refused]
    found = labelled(known, {name: value for name, _, value in pairs})
    if len(found) != 1:
        each = "\n".join(f"  {folder.run.path}  {title_of(folder.run)}" for folder in (found or known))
        raise ConfigError(f"{len(found)} runs have the labels {labels}; give more labels, or a folder:\n{each}")
    return found[0].run


def baseline_of(run: Run) -> Run:
    """The full-attention run beside a run, with the same model, task and examples."""
    if run.baseline is None:
        raise ConfigError(f"{run.path} is a run of full attention: there is nothing to compare it with")
    return Run.load(run.path.parent / run.baseline)


def rows_of(run: Run) -> dict[str, Row]:
    """The rows that were answered, by example; ConfigError for one that lacks what a diagnosis needs."""
    found = {row["example"]: row for row in run.rows() if not row.get("skipped")}
    for name, row in found.items():
        for field in ("index", "metrics", "output", "receipt"):
            if row.get(field) is None:
                raise ConfigError(
                    f"{run.path}: the row of example {name} has no {field}; remove its line from examples.jsonl and "
                    "run the same command again, which makes that row anew"
                )
    return found


def chosen(rows: Mapping[str, Row], name: str) -> Row:
    """The row of this example: its id, the beginning of one id alone, or its index in the task."""
    found = [row for key, row in rows.items() if key == name]
    found = found or [row for row in rows.values() if str(row["index"]) == name]
    found = found or [row for key, row in rows.items() if key.startswith(name)]
    if len(found) != 1:
        some = ", ".join(list(rows)[:5])
        what = "no example" if not found else f"{len(found)} examples"
        raise ConfigError(f"{what} of the run named {name!r}; it has {len(rows)}: {some}, ...")
    return found[0]


def headline(row: Row) -> float:
    """The row's first metric, negated where less is better."""
    name, value = next(iter(row["metrics"].items()))
    return -float(value) if lower_is_better(name) else float(value)


def short_title(run: Run) -> str:
    """Method, budget and task of a run for messages, as "h2o 0.3 testbed_needle"."""
    labels = run.asked[-1]
    ratio = "" if labels.get("kv_ratio") is None else f" {labels['kv_ratio']:g}"
    return f"{labels.get('method')}{ratio} {labels.get('task')}"


def title_of(run: Run) -> str:
    """The run's `short_title`, its model, what else was set by hand, and whether eviction has seen the question."""
    labels = run.asked[-1]
    known = ", ".join(word for word in (short_title(run), labels.get("model"), labels.get("setting")) if word)
    return titled(known, [question_of(run.config)])
