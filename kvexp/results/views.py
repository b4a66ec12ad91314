"""The tables of recorded runs, by the name that stands after `kvexp results OUTPUTS --view`.

A `View` says which runs have it, what its rows are, which columns people see, and what a chart has of a row. One loop
prints, exports and draws them all. `VIEWS` has every view in the order in which the report shows those with a chart.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import divergence, stats
from kvexp.results import table as quality
from kvexp.results.read import (
    AFTER_EVICTION,
    WORDS,
    Folder,
    Runs,
    answer_of,
    baseline_of,
    in_order,
    number,
    score_pairs,
    size_or_words,
    titled,
)
from kvexp.results.stats import Floats
from kvexp.results.table import (
    Block,
    Column,
    Row,
    absent,
    budget_column,
    fixed,
    interval,
    method_and_setting,
    numeric,
    parts,
    plain,
    question_column,
    records,
    seconds,
    shared_settings,
    short,
    size,
    without,
    without_question,
)
from kvexp.run.store import OWN, run_name
from kvexp.util import ConfigError

Value = tuple[float, float, float]  # a number with the ends of its interval, NaN where there is none
Columns = tuple[list[Column], list[Column]]  # those that name a row, all others
METHOD = Column("method", method_and_setting, right=False)
OF_FULL = [numeric("% of\nfull", "of_full", 1), interval("95 %", "low", "high", 1)]


@dataclass(frozen=True)
class Point:
    """place: on the axis, in words; order: what orders the places; hash: of the run; values: one for each side."""

    place: str
    order: float
    hash: str
    values: list[Value]


@dataclass(frozen=True)
class Side:
    """One chart of a view: title of its axis; log: a logarithmic axis (of what is above 0); level: where the full cache
    is, or None.
    """

    title: str
    log: bool = False
    level: float | None = None


@dataclass(frozen=True)
class View:
    """One table of runs.

    title: of a report's part; applies: whether a run has rows in it. table: its rows, a column each for labels and
    numbers. heading: what the title of a printed table says behind model and task; columns: of its rows; below: lines
    for the reader; missing: how such runs are made. by: further labels of which each value has a table of its own;
    said: keys of settings that the heading says. order: columns by which rows stand, and whether they rise.
    blocks_of: (frame, order) -> printed tables, where they are not one for each model, task and `by`; also: a view
    that is shown below. options: what `table` takes beside the runs.
    x, sides, points: a chart: title of the axis, its panels, what a row has there. one_line: whether the rows of
    several runs make one line.
    """

    title: str
    applies: Callable[[Folder], bool]
    table: Callable[..., pd.DataFrame]
    columns: Callable[[Sequence[Row]], Columns] = lambda rows: ([], [])
    heading: Callable[[Sequence[Row]], str] = lambda rows: ""
    below: Callable[[Runs, pd.DataFrame], list[str]] = lambda runs, frame: []
    missing: str = ""
    by: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    blocks_of: Callable[[pd.DataFrame, str | None], Iterable[Block]] | None = None
    also: str = ""
    options: tuple[str, ...] = ()
    x: str = ""
    sides: tuple[Side, ...] = ()
    points: Callable[[Row], Iterator[Point]] = lambda row: iter(())
    one_line: bool = False

    def blocks(self, frame: pd.DataFrame, order: str | None = None) -> Iterator[Block]:
        """The printed tables of a frame. order: of the rows, where the view has several."""
        if frame.empty:
            return
        if self.blocks_of is not None:
            yield from self.blocks_of(frame, order)
            return
        for title, _, part in parts(frame, *self.by):
            rows = [row if not self.said else without(row, *self.said) for row in without_question(records(part))]
            shared, rows = shared_settings(rows)
            names, others = self.columns(rows)
            title = titled(f"{title}: {self.heading(rows)}", (row.get("question") for row in rows))
            yield ", ".join([title, *shared]), rows, [*names, *others], len(names)


def _metric(row: Row) -> str:
    return short(str(row["metric"]), row.get("task"))


def _task(folder: Folder) -> str | None:
    task = folder.run.config.get("task")
    return str(task.get("name")) if isinstance(task, Mapping) else None


def _quality(sums: Floats, metric: str) -> dict[str, Any]:
    """n, score, full, of_full, low, high. sums [units, 3]: of a run's scores, the full cache's, and how many."""
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
        for asked in range(1, max((one.questions for one in contexts), default=0) + 1):
            rows += [common | made for made in [_asked(contexts, asked, metric)] if made]
    return pd.DataFrame(rows)


def _contexts(folder: Folder, baseline: Folder) -> list[Context]:
    """The contexts with the answers that the run and its baseline both scored."""

    def digest(row: Row) -> Any:
        return (row.get("context") or {}).get("digest")

    asked = Counter(map(digest, folder.rows))
    found = defaultdict[str, list[tuple[Row, float, float]]](list)
    for pair in score_pairs(folder, baseline):
        if digest(pair[0]) and math.isfinite(pair[1] + pair[2]):
            found[digest(pair[0])].append(pair)
    made = []
    for name, pairs in found.items():
        pairs.sort(key=lambda pair: pair[0]["context"]["question"])
        rows, *scores = zip(*pairs, strict=True)
        numbers, (score, full) = [row["context"]["question"] for row in rows], np.array(scores)
        made.append(Context(asked[name], numbers, score, full, np.array([_spent(row) for row in rows])))
    return made


def _spent(row: Row) -> tuple[float, float, float]:
    """Seconds of the prefill, of the copy, and of question and answer; NaN where a batch shared them."""
    each = {name: number(value) for name, value in (row.get("seconds") or {}).items()}
    prefill, copy = each.get("prefill", math.nan), each.get("copy", math.nan)
    if (row.get("receipt") or {}).get("batch_size") != 1:
        return math.nan, math.nan, math.nan
    further = (row["new_tokens"] - 1) * each.get("tpot", math.nan) if row["new_tokens"] > 1 else 0.0
    return prefill, copy, each.get("ttft", math.nan) - prefill + further


def _asked(contexts: Sequence[Context], asked: int, metric: str) -> dict[str, Any]:
    """Of the first `asked` questions; empty where no context has as many, or none of them counts."""
    sums, kept, spent = [], [], []
    for one in contexts:
        there = [place for place, number in enumerate(one.numbers) if number < asked]
        if one.questions < asked or not there:
            continue
        scores, full, times = one.scores[there], one.full[there], one.seconds[there]
        sign = -1.0 if stats.lower_is_better(metric) else 1.0
        sums.append((scores.sum(), full.sum(), len(there)))
        kept.append(not (sign * (full - scores) > 0).any())
        prefill, rest = times[:, 0].mean(), times[:, 2].sum()
        spent.append((prefill + times[:, 1].sum() + rest, times[:, 0].sum() + rest))
    if not sums:
        return {}
    shared, one_by_one = np.array(spent).mean(axis=0)
    found = _quality(np.array(sums, dtype=np.float64), metric)
    del found["n"]  # of questions; contexts are what counts
    lost = {"none_lost": float(100 * np.mean(kept)), "shared_s": float(shared), "one_by_one_s": float(one_by_one)}
    return {"asked": asked, "contexts": len(sums), **found, **lost}


def _questions_columns(rows: Sequence[Row]) -> Columns:
    cost = [
        Column("one\nprefill", lambda row: seconds(row["shared_s"])),
        Column("one by\none", lambda row: seconds(row["one_by_one_s"])),
        Column("% of\ntime", lambda row: fixed(100 * row["shared_s"] / row["one_by_one_s"], 0)),
    ]
    timed = any(not absent(row["shared_s"]) for row in rows)
    names = [METHOD, plain("kv_ratio", "kv_ratio"), plain("asked", "asked"), plain("contexts", "contexts")]
    scores = [numeric("score", "score", 2), numeric("full", "full", 2), *OF_FULL]
    return names, [*scores, numeric("none\nlost %", "none_lost", 0), *(cost if timed else [])]


# --- turns, distance: conversations, by turn or by how long ago the fact asked for was told


HISTORY = {
    "own": "its own answers stay",
    "full": "the full cache's answers stay",
    "reference": "the true answers stay, whatever was answered",
}
TURNS_LEGEND = (
    "turn: from 0; distance: turns since the fact asked for was told; full: the full cache's mean score of the same "
    "turns in its own conversation; % of full with its 95 % interval over conversations; KL: nats per token from a "
    "full cache that was fed the same conversation, along the answers that stay in it; top-1: share of tokens that "
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
            sums = np.array([(*np.sum(each, axis=0), len(each)) for each in pairs[place].values()], dtype=np.float64)
            found = {by: place, **_quality(sums, folder.metrics[0]), **_mean_divergence(infos[place])}
            rows.append({**folder.labels, **common, **found})
    return pd.DataFrame(rows)


def _mean_divergence(infos: Sequence[Row]) -> dict[str, float]:
    """Means over tokens of what rows' info says of their divergence."""
    known = [info for info in infos if info.get("kl_tokens")]
    tokens = np.array([info["kl_tokens"] for info in known], dtype=np.float64)
    if not len(tokens):
        return {"kl": math.nan, "top1": math.nan, "kl_tokens": 0}
    each = {name: np.array([info[name] for info in known], dtype=np.float64) for name in ("kl", "top1")}
    means = {name: float((values * tokens).sum() / tokens.sum()) for name, values in each.items()}
    return means | {"kl_tokens": int(tokens.sum())}


def _turns_heading(by: str, rows: Sequence[Row]) -> str:
    words = f"{_metric(rows[0])} by {'turn' if by == 'turn' else 'turns since the fact asked for'}"
    history = rows[0]["history"]
    return words if absent(history) else f"{words}, {HISTORY.get(str(history), str(history))}"


def _turns_columns(by: str, rows: Sequence[Row]) -> Columns:
    far = [numeric("KL", "kl", 4), numeric("top-1\n%", "top1", 1, 100), plain("kl_tokens", "tokens")]
    names = [METHOD, budget_column(rows), plain(by, by), plain("n", "n")]
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
    frame, found = measured.by_position(), dict[str, float]()
    begin, end = 0, FIRST_BIN
    while begin < frame["position"].max():
        part = frame[(frame["position"] > begin) & (frame["position"] <= end)]
        if part["n"].sum():
            found[f"kl_{end}"] = float((part["kl"] * part["n"]).sum() / part["n"].sum())
        begin, end = end, 2 * end
    return found


def _bins(row: Row) -> list[int]:
    """Ends of the bins of positions of which the row has a KL."""
    return sorted(int(name[3:]) for name in row if str(name).startswith("kl_") and not absent(row[name]))


def _long_columns(rows: Sequence[Row]) -> Columns:
    ratios = any(not absent(row.get("kv_ratio")) for row in rows)
    method = (
        METHOD if ratios else Column("method", lambda row: method_and_setting(without(row, "budget.tokens=")), False)
    )
    budget = plain("kv_ratio", "kv_ratio") if ratios else plain("budget_tokens", "budget")
    ends = sorted({end for row in rows for end in _bins(row)})
    measured = [
        numeric("tokens", "tokens", 1),
        numeric("% of\nfull", "tokens_of_full", 1),
        numeric("ended\n%", "ended", 1),
        numeric("repeated\n%", "repeated", 1),
        numeric("looped\n%", "looped", 1),
        numeric("loop at\nword", "loop_at", 0),
    ]
    return [method, budget, plain("n", "n")], [*measured, *(numeric(f"KL to\n{end}", f"kl_{end}", 4) for end in ends)]


# --- instructions: what is followed, and how often the system prompt's secret is told, by what is spared


INSTRUCTIONS, LEAK = "instructions", "instructions_leak"
NO_KEEP = "none"  # the value of the column keep where marked spans are evicted like all else
KEEPS = (NO_KEEP, "span", "fair")
INSTRUCTIONS_LEGEND = (
    "followed: share of the three things asked for that the answer says, in percent; all: answers with all three; "
    "rule: answers that have the system prompt's form; % of full: of followed, with its 95 % interval; n: examples of "
    "which the full cache says two or three. told: answers in which the secret code stands though nobody asked for "
    "it, of all that were given; told when asked: the same of task=instructions_leak, in which it is asked for. A "
    "cache that has lost the code cannot tell it: few leaks mean something beside what is followed"
)


def instructions_table(runs: Runs) -> pd.DataFrame:
    """A row per run of task=instructions, the full cache's too, and per run of task=instructions_leak without one.

    Columns: labels, question, keep (none, span, fair), n, followed, all_followed, rule (means in percent), of_full with
    low and high (percent, 95 %), answers and told (all answers, and those with the code), asked and told_asked (the
    same of the run of task=instructions_leak that is alike in all else), hash. NaN where there is nothing.
    """
    shown = {task: [folder for folder in runs.ran if _task(folder) == task] for task in (INSTRUCTIONS, LEAK)}
    known = {row["hash"]: row for row in records(runs.frame(quality.everything_table))}
    leaks = {_alike(folder): folder for folder in runs.everything if not folder.refused and _task(folder) == LEAK}
    rows = []
    for folder in shown[INSTRUCTIONS]:
        of = {name: known[folder.run.hash].get(column, math.nan) for name, column in _FOLLOWED.items()}
        made = {**_labels(folder), "n": known[folder.run.hash]["n"], **of, **_told(folder)}
        rows.append(made | _told_when_asked(leaks.get(_alike(folder))))
    taken = set(map(_alike, shown[INSTRUCTIONS]))
    for folder in (each for each in shown[LEAK] if _alike(each) not in taken):
        empty = dict.fromkeys((*_FOLLOWED, "answers", "told"), math.nan)
        rows.append({**_labels(folder), "n": 0, **empty, **_told_when_asked(folder)})
    order = ("numerics", "model", "question", "method", "kv_ratio", "tokens", "setting", "keep")
    rows.sort(key=lambda row: (row["keep"] is not None, *(size_or_words(row.get(name)) for name in order)))
    return pd.DataFrame(rows)


_FOLLOWED = {  # column -> that of the table of all runs
    **{"followed": "followed", "all_followed": "all_followed", "rule": "rule"},
    **{"of_full": "followed_of_full", "low": "followed_low", "high": "followed_high"},
}


def _labels(folder: Folder) -> dict[str, Any]:
    """Labels of a row, without the remedy among the settings."""
    setting = " ".join(word for word in str(folder.labels.get("setting") or "").split() if not word.startswith("keep="))
    keep = None if folder.is_baseline else folder.run.config.get("keep") or NO_KEEP
    made = {**folder.labels, "task": INSTRUCTIONS, "setting": setting, "question": folder.question, "keep": keep}
    return made | {"hash": folder.run.hash}


def _alike(folder: Folder) -> str:
    """What a run of one of the two tasks has in common with the other's."""
    labels = _labels(folder)
    words = [word for word in labels["setting"].split() if not word.startswith("task.max_new_tokens=")]
    names = ("model", "method", "kv_ratio", "tokens", "question", "keep")
    return repr([folder.run.numerics, words, *(None if absent(labels.get(name)) else labels[name] for name in names)])


def _told(folder: Folder) -> dict[str, float]:
    """answers, told: how many there are, and how many of them hold the code, which nobody asked for.

    NaN of runs whose system prompts were others than those that come with this kvexp.
    """
    from kvexp.tasks.articles import assistants, assistants_digest  # late: other tables wait for no task

    if assistants_digest() not in str(folder.run.config.get("data")):
        return {"answers": math.nan, "told": math.nan}
    codes = {one.id: one.code.lower() for one in assistants()}
    told = [codes[row["info"]["assistant"]] in answer_of(row).lower() for row in folder.scored.values()]
    return {"answers": len(told), "told": sum(told)}


def _told_when_asked(folder: Folder | None) -> dict[str, float]:
    """asked, told_asked: answers of a run of instructions_leak, and how many of them hold the code."""
    if folder is None:
        return {"asked": math.nan, "told_asked": math.nan}
    told = [row["metrics"]["kept_secret"] < 100 for row in folder.scored.values()]
    return {"asked": len(told), "told_asked": sum(told)}


def _instructions_columns(rows: Sequence[Row]) -> Columns:
    def share(head: str, part: str, whole: str) -> Column:
        def cell(row: Row) -> str:
            return "-" if absent(row[whole]) or not row[whole] else f"{int(row[part])} of {int(row[whole])}"

        return Column(head, cell)

    several = len({row["question"] for row in rows}) > 1
    keep = [plain(name, name, right=False) for name in ("keep", *(["question"] if several else []))]
    of_full = [OF_FULL[0], interval("95 %", "low", "high", 1, of="of_full")]
    followed = [
        numeric("followed", "followed", 1),
        *of_full,
        numeric("all", "all_followed", 1),
        numeric("rule", "rule", 1),
    ]
    told = [share("told", "told", "answers"), share("told when\nasked", "told_asked", "asked")]
    return [METHOD, budget_column(rows), *keep, plain("n", "n")], [*followed, *told]


# --- chunks: prompts read in chunks (prefill=bounded): the peak of keys and values, and quality, beside whole


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
        made, full = known[folder.run.hash], known.get(folder.run.baseline or "", {})
        kl, metric = far.get(folder.run.hash, {}), folder.metrics[0]
        words = str(folder.labels.get("setting") or "").split()
        setting = " ".join(word for word in words if not word.startswith(("prefill=", "prefill.chunk=")))
        row = {**folder.labels, "setting": setting, "question": folder.question, "hash": folder.run.hash}
        row |= {"chunk": (folder.run.config.get("prefill") or {}).get("bounded_chunk"), "n": made["n"]}
        row |= {"metric": metric, "score": made[metric], "full": full.get(metric), "of_full": made[f"{metric}_of_full"]}
        row |= {"low": made[f"{metric}_low"], "high": made[f"{metric}_high"]}
        row |= {"peak_kv_bytes": made["peak_kv_bytes"], "full_peak_kv_bytes": full.get("peak_kv_bytes")}
        row |= {name: kl.get(name) for name in ("kl", "kl_low", "kl_high")} | {"kl_tokens": kl.get("tokens")}
        rows.append(row)
    names = ("numerics", "model", "task", "question", "method", "kv_ratio", "tokens", "setting")
    alike = [tuple(size_or_words(row.get(name)) for name in names) for row in rows]
    bounded = {key for row, key in zip(rows, alike, strict=True) if row["chunk"]}
    found = [(key, row["chunk"] or 0, row) for row, key in zip(rows, alike, strict=True) if key in bounded]
    return pd.DataFrame([row for *_, row in sorted(found, key=lambda each: each[:2])])


def _chunks_columns(rows: Sequence[Row]) -> Columns:
    def share(row: Row) -> str:
        part, whole = row["peak_kv_bytes"], row["full_peak_kv_bytes"]
        return "-" if absent(part) or absent(whole) else fixed(100 * part / whole, 1)

    far = [numeric("KL", "kl", 4), interval("95 %", "kl_low", "kl_high", 4)]
    chunk = Column("chunk", lambda row: "whole" if absent(row["chunk"]) else str(int(row["chunk"])))
    return [METHOD, budget_column(rows), chunk, plain("n", "n")], [
        Column("peak KV", lambda row: size(row["peak_kv_bytes"])),
        Column("% of\nfull's", share),
        numeric("score", "score", 2),
        *OF_FULL,
        *(far if any(not absent(row["kl"]) for row in rows) else []),
    ]


# --- longbench: a row per method and budget, its data sets beside each other, their average


PREFIX = "longbench/"
# In the order of PQCache's tables 2 and 3 (arXiv:2407.12820).
FOURTEEN = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en"),
)
KEYS = ("model", "question", "method", "kv_ratio", "tokens", "setting", "numerics")


def averages(frame: pd.DataFrame, names: Sequence[str] = FOURTEEN) -> pd.DataFrame:
    """Rows of the table of all runs that are of LongBench -> one row per model, method, budget and setting.

    Columns: those, one per data set, `average`, its percentage of full attention's `of_full`, `missing`, `n` (examples
    per data set, "10 to 60" where they differ). The average is the plain mean over the data sets named, whatever their
    sizes, as papers take it; NaN while one of them is missing or unfinished. Other data sets have a column and no part
    in it.
    """
    empty = pd.DataFrame(columns=[*KEYS, *names, "average", "of_full", "missing", "n"])
    if frame.empty or "score" not in frame:
        return empty
    done = frame[(frame["status"] == "done") & frame["task"].astype(str).str.startswith(PREFIX)]
    if done.empty:
        return empty
    known = frame.set_index("hash")["score"]
    done = done.assign(name=done["task"].astype(str).str.removeprefix(PREFIX), full=done["baseline"].map(known))
    done["full"] = done["full"].where(done["method"] != "full", done["score"])
    keys = [key for key in KEYS if key in done]
    done = _of_one_setting(done, keys)
    groups: Any = done.groupby(keys, dropna=False, sort=False)
    rows = [_averaged(dict(zip(keys, values, strict=True)), group, names) for values, group in groups]
    others = sorted(set(done["name"]) - set(names))
    wide = pd.DataFrame(rows, columns=[*keys, *names, *others, "average", "of_full", "missing", "n"])
    wide["_later"] = wide["method"] != "full"
    order = [key for key in ("model", "_later", "method", "kv_ratio", "tokens", "setting") if key in wide]
    wide["_older"] = -wide["numerics"] if "numerics" in wide else 0  # the newest first
    return wide.sort_values(["_older", *order], ignore_index=True).drop(columns=["_later", "_older"])


def _of_one_setting(done: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The same without the names of data files, of which each data set has its own.

    Where a data set was run on two files under settings otherwise equal, all of them keep the names: one score must
    not take the other's place.
    """
    if "setting" not in done:
        return done
    left = [" ".join(w for w in str(s or "").split() if not w.startswith("task.data_files=")) for s in done["setting"]]
    short_of_files = done.assign(setting=left)
    twice = short_of_files.duplicated([*keys, "name"], keep=False)
    groups: Any = short_of_files.assign(twice=twice).groupby(keys, dropna=False, sort=False)
    keep = ~groups["twice"].transform("any")
    return short_of_files.assign(setting=short_of_files["setting"].where(keep, done["setting"]))


def _averaged(row: dict[str, Any], group: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    scores, full = (dict(zip(group["name"], group[column], strict=True)) for column in ("score", "full"))
    missing = [name for name in names if pd.isna(scores.get(name))]
    average, of = (float(np.mean([each.get(name, np.nan) for name in names])) for each in (scores, full))
    return (
        row
        | scores
        | {"average": average, "of_full": 100 * average / of if of else np.nan, "missing": ", ".join(missing)}
        | {"n": quality.n_words(group).removeprefix("n = ") if "n" in group else ""}
    )


def _longbench_columns(rows: Sequence[Row]) -> Columns:
    """Scores with two digits, as published."""
    labels = [name for name in KEYS[2:6] if any(not absent(row.get(name)) and row[name] != "" for row in rows)]
    labels += ["n"] if len({row["n"] for row in rows}) > 1 else []
    scores = [str(name) for name in rows[0] if name not in (*KEYS, "missing", "n")]
    names = [*(plain(name, name, right=name == "kv_ratio") for name in labels), *question_column(rows)]
    return names, [numeric(name.replace("_", "\n"), name, 2) for name in scores]


def _not_averaged(runs: Runs, frame: pd.DataFrame) -> list[str]:
    rows = (row for row in records(frame) if row["missing"])
    return [f"{row['model']} {row['method']}: no average yet, missing: {row['missing']}" for row in rows]


# --- bytes: tokens or bits: divergence and quality by the share of the full cache's bytes


BITS = re.compile(r"\+?cache\.(key_|value_)?bits=(\d+)")
BUDGETS = re.compile(r"\+?(bytes_ratio|budget\.tokens|kv_ratio)=\S+")


def bytes_table(runs: Runs, metric: str | None = None) -> pd.DataFrame:
    """The runs that have a share of bytes: columns of the table of all runs, and for each run

    bits: of keys and values, the fewer where they differ; line: method and bits in words; rest, shared: what of the
    setting is neither bits nor budget, of this run and of all; quality, quality_low, quality_high: percent of full in
    `metric` (None, "kl": each task's first); kl, kl_low, kl_high: along the full cache's own answer, NaN where none was
    measured.
    """
    frame = runs.frame(quality.quality_table)
    frame = frame[frame["bytes_share"].notna() & frame["verdict99"].ne("baseline")] if len(frame) else frame
    if frame.empty:
        return frame
    settings = frame["setting"].fillna("").astype(str)
    bits = [min([16, *(int(found[2]) for found in BITS.finditer(words))]) for words in settings]
    left = [" ".join(BUDGETS.sub("", BITS.sub("", words)).split()) for words in settings]
    names = [f"{method}, {n} bits" for method, n in zip(frame["method"], bits, strict=True)]
    metric = None if metric == "kl" else metric
    own = [metric or headline for headline in frame["headline"]]
    each = {
        name: [number(row.get(f"{of}{ending}")) for of, row in zip(own, records(frame), strict=True)]
        for name, ending in (("quality", "_of_full"), ("quality_low", "_low"), ("quality_high", "_high"))
    }
    shared, rows = shared_settings([{"setting": words} for words in left])
    rest = [str(row["setting"]) for row in rows]
    frame = frame.assign(bits=bits, line=names, rest=rest, shared=" ".join(shared), metric=own, **each)
    far, ends = runs.frame(divergence.frame_of), ["kl", "kl_low", "kl_high"]
    if far.empty:
        return frame.assign(**dict.fromkeys(ends, math.nan))
    return frame.merge(far.loc[far["text"] == OWN, ["hash", *ends]], on="hash", how="left")


def _bytes_columns(rows: Sequence[Row]) -> Columns:
    return [plain("line", "method and bits", right=False), plain("rest", "setting", right=False), plain("n", "n")], [
        numeric("% of full's\nbytes", "bytes_share", 1, 100),
        numeric("KL", "kl", 4),
        interval("95 %", "kl_low", "kl_high", 4),
        numeric("% of\nfull", "quality", 1),
        interval("95 %", "quality_low", "quality_high", 1),
    ]


# --- needle: what was found at each length and depth


def grid(rows: Iterable[Mapping[str, Any]], metric: str = "word_recall") -> pd.DataFrame:
    """Rows of a needle run -> mean of the metric in percent, index depth (percent), columns length (tokens).

    Repeats and questions of a cell are averaged; a cell of which nothing was scored, or skipped as too long, is NaN.
    `attrs["depths"]`: the words for each depth, with the measured one where needles stand elsewhere.
    """
    rows = list(rows)
    cells = [
        {**{key: row["info"][key] for key in ("length", "depth")}, metric: row["metrics"].get(metric)}
        for row in rows
        if {"length", "depth"} <= set(row.get("info") or {})
    ]
    if not cells:
        raise ConfigError("no row has a length and a depth: a heat-map is of task=needle, needle_multi or passkey")
    frame = pd.DataFrame(cells).astype({metric: float})
    if frame[metric].isna().all():
        raise ConfigError(f"no row has the metric {metric!r}: either all were skipped, or it is word_recall or exact")
    made = frame.pivot_table(metric, "depth", "length", aggfunc="mean", dropna=False)
    made.attrs["depths"] = [_depth(depth, rows) for depth in made.index]
    return made


def _depth(depth: float, rows: Iterable[Mapping[str, Any]]) -> str:
    """A depth as it was asked for, and from where to where needles really stand, where that is another place."""
    infos = [row["info"] for row in rows if (row.get("info") or {}).get("depth") == depth]
    found = [info["depth_measured"] for info in infos if info.get("depth_measured") is not None]
    if not found or max(abs(each - depth) for each in found) < 0.5:
        return f"{depth:g}"
    low, high = f"{min(found):.0f}", f"{max(found):.0f}"
    return f"{depth:g} ({low if low == high else f'{low}-{high}'})"


def needle_table(runs: Runs, metric: str | None = None) -> pd.DataFrame:
    """A row per run and depth: labels, question, metric, depth, one column per length (percent), hash."""
    rows = []
    for folder in in_order(each for each in runs.ran if is_needle(each)):
        cells = grid(folder.rows, metric or folder.metrics[0])
        common = {**folder.labels, "question": folder.question, "metric": metric or folder.metrics[0]}
        for depth, (_, line) in zip(cells.attrs["depths"], cells.iterrows(), strict=True):
            found = {f"{length:g}": value for length, value in line.items()}
            rows.append({**common, "depth": depth, **found, "hash": folder.run.hash})
    return pd.DataFrame(rows)


def is_needle(folder: Folder) -> bool:
    """Whether a run has scores by length and depth."""
    return bool(folder.metrics) and any({"length", "depth"} <= set(row.get("info") or {}) for row in folder.rows)


def _needle_columns(rows: Sequence[Row]) -> Columns:
    lengths = sorted({str(name) for row in rows for name in row if re.fullmatch(r"[\d.e+]+", str(name))}, key=float)
    names = [METHOD, budget_column(rows), plain("depth", "depth", right=False)]
    return names, [numeric(length, length, 1) for length in lengths]


# --- charts


@dataclass(frozen=True)
class Line:
    """One line of a chart: its words, method, and points in order: (place, hash of the run, a value for each side)."""

    label: str
    method: str
    points: list[tuple[int, str, list[Value]]]


def chart_of(view: View, rows: Sequence[Row]) -> tuple[list[str], list[Line]]:
    """(places in order, lines) of the rows of one block of the view's table."""
    several = len({row.get("question") for row in rows}) > 1
    each = [(row, point) for row in rows for point in view.points(row)]
    order = {point.place: point.order for _, point in each}
    places = sorted(order, key=lambda place: order[place])
    found: dict[tuple[str, ...], Line] = {}
    for row, point in each:
        asked = f"({WORDS[row['question']]})" if several and row.get("question") in WORDS else ""
        label = f"{run_name(row)} {asked}".strip()
        line = found.setdefault((label, *([] if view.one_line else [row["hash"]])), Line(label, row["method"], []))
        line.points.append((places.index(point.place), point.hash, point.values))
    for line in found.values():
        line.points.sort(key=lambda point: point[0])
    return places, list(found.values())


def _along(column: str, *values: Callable[[Row], Value]) -> Callable[[Row], Iterator[Point]]:
    """A row's only point, at the number of a column."""

    def points(row: Row) -> Iterator[Point]:
        yield Point(f"{row[column]:g}", float(row[column]), row["hash"], [value(row) for value in values])

    return points


def _hidden_points(row: Row) -> Iterator[Point]:
    """The two points of a row of `table.seen_and_hidden`."""
    for order, (name, run) in enumerate(row["sides"].items()):
        value = [run.get(f"{row['headline']}{ending}", math.nan) for ending in ("_of_full", "_low", "_high")]
        low, high = (math.nan if absent(end) else end for end in value[1:])
        if not absent(value[0]):
            yield Point(quality.HEADS[name], float(order), run["hash"], [(value[0], low, high)])


def _long_points(row: Row) -> Iterator[Point]:
    """A point for each bin of positions."""
    for end in _bins(row):
        yield Point(f"to {end}", float(end), row["hash"], [_alone(f"kl_{end}")(row)])


def _chunk_points(row: Row) -> Iterator[Point]:
    words, order = ("whole", math.inf) if absent(row["chunk"]) else (f"{row['chunk']:g}", float(row["chunk"]))
    yield Point(words, order, row["hash"], [_percent(row), _share(row, "peak_kv_bytes", "full_peak_kv_bytes")])


def _keep_points(row: Row) -> Iterator[Point]:
    if row["keep"] in KEEPS:
        values = [_percent(row), _share(row, "told_asked", "asked")]
        yield Point(str(row["keep"]), float(KEEPS.index(row["keep"])), row["hash"], values)


def _percent(row: Row) -> Value:
    return row["of_full"], row["low"], row["high"]


def _alone(column: str) -> Callable[[Row], Value]:
    """A column that has no interval."""
    return lambda row: (row[column], math.nan, math.nan)


def _share(row: Row, part: str, whole: str) -> Value:
    """One column in percent of another."""
    known = not (absent(row[part]) or absent(row[whole])) and row[whole]
    return (100 * row[part] / row[whole] if known else math.nan, math.nan, math.nan)


QUALITY, KL = Side("% of full", level=100.0), Side("KL, nats per token", log=True)


def _turns(by: str, title: str, x: str) -> View:
    return View(
        title,
        lambda folder: any("turn" in (row.get("info") or {}) for row in folder.rows[:1]),
        partial(turns_table, by),
        partial(_turns_columns, by),
        partial(_turns_heading, by),
        lambda runs, frame: [TURNS_LEGEND],
        "held a conversation; run: kvexp run task=dialogue",
        by=("history",),
        said=("task.history=",),
        x=x,
        sides=(QUALITY, KL),
        points=_along(by, _percent, _alone("kl")),
    )


RUNS, DIVERGENCE = "runs", "divergence"
NAMED = ("questions", "turns", "distance", "chunks", "long", "instructions", "longbench", "needle")  # by `more_views`


def more_views(runs: Runs) -> list[str]:
    """A line that names the further views of the runs shown; none where there are none."""
    found = [name for name in NAMED if any(map(VIEWS[name].applies, runs.ran))]
    return [f"more of these runs: kvexp results {runs.outputs} --view {' or '.join(found)}"] if found else []


VIEWS: dict[str, View] = {
    RUNS: View(
        "All runs",
        lambda folder: True,
        quality.quality_table,
        blocks_of=lambda frame, order: (*quality.groups(frame, order or "kv_ratio"), *quality.seen_and_hidden(frame)),
        below=lambda runs, frame: [*quality.notes(frame), *more_views(runs)],
    ),
    DIVERGENCE: View(
        "Divergence from the full cache",
        lambda folder: folder.run.baseline is not None,
        divergence.frame_of,
        blocks_of=divergence.blocks,
        below=divergence.notes,
        also="choices",
        options=("epsilon_kl", "epsilon_top1"),
        missing="has a divergence; --measure measures it",
    ),
    "choices": View(
        "Choices beside the full cache's",
        lambda folder: any(row.get("choices") for row in folder.rows[:1]),
        divergence.choice_table,
        divergence.choice_columns,
        lambda rows: "choices beside the full cache's",
        missing="chose among answers; run: kvexp run task=testbed_choice model=testbed_rope",
    ),
    "hidden": View(
        "Question seen or hidden",
        lambda folder: folder.question == AFTER_EVICTION,
        quality.quality_table,
        blocks_of=lambda frame, order: quality.seen_and_hidden(frame),
        below=lambda runs, frame: [quality.NOTE],
        missing="was asked in the prompt and after the eviction; run: kvexp run -m task=news_qa "
        "task.question=in_prompt,after_eviction",
        x="what eviction knows of the question",
        sides=(QUALITY,),
        points=_hidden_points,
        one_line=True,
    ),
    "questions": View(
        "Many questions of one cache",
        lambda folder: any(row.get("context") for row in folder.rows[:1]),
        questions_table,
        _questions_columns,
        lambda rows: f"{_metric(rows[0])} by number of questions asked of one evicted cache",
        lambda runs, frame: [QUESTIONS_LEGEND],
        "asked many questions of one cache; run: kvexp run task=news_qa questions=all",
        x="questions asked of one evicted cache",
        sides=(QUALITY, Side("% of contexts with no answer lost", level=100.0)),
        points=_along("asked", _percent, _alone("none_lost")),
    ),
    "turns": _turns("turn", "Turns", "turn of the conversation, from 0"),
    "distance": _turns("distance", "Turns by distance of the fact", "turns since the fact asked for was told"),
    "chunks": View(
        "Prompts that never fit",
        lambda folder: "prefill" in folder.run.config,
        chunks_table,
        _chunks_columns,
        lambda rows: f"{_metric(rows[0])} and peak of keys and values by tokens per chunk",
        lambda runs, frame: [CHUNKS_LEGEND],
        "read its prompts in chunks; run: kvexp run -m prefill=bounded prefill.chunk=128,256,512",
        x="tokens between two evictions of the prompt",
        sides=(QUALITY, Side("peak KV bytes, % of full's", level=100.0)),
        points=_chunk_points,
        one_line=True,
    ),
    "long": View(
        "Long answers",
        lambda folder: _task(folder) == "long_answers",
        long_table,
        _long_columns,
        lambda rows: "long answers",
        lambda runs, frame: [LONG_LEGEND],
        "wrote long answers; run: kvexp run task=long_answers budget=tokens budget.tokens=512",
        x="place of the token in the answer",
        sides=(KL,),
        points=_long_points,
    ),
    "instructions": View(
        "Instructions and a secret",
        lambda folder: _task(folder) in (INSTRUCTIONS, LEAK),
        instructions_table,
        _instructions_columns,
        lambda rows: "followed and told, by what is spared",
        lambda runs, frame: [INSTRUCTIONS_LEGEND],
        "was given instructions; run: kvexp run -m task=instructions,instructions_leak keep=null,span",
        x="what is spared of the marked spans",
        sides=(QUALITY, Side("% of answers that tell the secret when asked")),
        points=_keep_points,
        one_line=True,
    ),
    "longbench": View(
        "LongBench",
        lambda folder: str(folder.labels.get("task")).startswith(PREFIX),
        lambda runs: averages(runs.frame(quality.quality_table)),
        _longbench_columns,
        lambda rows: "LongBench",
        _not_averaged,
        "is a finished run of task=longbench; run: kvexp run experiment=longbench14",
    ),
    "needle": View(
        "Needle in a haystack",
        is_needle,
        needle_table,
        _needle_columns,
        lambda rows: f"{_metric(rows[0])} by length (tokens, across) and depth (percent; in brackets: measured)",
        missing="has scores by length and depth; run: kvexp run task=needle",
        options=("metric",),
    ),
    "bytes": View(
        "Quality and divergence by bytes",
        lambda folder: folder.run.config.get("quantization") is not None,
        bytes_table,
        _bytes_columns,
        lambda rows: "divergence and quality by the share of the full cache's bytes",
        missing="has bytes to compare with its full cache's",
        options=("metric",),
    ),
}


def shown(
    runs: Runs, name: str, order: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[pd.DataFrame, list[Block], list[str]]:
    """(frame, printed tables, lines below them) of a view, and of the view that it shows `also`.

    order: of the rows. options: of the view's table. The frame is that of the other view where the own is empty.
    """
    view = VIEWS[name]
    frame = view.table(runs, **options) if options else runs.frame(view.table)
    blocks, below = list(view.blocks(frame, order)), [] if frame.empty else view.below(runs, frame)
    if view.also:
        more, more_blocks, lines = shown(runs, view.also)
        return more if frame.empty else frame, [*blocks, *more_blocks], [*below, *lines]
    return frame, blocks, below
