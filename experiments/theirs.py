"""The papers' own numbers: experiments/paper/NAME.csv, and which of them belong beside a table of ours."""

from __future__ import annotations

import pandas as pd

from experiments.exhibits import HERE

COLUMNS = [
    "model",
    "task",
    "method",
    "kv_ratio",
    "setting",
    "metric",
    "value",
    "source",
    "kind",
    "reading_error",
    "note",
]
KINDS = ("exact", "digitised", "text")


def theirs(name: str) -> pd.DataFrame:
    """Every number of the paper for an exhibit; an empty table where the paper has none."""
    path = HERE / "paper" / f"{name}.csv"
    if not path.exists():
        return pd.DataFrame(columns=COLUMNS)
    return pd.read_csv(path, dtype={"setting": str}, comment="#").fillna(
        {"setting": "", "note": "", "reading_error": 0.0}
    )


def beside(name: str, ours: pd.DataFrame) -> pd.DataFrame:
    """Those of the models and tasks that our table has: none at the testbed's scale, of other models."""
    paper = theirs(name)
    ran = set(zip(ours["model"], ours["task"], strict=True))
    return paper[[pair in ran for pair in zip(paper["model"], paper["task"], strict=True)]]
