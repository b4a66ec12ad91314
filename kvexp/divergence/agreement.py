"""python -m kvexp.divergence.agreement OUTPUTS ...: does KL divergence order runs as the task's metric does?

For each model and task of the folders: Kendall's tau-b between the runs' mean KL and their mean score, how many runs
KL decides against epsilon, a quarter and four times of it, how many pairs of runs KL and the metric decide, and every
pair that both decide, one against the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.record.divergence_lines import EPSILON_KL
from kvexp.record.run_name import run_name
from kvexp.results import table
from kvexp.results.columns import Column, plain, shared_settings
from kvexp.results.metric_agreement import FACTORS, agreement
from kvexp.results.read import Folder, chosen, folders
from kvexp.results.render import print_columns
from kvexp.results.units import TOO_FEW, absent
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 where there is nothing to compare."""
    args = parser().parse_args(argv)
    try:
        found = [folder for outputs in args.outputs for folder in chosen(folders(outputs), {})]
        frame = agreement(found, args.epsilon, args.metric)
        if frame.empty:
            raise ConfigError("no task has three runs with a divergence and a score: kvexp divergence measures it")
        rows: list[dict[str, Any]] = frame.to_dict("records")  # type: ignore[assignment]
        verdicts = [row for outputs in args.outputs for row in table(outputs).to_dict("records")]
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        own = [one for one in verdicts if all(one[name] == row[name] for name in ("numerics", "model", "task"))]
        row["mlperf"] = sum(one["verdict99"] in ("pass", "fail") for one in own)
    if args.csv is not None:
        frame.assign(mlperf=[row["mlperf"] for row in rows]).to_csv(args.csv, index=False)
    _print(rows, args.epsilon, {folder.run.hash: folder for folder in found if not folder.refused})
    return 0


def _print(rows: list[dict[str, Any]], epsilon: float, by_hash: dict[str, Folder]) -> None:
    console = Console()
    columns = [
        Column("task", lambda row: f"{row['model']} / {row['task']}", right=False),
        *([plain("numerics", "NUMERICS")] if len({row["numerics"] for row in rows}) > 1 else []),
        plain("metric", "metric", right=False),
        plain("n", "n"),
        plain("runs", "runs"),
        Column("Kendall's\ntau", lambda row: f"{row['tau']:+.2f}"),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:+.2f}..{row['high']:+.2f}"),
        *(Column(f"decided,\nKL {f * epsilon:g}", lambda row, f=f: f"{row[f'kl_{f:g}']}") for f in FACTORS),  # type: ignore[misc]
        Column("decided,\n99 %", lambda row: f"{row['mlperf']}"),
        plain("pairs", "pairs"),
        Column("decided\nby KL", lambda row: f"{row['by_kl']}"),
        Column("by the\nmetric", lambda row: f"{row['by_metric']}"),
        Column("by both", lambda row: f"{row['by_both']}"),
        Column("against\neach other", lambda row: f"{len(row['contradicted'])}"),
    ]
    console.print(Text("KL divergence from the full cache beside the task's metric", style="bold"))
    print_columns(rows, columns, 1, console)
    for row in rows:
        _, labels = shared_settings([{**by_hash[name].labels, "hash": name} for name in row["hashes"]])
        names = {each["hash"]: run_name(each) for each in labels}
        for one, other in row["contradicted"]:
            console.print(
                f"{row['task']}: {names[one]} diverges less than {names[other]}, which has more {row['metric']}"
            )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m kvexp.divergence.agreement", description=(__doc__ or "").split("\n\n")[1]
    )
    add = result.add_argument
    add("outputs", nargs="+", type=Path, help="folders of runs")
    add("--metric", help="default: rouge2 where a task has it, else its first")
    add("--epsilon", type=float, default=EPSILON_KL, metavar="NATS", help=f"of KL (default: {EPSILON_KL})")
    add("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    return result
