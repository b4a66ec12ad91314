"""The pictures of exhibits: curves, settings, bars and divergences in panels; full in black, 99 % of it in red."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.tables import paper_numbers_for, pooled_kl
from kvexp.results.plots import DASHES, LEAST, MARK_COLOR, color_of, divergence, dodge, marker_of, plain_numbers
from kvexp.results.read import titled
from kvexp.run.store import EPSILON_KL

MODEL_NAMES = {
    "gptj_6b": "GPT-J 6B",
    "cerebras_6b7": "Cerebras-GPT 6.7B",
    "mpt_7b": "MPT-7B",
    "mpt_7b_storywriter": "MPT-7B StoryWriter",
    "mpt_7b_chat": "MPT-7B Chat",
    "llama_7b": "LLaMA 7B",
    "llama2_7b": "Llama 2 7B",
    "llama2_7b_chat": "Llama 2 7B Chat",
    "llama31_8b_instruct": "Llama 3.1 8B Instruct",
    "mistral_7b_instruct_v02": "Mistral 7B Instruct",
    "opt_2b7": "OPT 2.7B",
    "opt_6b7": "OPT 6.7B",
    "smollm2_135m": "SmolLM2 135M",
    "testbed_rope": "testbed, RoPE",
    "testbed_learned": "testbed, learned positions",
    "testbed_alibi": "testbed, ALiBi",
    "testbed_gqa": "testbed, grouped heads",
}
TASK_NAMES = {
    "cnn_dailymail": "CNN/DailyMail",
    "soda": "SODA",
    "govreport": "GovReport",
    "gsm8k_cot": "GSM8K",
    "xsum": "XSum",
    "longbench/hotpotqa_e": "HotpotQA",
    "longbench/2wikimqa_e": "2WikiMQA",
    "longbench/qasper_e": "Qasper",
    "longbench/multifieldqa_en_e": "MultiFieldQA",
    "arc_easy": "ARC-Easy",
    "copa": "COPA",
    "openbookqa": "OpenBookQA",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
    "news": "own articles",
    "news_qa": "questions on own articles",
    "news_needle": "needle in own articles",
    "testbed_summary": "summaries",
    "testbed_dialogue": "dialogues",
    "testbed_needle": "needle",
    "testbed_qa": "questions",
    "testbed_choice": "multiple choice",
}


def model_words(name: str) -> str:
    return MODEL_NAMES.get(name, name.replace("_", " "))


def panel_title(model: str, task: str = "", places: Iterable[Any] = ()) -> str:
    """ "GPT-J 6B: CNN/DailyMail, question in prompt"; a name that is not known has its underscores taken out.

    places: where the question was, of the runs shown.
    """
    task, comma, rest = task.partition(", ") if ", " in task else task.partition(" ")
    known = TASK_NAMES.get(task, (task.partition("/")[2] or task).replace("_", " "))
    return titled(": ".join(filter(None, (model_words(model), f"{known}{comma}{rest.replace('_', ' ')}"))), places)


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
    """Each value once, in this order; the others after them."""
    names = list(dict.fromkeys(values))
    return [name for name in order if name in names] + [name for name in names if name not in order]


def by_method(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The table sorted by these columns, methods in the papers' order."""
    place = {name: i for i, name in enumerate(in_order(table["method"].tolist(), METHODS))}
    return table.sort_values(list(keys), key=lambda c: c.map(place) if c.name == "method" else c, kind="stable")


def panel_grid(figure: Figure, rows: int, columns: int, size: tuple[float, float]) -> np.ndarray:
    """Axes [rows, columns] of a figure of this size in inches."""
    figure.set_size_inches(*size)
    figure.set_layout_engine("constrained")
    return figure.subplots(rows, columns, squeeze=False)


def panels_of(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(model, task) of every panel: a row of the page per task, tasks and models in the papers' order."""
    tasks, models = in_order(table["task"].tolist(), TASKS), in_order(table["model"].tolist(), MODELS)
    pairs = set(zip(table["model"], table["task"], strict=True))
    return [(model, task) for task in tasks for model in models if (model, task) in pairs]


def in_panels(
    table: pd.DataFrame, figure: Figure, columns: int, size: Callable[[int, int], tuple[float, float]], wrap: int = 38
) -> Iterator[tuple[bool, Axes, pd.DataFrame]]:
    """Each panel: whether it is the first of its row, its titled axes and its rows of the table.

    size: of columns and rows of panels, in inches; wrap: letters of a line of a title.
    """
    panels = panels_of(table)
    columns = min(columns, len(panels))
    rows = ceil(len(panels) / columns)
    figure.set_size_inches(*size(columns, rows))
    figure.set_layout_engine("constrained")
    for place, (model, task) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        runs = table[table["model"].eq(model) & table["task"].eq(task)]
        title = textwrap.fill(panel_title(model, task, runs.get("question", ())), wrap)
        axes.set_title(f"{title}\n(n = {int(runs['n'].min())})", fontsize=8)
        yield place % columns == 0, axes, runs


def curves(
    table: pd.DataFrame,
    figure: Figure,
    paper: str = "",
    x: str = "kv_ratio",
    xlabel: str = "KV cache (% of the prompt)",
) -> None:
    """Draw `lib.tables.points`: a panel per model and task, a line per method and setting, in the metric's unit.

    paper: the exhibit whose numbers of the paper are overlaid (hollow) where model, task, method and setting are
    ours. x: a column of the table; a share of the prompt is shown in percent.
    """
    metric = str(table["metric"].iloc[0])
    known = paper_numbers_for(paper, table) if paper else None
    for first, axes, runs in in_panels(table, figure, 3, lambda c, r: (WIDTH * c + 0.3, HEIGHT * r + 0.45)):
        _lines(runs, axes, x)
        if known is not None:
            ran = set(zip(runs["method"], runs["setting"], strict=True))
            here = known["model"].isin(runs["model"]) & known["task"].isin(runs["task"]) & known["metric"].eq(metric)
            same = [pair in ran for pair in zip(known["method"], known["setting"], strict=True)]
            _paper(known[here & pd.Series(same, index=known.index, dtype=bool)], axes)
        finish(axes, xlabel, METRICS.get(metric, metric) if first else "")
    legend(figure)


def _lines(group: pd.DataFrame, axes: Axes, x: str) -> None:
    full = group[group["method"].eq("full")]
    if len(full):
        levels(axes, float(full["value"].iloc[0]))
    lines = []
    for method in in_order(group["method"].tolist(), METHODS):
        runs = group[group["method"].eq(method) & group[x].notna()]
        for (setting, line), dash in zip(runs.groupby("setting", sort=False), DASHES * 3, strict=False):
            label = f"{method} {setting}".strip() if runs["setting"].nunique() > 1 else method
            lines.append((line.sort_values(x), axes, x, method, label, dash))
    for place, line in enumerate(lines):
        line_of(*line, place=place, count=len(lines))


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
        known.groupby(["method", "setting"]), key=lambda item: order.index(item[0][0])
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
    for first, axes, shown in in_panels(table, figure, len(table), lambda c, _: (WIDTH * c + 0.3, HEIGHT + 0.55)):
        levels(axes, float(shown[shown["method"].eq("full")]["value"].iloc[0]))
        runs = shown[shown[x].notna()]
        lines = runs.groupby(["method", "kv_ratio"])
        ratios = sorted(set(runs["kv_ratio"]))
        for order, ((method, ratio), line) in enumerate(lines):
            look = {"dash": DASHES[ratios.index(ratio) % len(DASHES)], "place": order, "count": lines.ngroups}
            line_of(line, axes, x, str(method), f"{method} at {100 * ratio:g} %", **look)
        finish(axes, xlabel, METRICS.get(str(table["metric"].iloc[0]), "") if first else "")
    legend(figure)


def settings_grid(table: pd.DataFrame, figure: Figure, down: str, across: str) -> None:
    """A panel per model and task: percent of full in each cell of two settings, with half the width of its interval."""
    runs = table[table[down].notna()]
    runs = runs.assign(half=(runs["of_full_high"] - runs["of_full_low"]) / 2)
    known = runs["of_full"].dropna()
    reach = (float(known.min()), float(known.max())) if len(known) else (0.0, 100.0)
    image = None
    for first, axes, shown in in_panels(runs, figure, len(runs), lambda c, _: ((WIDTH + 0.2) * c + 0.6, HEIGHT + 0.3)):
        cells, half = (
            shown.pivot_table(index=down, columns=across, values=name, dropna=False) for name in ("of_full", "half")
        )
        image = axes.imshow(cells.to_numpy(), cmap="cividis", vmin=reach[0], vmax=reach[1], aspect="auto")
        for i, row in enumerate(cells.to_numpy()):
            for j, cell in enumerate(row):
                wide = half.to_numpy()[i][j]  # NaN of too few examples
                text = "-" if np.isnan(cell) else f"{cell:.0f}" if np.isnan(wide) else f"{cell:.0f}\n±{wide:.0f}"
                color = "white" if cell < sum(reach) / 2 else "black"
                axes.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(cells.shape[1]), [f"{value:g}" for value in cells.columns], fontsize=7)
        axes.set_yticks(range(cells.shape[0]), [f"{value:g}" for value in cells.index], fontsize=7)
        axes.set_xlabel(across, fontsize=8)
        axes.set_ylabel(down if first else "", fontsize=8)
    if image is not None:
        metric = runs["metric"].iloc[0]
        bar = figure.colorbar(image, ax=figure.axes, shrink=0.9)
        bar.set_label(f"% of full's {METRICS.get(str(metric), metric)}", fontsize=8)


def best_of(runs: pd.DataFrame, column: str) -> str:
    """The setting of the highest value on each model, as "MODEL SETTING, …"."""
    best = runs.loc[runs.groupby("model", sort=False)["value"].idxmax()]
    return ", ".join(
        f"{model} {at if isinstance(at, str) else f'{at:g}'}"
        for model, at in zip(best["model"], best[column], strict=True)
    )


LINES = ("#332288", "#117733", "#aa4499", "#661100")  # of models: none is a method's color


def model_lines(
    table: pd.DataFrame, paper: pd.DataFrame, figure: Figure, x: str, value: str, xlabel: str, ylabel: str
) -> Axes:
    """Draw columns x and value (with _low and _high) of a table; `paper` has x and value too, of its own models."""
    axes: Axes = panel_grid(figure, 1, 1, (4.2, 2.6))[0, 0]
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
    finish(axes, xlabel, ylabel)
    axes.legend(fontsize=7, frameon=False)
    return axes


SHADES = (1.0, 0.72, 0.5, 0.35)  # of a method's color, for the runs of one method side by side in a group


def bars(
    table: pd.DataFrame,
    figure: Figure,
    paper: str = "",
    columns: int = 3,
    width: float = 2.6,
    full_as_bar: bool = False,
) -> None:
    """Draw a table of `points` with a column `bar`, the name below each bar, in the table's order.

    A column `shade`, if there is one, groups: bars of one name stand side by side, one per shade. full_as_bar: full
    attention is no line, where it differs from shade to shade.
    """
    metric = str(table["metric"].iloc[0])
    known = paper_numbers_for(paper, table) if paper else None

    def size(columns: int, rows: int) -> tuple[float, float]:
        return width * columns + 0.3, (HEIGHT + 0.35) * rows + 0.35

    for first, axes, runs in in_panels(table, figure, columns, size, int(16 * width)):
        full = runs["method"].eq("full")
        if full.any() and not full_as_bar:
            levels(axes, float(runs[full]["value"].iloc[0]))
        _bars(runs if full_as_bar else runs[~full], axes, known)
        axes.set_ylabel(METRICS.get(metric, metric) if first else "", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure)


def _bars(runs: pd.DataFrame, axes: Axes, known: pd.DataFrame | None) -> None:
    names = list(dict.fromkeys(runs["bar"]))
    shades = list(dict.fromkeys(runs["shade"])) if "shade" in runs else [""]
    wide = 0.8 / max(1, len(shades))
    for _, run in runs.iterrows():
        which = shades.index(run["shade"]) if "shade" in runs else 0
        at = names.index(run["bar"]) + (which - (len(shades) - 1) / 2) * wide
        label = str(run["shade"]) if "shade" in runs and names.index(run["bar"]) == 0 else "_"
        axes.bar(at, run["value"], wide * 0.92, color=color_of(run["method"]), alpha=SHADES[which % 4], label=label)
        if pd.notna(run["low"]):  # too few examples have no interval, which is not one of no width
            reach = [[max(0.0, run["value"] - run["low"])], [max(0.0, run["high"] - run["value"])]]
            axes.errorbar(at, run["value"], reach, fmt="none", ecolor="0.2", elinewidth=0.9, capsize=2)
        theirs = _theirs(known, run)
        if theirs is not None:
            axes.plot(at, theirs, "D", markersize=5, markerfacecolor="none", color="black", label="paper")
    axes.set_xticks(range(len(names)), [textwrap.fill(name, 11, break_long_words=False) for name in names], rotation=0)


def _theirs(known: pd.DataFrame | None, run: pd.Series) -> float | None:
    """The paper's number for the very same run."""
    if known is None:
        return None
    same = known["metric"].eq(run["metric"]) & known["method"].eq(run["method"]) & known["setting"].eq(run["setting"])
    ratio = run["kv_ratio"]
    same &= known["kv_ratio"].isna() if pd.isna(ratio) else known["kv_ratio"].eq(ratio)
    theirs = known[same & known["model"].eq(run["model"]) & known["task"].eq(run["task"])]
    return float(theirs["value"].iloc[0]) if len(theirs) else None


CURVES = 3.9, 2.6  # inches of a panel of curves
DOTS, ROW, LETTER = 2.9, 0.19, 0.065  # inches: width of a panel of dots, height of a line of it, a letter of its words
LETTERS = 30  # letters of a line of a setting
MANY = 3  # budgets that make a curve
NEAR = f"near the full cache: {EPSILON_KL:g}"
RUN = ["method", "setting", "kv_ratio"]


def draw_divergence(frame: pd.DataFrame, figure: Figure) -> None:
    """Draw the frame of `lib.verdicts.divergence_frame`: a panel per model and task, or one of all tasks pooled."""
    shown = pooled(frame) if frame["kl_low"].isna().all() and frame["task"].nunique() > 1 else frame
    panels = list(shown.groupby(["model", "task"], sort=False))
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    curved = all(runs["kv_ratio"].nunique() >= MANY for _, runs in panels)
    wide, high = CURVES if curved else _room(shown)
    figure.set_size_inches(wide * columns, high * rows + 0.4)
    figure.set_layout_engine("constrained")
    for place, ((model, task), runs) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        (_curves if curved else _dots)(runs, axes)
        title = textwrap.fill(panel_title(str(model), str(task)), 44)
        axes.set_title(f"{title} (n = {int(runs['n'].min())})", fontsize=8)
        axes.tick_params(which="both", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure)


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of each method, setting and budget of all tasks as one, with the interval over all their examples."""
    rows = []
    for key, runs in frame.groupby(["model", *RUN], sort=False, dropna=False):
        kl, low, high = pooled_kl(runs)
        row: dict[str, Any] = dict(zip(["model", *RUN], key, strict=True))
        row |= {"task": f"{runs['task'].nunique()} tasks", "n": int(runs["n"].sum()), "kl": kl}
        rows.append(row | {"kl_low": low, "kl_high": high})
    return pd.DataFrame(rows)


def _curves(runs: pd.DataFrame, axes: Axes) -> None:
    divergence(runs.assign(epsilon=EPSILON_KL), axes)
    axes.plot([], [], color="black", linewidth=1.0, linestyle="--", label=NEAR)
    axes.set_xlabel("kv_ratio (budget / prompt tokens)", fontsize=8)
    axes.set_ylabel("KL from the full cache,\nnats per token", fontsize=8)


def _label(run: Any) -> str:
    """The method and its settings below one another, without the groups that their options are of."""
    words = re.sub(r"[\w.]+\.(?=\w+=)", "", run["setting"])
    return textwrap.fill(f"{run['method']} {words}".strip(), LETTERS, break_long_words=False)


def _room(shown: pd.DataFrame) -> tuple[float, float]:
    """Width and height of a panel of dots, its labels included."""
    labels = {_label(run) for _, run in shown.iterrows()}
    lines = max(label.count("\n") + 1 for label in labels)
    longest = max(len(line) for label in labels for line in label.splitlines())
    return DOTS + LETTER * longest, ROW * len(labels) * max(2, lines) + 0.8


def _dots(runs: pd.DataFrame, axes: Axes) -> None:
    """A row per method and setting, methods in the papers' order; smaller budgets are hollow."""
    ratios = sorted(runs["kv_ratio"].dropna().unique(), reverse=True)
    order = in_order(runs["method"].tolist(), METHODS)
    named = runs.assign(place=runs["method"].map(order.index))
    names: list[str] = []
    for _, run in named.sort_values(["place", "setting"], kind="stable").iterrows():
        label = _label(run)
        if label not in names:
            names.append(label)
        kl = max(float(run["kl"]), LEAST)
        shift = 0.28 * (ratios.index(run["kv_ratio"]) / (len(ratios) - 1) - 0.5) if len(ratios) > 1 else 0.0
        color = color_of(str(run["method"]))
        if np.isfinite(run["kl_low"]):
            ends = [max(float(run["kl_low"]), LEAST), float(run["kl_high"])]
            axes.plot(ends, [names.index(label) + shift] * 2, color=color, linewidth=1.0)
        face = color if run["kv_ratio"] == ratios[0] else "white"
        look: dict[str, Any] = {"color": color, "markerfacecolor": face, "marker": marker_of(str(run["method"]))}
        axes.plot(kl, names.index(label) + shift, linestyle="none", markersize=4.5, **look)
    for ratio in ratios:
        face = "0.3" if ratio == ratios[0] else "white"
        axes.plot([], [], "o", color="0.3", markerfacecolor=face, markersize=4.5, label=f"kv_ratio {ratio:g}")
    axes.axvline(EPSILON_KL, color="black", linewidth=1.0, linestyle="--", label=NEAR)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.set_xlabel("KL from the full cache, nats per token", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
