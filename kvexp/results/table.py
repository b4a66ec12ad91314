"""One row per run: means, percentages of the baseline, verdicts, memory and speed, and why something is missing."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import retrieval_columns, stats
from kvexp.results.bytes_share import bytes_share
from kvexp.results.compare import SUFFIX, Comparison, compare, quality, resample
from kvexp.results.read import Folder, Row, baseline_of, chosen_and_left_out, evicted, folders, number

FIRST = ("experiment", "model", "task", "question", "method", "kv_ratio")
COUNTS = (
    *("n", "questions", "skipped", "halved", "prompt_cut", "thinking_cut", "dropped_letters"),
    *("evicted", "paired", "changed"),
)
VERDICTS = (
    "verdict99",
    "verdict999",
    *("needed", "needed_low", "needed_high"),
    *("needed999", "needed999_low", "needed999_high"),
    "comparisons",
    "confidence",
    "length_of_full",
    "length_ok",
)
COST = (
    *(
        "ended",
        "slots",
        "kv_ratio_reached",
        "kv_bytes",
        "bytes_share",
        "peak_kv_bytes",
        "ttft_s",
        "tt2t_s",
        "tpot_s",
        "tokens_per_s",
        "timed",
    ),
    *("batch_size", "smallest_batch", *retrieval_columns.NAMES),
)
LAST = ("status", "note", "unscored", "also", "headline", "numerics", "baseline_check", "baseline", "hash")


def table(outputs_dir: str | Path, where: Mapping[str, Any] | None = None, first: int | None = None) -> pd.DataFrame:
    """The runs under outputs_dir, one row each; `where` keeps those whose label has (one of) the given value(s).

    first: of the task's examples, only so many: a run that was asked for with a higher limit since has more.

    A baseline is found also where `where` hides it. The verdicts are corrected for the number of compared runs of the
    same model, task and NUMERICS in this table: choosing runs by their results, with a narrower `where`, takes that
    protection away. `attrs["left_out"]`: lines that say which versions of methods are not in it (`read.chosen`).
    """
    found = [folder.of_first(first) for folder in folders(outputs_dir)]
    known = {folder.run.hash: folder for folder in found}
    shown, left_out = chosen_and_left_out(found, where or {})
    rows = [row for family in _families(shown) for row in _judged(family, known)]
    metrics = list(dict.fromkeys(name for folder in shown for name in folder.metrics))
    labels = {"question", *(name for folder in shown for name in folder.labels)}
    frame = _tidy(rows, labels, metrics)
    frame.attrs["left_out"] = left_out
    return frame


def _families(shown: Iterable[Folder]) -> list[list[Folder]]:
    """The runs of each model, task and NUMERICS: those that one printed table holds beside each other."""
    found: dict[str, list[Folder]] = {}
    for folder in shown:
        found.setdefault(repr([folder.labels.get(name) for name in ("model", "task", "numerics")]), []).append(folder)
    return list(found.values())


def _judged(family: list[Folder], known: Mapping[str, Folder]) -> list[Row]:
    """Rows with verdicts at the level that these runs need to be compared together; no other run changes them."""
    sides = [_counted(folder, baseline_of(folder, known)) for folder in family]
    number_compared = sum(bool(folder.scored) and not (folder.is_baseline or folder.void) for folder, _ in sides)
    level = stats.corrected_level(number_compared)
    pairs = [compare(*side) for side in sides]
    resample([pair for pair in pairs if pair], level)
    of_all = {"comparisons": number_compared, "confidence": level}
    # Of all answers: those that count may be few because the full cache's were cut.
    cut = [{"thinking_cut": sum(bool(row.get("thinking_cut")) for row in folder.scored.values())} for folder in family]
    return [_row(*side, pair, level) | of_all | more for side, pair, more in zip(sides, pairs, cut, strict=True)]


def _counted(folder: Folder, baseline: Folder | None) -> tuple[Folder, Folder | None]:
    """A run and its baseline with the examples that count: for some tasks those the full cache answers."""
    full = folder if folder.is_baseline else baseline
    return folder.of_answered(full), baseline and baseline.of_answered(baseline)


def _row(folder: Folder, baseline: Folder | None, pair: Comparison | None, level: float) -> Row:
    obstacle = "" if folder.is_baseline else _obstacle(folder, baseline, pair)
    row: Row = {**folder.labels, "question": folder.question, **_counts(folder), **_means(folder), **_cost(folder)}
    row |= retrieval_columns.cost(folder.scored.values())
    row["bytes_share"] = bytes_share(folder, folder if folder.is_baseline else baseline)
    fixed = "baseline" if folder.is_baseline else "void" if folder.void else "undecided"
    row |= {f"verdict{ending}": fixed for ending in SUFFIX.values()}
    if pair is not None:
        row |= quality(pair, level, decidable=not obstacle)
    row |= {"status": folder.status, "note": "; ".join(filter(None, (obstacle or folder.problem, _uncounted(folder))))}
    row |= {"unscored": folder.reasons, "also": folder.also}
    row |= {"headline": folder.metrics[0] if folder.metrics else None, "numerics": folder.run.numerics}
    row["baseline_check"] = folder.baseline_check
    return row | {"baseline": folder.run.baseline, "hash": folder.run.hash}


def _uncounted(folder: Folder) -> str:
    """What to say where examples should count only if the full cache answers them, and that is not known."""
    if not folder.answers or folder.questions is not None:
        return ""
    return "which questions the full cache answers is not known here: all are counted"


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
    if pair is not None and (nothing := pair.without_percent):
        return f"the baseline scores 0 in {', '.join(nothing)}: no percentage of that"
    if pair is None or pair.pairs < stats.MIN_PAIRS:
        few = f"{pair.pairs if pair else 0} paired examples are too few"
        return f"{few}: a percentage of full and a verdict need at least {stats.MIN_PAIRS}"
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


def _means(folder: Folder) -> dict[str, float]:
    rows = folder.scored.values()
    return {name: _over(np.mean, (row["metrics"].get(name) for row in rows)) for name in folder.metrics}


def _cost(folder: Folder) -> dict[str, float]:
    """Mean slots and bytes at the end, the highest peak, median seconds; all new tokens over all generation time.

    ended: percent of the generated answers that an end token or a stop string ended, before max_new_tokens did.
    Seconds are of the scored examples that hold times (`timed`): not of rows made with shared prefills. Time per token
    is of those of them with two new tokens or more.

    Per row (one prompt): slots, and over the prompt's tokens (kv_ratio_reached); kv_bytes and peak_kv_bytes, an equal
    share of the batch's, its padding included; and tokens_per_s, the tokens of one row over the seconds it ran (a batch
    makes up to batch_size times as many). Per batch: ttft_s, tt2t_s and tpot_s, how long the whole batch took to its
    first, to its second and per further token (all after the first). batch_size: the largest number of prompts in one
    forward, smallest_batch the least. Compare bytes and seconds only at equal batch_size.
    """
    rows = folder.scored.values()
    receipts, seconds = ([row.get(name) or {} for row in rows] for name in ("receipt", "seconds"))
    new = np.array([number(row.get("new_tokens")) for row in rows])
    ttft, tpot = (np.array([number(timed.get(name)) for timed in seconds]) for name in ("ttft", "tpot"))
    spent = ttft + np.where(new > 1, tpot * (new - 1), 0.0)  # a single token has no time per further token
    timed = np.isfinite(spent) & np.isfinite(new)
    total = float(spent[timed].sum())
    reasons = [row["finish_reason"] for row in rows if row.get("finish_reason")]
    return {
        "ended": 100 * reasons.count("stop") / len(reasons) if reasons else math.nan,
        "slots": _over(np.mean, (receipt.get("slots") for receipt in receipts)),
        "kv_ratio_reached": _over(np.mean, (_reached(row) for row in rows)),
        "kv_bytes": _over(np.mean, (receipt.get("kv_bytes") for receipt in receipts)),
        "peak_kv_bytes": _over(np.max, (receipt.get("peak_kv_bytes") for receipt in receipts)),
        "ttft_s": _over(np.median, ttft),
        "tt2t_s": _over(np.median, (timed.get("tt2t") for timed in seconds)),
        "tpot_s": _over(np.median, tpot),
        "tokens_per_s": float(new[timed].sum()) / total if total > 0 else math.nan,
        "timed": int(np.isfinite(ttft).sum()),
        "batch_size": _over(np.max, (receipt.get("batch_size") for receipt in receipts)),
        "smallest_batch": _over(np.min, (receipt.get("batch_size") for receipt in receipts)),
    }


def _reached(row: Row) -> float:
    """Slots that a row held per kv head at its end, over its prompt's tokens."""
    slots, tokens = number((row.get("receipt") or {}).get("slots")), number(row.get("prompt_tokens"))
    return slots / tokens if tokens > 0 else math.nan


def _over(reduce: Callable[[Any], Any], values: Iterable[Any]) -> float:
    finite = [value for value in map(number, values) if math.isfinite(value)]
    return float(reduce(finite)) if finite else math.nan


def _tidy(rows: list[Row], labels: set[str], metrics: list[str]) -> pd.DataFrame:
    """Columns in reading order, one type each; rows by model, task, baseline first, method, kv_ratio."""
    own = {*COUNTS, *VERDICTS, *COST, *LAST}
    names = [name for name in FIRST if name in labels] + sorted(labels - own - set(FIRST) - set(metrics))
    each = ("", "_of_full", "_low", "_high", "_low_corrected", "_high_corrected", "_verdict99", "_verdict999")
    quality = [f"{metric}{ending}" for metric in metrics for ending in each]
    frame = pd.DataFrame(rows, columns=[*names, *COUNTS, *quality, *VERDICTS, *COST, *LAST])
    for name in names:
        frame[name] = _label(frame[name])
    for name in ("questions", "paired", "changed"):
        frame[name] = frame[name].astype("Int64")
    frame["length_ok"] = frame["length_ok"].astype("boolean")
    frame["_later"] = frame["verdict99"] != "baseline"
    order = ("model", "task", "_later", "method", "kv_ratio", "question", "hash")
    keys = [name for name in order if name in frame]
    return frame.sort_values(keys, kind="stable", ignore_index=True).drop(columns="_later")


def _label(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Numbers stay numbers if all are; anything mixed or nested becomes text, so that it sorts and fits parquet."""
    present = [value for value in column if value is not None and value == value]
    if all(isinstance(value, bool) for value in present) and len(present) == len(column):
        return column
    if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return pd.to_numeric(column)
    return column.map(lambda value: None if value is None or value != value else str(value))
