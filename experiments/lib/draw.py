"""Panels of quality against kv_ratio, of one or two settings, and of models: full in black, 99 % of it in red."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.data import paper_numbers_for
from experiments.lib.titles import model_words, panel_title
from kvexp.results.plots import DASHES, MARK_COLOR, color_of, dodge, marker_of

# As the papers order them, each testbed model at the place of the one whose layout it has.
MODELS = (
    *("gptj_6b", "testbed_rope", "cerebras_6b7", "testbed_learned", "mpt_7b", "mpt_7b_storywriter", "mpt_7b_chat"),
    *("testbed_alibi", "llama_7b", "llama2_7b", "llama2_7b_chat", "mistral_7b_instruct_v02", "testbed_gqa"),
)
METHODS = (
    *("full", "dilated_window", "window", "streaming_llm", "random", "key_attention", "h2o", "h2o_damping", "a2sf"),
    *("keyformer", "h2o_c", "infllm", "sparq", "quest", "pqcache", "oracle", "ideal"),
)
TASKS = ("cnn_dailymail", "testbed_summary", "soda", "testbed_dialogue", "govreport")
METRICS = {
    **{"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
    **{"acc": "accuracy (%)", "f1": "F1", "exact": "answered (%)"},
}
WIDTH, HEIGHT = 2.6, 2.3  # inches of a panel: three make a page's width


def in_order(values: Sequence[str], order: Sequence[str]) -> list[str]:
    """Each once, those of the order first."""
    found = list(dict.fromkeys(values))
    return [name for name in order if name in found] + [name for name in found if name not in order]


def panels_of(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(model, task) of every panel: a row of the page per task, tasks and models in the papers' order."""
    tasks, models = in_order(table["task"].tolist(), TASKS), in_order(table["model"].tolist(), MODELS)
    there = set(zip(table["model"], table["task"], strict=True))
    return [(model, task) for task in tasks for model in models if (model, task) in there]


def curves(
    table: pd.DataFrame,
    figure: Figure,
    paper: str = "",
    x: str = "kv_ratio",
    xlabel: str = "KV cache (% of the prompt)",
) -> None:
    """Draw `lib.data.points`: a panel per model and task, a line per method and setting, in the metric's unit.

    paper: the exhibit whose numbers of the paper are overlaid (hollow) where model, task, method and setting are
    ours. x: a column of the table; a share of the prompt is shown in percent.
    """
    metric, panels = str(table["metric"].iloc[0]), panels_of(table)
    columns = min(3, len(panels))
    rows = ceil(len(panels) / columns)
    figure.set_size_inches(WIDTH * columns + 0.3, HEIGHT * rows + 0.45)
    figure.set_layout_engine("constrained")
    known = paper_numbers_for(paper, table) if paper else None
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        part = table[table["model"].eq(model) & table["task"].eq(task)]
        ran = set(zip(part["method"], part["setting"], strict=True))
        _lines(part, axes, x)
        if known is not None:
            own = known["model"].eq(model) & known["task"].eq(task) & known["metric"].eq(metric)
            same = [each in ran for each in zip(known["method"], known["setting"], strict=True)]
            _paper(known[own & pd.Series(same, index=known.index, dtype=bool)], axes)
        title = textwrap.fill(panel_title(model, task, part.get("question", ())), 38)
        axes.set_title(f"{title}\n(n = {int(part['n'].min())})", fontsize=8)
        finish(axes, xlabel, METRICS.get(metric, metric) if place % columns == 0 else "")
    legend(figure)


def _lines(part: pd.DataFrame, axes: Axes, x: str) -> None:
    full = part[part["method"].eq("full")]
    if len(full):
        levels(axes, float(full["value"].iloc[0]))
    found = []
    for method in in_order(part["method"].tolist(), METHODS):
        runs = part[part["method"].eq(method) & part[x].notna()]
        for (setting, line), dash in zip(runs.groupby("setting", sort=False), DASHES * 3, strict=False):
            label = f"{method} {setting}".strip() if runs["setting"].nunique() > 1 else method
            found.append((line.sort_values(x), axes, x, method, label, dash))
    for place, line in enumerate(found):
        line_of(*line, place=place, count=len(found))


def levels(axes: Axes, full: float) -> None:
    """The full cache's black line and the red one at 99 % of it."""
    axes.axhline(full, color="black", linewidth=1.3, label="full", zorder=1)
    axes.axhline(0.99 * full, color=MARK_COLOR, linewidth=1.0, linestyle=(0, (2, 1.5)), label="99 % of full", zorder=1)


def line_of(
    line: pd.DataFrame, axes: Axes, x: str, method: str, label: str, dash: Any = "-", place: int = 0, count: int = 1
) -> None:
    """One method's points with their intervals, the line `place` of `count` in these axes."""
    where = line[x] * (100 if x == "kv_ratio" else 1)
    reach = [(line["value"] - line["low"]).clip(lower=0), (line["high"] - line["value"]).clip(lower=0)]
    drawn = axes.errorbar(
        *(where.to_numpy(), line["value"].to_numpy(), [end.to_numpy() for end in reach]),  # one point is no scalar
        **{"color": color_of(method), "marker": marker_of(method), "label": label, "linestyle": dash},
        **{"markersize": 3.5, "linewidth": 1.2, "elinewidth": 0.8, "capsize": 1.5},
    )
    dodge(drawn.get_children(), place, count)


def _paper(known: pd.DataFrame, axes: Axes) -> None:
    """The paper's own points, hollow, with their reading error; its full cache as a thin dotted line."""
    order = in_order(known["method"].tolist(), METHODS)
    several = known["setting"].nunique() > 1
    for (method, setting), theirs in sorted(
        known.groupby(["method", "setting"]), key=lambda one: order.index(one[0][0])
    ):
        if method == "full":
            axes.axhline(
                float(theirs["value"].iloc[0]), color="black", linewidth=0.8, linestyle=":", label="full (paper)"
            )
            continue
        axes.errorbar(
            *((100 * theirs["kv_ratio"]).to_numpy(), theirs["value"].to_numpy(), theirs["reading_error"].to_numpy()),
            **{"color": color_of(method), "marker": marker_of(method), "markerfacecolor": "none", "markersize": 5},
            **{
                "linewidth": 0.7,
                "linestyle": ":",
                "label": f"{method} {setting if several else ''}".strip() + " (paper)",
            },
        )


def finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, columns: int = 0) -> None:
    """Every label of every panel once, below all of them."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    width = figure.get_size_inches()[0]
    labels = [textwrap.fill(label, int((width - 0.6) / 0.055)) for label in entries]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = columns or max(1, min(len(entries), int(width / (0.06 * longest + 0.5))))
    figure.legend(list(entries.values()), labels, fontsize=7, loc="outside lower center", ncols=columns, frameon=False)
    # Matplotlib fills a legend column by column.
    rows = ceil(len(labels) / columns)
    tall = (sum(label.count("\n") + 1 for label in labels[i : i + rows]) for i in range(0, len(labels), rows))
    lines = max(tall)
    figure.set_size_inches(width, figure.get_size_inches()[1] + 0.15 * (lines - 1))


def settings_curves(table: pd.DataFrame, figure: Figure, x: str, xlabel: str) -> None:
    """A panel per model and task: the metric over a numeric column of the setting, NaN for full."""
    panels = panels_of(table)
    figure.set_size_inches(WIDTH * len(panels) + 0.3, HEIGHT + 0.55)
    figure.set_layout_engine("constrained")
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        part = table[table["model"].eq(model) & table["task"].eq(task)]
        levels(axes, float(part[part["method"].eq("full")]["value"].iloc[0]))
        runs = part[part[x].notna()]
        lines = runs.groupby(["method", "kv_ratio"])
        ratios = sorted(set(runs["kv_ratio"]))
        for order, ((method, ratio), line) in enumerate(lines):
            look = {"dash": DASHES[ratios.index(ratio) % len(DASHES)], "place": order, "count": lines.ngroups}
            line_of(line, axes, x, str(method), f"{method} at {100 * ratio:g} %", **look)
        title = textwrap.fill(panel_title(model, task, part.get("question", ())), 38)
        axes.set_title(f"{title}\n(n = {int(part['n'].min())})", fontsize=8)
        finish(axes, xlabel, METRICS.get(str(table["metric"].iloc[0]), "") if place == 0 else "")
    legend(figure)


def settings_grid(table: pd.DataFrame, figure: Figure, down: str, across: str) -> None:
    """A panel per model and task: percent of full in each cell of two settings, with half the width of its interval."""
    panels = panels_of(table)
    figure.set_size_inches((WIDTH + 0.2) * len(panels) + 0.6, HEIGHT + 0.3)
    figure.set_layout_engine("constrained")
    runs = table[table[down].notna()]
    known = runs["of_full"].dropna()
    reach = (float(known.min()), float(known.max())) if len(known) else (0.0, 100.0)
    image = None
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        part = runs[runs["model"].eq(model) & runs["task"].eq(task)]
        cells = part.pivot_table(index=down, columns=across, values="of_full", dropna=False)
        spread = part.assign(half=(part["of_full_high"] - part["of_full_low"]) / 2)
        half = spread.pivot_table(index=down, columns=across, values="half", dropna=False)
        image = axes.imshow(cells.to_numpy(), cmap="cividis", vmin=reach[0], vmax=reach[1], aspect="auto")
        middle = sum(reach) / 2
        for i, row in enumerate(cells.to_numpy()):
            for j, cell in enumerate(row):
                color = "white" if cell < middle else "black"
                wide = half.to_numpy()[i][j]  # NaN of too few examples
                text = "-" if np.isnan(cell) else f"{cell:.0f}" if np.isnan(wide) else f"{cell:.0f}\n±{wide:.0f}"
                axes.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(cells.shape[1]), [f"{value:g}" for value in cells.columns], fontsize=7)
        axes.set_yticks(range(cells.shape[0]), [f"{value:g}" for value in cells.index], fontsize=7)
        axes.set_xlabel(across, fontsize=8)
        axes.set_ylabel(down if place == 0 else "", fontsize=8)
        title = textwrap.fill(panel_title(model, task, part.get("question", ())), 38)
        axes.set_title(f"{title}\n(n = {int(part['n'].min())})", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.9).set_label(
            f"% of full's {METRICS.get(str(runs['metric'].iloc[0]), runs['metric'].iloc[0])}", fontsize=8
        )


def best_of(runs: pd.DataFrame, column: str) -> str:
    """The setting of the highest value on each model, in words."""
    best = runs.loc[runs.groupby("model", sort=False)["value"].idxmax()]
    return ", ".join(
        f"{model} {at if isinstance(at, str) else f'{at:g}'}"
        for model, at in zip(best["model"], best[column], strict=True)
    )


LINES = ("#332288", "#117733", "#aa4499", "#661100")  # of models: none is a method's color


def model_lines(table: pd.DataFrame, paper: pd.DataFrame, figure: Figure, x: str, value: str) -> Axes:
    """Draw columns x and value (with _low and _high) of a table; `paper` has x and value too, of its own models."""
    figure.set_size_inches(4.2, 2.6)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    models = in_order(table["model"].tolist(), MODELS)
    for place, model in enumerate(models):
        line = table[table["model"].eq(model)].sort_values(x)
        reach = [line[value] - line[f"{value}_low"], line[f"{value}_high"] - line[value]]
        look = {"color": LINES[place % len(LINES)], "marker": "osD^"[place % 4], "markersize": 4, "linewidth": 1.2}
        drawn = axes.errorbar(line[x], line[value], reach, label=model_words(model), capsize=2, **look)
        dodge(drawn.get_children(), place, len(models))
        known = paper[paper["model"].eq(model)]
        if len(known):
            look |= {"linestyle": ":", "markerfacecolor": "none"}
            axes.plot(known[x], known[value], label=f"{model_words(model)} (paper)", **look)
    axes.tick_params(labelsize=7)
    axes.grid(color="0.92", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return axes
