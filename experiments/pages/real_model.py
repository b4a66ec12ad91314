"""docs/real_model.md: how far the full cache is above answers that read nothing, and what methods keep of it."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.pages import COLORS, ROOT, blank, markdown

FLOORS = ["random_sentences", "most_frequent_reference"]
TASKS = {"needle, question in prompt": "needle"}
TASKS |= {"news_qa, after the eviction": "`news_qa`", "LongBench TriviaQA": "TriviaQA KL"}


def draw() -> Figure:
    rows = pd.read_csv(ROOT / "docs" / "real_model_floors.csv")
    floors = [pd.to_numeric(rows[name].str.extract(r"([\d.]+)")[0]) for name in FLOORS]
    rows = rows.assign(gap=rows["full_cache"] - pd.concat(floors, axis=1).max(axis=1))
    rows = rows.sort_values(["void", "gap"], ascending=[False, True], na_position="last")
    figure, (axes,) = blank(height=6.4)
    for row, task in enumerate(rows.to_dict("records")):
        color = COLORS[1] if task["void"] == "void" else COLORS[0]
        axes.plot([task["difference_low"], task["difference_high"]], [row, row], color=color)
        axes.plot(task["gap"], row, "o", color=color, markersize=5)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(
        range(len(rows)), [f"{name.replace('`', '')} ({n})" for name, n in zip(rows.task, rows.n, strict=True)]
    )
    for row, color, words in ((rows["void"].count(), COLORS[0], "above"), (0, COLORS[1], "void")):
        axes.text(100, row, words, color=color, ha="right", va="center", weight="bold")
    axes.set_xlabel("points above the best answer that read nothing")
    axes.grid(axis="y", visible=False)
    return figure


def table() -> str:
    rows = pd.read_csv(ROOT / "docs" / "real_model.csv", dtype=str)
    cells = {(task, method, ratio): value for task, method, ratio, _, value in rows.to_numpy()}
    columns = [(task, ratio) for task in TASKS for ratio in ("0.5", "0.2")]
    methods = dict.fromkeys(method for task, method, _ in cells if task in TASKS)
    rows = [[name, *(cells[task, name, ratio] for task, ratio in columns)] for name in methods]
    return markdown(["", *(f"{TASKS[task]}, {ratio}" for task, ratio in columns)], rows)
