"""The tables of recorded runs, by the name that stands after `kvexp results OUTPUTS --view`.

A `View` says which runs have it, what its rows are, which columns people see, and what a chart has of a row. One loop
prints, exports and draws them all. `VIEWS` has every view in the order in which the report shows those with a chart.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import divergence, life, samples
from kvexp.results import table as quality
from kvexp.results.blocks import (
    Block,
    Row,
    absent,
    interval,
    markdown_of,
    numeric,
    plain,
    print_blocks,
    records,
    telling,
)
from kvexp.results.divergence import print_compared
from kvexp.results.life import Columns, Point, Value
from kvexp.results.read import (
    AFTER_EVICTION,
    WORDS,
    Folder,
    Runs,
    add_choice,
    chosen_by,
    in_order,
    number,
    read_runs,
    titled,
    unmatched,
)
from kvexp.results.screen import print_screen, screen_console
from kvexp.results.table import (
    METHOD_AND_SETTING,
    N,
    budget_column,
    parts,
    question_column,
    shared_settings,
    without,
    without_question,
)
from kvexp.run.store import EPSILON_KL, EPSILON_TOP1, OWN, TEXTS, run_name
from kvexp.util.errors import ConfigError
from kvexp.util.output import Console, say, tells_errors, tells_warnings


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
    numbers. heading: what the title of a printed table says behind model and task; columns: of its rows; legend: what
    they mean; below: the lines below the tables, where they are not the legend; missing: how such runs are made. by:
    further labels of which each value has a table of its own; said: keys of settings that the heading says; ordered:
    the rows of one table in an `order` of the command line. blocks_of: (frame, order) -> printed tables, where they are
    not one for each model, task and `by`; also: a view that is shown below. options: further arguments of `table`.
    x, sides, points: a chart: title of the axis, its panels, what a row has there. one_line: whether the rows of
    several runs make one line.
    """

    title: str
    applies: Callable[[Folder], bool]
    table: Callable[..., pd.DataFrame]
    columns: Callable[[Sequence[Row]], Columns] = lambda rows: ([], [])
    heading: Callable[[Sequence[Row]], str] = lambda rows: ""
    legend: str = ""
    missing: str = ""
    below: Callable[[Runs, pd.DataFrame], list[str]] | None = None
    by: tuple[str, ...] = ()
    ordered: Callable[[pd.DataFrame, str | None], pd.DataFrame] = lambda block, order: block
    said: tuple[str, ...] = ()
    blocks_of: Callable[[pd.DataFrame, str | None], Iterable[Block]] | None = None
    also: str = ""
    options: tuple[str, ...] = ()
    x: str = ""
    sides: tuple[Side, ...] = ()
    points: Callable[[Row], Iterator[Point]] = lambda row: iter(())
    one_line: bool = False

    def lines_below(self, runs: Runs, frame: pd.DataFrame) -> list[str]:
        """What the reader must know of the printed tables."""
        if frame.empty:
            return []
        return self.below(runs, frame) if self.below is not None else [self.legend] * bool(self.legend)

    def blocks(self, frame: pd.DataFrame, order: str | None = None) -> Iterator[Block]:
        """The printed tables of a frame. order: of the rows, where the view has several."""
        if frame.empty:
            return
        if self.blocks_of is not None:
            yield from self.blocks_of(frame, order)
            return
        for title, _, block in parts(frame, *self.by):
            rows = without_question(records(self.ordered(block, order)))
            shared, rows = shared_settings([without(row, *self.said) for row in rows])
            names, others = self.columns(rows)
            others = [column for column in others if any(column.cell(row) != "-" for row in rows)]
            title = titled(f"{title}: {self.heading(rows)}", (row.get("question") for row in rows))
            yield Block(", ".join([title, *shared]), rows, [*names, *others], len(names))


# --- longbench: a row per method and budget, a column per data set, and their average


PREFIX = "longbench/"
RULER = "ruler/"
# In the order of PQCache's tables 2 and 3 (arXiv:2407.12820).
FOURTEEN = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en"),
)
# The tasks of RULER that need no file, and the two that do (arXiv:2404.06654).
ELEVEN = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
THIRTEEN = (*ELEVEN, "qa_1", "qa_2")
KEYS = ("model", "question", "method", "kv_ratio", "tokens", "setting", "numerics")


def averages(frame: pd.DataFrame, names: Sequence[str] = FOURTEEN, prefix: str = PREFIX) -> pd.DataFrame:
    """Rows of the table of all runs whose task begins with the prefix -> one row per model, method, budget and setting.

    Columns: those, one per data set, `average`, its percentage of full attention's `of_full`, `missing`, `n` (examples
    per data set, "10 to 60" where they differ). The average is the plain mean over the data sets named, whatever their
    sizes, as papers take it; NaN while one of them is missing or unfinished. Other data sets have a column and no part
    in it.
    """
    empty = pd.DataFrame(columns=[*KEYS, *names, "average", "of_full", "missing", "n"])
    if frame.empty or "score" not in frame:
        return empty
    done = frame[(frame["status"] == "done") & frame["task"].astype(str).str.startswith(prefix)]
    if done.empty:
        return empty
    known = frame.set_index("hash")["score"]
    done = done.assign(name=done["task"].astype(str).str.removeprefix(prefix), full=done["baseline"].map(known))
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
    """Rows without the names of data files in their settings, of which each data set has its own.

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
    average, of = (float(np.mean([values.get(name, np.nan) for name in names])) for values in (scores, full))
    row |= {**scores, "average": average, "of_full": 100 * average / of if of else np.nan}
    n = quality.n_words(group).removeprefix("n = ") if "n" in group else ""
    return row | {"missing": ", ".join(missing), "n": n}


def _longbench_columns(rows: Sequence[Row]) -> Columns:
    """Scores with two digits, as published."""
    labels = [name for name in KEYS[2:6] if any(not absent(row.get(name)) and row[name] != "" for row in rows)]
    labels += ["n"] if len({row["n"] for row in rows}) > 1 else []
    scores = [str(name) for name in rows[0] if name not in (*KEYS, "missing", "n")]
    names = [*(plain(name, name, right=name == "kv_ratio") for name in labels), *question_column(rows)]
    return names, [numeric(name.replace("_", "\n"), name, 2) for name in scores]


def ruler_averages(frame: pd.DataFrame) -> pd.DataFrame:
    """As `averages`, over RULER's thirteen tasks where one of the two that need files was run, else over the eleven."""
    tasks = set(frame["task"]) if "task" in frame else set()
    return averages(frame, THIRTEEN if tasks & {f"{RULER}{name}" for name in ("qa_1", "qa_2")} else ELEVEN, RULER)


def _ruler_heading(rows: Sequence[Row]) -> str:
    return f"RULER, average of {'13 tasks' if 'qa_1' in rows[0] else 'the 11 tasks that need no file'}"


def _not_averaged(runs: Runs, frame: pd.DataFrame) -> list[str]:
    rows = (row for row in records(frame) if row["missing"])
    return [f"{row['model']} {row['method']}: no average yet, missing: {row['missing']}" for row in rows]


# --- bytes: tokens or bits: divergence and quality by the share of the full cache's bytes


BITS = re.compile(r"\+?cache\.(key_|value_)?bits=(\d+)")
CODEC = re.compile(r"\+?cache\.codec=(\w+)")
BUDGETS = re.compile(r"\+?(bytes_ratio|budget\.tokens|kv_ratio)=\S+")


def bytes_table(runs: Runs, metric: str | None = None) -> pd.DataFrame:
    """The runs that have a share of bytes: columns of the table of all runs, and for each run

    bits: of keys and values, the fewer where they differ; line: "method, N bits" or "method, codec"; rest, shared:
    what of the setting is neither bits nor budget, of this run and of all; quality, quality_low, quality_high: percent
    of full in `metric` (None, "kl": each task's first); kl, kl_low, kl_high: along the full cache's own answer, NaN
    where none was measured.
    """
    frame = runs.frame(quality.quality_table)
    frame = frame[frame["bytes_share"].notna() & frame["verdict99"].ne("baseline")] if len(frame) else frame
    if frame.empty:
        return frame
    settings = frame["setting"].fillna("").astype(str)
    bits = [min([16, *(int(match[2]) for match in BITS.finditer(words))]) for words in settings]
    left = [" ".join(BUDGETS.sub("", CODEC.sub("", BITS.sub("", words))).split()) for words in settings]
    codecs = [CODEC.search(words) for words in settings]
    names = [
        ", ".join([method, *([codec[1]] if codec else []), *([f"{n} bits"] if n < 16 or not codec else [])])
        for method, n, codec in zip(frame["method"], bits, codecs, strict=True)
    ]
    metric = None if metric == "kl" else metric
    metrics = [metric or headline for headline in frame["headline"]]
    quality_columns = {
        name: [number(row.get(f"{of}{ending}")) for of, row in zip(metrics, records(frame), strict=True)]
        for name, ending in (("quality", "_of_full"), ("quality_low", "_low"), ("quality_high", "_high"))
    }
    shared, rows = shared_settings([{"setting": words} for words in left])
    rest = [str(row["setting"]) for row in rows]
    frame = frame.assign(bits=bits, line=names, rest=rest, shared=" ".join(shared), metric=metrics, **quality_columns)
    far, ends = runs.frame(divergence.frame_of), ["kl", "kl_low", "kl_high"]
    if far.empty:
        return frame.assign(**dict.fromkeys(ends, math.nan))
    return frame.merge(far.loc[far["text"] == OWN, ["hash", *ends]], on="hash", how="left")


def _bytes_columns(rows: Sequence[Row]) -> Columns:
    rest = telling(rows, plain("rest", "setting", right=False))
    return [plain("line", "method and bits", right=False), *rest, N], [
        numeric("% of full's\nbytes", "bytes_share", 1, 100),
        numeric("KL", "kl", 4),
        interval("95 %", "kl_low", "kl_high", 4, of="kl"),
        numeric("% of\nfull", "quality", 1),
        interval("95 %", "quality_low", "quality_high", 1, of="quality"),
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
    cells_of_metric = frame.pivot_table(metric, "depth", "length", aggfunc="mean", dropna=False)
    cells_of_metric.attrs["depths"] = [_depth(depth, rows) for depth in cells_of_metric.index]
    return cells_of_metric


def _depth(depth: float, rows: Iterable[Mapping[str, Any]]) -> str:
    """A depth as it was asked for, and from where to where needles really stand, where that is another place."""
    infos = [row["info"] for row in rows if (row.get("info") or {}).get("depth") == depth]
    measured = [info["depth_measured"] for info in infos if info.get("depth_measured") is not None]
    if not measured or max(abs(place - depth) for place in measured) < 0.5:
        return f"{depth:g}"
    low, high = f"{min(measured):.0f}", f"{max(measured):.0f}"
    return f"{depth:g} ({low if low == high else f'{low}-{high}'})"


def needle_table(runs: Runs, metric: str | None = None) -> pd.DataFrame:
    """A row per run and depth: labels, question, metric, depth, one column per length (percent), hash."""
    rows = []
    for folder in in_order(folder for folder in runs.ran if is_needle(folder)):
        cells = grid(folder.rows, metric or folder.metrics[0])
        common = {**folder.labels, "question": folder.question, "metric": metric or folder.metrics[0]}
        for depth, (_, line) in zip(cells.attrs["depths"], cells.iterrows(), strict=True):
            values = {f"{length:g}": value for length, value in line.items()}
            rows.append({**common, "depth": depth, **values, "hash": folder.run.hash})
    return pd.DataFrame(rows)


def is_needle(folder: Folder) -> bool:
    """Whether a run has scores by length and depth."""
    return bool(folder.metrics) and any({"length", "depth"} <= set(row.get("info") or {}) for row in folder.rows)


def _needle_columns(rows: Sequence[Row]) -> Columns:
    lengths = sorted({str(name) for row in rows for name in row if re.fullmatch(r"[\d.e+]+", str(name))}, key=float)
    names = [METHOD_AND_SETTING, budget_column(rows), plain("depth", "depth", right=False)]
    return names, [numeric(length, length, 1) for length in lengths]


# --- charts


@dataclass(frozen=True)
class Line:
    """One line of a chart: its words, method, how many lines of the method come before, and points in order: (place,
    hash of the run, a value for each side).
    """

    label: str
    method: str
    before: int
    points: list[tuple[int, str, list[Value]]]


def chart_of(view: View, rows: Sequence[Row]) -> tuple[list[str], list[Line]]:
    """(places in order, lines) of the rows of one block of the view's table."""
    several = len({row.get("question") for row in rows}) > 1
    points = [(row, point) for row in rows for point in view.points(row)]
    order = {point.place: point.order for _, point in points}
    places = sorted(order, key=lambda place: order[place])
    lines: dict[tuple[str, ...], Line] = {}
    for row, point in points:
        place_words = f"({WORDS[row['question']]})" if several and row.get("question") in WORDS else ""
        label = f"{run_name(row)} {place_words}".strip()
        before = sum(line.method == row["method"] for line in lines.values())
        key = (label, *([] if view.one_line else [row["hash"]]))
        line = lines.setdefault(key, Line(label, row["method"], before, []))
        line.points.append((places.index(point.place), point.hash, point.values))
    for line in lines.values():
        line.points.sort(key=lambda point: point[0])
    return places, list(lines.values())


def _hidden_points(row: Row) -> Iterator[Point]:
    """The two points of a row of `table.seen_and_hidden`."""
    for order, (name, run) in enumerate(row["sides"].items()):
        value = [run.get(f"{row['headline']}{ending}", math.nan) for ending in ("_of_full", "_low", "_high")]
        low, high = (math.nan if absent(end) else end for end in value[1:])
        if not absent(value[0]):
            yield Point(quality.HEADS[name], float(order), run["hash"], [(value[0], low, high)])


QUALITY, KL = Side("% of full", level=100.0), Side("KL, nats per token", log=True)


def _turns(by: str, title: str, x: str) -> View:
    return View(
        title,
        lambda folder: any("turn" in (row.get("info") or {}) for row in folder.rows[:1]),
        partial(life.turns_table, by),
        partial(life.turns_columns, by),
        partial(life.turns_heading, by),
        life.TURNS_LEGEND,
        "held a conversation; run: kvexp run task=dialogue",
        by=("history",),
        said=("task.history=",),
        x=x,
        sides=(QUALITY, KL),
        points=life.along(by, life.percent, life.alone("kl")),
    )


RUNS, DIVERGENCE = "runs", "divergence"
NAMED = (
    "questions",
    "turns",
    "distance",
    "chunks",
    "ledger",
    "long",
    "longbench",
    "ruler",
    "needle",
    "samples",
)  # by `more_views`


def further_views(runs: Runs) -> list[str]:
    """Names of the views that the runs shown have in addition to their tables of quality and divergence."""
    return [name for name in NAMED if any(map(VIEWS[name].applies, runs.ran))]


def more_views(runs: Runs) -> list[str]:
    """A line that names the further views of the runs shown; none where there are none."""
    names = further_views(runs)
    return [f"more of these runs: kvexp results {runs.outputs} --view {' or '.join(names)}"] if names else []


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
        divergence.columns_of,
        divergence.heading,
        below=divergence.notes,
        by=("text",),
        ordered=divergence.ordered,
        also="choices",
        options=("epsilon_kl", "epsilon_top1"),
        missing="has a divergence; --measure measures it",
    ),
    "choices": View(
        "Choices compared with the full cache's",
        lambda folder: any(row.get("choices") for row in folder.rows[:1]),
        divergence.choice_table,
        divergence.choice_columns,
        lambda rows: "choices compared with the full cache's",
        missing="chose among answers; run: kvexp run task=testbed_choice model=testbed_rope",
    ),
    "hidden": View(
        "Question seen or hidden",
        lambda folder: folder.question == AFTER_EVICTION,
        quality.quality_table,
        blocks_of=lambda frame, order: quality.seen_and_hidden(frame),
        legend=quality.NOTE,
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
        life.questions_table,
        life.questions_columns,
        lambda rows: f"{life.metric_of(rows[0])} by number of questions asked of one evicted cache",
        life.QUESTIONS_LEGEND,
        "asked many questions of one cache; run: kvexp run task=news_qa questions=all",
        x="questions asked of one evicted cache",
        sides=(QUALITY, Side("% of contexts with no answer lost", level=100.0)),
        points=life.along("asked", life.percent, life.alone("none_lost")),
    ),
    "turns": _turns("turn", "Turns", "turn of the conversation, from 0"),
    "distance": _turns("distance", "Turns by distance of the fact", "turns since the fact asked for was mentioned"),
    "chunks": View(
        "Prompts that never fit",
        lambda folder: "prefill" in folder.run.config,
        life.chunks_table,
        life.chunks_columns,
        lambda rows: f"{life.metric_of(rows[0])} and peak of keys and values by tokens per chunk",
        life.CHUNKS_LEGEND,
        "read its prompts in chunks; run: kvexp run -m prefill=bounded prefill.chunk=128,256,512",
        x="tokens between two evictions of the prompt",
        sides=(QUALITY, Side("peak KV bytes, % of full's", level=100.0)),
        points=life.chunk_points,
        one_line=True,
    ),
    "ledger": View(
        "Bytes by what keeps them",
        lambda folder: any((row.get("receipt") or {}).get("ledger") for row in folder.rows[:1]),
        quality.bytes_table,
        quality.bytes_columns,
        lambda rows: "bytes of a prompt and its answer by what keeps them",
        quality.BYTES_LEGEND,
        "is of a model whose layers keep different things; run: kvexp run model=gemma3_270m",
    ),
    "long": View(
        "Long answers",
        lambda folder: life.task_of(folder) == "long_answers",
        life.long_table,
        life.long_columns,
        lambda rows: "long answers",
        life.LONG_LEGEND,
        "wrote long answers; run: kvexp run task=long_answers budget=tokens budget.tokens=512",
        x="place of the token in the answer",
        sides=(KL,),
        points=life.long_points,
    ),
    "samples": View(
        "Several answers to an item",
        samples.has_samples,
        samples.samples_table,
        samples.samples_columns,
        lambda rows: f"{life.metric_of(rows[0])} over items",
        samples.SAMPLES_LEGEND,
        "graded answers, or drew several to an item; run: kvexp run task=aime25 samples=4 generation=sampling",
        said=("samples=",),
    ),
    "longbench": View(
        "LongBench",
        lambda folder: str(folder.labels.get("task")).startswith(PREFIX),
        lambda runs: averages(runs.frame(quality.quality_table)),
        _longbench_columns,
        lambda rows: "LongBench",
        below=_not_averaged,
        missing="is a finished run of task=longbench; run: kvexp run experiment=longbench14",
    ),
    "ruler": View(
        "RULER",
        lambda folder: str(folder.labels.get("task")).startswith(RULER),
        lambda runs: ruler_averages(runs.frame(quality.quality_table)),
        _longbench_columns,
        _ruler_heading,
        below=_not_averaged,
        missing="is a finished run of task=ruler; run: kvexp run experiment=ruler",
    ),
    "needle": View(
        "Needle in a haystack",
        is_needle,
        needle_table,
        _needle_columns,
        lambda rows: f"{life.metric_of(rows[0])} by length (tokens, across) and depth (percent; in brackets: measured)",
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
    blocks, below = list(view.blocks(frame, order)), view.lines_below(runs, frame)
    if view.also:
        more, more_blocks, lines = shown(runs, view.also)
        return more if frame.empty else frame, [*blocks, *more_blocks], [*below, *lines]
    return frame, blocks, below


# --- the command


DESCRIPTION = "Tables of recorded runs, with intervals and verdicts: kvexp results OUTPUTS [--view NAME] [--plot FILE]."
OF = {  # option: the views that have it
    "x": (RUNS, DIVERGENCE),
    "metric": (RUNS, DIVERGENCE, "bytes", "needle"),
    **dict.fromkeys(("measure", "compare", "alike", "epsilon", "epsilon_top1"), (DIVERGENCE,)),
}


@tells_warnings
@tells_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvexp results`; exit code 0 if there was something to show, 1 if nothing matched, 2 for a wrong request."""
    methods: list[str] = []
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--measure" in arguments:  # which may need the code of a method of the user's own
        from kvexp.run.compose import without_class_words

        methods, arguments = without_class_words(arguments)
    return results(parser().parse_args(arguments), methods)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp results", description=DESCRIPTION)
    add = result.add_argument
    add("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(result)
    add("--full", action="store_true", help="every column of quality and divergence, in as many tables as they need")
    add("--explain", action="store_true", help="say below what the columns and verdicts mean")
    add("--view", choices=VIEWS, help="one table of those named below (default: one line per run)", metavar="NAME")
    add("--x", help="runs: order by kv_ratio or bytes; figure of divergence: kv_ratio, bytes or position")
    add(
        "--metric", metavar="NAME", help="of a figure or of needle: a metric of the task; divergence: kl or top1 orders"
    )
    add("--csv", type=Path, metavar="FILE", help="write every column as CSV")
    add("--parquet", type=Path, metavar="FILE", help="write every column as parquet")
    add("--markdown", type=Path, metavar="FILE", help="write what is printed as Markdown")
    add("--plot", type=Path, metavar="FILE", help="draw runs, divergence, bytes or needle into a .png, .pdf or .svg")
    group = result.add_argument_group("--view divergence")
    add = group.add_argument
    add("--measure", action="store_true", help="measure what runs lack first: their models are loaded")
    add("--text", choices=(*TEXTS, "both"), default=OWN, help="forced text: full's own answer, the reference, or both")
    add("--epsilon", type=float, metavar="NATS", help=f"of KL (default: the runs' own epsilon_kl, {EPSILON_KL})")
    add("--epsilon-top1", type=float, metavar="SHARE", help=f"(default: the runs' own, {EPSILON_TOP1})")
    add("--compare", action="store_true", help="every two runs, corrected by Holm")
    add("--alike", nargs="+", default=[], metavar="LABEL", help="compare only runs that share these, such as kv_ratio")
    result.epilog = "Views: " + "; ".join(f"{name}: {view.title}" for name, view in VIEWS.items()) + "."
    return result


def results(args: argparse.Namespace, methods: Sequence[str]) -> int:
    """Measure what is to be measured, write what is to be written, print the table."""
    view, alone = args.view or RUNS, args.view is None
    far = view == DIVERGENCE
    if not alone and (args.full or args.explain):
        raise ConfigError("--full and --explain are of all runs: leave out --view, which shows all of its columns")
    for name, of in OF.items():
        if getattr(args, name) and view not in of:
            raise ConfigError(f"--{name.replace('_', '-')} is of --view {' or '.join(of)}, not of {view}")
    if any(value is not None and value <= 0 for value in (args.epsilon, args.epsilon_top1)):
        raise ConfigError("--epsilon and --epsilon-top1 must be positive")
    runs = read_runs(args.outputs, chosen_by(args), alone=view in (RUNS, DIVERGENCE))  # others look at further runs
    console = Console(markup=False)
    unmeasured = measured(runs, methods, TEXTS if args.text == "both" else (args.text,)) if args.measure else {}
    options = {"epsilon_kl": args.epsilon, "epsilon_top1": args.epsilon_top1, "metric": args.metric}
    given = {name: value for name in VIEWS[view].options if (value := options[name]) is not None}
    order = args.metric if far else args.x
    frame, blocks, below = shown(runs, view, order, given)
    if not blocks:
        nothing = unmatched(args.outputs, chosen_by(args))
        say(nothing if not runs.shown else f"no run under {args.outputs} {VIEWS[view].missing or nothing}")
    else:
        write(args.csv, lambda path: frame.to_csv(path, index=False))
        write(args.parquet, lambda path: frame.to_parquet(path, index=False))
        write(args.markdown, lambda path: path.write_text(markdown_of(blocks, below), encoding="utf-8"))
        if "text" in frame and (args.compare or args.alike):  # else of choices
            print_compared(runs, frame, blocks, below, args.alike, console)
        elif alone and args.full:
            print_full(runs, console, order=order, explain=args.explain)
        elif alone and order is None and not quality.only_refused(frame):
            print_screen(runs, screen_console(), views=further_views(runs), explain=args.explain)
        else:
            print_blocks(blocks, below, console)
    if args.plot is not None:
        from kvexp.results.plots import write_figure  # late: a table waits for no matplotlib

        text = OWN if args.text == "both" else args.text
        write(args.plot, lambda path: write_figure(path, runs, view, args.metric, args.x, text))
    for name, why in unmeasured.items():
        say(f"{name}: {why}")
    return 0 if blocks else 1


def print_full(runs: Runs, console: Console, *, order: str | None = None, explain: bool = False) -> None:
    """Every column of quality and divergence. order: of the rows; explain: with what the columns mean."""
    frame, blocks, _ = shown(runs, RUNS, order)
    far, far_blocks, far_below = shown(runs, DIVERGENCE)
    if frame["n"].sum() or far.empty:  # divergence=only makes no rows
        legend = quality.legend(frame) if explain else []
        print_blocks(blocks, [*frame.attrs["left_out"], *legend, *quality.missing(frame), *more_views(runs)], console)
    print_blocks(far_blocks, far_below if explain else [], console)


def measured(runs: Runs, methods: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """Measure the divergence that runs lack; why not, by the name of a run."""
    from kvexp.run.batches import measure_claimed
    from kvexp.run.compose import with_user_classes

    with_user_classes(methods)
    return measure_claimed([folder.run for folder in runs.ran], texts)


def write(path: Path | None, writer: Callable[[Path], Any]) -> None:
    """Write a file that was asked for (None: none); ConfigError where it cannot be written."""
    if path is None:
        return
    try:
        writer(path)
    except (OSError, ImportError) as error:
        raise ConfigError(f"cannot write {path}: {error}; choose another file") from error
    say(f"wrote {path}", file=sys.stderr)
