"""PQCache, Fig. 7: one layer's prefill, sending its keys and values home, clustering its keys."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.store import RESULTS
from experiments.lib.draw import finish, legend
from experiments.lib.exhibits import Exhibit
from experiments.lib.pages import WAITS

FILE = RESULTS / "retrieval_latency.json"
NONE_YET = f"{WAITS}: python -m benchmarks.retrieval_latency --json benchmarks/results/{FILE.name}, on a GPU"
TIMES = (
    ("prefill_s", "prefill", "#0072b2"),
    ("offload_s", "offload", "#009e73"),
    ("kmeans_s", "clustering", "#882255"),
)
COLUMNS = ["length", "prefill_s", "offload_s", "kmeans_s"]


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per length; empty where no GPU has made the file."""
    return measured(FILE)


def measured(path: Path) -> pd.DataFrame:
    """The file's rows of one layer, if its device was a GPU: a CPU's copies go nowhere."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else {"options": {}, "one_layer": []}
    on_gpu = str(found["options"].get("device", "")).startswith("cuda")
    return pd.DataFrame(found["one_layer"] if on_gpu else [], columns=COLUMNS)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    if table.empty:
        figure.set_size_inches(6.0, 1.0)
        figure.text(0.5, 0.5, textwrap.fill(NONE_YET, 75), ha="center", va="center", fontsize=7)
        return
    figure.set_layout_engine("constrained")
    figure.set_size_inches(3.8, 3.0)
    axes = figure.add_subplot()
    for (name, label, color), marker in zip(TIMES, "osD", strict=True):
        axes.plot(table["length"], 1000 * table[name], color=color, marker=marker, markersize=4, label=label)
    finish(axes, "prompt (tokens)", "ms for one layer")
    legend(figure)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """At the longest prompt: offload below prefill below clustering. One measurement each, so no interval."""
    if table.empty:
        return None, NONE_YET
    last = table.sort_values("length").iloc[-1]
    verdict = bool(last["offload_s"] < last["prefill_s"] < last["kmeans_s"])
    each = ", ".join(f"{label} {1000 * last[name]:.1f} ms" for name, label, _ in TIMES)
    return verdict, f"one layer of {last['length']:.0f} tokens: {each}; measured once each, without an interval"


EXHIBITS = {
    "fig7": Exhibit(
        claim=(
            "One layer's prefill grows with the square of the prompt and sending its keys and values home only in "
            "proportion, so that on long prompts the copy hides behind it; clustering on the CPU takes longer "
            "than both (arXiv:2407.12820, Fig. 7)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
