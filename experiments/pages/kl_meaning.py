"""docs/kl_meaning.md: what answers lose at a KL, from the league's runs and from summaries kept in kl_meaning.csv.

python -m experiments.pages.kl_meaning OUTPUTS      writes kl_meaning.csv from runs of `news` and their full cache
"""

from __future__ import annotations

import functools
import re
import sys

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.pages import ROOT, Curve, blank, curves, markdown
from kvexp.results.divergence import example_means, share_interval
from kvexp.results.read import read_runs
from kvexp.results.stats import LEVEL
from kvexp.run.store import OWN
from kvexp.util.output import watch_pipes

RECORDED = ROOT / "docs" / "kl_meaning.csv"
RUN = ["method", "kv_ratio"]
LEVELS, WIDTH = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0), 1.4  # nats; a level's runs are within this factor of it
WORD = re.compile(r"\w(?:[\w'.,:-]*\w)?")
Estimate = tuple[float, float, float]


def record(outputs: str) -> None:
    """Keep the answers of a folder's runs and of the full cache, with their KL."""
    rows = []
    for run in read_runs(outputs).ran:
        labels, kl = (
            {"numerics": run.run.numerics, **{key: run.labels.get(key) for key in RUN}},
            example_means(run, OWN),
        )
        for name, row in run.scored.items():
            rows.append({**labels, "example": name, "kl": kl.get(name), "answer": row["output"]})
    pd.DataFrame(rows).sort_values([*RUN, "example"]).to_csv(RECORDED, index=False, float_format="%.4g")


def words(text: str) -> set[str]:
    return {word.lower() for word in WORD.findall(text)}


def names_and_numbers(text: str) -> set[str]:
    """Words that have a digit, or a capital letter elsewhere than at a sentence's beginning; in lower case."""
    found = set()
    for sentence in re.split(r"(?<=[.!?])\s+|\n+", text):
        for place, word in enumerate(WORD.findall(sentence)):
            if re.search(r"\d", word) or (place and word[0].isupper()):
                found.add(word.lower())
    return found


def summaries() -> pd.DataFrame:
    """Recorded answers, how many names and numbers the full cache's has, and how many of them each misses."""
    rows = pd.read_csv(RECORDED)
    full = rows[rows["method"] == "full"].set_index("example")["answer"].map(names_and_numbers)
    wanted = rows["example"].map(full)
    missing = [len(names - words(answer)) for names, answer in zip(wanted, rows["answer"], strict=True)]
    return rows.assign(names=wanted.map(len), missing=missing)


def share_missing(rows: pd.DataFrame) -> Estimate:
    """Percent of all names and numbers that answers miss, with an interval over articles."""
    missing, names = rows.groupby("example")[["missing", "names"]].sum().to_numpy(float).T
    low, high = share_interval(missing, names, LEVEL)
    return 100 * float(missing.sum() / names.sum()), 100 * low, 100 * high


def spread(values: pd.Series) -> Estimate:
    """Median and the middle 80 % of runs."""
    middle, low, high = values.quantile([0.5, 0.1, 0.9])
    return float(middle), float(low), float(high)


@functools.cache
def measured() -> dict[str, list[Estimate]]:
    """What is lost -> percent at each of LEVELS."""
    league = pd.read_csv(ROOT / "experiments" / "methods_league.csv")
    kept = summaries().assign(run=lambda rows: rows.groupby(RUN)["kl"].transform("mean"))
    found: dict[str, list[Estimate]] = {}
    for level in LEVELS:
        runs, answers = (
            rows[rows[of].between(level / WIDTH, level * WIDTH)] for rows, of in ((league, "kl"), (kept, "run"))
        )
        found.setdefault("right answers lost", []).append(spread(100 - runs["of_full"].dropna()))
        found.setdefault("names, numbers missing", []).append(share_missing(answers))
        found.setdefault("likeliest token changes", []).append(spread(100 * (1 - runs["top1"])))
    return found


def draw() -> Figure:
    figure, (axes,) = blank()
    lines = []
    for name, values in measured().items():
        middle, low, high = np.array(values).T
        lines.append(Curve(name, LEVELS, middle, low.clip(0), high.clip(0, 100)))
    axes.set_ylim(0, 102)
    curves(axes, lines, "KL from the full cache, nats per token", "percent", log="x")
    return figure


def table() -> str:
    found = measured()
    rows = [
        [f"{level:g}", *(f"{middle:.0f} ({low:.0f}..{high:.0f})" for middle, low, high in estimates)]
        for level, *estimates in zip(LEVELS, *found.values(), strict=True)
    ]
    return markdown(["nats", *(f"{name}, %" for name in found)], rows)


if __name__ == "__main__":
    watch_pipes()
    record(sys.argv[1])
