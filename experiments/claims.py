"""Rows of the pages' recordings for the claims that name one: `python -m experiments.claims` writes claims/rows.csv.

A claim whose `recorded` is the file of a recording (experiments/lib/recordings.py) is measured there already: the
same words made its rows. Rows that claims have of their own runs (`kvexp claim --record`) stay.
"""

from __future__ import annotations

import functools
import sys

import pandas as pd

from experiments.lib.exhibits import HERE, ROOT
from experiments.lib.recordings import RECORDINGS, DecodingRecording, Recording, SweepRecording
from kvexp.results.claims import Claim, Pairs, Recorded
from kvexp.util.errors import ConfigError
from kvexp.util.output import tells_errors, watch_pipes

FOLDER = HERE / "claims"


def claims() -> list[Claim]:
    """All claims of this repository."""
    return [Claim.read(file) for file in sorted(FOLDER.glob("*.yaml"))]


def recording_of(claim: Claim) -> Recording:
    """The recording that a claim names; ConfigError for a file that no recording has."""
    for recording in RECORDINGS:
        if claim.recorded.startswith(str(recording.file.relative_to(ROOT))):
            return recording
    known = ", ".join(str(recording.file.relative_to(ROOT)) for recording in RECORDINGS)
    raise ConfigError(f"{claim.file}: recorded must be one of {known}, got {claim.recorded}")


@functools.cache
def rows_of(recording: Recording) -> pd.DataFrame:
    """The rows of a recording, read once."""
    return recording.rows()


def side_of(claim: Claim, recording: Recording, rows: pd.DataFrame, side: str) -> dict[str, float]:
    """Example -> KL of one side, mean over its budgets."""
    (task, *of_task), (method, *more) = claim.task.split(), side.split()
    words = dict(word.split("=", 1) for word in [*of_task, *more, *claim.budget.split()])
    rows = rows[rows["task"].str.partition("/")[0].eq(task) & rows["method"].eq(method)]
    if isinstance(recording, DecodingRecording):
        kept = rows["how"].eq(f"{words['kept']} {words['slots']}") & rows["question"].str.startswith("every 64 ")
    else:
        assert isinstance(recording, SweepRecording)
        more = [word for word in more if not word.startswith("task.question=")]
        kept = rows["question"].eq(words.get("task.question", "in_prompt"))
        kept &= rows["kv_ratio"].isin(map(float, words["kv_ratio"].split(",")))
        kept &= rows["how"].eq(recording.how_of(" ".join(more)))
        if lengths := words.get("task.lengths", ""):  # examples of other lengths are recorded with them
            lengths = lengths.strip("[]").replace(",", "|")
            kept &= rows["task"].eq(task) | rows["example"].str.contains(f" length (?:{lengths}) ")
    return {str(name): float(kl) for name, kl in rows[kept].groupby("example", sort=False)["kl"].mean().items()}


def pairs_of(claim: Claim, model: str) -> tuple[str, Pairs]:
    """(NUMERICS, pairs) of a claim in its recording; ConfigError where that lacks a side."""
    recording = recording_of(claim)
    rows = rows_of(recording).query("model == @model")
    sides = [side_of(claim, recording, rows, side) for side in claim.sides]
    if claim.against_full:
        sides.append(dict.fromkeys(sides[0], 0.0))
    shared = [example for example in sides[0] if example in sides[1]]
    if len(shared) < claim.examples:
        raise ConfigError(f"{claim.file}: {claim.recorded} has {len(shared)} examples of both sides on {model}")
    numerics = " ".join(str(value) for value in sorted(set(rows["numerics"])))
    return numerics, {example: (sides[0][example], sides[1][example]) for example in shared[: claim.examples]}


@tells_errors(ConfigError)
def main() -> int:
    kept = Recorded(FOLDER)
    named = {(claim.name, claim.digest, model) for claim in claims() for model in claim.models}
    kept.rows = {key: rows for key, rows in kept.rows.items() if key in named}
    for claim in claims():
        for model in claim.models if claim.recorded else ():
            kept.add(claim, model, *pairs_of(claim, model))
    kept.write()
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
