"""The columns of a table for people: what names a row, and what is said of it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvexp.results import stats
from kvexp.results.question_place import KEY, WORDS, question_words
from kvexp.results.table import COUNTS, FIRST, LAST, VERDICTS
from kvexp.results.units import TOO_FEW, absent, count, fixed, seconds, short, size

Row = Mapping[str, Any]
Record = dict[str, Any]
_KEY = re.compile(r" +(?=[\w.@/+~]+=)")  # before the key of an override
MOVING = "moving"  # in the label `revision`: a hub id without a pinned commit


@dataclass(frozen=True)
class Column:
    head: str
    cell: Callable[[Row], str]
    right: bool = True


def parts(frame: pd.DataFrame, *by: str) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    """(title, values of the labels, rows) for each NUMERICS, the newest first, model, task and value of further labels.

    Numbers of two NUMERICS never stand in one table or panel; the title names it where there are several.
    """
    keys = [name for name in ("numerics", "model", "task", *by) if name in frame]
    several = "numerics" in frame and frame["numerics"].nunique() > 1
    if several:
        frame = frame.sort_values("numerics", ascending=False, kind="stable")
    for values, part in frame.groupby(keys, sort=False, dropna=False):
        named = dict(zip(keys, values, strict=True))
        title = " / ".join(str(named[name]) for name in ("model", "task") if not absent(named.get(name))) or "runs"
        yield title + (f", NUMERICS {named['numerics']}" if several else ""), named, part


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
    each = [_KEY.split(str(row.get("setting") or "")) for row in rows]
    shared = [word for word in each[0] if word and all(word in words for words in each)]
    if not shared:
        return [], rows
    left = [" ".join(word for word in words if word not in shared) for words in each]
    return shared, [{**row, "setting": words} for row, words in zip(rows, left, strict=True)]


def method_and_setting(row: Row) -> str:
    """What names a run where its budget has a column of its own."""
    return f"{row['method']} {row.get('setting') or ''}".strip()


def without_question(rows: Sequence[Record]) -> list[Record]:
    """The rows without task.question among their settings: titles and a column say it, of every run that has one."""
    return [row if row.get("question") not in WORDS else _without(row, KEY) for row in rows]


def without_tokens(row: Row) -> Record:
    """The row without budget.tokens among its settings, where a column says it."""
    return _without(row, "budget.tokens=")


def without_code(row: Row) -> Record:
    """The row without the code of a user's method among its settings, where a column says it."""
    return _without(row, "code=")


def _without(row: Row, key: str) -> Record:
    """The row with what begins with `key` taken out of its setting."""
    if key not in str(row.get("setting")):
        return dict(row)
    return {**row, "setting": " ".join(word for word in _KEY.split(str(row["setting"])) if not word.startswith(key))}


def marks_of(rows: Sequence[Row]) -> dict[str, str]:
    """Label -> what a title says of it where it is the same in all runs: a chat template, weights of a GGUF file,
    whether eviction has seen the question.
    """
    ran = [row for row in rows if row["status"] != "refused"]
    values = {name: {str(row.get(name)) for row in ran if not absent(row.get(name))} for name in ("weights", "chat")}
    same = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    same = {name: value for name, value in same.items() if all(str(row.get(name)) == value for row in ran)}
    words = {"weights": f"{same.get('weights')} weights", "chat": "chat template"}
    found = {name: words[name] for name, value in same.items() if value != "False"}
    asked = {row.get("question") for row in ran}
    return found | ({"question": question_words(asked)} if len(asked) == 1 and question_words(asked) else {})


def keys_of(rows: Sequence[Row], x: str) -> list[Column]:
    """What tells the rows apart: method, the x axis, and any label that is not the same in all of them."""
    fixed = {*FIRST[1:], *COUNTS, *VERDICTS, *LAST, "ended", "slots", "kv_bytes", "peak_kv_bytes", "ttft_s", "tpot_s"}
    fixed |= {"code", *marks_of(rows)}
    names = list(rows[0])[: list(rows[0]).index("n")]
    varied = [name for name in names if name not in fixed and _tells(name, rows)]
    if len({row.get("question") for row in rows}) > 1:
        varied = ["question", *varied]
    if any(not absent(row.get("code")) for row in rows):
        varied = ["code", *varied]
    axis = plain("kv_ratio", "kv_ratio") if x == "kv_ratio" else Column("KV bytes", lambda row: size(row["kv_bytes"]))
    named = [plain("method", "method", right=False), axis, *(plain(name, name, right=False) for name in varied)]
    return [*named, _N] if _n_differs(rows) else named


def _tells(name: str, rows: Sequence[Row]) -> bool:
    """Whether this label is worth a column: it is not the same in all rows, or says that a revision moves."""
    values = {str(row[name]) for row in rows}
    return len(values) > 1 or (name == "revision" and any(MOVING in value for value in values))


def columns_of(rows: Sequence[Row], x: str) -> list[Column]:
    metrics = [
        name.removesuffix("_of_full") for name in rows[0] if name.endswith("_of_full") and name != "length_of_full"
    ]
    metrics = [name for name in metrics if any(not absent(row[name]) for row in rows)]
    runs = f"({rows[0]['comparisons']} run{'s' * (rows[0]['comparisons'] != 1)})"
    task = rows[0].get("task")
    columns = [_metric(name, task) for name in metrics]
    if metrics:
        headline = next(
            (name for name in metrics if any(not absent(row[f"{name}_of_full"]) for row in rows)), metrics[0]
        )
        columns += [
            Column(f"{short(headline, task)} %\nof full", lambda row: _percent(row, headline)),
            Column("95 %\ninterval", lambda row: _interval(row, headline)),
        ]
    columns += [
        Column(f"99 %\n{runs}", lambda row: _verdict(row, "99", metrics), right=False),
        Column(f"99.9 %\n{runs}", lambda row: _verdict(row, "999", metrics), right=False),
        Column("n to\ndecide", lambda row: _needed(row)),
        *([] if _n_differs(rows) else [_N]),
        *_questions(rows),
        Column("paired", lambda row: "-" if absent(row["paired"]) else str(row["paired"])),
        *_counted("skip-\nped", "skipped", rows),
        *_counted("prompt\ncut", "prompt_cut", rows),
        *_counted("cut while\nthinking", "thinking_cut", rows),
        *_counted("letters\ndropped", "dropped_letters", rows),
        *_counted("hal-\nved", "halved", rows),
        *_ended(rows),
        Column("status", lambda row: str(row["status"]), right=False),
        Column("slots", lambda row: fixed(row["slots"], 1)),
        *ratio_reached(rows),
        Column("peak KV", lambda row: size(row["peak_kv_bytes"])),
        *_times(rows),
        *_moving(rows),
        *([Column("batch", _batch)] if any(_batch(row) not in ("1", "-") for row in rows) else []),
    ]
    return [*([plain("kv_ratio", "kv_ratio")] if x == "bytes" else []), *columns]


_N = Column("n", lambda row: str(row["n"]))


def _n_differs(rows: Sequence[Row]) -> bool:
    """Whether n belongs to what names a row, and so begins each part of a table: numbers are of other examples."""
    return len({row["n"] for row in rows if row["n"]}) > 1


def _counted(head: str, name: str, rows: Sequence[Row]) -> list[Column]:
    """A column of counts, where there is anything to count."""
    return [Column(head, lambda row: str(row[name]))] if any(row[name] for row in rows) else []


def ratio_reached(rows: Sequence[Row]) -> list[Column]:
    """Where a run has a threshold and no budget: the ratio that it came to."""
    open_ended = [absent(row["kv_ratio"]) and absent(row.get("tokens")) for row in rows]
    if not any(free and row["verdict99"] != "baseline" for free, row in zip(open_ended, rows, strict=True)):
        return []
    return [Column("ratio\nreached", lambda row: fixed(row["kv_ratio_reached"], 3))]


def _questions(rows: Sequence[Row]) -> list[Column]:
    """Where a task counts the questions alone that the full cache answers: of how many those n are."""
    if all(absent(row["questions"]) for row in rows):
        return []
    return [Column("of asked", lambda row: "-" if absent(row["questions"]) else str(row["questions"]))]


def _ended(rows: Sequence[Row]) -> list[Column]:
    """Where any answer ended before max_new_tokens ended it, or should have: a chat model's turn has an end."""
    if not any(row["ended"] > 0 or (str(row.get("chat")) == "True" and not absent(row["ended"])) for row in rows):
        return []
    return [Column("ended\n%", lambda row: fixed(row["ended"], 0))]


def _times(rows: Sequence[Row]) -> list[Column]:
    """Where any run was timed by itself."""
    each = {
        "ttft_s": Column("TTFT", lambda row: seconds(row["ttft_s"])),
        "tpot_s": Column("TPOT", lambda row: seconds(row["tpot_s"])),
        "tokens_per_s": Column("tokens/s", lambda row: fixed(row["tokens_per_s"], 1)),
    }
    columns = [column for name, column in each.items() if not all(absent(row[name]) for row in rows)]
    some = any(partly_timed(row) for row in rows)
    return [*columns, *([Column("timed", lambda row: str(row["timed"]))] if some else [])]


def partly_timed(row: Row) -> bool:
    """Whether its times are of some of its examples alone."""
    return bool(0 < row["timed"] < row["n"])


def _moving(rows: Sequence[Row]) -> list[Column]:
    """Where a method keeps everything: what crosses to it and back, and the time that its index is part of."""
    if all(absent(row["moved_bytes"]) for row in rows):
        return []
    return [
        *([] if all(absent(row["tt2t_s"]) for row in rows) else [Column("TT2T", lambda row: seconds(row["tt2t_s"]))]),
        Column("moved", lambda row: size(row["moved_bytes"])),
        Column("cache\nhits", lambda row: fixed(row["cache_hit_rate"], 2)),
    ]


def _batch(row: Row) -> str:
    """Prompts per forward, from the smallest batch to the largest."""
    least, most = row["smallest_batch"], row["batch_size"]
    return "-" if absent(most) else f"{most:.0f}" if least == most else f"{least:.0f}-{most:.0f}"


def plain(name: str, head: str, right: bool = True) -> Column:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "-" if absent(value) or value == "" else f"{value:g}" if isinstance(value, float) else str(value)

    return Column(head, cell, right)


def _metric(name: str, task: Any) -> Column:
    return Column(short(name, task), lambda row: fixed(row[name], 3 if stats.lower_is_better(name) else 2))


def _verdict(row: Row, ending: str, metrics: Sequence[str]) -> str:
    """A failure that the headline does not show names its cause."""
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


def _percent(row: Row, metric: str) -> str:
    return TOO_FEW if few(row) else fixed(row[f"{metric}_of_full"], 1)


def _needed(row: Row) -> str:
    if few(row):
        return TOO_FEW
    if absent(row["needed"]) and absent(row["needed999"]):
        return "-"
    return " / ".join(_range(row, name) for name in ("needed", "needed999"))


def _range(row: Row, name: str) -> str:
    """From the least to the most of what is likely: 120-24k; the number alone where both are the same."""
    low, high = count(row[f"{name}_low"]), count(row[f"{name}_high"])
    return low if low == high else f"{low}-{high}"


def _interval(row: Row, metric: str) -> str:
    low, high = row[f"{metric}_low"], row[f"{metric}_high"]
    return TOO_FEW if few(row) else "-" if absent(low) else f"{low:.1f}..{high:.1f}"
