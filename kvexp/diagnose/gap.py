"""How far a method is from ideal choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvexp.diagnose.case import plain_table, short_title, with_method
from kvexp.diagnose.options import WITH_ENGINE
from kvexp.results import stats
from kvexp.results.blocks import TOO_FEW, estimate, fixed, records
from kvexp.results.read import Folder, baseline_of, check_pair, chosen, folders, number, titled
from kvexp.run.batches import evaluate_run, prefill_groups, run_group, settings_at, with_limit_of
from kvexp.run.session import Session
from kvexp.run.settings import Settings
from kvexp.util.errors import ConfigError, refuse
from kvexp.util.output import Console

# Quality lost because of the budget, and because of what was chosen to fill it: full less ideal, ideal less method.


IDEAL = "ideal"
PARTS = {"budget": "#0072b2", "selection": "#e69f00"}  # what a loss is due to, and its color
KEYS = ("model", "task", "kv_ratio", "tokens", "method", "setting")  # kv_ratio and tokens: None for a budget in bytes


def gaps(outputs: str | Path, where: Mapping[str, Any] | None = None, metric: str | None = None) -> pd.DataFrame:
    """One row per run that has an ideal run (method=ideal) of the same model, task and budget, and a baseline.

    Columns: KEYS, metric, n, full, ideal, score (means in the metric's points over the n examples that all three
    scored), and of both PARTS the points lost with its 95 percent interval by paired bootstrap (NAME, NAME_low,
    NAME_high: NaN for too few examples); lost is positive also where less is better. missing (attrs): runs left out for
    want of an ideal run.
    """
    rows, missing = [], []
    for folder, full, ideal in _with_ideal(outputs, where or {}):
        if full is None:
            continue
        if ideal is not None:
            check_pair(folder, ideal)
        row = None if ideal is None else _row(folder, ideal, full, metric)
        if row is None:
            missing.append(folder)
        else:
            rows.append(row)
    if not rows:
        raise ConfigError(
            f"no run under {outputs} has an ideal run to compare with: run the same sweep with method=ideal at the "
            "same kv_ratio"
        )
    frame = pd.DataFrame(rows).sort_values(["model", "task", "kv_ratio", "tokens", "score"], ignore_index=True)
    frame.attrs["missing"] = sorted({f"{run.labels['method']} {run.labels.get('kv_ratio')}" for run in missing})
    return frame


def _with_ideal(outputs: str | Path, where: Mapping[str, Any]) -> Iterator[tuple[Folder, Folder | None, Folder | None]]:
    """(run, its baseline, its ideal run) of every scored run of another method; None where there is none."""
    known = folders(outputs)
    by_hash = {folder.run.hash: folder for folder in known}
    ideals = {_budget(folder): folder for folder in known if folder.labels.get("method") == IDEAL and folder.scored}
    for folder in chosen(known, where):
        if folder.labels.get("method") != IDEAL and folder.scored and folder.run.baseline is not None:
            yield folder, baseline_of(folder, by_hash), ideals.get(_budget(folder))


def _budget(folder: Folder) -> str:
    """Equal for runs of one baseline whose queries may see equally many slots."""
    return repr((folder.run.baseline, sorted((folder.run.config.get("budget") or {}).items())))


def _row(folder: Folder, ideal: Folder, full: Folder, metric: str | None) -> dict[str, Any] | None:
    name = metric or folder.metrics[0]
    sides = [
        {example: number(row["metrics"].get(name)) for example, row in side.scored.items()}
        for side in (full, ideal, folder)
    ]
    shared = [example for example in sides[2] if all(np.isfinite(side.get(example, np.nan)) for side in sides)]
    if not shared:
        return None
    scores = np.array([[side[example] for side in sides] for example in shared])
    sign = -1.0 if stats.lower_is_better(name) else 1.0
    losses = sign * (scores[:, :2] - scores[:, 1:])
    labels = folder.labels
    row = {key: labels.get(key) for key in KEYS} | {
        "question": folder.question,
        "metric": name,
        "n": len(shared),
        "hash": folder.run.hash,
    }
    row |= dict(zip(("full", "ideal", "score"), scores.mean(0).tolist(), strict=True))
    for place, name_of_part in enumerate(PARTS):
        row |= stats.mean_columns(name_of_part, losses[:, place])
    return row


def show(frame: pd.DataFrame, console: Console) -> None:
    """Print one table per model and task of what `gaps` returns."""
    for (model, task), block in frame.groupby(["model", "task"], sort=False):
        points = f"points of {block['metric'].iloc[0]} (n = {block['n'].min()})"
        title = f"{titled(f'{model} / {task}', block['question'])}: {points}"
        console.print(title, style="bold", highlight=False, markup=False)
        lost = "lost to\nthe budget", "lost to\nselection"
        table = plain_table("method", "budget", "full", "ideal", "score", *lost)
        for row in records(block):
            means = (fixed(row[name], 1) for name in ("full", "ideal", "score"))
            table.add_row(row["method"], _size(row), *means, *(estimate(row, name, 1) for name in PARTS))
        console.print(table)
        console.print()
    console.print("lost to the budget: full less ideal (each query's exact top k); lost to selection: ideal less the")
    console.print("method at the same budget; in brackets 95 % intervals, paired bootstrap over examples")
    if (frame["n"] < stats.MIN_PAIRS).any():
        console.print(f"{TOO_FEW}: under {stats.MIN_PAIRS} examples an interval means nothing")
    if frame.attrs["missing"]:
        missing = ", ".join(frame.attrs["missing"])
        console.print(f"no ideal run of the same budget: {missing}", highlight=False, markup=False)


def _size(row: Mapping[str, Any]) -> str:
    for name, unit in (("kv_ratio", ""), ("tokens", " slots")):
        if row[name] is not None and np.isfinite(row[name]):
            return f"{row[name]:g}{unit}"
    return str(row["setting"])  # bytes_ratio=0.3


def draw(frame: pd.DataFrame) -> Figure:
    """Stacked bars of what was lost, one panel per model and task; gains (below 0) hang from the line."""
    panels = list(frame.groupby(["model", "task"], sort=False))
    widths = [max(2.2, 0.5 * len(block)) for _, block in panels]
    figure = Figure(figsize=(sum(widths) + 1.6, 4.2), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axis, ((model, task), block) in zip(every, panels, strict=True):
        _bars(axis, block)
        axis.set_title(f"{model}\n{titled(str(task), block['question'])} (n = {block['n'].min()})", fontsize=9)
        axis.set_ylabel(f"points of {block['metric'].iloc[0]} lost", fontsize=9)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write the figure; ConfigError for another kind of picture. In an .svg letters stay letters, which is smaller."""
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{file} must end in .png, .svg or .pdf")
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, dpi=110)


def _bars(axis: Any, block: pd.DataFrame) -> None:
    places = np.arange(len(block))
    up, down = np.zeros(len(block)), np.zeros(len(block))
    for name, color in PARTS.items():
        height = block[name].to_numpy(dtype=float)
        bottom = np.where(height >= 0, up, down)
        axis.bar(places, height, bottom=bottom, color=color, width=0.7, label=f"lost to the {name}")
        spread = np.vstack([height - block[f"{name}_low"], block[f"{name}_high"] - height]).clip(min=0)
        shift = -0.12 if name == "budget" else 0.12
        axis.errorbar(places + shift, bottom + height, spread, fmt="none", ecolor="k", elinewidth=1, capsize=2)
        up, down = up + np.maximum(height, 0), down + np.minimum(height, 0)
    axis.axhline(0, color="k", lw=0.8)
    names = [f"{row['method']} {_size(row)}" for row in records(block)]
    axis.set_xticks(places, names, rotation=60, ha="right", fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def make_ideals(outputs: str, where: Mapping[str, Any], console: Console) -> None:
    """Run method=ideal at the model, task, budget and examples of every run that lacks such a run."""
    wanted: dict[str, Settings] = {}
    for folder, _, ideal in _with_ideal(outputs, where):
        if ideal is not None:
            continue
        try:
            settings = settings_at(folder.run)
            refuse(settings, [WITH_ENGINE])
            settings = with_method(settings, IDEAL)
            settings = with_limit_of(settings, 1 + max(row["index"] for row in folder.rows))
        except ConfigError as error:
            console.print(f"{short_title(folder.run)}: no ideal run: {error}", highlight=False, markup=False)
            continue
        wanted[str(settings.identity)] = settings
    session = Session()
    for group in prefill_groups(wanted.values()):
        run_group(group, session)
    for settings in wanted.values():
        evaluate_run(settings, session)
