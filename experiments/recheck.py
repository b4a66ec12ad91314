"""Do the recorded numbers still hold? A seeded sample of the rows behind each page is computed anew: docs/recheck.md.

python -m experiments.recheck --data FOLDER --dry-run         how many rows, and roughly how long
python -m experiments.recheck --data FOLDER                   all pages; what is computed already is not computed again
python -m experiments.recheck --data FOLDER --page NAME ...   these alone
python -m experiments.recheck --data FOLDER --write           also put a line about it on each page

A row is the KL divergence of one prompt under one cache. Prompts are drawn by --seed, evenly from every model, task and
place of the question, until they have 5 % of a page's rows and three of each method. --where takes a part of the rows.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd

import kvexp
from experiments.lib import league
from experiments.lib.exhibits import HERE, REAL, ROOT
from experiments.lib.real_scale import rows_of, scale_of
from experiments.lib.sweep import jobs, late, planned_seconds, sweep
from experiments.lib.tables import between, markdown
from experiments.studies import KL_COLUMNS, decoding, read_wide, ruler_board
from kvexp.hf.fetch import WHEELS, cached_conversion
from kvexp.results.divergence import per_example
from kvexp.results.read import Folder, read_runs
from kvexp.run.jobs import INTERRUPTED, KEPT
from kvexp.run.store import OWN
from kvexp.util import CacheError, ConfigError, tells_errors, watch_pipes

SHARE, LEAST = 0.05, 3  # of a page's rows, and rows of each method, that are drawn at least
BLOCK = ["model", "task", "question"]
PROMPT = [*BLOCK, "example"]
CACHE = ["method", "how", "kv_ratio"]  # how: further words that tell caches of one method and budget apart
COLUMNS = ["numerics", *PROMPT, *CACHE, "kl"]
DOCS = ROOT / "docs"
FULL = ("method=full", "kv_ratio=1.0")


@dataclass(frozen=True)
class Tolerance:
    """By how much a row may differ: absolute nats per token plus a share of the recorded number; why: the reason."""

    absolute: float
    relative: float
    why: str

    def of(self, kl: pd.Series) -> pd.Series:
        """What is allowed for each recorded number."""
        return self.absolute + self.relative * kl

    def __str__(self) -> str:
        return f"{self.absolute:g} + {100 * self.relative:g} %"


# Written before any row was computed anew.
ROUNDING = Tolerance(
    3.3e-4,
    0.01,
    "four times the largest difference between threads and instruction sets, and twice what means of 20 prompts moved "
    "from NUMERICS 7 to 11",
)
LONG_TEXT = Tolerance(3.3e-4, 0.05, "the same, and the accuracy in log KL that the study was designed for")


# -- the recordings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The rows behind one page, and how they are made.

    page: what shows them; file: where they are; read: COLUMNS of that file; calibrated: whose calibrations its methods
    had, "league" or "own" (of kvexp's articles).
    """

    name: str
    page: Path
    file: Path
    read: Callable[[Path], pd.DataFrame]
    tolerance: Tolerance = ROUNDING
    calibrated: str = "own"

    def rows(self) -> pd.DataFrame:
        """COLUMNS of every recorded row."""
        return self.read(self.file)[COLUMNS]

    def make(self, rows: pd.DataFrame, folder: Path, data: str | None) -> None:
        """Compute what FOLDER lacks of the rows, which are of one prompt."""
        raise NotImplementedError

    def made(self, folder: Path) -> pd.DataFrame:
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
        examples, wanted = self._examples(rows, data), rows["example"].iloc[0]
        if not self.numbered and wanted not in examples:
            raise ConfigError(f"{self.name}: the task has no example {wanted} any more: its data have changed")
        number = int(wanted) if self.numbered else examples.index(wanted)
        for words in self.sweeps(rows):
            sweep(experiment, [f"outputs_dir={folder}", f"shard={number}/{len(examples)}", *shared, *words])

    def seconds(self, rows: pd.DataFrame, folder: Path, data: str | None) -> float:
        experiment, shared = self._shared(rows, data)
        count = len(self._examples(rows, data))
        each = [planned(experiment, (f"outputs_dir={folder}", *shared, *words)) for words in self.sweeps(rows)]
        return sum(each) / count  # the plan is of all examples

    def made(self, folder: Path) -> pd.DataFrame:
        runs = sorted(read_runs(folder).ran, key=lambda run: run.made) if folder.is_dir() else []
        found = pd.DataFrame([row for run in runs for row in self._of_run(run)], columns=COLUMNS)
        return found.drop_duplicates([*PROMPT, *CACHE], keep="last")  # of two calibrations the newer

    def _of_run(self, run: Folder) -> Iterator[dict[str, Any]]:
        lines = per_example(run.run, OWN)
        if lines is None or run.run.numerics != kvexp.NUMERICS:
            return
        numbers = {line["example"]: str(line["index"]) for line in run.run.divergence().values()}
        place = {name: run.labels.get(name) for name in ("numerics", "model", "method", "kv_ratio")}
        place |= {"task": str(run.labels["task"]), "question": run.question}
        how = self.how_of(str(run.labels.get("setting") or ""))
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

    def made(self, folder: Path) -> pd.DataFrame:
        return decoding_rows(folder).query(f"numerics == {kvexp.NUMERICS}")[COLUMNS]

    def seconds(self, rows: pd.DataFrame, folder: Path, data: str | None) -> float:
        known = decoding_rows(self.file).merge(rows, on=[*PROMPT, *CACHE])["seconds"]
        return float(known.sum() + known.mean())  # the full cache takes about as long as an arm


def by_words(rows: pd.DataFrame) -> list[list[str]]:
    """Sweeps of the rows of a prompt: methods and budgets of rows with the same `how`, which is words, together."""
    return [
        [*how.split(), f"method={joined(part['method'])}", f"kv_ratio={joined(part['kv_ratio'])}"]
        for how, part in rows.groupby("how")
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
    try:
        return planned_seconds(experiment, words)
    except ConfigError:
        return math.nan


def league_rows(file: Path) -> pd.DataFrame:
    """methods_league.csv by prompt, which its column kl_each names by their numbers."""
    kept = pd.read_csv(file).fillna({"how": ""}).assign(model="smollm2_135m")
    each = kept[league.EACH].str.partition(":")[2].str.split()
    kept = kept.assign(kl=each, example=each.map(lambda numbers: [str(place) for place in range(len(numbers))]))
    return kept.explode(["kl", "example"], ignore_index=True).astype({"kl": float})


def league_sweeps(rows: pd.DataFrame) -> list[list[str]]:
    """The league's own pieces, which fit into memory, of the methods and budgets that were drawn."""
    (task,), (question,) = set(rows["task"]), set(rows["question"])
    drawn = set(zip(rows["method"], rows["how"], strict=True))
    made = league.pieces([task], sorted({method for method, _ in drawn}), [question], answers=False)
    wanted = [piece for piece in made if any((method, piece.group.label) in drawn for method in piece.methods)]
    return [[*map(late, piece.words), f"kv_ratio={joined(rows['kv_ratio'])}"] for piece in wanted]


def two_models_rows(file: Path) -> pd.DataFrame:
    rows = read_wide(file, KL_COLUMNS, ["method"])
    return rows.assign(how=["cache.evict_every=128" * (name in league.EVERY_128) for name in rows["method"]])


def ruler_rows(file: Path) -> pd.DataFrame:
    rows = ruler_board.read_wide(file)
    return rows.assign(model="smollm2_135m", how="", task="ruler/" + rows["task"])


def ruler_words(row: Mapping[str, Any]) -> str:
    long = f" length {ruler_board.LONG} " in row["example"]
    words = f"experiment=ruler_board task.subset={row['task'].partition('/')[2]} task.question={row['question']}"
    return f"{words} task.lengths=[{ruler_board.LONG}] limit=4" if long else f"{words} limit=8"


def articles_rows(file: Path) -> pd.DataFrame:
    kept = pd.read_csv(file).query("measure == 'kl'").drop(columns=["measure", "full"])
    rows = kept.melt(["numerics", "task", "example"], var_name="of", value_name="kl")
    rows[["method", "kv_ratio"]] = rows["of"].str.split(" ", expand=True)
    return rows.assign(model="smollm2_135m", question="in_prompt", how="").astype({"kv_ratio": float})


def long_rows(task: str, column: str, key: str) -> Callable[[Path], pd.DataFrame]:
    """`read` of a file with a line for each row, whose setting `key` stands in a column."""

    def read(file: Path) -> pd.DataFrame:
        rows = pd.read_csv(file)
        how = [f"{key}={value}" for value in rows[column]]
        return rows.assign(model="smollm2_135m", task=task, question="in_prompt", how=how)

    return read


def decoding_rows(folder: Path) -> pd.DataFrame:
    """COLUMNS and seconds of a folder of the study of decoding."""
    found = []
    for row in decoding.read_rows(folder):
        total, slots = row["total"], row["slots"]
        sizes = {share: (total // share // decoding.STEP * decoding.STEP) for share in decoding.SHARES}
        share = next(s for s, size in sizes.items() if slots in (size, decoding.margin(s, total)))
        place = {"task": row["kind"], "question": f"every {row['every']} at 1/{share}", "example": str(row["number"])}
        place |= {"method": row["rule"], "how": f"{row['kept']} {slots}", "kv_ratio": 1 / share}
        found.append({name: row[name] for name in ("numerics", "model", "kl", "seconds")} | place)
    return pd.DataFrame(found, columns=[*COLUMNS, "seconds"])


SMOLLM = "model=smollm2_135m"
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
        words=lambda row: f"{SMOLLM} task=cnn_dailymail limit=24 task.max_new_tokens=64",
        how_of=named("method.recent_ratio"),
    ),
    SweepRecording(
        "head_budgets",
        DOCS / "head_budgets.md",
        HERE / "head_budgets.csv",
        long_rows("news", "heads", "budget.heads"),
        words=lambda row: f"{SMOLLM} task=news limit=24",
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
    DecodingRecording("decoding", DOCS / "decoding.md", HERE / "decoding", decoding_rows, LONG_TEXT),
)


# -- drawing and comparing ---------------------------------------------------------------------------------------------


def drawn(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The rows of drawn prompts: SHARE of all rows at least, and LEAST of each method, or all where it has fewer.

    A prompt's rows are drawn together, since they share its prefill and the full cache's answer. Blocks take turns.
    """
    queues = []
    for block, part in rows.groupby(BLOCK):
        prompts = [prompt for prompt in part.groupby(PROMPT).groups]
        Random(f"{seed} {block}").shuffle(prompts)
        queues.append(prompts)
    Random(str(seed)).shuffle(queues)
    turns = [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]
    by_prompt = dict(iter(rows.groupby(PROMPT)))
    lacking = rows["method"].value_counts().clip(upper=LEAST)
    taken: list[pd.DataFrame] = []
    count = 0
    for prompt in turns:
        of_methods = by_prompt[prompt]["method"].value_counts()
        if count < SHARE * len(rows) or (lacking[of_methods.index] > 0).any():
            taken.append(by_prompt[prompt])
            count += len(by_prompt[prompt])
            lacking = lacking.sub(of_methods, fill_value=0)
    return pd.concat(taken, ignore_index=True)


def available(rows: pd.DataFrame, data: str | None) -> tuple[pd.DataFrame, list[str]]:
    """(Rows that can be made here, why others cannot)."""
    reasons = {}
    for model in set(rows["model"]) & set(WHEELS):
        if cached_conversion(WHEELS[model].gguf_sha256) is None:
            reasons["model", model] = f"{model} is not in the cache: kvexp fetch {model}"
    for task in set(rows["task"]):
        if rows_of(task, data) is None:
            reasons["task", task] = f"the rows of {task} are in DATA: give --data FOLDER"
    for column, value in reasons:
        rows = rows[rows[column].ne(value)]
    return rows, sorted(reasons.values())


def narrowed(rows: pd.DataFrame, where: Sequence[str]) -> pd.DataFrame:
    """Rows of the wanted values, each of `where` as NAME=VALUE,VALUE; ConfigError for another column."""
    for word in where:
        name, _, values = word.partition("=")
        if name not in (*BLOCK, *CACHE):
            raise ConfigError(f"--where {word}: NAME must be one of {', '.join((*BLOCK, *CACHE))}")
        wanted = values.split(",")
        rows = rows[rows[name].isin(map(float, wanted) if name == "kv_ratio" else wanted)]
    return rows


@dataclass(frozen=True)
class Compared:
    """What became of a page's sample.

    recorded: rows it has; rows: those drawn, with `anew` (NaN where it was not computed) and `allowed`.
    """

    recording: Recording
    recorded: int
    rows: pd.DataFrame

    @property
    def far(self) -> pd.Series:
        """How far each row moved."""
        return (self.rows["anew"] - self.rows["kl"]).abs()

    @property
    def outside(self) -> pd.DataFrame:
        """Rows that moved farther than is allowed, or were not computed, the farthest first."""
        rows = self.rows.assign(over=self.far / self.rows["allowed"])
        return rows[~(rows["over"] <= 1)].sort_values("over", ascending=False, na_position="first")

    @property
    def numerics(self) -> str:
        """NUMERICS of the recorded rows."""
        return ", ".join(str(value) for value in sorted(set(self.rows["numerics"])))

    @property
    def verdict(self) -> str:
        return "within" if self.outside.empty else f"{len(self.outside)} OUTSIDE: record this page again"

    def line(self) -> str:
        """What the page says."""
        done = f"Of NUMERICS {self.numerics}; {len(self.rows)} rows of {self.recorded:,} at {kvexp.NUMERICS}"
        if not self.outside.empty:
            return f"{done}: {len(self.outside)} of them differ by more than {self.recording.tolerance} of their KL."
        return f"{done} within {self.far.max():.2g} nats."


def compared(recording: Recording, recorded: int, rows: pd.DataFrame, folder: Path) -> Compared:
    """Compare drawn rows with what was computed in a folder."""
    anew = recording.made(folder).rename(columns={"kl": "anew"}).drop(columns="numerics")
    both = rows.merge(anew, on=[*PROMPT, *CACHE], how="left", validate="one_to_one")
    return Compared(recording, recorded, both.assign(allowed=recording.tolerance.of(both["kl"])))


def marks(name: str) -> tuple[str, str]:
    """The lines of a page between which a recording's line stands."""
    return f"<!-- recheck: {name} -->", f"<!-- end of recheck: {name} -->"


def calibrate(recording: Recording, rows: pd.DataFrame, folder: Path) -> None:
    """Make the calibrations that the rows had, where the cache folder has others; they take the place of those."""
    from kvexp.hf.calibrate import QUERIES, SURROGATES
    from kvexp.run.calibrate import calibrate_model, train_kvzap
    from kvexp.run.jobs import composed_model
    from kvexp.run.model_spec import model_digest
    from kvexp.tasks.articles import articles_digest, training_articles

    methods = set(rows["method"])
    if recording.calibrated == "league":
        if methods & {*league.CALIBRATED} or "duo" in set(rows["how"]):
            league.calibrate_for_league(folder)
        return
    for model in sorted(set(rows["model"])):
        words = [f"model={model}"]
        digest = model_digest(composed_model(words)[1]) if methods & {*league.CALIBRATED} else ""
        if methods & {"qfilters", "triattention"} and QUERIES.about(digest).get("data_digest") != articles_digest():
            calibrate_model(words, "", tokens=2048, count=20)
        trained = [one.id for one in training_articles()]
        if "kvzap" in methods and list(SURROGATES.about(digest).get("articles", ())) != trained:
            train_kvzap(words, "", tokens=1250, count=400)


# -- the command -------------------------------------------------------------------------------------------------------


@tells_errors(ConfigError, CacheError)
def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every sample is within its tolerance, 1 where one is not, 2 for what cannot be asked for, 130 for an
    interrupt.
    """
    args = parser().parse_args(arguments)
    known = {recording.name: recording for recording in RECORDINGS}
    if unknown := [name for name in args.page if name not in known]:
        raise ConfigError(f"no such recording: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.write and args.where:
        raise ConfigError(
            "--where takes a part of the rows, of which a page says nothing: leave out --write or --where"
        )
    if args.data is not None:
        scale_of(REAL, args.data)
    samples = [sample for name in args.page or known if (sample := sample_of(known[name], args)) is not None]
    if not samples:
        raise ConfigError("no page has a row that can be computed here: see above")
    if args.dry_run:
        return 0
    try:
        found = [computed(sample, args) for sample in samples]
    except KeyboardInterrupt as error:
        print(f"\ninterrupted: {error or KEPT}", file=sys.stderr)
        return INTERRUPTED
    show(found)
    return 1 if any(len(one.outside) for one in found) else 0


@dataclass(frozen=True)
class Sample:
    """What was drawn of a recording. recorded: rows it has; rows: those drawn; left: by prompt, those not computed."""

    recording: Recording
    recorded: int
    rows: pd.DataFrame
    left: list[pd.DataFrame]
    folder: Path


def sample_of(recording: Recording, args: argparse.Namespace) -> Sample | None:
    """Draw a recording's rows and say how many they are and how long they take; None where none can be made here."""
    recorded, folder = recording.rows(), args.outputs.resolve() / recording.name
    rows, reasons = available(narrowed(recorded, args.where), args.data)
    for reason in reasons:
        print(f"{recording.name}: left out: {reason}")
    if rows.empty:
        return None
    rows = drawn(rows, args.seed)
    prompts = [part for _, part in rows.groupby(PROMPT, sort=False)]
    left = [part for part in prompts if compared(recording, 0, part, folder).rows["anew"].isna().any()]
    seconds = sum(recording.seconds(part, folder, args.data) for part in left)
    hours = "time not known before calibrations" if math.isnan(seconds) else f"about {seconds / 60:.0f} minutes here"
    print(
        f"{recording.name}: {len(rows)} of {len(recorded)} rows, {len(prompts)} prompts, "
        f"{len(left)} of them to compute, {hours}",
        flush=True,
    )
    return Sample(recording, len(recorded), rows, left, folder)


def computed(sample: Sample, args: argparse.Namespace) -> Compared:
    """Compute what the sample lacks, and write what came out where --write asks for it."""
    if sample.left:
        calibrate(sample.recording, pd.concat(sample.left), sample.folder)
    for part in sample.left:
        sample.recording.make(part, sample.folder, args.data)
    found = compared(sample.recording, sample.recorded, sample.rows, sample.folder)
    if args.write:
        page = sample.recording.page
        text = between(page.read_text("utf-8"), *marks(sample.recording.name), found.line(), page)
        page.write_text(text, encoding="utf-8")
    return found


def show(found: Sequence[Compared]) -> None:
    """Print the table of pages, and the rows that left their tolerance."""
    heads = ("page", "recording", "rows", "largest difference", "of KL", "tolerance", "verdict")
    lines = [
        (
            *(one.recording.page.name, one.recording.name, f"{len(one.rows)} of {one.recorded}"),
            *(f"{one.far.max():.2g}", f"{(one.far / one.rows['kl']).max():.2%}"),
            *(str(one.recording.tolerance), one.verdict),
        )
        for one in found
    ]
    print(f"\n{markdown(heads, *lines)}")
    for one in found:
        for _, row in one.outside.iterrows():
            place = " ".join(str(row[name]) for name in (*PROMPT, *CACHE) if row[name] != "")
            anew = "not computed" if math.isnan(row["anew"]) else f"{row['anew']:.5g} anew"
            print(f"{one.recording.name}: {place}: {row['kl']:.5g} recorded, {anew}, allowed {row['allowed']:.2g}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.recheck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--page", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(one.name for one in RECORDINGS)}")
    add("--data", metavar="FOLDER", help="rows, laid out as experiments/real_data.yaml says, or hub")
    add("--outputs", type=Path, default=Path("outputs/recheck"), metavar="FOLDER", help="default: outputs/recheck")
    add("--seed", type=int, default=0, metavar="N", help="other prompts for other numbers (default: 0)")
    add("--where", nargs="+", default=[], metavar="NAME=VALUE", help=f"these rows alone: {', '.join((*BLOCK, *CACHE))}")
    add("--dry-run", action="store_true", help="how many rows, and roughly how long; computes nothing")
    add("--write", action="store_true", help="put a line about it on each page")
    return made


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
