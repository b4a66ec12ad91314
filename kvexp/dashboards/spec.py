"""Which panels, over which keys of what `kvexp.log` publishes: plain data, made from the runs, without network."""

from typing import Any

import pandas as pd

from kvexp.figures.style import color_of
from kvexp.log.publish import chart_key, charts, divergence_charts, divergence_key
from kvexp.results.units import absent

MEMORY = ("kv_bytes", "peak_kv_bytes")
SPEED = ("tpot_s", "ttft_s", "tokens_per_s")
COLUMNS = ("method", "kv_ratio", "verdict99", "verdict999", "status")


def spec(frame: pd.DataFrame, divergence: pd.DataFrame | None = None) -> dict[str, Any]:
    """`kvexp.results.table`'s runs -> sections of panels, columns of the run list, colors by run.

    divergence: their `divergence_table`, where there is one.

    kind of a panel: points (one per run, over two summary keys), lines (a chart that the sweep's run logged: key),
    table (a table that runs logged: key). An axis that no run has recorded, such as a time, has no panel.
    """
    found = charts(frame)
    metrics = list(dict.fromkeys(rows[0]["headline"] for rows in found.values()))
    sections = {
        "Quality against budget": [*_lines(found, "kv_ratio"), *_points(frame, metrics, ("kv_ratio",))],
        "Quality against speed": _points(frame, metrics, SPEED),
        "Quality against memory": [*_lines(found, "kv_bytes"), *_points(frame, metrics, MEMORY)],
        "Divergence from the full cache": _divergence(divergence),
        "Verdicts": [{"kind": "table", "key": "runs"}],
        "Sample outputs": [{"kind": "table", "key": "examples"}],
    }
    named = frame[frame["status"] != "refused"].to_dict("records")  # a refused job is no run there
    return {
        "sections": [{"name": name, "panels": panels} for name, panels in sections.items() if panels],
        "columns": [*COLUMNS, *(f"{metric}_of_full" for metric in metrics)],
        "colors": {row["hash"]: color_of(str(row["method"])) for row in named if not absent(row.get("method"))},
    }


def _lines(found: dict[str, list[dict[str, Any]]], axis: str) -> list[dict[str, str]]:
    return [
        {"kind": "lines", "key": chart_key(axis, title), "x": axis, "y": f"{rows[0]['headline']}_of_full"}
        for title, rows in found.items()
    ]


def _divergence(divergence: pd.DataFrame | None) -> list[dict[str, str]]:
    """The charts of `kvexp.log` of log10 KL that have a point."""
    if divergence is None or divergence.empty:
        return []
    return [
        {"kind": "lines", "key": divergence_key(axis, title), "x": axis, "y": "log10_kl"}
        for title, rows in divergence_charts(divergence).items()
        for axis in ("kv_ratio", "kv_bytes")
        if any(not absent(row[axis]) for row in rows)
    ]


def _points(frame: pd.DataFrame, metrics: list[str], axes: tuple[str, ...]) -> list[dict[str, str]]:
    return [
        {"kind": "points", "x": axis, "y": f"{metric}_of_full"}
        for metric in metrics
        for axis in axes
        if axis in frame and (frame[axis].notna() & frame[f"{metric}_of_full"].notna()).any()
    ]
