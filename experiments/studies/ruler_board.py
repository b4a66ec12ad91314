"""Which conclusions of published RULER boards hold on SmolLM2-135M: tables from the runs of `experiment=ruler_board`.

    python -m experiments.studies.ruler_board OUTPUTS
    python -m experiments.studies.ruler_board [OUTPUTS] --rows docs/ruler_board.csv --page docs/benchmarks.md

The second adds the tasks and lengths of OUTPUTS to the rows of a file, so that they need not be run on one day.

Every number is KL from the full cache along its own answer, nats per token, mean over the tokens of an answer, then
over examples; every task has the same number of examples. A conclusion is a difference of two means over the same
examples, with a 95 % interval; where it is of several budgets, an example's mean over them counts once. The boards
report scores of models of billions of parameters: what can agree is the order of methods, not a number.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.lib.tables import markdown
from experiments.studies import carried_out, check_numerics, kl_of_runs, write_tables
from experiments.studies import read_wide as read_rows
from experiments.studies import wide as widened
from kvexp.results.stats import interval_of_mean
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes

SEEN, HIDDEN = "in_prompt", "after_eviction"
BEGIN = "<!-- ruler: made by python -m experiments.studies.ruler_board OUTPUTS --page docs/benchmarks.md -->"
COLUMNS = ["numerics", "task", "question", "method", "kv_ratio", "example", "kl"]
END = "<!-- end of ruler -->"
METHODS = ("random", "streaming_llm", "knorm", "keydiff", "lagkv", "h2o", "tova", "snapkv", "pyramidkv")
METHODS += ("expected_attention",)
RATIOS = (0.5, 0.25, 0.125)
LONG, AT_LONG = 4096, ("random", "streaming_llm", "tova", "snapkv", "expected_attention")  # half of the methods
LEAST, LEAST_LONG = 8, 4  # examples of a task below LONG, and there


@dataclass(frozen=True)
class Side:
    """What one side of a conclusion is the mean of: a method, where the question stands, budgets."""

    method: str
    question: str
    ratios: tuple[float, ...] = RATIOS

    def means(self, rows: pd.DataFrame) -> pd.Series:
        """Mean KL of every example over the budgets."""
        mine = rows["method"].eq(self.method) & rows["question"].eq(self.question) & rows["kv_ratio"].isin(self.ratios)
        return rows[mine].groupby(["task", "example"])["kl"].mean()


# (conclusion, source, the side that is nearer to the full cache, the other one)
CONCLUSIONS = (
    (
        "SnapKV has to see the question",
        "kvpress's board; KVzip, arXiv:2505.23416",
        Side("snapkv", SEEN),
        Side("snapkv", HIDDEN),
    ),
    ("question seen: SnapKV is ahead of H2O", "arXiv:2404.14469", Side("snapkv", SEEN), Side("h2o", SEEN)),
    (
        "question seen: SnapKV is ahead of sinks and a window",
        "arXiv:2404.14469",
        Side("snapkv", SEEN),
        Side("streaming_llm", SEEN),
    ),
    (
        "question seen, an eighth: PyramidKV is ahead of SnapKV",
        "arXiv:2406.02069",
        Side("pyramidkv", SEEN, (0.125,)),
        Side("snapkv", SEEN, (0.125,)),
    ),
    ("question seen: TOVA is ahead of H2O", "arXiv:2401.06104", Side("tova", SEEN), Side("h2o", SEEN)),
    (
        "question hidden: Expected Attention is ahead of SnapKV",
        "arXiv:2510.00636",
        Side("expected_attention", HIDDEN),
        Side("snapkv", HIDDEN),
    ),
    (
        "question hidden: KeyDiff is ahead of SnapKV",
        "arXiv:2504.15364",
        Side("keydiff", HIDDEN),
        Side("snapkv", HIDDEN),
    ),
    ("question hidden: LagKV is ahead of SnapKV", "arXiv:2504.04704", Side("lagkv", HIDDEN), Side("snapkv", HIDDEN)),
    ("question hidden: small key norms beat chance", "arXiv:2406.11430", Side("knorm", HIDDEN), Side("random", HIDDEN)),
)


def length_of(rows: pd.DataFrame) -> pd.Series:
    """Tokens that every row's prompt was made for."""
    return rows["example"].str.extract(r"length (\d+)")[0].astype(int)


def rows_of(outputs: str) -> pd.DataFrame:
    """COLUMNS of the examples that all runs of a task and length have; ConfigError where no task has enough of them.

    All runs: every method (AT_LONG at LONG), budget and question; enough: LEAST below LONG, or LEAST_LONG there.
    """
    rows = kl_of_runs(outputs, "ruler_board")
    rows = rows[rows["kv_ratio"].isin(RATIOS) & rows["method"].isin(METHODS)][COLUMNS]
    rows["task"] = [str(task).partition("/")[2] for task in rows["task"]]
    long = length_of(rows) >= LONG
    parts = []
    for part, methods, least in ((rows[~long], METHODS, LEAST), (rows[long], AT_LONG, LEAST_LONG)):
        part = part[part["method"].isin(methods)]
        times = part.groupby(["task", "example"])["kl"].transform("size")
        part = part[times == 2 * len(methods) * len(RATIOS)]
        parts.append(part[part.groupby("task")["example"].transform("nunique") >= least])
    rows = pd.concat(parts)
    if rows.empty:
        raise ConfigError(
            f"{outputs}: no task has all runs of experiment=ruler_board; run: kvexp run experiment=ruler_board"
        )
    return rows.reset_index(drop=True)


def added(known: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Known rows and further ones, which replace the known of the same task, below or at LONG.

    Raises ConfigError where NUMERICS differs.
    """
    known_of, of = (table["task"] + (length_of(table) >= LONG).astype(str) for table in (known, rows))
    return check_numerics(pd.concat([known[~known_of.isin(of)], rows], ignore_index=True))


def balanced(rows: pd.DataFrame) -> pd.DataFrame:
    """The first examples of every task, as many as the task with fewest has."""
    least = rows.groupby("task")["example"].nunique().min()
    first = rows.groupby("task")["example"].transform(lambda names: pd.factorize(names)[0])
    return rows[first < least].reset_index(drop=True)


def wide(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows as a table with a line for each example, and a column for each question, method and share."""
    made = widened(rows, COLUMNS[2:5])
    order = made.assign(long=length_of(made) >= LONG).sort_values(["task", "long"], kind="stable").index
    return made.loc[order].reset_index(drop=True)


def read_wide(file: Path) -> pd.DataFrame:
    """The rows of a file of `wide`."""
    return read_rows(file, COLUMNS, COLUMNS[2:5])


def mean_of(values: pd.Series) -> str:
    """A mean with its interval."""
    low, high = interval_of_mean(values.to_numpy())
    return f"{values.mean():.2f}" if low != low else f"{values.mean():.2f} ({low:.2f}..{high:.2f})"


def verdict(rows: pd.DataFrame, nearer: Side, other: Side) -> tuple[str, str]:
    """(holds, contradicted or open; how much more KL the other side has, with its interval)."""
    gaps = (other.means(rows) - nearer.means(rows)).dropna()
    low, high = interval_of_mean(gaps.to_numpy())
    word = "holds" if low > 0 else "contradicted" if high < 0 else "open"
    return word, f"{gaps.mean():+.2f} ({low:+.2f}..{high:+.2f})"


def by_length(rows: pd.DataFrame) -> str:
    """The conclusions about methods that ran at LONG, length by length; empty where nothing ran there."""
    lengths = length_of(rows)
    if lengths.max() < LONG:
        return ""
    columns = sorted(set(lengths))
    table = [
        (claim, *(": ".join(verdict(rows[lengths == length], nearer, other)) for length in columns))
        for claim, _, nearer, other in CONCLUSIONS
        if {nearer.method, other.method} <= set(AT_LONG)
    ]
    cells = {key: part for key, part in rows[rows["kv_ratio"].eq(0.25)].groupby(["method", "question", lengths])["kl"]}
    kl = [
        (method, *(mean_of(cells[method, question, length]) for question in (SEEN, HIDDEN) for length in columns))
        for method in sorted(AT_LONG, key=lambda method: cells[method, HIDDEN, LONG].mean())
    ]
    rows = rows.assign(length=lengths)
    counts = rows.groupby(["length", "task"])["example"].nunique().groupby("length")
    assert (counts.min() == counts.max()).all(), "tasks of one length have as many examples"
    said = ", ".join(f"{n} at {length:,}" for length, n in counts.min().items())
    named = [f"{length:,}" for length in columns]
    head = ("method", *(f"{name}, {length}" for name in ("seen", "hidden") for length in named))
    return (
        f"By length, {counts.size().iloc[-1]} tasks, examples of each: {said}; half of the methods ran at {LONG:,}.\n\n"
        f"{markdown(('conclusion', *named), *table)}\n\n"
        f"KL at a quarter, by length:\n\n{markdown(head, *kl)}\n"
    )


def text(rows: pd.DataFrame) -> str:
    """The tables as Markdown."""
    rows = rows.sort_values(COLUMNS[:-1], ignore_index=True)  # so that a file of rows gives the same intervals
    short = length_of(rows) < LONG
    long, rows = (balanced(part) if len(part) else part for part in (rows[~short], rows[short]))
    further = by_length(pd.concat([rows, long], ignore_index=True))
    if rows.empty:
        return further
    tasks, n = sorted(set(rows["task"])), rows.groupby("task")["example"].nunique().iloc[0]
    said = [(claim, source, *verdict(rows, nearer, other)) for claim, source, nearer, other in CONCLUSIONS]
    cells = {key: part["kl"] for key, part in rows.groupby(["method", "question", "kv_ratio"])}
    table = [
        (method, *(mean_of(cells[method, question, ratio]) for question in (SEEN, HIDDEN) for ratio in RATIOS))
        for method in sorted(METHODS, key=lambda method: cells[method, HIDDEN, 0.25].mean())
    ]
    quarter = rows[rows["kv_ratio"].eq(0.25)].groupby(["task", "question", "method"])["kl"].mean()
    columns = list(itertools.product((SEEN, HIDDEN), ("snapkv", "expected_attention")))
    each = []
    for task in tasks:
        nearest = (quarter[task, question] for question in (SEEN, HIDDEN))
        best = (f"{found.idxmin()} {found.min():.2f}" for found in nearest)
        each.append((f"`{task}`", *(f"{quarter[(task, *column)]:.2f}" for column in columns), *best))
    head = ("method", *(f"{name}, {ratio:g}" for name in ("seen", "hidden") for ratio in RATIOS))
    heads = ("task", "SnapKV, seen", "Expected Attention, seen", "SnapKV, hidden", "Expected Attention, hidden")
    return (
        f"{len(tasks)} tasks, {n} examples of each, half of 1,024 and half of 2,048 tokens.\n\n"
        f"{markdown(('conclusion', 'source', 'here', 'more KL of the other'), *said)}\n\n"
        f"KL by method, question and share of the cache:\n\n{markdown(head, *table)}\n\n"
        f"At a quarter, by task, with the nearest method:\n\n{markdown((*heads, 'nearest, seen', 'hidden'), *each)}\n"
    ) + (further and f"\n{further}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.ruler_board", description=__doc__)
    parser.add_argument("outputs", nargs="?", help="the folder of the sweep's runs")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="KL of earlier tasks, which OUTPUTS are added to")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.set_defaults(command=_write)
    return carried_out(parser, words)


def _write(args: argparse.Namespace) -> int:
    known = read_wide(args.rows) if args.rows and args.rows.exists() else None
    if args.outputs is None and known is None:
        raise ConfigError("name the folder of the sweep's runs, or --rows FILE of earlier ones")
    rows = rows_of(args.outputs) if args.outputs else known
    if args.outputs and args.rows:
        rows = rows if known is None else added(known, rows)
        wide(rows).to_csv(args.rows, index=False, float_format="%.5g")
        rows = read_wide(args.rows)
    write_tables(text(rows), args.page, BEGIN, END)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
