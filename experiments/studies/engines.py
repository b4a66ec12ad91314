"""What a shipped engine's eviction costs: OpenVINO GenAI's settings at several sizes, and kvexp's twin of each.

    python -m experiments.studies.engines plan
    python -m experiments.studies.engines record OUTPUTS --limit 6 --size 256
    python -m experiments.studies.engines table OUTPUTS

`plan` says how many runs there are and, by what this machine has recorded, how long they take. `record` makes those
that OUTPUTS lacks: the engine's own answers with its full cache and under each setting, and the twin's, whose
divergence from its own full cache is measured along that cache's answers. A twin stands for an engine as long as their
answers are equal, token for token; where one is not, `table` leaves its KL out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies import carried_out, composed_runs
from kvexp.results import stats
from kvexp.results.divergence import per_example, share_interval
from kvexp.results.table import TOO_FEW
from kvexp.run.batches import evaluate_run, prefill_groups, run_group
from kvexp.run.settings import Settings
from kvexp.run.store import OWN, Run, run_hash
from kvexp.util import ConfigError, Session, duration, say, watch_pipes

Row = dict[str, Any]

TASKS = {
    "news": ["task=news"],
    "news_qa": ["task=news_qa", "task.question=in_prompt"],
    "ruler": ["task=ruler", "task.subset=niah_single_2", "task.lengths=[1024]"],
    "longbench": ["task=longbench", "task.subset=qasper"],  # rows of the hub, or task.data_files: only if asked for
}
OWN_TASKS = ("news", "news_qa", "ruler")
SIZES = (256, 384, 512)  # tokens: budget.tokens, the engine's max_cache_size
SETTINGS = {
    "NORM_SUM, window 8": ["method.aggregation=norm_sum"],  # the engine's defaults
    "SUM, window 8": ["method.aggregation=sum"],
    "H2O: SUM, all queries": ["method.aggregation=sum", "method.window=0"],
    "NORM_SUM, KVCrush 2": ["method.aggregation=norm_sum", "method.crush=2"],
}
FULL, EIGHT = "full cache, f32", "full cache, u8"


@dataclass(frozen=True)
class Cell:
    """A line of the table: the engine's run and its twin's; size: None of a full cache."""

    task: str
    setting: str
    size: int | None
    engine: Settings
    twin: Settings | None


def cells(
    outputs: Path, tasks: Sequence[str], sizes: Sequence[int], limit: int | None, more: Sequence[str]
) -> list[Cell]:
    """The study's cells, full caches first."""
    session, found = Session(), []
    for task in tasks:
        words = [*TASKS[task], "batch_size=1", f"outputs_dir={outputs}", *more]
        words += [] if limit is None else [f"limit={limit}"]

        def one(*own: str, words: list[str] = words) -> Settings:
            (made,) = composed_runs([*words, *own], session)[1]
            return made

        twin = "model.weights=float16"
        found.append(Cell(task, FULL, None, one("engine=openvino", "method=full"), one("method=full", twin)))
        for size in sizes:
            for name, given in SETTINGS.items():
                asked = ["method=openvino", "budget=tokens", f"budget.tokens={size}", *given]
                twin_of = one(*asked, twin, "divergence=true")
                found.append(Cell(task, name, size, one(*asked, "engine=openvino"), twin_of))
        found.append(Cell(task, EIGHT, None, one("engine=openvino", "engine.cache=u8", "method=full"), None))
    return found


def rows_of(settings: Settings) -> list[Row]:
    """The rows that a run has, none where it was not begun."""
    folder = settings.outputs_dir / run_hash(settings.identity)
    return sorted(Run.load(folder).rows(), key=lambda row: row["index"]) if folder.is_dir() else []


def _record(args: argparse.Namespace) -> int:
    session, each = Session(), _cells(args)
    for cell in each:
        evaluate_run(cell.engine, session)
    twins = [cell.twin for cell in each if cell.twin is not None]
    for group in prefill_groups(twins):
        run_group(group, session)
    for twin in twins:
        evaluate_run(twin, session)
    say(table(each))
    return 0


def _table(args: argparse.Namespace) -> int:
    say(table(_cells(args)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    each = _cells(args)
    runs = [run for cell in each for run in (cell.engine, cell.twin) if run is not None]
    examples = [len(list(run.task.examples())) for run in runs]
    known = [seconds for cell in each for seconds in _seconds(cell.engine)]
    rows = sum(examples)
    say(f"{len(runs)} runs, {rows} rows")
    if not known:
        raise ConfigError("nothing is recorded that says how long a row takes here: record some first (--limit 2)")
    # A twin's row takes its answer and the forced text, about as long as an engine's row each.
    say(f"about {duration(float(np.mean(known)) * rows * 1.5)}, by {len(known)} rows recorded here")
    return 0


def _seconds(settings: Settings) -> Iterator[float]:
    for row in rows_of(settings):
        times = row["seconds"]
        yield times["ttft"] + times["tpot"] * (row["new_tokens"] - 1)


def table(each: Sequence[Cell]) -> str:
    """The recorded cells as Markdown."""
    lines = [
        "| task | setting | size | n | cache, MB | KL of the twin (95 %) | same tokens | score | tokens/s (full) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    full: dict[str, list[Row]] = {}
    for cell in each:
        rows = [row for row in rows_of(cell.engine) if not row.get("skipped") and not row.get("failed")]
        if cell.setting == FULL:
            full[cell.task] = rows
        if rows:
            lines.append(_line(cell, rows, {row["example"]: row for row in full[cell.task]}))
    return "\n".join(lines)


def _line(cell: Cell, rows: Sequence[Row], full: dict[str, Row]) -> str:
    metric = next(iter(rows[0]["metrics"]))
    score = np.mean([row["metrics"][metric] for row in rows])
    both = [(row, full[row["example"]]) for row in rows if row["example"] in full]
    same = np.mean([_share(a["output_tokens"], b["output_tokens"]) for a, b in both])
    speed, own = (1 / np.mean([row["seconds"]["tpot"] for row in part]) for part in (rows, [b for _, b in both]))
    mb = np.mean([row["receipt"]["kv_bytes"] for row in rows]) / 1e6
    held = "" if cell.size is None else str(cell.size)
    values = [cell.task, cell.setting, held, str(len(rows)), f"{mb:.1f}", _kl(cell, rows)]
    return f"| {' | '.join([*values, f'{100 * same:.0f} %', f'{score:.1f} {metric}', f'{speed:.0f} ({own:.0f})'])} |"


def _share(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(map(int.__eq__, one, other)) / max(len(one), len(other))


def _kl(cell: Cell, rows: Sequence[Row]) -> str:
    """The twin's KL with its interval; how many answers are equal where not all are, or nothing of a full cache."""
    if cell.twin is None:
        return ""
    twins = {row["example"]: row.get("output_tokens") for row in rows_of(cell.twin)}
    equal = sum(twins.get(row["example"]) == row["output_tokens"] for row in rows)
    if equal < len(rows):
        return f"({equal} of {len(rows)} answers equal)"
    if cell.size is None:
        return "0"
    found = per_example(Run.load(cell.twin.outputs_dir / run_hash(cell.twin.identity)), OWN)
    if found is None:
        return ""
    low, high = share_interval(found.kl, found.tokens, stats.LEVEL)
    interval = TOO_FEW if np.isnan(low) else f"{low:.3f} to {high:.3f}"
    return f"{found.kl.sum() / found.tokens.sum():.3f} ({interval})"


def _cells(args: argparse.Namespace) -> list[Cell]:
    return cells(args.outputs, args.task or OWN_TASKS, args.size or SIZES, args.limit, args.words)


def main(words: Sequence[str] | None = None) -> int:
    """Plan, record or show the study; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.engines", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, command in {"plan": _plan, "record": _record, "table": _table}.items():
        sub = commands.add_parser(name)
        sub.add_argument("outputs", type=Path, nargs="?", default=Path("outputs/engines"))
        sub.add_argument("--task", action="append", choices=list(TASKS))
        sub.add_argument("--size", action="append", type=int, help="tokens; may be given several times")
        sub.add_argument("--limit", type=int, help="examples of each task; without it all")
        sub.add_argument("--words", nargs="*", default=[], help="further words of the command line, such as threads=2")
        sub.set_defaults(command=command)
    return carried_out(parser, words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
