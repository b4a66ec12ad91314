"""Speed exhibits: GPU results of benchmarks/results and the paper's numbers. Nothing is measured here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio, ratio
from benchmarks.store import Cell, Results
from experiments.lib.draw import METHODS, finish, in_order, legend, panel_grid
from experiments.lib.record import WAITS
from experiments.lib.tables import paper_numbers
from experiments.lib.verdicts import Judge, Verdict, above
from kvexp.results.plots import color_of, marker_of

NONE_YET = f"{WAITS}: `make bench-gpu` writes benchmarks/results"
COLUMNS = ("source", "seqlen", "method", "metric", "value", "low", "high", "machine")


def cells(benchmark: str, **wanted: Any) -> list[Cell]:
    """Cells of a GPU on the MPT-7B layout (not tiny) whose key holds these values."""
    key = {"device": "cuda", "tiny": False, "shape": "mpt_7b"} | wanted
    return [cell for cell in Results(benchmark).cells if all(cell["key"].get(k) == v for k, v in key.items())]


def newest(lengths: Iterable[str], **wanted: Any) -> Iterator[tuple[str, Cell]]:
    """(Length, newest cell) of the benchmark `whole` at each length that was measured."""
    for length in lengths:
        for cell in cells("whole", length=length, **wanted)[-1:]:
            yield length, cell


def samples(cell: Cell, name: str) -> list[dict[str, Any]]:
    """A variant's samples; empty where it is missing or died."""
    row = next((row for row in cell["rows"] if row["variant"] == name), None)
    return [] if row is None or any("error" in sample for sample in row["samples"]) else list(row["samples"])


def over(numerator: Sequence[dict[str, Any]], denominator: Sequence[dict[str, Any]], field: str) -> Ratio | None:
    """Median of the turns' ratios, with the smallest and the largest."""
    if not numerator or not denominator:
        return None
    return ratio([sample[field] for sample in numerator], [sample[field] for sample in denominator])


def ours(seqlen: str, method: str, metric: str, measured: Ratio, cell: Cell) -> dict[str, Any]:
    values = ("ours", seqlen, method, metric, measured.value, measured.low, measured.high, cell["from"]["machine"])
    return dict(zip(COLUMNS, values, strict=True))


def with_paper(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Our rows, then the paper's (its reading error as low and high)."""
    paper = paper_numbers(name)
    for line in paper.to_dict("records"):
        method = f"{line['method']}@{line['kv_ratio']:g}" if line["kv_ratio"] == line["kv_ratio"] else line["method"]
        if line.get("batch_size", 1) not in (1, ""):
            method += f" batch {line['batch_size']:g}"
        value, error = line["value"], line["reading_error"]
        values = ("paper", str(line["seqlen"]), method, line["metric"], value, value - error, value + error, "")
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return pd.DataFrame(rows, columns=COLUMNS)


def draw_speed(table: pd.DataFrame, figure: Figure, ylabel: str, metrics: Sequence[str]) -> None:
    """Points per length, ours filled and the paper's hollow; a panel per metric."""
    (panels,) = panel_grid(figure, 1, len(metrics), (3.4 * len(metrics), 2.9))
    lengths = list(dict.fromkeys(table["seqlen"]))
    for axes, metric in zip(panels, metrics, strict=True):
        rows = table[table["metric"].eq(metric)]
        for method in in_order(rows["method"].tolist(), METHODS):
            for source in ("paper", "ours"):
                line = rows[rows["method"].eq(method) & rows["source"].eq(source)]
                if line.empty:
                    continue
                name = method.partition("@")[0]
                look = {
                    "color": color_of(name),
                    "marker": "*" if " batch " in method else marker_of(name),
                    "markersize": 7 if " batch " in method else 4.5,
                    "linewidth": 1.0,
                    "capsize": 2,
                }
                look |= {"linestyle": ":", "markerfacecolor": "none"} if source == "paper" else {}
                where = [lengths.index(at) for at in line["seqlen"]]
                reach = [line["value"] - line["low"], line["high"] - line["value"]]
                axes.errorbar(
                    where,
                    line["value"].to_numpy(),
                    [end.to_numpy() for end in reach],
                    label=f"{method} ({source})",
                    **look,
                )
        axes.set_xticks(range(len(lengths)), lengths)
        finish(axes, "tokens", ylabel if len(metrics) == 1 else metric.replace("_", " "))
    machines = sorted(set(table["machine"]) - {""})
    title = "; ".join(machines) if machines else "the paper's points; no GPU result of ours yet"
    figure.suptitle(textwrap.fill(title, 60 * len(metrics)), fontsize=7)
    legend(figure)


def note(figure: Figure, text: str) -> None:
    """Draw a text alone, where there is nothing else to show."""
    figure.set_size_inches(6.0, 1.0)
    figure.text(0.5, 0.5, textwrap.fill(text, 75), ha="center", va="center", fontsize=7)


def times_at(seqlen: str, method: str, metric: str, mark: float, sentence: str) -> Judge:
    """Our number at or above a mark, by the turns' range. sentence: with {value}, {low}, {high} and {machine}."""

    def holds(table: pd.DataFrame) -> Verdict:
        row = found_of(table, seqlen, method, metric)
        if row is None:
            return None, NONE_YET
        return above(row["low"], row["high"], mark), sentence.format(**row)

    return holds


def found_of(table: pd.DataFrame, seqlen: str, method: str, metric: str) -> Any:
    """Our row, or None."""
    rows = table[table["source"].eq("ours") & table["seqlen"].eq(seqlen) & table["method"].eq(method)]
    rows = rows[rows["metric"].eq(metric)]
    return rows.iloc[0] if len(rows) else None
