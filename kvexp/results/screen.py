"""Recorded runs on one screen: a line for each, with what a decision needs, and a few lines around them.

A line has the run's budget, its KL divergence from the full cache, its score in percent of the full cache's, both
verdicts, peak memory and, where they were measured, times. Wider consoles get more columns; `kvexp results --full` has
all of them.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvexp.results import divergence, stats
from kvexp.results import table as quality
from kvexp.results.blocks import (
    TOO_FEW,
    Column,
    Record,
    Row,
    absent,
    count,
    fixed,
    folded,
    numeric,
    plain,
    print_columns,
    print_lines,
    records,
    telling,
)
from kvexp.results.read import Folder, Runs, answer_of, baseline_of, number, question_words
from kvexp.results.table import parts, place, shared_settings, short, verdict_of, without, without_question
from kvexp.run.store import OWN, run_name
from kvexp.util.output import Console, size

# Of a row's divergence.
DISTANCE = (
    *("kl", "kl_low", "kl_high", "text", "verdict_kl", "epsilon", "top1", "same_tokens", "ppl_ratio"),
    *("rests_on", "rests_on_share", "worse"),
)
COLUMNS = 100  # where the console has no width
MORE = 5  # times as many examples are proposed where an interval holds its limit: it gets less than half as wide
ANSWER_LINES = 8  # of an answer that is shown
LEGEND = (
    "cache: kept slots, in percent of the prompt's tokens (or tokens, where the budget counts them).",
    "KL to full: mean KL divergence of the run's next-token distributions from the full cache's, nats per token, along "
    "the full cache's own answer; 95 % interval over examples. vs LIMIT (epsilon_kl): equivalent where the whole "
    "interval is below the limit, worse where it is above. At 0.05 nats SmolLM2-135M lost a quarter of its right "
    "answers, at 0.5 four fifths (docs/kl_meaning.md).",
    "% of full: the task's first metric over the examples that a run and its full cache both scored, with its 95 % "
    "interval; the full cache's line has its score in brackets. 99 %?: pass where every metric is at least 99 % of "
    "full's, and the answers at least 90 % as long.",
    "Both verdicts are decided by intervals corrected (Bonferroni) for the number of compared runs of one model and "
    "task. undecided: the interval holds the limit.",
    "KV held: bytes of keys, values and biases at the end, where slots do not tell them. KV peak: most at "
    "any time, and the difference from the full cache's.",
    "TTFT, TPOT: median seconds to the first token, and per further token.",
    "Each run's rows, configuration and environment: OUTPUTS/<hash>/ (docs/results.md; words: docs/glossary.md).",
)


def screen_console() -> Console:
    """A console for `print_screen`; what is piped into a file or another program has no width of its own."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(markup=False, width=None if known else COLUMNS)


def print_screen(
    runs: Runs, console: Console, *, took: str = "", views: Sequence[str] = (), explain: bool = False
) -> None:
    """A table of one line per run for each model, task and NUMERICS, and what must be known to read it.

    took: how long the command took, such as "3 min"; views: names of further views of these runs; explain: with a
    legend.
    """
    frame = runs.frame(with_distances)
    shown = frame[frame["status"] != "refused"]
    several = len(list(parts(shown))) > 1
    below: dict[str, None] = dict.fromkeys(frame.attrs.get("left_out", ()))
    for title, _, block in parts(shown):
        rows = sorted(records(block), key=place)
        known = {folder.run.hash: folder for folder in runs.ran}
        console.print(_title(title, rows, known, "" if several else took, console.width))
        console.print()
        _print_rows(rows, console)
        below |= dict.fromkeys(_below(rows, all(_has_one_path(known[row["hash"]]) for row in rows)))
    only_far = frame["far_n"].any() and not frame["n"].sum()  # divergence=only makes no rows
    troubles = [] if only_far else _troubles(frame, several)
    lines = [*below, *troubles, *quality.refused_line(frame)]
    if several and took:
        lines.append(f"{len(shown)} runs in {took}")
    end = [f"All columns: kvexp results {runs.outputs} --full", "legend: --explain"]
    end += [
        f"picture and answers: kvexp report {runs.outputs}",
        *([f"also: --view {', '.join(views)}"] if views else []),
    ]
    print_lines([*lines, *folded(end, console.width)], console)
    if explain:
        print_lines(("", *LEGEND), console, "dim")


# --- what stands in a line


def distances(runs: Runs) -> dict[str, Row]:
    """Hash -> row of the divergence table, along the full cache's own answer where it was forced; else over choices."""
    frame = runs.frame(divergence.frame_of)
    rows: dict[str, Row] = {row["hash"]: row for row in records(frame)} if len(frame) else {}
    if len(frame):
        rows |= {row["hash"]: row for row in records(frame[frame["text"] == OWN])}
    for row in records(runs.frame(divergence.choice_table)):
        if row["hash"] not in rows and not absent(row["choice_kl"]):
            rows[row["hash"]] = {**row, "kl": row["choice_kl"], "text": "choices"}
    return rows


def with_distances(runs: Runs) -> pd.DataFrame:
    """The table of all runs with the columns of DISTANCE, None where nothing was measured.

    far_n: examples that were forced; full_peak: the full cache's peak_kv_bytes; gives_kl: False of an engine that tells
    no distributions.
    """
    frame, far = runs.frame(quality.quality_table), distances(runs)
    measured = [far.get(key, {}) for key in frame["hash"]]
    columns: dict[str, Any] = {name: [row.get(name) for row in measured] for name in DISTANCE}
    columns["far_n"] = [row.get("n", 0) for row in measured]
    peaks = dict(zip(frame["hash"], frame["peak_kv_bytes"], strict=True))
    known = {folder.run.hash: _gives_kl(folder) for folder in runs.ran}
    return frame.assign(**columns, full_peak=frame["baseline"].map(peaks), gives_kl=frame["hash"].map(known))


def _is_full(row: Row) -> bool:
    return bool(row["verdict99"] == "baseline")


def _gives_kl(folder: Folder) -> bool:
    """Whether the run's model, or the engine in its place, tells distributions."""
    name = (folder.run.config.get("engine") or {}).get("name")
    if name is None:
        return True
    from kvexp.run.engine import DRIVERS

    return name not in DRIVERS or bool(DRIVERS[name].options.gives_logits)


def _only_distance(row: Row) -> bool:
    """Whether the run makes no rows (divergence=only), or is the full cache's of such runs."""
    return not row["n"] and (bool(row["far_n"]) or _is_full(row))


def _cache(row: Row) -> str:
    if _is_full(row):
        return "100 %"
    if not absent(row.get("kv_ratio")):
        ratio = row["kv_ratio"]
        return f"{100 * ratio:.3g} %" if isinstance(ratio, int | float) else str(ratio)
    return f"{plain('tokens', '').cell(row)} tok" if not absent(row.get("tokens")) else "-"


def _nats(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.4f}" if 0 < value < 0.01 else f"{value:.3f}"


def _kl_interval(row: Row) -> str:
    if _is_full(row):
        return ""
    if absent(row["kl"]) or absent(row["kl_low"]):
        return "-" if absent(row["kl"]) else TOO_FEW
    high = f">{divergence.NO_END}" if row["kl_high"] > divergence.NO_END else _nats(row["kl_high"])
    return f"{_nats(row['kl_low'])} - {high}"


def _kl_verdict(row: Row) -> str:
    verdict = row.get("verdict_kl")
    if _is_full(row) or absent(verdict):
        return ""
    if absent(row["kl_low"]):
        return TOO_FEW
    return str(verdict)


def _long(metric: str, task: Any) -> str:
    """The metric's name in a head of two lines."""
    return short(metric, task).replace("R-", "ROUGE-")


def _quality_columns(metrics: Sequence[str], headline: str, task: Any) -> list[Column]:
    """Percent of the full cache's score, its interval and the verdict at 99 %; the full cache's row has its score."""
    score, low, high = quality.metric_column(headline, task).cell, f"{headline}_low", f"{headline}_high"

    def column(head: str, full: Callable[[Row], str], few: str, cell: Callable[[Row], str], right: bool) -> Column:
        def value(row: Row) -> str:
            return full(row) if _is_full(row) else few if quality.few(row) else cell(row)

        return Column(head, value, right=right)

    def percent(row: Row) -> str:
        return fixed(row[f"{headline}_of_full"], 1)

    def interval(row: Row) -> str:
        return "-" if absent(row[low]) else f"{row[low]:.1f} - {row[high]:.1f}"

    head = f"{_long(headline, task)}\n% of full"
    return [
        column(head, lambda row: "-" if absent(row[headline]) else "100", TOO_FEW, percent, right=True),
        column("95 %", lambda row: f"({score(row)})", "-", interval, right=False),
        column("99 %?", lambda row: "", TOO_FEW, lambda row: verdict_of(row, "99", metrics), right=False),
    ]


def _change(row: Row) -> str:
    """The peak's difference from the full cache's."""
    full, peak = row["full_peak"], row["peak_kv_bytes"]
    return "" if absent(full) or absent(peak) or not full else f"{100 * (peak / full - 1):+.0f} %"


def _bytes_matter(ran: list[Record]) -> bool:
    """Whether the runs have budgets of bytes, or some of them hold as many slots in different numbers of bytes."""
    held = {(row["slots"], row["kv_bytes"]) for row in ran if not absent(row["slots"])}
    by_bytes = any("bytes_ratio=" in str(row.get("setting")) for row in ran)
    return by_bytes or len({slots for slots, _ in held}) < len(held)


def _columns(rows: list[Record]) -> tuple[list[Column], list[Column]]:
    """Columns that name a row, and the others; every console shows rank 0, higher ranks as there is room."""
    metrics, headline = quality.metrics_of(rows)
    ran = [row for row in rows if not _is_full(row)]
    names = [Column("cache", lambda row: row["cache"]), quality.METHOD]
    names += [column for column in quality.keys_of(rows, "kv_ratio")[2:] if column.head not in ("tokens", "n")]
    if len({row["n"] for row in rows if row["n"]}) > 1:
        names.append(quality.N)
    columns: list[Column] = []
    if any(not absent(row["kl"]) for row in ran):
        enough = any(not absent(row["kl_low"]) for row in ran)
        text = {str(row["text"]) for row in ran if not absent(row["kl"])}
        head = "KL over\nchoices" if text == {"choices"} else "KL to\nfull"
        columns.append(Column(head, lambda row: "0" if _is_full(row) and row["gives_kl"] else _nats(row["kl"])))
        columns += [Column("95 %", _kl_interval, right=False)] if enough else []
        limits = {row["epsilon"] for row in ran if not absent(row["epsilon"])}
        limit = f"vs {limits.pop():g}" if len(limits) == 1 else "vs its\nlimit"
        columns += [Column(limit, _kl_verdict, right=False)] if enough and text != {"choices"} else []
    task, further, enough = rows[0].get("task"), list[list[Column]](), False
    if headline is not None:
        enough = any(not absent(row["paired"]) and not quality.few(row) for row in ran)
        score = quality.metric_column(headline, task)
        columns += _quality_columns(metrics, headline, task) if enough else [score]
        further.append([score] if enough else [])
    if any(row["status"] != "done" and not _only_distance(row) for row in rows):
        columns.append(quality.STATUS)
    columns += telling(rows, Column("KV\nheld", "kv_bytes", size)) if _bytes_matter(ran) else []
    columns += telling(rows, Column("KV peak", "peak_kv_bytes", size))
    columns += [Column("vs full", _change, rank=1)] * any(_change(row) for row in rows)
    columns += telling(rows, Column("KV in\npages", "page_bytes", size, rank=1))
    columns += telling(rows, quality.TTFT, quality.TPOT)
    further += [
        [quality.metric_column(name, task) for name in metrics if name != headline],
        telling(rows, numeric("prompts\nworse %", "worse", 0, 100)),
        telling(rows, numeric("length\n% of full", "length_of_full", 0)),
        telling(rows, quality.needed_column("n to decide\n99 / 99.9 %")) if enough else [],
        telling(rows, numeric("same\ntop-1 %", "top1", 1, 100)),
        telling(rows, quality.ENDED),
        telling(rows, numeric("equal\ntokens %", "same_tokens", 0, 100)),
        telling(rows, numeric("perplexity\nratio", "ppl_ratio", 3)),
        telling(rows, plain("skipped", "skipped"), quality.PROMPT_CUT),
    ]
    ranked = [replace(column, rank=rank) for rank, group in enumerate(further, 2) for column in group]
    return names, columns + ranked


def _print_rows(rows: list[Record], console: Console) -> None:
    """One table; what names the cache stands in the first of the rows that share it."""
    _, rows = shared_settings([without(row, "code=") for row in without_question(rows)])
    caches = [_cache(row) for row in rows]
    rows = [
        {**row, "cache": "" if cache == before else cache}
        for row, cache, before in zip(rows, caches, [None, *caches], strict=False)
    ]
    names, columns = _columns(rows)
    print_columns(rows, [*names, *columns], len(names), console)


# --- what stands around the table


def _title(title: str, rows: list[Record], known: Mapping[str, Folder], took: str, width: int) -> Text:
    """Model and task, then what is the same for all of these runs."""
    examples = sorted({row["n"] for row in rows if row["n"]} or {row["far_n"] for row in rows if row["far_n"]})
    counted = f"{examples[0]} to {examples[-1]}" if len(examples) > 1 else str(examples[0]) if examples else "no"
    examples_words = f"{counted} example{'s' * (counted != '1')}"
    of = next((row["questions"] for row in rows if _is_full(row) and not absent(row["questions"])), None)
    examples_words += f" (of {of}: those the full cache answers)" if of is not None else ""
    new = {(known[row["hash"]].run.config.get("generation") or {}).get("max_new_tokens") for row in rows}
    tokens = new.pop() if len(new) == 1 else None
    cut = {row["ended"] for row in rows if row["ended"] >= 0} == {0}  # NaN where nothing was answered
    shared = shared_settings([without(row, "code=") for row in without_question(rows)])[0]
    words = [
        f"{title}, {examples_words}",
        *quality.marks_of(rows).values(),
        question_words(places) if len(places := {row.get("question") for row in rows}) > 1 else "",
        f"at most {tokens} new tokens{', which cut all answers' if cut else ''}" if tokens else "",
        f"{len(rows)} run{'s' * (len(rows) != 1)}" + (f" in {took}" if took else ""),
        *(word for word in shared if not tokens or not word.startswith("task.max_new_tokens=")),
    ]
    return Text("\n".join(folded(filter(None, words), width)), style="bold")


def _below(rows: list[Record], one_path: bool) -> Iterator[str]:
    """What the lines of one table leave open. one_path: KL can be measured along the answers of these runs."""
    ran = [row for row in rows if not _is_full(row) and (row["status"] == "done" or _only_distance(row))]
    counts = [int(row["paired"]) for row in ran if not absent(row["paired"])]
    counts += [int(row["far_n"]) for row in ran if not row["n"] and row["far_n"]]
    few = [n for n in counts if n < stats.MIN_PAIRS]
    if few:
        least = min(few)
        few_words = f"{least} example{'s' * (least != 1)}: a first look"
        yield f"{few_words}, no verdicts, {stats.MIN_PAIRS} needed (limit={stats.MIN_PAIRS})."
    if ran and all(absent(row["kl"]) for row in ran) and all(row["ended"] >= 0 for row in ran) and one_path:
        yield "KL to the full cache was not measured: divergence=true measures it."
    open_kl = any(_kl_verdict(row) == divergence.UNDECIDED for row in ran)
    open_quality = [row for row in ran if row["verdict99"] == "undecided" and not quality.few(row)]
    open_quality = [row for row in open_quality if not row["note"]]
    if open_kl or open_quality:
        most = max(counts, default=stats.MIN_PAIRS)
        yield (
            f"undecided: the interval holds the limit. More examples (limit={MORE * most}) narrow it"
            f"{_needed(open_quality)}."
        )
    if len({row["far_n"] for row in ran if row["far_n"] and not absent(row["kl"])}) > 1:
        yield divergence.DIFFERENT_N
    if few_hold := [row for row in ran if row["rests_on"]]:
        said = [f"{_name(row)} ({100 * row['rests_on_share']:.0f} % by {row['rests_on']})" for row in few_hold]
        yield f"KL rests on one or two examples, its upper end says little: {divergence.some(said)}."
    if len({quality.batch_of(row) for row in rows if row["n"]}) > 1:
        yield "Batch sizes differ between runs (--full): compare bytes and times only where they are equal."
    untimed = [row for row in rows if row["n"] and row["text"] != "choices"]
    untimed = [row for row in untimed if absent(row["ttft_s"]) and absent(row["tpot_s"])]
    if any(not row["busy"] for row in untimed):
        yield (
            "Speed was not measured: these runs read each prompt together. With times: hydra/launcher=basic."
            if all(absent(row["ttft_s"]) for row in rows)
            else "Runs without times read each prompt together with others. With times: hydra/launcher=basic."
        )


def _has_one_path(folder: Folder) -> bool:
    """Whether KL can be measured along the answers: greedy, and no conversation's (--view turns)."""
    if "history" in folder.run.config.get("task", {}):
        return False
    options = folder.run.config.get("generation") or {}
    return options.get("num_beams") == 1 and not options.get("sample") and _gives_kl(folder)


def _needed(rows: Sequence[Row]) -> str:
    """How many examples would probably decide the 99 % of these rows."""
    needed = [row["needed"] for row in rows if not absent(row["needed"])]
    if not needed:
        return ""
    low, high = count(min(needed)), count(max(needed))
    metric = _long(str(rows[0]["headline"]), rows[0].get("task"))
    return f"; {metric} here needs about {low if low == high else f'{low} to {high}'}"


def _name(row: Row) -> str:
    return run_name(row, "method", "kv_ratio", "tokens")


def _troubles(frame: pd.DataFrame, several: bool) -> list[str]:
    """A line for each thing that is wrong with runs, and the runs."""
    lines = []
    rows = (row for row in records(frame) if row["status"] != "refused")
    notes = quality.by_note(rows, _name)
    for (title, note), runs in notes.items():
        if quality.TOO_FEW_PAIRS not in note and not note.startswith("also asked for as"):
            lines.append(": ".join([*([title] if several else []), divergence.some(list(dict.fromkeys(runs))), note]))
    return lines


# --- one run: its answer and the full cache's


def print_answers(runs: Runs, console: Console) -> None:
    """Print a run's first answer and the full cache's side by side; nothing where none was generated."""
    ran = [folder for folder in runs.ran if not folder.is_baseline]
    folder = ran[0] if ran else next(iter(runs.ran), None)
    if folder is None or len(ran) > 1:
        return
    baseline = None if folder.is_baseline else baseline_of(folder, runs.known)
    sides = [side for side in (baseline, folder) if side is not None]
    names = [name for name in folder.scored if all(name in side.scored for side in sides)]
    names.sort(key=lambda name: not all(answer_of(side.scored[name]).strip() for side in sides))
    if not names or any(not side.scored[names[0]].get("finish_reason") for side in sides):  # not generated
        return
    width = (console.width - 2) // len(sides) - 2
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for side in sides:
        setting = shared_settings([{"setting": side.labels.get("setting")} for side in sides])[1][-1]["setting"]
        words = f"{side.labels['method']} {setting or ''}".strip()
        ratio = number(side.labels.get("kv_ratio"))
        words += "" if side.is_baseline or math.isnan(ratio) else f", {100 * ratio:.3g} % of the cache"
        grid.add_column(Text("full cache" if side.is_baseline else words), width=width, overflow="fold")
    answers = [textwrap.wrap(answer_of(side.scored[names[0]]), width) or ["(empty)"] for side in sides]
    more = [" …" if len(lines) > ANSWER_LINES else "" for lines in answers]
    grid.add_row(*(Text("\n".join(lines[:ANSWER_LINES]) + end) for lines, end in zip(answers, more, strict=True)))
    console.print(f"answers to example {names[0]}:", highlight=False, style="dim")
    console.print(Padding(grid, (0, 0, 1, 0)))
