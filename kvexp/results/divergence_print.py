"""The divergence table of runs for people: a block per model, task and text, and comparisons of every two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.text import Text

from kvexp.console import Console
from kvexp.record.divergence_lines import OWN
from kvexp.record.run_name import run_name
from kvexp.results.answer_changes import choice_table, with_answers
from kvexp.results.columns import Column, Row, method_and_setting, parts, plain, shared_settings, without_question
from kvexp.results.divergence_table import divergence_table
from kvexp.results.question_place import titled
from kvexp.results.read import chosen, folders
from kvexp.results.render import print_columns
from kvexp.results.units import FEW_SLOTS_WORDS, TOO_FEW, absent, fixed

DIVERGENCES = ("kl", "top1")
NO_END = 100  # nats per token: where few examples diverge at all, an interval may end anywhere above


def divergence_frames(
    outputs_dir: str | Path,
    where: Mapping[str, Any],
    epsilon_kl: float | None = None,
    epsilon_top1: float | None = None,
    first: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What is recorded of the chosen runs: a `divergence_table` with `answer_changes`, and a `choice_table`.

    first: of the task's first examples alone.
    """
    found = [folder.of_first(first) for folder in folders(outputs_dir)]
    known = {folder.run.hash: folder for folder in found}
    shown = [folder for folder in chosen(found, where) if not folder.refused]
    frame = with_answers(divergence_table(shown, epsilon_kl, epsilon_top1, first), shown, known)
    return frame, choice_table(shown, known)


def print_choices(frame: pd.DataFrame, console: Console) -> None:
    """A frame of `choice_table`; nothing for an empty one."""
    if frame.empty:
        return
    for title, _, part in parts(frame):
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(without_question(made))
        title = titled(f"{title}: choices beside the full cache's", (row.get("question") for row in rows))
        console.print(Text(", ".join([title, *shared]), style="bold"))
        columns = [
            Column("method", method_and_setting, right=False),
            plain("kv_ratio", "kv_ratio"),
            *question_column(rows),
            plain("n", "n"),
            Column("right to\nwrong", lambda row: fixed(row["lost"], 0)),
            Column("wrong to\nright", lambda row: fixed(row["won"], 0)),
            Column("KL over\nchoices", lambda row: fixed(row["choice_kl"], 4)),
            Column("95 %", lambda row: _ends(row, "kl", 4)),
        ]
        print_columns(rows, columns, 3 + len(question_column(rows)), console)


def print_divergence(frame: pd.DataFrame, console: Console, metric: str = "kl") -> None:
    """Every block of a frame of `divergence_table`, and what its columns mean; nothing for an empty one.

    metric: what orders the runs of one kv_ratio, one of DIVERGENCES.
    """
    if frame.empty:
        return
    for title, labels, part in parts(frame, "text"):
        along = said(str(labels["text"]))
        print_block(f"{title}: KL divergence from the full cache along {along}", part, console, metric)
    console.print(legend(frame), highlight=False)


def said(text: str) -> str:
    """A kind of text in words."""
    return "its own greedy answer" if text == OWN else "the reference answer"


def legend(frame: pd.DataFrame) -> str:
    """What the verdicts and columns of these rows stand for."""
    kl = " or ".join(f"{value:g}" for value in sorted(set(frame["epsilon"])))
    percent = " or ".join(f"{100 * value:g} %" for value in sorted(set(frame["epsilon_top1"])))
    return (
        f"KL in nats per token, mean over tokens, 95 % interval over examples; equivalent: within {kl}, worse: beyond; "
        f"top-1: share of tokens with the same likeliest token, equivalent: no more than {percent} differ; a first "
        "token that the prefill predicts, the same for every run, is left out; equal tokens, parts at: of the answers "
        "a run writes itself, median of the first token that differs (docs/divergence.md)"
    )


def print_block(title: str, part: pd.DataFrame, console: Console, metric: str = "kl") -> None:
    """The rows of one model, task and text."""
    order = part.sort_values(["kv_ratio", "n", metric], ascending=[True, False, metric == "kl"])  # no rank across n
    made: list[dict[str, Any]] = order.to_dict("records")  # type: ignore[assignment]
    console.print()
    shared, rows = shared_settings(without_question(made))
    title = titled(title, (row.get("question") for row in rows))
    console.print(Text(", ".join([title, *shared]), style="bold"))
    print_columns(rows, columns_of(rows), 3 + len(question_column(rows)), console)
    few = [row for row in rows if row["few_slots"]]
    if few:
        names = ", ".join(f"{run_name(row)} ({row['slots']:.1f})" for row in few)
        console.print(Text(f"{FEW_SLOTS_WORDS}: {names}", style="yellow"))


def question_column(rows: Sequence[Row]) -> list[Column]:
    """Whether eviction has seen the question, where that is not the same in all rows."""
    same = len({row.get("question") for row in rows}) < 2
    return [] if same else [plain("question", "question", right=False)]


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """What is shown of a run."""
    settings = any(row.get("setting") for row in rows)
    return [
        Column("method", method_and_setting, right=False) if settings else plain("method", "method", right=False),
        plain("kv_ratio", "kv_ratio"),
        *question_column(rows),
        plain("n", "n"),
        plain("tokens", "tokens"),
        Column("KL", lambda row: fixed(row["kl"], 4)),
        Column("95 %", lambda row: _ends(row, "kl", 4)),
        Column("median", lambda row: fixed(row["kl_p50"], 4)),
        Column("99 % of\ntokens", lambda row: fixed(row["kl_p99"], 2)),
        Column("verdict\non KL", lambda row: row["verdict_kl"], right=False),
        Column("same\ntop-1 %", lambda row: fixed(100 * row["top1"], 1)),
        Column("95 %", lambda row: _ends(row, "top1", 1, 100)),
        Column("verdict\non top-1", lambda row: row["verdict_top1"], right=False),
        Column("perplexity\nratio", lambda row: fixed(row["ppl_ratio"], 3)),
        *_answers(rows),
    ]


def _answers(rows: Sequence[Row]) -> list[Column]:
    """Where rows hold the tokens of free-running answers."""
    if all(absent(row.get("same_tokens")) for row in rows):
        return []
    return [
        Column(
            "equal\ntokens %", lambda row: "-" if absent(row["same_tokens"]) else fixed(100 * row["same_tokens"], 0)
        ),
        Column("parts\nat", lambda row: fixed(row["parts_at"], 1)),
    ]


def _ends(row: Row, name: str, digits: int, times: int = 1) -> str:
    """Both ends of an interval; times: 100 where its column is in percent."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if absent(low):
        return TOO_FEW
    if times != 1:
        return f"{times * low:.{digits}f}..{times * high:.{digits}f}"
    return f"{low:.{digits}f}..{f'>{NO_END}' if high > NO_END else f'{high:.{digits}f}'}"


def print_pairs(pairs: pd.DataFrame, part: pd.DataFrame, console: Console) -> None:
    """A frame of `compared`; part: the rows of its runs."""
    made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
    names = {row["hash"]: run_name(row) for row in shared_settings(made)[1]}
    rows: list[dict[str, Any]] = pairs.to_dict("records")  # type: ignore[assignment]
    columns = [
        Column("one", lambda row: names[row["one"]], right=False),
        Column("other", lambda row: names[row["other"]], right=False),
        plain("n", "n"),
        Column("KL of one\nless other", lambda row: f"{row['difference']:+.4f}"),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:+.4f}..{row['high']:+.4f}"),
        Column("p (Holm)", lambda row: "-" if absent(row["holm"]) else f"{row['holm']:.2g}"),
        Column(
            "less", lambda row: {row["one"]: "one", row["other"]: "other"}.get(row["better"], "undecided"), right=False
        ),
    ]
    print_columns(rows, columns, 2, console)
