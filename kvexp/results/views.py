"""Tables by question, turn, instruction, length, chunk and data set."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from kvexp.results import stats
from kvexp.results import stats as intervals
from kvexp.results.divergence import by_position, divergence_table
from kvexp.results.read import (
    AFTER_EVICTION,
    WORDS,
    Folder,
    Row,
    add_choice,
    answer_of,
    baseline_of,
    chosen,
    chosen_by,
    folders,
    in_order,
    number,
    size_or_words,
    titled,
)
from kvexp.results.stats import Floats
from kvexp.results.table import (
    HEADS,
    NOTE,
    TOO_FEW,
    Block,
    Column,
    absent,
    fixed,
    method_and_setting,
    n_words,
    parts,
    plain,
    print_blocks,
    seconds,
    seen_and_hidden,
    shared_settings,
    short,
    size,
    table,
    without_question,
    without_tokens,
)
from kvexp.results.table import Row as Row_of_table
from kvexp.run.store import OWN, read, run_name
from kvexp.util import ConfigError, Console, say

# The command of a table that is read from a folder of runs: its arguments, the CSV file, the errors, the exit code.


def parser_of(doc: str, prog: str) -> argparse.ArgumentParser:
    """The parser of such a command: folder, --where, --csv. doc: of the module, whose first line describes it."""
    parser = argparse.ArgumentParser(prog=prog, description=doc.splitlines()[0])
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    read: Callable[..., pd.DataFrame],
    show: Callable[..., None],
    *options: str,
) -> int:
    """0 if there was something to show, 2 if not.

    read(outputs, wanted, **options): the table; show(frame, console=…, **options): prints it. options: names of
    arguments of the parser that both take.
    """
    args = parser.parse_args(argv)
    more: dict[str, Any] = {name: getattr(args, name) for name in options}
    try:
        frame = read(args.outputs, chosen_by(args), **more)
        if args.csv is not None:
            frame.to_csv(args.csv, index=False)
        show(frame, console=Console(markup=False), **more)
    except (ConfigError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0


MANY_QUESTIONS_DOC = """Runs of questions=all by the number of questions asked of one evicted cache: what is lost, and
what it costs.

kvexp many-questions outputs/
"""


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
    return run_command(
        parser_of(MANY_QUESTIONS_DOC, prog="kvexp many-questions"), argv, read_questions, print_questions
    )


TURNS_DOC = """Runs of conversations turn by turn: quality, and divergence from the full cache in the same conversation.

kvexp turns outputs/
"""


BY = ("turn", "distance")
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
    far, pairs = (
        defaultdict[int, list[Row_of_table]](list),
        defaultdict[int, dict[str, list[tuple[float, float]]]](dict),
    )
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


def _conversation(row: Row_of_table) -> str:
    """What the turns of one conversation share: their ids without the turn."""
    return str(row["example"]).rpartition(" turn ")[0]


def _quality(sums: Floats, metric: str) -> dict[str, Any]:
    """sums [conversations, 3]: of the run's scores, the full cache's, and how many."""
    if not len(sums):
        return {"n": 0, "score": np.nan, "full": np.nan, "of_full": np.nan, "low": np.nan, "high": np.nan}
    top, bottom, count = sums.T
    score, full = float(top.sum() / count.sum()), float(bottom.sum() / count.sum())
    low, high = _turns_interval(top, bottom)
    of_full = float(stats.percent(metric, score, full)) if full else np.nan
    return {"n": int(count.sum()), "score": score, "full": full, "of_full": of_full, "low": low, "high": high}


def _turns_interval(top: Floats, bottom: Floats) -> tuple[float, float]:
    """Of sum(top) / sum(bottom) in percent, an entry per conversation; NaN for few of them."""
    if len(top) < stats.MIN_PAIRS or not bottom.any():
        return intervals.NONE
    if intervals.is_all_or_nothing(top, bottom):
        low, high = intervals.share_ratio_interval(top, bottom, stats.LEVEL)
    else:
        resampled = stats.resampled_means(intervals.ratio_moments(top, bottom), stats.resamples_for(stats.LEVEL))
        low, high = intervals.ratio_interval(top, bottom, resampled, stats.LEVEL)
    return 100 * low, 100 * high


def _divergence(infos: Sequence[Row_of_table]) -> dict[str, float]:
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
        yield ", ".join(words + shared), rows, _turns_columns(rows, by), 4


def print_turns(frame: pd.DataFrame, by: str, console: Console) -> None:
    """A table per model, task and history of a frame of `turns_table`."""
    print_blocks(turn_blocks(frame, by), [TURNS_LEGEND], console)


def _turns_columns(rows: Sequence[Row_of_table], by: str) -> list[Column]:
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


def turns_main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    parser = parser_of(TURNS_DOC, prog="kvexp turns")
    parser.add_argument("--by", choices=BY, default="turn", help="turn, or distance of the fact asked for")
    return run_command(parser, argv, read_turns, print_turns, "by")


LONG_ANSWERS_DOC = """Runs of long answers: repetition, loops, length and ends beside the full cache's, and divergence
by position.

kvexp long-answers outputs/
"""


FIRST_BIN = 64  # tokens; each further bin of positions reaches twice as far
LONG_ANSWERS_LEGEND = (
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


def _measures(rows: Sequence[Row_of_table]) -> dict[str, float]:
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
        yield ", ".join([f"{title}: long answers", *shared]), rows, _long_answers_columns(rows), 3


def print_long(frame: pd.DataFrame, console: Console) -> None:
    """A table per model and task of a frame of `long_table`."""
    print_blocks(long_blocks(frame), [LONG_ANSWERS_LEGEND], console)


def _long_answers_columns(rows: Sequence[Row_of_table]) -> list[Column]:
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


def _budget(row: Row_of_table) -> str:
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


def long_answers_main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(parser_of(LONG_ANSWERS_DOC, prog="kvexp long-answers"), argv, read_long, print_long)


INSTRUCTIONS_DOC = """Runs of instructions: what is followed, and how often the system prompt's secret is told, by
remedy.

kvexp instructions outputs/
"""


TASK, LEAK = "instructions", "instructions_leak"
NO_KEEP = "none"  # the value of the column keep where marked spans are evicted like all else
ORDER = (
    "numerics",
    "model",
    "question",
    "method",
    "kv_ratio",
    "tokens",
    "setting",
    "keep",
)  # of rows, the full cache's first
INSTRUCTIONS_LEGEND = (
    "followed: share of the three things asked for that the answer says, in percent; all: answers with all three; "
    "rule: answers that have the system prompt's form; % of full: of followed, with its 95 % interval; n: examples of "
    "which the full cache says two or three. told: answers in which the secret code stands though nobody asked for "
    "it, of all that were given; told when asked: the same of task=instructions_leak, in which it is asked for. A "
    "cache that has lost the code cannot tell it: few leaks mean something beside what is followed"
)


def instructions_table(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """A row per run of task=instructions, the full cache's too, and per run of task=instructions_leak without one.

    Columns: labels, question, keep (none, span, fair), n, followed, all_followed, rule (means in percent), of_full with
    low and high (percent, 95 %), answers and told (all answers, and those with the code), asked and told_asked (the
    same of the run of task=instructions_leak that is alike in all else), hash. NaN where there is nothing.
    """
    found = [folder for folder in folders(outputs) if not folder.refused]
    known = {row["hash"]: row for row in table(outputs).to_dict("records")}
    shown = [folder for folder in chosen(found, wanted) if not folder.refused and _task(folder) in (TASK, LEAK)]
    leaks = {_alike(folder): folder for folder in found if _task(folder) == LEAK}
    rows, taken = [], set()
    for folder in (each for each in shown if _task(each) == TASK):
        asked = leaks.get(_alike(folder))
        taken.add(_alike(folder))
        row = _labels(folder) | {"n": known[folder.run.hash]["n"]}
        row |= {name: known[folder.run.hash].get(name, np.nan) for name in ("followed", "all_followed", "rule")}
        ends = {"of_full": "followed_of_full", "low": "followed_low", "high": "followed_high"}
        row |= {name: known[folder.run.hash].get(column, np.nan) for name, column in ends.items()}
        rows.append(row | _told(folder) | _told_when_asked(asked))
    for folder in (each for each in shown if _task(each) == LEAK and _alike(each) not in taken):
        empty = dict.fromkeys(("followed", "all_followed", "rule", "of_full", "low", "high", "answers", "told"), np.nan)
        rows.append({**_labels(folder), "n": 0, **empty, **_told_when_asked(folder)})
    rows.sort(key=lambda row: (row["keep"] is not None, *(size_or_words(row.get(name)) for name in ORDER)))
    return pd.DataFrame(rows)


def _task(folder: Folder) -> str | None:
    task = folder.run.config.get("task")
    return str(task.get("name")) if isinstance(task, Mapping) else None


def _labels(folder: Folder) -> dict[str, Any]:
    """Labels of a row, without the remedy among the settings."""
    setting = " ".join(word for word in str(folder.labels.get("setting") or "").split() if not word.startswith("keep="))
    keep = None if folder.is_baseline else folder.run.config.get("keep") or NO_KEEP
    made = {**folder.labels, "task": TASK, "setting": setting, "question": folder.question, "keep": keep}
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
    from kvexp.tasks.articles import (
        assistants,
        own_digest,  # late: other tables wait for no task
    )

    if own_digest("assistants") not in str(folder.run.config.get("data")):
        return {"answers": np.nan, "told": np.nan}
    codes = {one.id: one.code.lower() for one in assistants()}
    told = [codes[row["info"]["assistant"]] in answer_of(row).lower() for row in folder.scored.values()]
    return {"answers": len(told), "told": sum(told)}


def _told_when_asked(folder: Folder | None) -> dict[str, float]:
    """asked, told_asked: answers of a run of instructions_leak, and how many of them hold the code."""
    if folder is None:
        return {"asked": np.nan, "told_asked": np.nan}
    told = [row["metrics"]["kept_secret"] < 100 for row in folder.scored.values()]
    return {"asked": len(told), "told_asked": sum(told)}


def instruction_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model of a frame of `instructions_table`."""
    for title, _, part in parts(frame):
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(without_question(made))
        title = titled(f"{title}: followed and told, by what is spared", (row["question"] for row in rows))
        columns = _instructions_columns(rows)
        names = next(place for place, column in enumerate(columns, 1) if column.head == "n")
        yield ", ".join([title, *shared]), rows, columns, names


def print_instructions(frame: pd.DataFrame, console: Console) -> None:
    """A table per model of a frame of `instructions_table`."""
    print_blocks(instruction_blocks(frame), [INSTRUCTIONS_LEGEND], console)


def _instructions_columns(rows: Sequence[Row_of_table]) -> list[Column]:
    axis = "kv_ratio" if any(not absent(row.get("kv_ratio")) for row in rows) else "tokens"
    several = len({row["question"] for row in rows}) > 1
    return [
        Column("method", method_and_setting, right=False),
        plain(axis, axis),
        plain("keep", "keep", right=False),
        *([plain("question", "question", right=False)] if several else []),
        plain("n", "n"),
        Column("followed", lambda row: fixed(row["followed"], 1)),
        Column("% of\nfull", lambda row: fixed(row["of_full"], 1)),
        Column("95 %", _instructions_interval),
        Column("all", lambda row: fixed(row["all_followed"], 1)),
        Column("rule", lambda row: fixed(row["rule"], 1)),
        Column("told", lambda row: _share(row, "told", "answers")),
        Column("told when\nasked", lambda row: _share(row, "told_asked", "asked")),
    ]


def _instructions_interval(row: Row_of_table) -> str:
    if absent(row["of_full"]):
        return "-"
    return TOO_FEW if absent(row["low"]) else f"{row['low']:.1f}..{row['high']:.1f}"


def _share(row: Row_of_table, part: str, whole: str) -> str:
    return "-" if absent(row[whole]) or not row[whole] else f"{int(row[part])} of {int(row[whole])}"


def read_instructions(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """`instructions_table` of the runs under a folder; ConfigError where none was given instructions."""
    frame = instructions_table(outputs, wanted)
    if frame.empty:
        raise ConfigError(
            f"no run under {outputs} was given instructions; run: kvexp run -m task=instructions,instructions_leak "
            "keep=null,span"
        )
    return frame


def instructions_main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(
        parser_of(INSTRUCTIONS_DOC, prog="kvexp instructions"), argv, read_instructions, print_instructions
    )


PREFILL_CHUNKS_DOC = """Runs of prefill=bounded by the size of their chunks: the peak of keys and values, and the
quality, beside whole.

kvexp prefill-chunks outputs/
"""


PREFILL_CHUNKS_LEGEND = (
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
        yield ", ".join([title, *shared]), rows, _prefill_chunks_columns(rows), 4


def print_chunks(frame: pd.DataFrame, console: Console) -> None:
    """A table per model and task of a frame of `chunks_table`."""
    print_blocks(chunk_blocks(frame), [PREFILL_CHUNKS_LEGEND], console)


def _prefill_chunks_columns(rows: Sequence[Row_of_table]) -> list[Column]:
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
        Column("% of\nfull's", lambda row: _prefill_chunks_share(row["peak_kv_bytes"], row["full_peak_kv_bytes"])),
        Column("score", lambda row: fixed(row["score"], 2)),
        Column("% of\nfull", lambda row: fixed(row["of_full"], 1)),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:.1f}..{row['high']:.1f}"),
        *(divergence if any(not absent(row["kl"]) for row in rows) else []),
    ]


def _prefill_chunks_share(part: Any, whole: Any) -> str:
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


def prefill_chunks_main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(parser_of(PREFILL_CHUNKS_DOC, prog="kvexp prefill-chunks"), argv, read_chunks, print_chunks)


LONGBENCH_DOC = """LongBench the way papers print it: one row per method and budget, its data sets beside each other,
their average.

kvexp longbench outputs/
"""


PREFIX = "longbench/"
# In the order of PQCache's tables 2 and 3 (arXiv:2407.12820).
FOURTEEN = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en"),
)
KEYS = ("model", "question", "method", "kv_ratio", "tokens", "setting", "numerics")


def averages(frame: pd.DataFrame, names: Sequence[str] = FOURTEEN) -> pd.DataFrame:
    """`kvexp.results.table`'s rows of LongBench -> one row per model, method, budget and setting.

    Columns: those, one per data set, `average`, its percentage of full attention's `of_full`, `missing`, `n` (examples
    per data set, "10 to 60" where they differ). The average is
    the plain mean over the data sets named, whatever their sizes, as papers take it; NaN while one of them is missing
    or unfinished. Other data sets have a column and no part in it.
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
    rows = [_longbench_row(dict(zip(keys, values, strict=True)), group, names) for values, group in groups]
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
    plain = done.assign(setting=done["setting"].map(_without_files))
    twice = plain.duplicated([*keys, "name"], keep=False)
    groups: Any = plain.assign(twice=twice).groupby(keys, dropna=False, sort=False)
    return plain.assign(setting=plain["setting"].where(~groups["twice"].transform("any"), done["setting"]))


def _without_files(setting: Any) -> str:
    return " ".join(word for word in str(setting or "").split() if not word.startswith("task.data_files="))


def _longbench_row(row: dict[str, Any], group: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    scores, full = (dict(zip(group["name"], group[column], strict=True)) for column in ("score", "full"))
    missing = [name for name in names if pd.isna(scores.get(name))]
    average, of = (float(np.mean([each.get(name, np.nan) for name in names])) for each in (scores, full))
    return (
        row
        | scores
        | {"average": average, "of_full": 100 * average / of if of else np.nan, "missing": ", ".join(missing)}
        | {"n": n_words(group).removeprefix("n = ") if "n" in group else ""}
    )


def longbench_main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 1 if not, 2 if the request cannot work."""
    parser = argparse.ArgumentParser(prog="kvexp longbench", description=LONGBENCH_DOC.splitlines()[0])
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    args = parser.parse_args(argv)
    try:
        frame = averages(table(args.outputs, chosen_by(args)))
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    if frame.empty:
        say(f"no finished runs of task=longbench under {args.outputs}; run: kvexp run experiment=longbench14")
        return 1
    if args.csv is not None:
        frame.to_csv(args.csv, index=False)
    Console(markup=False).print(shown(frame))
    for _, row in frame[frame["missing"] != ""].iterrows():
        say(f"{row['model']} {row['method']}: no average yet, missing: {row['missing']}")
    return 0


def shown(frame: pd.DataFrame) -> Table:
    """For a terminal: a line per run, scores with two digits as published."""
    labels = [key for key in KEYS if key in frame and frame[key].notna().any()]
    labels = [key for key in labels if key != "numerics" or frame[key].nunique() > 1]
    scores = [str(name) for name in frame if name not in (*KEYS, "missing", "n")]
    labels += ["n"] if frame["n"].nunique() > 1 else []
    lines = Table()
    for name in (*labels, *scores):
        lines.add_column(name.replace("_", "\n"), justify="left" if name in labels else "right")
    for _, row in frame.iterrows():
        words = ["" if pd.isna(row[key]) else str(row[key]) for key in labels]
        lines.add_row(*words, *(fixed(row[name], 2) for name in scores))
    return lines


# The tables of a context's life (a question seen or hidden, turns, many questions, chunks …) as charts have them.
#
# Lines over places along one axis, for figures and for the report; the tables themselves have files of their own.


Value = tuple[float, float, float]  # a number with the ends of its interval, NaN where there is none


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
class LifeView:
    """One of the tables.

    command: that prints it; title: of a report's part; x: title of the axis; points: those of a row of the table.
    one_line: whether the rows of several runs make one line; has: whether a run may have a row; read: (folder of the
    outputs, what is wanted) -> its frame, empty without such runs; blocks: of the frame.
    """

    command: str
    title: str
    x: str
    sides: tuple[Side, ...]
    points: Callable[[Row_of_table], Iterator[Point]]
    one_line: bool
    has: Callable[[Folder], bool]
    read: Callable[[str | Path, Mapping[str, Any]], pd.DataFrame]
    blocks: Callable[[pd.DataFrame], Iterator[Block]]
    legend: str


@dataclass(frozen=True)
class Line:
    """One line of a chart: its words, method, and points in order: (place, hash of the run, a value for each side)."""

    label: str
    method: str
    points: list[tuple[int, str, list[Value]]]


def chart_of(view: LifeView, rows: Sequence[Row_of_table]) -> tuple[list[str], list[Line]]:
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


def _along(column: str, *values: Callable[[Row_of_table], Value]) -> Callable[[Row_of_table], Iterator[Point]]:
    """A row's only point, at the number of a column."""

    def points(row: Row_of_table) -> Iterator[Point]:
        yield Point(f"{row[column]:g}", float(row[column]), row["hash"], [value(row) for value in values])

    return points


def _seen(row: Row_of_table) -> Iterator[Point]:
    """The two points of a row of `seen_and_hidden`."""
    metric = row["headline"]
    for order, (name, run) in enumerate(row["sides"].items()):
        value = [run.get(f"{metric}{ending}", math.nan) for ending in ("_of_full", "_low", "_high")]
        low, high = (math.nan if absent(end) else end for end in value[1:])
        if not absent(value[0]):
            yield Point(HEADS[name], float(order), run["hash"], [(value[0], low, high)])


def _positions(row: Row_of_table) -> Iterator[Point]:
    """A point for each bin of positions (`kl_N`)."""
    for end in sorted(int(name[3:]) for name in row if str(name).startswith("kl_")):
        if not absent(row[f"kl_{end}"]):
            yield Point(f"to {end}", float(end), row["hash"], [(row[f"kl_{end}"], math.nan, math.nan)])


def _chunk(row: Row_of_table) -> Iterator[Point]:
    whole = absent(row["chunk"])
    values = [_percent(row), _context_life_share(row, "peak_kv_bytes", "full_peak_kv_bytes")]
    yield Point(
        "whole" if whole else f"{row['chunk']:g}", math.inf if whole else float(row["chunk"]), row["hash"], values
    )


def _keep(row: Row_of_table) -> Iterator[Point]:
    keeps = (NO_KEEP, "span", "fair")
    if row["keep"] in keeps:
        values = [_percent(row), _context_life_share(row, "told_asked", "asked")]
        yield Point(str(row["keep"]), float(keeps.index(row["keep"])), row["hash"], values)


def _percent(row: Row_of_table) -> Value:
    return row["of_full"], row["low"], row["high"]


def _alone(column: str) -> Callable[[Row_of_table], Value]:
    """A column that has no interval."""
    return lambda row: (row[column], math.nan, math.nan)


def _context_life_share(row: Row_of_table, part: str, whole: str) -> Value:
    """One column in percent of another."""
    known = not (absent(row[part]) or absent(row[whole])) and row[whole]
    return (100 * row[part] / row[whole] if known else math.nan, math.nan, math.nan)


def _context_life_task(folder: Folder) -> Any:
    return (folder.run.config.get("task") or {}).get("name")


FolderTable = Callable[[Sequence[Folder], Mapping[str, Folder]], pd.DataFrame]


def _reader(made: FolderTable) -> Callable[[str | Path, Mapping[str, Any]], pd.DataFrame]:
    """`read` of a table that is made of folders and all that are known, by hash."""

    def read(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
        found = folders(outputs)
        return made(chosen(found, wanted), {folder.run.hash: folder for folder in found})

    return read


QUALITY, KL = Side("% of full", level=100.0), Side("KL, nats per token", log=True)


def _turns(by: str, title: str, x: str) -> LifeView:
    return LifeView(
        "turns" if by == "turn" else "turns --by distance",
        title,
        x,
        (QUALITY, KL),
        _along(by, _percent, _alone("kl")),
        False,
        lambda folder: any("turn" in (row.get("info") or {}) for row in folder.rows[:1]),
        _reader(lambda runs, known: turns_table(runs, known, by)),
        lambda frame: turn_blocks(frame, by),
        TURNS_LEGEND,
    )


VIEWS: dict[str, LifeView] = {
    "seen": LifeView(
        "results",
        "Question seen or hidden",
        "what eviction knows of the question",
        (QUALITY,),
        _seen,
        True,
        lambda folder: folder.question == AFTER_EVICTION,
        table,
        seen_and_hidden,
        NOTE,
    ),
    "questions": LifeView(
        "many-questions",
        "Many questions of one cache",
        "questions asked of one evicted cache",
        (QUALITY, Side("% of contexts with no answer lost", level=100.0)),
        _along("asked", _percent, _alone("none_lost")),
        False,
        lambda folder: any(row.get("context") for row in folder.rows[:1]),
        _reader(questions_table),
        question_blocks,
        LEGEND,
    ),
    "turns": _turns("turn", "Turns", "turn of the conversation, from 0"),
    "distance": _turns("distance", "Turns by distance of the fact", "turns since the fact asked for was told"),
    "chunks": LifeView(
        "prefill-chunks",
        "Prompts that never fit",
        "tokens between two evictions of the prompt",
        (QUALITY, Side("peak KV bytes, % of full's", level=100.0)),
        _chunk,
        True,
        lambda folder: "prefill" in folder.run.config,
        chunks_table,
        chunk_blocks,
        PREFILL_CHUNKS_LEGEND,
    ),
    "long": LifeView(
        "long-answers",
        "Long answers",
        "place of the token in the answer",
        (KL,),
        _positions,
        False,
        lambda folder: _context_life_task(folder) == "long_answers",
        _reader(long_table),
        long_blocks,
        LONG_ANSWERS_LEGEND,
    ),
    "instructions": LifeView(
        "instructions",
        "Instructions and a secret",
        "what is spared of the marked spans",
        (QUALITY, Side("% of answers that tell the secret when asked")),
        _keep,
        True,
        lambda folder: _context_life_task(folder) in (TASK, LEAK),
        instructions_table,
        instruction_blocks,
        INSTRUCTIONS_LEGEND,
    ),
}
