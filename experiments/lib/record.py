"""What came out of exhibits: kept in experiments/measured.json and measured_real.json, and the pages made of that.

Of a real exhibit it is kept where its numbers come from: weights, data, code and the ids of rows; never a text of them.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import kvexp
from experiments.lib.exhibits import HERE, REAL, load, sweeps
from experiments.lib.real_scale import Command
from kvexp.run.store import Run
from kvexp.util.errors import ConfigError
from kvexp.util.output import tells_errors
from kvexp.util.strict_json import load as load_json

MEASURED, MEASURED_REAL = HERE / "measured.json", HERE / "measured_real.json"
VERDICT = {True: "holds", False: "does not hold", None: "undecided"}
WAITS = "no GPU result yet"  # how the sentence of a speed exhibit without results begins
WAITING, NOT_RUN, NONE = "waits for a GPU", "not run", "-"
SECOND = "gemma3_270m"  # that some real exhibits are made with again: experiments.reproduce --set model=gemma3_270m


@dataclass(frozen=True)
class Rows:
    """The rows of one task: kvexp's digest of the data, and the ids in their order."""

    task: str
    data: str
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Provenance:
    """model: its label; weights: digest and quantisation of its file; commits: of kvexp, of all runs shown.

    n: examples, of the task that has the fewest. rows: empty for measurements inside the model, which keep no ids.
    """

    model: str
    weights: dict[str, Any]
    numerics: int
    commits: tuple[str, ...]
    source: tuple[str, ...]
    n: int
    rows: tuple[Rows, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON, without the rows: they are kept once for all exhibits that share them."""
        entry = asdict(self)
        del entry["rows"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in entry.items()}


def provenance_of(outputs: Path, frame: pd.DataFrame, commands: Sequence[Command]) -> Provenance:
    """The provenance of the runs of `lib.tables.frame_of`, or of what `lib.runner.measured` found."""
    model, source = str(frame["model"].iloc[0]), tuple(dict.fromkeys(command.rows for command in commands))
    if "hash" not in frame:
        return Provenance(model, {}, kvexp.NUMERICS, (), source, int(frame["prompt"].nunique()))
    loaded = [Run.load(outputs / name) for name in frame["hash"]]
    commits = {str(load_json(run.path / "env.json").get("commit")) for run in loaded}
    read = [run.rows() for run in loaded]
    weights = next((row["weights"] for run_rows in read for row in run_rows if row.get("weights")), {})
    rows: dict[str, Rows] = {}
    for (_, shown), run, run_rows in zip(frame.iterrows(), loaded, read, strict=True):
        order = {row["example"]: row["index"] for row in run_rows}
        ids = tuple(sorted(shown["scores"], key=lambda name: order[name]))
        task = str(shown["task"])
        if task not in rows or len(ids) > len(rows[task].ids):
            rows[task] = Rows(task, str(run.config.get("data")), ids)
    n = min(len(used.ids) for used in rows.values())
    return Provenance(model, dict(weights), loaded[0].numerics, tuple(sorted(commits)), source, n, tuple(rows.values()))


@dataclass(frozen=True)
class Made:
    """One exhibit: its table, what became of the claim, and the CPU seconds it took now (less where runs existed).

    CPU seconds (of all threads, user and system) say what an exhibit costs whatever else the machine does.
    """

    name: str
    table: pd.DataFrame
    holds: bool | None
    words: str
    seconds: float
    folder: Path
    divergence: tuple[bool | None, str] | None = None  # the claim judged again, where its runs have a divergence
    provenance: Provenance | None = None  # at the real scale


def recorded(scale: str) -> dict[str, dict[str, Any]]:
    """Exhibit -> {holds, words, seconds} as recorded at this scale; of a real one also divergence and provenance.

    scale: also SECOND, the real scale on that model.
    """
    known = _read(MEASURED_REAL if scale in (REAL, SECOND) else MEASURED)
    results: dict[str, dict[str, Any]] = known.get("exhibits" if scale == REAL else scale, {})
    return results


def examples_of(entry: dict[str, Any]) -> str:
    """How many examples a real exhibit has: 24, or of several tasks 5 of each of 4, or 24 cnn_dailymail, 12 news_qa."""
    known = _read(MEASURED_REAL).get("rows", {})
    counts = [(known[key]["task"], len(known[key]["ids"])) for key in entry.get("rows", ())]
    if len(counts) < 2:
        return str(entry.get("n", "-"))
    if len({count for _, count in counts}) == 1:
        return f"{counts[0][1]} of each of {len(counts)} tasks"
    return ", ".join(f"{count} {task}" for task, count in counts)


def _read(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return known


def _write(path: Path, known: dict[str, Any]) -> None:
    known = {name: dict(sorted(known[name].items())) for name in sorted(known)}
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def record(name: str, scale: str, holds: bool | None, words: str, seconds: float | None) -> None:
    """Keep what came out of an exhibit. seconds: None where some rows were there already: the time on record stays."""
    known = _read(MEASURED)
    before = known.get(scale, {}).get(name, {}).get("seconds")
    entry = {"holds": holds, "words": words, "seconds": before if seconds is None else round(seconds)}
    known.setdefault(scale, {})[name] = entry
    _write(MEASURED, known)


def record_real(result: Made) -> None:
    """Keep a result of the real scale: both verdicts, and where the numbers come from. Ids of rows are kept once.

    Several processes may record at once. seconds: the most CPU time one call took for what it did not find there.
    """
    with (HERE / "__init__.py").open("rb") as lock:  # any file that is always there
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _read(MEASURED_REAL)
        second = result.provenance is not None and result.provenance.model == SECOND
        exhibits, rows = known.setdefault(SECOND if second else "exhibits", {}), known.setdefault("rows", {})
        seconds = max(round(result.seconds), exhibits.get(result.name, {}).get("seconds", 0))
        entry: dict[str, Any] = {"holds": result.holds, "words": result.words, "seconds": seconds}
        if result.divergence is not None:
            entry["divergence"] = {"holds": result.divergence[0], "words": result.divergence[1]}
        if result.provenance is not None:
            keys = []
            for task_rows in result.provenance.rows:
                ids = list(task_rows.ids)
                key = f"{task_rows.task} {hashlib.sha256(json.dumps([task_rows.data, ids]).encode()).hexdigest()[:8]}"
                rows[key] = {"task": task_rows.task, "data": task_rows.data, "ids": ids}
                keys.append(key)
            entry |= {**result.provenance.plain(), "rows": keys}
        exhibits[result.name] = entry
        every = [*known.get("exhibits", {}).values(), *known.get(SECOND, {}).values()]
        used = {key for exhibit in every for key in exhibit.get("rows", ())}
        known["rows"] = {key: value for key, value in rows.items() if key in used}
        _write(MEASURED_REAL, known)


def status(entry: dict[str, Any] | None) -> str:
    """What became of a claim, from its entry in measured.json."""
    if entry is None:
        return NOT_RUN
    return WAITING if entry["words"].startswith(WAITS) else VERDICT[entry["holds"]]


def is_speed(name: str) -> bool:
    """Whether an exhibit is about speed: what is recorded of it is a GPU's, on random weights in the paper's layout."""
    return not load(name).testbed_only and not sweeps(name, REAL)


def real_status(name: str, entry: dict[str, Any] | None) -> tuple[str, str]:
    """(by the paper's metric, by divergence) of an exhibit on the real model; NONE where it is not judged so."""
    if entry is None:
        return (NONE if load(name).testbed_only or is_speed(name) else NOT_RUN), NONE
    again = entry.get("divergence")
    return status(entry), NONE if again is None else VERDICT[again["holds"]]


@tells_errors(ConfigError)
def write_or_check(
    pages: Mapping[Path, Callable[[], str]], command: str, arguments: Sequence[str] | None, title: str | None
) -> int:
    """Write what is made of each page, or with --check see whether it is there: 0, 1 if not, 2 if it cannot be made.

    command: what to type; title: the docstring of who types it.
    """
    parser = argparse.ArgumentParser(prog=command, description=inspect.cleandoc(title or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if what stands there is something else")
    check = parser.parse_args(arguments).check
    texts = {page: text() for page, text in pages.items()}
    stale = [page for page, text in texts.items() if not page.exists() or page.read_text("utf-8") != text]
    if check:
        names = ", ".join(page.name for page in stale)
        print(f"{names} not current; run: {command}" if stale else "current")
        return 1 if stale else 0
    for page in texts:
        page.write_text(texts[page], encoding="utf-8")
        print(f"wrote {page}")
    return 0
