"""LongBench the way papers print it: one row per method and budget, its data sets beside each other, their average.

kvexp longbench outputs/
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.results.columns import n_words
from kvexp.results.table import table
from kvexp.results.units import fixed
from kvexp.results.where import add_choice, chosen_by
from kvexp.terminal import say

PREFIX = "longbench/"
# In the order of PQCache's tables 2 and 3 (arXiv:2407.12820).
FOURTEEN = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en"),
)
KEYS = ("model", "question", "method", "kv_ratio", "tokens", "setting", "numerics")


def averages(frame: pd.DataFrame, names: Sequence[str] = FOURTEEN) -> pd.DataFrame:
    """`kvexp.results.table`'s rows of LongBench -> one row per model, method, budget and setting.

    Columns: those, one per data set, `average`, its percentage of full attention's `of_full`, `missing`, `n` (examples
    per data set, "10 to 60" where they differ). The average is
    the plain mean over the data sets named, whatever their sizes, as papers take it; NaN while one of them is missing
    or unfinished. Other data sets have a column and no part in it.
    """
    empty = pd.DataFrame(columns=[*KEYS, *names, "average", "of_full", "missing", "n"])
    if frame.empty or "score" not in frame:
        return empty
    done = frame[(frame["status"] == "done") & frame["task"].astype(str).str.startswith(PREFIX)]
    if done.empty:
        return empty
    known = frame.set_index("hash")["score"]
    done = done.assign(name=done["task"].astype(str).str.removeprefix(PREFIX), full=done["baseline"].map(known))
    done["full"] = done["full"].where(done["method"] != "full", done["score"])
    keys = [key for key in KEYS if key in done]
    done = _of_one_setting(done, keys)
    groups: Any = done.groupby(keys, dropna=False, sort=False)
    rows = [_row(dict(zip(keys, values, strict=True)), group, names) for values, group in groups]
    others = sorted(set(done["name"]) - set(names))
    wide = pd.DataFrame(rows, columns=[*keys, *names, *others, "average", "of_full", "missing", "n"])
    wide["_later"] = wide["method"] != "full"
    order = [key for key in ("model", "_later", "method", "kv_ratio", "tokens", "setting") if key in wide]
    wide["_older"] = -wide["numerics"] if "numerics" in wide else 0  # the newest first
    return wide.sort_values(["_older", *order], ignore_index=True).drop(columns=["_later", "_older"])


def _of_one_setting(done: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The same without the names of data files, of which each data set has its own.

    Where a data set was run on two files under settings otherwise equal, all of them keep the names: one score must
    not take the other's place.
    """
    if "setting" not in done:
        return done
    plain = done.assign(setting=done["setting"].map(_without_files))
    twice = plain.duplicated([*keys, "name"], keep=False)
    groups: Any = plain.assign(twice=twice).groupby(keys, dropna=False, sort=False)
    return plain.assign(setting=plain["setting"].where(~groups["twice"].transform("any"), done["setting"]))


def _without_files(setting: Any) -> str:
    return " ".join(word for word in str(setting or "").split() if not word.startswith("task.data_files="))


def _row(row: dict[str, Any], group: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    scores, full = (dict(zip(group["name"], group[column], strict=True)) for column in ("score", "full"))
    missing = [name for name in names if pd.isna(scores.get(name))]
    average, of = (float(np.mean([each.get(name, np.nan) for name in names])) for each in (scores, full))
    return (
        row
        | scores
        | {"average": average, "of_full": 100 * average / of if of else np.nan, "missing": ", ".join(missing)}
        | {"n": n_words(group).removeprefix("n = ") if "n" in group else ""}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 1 if not, 2 if the request cannot work."""
    parser = argparse.ArgumentParser(prog="kvexp longbench", description=__doc__.splitlines()[0])
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    args = parser.parse_args(argv)
    try:
        frame = averages(table(args.outputs, chosen_by(args)))
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    if frame.empty:
        say(f"no finished runs of task=longbench under {args.outputs}; run: kvexp run experiment=longbench14")
        return 1
    if args.csv is not None:
        frame.to_csv(args.csv, index=False)
    Console(markup=False).print(shown(frame))
    for _, row in frame[frame["missing"] != ""].iterrows():
        say(f"{row['model']} {row['method']}: no average yet, missing: {row['missing']}")
    return 0


def shown(frame: pd.DataFrame) -> Table:
    """For a terminal: a line per run, scores with two digits as published."""
    labels = [key for key in KEYS if key in frame and frame[key].notna().any()]
    labels = [key for key in labels if key != "numerics" or frame[key].nunique() > 1]
    scores = [str(name) for name in frame if name not in (*KEYS, "missing", "n")]
    labels += ["n"] if frame["n"].nunique() > 1 else []
    lines = Table()
    for name in (*labels, *scores):
        lines.add_column(name.replace("_", "\n"), justify="left" if name in labels else "right")
    for _, row in frame.iterrows():
        words = ["" if pd.isna(row[key]) else str(row[key]) for key in labels]
        lines.add_row(*words, *(fixed(row[name], 2) for name in scores))
    return lines
