"""The rows behind pages: where they are, how one is made anew, and how far it may be from what is recorded.

A row has COLUMNS. Rows of one PROMPT are made together, since they share its prefill and the full cache's answer.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import kvexp
from experiments.lib import league
from experiments.lib.exhibits import HERE, REAL, ROOT
from experiments.lib.real_scale import rows_of
from experiments.lib.record import MEASURED_REAL, SECOND, recorded
from experiments.lib.runner import Setup
from experiments.lib.runner import make as make_exhibit
from experiments.lib.sweep import jobs, late, planned_seconds, sweep
from experiments.studies import KL_COLUMNS, decoding, read_wide, ruler_board
from kvexp.results.divergence import per_example
from kvexp.results.read import Folder, read_runs
from kvexp.run.store import OWN
from kvexp.util.errors import ConfigError
from kvexp.util.files import replace

BLOCK = ["model", "task", "question"]
PROMPT = [*BLOCK, "example"]
CACHE = ["method", "how", "kv_ratio"]  # how: further words that tell caches of one method and budget apart
COLUMNS = ["numerics", *PROMPT, *CACHE, "kl"]
DOCS = ROOT / "docs"
FULL = ("method=full", "kv_ratio=1.0")
SMOLLM = "smollm2_135m"


@dataclass(frozen=True)
class Tolerance:
    """By how much a row may differ: absolute nats per token plus a share of the recorded number; why: the reason."""

    absolute: float
    relative: float
    why: str

    def of(self, rows: pd.DataFrame) -> pd.Series:
        """What is allowed for each recorded row; a column `printed` says half of the last digit that is recorded."""
        printed = rows.get("printed", 0.0)
        return self.absolute + self.relative * rows["kl"].abs() + printed

    def __str__(self) -> str:
        return f"{self.absolute:g} + {100 * self.relative:g} %"


# Written before any row was computed anew.
ROUNDING = Tolerance(
    3.3e-4,
    0.01,
    "four times the largest difference between threads and instruction sets, and twice what means of 20 prompts moved "
    "from NUMERICS 7 to 11",
)
LONG_TEXT = Tolerance(
    3.3e-4, 0.05, "3.3e-4 as elsewhere; 5 %: log KL within 0.05 is what the study was designed to know"
)


@dataclass(frozen=True)
class Recording:
    """The rows behind one page, and how they are made.

    page: what shows them; file: where they are; read: COLUMNS of that file; calibrated: whose calibrations its methods
    had, "league" or "own" (of kvexp's articles); whole: each prompt is a mean, of which one is drawn; data: all needs
    DATA.
    """

    name: str
    page: Path
    file: Path
    read: Callable[[Path], pd.DataFrame]
    tolerance: Tolerance = ROUNDING
    calibrated: str = "own"
    whole: bool = False
    data: bool = False
    unit: str = " nats"

    def rows(self) -> pd.DataFrame:
        """COLUMNS of every recorded row, and `printed` where a recording has it."""
        return self.read(self.file).filter([*COLUMNS, "printed"])

    def make(self, rows: pd.DataFrame, folder: Path, data: str | None) -> None:
        """Compute what FOLDER lacks of the rows, which are of one prompt."""
        raise NotImplementedError

    def computed(self, folder: Path) -> pd.DataFrame:
        """COLUMNS of what was computed at today's NUMERICS."""
        raise NotImplementedError

    def seconds(self, rows: pd.DataFrame, folder: Path, data: str | None) -> float:
        """How long `make` takes for the rows of one prompt, roughly; NaN where that is not known."""
        raise NotImplementedError


@dataclass(frozen=True)
class SweepRecording(Recording):
    """Rows of `kvexp run`.

    words: what all caches of a prompt share, with the row's columns in braces; sweeps: rows of one prompt -> the rest
    of the command line of each sweep; how_of: setting of a run -> the column `how`; numbered: rows name their prompts
    by number, not id.
    """

    words: Callable[[Mapping[str, Any]], str] = lambda row: ""
    sweeps: Callable[[pd.DataFrame], list[list[str]]] = lambda rows: by_words(rows)
    how_of: Callable[[str], str] = lambda setting: ""
    numbered: bool = False

    def _shared(self, rows: pd.DataFrame, data: str | None) -> tuple[str, list[str]]:
        """(experiment or "", overrides) that all sweeps of a prompt begin with."""
        row = rows.iloc[0].to_dict()
        words = self.words(row).split()
        experiment = words.pop(0).partition("=")[2] if words[0].startswith("experiment=") else ""
        return experiment, ["divergence=only", *words, *map(late, rows_of(row["task"], data) or ())]

    def _examples(self, rows: pd.DataFrame, data: str | None) -> list[str]:
        experiment, shared = self._shared(rows, data)
        return examples_of(experiment, tuple(shared))

    def make(self, rows: pd.DataFrame, folder: Path, data: str | None) -> None:
        experiment, shared = self._shared(rows, data)
        shared = [f"outputs_dir={folder}", *shared]
        if self.whole:
            for words in self.sweeps(rows):
                sweep(experiment, [*shared, *words])
            return
        examples, wanted = self._examples(rows, data), rows["example"].iloc[0]
        if not self.numbered and wanted not in examples:
            raise ConfigError(f"{self.name}: the task has no example {wanted} any more: its data have changed")
        number = int(wanted) if self.numbered else examples.index(wanted)
        for words in self.sweeps(rows):
            sweep(experiment, [f"shard={number}/{len(examples)}", *shared, *words])

    def seconds(self, rows: pd.DataFrame, folder: Path, data: str | None) -> float:
        experiment, shared = self._shared(rows, data)
        count = 1 if self.whole else len(self._examples(rows, data))
        shared = [f"outputs_dir={folder}", *shared]
        return sum(planned(experiment, (*shared, *words)) for words in self.sweeps(rows)) / count  # a plan is of all

    def computed(self, folder: Path) -> pd.DataFrame:
        runs = sorted(read_runs(folder).ran, key=lambda run: run.made) if folder.is_dir() else []
        rows = pd.DataFrame([row for run in runs for row in self._of_run(run)], columns=COLUMNS)
        return rows.astype({"kv_ratio": float}).drop_duplicates(
            [*PROMPT, *CACHE], keep="last"
        )  # of two calibrations the newer

    def _of_run(self, run: Folder) -> Iterator[dict[str, Any]]:
        lines = per_example(run.run, OWN)
        if lines is None or run.run.numerics != kvexp.NUMERICS:
            return
        numbers = {line["example"]: str(line["index"]) for line in run.run.divergence().values()}
        place = {name: run.labels.get(name) for name in ("numerics", "model", "method", "kv_ratio")}
        place |= {"task": str(run.labels["task"]), "question": run.question}
        how = self.how_of(str(run.labels.get("setting") or ""))
        if self.whole:
            mean = float(lines.kl.sum() / lines.tokens.sum())
            yield place | {"example": f"{place['method']} {how}", "how": how, "kl": mean}
            return
        for example, kl in zip(lines.names, lines.kl / lines.tokens, strict=True):
            yield place | {"example": numbers[example] if self.numbered else example, "how": how, "kl": float(kl)}


@dataclass(frozen=True)
class DecodingRecording(Recording):
    """Rows of `experiments.studies.decoding`: a prompt is one text at one budget and cadence."""

    def make(self, rows: pd.DataFrame, folder: Path, data: str | None) -> None:
        row = rows.iloc[0]
        every, share = row["question"].split()[1], str(round(1 / row["kv_ratio"]))
        words = ["run", str(folder), "--model", row["model"], "--kinds", row["task"], "--start", row["example"]]
        words += ["--texts", str(int(row["example"]) + 1), "--shares", share, "--every", every, "--together", "1"]
        words += ["--rules", *sorted(set(rows["method"])), "--kept", *sorted({how.split()[0] for how in rows["how"]})]
        if decoding.main(words):
            raise ConfigError(f"{self.name}: {' '.join(words)} failed: its message stands above")

    def computed(self, folder: Path) -> pd.DataFrame:
        return decoding_rows(folder).query(f"numerics == {kvexp.NUMERICS}")[COLUMNS]

    def seconds(self, rows: pd.DataFrame, folder: Path, data: str | None) -> float:
        known = decoding_rows(self.file).merge(rows, on=[*PROMPT, *CACHE])["seconds"]
        return float(known.sum() + known.mean())  # the full cache takes about as long as an arm


@dataclass(frozen=True)
class ExhibitRecording(Recording):
    """Numbers in the sentences of measured_real.json, in their order: a prompt is an exhibit, made whole."""

    def make(self, rows: pd.DataFrame, folder: Path, data: str | None) -> None:
        model, name = rows["model"].iloc[0], rows["example"].iloc[0]
        given = () if model == SMOLLM else (f"model={model}",)
        exhibit = make_exhibit(name, Setup(REAL, folder / model, given=given, data=data))
        holds, words = exhibit.divergence or (exhibit.holds, exhibit.words)
        content = {"numerics": kvexp.NUMERICS, "model": model, "name": name, "holds": holds, "words": words}
        replace(folder / f"{model}-{name}.json", json.dumps(content).encode())

    def computed(self, folder: Path) -> pd.DataFrame:
        judgements = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
        rows = [row for judgement in judgements for row in numbers_in(judgement)]
        return pd.DataFrame(rows, columns=COLUMNS).query(f"numerics == {kvexp.NUMERICS}")

    def seconds(self, rows: pd.DataFrame, folder: Path, data: str | None) -> float:
        scale = REAL if rows["model"].iloc[0] == SMOLLM else SECOND
        return float(recorded(scale)[rows["example"].iloc[0]]["seconds"])


def exhibit_rows(file: Path) -> pd.DataFrame:
    rows = []
    for scale in (REAL, SECOND):
        for name, entry in recorded(scale).items():
            said = entry.get("divergence", entry)
            about = {"numerics": entry["numerics"], "model": entry["model"], "name": name}
            rows += numbers_in(about | {"holds": said["holds"], "words": said["words"]})
    return pd.DataFrame(rows, columns=[*COLUMNS, "printed"])


def numbers_in(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a judgement: the verdict as 1, 0 or -1 and every number of its sentence."""
    place = {name: said[name] for name in ("numerics", "model")} | {"task": "exhibit", "question": "", "kv_ratio": 0.0}
    place |= {"example": said["name"], "method": said["name"]}
    rows = [place | {"how": "verdict", "kl": {True: 1.0, None: 0.0, False: -1.0}[said["holds"]], "printed": 0.0}]
    for count, number in enumerate(re.finditer(r"[+-]?\d+(?:\.(\d+))?", said["words"])):
        printed = 0.5 * 10.0 ** -len(number[1]) if number[1] else 0.0
        rows.append(place | {"how": f"number {count}", "kl": float(number[0]), "printed": printed})
    return rows


def quantised_rows(file: Path) -> pd.DataFrame:
    """Means of quantised_cache.csv, without PQCache's, which do not say their budget."""
    rows = pd.read_csv(file).query("method != 'pqcache'")
    rows = rows.assign(how=rows["setting"].map(without_length), kv_ratio=math.nan)
    return rows.assign(example=rows["method"] + " " + rows["how"]).drop_duplicates([*PROMPT, *CACHE])


def quantised_sweeps(rows: pd.DataFrame) -> list[list[str]]:
    methods = rows["method"].replace("full_quantised", "full")
    return [[*how.split(), f"method={method}"] for method, how in zip(methods, rows["how"], strict=True)]


def without_length(setting: str) -> str:
    """The words of a setting but the number of new tokens."""
    return " ".join(word for word in setting.split() if not word.startswith("task.max_new_tokens="))


def by_words(rows: pd.DataFrame) -> list[list[str]]:
    """Sweeps of the rows of a prompt: methods and budgets of rows with the same `how`, which is words, together."""
    return [
        [*how.split(), f"method={joined(alike['method'])}", f"kv_ratio={joined(alike['kv_ratio'])}"]
        for how, alike in rows.groupby("how")
    ]


def joined(values: pd.Series) -> str:
    """Different values as a sweep's."""
    return ",".join(sorted({f"{value:g}" if isinstance(value, float) else value for value in values}))


def named(*keys: str) -> Callable[[str], str]:
    """`how_of` that takes the words of these settings."""
    return lambda setting: " ".join(word for word in setting.split() if word.partition("=")[0] in keys)


@functools.cache
def examples_of(experiment: str, shared: tuple[str, ...]) -> list[str]:
    """Ids of the examples of a sweep's runs, in the task's order."""
    (settings,) = jobs(experiment, [*shared, *FULL])
    return [example.id for example in settings.task.examples()]


@functools.cache
def planned(experiment: str, words: tuple[str, ...]) -> float:
    """Seconds of a sweep as --dry-run says; NaN before the calibrations are made that it needs."""
    # Errors are not shown: without a calibration every job of every sweep has one.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ConfigError):
        return planned_seconds(experiment, words)
    return math.nan


def league_rows(file: Path) -> pd.DataFrame:
    """methods_league.csv by prompt, which its column kl_each names by their numbers."""
    kept = pd.read_csv(file).fillna({"how": ""}).assign(model=SMOLLM)
    numbers = kept[league.EACH].str.partition(":")[2].str.split()
    kept = kept.assign(kl=numbers, example=numbers.map(lambda of_run: [str(place) for place in range(len(of_run))]))
    return kept.explode(["kl", "example"], ignore_index=True).astype({"kl": float})


def league_sweeps(rows: pd.DataFrame) -> list[list[str]]:
    """The league's own pieces, which fit into memory, of the methods and budgets that were drawn."""
    (task,), (question,) = set(rows["task"]), set(rows["question"])
    drawn = set(zip(rows["method"], rows["how"], strict=True))
    pieces = league.pieces([task], sorted({method for method, _ in drawn}), [question], answers=False)
    wanted = [piece for piece in pieces if any((method, piece.group.label) in drawn for method in piece.methods)]
    return [[*map(late, piece.words), f"kv_ratio={joined(rows['kv_ratio'])}"] for piece in wanted]


def two_models_rows(file: Path) -> pd.DataFrame:
    rows = read_wide(file, KL_COLUMNS, ["method"])
    return rows.assign(how=["cache.evict_every=128" * (name in league.EVERY_128) for name in rows["method"]])


def ruler_rows(file: Path) -> pd.DataFrame:
    rows = ruler_board.read_wide(file)
    return rows.assign(model=SMOLLM, how="", task="ruler/" + rows["task"])


def ruler_words(row: Mapping[str, Any]) -> str:
    long = f" length {ruler_board.LONG} " in row["example"]
    words = f"experiment=ruler_board task.subset={row['task'].partition('/')[2]} task.question={row['question']}"
    return f"{words} task.lengths=[{ruler_board.LONG}] limit=4" if long else f"{words} limit=8"


def articles_rows(file: Path) -> pd.DataFrame:
    kept = pd.read_csv(file).query("measure == 'kl'").drop(columns=["measure", "full"])
    rows = kept.melt(["numerics", "task", "example"], var_name="of", value_name="kl")
    rows[["method", "kv_ratio"]] = rows["of"].str.split(" ", expand=True)
    return rows.assign(model=SMOLLM, question="in_prompt", how="").astype({"kv_ratio": float})


def long_rows(task: str, column: str, key: str) -> Callable[[Path], pd.DataFrame]:
    """`read` of a file with a line for each row, whose setting `key` stands in a column."""

    def read(file: Path) -> pd.DataFrame:
        rows = pd.read_csv(file)
        how = [f"{key}={value}" for value in rows[column]]
        return rows.assign(model=SMOLLM, task=task, question="in_prompt", how=how)

    return read


def decoding_rows(folder: Path) -> pd.DataFrame:
    """COLUMNS and seconds of a folder of the study of decoding."""
    rows = []
    for row in decoding.read_rows(folder):
        total, slots = row["total"], row["slots"]
        sizes = {share: (total // share // decoding.STEP * decoding.STEP) for share in decoding.SHARES}
        share = next(s for s, size in sizes.items() if slots in (size, decoding.margin(s, total)))
        place = {"task": row["kind"], "question": f"every {row['every']} at 1/{share}", "example": str(row["number"])}
        place |= {"method": row["rule"], "how": f"{row['kept']} {slots}", "kv_ratio": 1 / share}
        rows.append({name: row[name] for name in ("numerics", "model", "kl", "seconds")} | place)
    return pd.DataFrame(rows, columns=[*COLUMNS, "seconds"])


RECORDINGS = (
    SweepRecording(
        "methods_league",
        DOCS / "methods_league.md",
        HERE / "methods_league.csv",
        league_rows,
        calibrated="league",
        words=lambda row: f"experiment={REAL}/league_{row['task']}",
        sweeps=league_sweeps,
        how_of=league.how_of,
        numbered=True,
    ),
    SweepRecording(
        "articles_100",
        DOCS / "divergence.md",
        HERE / "articles_100.csv",
        articles_rows,
        words=lambda row: "experiment=divergence_power",
    ),
    SweepRecording(
        "recent_share",
        DOCS / "divergence.md",
        HERE / "recent_share.csv",
        long_rows("cnn_dailymail", "recent_ratio", "method.recent_ratio"),
        words=lambda row: f"model={SMOLLM} task=cnn_dailymail limit=24 task.max_new_tokens=64",
        how_of=named("method.recent_ratio"),
    ),
    SweepRecording(
        "head_budgets",
        DOCS / "head_budgets.md",
        HERE / "head_budgets.csv",
        long_rows("news", "heads", "budget.heads"),
        words=lambda row: f"model={SMOLLM} task=news limit=24",
        how_of=named("budget.heads"),
    ),
    SweepRecording(
        "two_models",
        DOCS / "two_models.md",
        DOCS / "two_models.csv",
        two_models_rows,
        words=lambda row: "experiment=two_models model={model} task={task} task.question={question}".format(**row),
        how_of=named("cache.evict_every"),
    ),
    SweepRecording("ruler_board", DOCS / "benchmarks.md", DOCS / "ruler_board.csv", ruler_rows, words=ruler_words),
    SweepRecording(
        "quantised_cache",
        DOCS / "quantised_cache.md",
        DOCS / "quantised_cache.csv",
        quantised_rows,
        whole=True,
        words=lambda row: f"model={SMOLLM} task=news limit=20 task.max_new_tokens=16",
        sweeps=quantised_sweeps,
        how_of=without_length,
    ),
    ExhibitRecording("findings", HERE / "FINDINGS.md", MEASURED_REAL, exhibit_rows, whole=True, data=True, unit=""),
    DecodingRecording("decoding", DOCS / "decoding.md", HERE / "decoding", decoding_rows, LONG_TEXT),
)
