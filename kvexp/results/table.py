"""The table of all runs, and the columns that it is printed with.

A run's row has means, percentages of the baseline, verdicts, memory and speed, and why something is missing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import stats
from kvexp.results.blocks import (
    TOO_FEW,
    Block,
    Column,
    Record,
    Row,
    absent,
    count,
    fixed,
    markdown_of,
    numeric,
    plain,
    print_blocks,
    records,
    seconds,
    telling,
)
from kvexp.results.read import (
    AFTER_EVICTION,
    IN_PROMPT,
    KEY,
    WORDS,
    Folder,
    Runs,
    baseline_of,
    evicted,
    is_busy,
    number,
    question_words,
    read_runs,
)
from kvexp.results.stats import SUFFIX, Comparison, compare, quality, resample
from kvexp.run.store import LINES, TABLE, run_name
from kvexp.util.errors import ConfigError
from kvexp.util.output import Console, size

REPLAYED = re.compile(r"(\d+) of (\d+) decode steps")  # as of `GraphCounts.note`
MEANS = ("offloaded_bytes", "moved_bytes", "cache_hit_rate", "search_share", "kmeans_iterations")  # of retrieval
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # by model.dtype
FIRST = ("experiment", "model", "task", "question", "method", "kv_ratio")
COUNTS = (
    *("n", "questions", "skipped", "halved", "prompt_cut", "thinking_cut", "dropped_letters"),
    *("evicted", "paired", "changed"),
)
VERDICTS = (
    *("verdict99", "verdict999", "needed", "needed_low", "needed_high", "needed999", "needed999_low", "needed999_high"),
    *("comparisons", "confidence", "length_of_full", "length_ok"),
)
COST = (
    *("ended", "layers", "slots", "kv_ratio_reached", "kv_bytes", "page_bytes", "bytes_share", "peak_kv_bytes"),
    *("ttft_s", "tt2t_s", "tpot_s", "tokens_per_s", "timed", "busy"),
    *("batch_size", "smallest_batch", *MEANS, "fell_back"),
)
LAST = ("status", "note", "unscored", "also", "headline", "numerics", "baseline", "hash")


def table(outputs_dir: str | Path, where: Mapping[str, Any] | None = None, first: int | None = None) -> pd.DataFrame:
    """`quality_table` of the runs under outputs_dir; `where` keeps those whose label has (one of) the given value(s).

    first: of the task's examples, only so many: a run that was asked for with a higher limit since has more.
    """
    return quality_table(read_runs(outputs_dir, where, first, alone="hash" in (where or {})))


def quality_table(runs: Runs) -> pd.DataFrame:
    """Table of the runs shown, a row each.

    A baseline is found also where it is not shown. The verdicts are corrected for the number of compared runs of the
    same model, task and NUMERICS in this table: choosing runs by their results, with a narrower `where`, takes that
    protection away. `attrs["left_out"]`: lines that say which versions of methods are not in it (`read.chosen`).
    """
    return _table(runs, runs.shown)


def everything_table(runs: Runs) -> pd.DataFrame:
    """`quality_table` of the runs that are not shown too; its verdicts are of no choice that anybody made."""
    return _table(runs, runs.everything)


def _table(runs: Runs, shown: list[Folder]) -> pd.DataFrame:
    families: dict[str, list[Folder]] = {}
    for folder in shown:
        families.setdefault(folder.family, []).append(folder)
    rows = [row for family in families.values() for row in _judged(family, runs.known)]
    metrics = list(dict.fromkeys(name for folder in shown for name in folder.metrics))
    labels = {"question", *(name for folder in shown for name in folder.labels)}
    frame = _tidy(rows, labels, metrics)
    frame.attrs["left_out"] = runs.left_out
    return frame


def _judged(family: list[Folder], known: Mapping[str, Folder]) -> list[Record]:
    """Rows with verdicts at the level that these runs need to be compared together; no other run changes them."""
    sides = []  # run and baseline with the examples that count: for some tasks those the full cache answers
    for folder in family:
        baseline = baseline_of(folder, known)
        counted = folder.of_answered(folder if folder.is_baseline else baseline)
        sides.append((counted, baseline and baseline.of_answered(baseline)))
    number_compared = sum(bool(folder.scored) and not (folder.is_baseline or folder.void) for folder, _ in sides)
    level = stats.corrected_level(number_compared)
    pairs = [compare(*side) for side in sides]
    resample([pair for pair in pairs if pair], level)
    rows = [_row(*side, pair, level) for side, pair in zip(sides, pairs, strict=True)]
    for row, folder in zip(rows, family, strict=True):
        # Of all answers: those that count may be few because the full cache's were cut.
        cut = sum(bool(row.get("thinking_cut")) for row in folder.scored.values())
        row |= {"comparisons": number_compared, "confidence": level, "thinking_cut": cut}
    return rows


def _row(folder: Folder, baseline: Folder | None, pair: Comparison | None, level: float) -> Record:
    obstacle = "" if folder.is_baseline else _obstacle(folder, baseline, pair)
    scored = folder.scored.values()
    row: Record = {**folder.labels, "question": folder.question, **_counts(folder)}
    row |= {name: _over(np.mean, (row["metrics"].get(name) for row in scored)) for name in folder.metrics}
    row |= _cost(folder, folder if folder.is_baseline else baseline)
    fixed = "baseline" if folder.is_baseline else "void" if folder.void else "undecided"
    row |= {f"verdict{ending}": fixed for ending in SUFFIX.values()}
    if pair is not None:
        row |= quality(pair, level, decidable=not obstacle)
    uncounted = ""
    if folder.answers and folder.questions is None:
        uncounted = "which questions the full cache answers is not known here: all are counted"
    row |= {"status": folder.status, "note": "; ".join(filter(None, (obstacle or folder.problem, uncounted)))}
    row |= {"unscored": folder.reasons, "also": folder.also}
    row |= {"headline": folder.metrics[0] if folder.metrics else None, "numerics": folder.run.numerics}
    return row | {"baseline": folder.run.baseline, "hash": folder.run.hash}


def _obstacle(folder: Folder, baseline: Folder | None, pair: Comparison | None) -> str:
    """Why a run cannot have a verdict ("" if it can), in the order in which to repair it."""
    if folder.status != "done":
        return folder.problem
    if folder.void:
        return "void: no example evicted anything; a lower kv_ratio or longer prompts would"
    if baseline is None:
        return f"baseline {folder.run.baseline} is not here" if folder.run.baseline else "no baseline was recorded"
    if baseline.run.numerics != folder.run.numerics:
        return f"NUMERICS is {folder.run.numerics}, the baseline's is {baseline.run.numerics}: run it again"
    if len(commits := folder.revisions | baseline.revisions) > 1:
        return f"rows of {len(commits)} commits of the model: set model.revision and run it again, with its baseline"
    if baseline.status != "done":
        return f"baseline {baseline.problem}"
    if folder.questions and not folder.scored:
        return f"the full cache answers none of the {folder.questions} questions: nothing to lose"
    if folder.scored and not folder.metrics:
        return "no references to compare with: KL and equal tokens are the distance from the full cache"
    if pair is not None and (nothing := pair.without_percent):
        return f"the baseline scores 0 in {', '.join(nothing)}: no percentage of that"
    if pair is None or pair.pairs < stats.MIN_PAIRS:
        few = f"{pair.pairs if pair else 0} paired examples are too few"
        return f"{few}: {TOO_FEW_PAIRS} {stats.MIN_PAIRS}"
    if set(pair.metrics) != set(baseline.metrics):
        return f"scored {', '.join(folder.metrics)}, the baseline {', '.join(baseline.metrics)}"
    if lost := [why for name, why in folder.unscored.items() if name in baseline.scored]:
        return (
            f"{len(lost)} of the examples the baseline scored have no score here ({lost[0]}): that cannot pass or fail"
        )
    return ""


def _counts(folder: Folder) -> dict[str, int | None]:
    scored = folder.scored.values()
    counts: dict[str, int | None] = {"n": len(scored), "skipped": len(folder.rows) - len(scored)}
    return counts | {
        "questions": folder.questions,
        "halved": sum(bool(row.get("halved")) for row in folder.rows),  # failed ones too
        "prompt_cut": sum(bool(row.get("prompt_cut")) for row in scored),
        "dropped_letters": sum((row.get("info") or {}).get("dropped_letters", 0) for row in scored),
        "evicted": sum(evicted(row) for row in scored),
    }


def _cost(folder: Folder, baseline: Folder | None) -> dict[str, Any]:
    """Mean slots and bytes at the end, the highest peak, median seconds; all new tokens over all generation time.

    ended: percent of the generated answers that an end token or a stop string ended, before max_new_tokens did.
    Seconds are of the scored examples that hold times (`timed`): not of rows made with shared prefills, nor of the
    `busy` ones, made while other processes took the cores. Time per token is of the timed ones with two new tokens or
    more. fell_back: notes of rows whose retrieval did less than asked, and `graph_note`.

    Per row (one prompt): slots, and over the prompt's tokens (kv_ratio_reached); kv_bytes and peak_kv_bytes, an equal
    share of the batch's, its padding included; page_bytes, kv_bytes of whole pages (`EvictionStats.page_slots`); and
    tokens_per_s, the tokens of one row over the seconds it ran (a batch makes up to batch_size times as many). Per
    batch: ttft_s, tt2t_s and tpot_s, how long the whole batch took to its first, to its second and per further token
    (all after the first). batch_size: the largest number of prompts in one forward, smallest_batch the least. Compare
    bytes and seconds only at equal batch_size.
    """
    rows = folder.scored.values()
    receipts, seconds = ([row.get(name) or {} for row in rows] for name in ("receipt", "seconds"))
    retrieval = [receipt.get("retrieval") or {} for receipt in receipts]
    fallen = Counter(note for counts in retrieval for note in counts.get("notes", []))
    prompts = (number(row.get("prompt_tokens")) for row in rows)
    reached = (number(of.get("slots")) / n if n > 0 else None for of, n in zip(receipts, prompts, strict=True))
    new = np.array([number(row.get("new_tokens")) for row in rows])
    ttft, tpot = (np.array([number(timed.get(name)) for timed in seconds]) for name in ("ttft", "tpot"))
    spent = ttft + np.where(new > 1, tpot * (new - 1), 0.0)  # a single token has no time per further token
    timed = np.isfinite(spent) & np.isfinite(new)
    total = float(spent[timed].sum())
    reasons = [row["finish_reason"] for row in rows if row.get("finish_reason")]
    return {
        "ended": 100 * reasons.count("stop") / len(reasons) if reasons else math.nan,
        "layers": next((layers_words(receipt["ledger"]) for receipt in receipts if receipt.get("ledger")), None),
        "slots": _over(np.mean, (receipt.get("slots") for receipt in receipts)),
        "kv_ratio_reached": _over(np.mean, reached),
        "kv_bytes": _over(np.mean, (receipt.get("kv_bytes") for receipt in receipts)),
        "page_bytes": _over(np.mean, map(_page_bytes, receipts)),
        "bytes_share": bytes_share(folder, baseline),
        "peak_kv_bytes": _over(np.max, (receipt.get("peak_kv_bytes") for receipt in receipts)),
        "ttft_s": _over(np.median, ttft),
        "tt2t_s": _over(np.median, (timed.get("tt2t") for timed in seconds)),
        "tpot_s": _over(np.median, tpot),
        "tokens_per_s": float(new[timed].sum()) / total if total > 0 else math.nan,
        "timed": int(np.isfinite(ttft).sum()),
        "busy": sum(map(is_busy, rows)),
        "batch_size": _over(np.max, (receipt.get("batch_size") for receipt in receipts)),
        "smallest_batch": _over(np.min, (receipt.get("batch_size") for receipt in receipts)),
        **{name: _over(lambda values: sum(values) / len(values), (of.get(name) for of in retrieval)) for name in MEANS},
        "fell_back": "; ".join(
            [f"{count} of {len(rows)} rows: {note}" for note, count in fallen.items()] + graph_note(rows)
        ),
    }


def graph_note(rows: Collection[Row]) -> list[str]:
    """What share of the rows' decode steps was replayed from a CUDA graph; none where none was to be."""
    notes = (str((row.get("info") or {}).get("cuda_graph", "")) for row in rows)
    counts = [tuple(map(int, match.groups())) for note in notes if (match := REPLAYED.match(note))]
    replayed, steps = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
    if not steps:
        return []
    share = f"{100 * replayed / steps:.0f} %"
    return [f"{share} of the decode steps were replayed from a CUDA graph: compare times among runs of that share"]


def layers_words(ledger: Mapping[str, Any]) -> str:
    """How many layers of a model whose layers keep different things are evicted from, such as "3 of 18"."""
    return f"{ledger.get('evicted_layers')} of {ledger.get('layers')}"


LINE_TITLES = {  # of `LINES`
    "held": "layers that keep every token",
    "window": "sliding windows, chunks",
    "state": "states",
    "latent": "latents",
}
BYTES_LEGEND = (
    "now: bytes at the end of an answer, mean over examples; peak: the most at any time; % of full: now, of what the "
    "full cache's run holds there"
)


def bytes_table(runs: Runs) -> pd.DataFrame:
    """Bytes of runs of models whose layers keep different things, a row for each line of the ledger that holds any.

    Columns: labels, question, n, line, layers (evicted from: "3 of 18"), now (mean bytes at the end), peak (the most),
    of_full (percent of the baseline's now, NaN without a baseline), hash.
    """
    rows: list[Record] = []
    for folder in runs.ran:
        full = _ledgers(folder if folder.is_baseline else baseline_of(folder, runs.known))
        ledgers = _ledgers(folder)
        for line in LINES:
            now, peak = (_over(np.mean, _of_line(ledgers, line, 0)), _over(np.max, _of_line(ledgers, line, 1)))
            if not now > 0:
                continue
            whole = _over(np.mean, _of_line(full, line, 0))
            row = {**folder.labels, "question": folder.question, "n": len(ledgers), "line": LINE_TITLES[line]}
            row |= {"layers": layers_words(ledgers[0]), "now": now, "peak": peak}
            rows.append(row | {"of_full": 100 * now / whole if whole > 0 else math.nan, "hash": folder.run.hash})
    return pd.DataFrame(rows)


def _ledgers(folder: Folder | None) -> list[Mapping[str, Any]]:
    rows = [] if folder is None else folder.scored.values()
    return [ledger for row in rows if (ledger := (row.get("receipt") or {}).get("ledger"))]


def _of_line(ledgers: Iterable[Mapping[str, Any]], line: str, place: int) -> list[Any]:
    """Bytes of one line: place 0, now; 1, at the peak."""
    return [(ledger.get(line) or [None, None])[place] for ledger in ledgers]


def bytes_columns(rows: Sequence[Row]) -> tuple[list[Column], list[Column]]:
    return [METHOD_AND_SETTING, budget_column(rows), N], [
        plain("line", "bytes of", right=False),
        plain("layers", "layers\nevicted"),
        Column("now", "now", size),
        Column("peak", "peak", size),
        numeric("% of\nfull", "of_full", 1),
    ]


def _page_bytes(receipt: Mapping[str, Any]) -> float | None:
    """kv_bytes with whole pages in place of slots; None of rows recorded before pages were counted."""
    slots, pages = number(receipt.get("slots")), receipt.get("page_slots")
    return number(receipt.get("kv_bytes")) * pages / slots if pages is not None and slots > 0 else None


def bytes_share(folder: Folder, baseline: Folder | None) -> float:
    """Mean bytes at the end of the rows over the baseline's, over the examples that both scored; NaN without any.

    Numbers in full precision count as 16 bits on both sides, so that codes of 4 bits weigh the same as with float32.
    """
    if baseline is None:
        return math.nan
    names = [name for name in folder.scored if name in baseline.scored]
    mine, full = (sum((_at_16(side, side.scored[name]) for name in names), 0.0) for side in (folder, baseline))
    return mine / full if full > 0 else math.nan


def _at_16(folder: Folder, row: Record) -> float:
    """Bytes of a row where numbers in full precision count as 16 bits; NaN where it does not say."""
    receipt, model = row.get("receipt") or {}, folder.run.config.get("model")
    if receipt.get("kv_bytes_at_16") is not None:
        return number(receipt["kv_bytes_at_16"])
    itemsize = ITEMSIZE.get(str(model.get("dtype")) if isinstance(model, dict) else "", math.nan)
    return number(receipt.get("kv_bytes")) * 2 / itemsize


def _over(reduce: Callable[[Any], Any], values: Iterable[Any]) -> float:
    finite = [value for value in map(number, values) if math.isfinite(value)]
    return float(reduce(finite)) if finite else math.nan


def _tidy(rows: list[Record], labels: set[str], metrics: list[str]) -> pd.DataFrame:
    """Columns in reading order, one type each; rows by model, task, baseline first, method, kv_ratio."""
    fixed = {*COUNTS, *VERDICTS, *COST, *LAST}
    names = [name for name in FIRST if name in labels] + sorted(labels - fixed - set(FIRST) - set(metrics))
    endings = ("", "_of_full", "_low", "_high", "_low_corrected", "_high_corrected", "_verdict99", "_verdict999")
    quality = [f"{metric}{ending}" for metric in metrics for ending in endings]
    cost = [name for name in COST if name != "layers" or any(row.get(name) for row in rows)]
    frame = pd.DataFrame(rows, columns=[*names, *COUNTS, *quality, *VERDICTS, *cost, *LAST])
    for name in names:
        frame[name] = _label(frame[name])
    for name in ("questions", "paired", "changed"):
        frame[name] = frame[name].astype("Int64")
    frame["length_ok"] = frame["length_ok"].astype("boolean")
    frame["_later"] = frame["verdict99"] != "baseline"
    order = ("model", "task", "_later", "method", "kv_ratio", "question", "hash")
    keys = [name for name in order if name in frame]
    return frame.sort_values(keys, kind="stable", ignore_index=True).drop(columns="_later")


def _label(column: pd.Series[Any]) -> pd.Series[Any]:
    """Column of a label: numbers if all are, else text, so that it sorts and fits parquet."""
    present = [value for value in column if value is not None and value == value]
    if all(isinstance(value, bool) for value in present) and len(present) == len(column):
        return column
    if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return pd.to_numeric(column)
    return column.map(lambda value: None if value is None or value != value else str(value))


TOO_FEW_PAIRS = "a percentage of full and a verdict need at least"
# Tasks whose metric `exact` asks whether the reference stands in the answer, not whether it is the answer.
CONTAINS = ("context_qa", "dialogue", "memory", "needle", "needle_multi", "news_needle", "news_qa", "passkey")
FEW_SLOTS = 8.0  # slots per layer and head: with fewer, what a method always keeps is most of what it keeps
FEW_SLOTS_WORDS = f"under {FEW_SLOTS:g} slots per layer and head, where a budget is hardly a choice"


def called(metric: str, task: Any) -> str:
    """Name of a metric for people: rows of CONTAINS say `exact` of an answer that holds the reference."""
    return "contains" if metric == "exact" and str(task).split(" ")[0] in CONTAINS else metric


def short(metric: str, task: Any = None) -> str:
    """Name of a metric for people, abbreviated for a column."""
    name = called(metric, task)
    return name.replace("rouge", "R-") if name.startswith("rouge") else name


_KEY = re.compile(r" +(?=[\w.@/+~]+=)")  # before the key of an override
MOVING = "moving"  # in the label `revision`: a hub id without a pinned commit


def budget_column(rows: Sequence[Row]) -> Column:
    """Column of kv_ratio where a row has one, else of tokens."""
    name = "kv_ratio" if any(not absent(row.get("kv_ratio")) for row in rows) else "tokens"
    return plain(name, name)


def question_column(rows: Sequence[Row]) -> list[Column]:
    """Column of the place of the question, where it is not the same in all rows."""
    same = len({row.get("question") for row in rows}) < 2
    return [] if same else [plain("question", "question", right=False)]


def parts(frame: pd.DataFrame, *by: str) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    """(title, values of the labels, rows) for each NUMERICS, the newest first, model, task and value of further labels.

    Numbers of two NUMERICS never stand in one table or panel; the title names it where there are several.
    """
    keys = [name for name in ("numerics", "model", "task", *by) if name in frame]
    several = "numerics" in frame and frame["numerics"].nunique() > 1
    if several:
        frame = frame.sort_values("numerics", ascending=False, kind="stable")
    for values, frame_part in frame.groupby(keys, sort=False, dropna=False):
        named = dict(zip(keys, values, strict=True))
        yield title_of(named) + (f", NUMERICS {named['numerics']}" if several else ""), named, frame_part


def title_of(row: Row, between: str = " / ") -> str:
    """Model and task of a run."""
    return run_name(row, *TABLE, between=between) or "runs"


def with_n(runs: pd.DataFrame, name: str = "n") -> pd.DataFrame:
    """The runs of one panel with "(n = 10)" behind the setting of those that have fewer examples than others."""
    most = runs[name].max()
    words = [
        f"{setting} (n = {n})".lstrip() if n < most else setting
        for setting, n in zip(runs["setting"], runs[name], strict=True)
    ]
    return runs.assign(setting=words)


def n_words(runs: pd.DataFrame, name: str = "n") -> str:
    """ "n = 60", or "n = 10 to 60" where runs of one panel differ; `with_n` says which has how many."""
    least, most = int(runs[name].min()), int(runs[name].max())
    return f"n = {most}" if least == most else f"n = {least} to {most}"


def shared_settings(rows: list[Record]) -> tuple[list[str], list[Record]]:
    """(overrides that every row has, the rows with their other ones): what is the same everywhere needs no column."""
    # A value may hold spaces: a setting is parted only where a new key begins.
    overrides = [_KEY.split(str(row.get("setting") or "")) for row in rows]
    shared = [override for override in overrides[0] if override and all(override in other for other in overrides)]
    if not shared:
        return [], rows
    left = [" ".join(override for override in other if override not in shared) for other in overrides]
    return shared, [{**row, "setting": setting} for row, setting in zip(rows, left, strict=True)]


def without_question(rows: Sequence[Record]) -> list[Record]:
    """The rows without task.question among their settings: titles and a column say it, of every run that has one."""
    return [row if row.get("question") not in WORDS else without(row, KEY) for row in rows]


def without(row: Row, *keys: str) -> Record:
    """Copy of the row whose setting lacks the overrides that begin with one of `keys`, such as "code="."""
    if not any(key in str(row.get("setting")) for key in keys):
        return dict(row)
    return {**row, "setting": " ".join(word for word in _KEY.split(str(row["setting"])) if not word.startswith(keys))}


def marks_of(rows: Sequence[Row]) -> dict[str, str]:
    """Label -> what a title says of it where it is the same in all runs: a chat template, weights of a GGUF file,
    whether eviction has seen the question, which part of the model's layers is evicted from.
    """
    ran = [row for row in rows if row["status"] != "refused"]
    marks: dict[str, str] = {}
    for name, end in (("weights", "{} weights"), ("chat", "chat template")):
        values = {None if absent(row.get(name)) else str(row[name]) for row in ran}
        if len(values) == 1 and (value := values.pop()) not in (None, "False"):
            marks[name] = end.format(value)
    evicting = [row for row in ran if row["verdict99"] != "baseline" and not absent(row.get("layers"))]
    layers = {str(row["layers"]): None for row in evicting}
    if layers:
        marks["layers"] = f"{' or '.join(layers)} layers evicted"
    places = {row.get("question") for row in ran}
    return marks | ({"question": question_words(places)} if len(places) == 1 and question_words(places) else {})


def keys_of(rows: Sequence[Row], x: str) -> list[Column]:
    """What tells the rows apart: method, the x axis, and any label that is not the same in all of them."""
    fixed = {*FIRST[1:], *COUNTS, *VERDICTS, *LAST, "ended", "slots", "kv_bytes", "peak_kv_bytes", "ttft_s", "tpot_s"}
    fixed |= {"code", *marks_of(rows)}
    names = list(rows[0])[: list(rows[0]).index("n")]
    values = {name: {str(row[name]) for row in rows} for name in names if name not in fixed}
    # A label is worth a column where it is not the same in all rows, or says that a revision moves.
    varied = [name for name, shown in values.items() if len(shown) > 1 or (name == "revision" and MOVING in min(shown))]
    if len({row.get("question") for row in rows}) > 1:
        varied = ["question", *varied]
    if len({str(row.get("code")) for row in rows}) > 1:
        varied = ["code", *varied]
    axis = plain("kv_ratio", "kv_ratio") if x == "kv_ratio" else Column("KV bytes", "kv_bytes", size)
    named = [METHOD, axis, *(plain(name, name, right=False) for name in varied)]
    return [*named, N] if n_differs(rows) else named


def metrics_of(rows: Sequence[Row]) -> tuple[list[str], str | None]:
    """Metrics of which a row has a mean, and the first of which one has a percentage (else the first, if any)."""
    names = [name.removesuffix("_of_full") for name in rows[0] if name.endswith("_of_full")]
    metrics = [name for name in names if name != "length" and any(not absent(row[name]) for row in rows)]
    with_percent = (name for name in metrics if any(not absent(row[f"{name}_of_full"]) for row in rows))
    return metrics, next(with_percent, metrics[0] if metrics else None)


def columns_of(rows: Sequence[Row], x: str) -> list[Column]:
    """What is said of a run behind what names it, the verdicts first; columns without anything to say are left out."""
    metrics, headline = metrics_of(rows)
    runs = f"({rows[0]['comparisons']} run{'s' * (rows[0]['comparisons'] != 1)})"
    task = rows[0].get("task")
    # A chat model's turn has an end: that none came is worth a column.
    ended = any(row["ended"] > 0 or (str(row.get("chat")) == "True" and not absent(row["ended"])) for row in rows)
    moved = any(not absent(row["moved_bytes"]) for row in rows)
    return [
        *([plain("kv_ratio", "kv_ratio")] if x == "bytes" else []),
        Column(f"99 %\n{runs}", lambda row: verdict_of(row, "99", metrics), right=False),
        Column(f"99.9 %\n{runs}", lambda row: verdict_of(row, "999", metrics), right=False),
        *([] if headline is None else percent_columns(headline, f"{short(headline, task)} %\nof full")),
        *(metric_column(name, task) for name in metrics),
        needed_column("n to\ndecide"),
        *([] if n_differs(rows) else [N]),
        *telling(rows, plain("questions", "of asked")),
        plain("paired", "paired"),
        *telling(
            rows,
            plain("skipped", "skip-\nped"),
            PROMPT_CUT,
            plain("thinking_cut", "cut while\nthinking"),
            plain("dropped_letters", "letters\ndropped"),
            plain("halved", "hal-\nved"),
        ),
        *([ENDED] if ended else []),
        STATUS,
        SLOTS,
        *ratio_reached(rows),
        Column("peak KV", "peak_kv_bytes", size),
        *telling(rows, TTFT, TPOT, TOKENS_PER_S),
        *([plain("timed", "timed")] if any(map(partly_timed, rows)) else []),
        *(telling(rows, Column("TT2T", "tt2t_s", seconds)) if moved else []),
        *telling(rows, Column("moved", "moved_bytes", size), numeric("cache\nhits", "cache_hit_rate", 2)),
        *([Column("batch", batch_of)] if any(batch_of(row) not in ("1", "-") for row in rows) else []),
    ]


N = plain("n", "n")
METHOD = plain("method", "method", right=False)
METHOD_AND_SETTING = Column("method", lambda row: run_name(row, "method", "setting"), right=False)
STATUS = plain("status", "status", right=False)
SLOTS = numeric("slots", "slots", 1)
ENDED = numeric("ended\n%", "ended", 0)
PROMPT_CUT = plain("prompt_cut", "prompt\ncut")
TTFT = Column("TTFT", "ttft_s", seconds)
TPOT = Column("TPOT", "tpot_s", seconds)
TOKENS_PER_S = numeric("tokens/s", "tokens_per_s", 1)


def n_differs(rows: Sequence[Row]) -> bool:
    """Whether n belongs to what names a row, and so begins each part of a table: numbers are of other examples."""
    return len({row["n"] for row in rows if row["n"]}) > 1


def ratio_reached(rows: Sequence[Row]) -> list[Column]:
    """Column of the ratio that a run came to, where one has a threshold and no budget."""
    open_ended = [absent(row["kv_ratio"]) and absent(row.get("tokens")) for row in rows]
    if not any(free and row["verdict99"] != "baseline" for free, row in zip(open_ended, rows, strict=True)):
        return []
    return [numeric("ratio\nreached", "kv_ratio_reached", 3)]


def partly_timed(row: Row) -> bool:
    """Whether its times are of some of its examples alone."""
    return bool(0 < row["timed"] < row["n"])


def batch_of(row: Row) -> str:
    """Prompts per forward, from the smallest batch to the largest."""
    least, most = row["smallest_batch"], row["batch_size"]
    return "-" if absent(most) else f"{most:.0f}" if least == most else f"{least:.0f}-{most:.0f}"


def metric_column(name: str, task: Any) -> Column:
    return numeric(short(name, task), name, 3 if stats.lower_is_better(name) else 2)


def verdict_of(row: Row, ending: str, metrics: Sequence[str]) -> str:
    """Verdict of a row; a failure that the headline metric does not show names its cause."""
    verdict = "-" if row["status"] == "refused" else str(row[f"verdict{ending}"])
    if verdict != "fail":
        return verdict
    lost = [name for name in metrics if row.get(f"{name}_verdict{ending}") == "fail"]
    if lost and lost[0] == metrics[0]:
        return verdict
    return f"fail ({short(lost[0], row.get('task'))})" if lost else "fail (length)"


def few(row: Row) -> bool:
    """Whether fewer examples are compared than a percentage needs to mean anything."""
    return not absent(row["paired"]) and row["paired"] < stats.MIN_PAIRS


def percent_columns(metric: str, head: str) -> list[Column]:
    """Percent of the full cache's score, and its interval."""
    low, high = f"{metric}_low", f"{metric}_high"

    def ends(row: Row) -> Any:
        return TOO_FEW if few(row) else None if absent(row[low]) else (row[low], row[high])

    return [
        Column(head, lambda row: TOO_FEW if few(row) else row[f"{metric}_of_full"], lambda value: fixed(value, 1)),
        Column("95 %\ninterval", ends, lambda value: f"{value[0]:.1f}..{value[1]:.1f}"),
    ]


def needed_column(head: str) -> Column:
    """Least and most examples that are likely to decide 99 % and 99.9 %: 120-24k / 3k; one number where both agree."""

    def ends(row: Row) -> Any:
        if few(row):
            return TOO_FEW
        known = not (absent(row["needed"]) and absent(row["needed999"]))
        return tuple((row[f"{name}_low"], row[f"{name}_high"]) for name in ("needed", "needed999")) if known else None

    def show(value: tuple[tuple[float, float], ...]) -> str:
        counts = [tuple(map(count, pair)) for pair in value]
        return " / ".join(low if low == high else f"{low}-{high}" for low, high in counts)

    return Column(head, ends, show)


HEADS = {IN_PROMPT: "question in prompt", AFTER_EVICTION: "after eviction"}
NOTE = (
    "question in prompt: eviction has seen what is asked; after eviction: it has not. Each is in percent of a full "
    "cache that was asked in the same place."
)
ALIKE = ("method", "kv_ratio", "tokens", "setting")


def seen_and_hidden(df: pd.DataFrame) -> Iterator[Block]:
    """A table for each model and task with a run of both kinds.

    df: of `kvexp.results.table`. A row holds the columns of its run with the question in the prompt, under their own
    names, and both runs by place of the question under "sides"; they are alike in method, budget and all else.
    """
    if "question" not in df or not {IN_PROMPT, AFTER_EVICTION} <= set(df["question"]):
        return
    ran = df[df["status"].ne("refused") & df["verdict99"].ne("baseline") & df["question"].isin(HEADS)]
    for title, _, block in parts(ran):
        by_settings: dict[str, dict[str, list[Record]]] = {}
        for run in without_question(records(block)):
            alike = repr([None if absent(run.get(name)) else run[name] for name in ALIKE])
            by_settings.setdefault(alike, {name: [] for name in HEADS})[run["question"]].append(run)
        once = [sides for sides in by_settings.values() if all(len(side) == 1 for side in sides.values())]
        if once:
            rows = [{**sides[IN_PROMPT][0], "sides": {name: side[0] for name, side in sides.items()}} for sides in once]
            shared, rows = shared_settings(rows)
            metric = str(rows[0]["headline"])
            words = f"{title}: {short(metric, rows[0].get('task'))} in percent of full by place of the question"
            keys = [METHOD, plain("kv_ratio", "kv_ratio")]
            keys += [plain("tokens", "tokens")] * any(not absent(row.get("tokens")) for row in rows)
            keys += [plain("setting", "setting", right=False)] * any(row.get("setting") for row in rows)
            columns = [column for side in HEADS for column in _columns_of_side(side, metric)]
            yield Block(", ".join([words, *shared]), rows, [*keys, *columns], len(keys))


def _columns_of_side(side: str, metric: str) -> list[Column]:
    """Columns of one place of the question; a dash in a row whose run there was not paired with the full cache's."""

    def of_side(column: Column, row: Row) -> Any:
        run = row["sides"][side]
        return None if absent(run["paired"]) else column.of(run)

    columns = [*percent_columns(metric, f"{HEADS[side]}:\n% of full"), plain("paired", "paired")]
    return [replace(column, value=partial(of_side, column)) for column in columns]


X_AXES = ("kv_ratio", "bytes")


def print_table(df: pd.DataFrame, console: Console | None = None, x: str = "kv_ratio") -> None:
    """A table per NUMERICS, model and task, in parts where the console is narrow. x: order by kv_ratio or bytes."""
    print_blocks((*groups(df, x), *seen_and_hidden(df)), notes(df), console or Console(markup=False))


def to_markdown(df: pd.DataFrame) -> str:
    """What `print_table` prints as GitHub-flavoured Markdown."""
    return markdown_of((*groups(df, "kv_ratio"), *seen_and_hidden(df)), notes(df))


def notes(df: pd.DataFrame) -> list[str]:
    """What a reader must know to trust the table, then every run that has something missing."""
    if df.empty:
        return ["no runs"]
    return [*df.attrs.get("left_out", ()), *legend(df), *missing(df)]


def legend(df: pd.DataFrame) -> list[str]:
    """What the columns and verdicts of `groups` mean, as far as these runs have them."""
    lines: list[str] = []
    if set(df.loc[df["status"] != "refused", "verdict99"]) - {"baseline", "void"}:
        levels = sorted({(int(n), float(at)) for n, at in zip(df["comparisons"], df["confidence"], strict=True) if n})
        said = ", ".join(f"{100 * level:.4g} % for {n} run{'s' * (n != 1)}" for n, level in levels)
        lines += [
            "% of full and its 95 % interval (paired bootstrap): over the examples that a run and its baseline both "
            "scored (paired); all other numbers: over the n examples of the run itself.",
            f"99 %, 99.9 % (MLPerf): every metric at that share of full, and {stats.LENGTH_MARK:g} % of its generated "
            f"tokens; decided by intervals corrected (Bonferroni) for the compared runs of one model and task: {said}.",
        ]
    if df[["needed", "needed999"]].notna().any(axis=None):
        chance = f"{100 * stats.POWER:g} % chance"
        lines += [
            f"n to decide: examples that give an {chance} of a verdict at 99 % / 99.9 %, if the percentage stays."
        ]
    shares: dict[str, str] = {}
    for row in records(df):
        if row["verdict99"] == "baseline" and not absent(row["questions"]):
            n, questions = int(row["n"]), int(row["questions"])
            shares.setdefault(title_of(row), f"{n} of {questions}, {100 * n / questions:.0f} %")
    lines += [
        f"{title}: n of the questions asked count, those that the full cache answers: the reference stands in its "
        f"answer ({share})."
        for title, share in shares.items()
    ]
    if df.loc[df["status"] != "refused", "numerics"].nunique() > 1:
        lines += [
            "NUMERICS differ between these runs: a table each, the newest first; compare numbers only within one."
        ]
    if (df["batch_size"] > 1).any():
        lines += [
            "batch: prompts per forward. TTFT and TPOT are the batch's; slots, bytes and tokens/s are one row's, bytes "
            "an equal share of the batch's. Compare them only at equal batch sizes."
        ]
    if df["ttft_s"].notna().any():
        lines += [
            "TTFT, TPOT: medians over the n examples (TPOT: of two new tokens or more), after an untimed warm-up."
        ]
    if any(partly_timed(row) for row in records(df)):
        lines += ["timed: of how many of the n examples TTFT, TPOT and tokens/s are; the others shared a prefill."]
    if df.loc[(df["n"] > 0) & (df["busy"] == 0), ["ttft_s", "tpot_s"]].isna().any(axis=None):
        lines += [
            "no TTFT, TPOT, tokens/s: choices are not generated, and runs of a sweep that share each prompt's prefill "
            "are not timed (hydra/launcher=basic takes them one at a time)."
        ]
    lines += [NOTE] if any(True for _ in seen_and_hidden(df)) else []
    if any(len(set(block["n"]) - {0}) > 1 for _, _, block in parts(df[df["status"] != "refused"])):
        lines += [
            "n differs between runs of one table, which are of other examples: compare % of full (paired), or run them "
            "with one limit."
        ]
    return lines


def missing(df: pd.DataFrame) -> list[str]:
    """The jobs that were refused, then what is missing of a run, a line for each reason with the runs it is true of."""
    rows = [row for row in records(df) if row["status"] != "refused" or only_refused(df)]
    lines = [f"{title}: {', '.join(names)}: {note}" for (title, note), names in by_note(rows, _name).items()]
    return refused_line(df) + lines


def by_note(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[tuple[str, str], list[str]]:
    """Model and task, and what is missing or to be known -> names of the runs it is true of."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for note in own_notes(row):
            names.setdefault((title_of(row), note), []).append(name(row))
    return names


def only_refused(df: pd.DataFrame) -> bool:
    """Whether nothing but refused jobs was chosen, which then are listed like runs."""
    return bool(df["status"].eq("refused").all())


def refused_line(df: pd.DataFrame) -> list[str]:
    """A line that names the jobs that were refused before they had rows; none where they have tables of their own."""
    jobs = [row for row in records(df) if row["status"] == "refused"]
    if not jobs or only_refused(df):
        return []
    names = dict.fromkeys(f"{title_of(row)} {run_name(row)}".strip() for row in jobs)
    return [f"refused, without rows: {', '.join(names)}; --where status=refused says why."]


def own_notes(row: Row) -> Iterator[str]:
    if row["note"]:
        yield row["note"]
    if row["unscored"]:
        yield f"without a score: {row['unscored']}"
    if row["also"]:
        yield f"also asked for as {row['also']}"
    if row["verdict99"] != "baseline" and row["slots"] < FEW_SLOTS:
        yield FEW_SLOTS_WORDS
    if row["busy"]:
        share = "" if row["busy"] == row["n"] else f" of {row['busy']} of {row['n']} examples"
        yield f"busy machine: times{share} are not comparable"
    if row["fell_back"]:
        yield row["fell_back"]
    if MOVING in str(row.get("revision") or ""):
        yield f"revision {row['revision']}: whatever the hub holds that day; set a commit hash for numbers to keep"


def _name(row: Row) -> str:
    """A run within its table: the hash tells apart what method and kv_ratio do not, and finds the folder."""
    return f"{run_name(row, 'method', 'kv_ratio')} ({row['hash'][:6]})".lstrip()


def place(row: Row) -> tuple[Any, ...]:
    """Sort key: the full cache first, the largest budget next; of one budget the nearest to the full cache first.

    By KL where the row has one, else by score.
    """
    of_full = f"{row['headline']}_of_full"
    ratio, tokens, kl, score = (number(row.get(name)) for name in ("kv_ratio", "tokens", "kl", of_full))
    sizes = (-ratio, -tokens, kl, -score)
    return (row["verdict99"] != "baseline", *(math.inf if math.isnan(value) else value for value in sizes))


def groups(df: pd.DataFrame, x: str) -> Iterator[Block]:
    """A table for each NUMERICS, model and task; without refused jobs."""
    if x not in X_AXES:
        raise ConfigError(f"x must be one of {', '.join(X_AXES)}, got {x}")
    for title, _, block in parts(df if only_refused(df) else df[df["status"] != "refused"]):
        rows = (
            records(block.sort_values("kv_bytes", kind="stable")) if x == "bytes" else sorted(records(block), key=place)
        )
        shared, inside = shared_settings(without_question([without(row, "code=") for row in rows]))
        keys = keys_of(inside, x)
        title = ", ".join([title, *marks_of(inside).values(), *shared])
        yield Block(title, inside, [*keys, *columns_of(inside, x)], len(keys))
