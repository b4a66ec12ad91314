"""Needle in a haystack: a heat-map per run, length across, depth down."""

from typing import Any

from kvexp.errors import ConfigError
from kvexp.figures.heatmap import grid
from kvexp.report.section import Section
from kvexp.report.source import ReportSource
from kvexp.results.read import Folder


def data(source: ReportSource) -> dict[str, Any] | None:
    """hash -> lengths, depths and, per metric, rows of percentages; None where no run has a length and a depth."""
    grids = {key: _cells(source.folders[key]) for key in source.frame["hash"] if key in source.folders}
    return {key: cells for key, cells in grids.items() if cells} or None


def _cells(folder: Folder) -> dict[str, Any] | None:
    found = {}
    rows = [{**row, "metrics": row.get("metrics") or {}} for row in folder.rows]
    for metric in folder.metrics:
        try:
            found[metric] = grid(rows, metric)
        except ConfigError:  # rows of another task
            return None
    if not found:
        return None
    first = next(iter(found.values()))
    return {
        "lengths": [f"{length:g}" for length in first.columns],
        "depths": first.attrs["depths"],
        "cells": {metric: cells.to_numpy(dtype=float).tolist() for metric, cells in found.items()},
    }


SECTION = Section(
    "needle",
    "Needle in a haystack",
    "Mean score in percent by length of the text (tokens, across) and depth of the needle (percent, down; in "
    "brackets the measured one, where it is another). Grey: nothing was scored there.",
    data,
)
