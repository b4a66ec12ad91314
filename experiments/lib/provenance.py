"""Where the numbers of a real exhibit come from: weights, data, code and the ids of rows; never a text of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import kvexp
from experiments.lib.real_scale import Command
from kvexp.run.store import Run
from kvexp.util import load


@dataclass(frozen=True)
class Rows:
    """Of one task: where its rows were found, the digest kvexp knows that data by, and the ids in their order."""

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
        """As JSON, without the rows: `lib.pages` keeps those once for all exhibits that share them."""
        found = asdict(self)
        del found["rows"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def provenance_of(outputs: Path, frame: pd.DataFrame, commands: Sequence[Command]) -> Provenance:
    """Of the runs of `lib.data.frame_of`, or of what `lib.measure` found."""
    model, source = str(frame["model"].iloc[0]), tuple(dict.fromkeys(each.rows for each in commands))
    if "hash" not in frame:
        return Provenance(model, {}, kvexp.NUMERICS, (), source, int(frame["prompt"].nunique()))
    found = [Run.load(outputs / name) for name in frame["hash"]]
    commits = {str(load(run.path / "env.json").get("commit")) for run in found}
    weights = next((row["weights"] for run in found for row in run.rows() if row.get("weights")), {})
    rows: dict[str, Rows] = {}
    for (_, shown), run in zip(frame.iterrows(), found, strict=True):
        order = {row["example"]: row["index"] for row in run.rows()}
        ids = tuple(sorted(shown["scores"], key=lambda name: order[name]))
        task = str(shown["task"])
        if task not in rows or len(ids) > len(rows[task].ids):
            rows[task] = Rows(task, str(run.config.get("data")), ids)
    n = min(len(each.ids) for each in rows.values())
    return Provenance(model, dict(weights), found[0].numerics, tuple(sorted(commits)), source, n, tuple(rows.values()))
