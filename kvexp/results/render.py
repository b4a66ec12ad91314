"""The table for people: in a terminal of any width, in a file, as Markdown."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvexp.errors import ConfigError

from . import stats
from .table import COUNTS, FIRST, LAST, VERDICTS
from .units import absent, count, fixed, seconds, short, size

Row = Mapping[str, Any]

STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow", "void": "dim", "baseline": "dim"}
STYLES |= {"failed": "bold red", "refused": "bold red", "partial": "yellow"}
X_AXES = ("kv_ratio", "bytes")
MOVING = "moving"  # in the label `revision`: a hub id without a pinned commit


@dataclass(frozen=True)
class Column:
    head: str
    cell: Callable[[Row], str]
    right: bool = True


def print_table(df: pd.DataFrame, console: Console | None = None, x: str = "kv_ratio") -> None:
    """One table per (model, task), in several parts where the console is too narrow. x: order by kv_ratio or bytes."""
    console = console or Console()
    for title, rows, columns, keys in _groups(df, x):
        console.print(Text(title, style="bold"))
        for part in _fit(columns, keys, rows, console.width):
            grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
            for column in part:
                grid.add_column(Text(column.head), justify="right" if column.right else "left", overflow="fold")
            for row in rows:
                cells = [column.cell(row) for column in part]
                grid.add_row(*(Text(cell, style=STYLES.get(cell.split(" ")[0], "")) for cell in cells))
            console.print(grid)
            console.print()
    for line in notes(df):
        console.print(Text(line, style="dim"), soft_wrap=not console.is_terminal)


def to_markdown(df: pd.DataFrame, x: str = "kv_ratio") -> str:
    """The same tables as GitHub-flavoured Markdown."""
    lines = []
    for title, rows, columns, _ in _groups(df, x):
        heads = (column.head.replace("-\n", "").replace("\n", " ") for column in columns)
        lines += [f"**{title}**", "", _line(heads), _line("---:" if column.right else "---" for column in columns)]
        lines += [*(_line(column.cell(row) for column in columns) for row in rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(df)), ""])


def _line(cells: Iterator[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def notes(df: pd.DataFrame) -> list[str]:
    """What a reader must know to trust the table, then every run that has something missing."""
    if df.empty:
        return ["no runs"]
    count, level = int(df["comparisons"].iloc[0]), 100 * float(df["confidence"].iloc[0])
    lines = []
    if set(df.loc[df["status"] != "refused", "verdict99"]) - {"baseline", "void"}:
        lines = [
            "% of full and its 95 % interval (paired bootstrap): over the examples that a run and its baseline both "
            "scored (paired); all other numbers: over the n examples of the run itself.",
            f"99 %, 99.9 % (MLPerf): every metric at that share of full, and {stats.LENGTH_MARK:g} % of its generated "
            f"tokens; decided by {level:.4g} % intervals, corrected (Bonferroni) for {count} compared run"
            f"{'s' * (count != 1)}.",
        ]
    if df[["needed", "needed999"]].notna().any(axis=None):
        chance = f"{100 * stats.POWER:g} % chance"
        lines += [
            f"n to decide: examples that give an {chance} of a verdict at 99 % / 99.9 %, if the percentage stays."
        ]
    if df.loc[df["status"] != "refused", "numerics"].nunique() > 1:
        lines += ["NUMERICS differ between these runs: compare numbers only within the same value (see --csv)."]
    if (df["batch_size"] > 1).any():
        lines += [
            "batch: prompts per forward. TTFT and TPOT are the batch's; slots, bytes and tokens/s are one row's, bytes "
            "an equal share of the batch's. Compare them only at equal batch sizes."
        ]
    named: dict[tuple[str, str], list[str]] = {}
    for row in _records(df):
        for note in _own_notes(row):
            named.setdefault((_title(row), note), []).append(_name(row))
    return lines + [f"{title}: {', '.join(names)}: {note}" for (title, note), names in named.items()]


def _own_notes(row: Row) -> Iterator[str]:
    if row["note"]:
        yield row["note"]
    if row["unscored"]:
        yield f"without a score: {row['unscored']}"
    if row["also"]:
        yield f"also asked for as {row['also']}"
    if MOVING in str(row.get("revision") or ""):
        yield f"revision {row['revision']}: whatever the hub holds that day; set a commit hash for numbers to keep"


def _name(row: Row) -> str:
    """A run within its table: the hash tells apart what method and kv_ratio do not, and finds the folder."""
    parts = [_plain(label, "").cell(row) for label in ("method", "kv_ratio") if not absent(row.get(label))]
    return " ".join([*parts, f"({row['hash'][:6]})"])


def _records(df: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in df.to_dict("records")]


def _groups(df: pd.DataFrame, x: str) -> Iterator[tuple[str, list[dict[str, Any]], list[Column], int]]:
    """(title, rows, columns, how many of them name the row) per model and task."""
    if x not in X_AXES:
        raise ConfigError(f"x must be one of {', '.join(X_AXES)}, got {x}")
    rows = _records(df)
    if x == "bytes":
        rows.sort(key=lambda row: (math.isnan(row["kv_bytes"]), row["kv_bytes"]))
    titles = dict.fromkeys(_title(row) for row in _records(df))
    for title in titles:
        inside = [row for row in rows if _title(row) == title]
        keys = _keys(inside, x)
        yield title, inside, [*keys, *_columns(inside, x)], len(keys)


def _title(row: Row) -> str:
    return " / ".join(str(row[name]) for name in ("model", "task") if not absent(row.get(name))) or "runs"


def _keys(rows: Sequence[Row], x: str) -> list[Column]:
    """What tells the rows apart: method, the x axis, and any label that is not the same in all of them."""
    fixed = {*FIRST[1:], *COUNTS, *VERDICTS, *LAST, "slots", "kv_bytes", "peak_kv_bytes", "ttft_s", "tpot_s"}
    names = list(rows[0])[: list(rows[0]).index("n")]
    varied = [name for name in names if name not in fixed and _tells(name, rows)]
    axis = _plain("kv_ratio", "kv_ratio") if x == "kv_ratio" else Column("KV bytes", lambda row: size(row["kv_bytes"]))
    return [_plain("method", "method", right=False), axis, *(_plain(name, name, right=False) for name in varied)]


def _tells(name: str, rows: Sequence[Row]) -> bool:
    """Whether this label is worth a column: it is not the same in all rows, or says that a revision moves."""
    values = {str(row[name]) for row in rows}
    return len(values) > 1 or (name == "revision" and any(MOVING in value for value in values))


def _columns(rows: Sequence[Row], x: str) -> list[Column]:
    metrics = [
        name.removesuffix("_of_full") for name in rows[0] if name.endswith("_of_full") and name != "length_of_full"
    ]
    metrics = [name for name in metrics if any(not absent(row[name]) for row in rows)]
    runs = f"({rows[0]['comparisons']} runs)"
    columns = [_metric(name) for name in metrics]
    if metrics:
        headline = next(
            (name for name in metrics if any(not absent(row[f"{name}_of_full"]) for row in rows)), metrics[0]
        )
        columns += [
            Column(f"{short(headline)} %\nof full", lambda row: fixed(row[f"{headline}_of_full"], 1)),
            Column("95 %\ninterval", lambda row: _interval(row, headline)),
        ]
    columns += [
        Column(f"99 %\n{runs}", lambda row: _verdict(row, "99", metrics), right=False),
        Column(f"99.9 %\n{runs}", lambda row: _verdict(row, "999", metrics), right=False),
        Column("n to\ndecide", lambda row: _needed(row)),
        Column("n", lambda row: str(row["n"])),
        Column("paired", lambda row: "-" if absent(row["paired"]) else str(row["paired"])),
        *_counted("skip-\nped", "skipped", rows),
        *_counted("prompt\ncut", "prompt_cut", rows),
        Column("status", lambda row: str(row["status"]), right=False),
        Column("slots", lambda row: fixed(row["slots"], 1)),
        Column("peak KV", lambda row: size(row["peak_kv_bytes"])),
        Column("TTFT", lambda row: seconds(row["ttft_s"])),
        Column("TPOT", lambda row: seconds(row["tpot_s"])),
        Column("tokens/s", lambda row: fixed(row["tokens_per_s"], 1)),
        *([Column("batch", _batch)] if any(_batch(row) not in ("1", "-") for row in rows) else []),
    ]
    return [*([_plain("kv_ratio", "kv_ratio")] if x == "bytes" else []), *columns]


def _counted(head: str, name: str, rows: Sequence[Row]) -> list[Column]:
    """A column of counts, where there is anything to count."""
    return [Column(head, lambda row: str(row[name]))] if any(row[name] for row in rows) else []


def _batch(row: Row) -> str:
    """Prompts per forward, from the smallest batch to the largest."""
    least, most = row["smallest_batch"], row["batch_size"]
    return "-" if absent(most) else f"{most:.0f}" if least == most else f"{least:.0f}-{most:.0f}"


def _fit(columns: list[Column], keys: int, rows: Sequence[Row], width: int) -> Iterator[list[Column]]:
    """Cut the columns into as few tables as the width allows, each beginning with the columns that name the row."""
    wide = [
        2 + max(len(line) for text in (column.head, *map(column.cell, rows)) for line in text.split("\n"))
        for column in columns
    ]
    part, room = list(range(keys)), width + 2 - sum(wide[:keys])
    for index in range(keys, len(columns)):
        if wide[index] > room and len(part) > keys:
            yield [columns[i] for i in part]
            part, room = list(range(keys)), width + 2 - sum(wide[:keys])
        part.append(index)
        room -= wide[index]
    yield [columns[i] for i in part]


def _plain(name: str, head: str, right: bool = True) -> Column:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "-" if absent(value) or value == "" else f"{value:g}" if isinstance(value, float) else str(value)

    return Column(head, cell, right)


def _metric(name: str) -> Column:
    return Column(short(name), lambda row: fixed(row[name], 3 if stats.lower_is_better(name) else 2))


def _verdict(row: Row, ending: str, metrics: Sequence[str]) -> str:
    """A failure that the headline does not show names its cause."""
    verdict = "-" if row["status"] == "refused" else str(row[f"verdict{ending}"])
    if verdict != "fail":
        return verdict
    lost = [name for name in metrics if row.get(f"{name}_verdict{ending}") == "fail"]
    if lost and lost[0] == metrics[0]:
        return verdict
    return f"fail ({short(lost[0])})" if lost else "fail (length)"


def _needed(row: Row) -> str:
    if absent(row["needed"]) and absent(row["needed999"]):
        return "-"
    return f"{count(row['needed'])} / {count(row['needed999'])}"


def _interval(row: Row, metric: str) -> str:
    low, high = row[f"{metric}_low"], row[f"{metric}_high"]
    return "-" if absent(low) else f"{low:.1f}..{high:.1f}"
