"""What ten methods lose on RULER, on SmolLM2-135M: tables from the runs of `experiment=ruler_board`.

    python -m experiments.studies.ruler_board OUTPUTS
    python -m experiments.studies.ruler_board [OUTPUTS] --rows docs/ruler_board.csv

The second adds the tasks and lengths of OUTPUTS to the rows of a file, so that they need not be run on one day. It
prints KL by length, method, question and budget. What the boards conclude are claims (experiments/claims).

Every number is KL from the full cache along its own answer, nats per token, mean over the tokens of an answer, then
over examples; every task has the same number of examples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.lib.tables import markdown
from experiments.studies import carried_out, check_numerics, kl_of_runs
from experiments.studies import read_wide as read_rows
from experiments.studies import wide as widened
from kvexp.results.stats import interval_of_mean
from kvexp.util.errors import ConfigError
from kvexp.util.output import say, watch_pipes

SEEN, HIDDEN = "in_prompt", "after_eviction"
COLUMNS = ["numerics", "task", "question", "method", "kv_ratio", "example", "kl"]
METHODS = ("random", "streaming_llm", "knorm", "keydiff", "lagkv", "h2o", "tova", "snapkv", "pyramidkv")
METHODS += ("expected_attention",)
RATIOS = (0.5, 0.25, 0.125)
LONG, AT_LONG = 4096, ("random", "streaming_llm", "tova", "snapkv", "expected_attention")  # half of the methods
LEAST, LEAST_LONG = 8, 4  # examples of a task below LONG, and there


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


def mean_of(rows: pd.DataFrame, method: str, question: str, ratio: float) -> tuple[float, float, float]:
    """(Mean KL, low, high) of a method's examples at a budget."""
    values = rows.query("method == @method and question == @question and kv_ratio == @ratio")["kl"].to_numpy()
    return float(values.mean()), *interval_of_mean(values)


def by_length(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Lengths -> the rows of as many examples of each task: all lengths below LONG together, then each length."""
    rows = rows.sort_values(COLUMNS[:-1], ignore_index=True)  # so that a file of rows gives the same intervals
    lengths = length_of(rows)
    parts = {f"below {LONG:,}": rows[lengths < LONG]}
    parts |= {f"{length:,}": rows[lengths == length] for length in sorted(set(lengths))}
    return {name: balanced(part) for name, part in parts.items() if len(part)}


def text(rows: pd.DataFrame) -> str:
    """KL of each length by method, question and share of the cache, as Markdown."""
    tables = []
    columns = [(question, ratio) for question in (SEEN, HIDDEN) for ratio in RATIOS]
    heads = [f"{'seen' if question == SEEN else 'hidden'}, {ratio:g}" for question, ratio in columns]
    for length, part in by_length(rows).items():
        tasks = part.groupby("task")["example"].nunique()
        cells = [
            (method, *("{:.2f} ({:.2f}..{:.2f})".format(*mean_of(part, method, *column)) for column in columns))
            for method in METHODS
            if method in set(part["method"])
        ]
        title = f"KL, {length} tokens, {len(tasks)} tasks, {tasks.iloc[0]} examples of each"
        tables.append(f"{title}:\n\n{markdown(('method', *heads), *cells)}")
    return "\n\n".join(tables)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.ruler_board", description=__doc__)
    parser.add_argument("outputs", nargs="?", help="the folder of the sweep's runs")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="KL of earlier tasks, which OUTPUTS are added to")
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
    say(text(rows))
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
