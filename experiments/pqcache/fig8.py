"""PQCache, Fig. 8: a needle in a haystack, by the length of the haystack and the depth of the needle."""

from __future__ import annotations

import re

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.divergence import Closer, Near, by_divergence, of
from experiments.lib.draw import METHODS, in_order
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import (
    above,
    all_hold,
    ends,
    estimate,
    interval_columns,
    mean_columns,
    pooled_difference,
    positive,
    runs_of,
)
from kvexp.results.plots import heatmap

RIVALS = ("h2o_c", "sparq", "infllm")
NEARLY_ALL = 95.0  # percent of the needles


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per method, length and depth: percent found, mean over texts; and what pqcache finds more than each."""
    metric = str(frame["headline"].iloc[0])
    cells = [
        {"model": run["model"], "method": run["method"], "length": place[0], "depth": place[1], "found": scored[metric]}
        for _, run in frame.iterrows()
        for example, scored in run["scores"].items()
        if (place := _place(example)) is not None
    ]
    keys = ["model", "method", "length", "depth"]
    made = pd.DataFrame(cells).groupby(keys, as_index=False).agg(found=("found", "mean"), n=("found", "size"))
    found = [scored[metric] for scored in frame[frame["method"].eq("pqcache")].iloc[0]["scores"].values()]
    made = made.assign(metric=metric, **mean_columns("pqcache", found))
    for rival in RIVALS:
        made = made.assign(
            **interval_columns(f"over_{rival}", pooled_difference(frame, runs_of("pqcache"), runs_of(rival), metric))
        )
    return made


def _place(example: str) -> tuple[float, float] | None:
    """(length, depth) of an example's name: split-length-depth-repeat, or "length 512 depth 25"."""
    found = re.match(r"\w+-(\d+)-(\d+)|length (\d+) depth (\d+)", example)
    if found is None:
        return None
    length, depth = (float(word) for word in found.groups() if word is not None)
    return length, depth


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A heat-map per method as the paper has it: length across, depth down, greener is better."""
    methods = in_order(table["method"].tolist(), METHODS)
    figure.set_layout_engine("constrained")
    figure.set_size_inches(2.2 * len(methods) + 0.8, 2.5)
    for place, method in enumerate(methods):
        axes = figure.add_subplot(1, len(methods), place + 1)
        cells = table[table["method"].eq(method)].pivot_table("found", "depth", "length", aggfunc="mean")
        mean = table[table["method"].eq(method)]["found"].mean()
        image = heatmap(cells, axes, f"{method}, mean {mean:.0f}", bar=False)
        axes.tick_params(labelsize=7)
        axes.set_ylabel(axes.get_ylabel() if place == 0 else "")
    figure.colorbar(image, ax=figure.axes).set_label(f"{table['metric'].iloc[0].replace('_', ' ')} (%)", fontsize=8)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Pqcache finds nearly all, and more than every rival."""
    first = table.iloc[0]
    each = {name: ends(first, name) for name in ("pqcache", *(f"over_{rival}" for rival in RIVALS))}
    verdicts = [above(each["pqcache"][1], each["pqcache"][2], NEARLY_ALL)]
    verdicts += [positive(each[f"over_{rival}"][1], each[f"over_{rival}"][2]) for rival in RIVALS]
    means = table.groupby("method")["found"].mean()
    over = ", ".join(
        f"{estimate(*each[f'over_{rival}'], sign=True)} over {rival} ({means[rival]:.0f})" for rival in RIVALS
    )
    return all_hold(verdicts), f"pqcache finds {estimate(*each['pqcache'])} %; {over}"


EXHIBITS = {
    "fig8": Exhibit(
        claim=(
            "With a fifth of the tokens PQCache finds the needle in nearly all places, while H2O(C), SPARQ and "
            "InfLLM miss it in a substantial part of them (arXiv:2407.12820, Fig. 8)"
        ),
        sweeps=("pqcache_fig8", "pqcache_fig8_infllm"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(
            Near("pqcache", of("pqcache")),
            *(Closer(f"pqcache than {rival}", of("pqcache"), of(rival)) for rival in RIVALS),
        ),
    ),
}
