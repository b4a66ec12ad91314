"""Runs of long answers: repetition, loops, length and ends beside the full cache's, and divergence by position.

kvexp long-answers outputs/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.record.divergence_lines import OWN, read
from kvexp.results.columns import Column, Row, method_and_setting, parts, plain, shared_settings, without_tokens
from kvexp.results.divergence_table import by_position
from kvexp.results.read import Folder, answer_of, baseline_of, chosen, folders, in_order
from kvexp.results.render import print_blocks
from kvexp.results.seen_and_hidden import Block
from kvexp.results.table_command import parser_of, run_command
from kvexp.results.units import absent, fixed

FIRST_BIN = 64  # tokens; each further bin of positions reaches twice as far
LEGEND = (
    "tokens: mean of an answer, with its share of the full cache's; ended: answers that an end token ended; repeated: "
    "share of 4-grams of words that stood in the answer before; looped: answers with a passage that comes three times "
    "in a row, and the word at which it begins, mean over them; KL: nats per token from the full cache along its own "
    "answer, by the token's place in it (divergence=true)"
)


def long_table(runs: Sequence[Folder], known: Mapping[str, Folder]) -> pd.DataFrame:
    """A row per run of task=long_answers, the full cache's too. known: by hash.

    Columns: labels, budget_tokens, n, tokens (mean of the answers), tokens_of_full (percent), ended, repeated, looped
    (percent), loop_at (mean word, of those that loop; NaN: none), kl_N for each bin of positions up to N (NaN where
    nothing was measured), hash.
    """
    rows = []
    for folder in in_order(runs):
        scored = list(folder.scored.values())
        if folder.refused or not scored or folder.metrics[:2] != ["not_repeated", "loop_free"]:
            continue
        baseline = baseline_of(folder, known)
        budget = folder.labels.get("tokens")
        row: dict[str, Any] = {**folder.labels, "budget_tokens": budget, "n": len(scored), **_measures(scored)}
        full = [baseline.scored[name] for name in folder.scored if name in baseline.scored] if baseline else []
        row["tokens_of_full"] = 100 * row["tokens"] / _measures(full)["tokens"] if full else np.nan
        row |= _by_bin(folder) if baseline is not None else {}
        rows.append(row | {"hash": folder.run.hash})
    return pd.DataFrame(rows)


def _measures(rows: Sequence[Row]) -> dict[str, float]:
    """Means over answers, in percent where they are shares."""
    loops = [row for row in rows if row["metrics"]["loop_free"] < 100]
    begins = [row["metrics"]["loop_free"] / 100 * len(answer_of(row).split()) for row in loops]
    return {
        "tokens": float(np.mean([row["new_tokens"] for row in rows])),
        "ended": 100 * float(np.mean([row.get("finish_reason") == "stop" for row in rows])),
        "repeated": float(np.mean([100 - row["metrics"]["not_repeated"] for row in rows])),
        "looped": 100 * len(loops) / len(rows),
        "loop_at": float(np.mean(begins)) if begins else np.nan,
    }


def _by_bin(folder: Folder) -> dict[str, float]:
    """kl_64, kl_128 …: the mean KL of the tokens at positions up to 64, 65 to 128, 129 to 256 …"""
    lines = [line for line in read(folder.run).values() if line["text"] == OWN]
    frame = by_position(lines)
    found: dict[str, float] = {}
    begin, end = 0, FIRST_BIN
    while len(frame) and begin < frame["position"].max():
        part = frame[(frame["position"] > begin) & (frame["position"] <= end)]
        if part["n"].sum():
            found[f"kl_{end}"] = float((part["kl"] * part["n"]).sum() / part["n"].sum())
        begin, end = end, 2 * end
    return found


def long_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model and task of a frame of `long_table`."""
    for title, _, part in parts(frame):
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(made)
        yield ", ".join([f"{title}: long answers", *shared]), rows, _columns(rows), 3


def print_long(frame: pd.DataFrame, console: Console) -> None:
    """A table per model and task of a frame of `long_table`."""
    print_blocks(long_blocks(frame), [LEGEND], console)


def _columns(rows: Sequence[Row]) -> list[Column]:
    ratios = any(not absent(row.get("kv_ratio")) for row in rows)
    bins = sorted({int(name[3:]) for row in rows for name in row if str(name).startswith("kl_")})
    return [
        Column("method", lambda row: method_and_setting(row if ratios else without_tokens(row)), right=False),
        plain("kv_ratio", "kv_ratio") if ratios else Column("budget", _budget),
        plain("n", "n"),
        Column("tokens", lambda row: fixed(row["tokens"], 1)),
        Column("% of\nfull", lambda row: fixed(row["tokens_of_full"], 1)),
        Column("ended\n%", lambda row: fixed(row["ended"], 1)),
        Column("repeated\n%", lambda row: fixed(row["repeated"], 1)),
        Column("looped\n%", lambda row: fixed(row["looped"], 1)),
        Column("loop at\nword", lambda row: fixed(row["loop_at"], 0)),
        *(Column(f"KL to\n{end}", _kl(end)) for end in bins if any(not absent(row.get(f"kl_{end}")) for row in rows)),
    ]


def _budget(row: Row) -> str:
    """In tokens, of a run that has a budget."""
    return "-" if absent(row.get("budget_tokens")) else str(int(row["budget_tokens"]))


def _kl(end: int) -> Any:
    """The cell of the bin of positions up to `end`."""
    return lambda row: fixed(row.get(f"kl_{end}"), 4)


def read_long(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """`long_table` of the runs under a folder; ConfigError where none wrote long answers."""
    found = folders(outputs)
    frame = long_table(chosen(found, wanted), {folder.run.hash: folder for folder in found})
    if frame.empty:
        raise ConfigError(
            f"no run under {outputs} wrote long answers; run: kvexp run task=long_answers budget=tokens "
            "budget.tokens=512"
        )
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(parser_of(__doc__, prog="kvexp long-answers"), argv, read_long, print_long)
