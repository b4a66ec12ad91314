"""Do the recorded numbers still hold? A seeded sample of the rows behind each page is computed anew: docs/recheck.md.

python -m experiments.recheck --data FOLDER --dry-run         how many rows, and roughly how long
python -m experiments.recheck --data FOLDER                   all pages; what is computed already is not computed again
python -m experiments.recheck --data FOLDER --page NAME ...   these alone
python -m experiments.recheck --data FOLDER --write           also put a line about it on each page

A row is the KL divergence of one prompt under one cache. Prompts are drawn by --seed, evenly from every model, task and
place of the question, until they have 5 % of a page's rows and three of each method. Where a page has means alone, one
of them is computed whole, and --write keeps its rows. --where takes a part of the rows.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pandas as pd

import kvexp
from experiments.lib import league
from experiments.lib.exhibits import HERE, REAL
from experiments.lib.real_scale import rows_of, scale_of
from experiments.lib.recordings import BLOCK, CACHE, PROMPT, RECORDINGS, Recording
from experiments.lib.tables import between, markdown
from experiments.studies import KL_COLUMNS, kl_of_runs
from kvexp.hf.fetch import WHEELS, cached_conversion
from kvexp.run.jobs import INTERRUPTED, KEPT
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import tells_errors, watch_pipes

SHARE, LEAST = 0.05, 3  # of a page's rows, and rows of each method, that are drawn at least
BY_EXAMPLE = HERE / "rechecked"  # rows of means that were computed anew


def drawn(rows: pd.DataFrame, seed: int, whole: bool = False) -> pd.DataFrame:
    """The rows of drawn prompts: SHARE of all rows at least, and LEAST of each method, or all where it has fewer.

    A prompt's rows are drawn together, since they share its prefill and the full cache's answer. Blocks take turns.
    whole: one prompt alone.
    """
    queues = []
    for block, of_block in rows.groupby(BLOCK):
        prompts = list(of_block.groupby(PROMPT).groups)
        Random(f"{seed} {block}").shuffle(prompts)
        queues.append(prompts)
    Random(str(seed)).shuffle(queues)
    turns = [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]
    by_prompt = dict(iter(rows.groupby(PROMPT)))
    lacking = rows["method"].value_counts().clip(upper=LEAST)
    taken: list[pd.DataFrame] = []
    count = 0
    for prompt in turns[: 1 if whole else None]:
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
        shown = rows[name].map("{:g}".format) if name == "kv_ratio" else rows[name]
        rows = rows[shown.isin(values.split(","))]
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
        done = f"Of NUMERICS {self.numerics}; {len(self.rows)} of {self.recorded:,} rows at {kvexp.NUMERICS}"
        if not self.outside.empty:
            return f"{done}: {len(self.outside)} of them differ by more than {self.recording.tolerance} of their KL."
        return f"{done} within {self.far.max():.2g}{self.recording.unit}."


def compared(recording: Recording, recorded: int, rows: pd.DataFrame, folder: Path) -> Compared:
    """Compare drawn rows with what was computed in a folder."""
    anew = recording.computed(folder).rename(columns={"kl": "anew"}).drop(columns="numerics")
    both = rows.merge(anew, on=[*PROMPT, *CACHE], how="left", validate="one_to_one")
    return Compared(recording, recorded, both.assign(allowed=recording.tolerance.of(both)))


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
        trained = [article.id for article in training_articles()]
        if "kvzap" in methods and list(SURROGATES.about(digest).get("articles", ())) != trained:
            train_kvzap(words, "", tokens=1250, count=400)


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
    if args.environments:
        return show_environments(samples, args)
    try:
        pages = [checked(sample, args) for sample in samples]
    except KeyboardInterrupt as error:
        print(f"\ninterrupted: {error or KEPT}", file=sys.stderr)
        return INTERRUPTED
    show(pages)
    return 1 if any(len(page.outside) for page in pages) else 0


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
    if recording.data and args.data is None:
        print(f"{recording.name}: left out: its rows are in DATA: give --data FOLDER")
        return None
    if rows.empty:
        return None
    rows = drawn(rows, args.seed, recording.whole)
    prompts = [of_prompt for _, of_prompt in rows.groupby(PROMPT, sort=False)]
    left = [of_prompt for of_prompt in prompts if compared(recording, 0, of_prompt, folder).rows["anew"].isna().any()]
    seconds = sum(recording.seconds(of_prompt, folder, args.data) for of_prompt in left)
    hours = "time not known before calibrations" if math.isnan(seconds) else f"about {seconds / 60:.0f} minutes here"
    print(
        f"{recording.name}: {len(rows)} of {len(recorded)} rows, {len(prompts)} prompts, "
        f"{len(left)} of them to compute, {hours}",
        flush=True,
    )
    return Sample(recording, len(recorded), rows, left, folder)


def checked(sample: Sample, args: argparse.Namespace) -> Compared:
    """Compute what the sample lacks, and write what came out where --write asks for it."""
    if sample.left:
        calibrate(sample.recording, pd.concat(sample.left), sample.folder)
    for of_prompt in sample.left:
        sample.recording.make(of_prompt, sample.folder, args.data)
    outcome = compared(sample.recording, sample.recorded, sample.rows, sample.folder)
    if args.write:
        page = sample.recording.page
        if sample.recording.whole:
            keep(sample)
        text = between(page.read_text("utf-8"), *marks(sample.recording.name), outcome.line(), page)
        page.write_text(text, encoding="utf-8")
    return outcome


SAFETY = 4  # the tolerance's absolute part is so many times the largest difference that was measured
# Environments of one machine whose sums differ: the instruction sets that torch, oneDNN and MKL may use.
ENVIRONMENTS = {
    "all instructions": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


def keep(sample: Sample) -> None:
    """Add what was computed for means, by example, to a file of BY_EXAMPLE, in place of the same rows of before."""
    folder = sample.folder
    places = [folder, *(path for path in folder.iterdir() if path.name in set(sample.rows["model"]))]
    rows = pd.concat(kl_of_runs(str(place), columns=[*KL_COLUMNS, "setting"]) for place in places)
    rows = rows[rows["method"].ne("full")]
    file = BY_EXAMPLE / f"{sample.recording.name}.csv"
    if rows.empty:
        return  # an exhibit that measures inside the model
    if file.exists():
        rows = pd.concat([pd.read_csv(file), rows])
    names = [name for name in rows.columns if name != "kl"]
    file.parent.mkdir(exist_ok=True)
    rows.drop_duplicates(names, keep="last").sort_values(names).to_csv(file, index=False, float_format="%.6g")
    print(f"wrote {file}")


def show_environments(samples: Sequence[Sample], args: argparse.Namespace) -> int:
    """Compute the samples under each of ENVIRONMENTS and print the largest differences; 1 where one failed."""
    data = ["--data", args.data] if args.data else []
    where = ["--where", *args.where] if args.where else []
    first: dict[str, pd.Series] = {}
    lines = []
    for name, environment in ENVIRONMENTS.items():
        outputs = args.outputs.resolve() / name.replace(" ", "_")
        pages = [sample.recording.name for sample in samples]
        words = ["--page", *pages, "--seed", str(args.seed), "--outputs", str(outputs), *data, *where]
        subprocess.run([sys.executable, "-m", "experiments.recheck", *words], env=os.environ | environment)
        for sample in samples:
            anew = compared(sample.recording, 0, sample.rows, outputs / sample.recording.name).rows["anew"]
            far = (anew - first.setdefault(sample.recording.name, anew)).abs()
            largest = math.nan if far.isna().any() else far.max()
            lines.append((sample.recording.name, name, str(len(far)), f"{largest:.2g}", f"{SAFETY * largest:.2g}"))
    print(f"\n{markdown(('recording', 'environment', 'rows', 'largest difference', f'times {SAFETY}'), *lines)}")
    return 1 if any(line[3] == "nan" for line in lines) else 0


def show(pages: Sequence[Compared]) -> None:
    """Print the table of pages, and the rows that left their tolerance."""
    heads = ("page", "recording", "rows", "largest difference", "of what is allowed", "tolerance", "verdict")
    lines = [
        (
            *(page.recording.page.name, page.recording.name, f"{len(page.rows)} of {page.recorded}"),
            *(f"{page.far.max():.2g}", f"{(page.far / page.rows['allowed']).max():.1%}"),
            *(str(page.recording.tolerance), page.verdict),
        )
        for page in pages
    ]
    print(f"\n{markdown(heads, *lines)}")
    for tolerance in dict.fromkeys(page.recording.tolerance for page in pages):
        print(f"{tolerance} of a row's number: {tolerance.why}")
    for page in pages:
        for _, row in page.outside.iterrows():
            place = " ".join(str(row[name]) for name in (*PROMPT, *CACHE) if row[name] != "")
            anew = "not computed" if math.isnan(row["anew"]) else f"{row['anew']:.5g} anew"
            print(f"{page.recording.name}: {place}: {row['kl']:.5g} recorded, {anew}, allowed {row['allowed']:.2g}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m experiments.recheck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add(
        "--page",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"of {', '.join(recording.name for recording in RECORDINGS)}",
    )
    add("--data", metavar="FOLDER", help="rows, laid out as experiments/real_data.yaml says, or hub")
    add("--outputs", type=Path, default=Path("outputs/recheck"), metavar="FOLDER", help="default: outputs/recheck")
    add("--seed", type=int, default=0, metavar="N", help="other prompts for other numbers (default: 0)")
    add("--where", nargs="+", default=[], metavar="NAME=VALUE", help=f"these rows alone: {', '.join((*BLOCK, *CACHE))}")
    add("--dry-run", action="store_true", help="how many rows, and roughly how long; computes nothing")
    add(
        "--environments", action="store_true", help="how far instruction sets move the sample: what a tolerance is from"
    )
    add("--write", action="store_true", help="put a line about it on each page")
    return result


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
