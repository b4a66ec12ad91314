"""The table for people: in a terminal of any width, in a file, as Markdown."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.record.run_name import run_name
from kvexp.results import stats
from kvexp.results.columns import (
    MOVING,
    Column,
    Row,
    columns_of,
    keys_of,
    marks_of,
    partly_timed,
    parts,
    plain,
    shared_settings,
    without_code,
    without_question,
)
from kvexp.results.other_tables import other_tables
from kvexp.results.seen_and_hidden import NOTE, Block, seen_and_hidden
from kvexp.results.units import FEW_SLOTS, FEW_SLOTS_WORDS, absent
from kvexp.terminal import visible

STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow", "void": "dim", "baseline": "dim"}
STYLES |= {"equivalent": "green", "worse": "bold red"}
STYLES |= {"failed": "bold red", "refused": "bold red", "partial": "yellow"}
X_AXES = ("kv_ratio", "bytes")
WIDEST = 3  # a column that names the rows takes a third of the width at most and folds: the numbers need the rest


def print_table(df: pd.DataFrame, console: Console | None = None, x: str = "kv_ratio") -> None:
    """A table per NUMERICS, model and task, in parts where the console is narrow. x: order by kv_ratio or bytes."""
    console = console or Console(markup=False)
    print_blocks((*groups(df, x), *seen_and_hidden(df)), notes(df), console)


def print_blocks(blocks: Iterable[Block], below: Iterable[str], console: Console) -> None:
    """A table for each block (title, rows, columns, how many of them name a row), and the lines `below` them all."""
    for title, rows, columns, keys in blocks:
        console.print(Text(title, style="bold"))
        print_columns(rows, columns, keys, console)
    for line in below:
        console.print(Text(line, style="dim"), soft_wrap=not console.is_terminal)


def print_columns(rows: Sequence[Row], columns: list[Column], keys: int, console: Console) -> None:
    """Rows in as few grids as the console's width allows; the first `keys` columns, which name a row, begin each."""
    for part in _fit(columns, keys, rows, console.width):
        grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for column in part:
            side: Literal["left", "right"] = "right" if column.right else "left"
            most = console.width // WIDEST if column in columns[:keys] else None
            grid.add_column(Text(column.head), justify=side, overflow="fold", max_width=most)
        for row in rows:
            cells = [column.cell(row) for column in part]
            grid.add_row(*(Text(cell, style=STYLES.get(cell.split(" ")[0], "")) for cell in cells))
        console.print(grid)
        console.print()


def to_markdown(df: pd.DataFrame, x: str = "kv_ratio") -> str:
    """The same tables as GitHub-flavoured Markdown."""
    lines = []
    for title, rows, columns, _ in (*groups(df, x), *seen_and_hidden(df)):
        heads = (column.head.replace("-\n", "").replace("\n", " ") for column in columns)
        lines += [f"**{title}**", "", _line(heads), _line("---:" if column.right else "---" for column in columns)]
        lines += [*(_line(column.cell(row) for column in columns) for row in rows), ""]
    return visible("\n".join([*lines, *(f"- {line}" for line in notes(df)), ""]))


def _line(cells: Iterator[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def notes(df: pd.DataFrame) -> list[str]:
    """What a reader must know to trust the table, then every run that has something missing."""
    if df.empty:
        return ["no runs"]
    lines = list(df.attrs.get("left_out", ()))
    if set(df.loc[df["status"] != "refused", "verdict99"]) - {"baseline", "void"}:
        lines += [
            "% of full and its 95 % interval (paired bootstrap): over the examples that a run and its baseline both "
            "scored (paired); all other numbers: over the n examples of the run itself.",
            f"99 %, 99.9 % (MLPerf): every metric at that share of full, and {stats.LENGTH_MARK:g} % of its generated "
            f"tokens; decided by intervals corrected (Bonferroni) for the compared runs of one model and task: "
            f"{', '.join(_levels(df))}.",
        ]
    lines += [f"baseline {check}: full cache of {models}, against published numbers." for check, models in _checks(df)]
    if df[["needed", "needed999"]].notna().any(axis=None):
        chance = f"{100 * stats.POWER:g} % chance"
        lines += [
            f"n to decide: examples that give an {chance} of a verdict at 99 % / 99.9 %, if the percentage stays."
        ]
    lines += [
        f"{title}: n of the questions asked count, those that the full cache answers: the reference stands in its "
        f"answer ({share})."
        for title, share in _shares(df)
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
            "TTFT, TPOT: medians over the n examples (TPOT: those of two new tokens or more), after an untimed warm-up."
        ]
    if any(partly_timed(row) for row in _records(df)):
        lines += ["timed: of how many of the n examples TTFT, TPOT and tokens/s are; the others shared a prefill."]
    if df.loc[df["n"] > 0, ["ttft_s", "tpot_s"]].isna().any(axis=None):
        lines += [
            "no TTFT, TPOT, tokens/s: choices are not generated, and runs of a sweep that share each prompt's prefill "
            "are not timed (hydra/launcher=basic takes them one at a time)."
        ]
    lines += [NOTE] if any(True for _ in seen_and_hidden(df)) else []
    lines += other_tables(df)
    if any(len(set(part["n"]) - {0}) > 1 for _, _, part in parts(df[df["status"] != "refused"])):
        lines += [
            "n differs between runs of one table, which are of other examples: compare % of full (paired), or run them "
            "with one limit."
        ]
    lines += refused_line(df)
    named: dict[tuple[str, str], list[str]] = {}
    for row in _records(df):
        for note in () if row["status"] == "refused" and not only_refused(df) else _own_notes(row):
            named.setdefault((_title(row), note), []).append(_name(row))
    return lines + [f"{title}: {', '.join(names)}: {note}" for (title, note), names in named.items()]


def only_refused(df: pd.DataFrame) -> bool:
    """Whether nothing but refused jobs was chosen, which then are listed like runs."""
    return bool(df["status"].eq("refused").all())


def refused_line(df: pd.DataFrame) -> list[str]:
    """A line that names the jobs that were refused before they had rows; none where they have tables of their own."""
    jobs = [row for row in _records(df) if row["status"] == "refused"]
    if not jobs or only_refused(df):
        return []
    names = dict.fromkeys(f"{_title(row)} {run_name(row) if row.get('method') else ''}".strip() for row in jobs)
    return [f"refused, without rows: {', '.join(names)}; --where status=refused says why."]


def _shares(df: pd.DataFrame) -> list[tuple[str, str]]:
    """(title, "58 of 144, 40 %") per model and task of which the questions alone count that the full cache answers."""
    found: dict[str, str] = {}
    for row in _records(df):
        if row["verdict99"] == "baseline" and not absent(row["questions"]):
            n, asked = int(row["n"]), int(row["questions"])
            found.setdefault(_title(row), f"{n} of {asked}, {100 * n / asked:.0f} %")
    return list(found.items())


def _checks(df: pd.DataFrame) -> list[tuple[str, str]]:
    """(what the yardstick found, the models of which it found that), of runs that can have a verdict."""
    found: dict[str, dict[str, None]] = {}
    for row in _records(df):
        if row["verdict99"] not in ("baseline", "void") and row["status"] != "refused":
            found.setdefault(row["baseline_check"], {})[str(row.get("model") or "this model")] = None
    return [(check, ", ".join(models)) for check, models in found.items()]


def _levels(df: pd.DataFrame) -> list[str]:
    """The level of the intervals for each number of compared runs."""
    pairs = sorted(
        {(int(count), float(level)) for count, level in zip(df["comparisons"], df["confidence"], strict=True)}
    )
    return [f"{100 * level:.4g} % for {count} run{'s' * (count != 1)}" for count, level in pairs if count]


def _own_notes(row: Row) -> Iterator[str]:
    if row["note"]:
        yield row["note"]
    if row["unscored"]:
        yield f"without a score: {row['unscored']}"
    if row["also"]:
        yield f"also asked for as {row['also']}"
    if row["verdict99"] != "baseline" and row["slots"] < FEW_SLOTS:
        yield FEW_SLOTS_WORDS
    if row["fell_back"]:
        yield row["fell_back"]
    if MOVING in str(row.get("revision") or ""):
        yield f"revision {row['revision']}: whatever the hub holds that day; set a commit hash for numbers to keep"


def _name(row: Row) -> str:
    """A run within its table: the hash tells apart what method and kv_ratio do not, and finds the folder."""
    parts = [plain(label, "").cell(row) for label in ("method", "kv_ratio") if not absent(row.get(label))]
    return " ".join([*parts, f"({row['hash'][:6]})"])


def _records(df: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in df.to_dict("records")]


def groups(df: pd.DataFrame, x: str) -> Iterator[tuple[str, list[dict[str, Any]], list[Column], int]]:
    """(title, rows, columns, how many of them name the row) per NUMERICS, model and task; without refused jobs."""
    if x not in X_AXES:
        raise ConfigError(f"x must be one of {', '.join(X_AXES)}, got {x}")
    if not only_refused(df):
        df = df[df["status"] != "refused"]
    rows = _records(df)
    if x == "bytes":
        rows.sort(key=lambda row: (math.isnan(row["kv_bytes"]), row["kv_bytes"]))
    for title, _, part in parts(df):
        hashes = set(part["hash"])
        inside = [without_code(row) for row in rows if row["hash"] in hashes]
        shared, inside = shared_settings(without_question(inside))
        keys = keys_of(inside, x)
        title = ", ".join([title, *marks_of(inside).values(), *shared])
        yield title, inside, [*keys, *columns_of(inside, x)], len(keys)


def _title(row: Row) -> str:
    return " / ".join(str(row[name]) for name in ("model", "task") if not absent(row.get(name))) or "runs"


def _fit(columns: list[Column], keys: int, rows: Sequence[Row], width: int) -> Iterator[list[Column]]:
    """Cut the columns into as few tables as the width allows, each beginning with the columns that name the row."""
    wide = [
        2 + max(len(line) for text in (column.head, *map(column.cell, rows)) for line in text.split("\n"))
        for column in columns
    ]
    wide[:keys] = [min(each, 2 + width // WIDEST) for each in wide[:keys]]
    part, room = list(range(keys)), width + 1 - sum(wide[:keys])
    for index in range(keys, len(columns)):
        if wide[index] > room and len(part) > keys:
            yield [columns[i] for i in part]
            part, room = list(range(keys)), width + 1 - sum(wide[:keys])
        part.append(index)
        room -= wide[index]
    yield [columns[i] for i in part]
