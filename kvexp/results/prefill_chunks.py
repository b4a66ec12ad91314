"""Runs of prefill=bounded by the size of their chunks: the peak of keys and values, and the quality, beside whole.

kvexp prefill-chunks outputs/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.results.columns import Column, Row, method_and_setting, parts, plain, shared_settings, without_question
from kvexp.results.divergence_table import divergence_table
from kvexp.results.question_place import titled
from kvexp.results.read import chosen, folders, size_or_words
from kvexp.results.render import print_blocks
from kvexp.results.seen_and_hidden import Block
from kvexp.results.table import table
from kvexp.results.table_command import parser_of, run_command
from kvexp.results.units import TOO_FEW, absent, fixed, short, size

LEGEND = (
    "chunk: tokens read between two evictions; whole: the prompt is read at once and evicted at its end; peak KV: the "
    "most bytes of keys and values of one prompt, of its reading and its answer; % of full: of the full cache's mean "
    "score, with its 95 % interval; KL: nats per token from the full cache along its own answer (divergence=true)"
)
_DROPPED = ("prefill=", "prefill.chunk=")


def chunks_table(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The runs with a bounded prefill and those that differ from one of them in the prefill alone; a row each.

    Columns: labels, question, chunk (tokens, NaN: whole), n, metric, score, full, of_full with low and high (percent,
    95 %), peak_kv_bytes, full_peak_kv_bytes, kl with kl_low, kl_high and kl_tokens (NaN without divergence), hash.
    """
    found = {folder.run.hash: folder for folder in folders(outputs)}
    known = {row["hash"]: row for row in table(outputs).to_dict("records")}
    divergences = divergence_table(chosen(list(found.values()), wanted))
    kl = {row["hash"]: row for row in divergences.to_dict("records") if row["text"] == "own"}
    rows = []
    for folder in chosen(list(found.values()), wanted):
        if folder.is_baseline or folder.refused or not folder.metrics:
            continue
        made, full = known[folder.run.hash], known.get(folder.run.baseline or "", {})
        metric, words = folder.metrics[0], str(folder.labels.get("setting") or "").split()
        setting = " ".join(word for word in words if not word.startswith(_DROPPED))
        far = kl.get(folder.run.hash, {})
        row = {**folder.labels, "setting": setting, "question": folder.question, "hash": folder.run.hash}
        row |= {"chunk": (folder.run.config.get("prefill") or {}).get("bounded_chunk"), "n": made["n"]}
        row |= {"metric": metric, "score": made[metric], "full": full.get(metric), "of_full": made[f"{metric}_of_full"]}
        row |= {"low": made[f"{metric}_low"], "high": made[f"{metric}_high"]}
        row |= {"peak_kv_bytes": made["peak_kv_bytes"], "full_peak_kv_bytes": full.get("peak_kv_bytes")}
        row |= {name: far.get(name) for name in ("kl", "kl_low", "kl_high")} | {"kl_tokens": far.get("tokens")}
        rows.append(row)
    alike = ("numerics", "model", "task", "question", "method", "kv_ratio", "tokens", "setting")
    bounded = {repr([row.get(name) for name in alike]) for row in rows if row["chunk"]}
    rows = [row for row in rows if repr([row.get(name) for name in alike]) in bounded]
    rows.sort(key=lambda row: (*(size_or_words(row.get(name)) for name in alike), row["chunk"] or 0))
    return pd.DataFrame(rows)


def chunk_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model and task of a frame of `chunks_table`."""
    for title, _, part in parts(frame):
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(without_question(made))
        metric = short(str(rows[0]["metric"]), rows[0].get("task"))
        words = f"{title}: {metric} and peak of keys and values by tokens per chunk"
        title = titled(words, (row["question"] for row in rows))
        yield ", ".join([title, *shared]), rows, _columns(rows), 4


def print_chunks(frame: pd.DataFrame, console: Console) -> None:
    """A table per model and task of a frame of `chunks_table`."""
    print_blocks(chunk_blocks(frame), [LEGEND], console)


def _columns(rows: Sequence[Row]) -> list[Column]:
    axis = "kv_ratio" if any(not absent(row.get("kv_ratio")) for row in rows) else "tokens"
    divergence = [
        Column("KL", lambda row: fixed(row["kl"], 4)),
        Column("95 %", lambda row: TOO_FEW if absent(row["kl_low"]) else f"{row['kl_low']:.4f}..{row['kl_high']:.4f}"),
    ]
    return [
        Column("method", method_and_setting, right=False),
        plain(axis, axis),
        Column("chunk", lambda row: "whole" if absent(row["chunk"]) else str(int(row["chunk"]))),
        plain("n", "n"),
        Column("peak KV", lambda row: size(row["peak_kv_bytes"])),
        Column("% of\nfull's", lambda row: _share(row["peak_kv_bytes"], row["full_peak_kv_bytes"])),
        Column("score", lambda row: fixed(row["score"], 2)),
        Column("% of\nfull", lambda row: fixed(row["of_full"], 1)),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:.1f}..{row['high']:.1f}"),
        *(divergence if any(not absent(row["kl"]) for row in rows) else []),
    ]


def _share(part: Any, whole: Any) -> str:
    return "-" if absent(part) or absent(whole) else fixed(100 * part / whole, 1)


def read_chunks(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """`chunks_table` of the runs under a folder; ConfigError where none has a bounded prefill."""
    frame = chunks_table(outputs, wanted)
    if frame.empty:
        raise ConfigError(
            f"no run under {outputs} read its prompts in chunks; run: kvexp run -m prefill=bounded "
            "prefill.chunk=128,256,512"
        )
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(parser_of(__doc__, prog="kvexp prefill-chunks"), argv, read_chunks, print_chunks)
