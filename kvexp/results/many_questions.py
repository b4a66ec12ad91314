"""Runs of questions=all by the number of questions asked of one evicted cache: what is lost, and what it costs.

kvexp many-questions outputs/
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.results import intervals, stats
from kvexp.results.columns import Column, method_and_setting, parts, plain, shared_settings, without_question
from kvexp.results.question_place import titled
from kvexp.results.read import Folder, Row, baseline_of, chosen, folders, in_order, number
from kvexp.results.render import print_blocks
from kvexp.results.seen_and_hidden import Block
from kvexp.results.stats import Floats
from kvexp.results.table_command import parser_of, run_command
from kvexp.results.units import TOO_FEW, absent, fixed, seconds, short

LEGEND = (
    "asked: the first so many questions of every context of which as many were asked; % of full: of their mean score, "
    "with its 95 % interval over contexts, for questions of one are not independent; none lost: share of contexts with "
    "no answer below the full cache's; one prefill, one by one: mean seconds per context, the second of the same rows "
    "with a prefill for each question; of runs that were timed by themselves (hydra/launcher=basic, batch_size=1)"
)


@dataclass(frozen=True)
class Context:
    """A context's questions in order, as a run and its baseline answered them; those that do not count are left out.

    questions: how many the run asked of it. numbers, scores, full, seconds [n]: of each answer its place among them,
    the run's and the full cache's score, and seconds of prefill, copy and the rest.
    """

    questions: int
    numbers: list[int]
    scores: Floats
    full: Floats
    seconds: Floats


def questions_table(runs: Sequence[Folder], known: Mapping[str, Folder]) -> pd.DataFrame:
    """A row per run and number of questions asked, of runs of questions=all that have a baseline. known: by hash.

    Columns: the run's labels, asked, contexts, metric, score and full (means), of_full with low and high (percent,
    95 % interval over contexts), none_lost (percent of contexts), shared_s and one_by_one_s (mean seconds per context
    for so many answers from one prefill, and from one each; NaN of rows without times), hash.
    """
    rows = []
    for folder in in_order(runs):
        baseline = baseline_of(folder, known)
        if folder.is_baseline or folder.refused or baseline is None or not folder.metrics:
            continue
        counted, full = folder.of_answered(baseline), baseline.of_answered(baseline)
        contexts = contexts_of(counted, full, Counter(_digest(row) for row in folder.rows))
        common = {**folder.labels, "question": folder.question, "hash": folder.run.hash, "metric": folder.metrics[0]}
        for asked in range(1, max((one.questions for one in contexts), default=0) + 1):
            rows += [common | made for made in [_row(contexts, asked, folder.metrics[0])] if made]
    return pd.DataFrame(rows)


def _digest(row: Row) -> str | None:
    return (row.get("context") or {}).get("digest")


def contexts_of(folder: Folder, baseline: Folder, asked: Mapping[str | None, int]) -> list[Context]:
    """The contexts of a run of questions=all with the answers that it and its baseline both scored.

    asked: questions of each context, by its digest, also those that do not count.
    """
    metric, found = folder.metrics[0], defaultdict[str, list[tuple[Row, Row]]](list)
    for name, row in folder.scored.items():
        other, digest = baseline.scored.get(name), _digest(row)
        if digest and other is not None and math.isfinite(_score(row, metric) + _score(other, metric)):
            found[digest].append((row, other))
    made = []
    for digest, pairs in found.items():
        pairs.sort(key=lambda pair: pair[0]["context"]["question"])
        scores = np.array([[_score(side, metric) for side in pair] for pair in pairs])
        spent = np.array([_spent(row) for row, _ in pairs])
        numbers = [row["context"]["question"] for row, _ in pairs]
        made.append(Context(asked[digest], numbers, scores[:, 0], scores[:, 1], spent))
    return made


def _score(row: Row, metric: str) -> float:
    return number(row["metrics"].get(metric))


def _spent(row: Row) -> tuple[float, float, float]:
    """Seconds of the prefill, of the copy, and of question and answer; NaN where a batch shared them."""
    each = {name: number(value) for name, value in (row.get("seconds") or {}).items()}
    prefill, copy = each.get("prefill", math.nan), each.get("copy", math.nan)
    if (row.get("receipt") or {}).get("batch_size") != 1:
        return math.nan, math.nan, math.nan
    further = (row["new_tokens"] - 1) * each.get("tpot", math.nan) if row["new_tokens"] > 1 else 0.0
    return prefill, copy, each.get("ttft", math.nan) - prefill + further


def _row(contexts: Sequence[Context], asked: int, metric: str) -> dict[str, Any]:
    """Of the first `asked` questions; empty where no context has as many, or none of them counts."""
    sums, spent = [], []
    for one in contexts:
        there = [place for place, its_number in enumerate(one.numbers) if its_number < asked]
        if one.questions < asked or not there:
            continue
        scores, full, times = one.scores[there], one.full[there], one.seconds[there]
        sign = -1.0 if stats.lower_is_better(metric) else 1.0
        sums.append((scores.sum(), full.sum(), len(there), not (sign * (full - scores) > 0).any()))
        prefill, rest = times[:, 0].mean(), times[:, 2].sum()
        spent.append((prefill + times[:, 1].sum() + rest, times[:, 0].sum() + rest))
    if not sums:
        return {}
    top, bottom, count, kept = np.array(sums, dtype=np.float64).T
    score, full_score = top.sum() / count.sum(), bottom.sum() / count.sum()
    shared, one_by_one = np.array(spent).mean(axis=0)
    low, high = _interval(top, bottom, metric)
    return {
        **{"asked": asked, "contexts": len(sums), "score": float(score), "full": float(full_score)},
        **{"of_full": float(stats.percent(metric, score, full_score)), "low": low, "high": high},
        **{"none_lost": float(100 * kept.mean()), "shared_s": float(shared), "one_by_one_s": float(one_by_one)},
    }


def _interval(top: Floats, bottom: Floats, metric: str) -> tuple[float, float]:
    """Of sum(top) / sum(bottom) in percent, an entry per context; NaN for few contexts, or where less is better."""
    if len(top) < stats.MIN_PAIRS or stats.lower_is_better(metric):
        return intervals.NONE
    if intervals.is_all_or_nothing(top, bottom):
        low, high = intervals.share_ratio_interval(top, bottom, stats.LEVEL)
    else:
        resampled = stats.resampled_means(intervals.ratio_moments(top, bottom), stats.resamples_for(stats.LEVEL))
        low, high = intervals.ratio_interval(top, bottom, resampled, stats.LEVEL)
    return 100 * low, 100 * high


def question_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model and task of a frame of `questions_table`."""
    for title, _, part in parts(frame):
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(without_question(made))
        metric = short(str(rows[0]["metric"]), rows[0].get("task"))
        words = f"{title}: {metric} by number of questions asked of one evicted cache"
        title = titled(words, (row["question"] for row in rows))
        yield ", ".join([title, *shared]), rows, _columns(rows), 4


def print_questions(frame: pd.DataFrame, console: Console) -> None:
    """A table per model and task of a frame of `questions_table`."""
    print_blocks(question_blocks(frame), [LEGEND], console)


def _columns(rows: Sequence[Row]) -> list[Column]:
    timed = any(not absent(row["shared_s"]) for row in rows)
    cost = [
        Column("one\nprefill", lambda row: seconds(row["shared_s"])),
        Column("one by\none", lambda row: seconds(row["one_by_one_s"])),
        Column("% of\ntime", lambda row: fixed(100 * row["shared_s"] / row["one_by_one_s"], 0)),
    ]
    return [
        Column("method", method_and_setting, right=False),
        plain("kv_ratio", "kv_ratio"),
        plain("asked", "asked"),
        plain("contexts", "contexts"),
        Column("score", lambda row: fixed(row["score"], 2)),
        Column("full", lambda row: fixed(row["full"], 2)),
        Column("% of\nfull", lambda row: fixed(row["of_full"], 1)),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:.1f}..{row['high']:.1f}"),
        Column("none\nlost %", lambda row: fixed(row["none_lost"], 0)),
        *(cost if timed else []),
    ]


def read_questions(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """`questions_table` of the runs under a folder; ConfigError where none has shared contexts."""
    found = folders(outputs)
    frame = questions_table(chosen(found, wanted), {folder.run.hash: folder for folder in found})
    if frame.empty:
        raise ConfigError(
            f"no run under {outputs} asked many questions of one cache; run: kvexp run task=news_qa questions=all"
        )
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(parser_of(__doc__, prog="kvexp many-questions"), argv, read_questions, print_questions)
