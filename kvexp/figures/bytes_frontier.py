"""Tokens or bits: divergence and quality against the share of the full cache's bytes, a line per method and bits.

python -m kvexp.figures.bytes_frontier outputs/ frontier.png
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from kvexp.errors import ConfigError
from kvexp.figures.divergence_curves import LEAST
from kvexp.figures.picture import write_picture
from kvexp.figures.quality import PANEL
from kvexp.figures.style import MARK_COLOR, color_of, marker_of
from kvexp.record.divergence_lines import OWN
from kvexp.results import table
from kvexp.results.columns import n_words, parts, shared_settings, with_n
from kvexp.results.divergence_table import divergence_table
from kvexp.results.question_place import titled
from kvexp.results.read import chosen, folders
from kvexp.results.units import called
from kvexp.results.where import add_choice, chosen_by

DASHES: dict[int, Any] = {16: "-", 8: (0, (6, 1.5)), 4: (0, (3, 1.5)), 2: (0, (1, 1))}
BITS = re.compile(r"\+?cache\.(key_|value_)?bits=(\d+)")
BUDGETS = re.compile(r"\+?(bytes_ratio|budget\.tokens|kv_ratio)=\S+")
TICKS = (1.0, 0.5, 0.25, 0.125, 0.0625)
QUANTISED_FULL, FULL_BITS = "full_quantised", 16  # as labels of runs say
PANELS = ("kl", "quality")
COLUMNS = 4  # of the legend


def frontier(outputs: str | Path, wanted: dict[str, Any], metric: str | None = None) -> pd.DataFrame:
    """The runs of a folder that have a place on the axis of bytes: columns of `kvexp.results.table`, and for each run

    bits: of keys and values, the fewer where they differ; line: method and bits in words; rest, shared: what of the
    setting is neither bits nor budget, of this run and of all; quality, quality_low, quality_high: percent of full in
    `metric` (None: each task's first); kl, kl_low, kl_high: along the full cache's own answer, NaN where none was
    measured.
    """
    runs = table(outputs, wanted)
    runs = runs[runs["bytes_share"].notna() & runs["verdict99"].ne("baseline")] if len(runs) else runs
    if runs.empty:
        raise ConfigError(f"no run of {outputs} has bytes to compare with its full cache's: nothing to draw")
    settings = runs["setting"].fillna("").astype(str)
    bits = [min([16, *(int(found[2]) for found in BITS.finditer(words))]) for words in settings]
    left = [" ".join(BUDGETS.sub("", BITS.sub("", words)).split()) for words in settings]
    names = [f"{method}, {n} bits" for method, n in zip(runs["method"], bits, strict=True)]
    own = [metric or row["headline"] for _, row in runs.iterrows()]
    each: dict[str, list[float]] = {}
    for name, ending in (("quality", "_of_full"), ("quality_low", "_low"), ("quality_high", "_high")):
        keys = [f"{of}{ending}" for of in own]
        each[name] = [
            float(row[key]) if key in row else float("nan") for key, (_, row) in zip(keys, runs.iterrows(), strict=True)
        ]
    shared, records = shared_settings([{"setting": words} for words in left])
    rest = [str(record["setting"]) for record in records]
    runs = runs.assign(bits=bits, line=names, rest=rest, shared=" ".join(shared), metric=own, **each)
    diverged = divergence_table([folder for folder in chosen(folders(outputs), wanted) if not folder.refused])
    if len(diverged):
        diverged = diverged[diverged["text"] == OWN][["hash", "kl", "kl_low", "kl_high"]]
        return runs.merge(diverged, on="hash", how="left")
    return runs.assign(kl=float("nan"), kl_low=float("nan"), kl_high=float("nan"))


def curves(runs: pd.DataFrame, name: str, axes: Axes) -> None:
    """Draw column `name` (kl or quality) of one model's and task's runs against bytes_share; bars: 95 % intervals.

    A line joins the budgets of a method at equal bits; that of the full cache in few bits joins the bits.
    """
    runs = runs.assign(joined=runs["bits"].where(runs["method"] != QUANTISED_FULL, 0))
    for (method, bits, rest), line in runs[runs[name].notna()].groupby(["method", "joined", "rest"], sort=True):
        line = line.sort_values("bytes_share")
        middle = line[name].clip(lower=LEAST) if name == "kl" else line[name]
        low = line[f"{name}_low"].clip(lower=LEAST) if name == "kl" else line[f"{name}_low"]
        reach = [side.fillna(0).clip(lower=0).to_numpy() for side in (middle - low, line[f"{name}_high"] - middle)]
        few = line[f"{name}_low"].isna()
        look: dict[str, Any] = {"color": color_of(str(method)), "marker": marker_of(str(method)), "markersize": 4}
        label = f"{method}, {bits} bits {rest}".rstrip()
        if not bits:
            look["color"], label = "black", f"full, {', '.join(map(str, line['bits'][::-1]))} bits {rest}".rstrip()
        dashes = DASHES[int(str(bits)) or FULL_BITS] if len(line) > 1 else "none"
        axes.errorbar(
            line["bytes_share"],
            middle,
            reach,
            label=label,
            linestyle=dashes,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            **look,
        )
        axes.plot(line["bytes_share"][few], middle[few], linestyle="none", markerfacecolor="white", zorder=3, **look)
    axes.set_xscale("log", base=2)
    ends = runs["bytes_share"].min(), runs["bytes_share"].max()
    axes.set_xticks([tick for tick in TICKS if ends[0] / 2 <= tick <= 2 * ends[1]])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes, share of the full cache's at 16 bits")
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    if name == "kl":
        axes.set_yscale("log")
        axes.set_ylabel("KL from the full cache, nats per token")
    else:
        axes.axhline(99, color=MARK_COLOR, linewidth=1.0, linestyle="--")
        axes.set_ylabel(f"{called(str(runs['metric'].iloc[0]), runs['task'].iloc[0])}, % of full")


def draw(frame: pd.DataFrame, names: Sequence[str] = PANELS) -> Figure:
    """A row of panels for each model and task of a `frontier`, one for each of `names`, and one legend below."""
    rows = [(title, runs) for title, _, runs in parts(frame.sort_values(["model", "task"], kind="stable"))]
    width = 2.4 * PANEL[0] if len(names) > 1 else 1.6 * PANEL[0]
    figure = Figure(layout="constrained", figsize=(width, len(rows) * (PANEL[1] + 0.3) + 1.4))
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    for row, (title, runs) in zip(panels, rows, strict=True):
        runs = with_n(runs.assign(setting=runs["rest"])).rename(columns={"rest": "was", "setting": "rest"})
        for name, axes in zip(names, row, strict=True):
            if runs[name].notna().any():
                curves(runs, name, axes)
            else:
                axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
        title = titled(title, runs["question"]) if "question" in runs else title
        row[0].set_title(textwrap.fill(f"{title} ({n_words(runs)})", 52), fontsize=9)
    if frame["shared"].iloc[0]:
        figure.suptitle(textwrap.fill(frame["shared"].iloc[0], 120), fontsize=8)
    entries = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if entries:
        figure.legend(list(entries.values()), list(entries), fontsize=7, loc="outside lower center", ncols=COLUMNS)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was measured."""
    parser = argparse.ArgumentParser(prog="kvexp plot bytes", description=__doc__.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", default=None, help="default: the first metric of each task")
    parser.add_argument("--panel", choices=PANELS, default=None, help="this one alone (default: both)")
    add_choice(parser)
    args = parser.parse_args(argv)
    panels = (args.panel,) if args.panel else PANELS
    return write_picture(args.picture, lambda: draw(frontier(args.outputs, chosen_by(args), args.metric), panels))
