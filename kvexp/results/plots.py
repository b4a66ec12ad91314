"""Figures of runs: each view of `kvexp.results.views` that has one, in the colors and markers of its methods."""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from kvexp.results import views
from kvexp.results.divergence import divergence_table, per_example
from kvexp.results.read import QUANTISED_FULL, Folder, Runs, titled
from kvexp.results.stats import MIN_PAIRS
from kvexp.results.table import called, n_words, parts, quality_table, shared_settings, with_n
from kvexp.results.views import VIEWS
from kvexp.run.store import OWN, run_name
from kvexp.util.errors import ConfigError

SUFFIXES = (".png", ".pdf", ".svg")
DPI = 150


def write_figure(
    file: Path, runs: Runs, view: str, metric: str | None = None, x: str | None = None, text: str = OWN
) -> None:
    """Draw a view of runs into a file; ConfigError where there is nothing to draw, OSError where it cannot be written.

    metric: of quality (None: the first of each task; kl in the view of bytes: divergence alone). x: of divergence, one
    of X_AXES or POSITION. text: along which it was measured.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if view == views.RUNS:
        figure = draw_runs(runs, metric)
    elif view == views.DIVERGENCE:
        figure = draw_divergence(runs, x or "kv_ratio", text)
    elif view == "bytes":
        figure = draw_bytes(views.bytes_table(runs, metric), BYTES_PANELS[:1] if metric == "kl" else BYTES_PANELS)
    elif view == "needle":
        figure = draw_needle(runs, metric)
    else:
        raise ConfigError(
            f"--plot draws the views runs, divergence, bytes and needle, not {view}; kvexp report draws what it has"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)


STEP = 3.5  # points (1/72 inch) from one line to the next
MOST = 14.0  # of all lines of one place together


def dodge(artists: Iterable[Artist], place: int, count: int) -> None:
    """Draw artists of the line `place` of `count` a few points aside, so that no error bar hides another, and whole
    where an axis cuts them; the data stay what they are.

    Once they stand in their axes: matplotlib finds no limits by artists that were moved before.
    """
    away = (place - (count - 1) / 2) * min(STEP, MOST / count)
    for artist in artists:
        figure = artist.get_figure(root=True)
        assert isinstance(figure, Figure)
        artist.set_transform(artist.get_transform() + ScaledTranslation(away / 72, 0, figure.dpi_scale_trans))
        artist.set_clip_on(False)
        artist.set_in_layout(False)  # else what is not clipped takes room from the panels


LEGEND_LETTER = 0.062  # inches of a letter in the legend


def legend_below(figure: Figure, width: float) -> int:
    """Every line of every panel once, below all of them, where it covers nothing; returns its number of lines of text.

    width: of the figure, in inches.
    """
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not entries:
        return 0
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
    """The method's marker, which distinguishes lines without color."""
    names = list(_COLORS)
    place = names.index(method) if method in names else zlib.crc32(method.encode())
    return _MARKERS[place % len(_MARKERS)]


Dashes = Mapping[tuple[str, str], Any]  # (method, setting) -> line style
PANEL = (4.4, 3.3)  # inches
PANELS = 4  # in a row


def series(
    axes: Axes, method: str, points: pd.DataFrame, label: str, dash: Any, color: str | None = None, width: float = 1.4
) -> list[Artist]:
    """Draw one line of a method, whose artists come back.

    points: columns x, y, low and high (ends of the interval, NaN: none), few (too few examples: hollow).
    """
    ends = (points["y"] - points["low"], points["high"] - points["y"])
    reach = [side.clip(lower=0).to_numpy(dtype=float) for side in ends]  # matplotlib takes a series of one for a number
    look: dict[str, Any] = {"color": color or color_of(method), "marker": marker_of(method), "markersize": 4}
    bars: dict[str, Any] = {"linestyle": dash, "linewidth": width, "elinewidth": 0.8, "capsize": 2}
    drawn = axes.errorbar(points["x"], points["y"], reach, label=label, **bars, **look)
    few = points[points["few"].astype(bool)]
    over = axes.plot(few["x"], few["y"], linestyle="none", markerfacecolor="white", zorder=3, **look)
    return [*drawn.get_children(), *over]


def points_of(
    line: pd.DataFrame, x: str, y: str, low: str, high: str, few: Any = None, least: float = -math.inf
) -> Any:
    """What `series` takes, of columns of a frame. few: None: points without an interval; least: below it nothing is."""
    columns = {"x": line[x], "y": line[y].clip(lower=least), "low": line[low].clip(lower=least), "high": line[high]}
    return pd.DataFrame(columns).assign(few=line[low].isna() if few is None else few).sort_values("x", kind="stable")


def _grid_lines(axes: Axes) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


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
        of_full, low, high = (f"{metric}{ending}" for ending in ("_of_full", "_low", "_high"))
        points = points_of(line, "kv_ratio", of_full, low, high, few=line["paired"] < MIN_PAIRS)
        drawn = series(axes, method, points, f"{method} {setting}".rstrip(), dashes[method, setting])
        dodge(drawn, place, lines.ngroups)
    axes.set_xlabel("kv_ratio (budget / prompt tokens)")
    axes.set_ylabel(f"{called(metric, runs['task'].iloc[0] if 'task' in runs else None)}, % of full")
    axes.set_ylim(bottom=min(0.0, runs[[f"{metric}_of_full", f"{metric}_low"]].min().min()))
    axes.locator_params(axis="x", nbins=6)
    _grid_lines(axes)


def drawable(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The runs that have a place in the picture, with a setting ("") where there is none."""
    runs = frame[frame["verdict99"].ne("baseline") & frame[f"{metric}_of_full"].notna() & frame["kv_ratio"].notna()]
    setting = runs["setting"].fillna("").astype(str) if "setting" in runs else ""
    return runs.assign(setting=setting, method=runs["method"].astype(str))


def dashes_of(runs: pd.DataFrame) -> dict[tuple[str, str], Any]:
    """A line style for each setting of a method, in the order of their words; the only one is drawn through."""
    dashes: dict[tuple[str, str], Any] = {}
    for method, group in runs.groupby("method"):
        dashes |= {(str(method), setting): dash for setting, dash in zip(sorted(set(group["setting"])), cycle(DASHES))}
    return dashes


def draw_quality(frame: pd.DataFrame, metric: str | None) -> Figure:
    """One panel for each model and task in the table, one legend below; metric: None takes each task's first."""
    if "status" in frame:
        frame = frame[frame["status"] != "refused"]
    if frame.empty:
        raise ConfigError("there are no runs to draw")
    frame = frame.sort_values(["model", "task"], kind="stable")
    paired = frame["verdict99"].ne("baseline") & frame["paired"].notna()
    panels = [(title, frame_of) for title, _, frame_of in parts(frame) if paired[frame_of.index].any()]
    if not panels:
        raise ConfigError("no finished runs with a baseline and a score to draw; run methods at several kv_ratio first")
    metrics = [metric or str(frame_of["headline"].dropna().iloc[0]) for _, frame_of in panels]
    for (title, frame_of), name in zip(panels, metrics, strict=True):
        if f"{name}_of_full" not in frame_of:
            raise ConfigError(f"{title} has no metric {name!r}")
    shown = [drawable(frame_of, name) for (_, frame_of), name in zip(panels, metrics, strict=True)]
    if all(runs.empty for runs in shown):
        raise ConfigError(
            "no run has a kv_ratio and a percentage of its baseline, which has to score above 0: nothing can be drawn"
        )
    whole, shared = without_shared(pd.concat(shown))
    shown = [with_n(runs.assign(setting=whole.loc[runs.index, "setting"]), "paired") for runs in shown]
    dashes = dashes_of(pd.concat(shown))
    columns = min(PANELS, len(panels))
    figure = Figure(layout="constrained")
    for place, ((title, _), runs, name) in enumerate(zip(panels, shown, metrics, strict=True)):
        if runs.empty:
            continue
        axes = figure.add_subplot(ceil(len(panels) / columns), columns, place + 1)
        quality(runs, name, axes, dashes)
        title = titled(title, runs["question"]) if "question" in runs else title
        _set_title(axes, title, shared if len(panels) == 1 else "", n_words(runs, "paired"))
    if shared and len(panels) > 1:
        figure.suptitle(textwrap.fill(shared, 60 * columns), fontsize=8)
    lines = legend_below(figure, 1.2 + PANEL[0] * columns)
    figure.set_size_inches(1.2 + PANEL[0] * columns, PANEL[1] * ceil(len(panels) / columns) + 0.18 * lines + 0.3)
    return figure


def draw_runs(runs: Runs, metric: str | None = None) -> Figure:
    """`draw_quality`; without a metric, where no run has a percentage, `draw_divergence` along the runs' own answers.

    ConfigError where neither can be drawn.
    """
    try:
        return draw_quality(runs.frame(quality_table), metric)
    except ConfigError as error:
        if metric is not None:
            raise ConfigError(f"{error}; without a metric KL is drawn") from error
        if divergence_table(runs.ran).empty:
            raise ConfigError(f"{error}; nor KL, which has to be measured and {NO_KL}") from error
        try:
            return draw_divergence(runs, "kv_ratio")
        except ConfigError:
            raise error from None


NO_KL = "takes answers of two tokens or more: the first is the prefill's"


X_AXES = {"kv_ratio": "kv_ratio (budget / prompt tokens)", "bytes": "KV cache at the end, MiB per row"}
POSITION = "position"
LINE = 0.05  # between the words of two levels, of the axis
LIMIT = "equivalent below"  # before epsilon, in every figure
LEAST = 1e-6  # nats: what float32 cannot tell from 0, and a log axis cannot hold
MIB = 2**20


def divergence(frame: pd.DataFrame, axes: Axes, x: str = "kv_ratio") -> None:
    """Draw the runs of one model, task and text: rows of `divergence_table`; bars are 95 % intervals over examples.

    Points of too few examples for an interval are hollow.
    """
    runs = frame.assign(x=frame["kv_bytes"] / MIB if x == "bytes" else frame["kv_ratio"])
    runs = runs[runs["x"].notna()]
    if runs.empty:
        raise ConfigError(f"no run with a divergence has a place on the axis {x}: nothing to draw")
    dashes = dashes_of(runs)
    _levels(frame, axes)
    lines = runs.groupby(["method", "setting"], sort=True)
    for place, (key, line) in enumerate(lines):
        method, setting = map(str, key)
        points = points_of(line, "x", "kl", "kl_low", "kl_high", least=LEAST)
        dodge(
            series(axes, method, points, f"{method} {setting}".rstrip(), dashes[method, setting]), place, lines.ngroups
        )
    axes.set_xlabel(X_AXES[x])


def along(runs: Sequence[Folder], text: str, frame: pd.DataFrame, axes: Axes) -> None:
    """Draw mean KL at each place of the text, a line per run; wider lines hold more."""
    _levels(frame, axes)
    for folder in runs:
        measured, method = per_example(folder.run, text), str(folder.labels["method"])
        assert measured is not None  # it has a row
        line, ratio = measured.by_position(), folder.labels.get("kv_ratio")
        row = frame[frame["hash"] == folder.run.hash].iloc[0]
        label = run_name({str(name): value for name, value in row.items()})
        width = 0.6 + 1.6 * (0.5 if ratio is None else ratio)
        axes.plot(line["position"], line["kl"].clip(lower=LEAST), color=color_of(method), linewidth=width, label=label)
    axes.set_xlabel("place of the token in the text")


def without_shared(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Rows without the overrides that all of them share in `setting`, and those overrides."""
    settings = frame["setting"].fillna("").astype(str) if "setting" in frame else [""] * len(frame)
    shared, rows = shared_settings([{"setting": setting} for setting in settings])
    return frame.assign(setting=[row["setting"] for row in rows]), " ".join(shared)


def _set_title(axes: Axes, title: str, shared: str, counted: str) -> None:
    """Model and task, then the settings that all runs share, then the number of examples."""
    axes.set_title(textwrap.fill(f"{', '.join(filter(None, [title, shared]))} ({counted})", 52), fontsize=9)


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis at one, two and five of each power of ten: 0.05 instead of 5 times a power."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _levels(frame: pd.DataFrame, axes: Axes) -> None:
    """Epsilons as levels, and the look of the axes."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.set_ylabel("KL from the full cache, nats per token")
    for limit in set(frame["epsilon"]):
        axes.axhline(limit, color="black", linewidth=1.0, linestyle="--")
    _grid_lines(axes)


def _name_levels(frame: pd.DataFrame, axes: Axes) -> None:
    """Words of the levels to the right of the axes, whose limits are final, one above the other where they are near."""
    low, high = np.log(axes.get_ylim())
    free = 0.0
    for limit in sorted(set(frame["epsilon"])):
        place = max(free, (np.log(limit) - low) / (high - low))
        axes.annotate(f"{LIMIT} {limit:g}", (1.01, place), xycoords="axes fraction", fontsize=7, va="center")
        free = place + LINE


def draw_divergence(runs: Runs, x: str, text: str = OWN) -> Figure:
    """A panel per model and task, along one kind of text. x: kv_ratio, bytes or position."""
    if x not in (*X_AXES, POSITION):
        raise ConfigError(f"x of a divergence must be one of {', '.join((*X_AXES, POSITION))}, got {x}")
    frame = divergence_table(runs.ran)
    frame = frame[frame["text"] == text] if len(frame) else frame
    if frame.empty:
        raise ConfigError(
            f"no run here has a divergence along {text}: "
            f"kvexp results {runs.outputs} --view divergence --measure {text} measures it"
        )
    panels = [(title, block) for title, _, block in parts(frame.sort_values(["model", "task"], kind="stable"))]
    columns = min(PANELS, len(panels))
    size = ((PANEL[0] + 1.2) * columns, (PANEL[1] + 0.9) * ceil(len(panels) / columns))  # room for words and a legend
    figure = Figure(layout="constrained", figsize=size)
    for place, (title, block) in enumerate(panels):
        axes = figure.add_subplot(ceil(len(panels) / columns), columns, place + 1)
        inside = [folder for folder in runs.ran if folder.run.hash in set(block["hash"])]
        inside.sort(key=lambda folder: (str(folder.labels["method"]), folder.labels.get("kv_ratio") or 0))
        block, shared = without_shared(block)
        block = with_n(block)
        if x == POSITION:
            along(inside, text, block, axes)
        else:
            divergence(block, axes, x)
        _name_levels(block, axes)
        _set_title(axes, titled(title, block["question"]), shared, n_words(block))
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
    return figure


BYTES_DASHES: dict[int, Any] = {16: "-", 8: (0, (6, 1.5)), 4: (0, (3, 1.5)), 2: (0, (1, 1))}
TICKS = (1.0, 0.5, 0.25, 0.125, 0.0625)
FULL_BITS = 16
BYTES_PANELS = ("kl", "quality")


def curves(runs: pd.DataFrame, name: str, axes: Axes) -> None:
    """Draw column `name` (kl or quality) of one model's and task's runs against bytes_share; bars: 95 % intervals.

    A line joins the budgets of a method at equal bits; that of the full cache in few bits joins the bits.
    """
    runs = runs.assign(joined=runs["bits"].where(runs["method"] != QUANTISED_FULL, 0))
    lines = runs[runs[name].notna()].groupby(["method", "joined", "rest"], sort=True)
    for place, ((method, bits, rest), line) in enumerate(lines):
        least = LEAST if name == "kl" else -math.inf
        points = points_of(line, "bytes_share", name, f"{name}_low", f"{name}_high", least=least)
        label = f"{method}, {bits} bits {rest}".rstrip()
        if not bits:
            bit_widths = line.sort_values("bytes_share")["bits"][::-1]
            label = f"full, {', '.join(map(str, bit_widths))} bits {rest}".rstrip()
        dash = BYTES_DASHES[int(str(bits)) or FULL_BITS] if len(line) > 1 else "none"
        drawn = series(axes, str(method), points, label, dash, None if bits else "black", width=1.3)
        dodge(drawn, place, lines.ngroups)
    axes.set_xscale("log", base=2)
    ends = runs["bytes_share"].min(), runs["bytes_share"].max()
    axes.set_xticks([tick for tick in TICKS if ends[0] / 2 <= tick <= 2 * ends[1]])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes, share of the full cache's at 16 bits")
    _grid_lines(axes)
    if name == "kl":
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_ylabel("KL from the full cache, nats per token")
    else:
        axes.axhline(99, color=MARK_COLOR, linewidth=1.0, linestyle="--")
        axes.set_ylabel(f"{called(str(runs['metric'].iloc[0]), runs['task'].iloc[0])}, % of full")


def draw_bytes(frame: pd.DataFrame, names: Sequence[str] = BYTES_PANELS) -> Figure:
    """A row of panels for each model and task of a `views.bytes_table`, one for each of `names`; one legend below."""
    if frame.empty:
        raise ConfigError("no run here has bytes to compare with its full cache's: nothing to draw")
    rows = [(title, runs) for title, _, runs in parts(frame.sort_values(["model", "task"], kind="stable"))]
    shared = frame["shared"].iloc[0]
    width = 2.4 * PANEL[0] if len(names) > 1 else 1.6 * PANEL[0]
    figure = Figure(layout="constrained")
    panels = figure.subplots(len(rows), len(names), squeeze=False)
    for row, (title, runs) in zip(panels, rows, strict=True):
        runs = with_n(runs.assign(setting=runs["rest"])).rename(columns={"rest": "was", "setting": "rest"})
        for name, axes in zip(names, row, strict=True):
            if runs[name].notna().any():
                curves(runs, name, axes)
            else:
                axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
        title = titled(title, runs["question"]) if "question" in runs else title
        _set_title(row[0], title, shared if len(rows) == 1 else "", n_words(runs))
    if shared and len(rows) > 1:
        figure.suptitle(textwrap.fill(shared, 120), fontsize=8)
    figure.set_size_inches(width, len(rows) * (PANEL[1] + 0.3) + 0.6 + 0.18 * legend_below(figure, width))
    return figure


LETTER = 0.085  # inches of a letter in the title


def heatmap(cells: pd.DataFrame, axes: Axes, title: str = "", bar: bool = True) -> AxesImage:
    """Draw a `views.grid` into axes, 0 red to 100 green; a cell without a number stays grey.

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


def draw_needle(runs: Runs, metric: str | None = None) -> Figure:
    """A heat-map per run, length across, depth down; metric: None: each task's first."""
    needles = [(folder, metric or folder.metrics[0]) for folder in runs.ran if views.is_needle(folder)]
    if not needles:
        raise ConfigError(f"no run under {runs.outputs} {VIEWS['needle'].missing}")
    cells = [views.grid(folder.rows, name) for folder, name in needles]
    wide = 2.2 + 0.6 * max(cell.shape[1] for cell in cells)
    heights = [1.9 + 0.35 * cell.shape[0] for cell in cells]
    figure = Figure(figsize=(wide, sum(heights)), layout="constrained")
    panels = figure.subplots(len(cells), squeeze=False, height_ratios=heights)[:, 0]
    for axes, cell, (folder, name) in zip(panels, cells, needles, strict=True):
        cell.attrs["metric"] = f"{name} (%)"
        title = titled(f"{run_name(folder.labels)}, {folder.labels['model']}", [folder.question])
        heatmap(cell, axes, textwrap.fill(title, int(wide / LETTER)))
    return figure
