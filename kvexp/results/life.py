"""Tables of a context's life: questions, turns, long answers, prompts in chunks.

One cache used more than once, or longer than usual. For each view of `kvexp.results.views` here: its rows, its columns,
and what a chart has of a row.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import divergence, stats
from kvexp.results import table as quality
from kvexp.results.blocks import Column, Row, absent, fixed, interval, numeric, plain, records, seconds
from kvexp.results.read import Folder, Runs, answer_of, baseline_of, in_order, number, score_pairs, size_or_words
from kvexp.results.stats import Floats
from kvexp.results.table import METHOD_AND_SETTING, N, budget_column, short, without
from kvexp.run.store import OWN, run_name
from kvexp.util.output import size

Value = tuple[float, float, float]  # a number with the ends of its interval, NaN where there is none
Columns = tuple[list[Column], list[Column]]  # those that name a row, all others
OF_FULL = [numeric("% of\nfull", "of_full", 1), interval("95 %", "low", "high", 1, of="of_full")]


@dataclass(frozen=True)
class Point:
    """What a chart has of a row.

    place: label on the axis; order: what orders the places; hash: of the run; values: one for each side of the view.
    """

    place: str
    order: float
    hash: str
    values: list[Value]


def share(head: str, numerator: str, whole: str, digits: int) -> Column:
    """Column of one value in percent of another."""
    return Column(head, lambda row: _share(row, numerator, whole)[0], lambda value: fixed(value, digits))


def metric_of(row: Row) -> str:
    """The row's metric as titles call it."""
    return short(str(row["metric"]), row.get("task"))


def task_of(folder: Folder) -> str | None:
    """The name of a run's task, by its configuration."""
    task = folder.run.config.get("task")
    return str(task.get("name")) if isinstance(task, Mapping) else None


def _setting(folder: Folder, *keys: str) -> str:
    """Setting of a run without the overrides that begin with one of `keys`."""
    overrides = str(folder.labels.get("setting") or "").split()
    return " ".join(override for override in overrides if not override.startswith(keys))


def _quality(sums: Floats, metric: str) -> dict[str, Any]:
    """Columns n, score, full, of_full, low, high. sums [units, 3]: scores of a run, of the full cache, their number."""
    if not len(sums):
        return {"n": 0, **dict.fromkeys(("score", "full", "of_full", "low", "high"), math.nan)}
    top, bottom, count = sums.T
    score, full = float(top.sum() / count.sum()), float(bottom.sum() / count.sum())
    low, high = stats.percent_of_sums(metric, top, bottom)
    of_full = float(stats.percent(metric, score, full))
    return {"n": int(count.sum()), "score": score, "full": full, "of_full": of_full, "low": low, "high": high}


# --- questions: loss and cost by the number of questions asked of one evicted cache (questions=all)


QUESTIONS_LEGEND = (
    "asked: the first so many questions of every context of which as many were asked; % of full: of their mean score, "
    "with its 95 % interval over contexts, for questions of one are not independent; none lost: share of contexts with "
    "no answer below the full cache's; one prefill, one by one: mean seconds per context, the second of the same rows "
    "with a prefill for each question; of runs that were timed by themselves (hydra/launcher=basic, batch_size=1)"
)


def questions_table(runs: Runs) -> pd.DataFrame:
    """A row per run and number of questions asked.

    Columns: the run's labels, asked, contexts, metric, score and full (means), of_full with low and high (percent,
    95 % interval over contexts), none_lost (percent of contexts), shared_s and one_by_one_s (mean seconds per context
    for so many answers from one prefill, and from one each; NaN of rows without times), hash.
    """
    rows = []
    for folder, baseline in runs.compared():
        contexts, metric = _contexts(folder, baseline), folder.metrics[0]
        common = {**folder.labels, "question": folder.question, "hash": folder.run.hash, "metric": metric}
        for n in range(1, max((questions for questions, _ in contexts), default=0) + 1):
            rows += [common | numbers for numbers in [_asked(contexts, n, metric)] if numbers]
    return pd.DataFrame(rows)


def _contexts(folder: Folder, baseline: Folder) -> list[tuple[int, Floats]]:
    """(number of questions asked, answers [n, 6]) of each context; answers that both scored, in the order asked.

    Of an answer: its place among the questions, the run's and the full cache's score, seconds of prefill, copy, rest.
    """

    def digest(row: Row) -> Any:
        return (row.get("context") or {}).get("digest")

    counts, answers = Counter(map(digest, folder.rows)), defaultdict[str, list[tuple[float, ...]]](list)
    for row, score, full in score_pairs(folder, baseline):
        if digest(row) and math.isfinite(score + full):
            answers[digest(row)].append((row["context"]["question"], score, full, *_spent(row)))
    return [(counts[name], np.array(sorted(scored, key=lambda answer: answer[0]))) for name, scored in answers.items()]


def _spent(row: Row) -> tuple[float, float, float]:
    """Seconds of the prefill, of the copy, and of question and answer; NaN where a batch shared them."""
    seconds_of = {name: number(value) for name, value in (row.get("seconds") or {}).items()}
    prefill, copy = seconds_of.get("prefill", math.nan), seconds_of.get("copy", math.nan)
    if (row.get("receipt") or {}).get("batch_size") != 1:
        return math.nan, math.nan, math.nan
    further = (row["new_tokens"] - 1) * seconds_of.get("tpot", math.nan) if row["new_tokens"] > 1 else 0.0
    return prefill, copy, seconds_of.get("ttft", math.nan) - prefill + further


def _asked(contexts: Sequence[tuple[int, Floats]], n: int, metric: str) -> dict[str, Any]:
    """Numbers of the first `n` questions; empty where no context has as many, or none of them counts."""
    sums, kept, spent = [], [], []
    for questions, answers in contexts:
        first = answers[answers[:, 0] < n]
        if questions < n or not len(first):
            continue
        _, scores, full, prefill, copy, rest = first.T.copy()
        sums.append((scores.sum(), full.sum(), len(first)))
        kept.append(not ((full > scores) if not stats.lower_is_better(metric) else (full < scores)).any())
        spent.append((prefill.mean() + copy.sum() + rest.sum(), prefill.sum() + rest.sum()))
    if not sums:
        return {}
    shared, one_by_one = np.array(spent).mean(axis=0)
    numbers = _quality(np.array(sums, dtype=np.float64), metric)
    del numbers["n"]  # of questions; contexts are what counts
    lost = {"none_lost": float(100 * np.mean(kept)), "shared_s": float(shared), "one_by_one_s": float(one_by_one)}
    return {"asked": n, "contexts": len(sums), **numbers, **lost}


def questions_columns(rows: Sequence[Row]) -> Columns:
    names = [METHOD_AND_SETTING, plain("kv_ratio", "kv_ratio"), plain("asked", "asked"), plain("contexts", "contexts")]
    return names, [
        numeric("score", "score", 2),
        numeric("full", "full", 2),
        *OF_FULL,
        numeric("none\nlost %", "none_lost", 0),
        Column("one\nprefill", "shared_s", seconds),
        Column("one by\none", "one_by_one_s", seconds),
        share("% of\ntime", "shared_s", "one_by_one_s", 0),
    ]


# --- turns, distance: conversations, by turn or by how long ago the fact asked for was mentioned


HISTORY = {
    "own": "its own answers stay",
    "full": "the full cache's answers stay",
    "reference": "the true answers stay, whatever was answered",
}
TURNS_LEGEND = (
    "turn: from 0; distance: turns since the fact asked for was mentioned; full: the full cache's mean score of the "
    "same turns in its own conversation; % of full with its 95 % interval over conversations; KL: nats per token from "
    "a full cache that was fed the same conversation, along the answers that stay in it; top-1: share of tokens that "
    "both rank first"
)


def turns_table(by: str, runs: Runs) -> pd.DataFrame:
    """A row per run and turn (or distance of the fact asked for) of runs of conversations. by: turn or distance.

    Columns: labels, history, turn or distance, n, metric, score and full (means), of_full with low and high (percent,
    95 % over conversations), kl (mean nats per token), top1, kl_tokens, hash. NaN where there is nothing. Scores are of
    turns that count, divergences of all.
    """
    rows = []
    for folder, baseline in runs.compared():
        infos, pairs = defaultdict[int, list[Row]](list), defaultdict[int, dict[str, list[tuple[float, float]]]](dict)
        for row in folder.scored.values():
            if "turn" in (row.get("info") or {}):
                infos[row["info"][by]].append(row["info"])
        for row, *scores in score_pairs(folder, baseline) if infos else ():
            conversation = str(row["example"]).rpartition(" turn ")[0]
            pairs[row["info"][by]].setdefault(conversation, []).append((scores[0], scores[1]))
        history = (folder.run.config.get("task") or {}).get("history") if infos else None
        common = {"history": history, "hash": folder.run.hash, "metric": folder.metrics[0]}
        for place in sorted(infos):
            sums = np.array([(*np.sum(both, axis=0), len(both)) for both in pairs[place].values()], dtype=np.float64)
            numbers = {by: place, **_quality(sums, folder.metrics[0]), **_mean_divergence(infos[place])}
            rows.append({**folder.labels, **common, **numbers})
    return pd.DataFrame(rows)


def _mean_divergence(infos: Sequence[Row]) -> dict[str, float]:
    """Means over tokens of what rows' info says of their divergence."""
    known = [info for info in infos if info.get("kl_tokens")]
    tokens = np.array([info["kl_tokens"] for info in known], dtype=np.float64)
    if not len(tokens):
        return {"kl": math.nan, "top1": math.nan, "kl_tokens": 0}
    values_by_name = {name: np.array([info[name] for info in known], dtype=np.float64) for name in ("kl", "top1")}
    means = {name: float((values * tokens).sum() / tokens.sum()) for name, values in values_by_name.items()}
    return means | {"kl_tokens": int(tokens.sum())}


def turns_heading(by: str, rows: Sequence[Row]) -> str:
    words = f"{metric_of(rows[0])} by {'turn' if by == 'turn' else 'turns since the fact asked for'}"
    history = rows[0]["history"]
    return words if absent(history) else f"{words}, {HISTORY.get(str(history), str(history))}"


def turns_columns(by: str, rows: Sequence[Row]) -> Columns:
    far = [numeric("KL", "kl", 4), numeric("top-1\n%", "top1", 1, 100), plain("kl_tokens", "tokens")]
    names = [METHOD_AND_SETTING, budget_column(rows), plain(by, by), N]
    return names, [numeric("score", "score", 2), numeric("full", "full", 2), *OF_FULL, *far]


# --- long: repetition, loops, length and ends of long answers, and divergence by position (task=long_answers)


FIRST_BIN = 64  # tokens; each further bin of positions reaches twice as far
LONG_LEGEND = (
    "tokens: mean of an answer, with its share of the full cache's; ended: answers that an end token ended; repeated: "
    "share of 4-grams of words that stood in the answer before; looped: answers with a passage that comes three times "
    "in a row, and the word at which it begins, mean over them; KL: nats per token from the full cache along its own "
    "answer, by the token's place in it (divergence=true)"
)


def long_table(runs: Runs) -> pd.DataFrame:
    """A row per run of task=long_answers, the full cache's too.

    Columns: labels, budget_tokens, n, tokens (mean of the answers), tokens_of_full (percent), ended, repeated, looped
    (percent), loop_at (mean word, of those that loop; NaN: none), kl_N for each bin of positions up to N (NaN where
    nothing was measured), hash.
    """
    rows = []
    for folder in in_order(runs.ran):
        scored = list(folder.scored.values())
        if not scored or folder.metrics[:2] != ["not_repeated", "loop_free"]:
            continue
        baseline = baseline_of(folder, runs.known)
        row: dict[str, Any] = {**folder.labels, "budget_tokens": folder.labels.get("tokens"), "n": len(scored)}
        row |= _measures(scored)
        full = [baseline.scored[name] for name in folder.scored if name in baseline.scored] if baseline else []
        row["tokens_of_full"] = 100 * row["tokens"] / _measures(full)["tokens"] if full else math.nan
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
        "loop_at": float(np.mean(begins)) if begins else math.nan,
    }


def _by_bin(folder: Folder) -> dict[str, float]:
    """kl_64, kl_128 …: the mean KL of the tokens at positions up to 64, 65 to 128, 129 to 256 …"""
    measured = divergence.per_example(folder.run, OWN)
    if measured is None:
        return {}
    frame, kl_by_bin = measured.by_position(), dict[str, float]()
    begin, end = 0, FIRST_BIN
    while begin < frame["position"].max():
        inside = frame[(frame["position"] > begin) & (frame["position"] <= end)]
        if inside["n"].sum():
            kl_by_bin[f"kl_{end}"] = float((inside["kl"] * inside["n"]).sum() / inside["n"].sum())
        begin, end = end, 2 * end
    return kl_by_bin


def _bins(row: Row) -> list[int]:
    """Ends of the bins of positions of which the row has a KL."""
    return sorted(int(name[3:]) for name in row if str(name).startswith("kl_") and not absent(row[name]))


def long_columns(rows: Sequence[Row]) -> Columns:
    names = [METHOD_AND_SETTING, plain("kv_ratio", "kv_ratio"), N]
    if all(absent(row.get("kv_ratio")) for row in rows):
        rest = ("method", "setting")
        method = Column("method", lambda row: run_name(without(row, "budget.tokens="), *rest), right=False)
        names[:2] = [method, plain("budget_tokens", "budget")]
    ends = sorted({end for row in rows for end in _bins(row)})
    return names, [
        numeric("tokens", "tokens", 1),
        numeric("% of\nfull", "tokens_of_full", 1),
        numeric("ended\n%", "ended", 1),
        numeric("repeated\n%", "repeated", 1),
        numeric("looped\n%", "looped", 1),
        numeric("loop at\nword", "loop_at", 0),
        *(numeric(f"KL to\n{end}", f"kl_{end}", 4) for end in ends),
    ]


# --- chunks: prompts read in chunks (prefill=bounded) and read whole: peak of keys and values, and quality


CHUNKS_LEGEND = (
    "chunk: tokens read between two evictions; whole: the prompt is read at once and evicted at its end; peak KV: the "
    "most bytes of keys and values of one prompt, of its reading and its answer; % of full: of the full cache's mean "
    "score, with its 95 % interval; KL: nats per token from the full cache along its own answer (divergence=true)"
)


def chunks_table(runs: Runs) -> pd.DataFrame:
    """The runs with a bounded prefill and those that differ from one of them in the prefill alone; a row each.

    Columns: labels, question, chunk (tokens, NaN: whole), n, metric, score, full, of_full with low and high (percent,
    95 %), peak_kv_bytes, full_peak_kv_bytes, kl with kl_low, kl_high and kl_tokens (NaN without divergence), hash.
    """
    known = {row["hash"]: row for row in records(runs.frame(quality.everything_table))}
    far = {row["hash"]: row for row in records(runs.frame(divergence.frame_of)) if row["text"] == OWN}
    rows: list[dict[str, Any]] = []
    for folder in runs.ran:
        if folder.is_baseline or not folder.metrics:
            continue
        main, full = known[folder.run.hash], known.get(folder.run.baseline or "", {})
        kl, metric = far.get(folder.run.hash, {}), folder.metrics[0]
        setting = _setting(folder, "prefill=", "prefill.chunk=")
        row = {**folder.labels, "setting": setting, "question": folder.question, "hash": folder.run.hash}
        row |= {"chunk": (folder.run.config.get("prefill") or {}).get("bounded_chunk"), "n": main["n"]}
        row |= {"metric": metric, "score": main[metric], "full": full.get(metric), "of_full": main[f"{metric}_of_full"]}
        row |= {"low": main[f"{metric}_low"], "high": main[f"{metric}_high"]}
        row |= {"peak_kv_bytes": main["peak_kv_bytes"], "full_peak_kv_bytes": full.get("peak_kv_bytes")}
        row |= {name: kl.get(name) for name in ("kl", "kl_low", "kl_high")} | {"kl_tokens": kl.get("tokens")}
        rows.append(row)
    names = ("numerics", "model", "task", "question", "method", "kv_ratio", "tokens", "setting")
    alike = [tuple(size_or_words(row.get(name)) for name in names) for row in rows]
    bounded = {key for row, key in zip(rows, alike, strict=True) if row["chunk"]}
    keyed = [(key, row["chunk"] or 0, row) for row, key in zip(rows, alike, strict=True) if key in bounded]
    return pd.DataFrame([row for *_, row in sorted(keyed, key=lambda keyed_row: keyed_row[:2])])


def chunks_columns(rows: Sequence[Row]) -> Columns:
    chunk = Column("chunk", lambda row: "whole" if absent(row["chunk"]) else str(int(row["chunk"])))
    return [METHOD_AND_SETTING, budget_column(rows), chunk, N], [
        Column("peak KV", "peak_kv_bytes", size),
        share("% of\nfull's", "peak_kv_bytes", "full_peak_kv_bytes", 1),
        numeric("score", "score", 2),
        *OF_FULL,
        numeric("KL", "kl", 4),
        interval("95 %", "kl_low", "kl_high", 4, of="kl"),
    ]


def along(column: str, *values: Callable[[Row], Value]) -> Callable[[Row], Iterator[Point]]:
    """Points of rows that have one each, placed by the number in a column."""

    def points(row: Row) -> Iterator[Point]:
        yield Point(f"{row[column]:g}", float(row[column]), row["hash"], [value(row) for value in values])

    return points


def long_points(row: Row) -> Iterator[Point]:
    """A point for each bin of positions."""
    for end in _bins(row):
        yield Point(f"to {end}", float(end), row["hash"], [alone(f"kl_{end}")(row)])


def chunk_points(row: Row) -> Iterator[Point]:
    words, order = ("whole", math.inf) if absent(row["chunk"]) else (f"{row['chunk']:g}", float(row["chunk"]))
    yield Point(words, order, row["hash"], [percent(row), _share(row, "peak_kv_bytes", "full_peak_kv_bytes")])


def percent(row: Row) -> Value:
    return row["of_full"], row["low"], row["high"]


def alone(column: str) -> Callable[[Row], Value]:
    """Value of a column without an interval."""
    return lambda row: (row[column], math.nan, math.nan)


def _share(row: Row, numerator: str, whole: str) -> Value:
    """Value of one column in percent of another."""
    known = not (absent(row[numerator]) or absent(row[whole])) and row[whole]
    return (100 * row[numerator] / row[whole] if known else math.nan, math.nan, math.nan)
