"""Cost of a shipped engine's settings: OpenVINO GenAI at several sizes, kvexp's twin of each, and kvexp's methods.

    python -m experiments.studies.engines record OUTPUTS --limit 6 --size 256
    python -m experiments.studies.engines table OUTPUTS --csv docs/engines.csv

`record` makes the runs that OUTPUTS lacks: the engine's own answers with its full cache and under each setting; its
twin's, whose divergence from its own full cache is measured along that cache's answers; and kvexp's methods with as
many slots as the engine has in use. A twin stands for an engine as long as their answers are equal, token for token;
where one is not, `table` leaves its KL out. It has a line for each task, setting and size, of the examples that all
recorded cells of a task have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.studies import carried_out, composed_runs
from kvexp.generate.openvino import BLOCK
from kvexp.results import stats
from kvexp.results.divergence import per_example, share_interval
from kvexp.run.batches import evaluate_run, measure_rest, prefill_groups, run_group
from kvexp.run.session import Session
from kvexp.run.settings import Settings
from kvexp.run.store import OWN, Run, run_hash
from kvexp.util.errors import ConfigError
from kvexp.util.output import say, watch_pipes

Row = dict[str, Any]

TASKS = {
    "news": ["task=news", "task.max_new_tokens=48"],
    "news_qa": ["task=news_qa", "task.question=in_prompt"],
    "ruler": ["task=ruler", "task.subset=niah_single_2", "task.lengths=[1024]"],
    "longbench": ["task=longbench", "task.subset=triviaqa", "task.extended=true", "task.max_prompt_tokens=1536"],
}
FROM_FILE = "longbench"  # recorded where its rows are named (--longbench), for the hub's file is large
SIZES = (256, 384, 512)  # tokens: budget.tokens, the engine's max_cache_size
SETTINGS = {
    "NORM_SUM, window 8 (default)": ["method.aggregation=norm_sum"],
    "NORM_SUM, window 8, KVCrush 2": ["method.aggregation=norm_sum", "method.crush=2"],
    "NORM_SUM, all queries": ["method.aggregation=norm_sum", "method.window=0"],
    "SUM, all queries (H2O)": ["method.aggregation=sum", "method.window=0"],
}
FULL, EIGHT = "full cache, f32", "full cache, u8 (default)"
RIVALS = {  # with as many slots in each head as the engine has in use
    "h2o": ["method=h2o"],
    "snapkv, also while decoding": ["method=snapkv", "method.decoding=true"],
    "keyformer": ["method=keyformer"],
    "ideal": ["method=ideal"],
}
CLOSE = 1e-3  # root mean square of differences of log-probabilities, up to which a twin stands for its engine


@dataclass(frozen=True)
class Cell:
    """A line of the table: the engine's run, and kvexp's, its twin where there is both; size: None of a full cache."""

    task: str
    setting: str
    size: int | None
    engine: Settings | None
    own: Settings | None

    @property
    def runs(self) -> list[Settings]:
        return [run for run in (self.engine, self.own) if run is not None]


def cells(
    outputs: Path,
    tasks: Sequence[str],
    sizes: Sequence[int],
    limit: int | None,
    more: Sequence[str],
    longbench: Path | None = None,
) -> list[Cell]:
    """The study's cells, full caches first; longbench: the file of that task's rows, None for the hub's."""
    session, found = Session(), []
    for task in tasks:
        words = [*TASKS[task], "batch_size=1", f"outputs_dir={outputs}", *more]
        words += [] if limit is None else [f"limit={limit}"]
        words += [] if longbench is None or task != FROM_FILE else [f"task.data_files={longbench}"]

        def engine(*asked: str, words: list[str] = words) -> Settings:
            (made,) = composed_runs([*words, *asked, "engine=openvino"], session)[1]
            return made

        def own(*asked: str, words: list[str] = words) -> Settings:
            measured = [] if asked == ("method=full",) else ["divergence=true"]
            (made,) = composed_runs([*words, *asked, *measured, "model.weights=float16"], session)[1]
            return made

        found.append(Cell(task, FULL, None, engine("method=full"), own("method=full")))
        eight = engine("engine.cache=u8", "method=full"), own("method=full", "cache.codec=u8")
        found.append(Cell(task, EIGHT, None, *eight))
        for size in sizes:
            for name, given in SETTINGS.items():
                asked = ["method=openvino", "budget=tokens", f"budget.tokens={size}", *given]
                found.append(Cell(task, name, size, engine(*asked), own(*asked)))
            for name, given in RIVALS.items():
                asked = [*given, "budget=tokens", f"budget.tokens={size + BLOCK}"]
                found.append(Cell(task, name, size, None, own(*asked)))
    return found


def rows_of(settings: Settings | None) -> dict[str, Row]:
    """The answered rows of a run by example, none where it was not begun."""
    folder = None if settings is None else settings.outputs_dir / run_hash(settings.identity)
    if folder is None or not folder.is_dir():
        return {}
    rows = sorted(Run.load(folder).rows(), key=lambda row: row["index"])
    return {row["example"]: row for row in rows if not row.get("skipped") and not row.get("failed")}


def _record(args: argparse.Namespace) -> int:
    session, each = Session(), _cells(args)
    for task in dict.fromkeys(cell.task for cell in each):
        here = [cell for cell in each if cell.task == task]
        own = [cell.own for cell in here if cell.own is not None]
        for group in prefill_groups(own):
            run_group(group, session)
        for run in [*(cell.engine for cell in here if cell.engine is not None), *own]:
            evaluate_run(run, session)
            if run.divergence.texts:  # a run that alone lacks something is no group's
                measure_rest(run, session)
    say(table(each).to_string(index=False, na_rep=""))
    return 0


def _table(args: argparse.Namespace) -> int:
    made = table(_cells(args))
    say(made.to_string(index=False, na_rep=""))
    if args.csv is not None:
        made.to_csv(args.csv, index=False, float_format="%.4g")
        say(f"wrote {args.csv}")
    return 0


@dataclass(frozen=True)
class Recorded:
    """What a cell has of the examples of its task that all recorded cells have; engine: [] of kvexp's own."""

    cell: Cell
    engine: list[Row]
    own: list[Row]

    @property
    def rows(self) -> list[Row]:
        return self.engine or self.own

    @property
    def equal(self) -> int:
        """How many answers of the twin are the engine's."""
        both = zip(self.engine, self.own, strict=True)
        return sum(one["output_tokens"] == other["output_tokens"] for one, other in both)

    @property
    def score(self) -> float:
        metric = next(iter(self.rows[0]["metrics"]))
        return float(np.mean([row["metrics"][metric] for row in self.rows]))

    @property
    def kl(self) -> tuple[float, float, float]:
        """KL with its interval; NaN where an answer of the twin is not the engine's, or nothing was measured."""
        if self.cell.setting == FULL:
            return 0.0, np.nan, np.nan
        if self.forced is None or (self.engine and self.equal < len(self.engine)):
            return np.nan, np.nan, np.nan
        kl, tokens, _, _ = self.forced
        return float(kl.sum() / tokens.sum()), *share_interval(kl, tokens, stats.LEVEL)

    @cached_property
    def forced(self) -> tuple[np.ndarray, ...] | None:
        """KL and tokens of each example [n], KL and place of each token [tokens.sum()]; None where there is none."""
        found, names = per_example(self.own_run, OWN), {row["example"] for row in self.own}
        if found is None:
            return None
        chosen = np.array([name in names for name in found.names])
        each = np.repeat(chosen, found.tokens.astype(int))
        return found.kl[chosen], found.tokens[chosen], found.each_kl[each], found.each_place[each]

    def kl_at(self, first: int, last: int) -> float:
        """Mean KL of tokens at places first to last of an answer, where the twin stands for the engine, else NaN."""
        if self.forced is None or not self.stands:
            return np.nan
        _, _, kl, place = self.forced
        there = (first <= place) & (place <= last)
        return float(kl[there].mean()) if there.any() else np.nan

    @property
    def own_run(self) -> Run:
        assert self.cell.own is not None
        return Run.load(self.cell.own.outputs_dir / run_hash(self.cell.own.identity))

    @property
    def stands(self) -> bool:
        """Whether the twin's tokens and log-probabilities are the engine's; True of kvexp's own runs."""
        engine, twin, _ = self.chosen
        return not self.engine or (self.equal == len(self.engine) and _rms(engine - twin) < CLOSE)

    @cached_property
    def chosen(self) -> np.ndarray:
        """Log-probabilities [3, N] of chosen tokens by the engine, its twin and the twin's full cache.

        Of the places at which the answer still is the full cache's; none of a full cache that is the baseline.
        """
        lines, found = self.own_run.divergence(), [np.zeros((3, 0))]
        for row in self.engine:
            line = lines.get((row["example"], OWN))
            if line is not None:
                same = len(list(takewhile(bool, map(int.__eq__, row["output_tokens"], line["tokens"]))))
                each = row["info"]["output_logprobs"], line["logprob"], line["full_logprob"]
                found.append(np.array([numbers[:same] for numbers in each]))
        return np.concatenate(found, axis=1)


def recorded(each: Sequence[Cell]) -> dict[str, list[Recorded]]:
    """Task -> its recorded cells; a task without its full cache has none."""
    found: dict[str, list[Recorded]] = {}
    for task in dict.fromkeys(cell.task for cell in each):
        rows = [(cell, [rows_of(run) for run in cell.runs]) for cell in each if cell.task == task]
        begun = [(cell, parts) for cell, parts in rows if all(parts)]
        if not any(cell.setting == FULL for cell, _ in begun):
            continue
        shared = set.intersection(*(set(part) for _, parts in begun for part in parts))
        found[task] = []
        for cell, parts in begun:
            kept = [[row for name, row in part.items() if name in shared] for part in parts]
            engine = kept[0] if cell.engine is not None else []
            found[task].append(Recorded(cell, engine, kept[-1]))
    return {task: lines for task, lines in found.items() if lines[0].rows}


def table(each: Sequence[Cell]) -> pd.DataFrame:
    """A line for each recorded cell; ConfigError where nothing is recorded.

    n: examples. megabytes: in use at the end. kl: of the twin or of kvexp's own run, with its interval; kl_third: in
    each third of the longest answer. equal: answers of the twin that are the engine's; stands: whether it stands for
    the engine. moved: how far log-probabilities of chosen tokens are from the full cache's, root mean square.
    same_percent: places at which the answer has its full cache's token.
    """
    found = recorded(each)
    if not found:
        raise ConfigError("nothing is recorded in this folder: record it first")
    return pd.DataFrame(_line(line, lines[0]) for lines in found.values() for line in lines)


def _line(line: Recorded, full: Recorded) -> dict[str, Any]:
    """A cell's line of the table. full: the cell of the same task's full cache."""
    baseline = full.engine if line.engine else full.own
    longest = max(row["new_tokens"] for row in full.rows)
    ends = [round(longest * part / 3) for part in range(4)]
    # Without the first token, which nothing evicted precedes.
    thirds = [line.kl_at(max(2, first + 1), last) for first, last in pairwise(ends)]
    engine, twin, unmoved = line.chosen
    pairs = zip(line.rows, baseline, strict=True)
    about = {"task": line.cell.task, "n": len(line.rows), "setting": line.cell.setting, "tokens": line.cell.size}
    about |= {"megabytes": np.mean([row["receipt"]["kv_bytes"] for row in line.rows]) / 1e6}
    about |= dict(
        zip(("kl", "low", "high", "kl_third_1", "kl_third_2", "kl_third_3"), (*line.kl, *thirds), strict=True)
    )
    about |= {"same_percent": 100 * np.mean([_share(a["output_tokens"], b["output_tokens"]) for a, b in pairs])}
    about |= {"score": line.score, "stands": line.stands}
    if line.engine:
        about |= {"equal": line.equal, "moved": _rms(engine - unmoved), "moved_twin": _rms(twin - unmoved)}
    return about


def _rms(gaps: np.ndarray) -> float:
    return float(np.sqrt(np.mean(gaps**2))) if len(gaps) else 0.0


def _share(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(map(int.__eq__, one, other)) / max(len(one), len(other))


def _cells(args: argparse.Namespace) -> list[Cell]:
    tasks = args.task or [task for task in TASKS if task != FROM_FILE or args.longbench is not None]
    return cells(args.outputs, tasks, args.size or SIZES, args.limit, args.words, args.longbench)


def main(words: Sequence[str] | None = None) -> int:
    """Record or show the study; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.engines", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, command in {"record": _record, "table": _table}.items():
        sub = commands.add_parser(name)
        sub.add_argument("outputs", type=Path, nargs="?", default=Path("outputs/engines"))
        sub.add_argument("--task", action="append", choices=list(TASKS))
        sub.add_argument("--size", action="append", type=int, help="tokens; may be given several times")
        sub.add_argument("--limit", type=int, help="examples of each task; without it all")
        sub.add_argument("--longbench", type=Path, metavar="FILE", help="rows of LongBench-E's triviaqa, or data.zip")
        sub.add_argument("--words", nargs="*", default=[], help="further words of the command line, such as threads=2")
        if name == "table":
            sub.add_argument("--csv", type=Path, help="also write the table into this file")
        sub.set_defaults(command=command)
    return carried_out(parser, words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
