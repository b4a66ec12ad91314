"""docs/methods_league.md: KL of methods in eight situations at a quarter of the cache; the nearest of each budget."""

from __future__ import annotations

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from experiments.lib import league
from experiments.pages import blank

BUDGET, BEST = 0.25, 16  # the figure's share of the cache, and how many of the methods that evict it shows
FIRST, LAST = "pqcache", "random"  # also shown: a method that keeps all tokens and reads a quarter, and no rule


def draw() -> Figure:
    recording = league.recorded().query("kv_ratio == @BUDGET")
    recording = recording.assign(entry=league.entries(recording))
    kl = recording.pivot_table(index="entry", columns=["question", "task"], values="kl")
    kl = kl.reindex(columns=[(question, task) for question in league.QUESTIONS for task in league.TASKS])
    places = kl.drop(index=league.keep_all()).rank().mean(axis=1)
    kl = kl.loc[[FIRST, *places.sort_values().index[:BEST], LAST]]
    figure, (axes,) = blank(height=6.2)
    axes.imshow(kl, cmap="YlGnBu", norm=LogNorm(0.2, 2, clip=True), aspect="auto")
    for column, (question, task) in enumerate(kl):
        best = league.nearest(recording.query("question == @question and task == @task"))
        for row, (entry, value) in enumerate(kl[question, task].items()):
            level = entry not in (FIRST, LAST, *best["ahead_of"].split())
            style = {"weight": "bold" if level else "normal", "color": "white" if value > 0.8 else "black"}
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", **style)
    axes.set_yticks(range(len(kl)), kl.index)
    axes.set_xticks(range(len(kl.columns)), [league.TASKS[task] for _, task in kl])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for middle, words in ((1.5, "question hidden from eviction"), (5.5, "question seen by it")):
        axes.text(middle, -1.5, words, ha="center", weight="bold")
    axes.axvline(3.5, color="white", linewidth=6)
    for line in (0.5, len(kl) - 1.5):
        axes.axhline(line, color="white", linewidth=6)
    return figure


def table() -> str:
    return league.leaders(league.recorded())
