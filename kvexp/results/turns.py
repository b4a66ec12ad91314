"""Runs of conversations turn by turn: quality, and divergence from the full cache in the same conversation.

kvexp turns outputs/
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.results import intervals, stats
from kvexp.results.columns import Column, Row, method_and_setting, parts, plain, shared_settings
from kvexp.results.read import Folder, baseline_of, chosen, folders, in_order, number
from kvexp.results.render import print_blocks
from kvexp.results.seen_and_hidden import Block
from kvexp.results.stats import Floats
from kvexp.results.table_command import parser_of, run_command
from kvexp.results.units import TOO_FEW, absent, fixed, short

BY = ("turn", "distance")
HISTORY = {
    "own": "its own answers stay",
    "full": "the full cache's answers stay",
    "reference": "the true answers stay, whatever was answered",
}
LEGEND = (
    "turn: from 0; distance: turns since the fact asked for was told; full: the full cache's mean score of the same "
    "turns in its own conversation; % of full with its 95 % interval over conversations; KL: nats per token from a "
    "full cache that was fed the same conversation, along the answers that stay in it; top-1: share of tokens that "
    "both rank first"
)


def turns_table(runs: Sequence[Folder], known: Mapping[str, Folder], by: str = "turn") -> pd.DataFrame:
    """A row per run and turn (or distance of the fact asked for) of runs of conversations. known: by hash.

    Columns: labels, history, turn or distance, n, metric, score and full (means), of_full with low and high (percent,
    95 % over conversations), kl (mean nats per token), top1, kl_tokens, hash. NaN where there is nothing.
    """
    rows = []
    for folder in in_order(runs):
        baseline = baseline_of(folder, known)
        if folder.is_baseline or folder.refused or baseline is None or not folder.metrics:
            continue
        if not any("turn" in (row.get("info") or {}) for row in folder.rows):
            continue
        history = (folder.run.config.get("task") or {}).get("history")
        common = {**folder.labels, "history": history, "hash": folder.run.hash, "metric": folder.metrics[0]}
        rows += [common | made for made in _by(folder, baseline, by)]
    return pd.DataFrame(rows)


def _by(folder: Folder, baseline: Folder, by: str) -> list[dict[str, Any]]:
    """A row per turn or distance. Scores are of turns that count; divergences of all."""
    metric = folder.metrics[0]
    far, pairs = defaultdict[int, list[Row]](list), defaultdict[int, dict[str, list[tuple[float, float]]]](dict)
    for row in folder.scored.values():
        far[row["info"][by]].append(row["info"])
    counted, full = folder.of_answered(baseline), baseline.of_answered(baseline)
    for name, row in counted.scored.items():
        if (other := full.scored.get(name)) is not None:
            scores = number(row["metrics"].get(metric)), number(other["metrics"].get(metric))
            pairs[row["info"][by]].setdefault(_conversation(row), []).append(scores)
    made = []
    for place in sorted(far):
        sums = np.array([(*np.sum(each, axis=0), len(each)) for each in pairs[place].values()], dtype=np.float64)
        made.append({by: place, **_quality(sums, metric), **_divergence(far[place])})
    return made


def _conversation(row: Row) -> str:
    """What the turns of one conversation share: their ids without the turn."""
    return str(row["example"]).rpartition(" turn ")[0]


def _quality(sums: Floats, metric: str) -> dict[str, Any]:
    """sums [conversations, 3]: of the run's scores, the full cache's, and how many."""
    if not len(sums):
        return {"n": 0, "score": np.nan, "full": np.nan, "of_full": np.nan, "low": np.nan, "high": np.nan}
    top, bottom, count = sums.T
    score, full = float(top.sum() / count.sum()), float(bottom.sum() / count.sum())
    low, high = _interval(top, bottom)
    of_full = float(stats.percent(metric, score, full)) if full else np.nan
    return {"n": int(count.sum()), "score": score, "full": full, "of_full": of_full, "low": low, "high": high}


def _interval(top: Floats, bottom: Floats) -> tuple[float, float]:
    """Of sum(top) / sum(bottom) in percent, an entry per conversation; NaN for few of them."""
    if len(top) < stats.MIN_PAIRS or not bottom.any():
        return intervals.NONE
    if intervals.is_all_or_nothing(top, bottom):
        low, high = intervals.share_ratio_interval(top, bottom, stats.LEVEL)
    else:
        resampled = stats.resampled_means(intervals.ratio_moments(top, bottom), stats.resamples_for(stats.LEVEL))
        low, high = intervals.ratio_interval(top, bottom, resampled, stats.LEVEL)
    return 100 * low, 100 * high


def _divergence(infos: Sequence[Row]) -> dict[str, float]:
    """Means over tokens of rows' info."""
    known = [info for info in infos if info.get("kl_tokens")]
    tokens = np.array([info["kl_tokens"] for info in known], dtype=np.float64)
    if not len(tokens):
        return {"kl": np.nan, "top1": np.nan, "kl_tokens": 0}
    each = {name: np.array([info[name] for info in known], dtype=np.float64) for name in ("kl", "top1")}
    return {name: float((values * tokens).sum() / tokens.sum()) for name, values in each.items()} | {
        "kl_tokens": int(tokens.sum())
    }


def turn_blocks(frame: pd.DataFrame, by: str) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model, task and history of a frame of `turns_table`."""
    for title, labels, part in parts(frame, "history"):
        history = labels["history"]
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(made)
        what = "turn" if by == "turn" else "turns since the fact asked for"
        words = [f"{title}: {short(str(rows[0]['metric']), rows[0].get('task'))} by {what}"]
        if not absent(history):
            words.append(HISTORY.get(str(history), str(history)))
        shared = [word for word in shared if not word.startswith("task.history=")]
        yield ", ".join(words + shared), rows, _columns(rows, by), 4


def print_turns(frame: pd.DataFrame, by: str, console: Console) -> None:
    """A table per model, task and history of a frame of `turns_table`."""
    print_blocks(turn_blocks(frame, by), [LEGEND], console)


def _columns(rows: Sequence[Row], by: str) -> list[Column]:
    axis = "kv_ratio" if any(not absent(row.get("kv_ratio")) for row in rows) else "tokens"
    return [
        Column("method", method_and_setting, right=False),
        plain(axis, axis),
        plain(by, by),
        plain("n", "n"),
        Column("score", lambda row: fixed(row["score"], 2)),
        Column("full", lambda row: fixed(row["full"], 2)),
        Column("% of\nfull", lambda row: fixed(row["of_full"], 1)),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:.1f}..{row['high']:.1f}"),
        Column("KL", lambda row: fixed(row["kl"], 4)),
        Column("top-1\n%", lambda row: fixed(100 * row["top1"], 1)),
        Column("tokens", lambda row: str(row["kl_tokens"])),
    ]


def read_turns(outputs: str | Path, wanted: Mapping[str, Any], by: str = "turn") -> pd.DataFrame:
    """`turns_table` of the runs under a folder; ConfigError where none held a conversation."""
    found = folders(outputs)
    frame = turns_table(chosen(found, wanted), {folder.run.hash: folder for folder in found}, by)
    if frame.empty:
        raise ConfigError(f"no run under {outputs} held a conversation; run: kvexp run task=dialogue")
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    parser = parser_of(__doc__, prog="kvexp turns")
    parser.add_argument("--by", choices=BY, default="turn", help="turn, or distance of the fact asked for")
    return run_command(parser, argv, read_turns, print_turns, "by")
