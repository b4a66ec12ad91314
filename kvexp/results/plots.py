"""Figures of runs."""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import NullFormatter
from matplotlib.transforms import ScaledTranslation

from kvexp.results.divergence import by_position, divergence_table, scale_of
from kvexp.results.read import Folder, add_choice, chosen, chosen_by, folders, titled
from kvexp.results.stats import MIN_PAIRS
from kvexp.results.table import called, n_words, parts, shared_settings, table, with_n
from kvexp.results.views import VIEWS, Line, Side, Value, chart_of
from kvexp.run.store import OWN, TEXTS, read, run_name
from kvexp.util import ConfigError, say

# Write a figure to the file a command was asked for.


SUFFIXES = (".png", ".pdf", ".svg")
DPI = 150


def write_picture(file: Path, draw: Callable[[], Figure]) -> int:
    """The exit code of a command: 0, or 2 where there is nothing to draw or no place to put it, which is told."""
    try:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{file} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
        figure = draw()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=DPI)
    except (ConfigError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    say(f"wrote {file}")
    return 0


# Points of one x side by side, so that no error bar hides another, and none is cut at an axis.


STEP = 3.5  # points (1/72 inch) from one line to the next
MOST = 14.0  # of all lines of one place together


def dodge(artists: Iterable[Artist], place: int, count: int) -> None:
    """Draw these, of the line `place` of `count`, a few points aside; the data stay what they are.

    Once they stand in their axes: matplotlib finds no limits by artists that were moved before.
    """
    away = (place - (count - 1) / 2) * min(STEP, MOST / count)
    for artist in artists:
        figure = artist.get_figure(root=True)
        assert isinstance(figure, Figure)
        artist.set_transform(artist.get_transform() + ScaledTranslation(away / 72, 0, figure.dpi_scale_trans))
        artist.set_clip_on(False)
        artist.set_in_layout(False)  # else what is not clipped takes room from the panels


# One legend for all panels of a figure.


LEGEND_LETTER = 0.062  # inches of a letter in the legend


def legend_below(figure: Figure, width: float) -> int:
    """Every line of every panel once, below all of them, where it covers nothing; returns its number of lines of text.

    width: of the figure, in inches.
    """
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [textwrap.fill(label, 60) for label in entries]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), int((width - 0.4) / (LEGEND_LETTER * longest + 0.55))))
    figure.legend(list(entries.values()), labels, fontsize=7, loc="outside lower center", ncols=columns)
    return ceil(len(labels) / columns) * (1 + max(label.count("\n") for label in labels))


# One color and one marker per method, in every figure: Okabe and Ito's color-blind-safe palette and shades of it.


MARK_COLOR = "#c00000"  # of the 99 % mark

# Of the settings of one method; the mark's own dashes, short and even, are none of them.
DASHES: tuple[Any, ...] = ("-", ":", "-.", (0, (8, 2)), (0, (8, 2, 1, 2, 1, 2)))

_COLORS = {
    "full": "#000000",
    "window": "#999999",
    "streaming_llm": "#56b4e9",
    "h2o": "#e69f00",
    "keyformer": "#0072b2",
    "a2sf": "#009e73",
    "ideal": "#4d4d4d",
    "random": "#cccccc",
    "key_attention": "#cc79a7",
    "snapkv": "#d55e00",
    "tova": "#b8a500",
    "pqcache": "#882255",
    "sparq": "#44aa99",
    "infllm": "#ddaa33",
    "oracle": "#4d4d4d",
    "h2o_c": "#aa6600",
}
_OTHERS = ("#332288", "#88ccee", "#117733", "#aa4499", "#661100", "#6699cc")
_MARKERS = "osD^vPX*<>hp"


def color_of(method: str) -> str:
    """The method's color; one that has none of its own gets the same in every figure."""
    return _COLORS.get(method, _OTHERS[zlib.crc32(method.encode()) % len(_OTHERS)])


def marker_of(method: str) -> str:
    """The method's marker, so that lines can be told apart without color."""
    names = list(_COLORS)
    place = names.index(method) if method in names else zlib.crc32(method.encode())
    return _MARKERS[place % len(_MARKERS)]


QUALITY_DOC = """Quality against kv_ratio, one line per method, with the full cache's level and the 99 % mark.

kvexp plot quality outputs/ quality.png --metric rouge2
"""


Dashes = Mapping[tuple[str, str], Any]  # (method, setting) -> line style
PANEL = (4.4, 3.3)  # inches
PANELS = 4  # in a row


def quality(frame: pd.DataFrame, metric: str, axes: Axes, dashes: Dashes | None = None) -> None:
    """Draw one model and task's runs: `frame` as `kvexp.results.table` gives it, in percent of the baseline.

    The bars are the paired bootstrap's 95 % intervals; points of too few examples for one are hollow. A method has one
    color; its settings differ in their dashes.
    """
    runs = drawable(frame, metric)
    if runs.empty:
        raise ConfigError(f"no run has a kv_ratio and a percentage of its baseline in {metric}: nothing to draw")
    dashes = dashes or dashes_of(runs)
    axes.axhline(100, color="black", linewidth=1.2, label="full")
    axes.axhline(99, color=MARK_COLOR, linewidth=1.0, linestyle="--", label="99 % of full")
    axes.annotate("99 %", (1.01, 99), xycoords=axes.get_yaxis_transform(), color=MARK_COLOR, fontsize=7, va="center")
    lines = runs.groupby(["method", "setting"], sort=True)
    for place, (key, line) in enumerate(lines):
        method, setting = map(str, key)
        line = line.sort_values("kv_ratio")
        middle = line[f"{metric}_of_full"]
        sides = (middle - line[f"{metric}_low"], line[f"{metric}_high"] - middle)
        reach = [side.clip(lower=0).to_numpy() for side in sides]  # matplotlib takes a series of one for a number
        look: dict[str, Any] = {
            "color": color_of(method),
            "marker": marker_of(method),
            "markersize": 4,
        }
        bars = {"linestyle": dashes[method, setting], "linewidth": 1.4, "elinewidth": 0.8, "capsize": 2}
        drawn = axes.errorbar(line["kv_ratio"], middle, reach, label=f"{method} {setting}".rstrip(), **look, **bars)
        few = line[line["paired"] < MIN_PAIRS]
        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "zorder": 3}
        over = axes.plot(few["kv_ratio"], few[f"{metric}_of_full"], **hollow, **look)
        dodge([*drawn.get_children(), *over], place, lines.ngroups)
    axes.set_xlabel("kv_ratio (budget / prompt tokens)")
    axes.set_ylabel(f"{called(metric, runs['task'].iloc[0] if 'task' in runs else None)}, % of full")
    axes.set_ylim(bottom=min(0.0, runs[[f"{metric}_of_full", f"{metric}_low"]].min().min()))
    axes.locator_params(axis="x", nbins=6)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def drawable(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The runs that have a place in the picture, with a setting ("") where there is none."""
    runs = frame[frame["verdict99"].ne("baseline") & frame[f"{metric}_of_full"].notna() & frame["kv_ratio"].notna()]
    setting = runs["setting"].fillna("").astype(str) if "setting" in runs else ""
    return runs.assign(setting=setting, method=runs["method"].astype(str))


def dashes_of(runs: pd.DataFrame) -> dict[tuple[str, str], Any]:
    """A line style for each setting of a method, in the order of their words; the only one is drawn through."""
    found: dict[tuple[str, str], Any] = {}
    for method, part in runs.groupby("method"):
        found |= {(str(method), setting): dash for setting, dash in zip(sorted(set(part["setting"])), cycle(DASHES))}
    return found


def draw_quality(frame: pd.DataFrame, metric: str | None) -> Figure:
    """One panel for each model and task in the table, one legend below; metric: None takes each task's first."""
    if "status" in frame:
        frame = frame[frame["status"] != "refused"]
    frame = frame.sort_values(["model", "task"], kind="stable")
    panels = [(title, part) for title, _, part in parts(frame) if _comparable(part)]
    if not panels:
        raise ConfigError("no finished runs with a baseline to draw; run a sweep over kv_ratio first")
    metrics = [metric or str(part["headline"].dropna().iloc[0]) for _, part in panels]
    for (title, part), own in zip(panels, metrics, strict=True):
        if f"{own}_of_full" not in part:
            raise ConfigError(f"{title} has no metric {own!r}")
    shown = [drawable(part, own) for (_, part), own in zip(panels, metrics, strict=True)]
    if all(runs.empty for runs in shown):
        raise ConfigError(
            f"no run has a kv_ratio and a percentage of its baseline, which takes {MIN_PAIRS} examples or more: there "
            "is nothing to draw"
        )
    records: list[Any] = [row for runs in shown for row in runs.to_dict("records")]
    shared, rows = shared_settings(records)
    left = iter(rows)
    shown = [runs.assign(setting=[next(left)["setting"] for _ in range(len(runs))]) for runs in shown]
    shown = [with_n(runs, "paired") for runs in shown]
    dashes = dashes_of(pd.concat(shown))
    columns = min(PANELS, len(panels))
    figure = Figure(layout="constrained")
    for place, ((title, _), runs, own) in enumerate(zip(panels, shown, metrics, strict=True)):
        if runs.empty:
            continue
        axes = figure.add_subplot(ceil(len(panels) / columns), columns, place + 1)
        quality(runs, own, axes, dashes)
        title = titled(title, runs["question"]) if "question" in runs else title
        axes.set_title(textwrap.fill(f"{title} ({n_words(runs, 'paired')})", 52), fontsize=9)
    if shared:
        figure.suptitle(textwrap.fill(" ".join(shared), 60 * columns), fontsize=8)
    lines = legend_below(figure, 1.2 + PANEL[0] * columns)
    figure.set_size_inches(1.2 + PANEL[0] * columns, PANEL[1] * ceil(len(panels) / columns) + 0.18 * lines + 0.3)
    return figure


def _comparable(part: pd.DataFrame) -> bool:
    return bool((part["verdict99"].ne("baseline") & part["paired"].notna()).any())


def plot_quality(argv: Sequence[str] | None = None) -> int:
    """Draw what was run."""
    parser = argparse.ArgumentParser(prog="kvexp plot quality", description=QUALITY_DOC.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", help="default: the task's first")
    add_choice(parser)
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw_quality(table(args.outputs, chosen_by(args)), args.metric))


DIVERGENCE_CURVES_DOC = """KL divergence from the full cache on a log axis, a line per method, with epsilon and known
changes of the model.

kvexp plot divergence outputs/ kl.png --x bytes
"""


X_AXES = {"kv_ratio": "kv_ratio (budget / prompt tokens)", "bytes": "KV cache at the end, MiB per row"}
POSITION = "position"
LINE = 0.05  # between the words of two levels, of the axis
LEAST = 1e-6  # nats: what float32 cannot tell from 0, and a log axis cannot hold
MIB = 2**20


def divergence(frame: pd.DataFrame, axes: Axes, x: str = "kv_ratio", scale: Sequence[dict[str, Any]] = ()) -> None:
    """Draw the runs of one model, task and text: rows of `divergence_table`; bars are 95 % intervals over examples.

    scale: rows of `scale_of`, as grey levels. Points of too few examples for an interval are hollow.
    """
    runs = frame.assign(x=frame["kv_bytes"] / MIB if x == "bytes" else frame["kv_ratio"])
    runs = runs[runs["x"].notna()]
    if runs.empty:
        raise ConfigError(f"no run with a divergence has a place on the axis {x}: nothing to draw")
    dashes = dashes_of(runs)
    _levels(frame, axes, scale)
    for (method, setting), line in runs.groupby(["method", "setting"], sort=True):
        line = line.sort_values("x")
        kl = line["kl"].clip(lower=LEAST)
        ends = (kl - line["kl_low"].clip(lower=LEAST), line["kl_high"] - kl)
        reach = [side.fillna(0).clip(lower=0).to_numpy() for side in ends]
        look: dict[str, Any] = {"color": color_of(str(method)), "marker": marker_of(str(method)), "markersize": 4}
        bars: dict[str, Any] = {"linewidth": 1.4, "elinewidth": 0.8, "capsize": 2}
        few = line["kl_low"].isna()
        axes.errorbar(
            line["x"],
            kl,
            reach,
            label=f"{method} {setting}".rstrip(),
            linestyle=dashes[str(method), str(setting)],
            **look,
            **bars,
        )
        axes.plot(line["x"][few], kl[few], linestyle="none", markerfacecolor="white", zorder=3, **look)
    axes.set_xlabel(X_AXES[x])


def along(runs: Sequence[Folder], text: str, frame: pd.DataFrame, axes: Axes) -> None:
    """Draw mean KL at each place of the text, a line per run; wider lines hold more."""
    _levels(frame, axes, ())
    for folder in runs:
        lines = [line for (_, kind), line in read(folder.run).items() if kind == text]
        each, method = by_position(lines), str(folder.labels["method"])
        ratio = folder.labels.get("kv_ratio")
        row = frame[frame["hash"] == folder.run.hash].iloc[0]
        label = run_name({str(name): value for name, value in row.items()})
        width = 0.6 + 1.6 * (0.5 if ratio is None else ratio)
        axes.plot(each["position"], each["kl"].clip(lower=LEAST), color=color_of(method), linewidth=width, label=label)
    axes.set_xlabel("place of the token in the text")


def _without_shared(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows with what of `setting` they do not share, and what they all do."""
    filled = frame.assign(setting=frame["setting"].fillna("").astype(str) if "setting" in frame else "")
    records: list[Any] = filled.to_dict("records")
    shared, rows = shared_settings(records)
    return filled.assign(setting=[row["setting"] for row in rows]), " ".join(shared)


def _levels(frame: pd.DataFrame, axes: Axes, scale: Sequence[dict[str, Any]]) -> None:
    """Epsilon and the scale as levels, and the look of the axes."""
    axes.set_yscale("log")
    axes.set_ylabel("KL from the full cache, nats per token")
    for _, value, color, style in _marks(frame, scale):
        axes.axhline(value, color=color, linewidth=1.0, linestyle=style)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _marks(frame: pd.DataFrame, scale: Sequence[dict[str, Any]]) -> list[tuple[str, float, str, str]]:
    """(words, nats, colour, line) of each level."""
    marks = [(f"epsilon {value:g}", float(value), "black", "--") for value in sorted(set(frame["epsilon"]))]
    return marks + [(row["change"], row["kl"], "0.35", ":") for row in scale if row["kl"] > LEAST]


def _name_levels(frame: pd.DataFrame, axes: Axes, scale: Sequence[dict[str, Any]]) -> None:
    """Words of the levels to the right of the axes, whose limits are final, one above the other where they are near."""
    low, high = np.log(axes.get_ylim())
    free = 0.0
    for words, value, color, _ in sorted(_marks(frame, scale), key=lambda mark: mark[1]):
        place = max(free, (np.log(value) - low) / (high - low))
        axes.annotate(words, (1.01, place), xycoords="axes fraction", color=color, fontsize=7, va="center")
        free = place + LINE


def draw_divergence(outputs: str | Path, wanted: dict[str, Any], x: str, text: str = OWN) -> Figure:
    """A panel per model and task of the folder, along one kind of text. x: kv_ratio, bytes or position."""
    shown = [folder for folder in chosen(folders(outputs), wanted) if not folder.refused]
    frame = divergence_table(shown)
    frame = frame[frame["text"] == text] if len(frame) else frame
    if frame.empty:
        raise ConfigError(f"no run here has a divergence along {text}: kvexp divergence {outputs} measures it")
    panels = [(title, part) for title, _, part in parts(frame.sort_values(["model", "task"], kind="stable"))]
    columns = min(PANELS, len(panels))
    size = ((PANEL[0] + 1.2) * columns, (PANEL[1] + 0.9) * ceil(len(panels) / columns))  # room for words and a legend
    figure = Figure(layout="constrained", figsize=size)
    for place, (title, part) in enumerate(panels):
        axes = figure.add_subplot(ceil(len(panels) / columns), columns, place + 1)
        runs = [folder for folder in shown if folder.run.hash in set(part["hash"])]
        runs.sort(key=lambda folder: (str(folder.labels["method"]), folder.labels.get("kv_ratio") or 0))
        part, shared = _without_shared(part)
        part = with_n(part)
        scale = [] if x == POSITION else scale_of(folder.run for folder in runs)
        if x == POSITION:
            along(runs, text, part, axes)
        else:
            divergence(part, axes, x, scale)
        _name_levels(part, axes, scale)
        title = f"{titled(title, part['question'])} {shared} ({n_words(part)})"
        axes.set_title(textwrap.fill(title, 52), fontsize=9)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
    return figure


def plot_divergence(argv: Sequence[str] | None = None) -> int:
    """Draw what was measured."""
    parser = argparse.ArgumentParser(prog="kvexp plot divergence", description=DIVERGENCE_CURVES_DOC.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--x", choices=(*X_AXES, POSITION), default="kv_ratio", help="default: kv_ratio")
    parser.add_argument("--text", choices=TEXTS, default=OWN, help="the text that was forced (default: own)")
    add_choice(parser)
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw_divergence(args.outputs, chosen_by(args), args.x, args.text))


BYTES_FRONTIER_DOC = """Tokens or bits: divergence and quality against the share of the full cache's bytes, a line per
method and bits.

kvexp plot bytes outputs/ frontier.png
"""


BYTES_FRONTIER_DASHES: dict[int, Any] = {16: "-", 8: (0, (6, 1.5)), 4: (0, (3, 1.5)), 2: (0, (1, 1))}
BITS = re.compile(r"\+?cache\.(key_|value_)?bits=(\d+)")
BUDGETS = re.compile(r"\+?(bytes_ratio|budget\.tokens|kv_ratio)=\S+")
TICKS = (1.0, 0.5, 0.25, 0.125, 0.0625)
QUANTISED_FULL, FULL_BITS = "full_quantised", 16  # as labels of runs say
BYTES_FRONTIER_PANELS = ("kl", "quality")
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
        dashes = BYTES_FRONTIER_DASHES[int(str(bits)) or FULL_BITS] if len(line) > 1 else "none"
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


def draw_bytes(frame: pd.DataFrame, names: Sequence[str] = BYTES_FRONTIER_PANELS) -> Figure:
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


def plot_bytes(argv: Sequence[str] | None = None) -> int:
    """Draw what was measured."""
    parser = argparse.ArgumentParser(prog="kvexp plot bytes", description=BYTES_FRONTIER_DOC.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", default=None, help="default: the first metric of each task")
    parser.add_argument("--panel", choices=BYTES_FRONTIER_PANELS, default=None, help="this one alone (default: both)")
    add_choice(parser)
    args = parser.parse_args(argv)
    panels = (args.panel,) if args.panel else BYTES_FRONTIER_PANELS
    return write_picture(args.picture, lambda: draw_bytes(frontier(args.outputs, chosen_by(args), args.metric), panels))


HEATMAP_DOC = """Needle in a haystack as a heat-map: length across, depth down, greener is better.

kvexp plot heatmap outputs/HASH needle.png
"""


LETTER = 0.085  # inches of a letter in the title


def grid(rows: Iterable[Mapping[str, Any]], metric: str = "word_recall") -> pd.DataFrame:
    """Rows of a needle run -> mean of the metric in percent, index depth (percent), columns length (tokens).

    Repeats and questions of a cell are averaged; a cell of which nothing was scored, or skipped as too long, is NaN.
    `attrs["depths"]`: the words for each depth, with the measured one where needles stand elsewhere.
    """
    rows = list(rows)
    cells = [
        {**{key: row["info"][key] for key in ("length", "depth")}, metric: row["metrics"].get(metric)}
        for row in rows
        if {"length", "depth"} <= set(row.get("info") or {})
    ]
    if not cells:
        raise ConfigError("no row has a length and a depth: a heat-map is of task=needle, needle_multi or passkey")
    frame = pd.DataFrame(cells).astype({metric: float})
    if frame[metric].isna().all():
        raise ConfigError(f"no row has the metric {metric!r}: either all were skipped, or it is word_recall or exact")
    table = frame.pivot_table(metric, "depth", "length", aggfunc="mean", dropna=False)
    table.attrs["depths"] = [_depth(depth, rows) for depth in table.index]
    return table


def _depth(depth: float, rows: Iterable[Mapping[str, Any]]) -> str:
    """A depth as it was asked for, and from where to where needles really stand, where that is another place."""
    infos = [row["info"] for row in rows if (row.get("info") or {}).get("depth") == depth]
    found = [info["depth_measured"] for info in infos if info.get("depth_measured") is not None]
    if not found or max(abs(each - depth) for each in found) < 0.5:
        return f"{depth:g}"
    low, high = f"{min(found):.0f}", f"{max(found):.0f}"
    return f"{depth:g} ({low if low == high else f'{low}-{high}'})"


def heatmap(cells: pd.DataFrame, axes: Axes, title: str = "", bar: bool = True) -> AxesImage:
    """Draw a `grid` into axes, 0 red to 100 green; a cell without a number stays grey.

    bar=False: without a colour bar, for one that several of them share.
    """
    axes.set_facecolor("0.8")
    image = axes.imshow(cells.to_numpy(dtype=float), cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(cells.shape[1]), [f"{length:g}" for length in cells.columns])
    depths = cells.attrs.get("depths") or [f"{depth:g}" for depth in cells.index]
    axes.set_yticks(range(cells.shape[0]), depths)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth (measured), %" if "(" in "".join(depths) else "depth (%)")
    axes.set_title(title, fontsize=9)
    assert axes.figure is not None
    if bar:
        axes.figure.colorbar(image, ax=axes, label=cells.attrs.get("metric", "%"))
    return image


def plot_heatmap(argv: Sequence[str] | None = None) -> int:
    """Draw what a run found at each length and depth."""
    parser = argparse.ArgumentParser(prog="kvexp plot heatmap", description=HEATMAP_DOC.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run: outputs/HASH")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--metric", default="word_recall", choices=("word_recall", "exact"))
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw_heatmap(args.run, args.metric))


def draw_heatmap(run: Path, metric: str) -> Figure:
    """The grid of one run's folder; ConfigError where it has none."""
    found = [folder for folder in folders(run.parent) if folder.run.path.name == run.name]
    if not found:
        raise ConfigError(f"{run} is no run; name its folder, as in outputs/HASH")
    cells = grid(found[0].rows, metric)
    labels = found[0].labels
    cells.attrs["metric"] = f"{metric} (%)"
    wide = 2.2 + 0.6 * cells.shape[1]
    figure = Figure(figsize=(wide, 1.9 + 0.35 * cells.shape[0]), layout="constrained")
    title = titled(f"{run_name(labels)}, {labels['model']}", [found[0].question])
    heatmap(cells, figure.add_subplot(), textwrap.fill(title, int(wide / LETTER)))
    return figure


LIFE_CURVES_DOC = """The life of a context as curves: turns, distance of a fact, questions asked, chunks, long
answers, instructions.

kvexp plot life outputs/ turns.png --of turns
"""


def draw_life(outputs: str | Path, wanted: dict[str, Any], of: str) -> Figure:
    """A row of panels for each table that `kvexp` prints of this view (`kvexp.results.views`).

    Bars are 95 % intervals; points without one are hollow where others of the panel have one. ConfigError where no run
    is of this kind.
    """
    view = VIEWS[of]
    frame = view.read(outputs, wanted)
    blocks = [(title, rows) for title, rows, _, _ in view.blocks(frame)] if len(frame) else []
    panels = [(title, places, lines) for title, rows in blocks for places, lines in [chart_of(view, rows)] if lines]
    if not panels:
        raise ConfigError(f"no run under {outputs} has a place in this figure; kvexp {view.command} says what it needs")
    figure = Figure(layout="constrained")
    every = figure.subplots(len(panels), len(view.sides), squeeze=False)
    for row, (title, places, lines) in zip(every, panels, strict=True):
        for number, (axes, side) in enumerate(zip(row, view.sides, strict=True)):
            _side(axes, side, number, lines)
            axes.set_xticks(range(len(places)), places)
            axes.set_xlim(-0.4, len(places) - 0.6)
            axes.set_xlabel(view.x, fontsize=8)
            axes.set_title(textwrap.fill(title, 56), fontsize=8)
    width = PANEL[0] * len(view.sides)
    figure.set_size_inches(width, (PANEL[1] + 0.5) * len(panels) + 0.18 * legend_below(figure, width))
    return figure


def _side(axes: Axes, side: Side, number: int, lines: Sequence[Line]) -> None:
    """The lines of one axis, of the `number`-th value of their points."""
    if side.level is not None:
        axes.axhline(side.level, color="black", linewidth=1.0)
    least = LEAST if side.log else -math.inf
    bars = any(math.isfinite(values[number][1]) for line in lines for _, _, values in line.points)
    seen: dict[str, int] = {}
    for place, line in enumerate(lines):
        dash = DASHES[seen.setdefault(line.method, 0) % len(DASHES)]
        seen[line.method] += 1
        found = [(x, values[number]) for x, _, values in line.points if math.isfinite(values[number][0])]
        if not found:
            continue
        aside = 0.3 * ((place + 0.5) / len(lines) - 0.5)
        xs, ys = [x + aside for x, _ in found], [max(value[0], least) for _, value in found]
        look: dict[str, Any] = {"color": color_of(line.method), "marker": marker_of(line.method), "markersize": 4}
        reach = [[_reach(value, end, least) for _, value in found] for end in (1, 2)]
        axes.errorbar(xs, ys, reach, label=line.label, linestyle=dash, linewidth=1.2, elinewidth=0.8, capsize=2, **look)
        few = [math.isnan(value[1]) and bars for _, value in found]
        hollow = [(x, y) for x, y, is_few in zip(xs, ys, few, strict=True) if is_few]
        alone = [[point[end] for point in hollow] for end in (0, 1)]
        axes.plot(*alone, linestyle="none", markerfacecolor="white", zorder=3, **look)
    axes.set_ylabel(side.title, fontsize=8)
    axes.set_yscale("log") if side.log else axes.set_ylim(bottom=0)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _reach(value: Value, end: int, least: float) -> float:
    """From a value to an end of its interval; 0 without one."""
    return 0.0 if math.isnan(value[end]) else abs(max(value[end], least) - max(value[0], least))


def plot_life(argv: Sequence[str] | None = None) -> int:
    """Draw what was run."""
    parser = argparse.ArgumentParser(prog="kvexp plot life", description=LIFE_CURVES_DOC.splitlines()[0])
    parser.add_argument("outputs", type=Path, help="the folder of the runs")
    parser.add_argument("picture", type=Path, help="what to write: a .png, .pdf or .svg")
    parser.add_argument("--of", choices=tuple(VIEWS), required=True, help="which of the views")
    add_choice(parser)
    args = parser.parse_args(argv)
    return write_picture(args.picture, lambda: draw_life(args.outputs, chosen_by(args), args.of))
