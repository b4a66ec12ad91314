"""The figure of divergence and quality against bytes, and the share of bytes it stands on."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report_runs import write
from test_bytes import settings
from turns import in_turn

from kvexp.results.plots import color_of, curves, divergence, draw_quality, heatmap, marker_of, quality
from kvexp.results.plots import draw_bytes as draw
from kvexp.results.read import read_runs
from kvexp.results.table import table
from kvexp.results.views import bytes_table, grid, main
from kvexp.run.batches import evaluate_run
from kvexp.run.store import Run
from kvexp.util.errors import ConfigError

GIVEN = ("task.max_new_tokens=3", "task.nll=false", "limit=2", "cache.group=8", "cache.residual=8")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frontier") / "outputs"
    for words in (
        ("method=full", "cache.bits=4"),
        *(("method=h2o", f"cache.bits={bits}", f"bytes_ratio={share}") for bits in (16, 4) for share in (0.5, 0.25)),
        ("method=pqcache", "kv_ratio=0.5", "method.b=3"),
    ):
        given = [word for word in GIVEN if not (words[0] == "method=pqcache" and word.startswith("cache."))]
        evaluate_run(settings(f"outputs_dir={folder}", *given, *words))
    return folder


def test_bytes_are_a_share_of_the_full_caches_at_sixteen_bits(outputs: Path) -> None:
    runs = table(outputs).set_index(["method", "setting"])
    shares: dict[Any, float] = runs["bytes_share"].to_dict()
    plain = {key: value for key, value in shares.items() if "cache.bits=16" in key[1]}
    for (_, words), share in plain.items():
        wanted = 0.5 if "bytes_ratio=0.5" in words else 0.25
        assert wanted * 0.85 < share <= wanted * 1.05  # the full cache holds the answer too
    full = next(value for (method, _), value in shares.items() if method == "full")
    assert full == 1
    coded = next(value for (method, _), value in shares.items() if method == "full_quantised")
    receipt = next(run for run in map(Run.load, outputs.iterdir()) if run.labels["method"] == "full_quantised").rows()[
        0
    ]["receipt"]
    assert 0.25 < coded < 0.6 and receipt["kv_bytes_at_16"] < receipt["kv_bytes"]
    retrieved = next(value for (method, _), value in shares.items() if method == "pqcache")
    assert 0 < retrieved < 1.5


def test_lines_are_of_one_method_and_bits(outputs: Path) -> None:
    frame = bytes_table(read_runs(outputs))
    assert set(frame["line"]) == {"full_quantised, 4 bits", "h2o, 16 bits", "h2o, 4 bits", "pqcache, 16 bits"}
    assert frame["kl"].isna().all()
    left, right = draw(frame).axes
    assert [axes.texts[0].get_text() for axes in (left, right)] == ["not measured"] * 2  # two examples are too few
    _, quality = draw(frame.assign(quality=90.0, quality_low=80.0, quality_high=95.0)).axes
    assert quality.get_xlabel().startswith("bytes, share") and quality.get_xscale() == "log"


def test_divergence_has_a_panel_where_it_was_measured(outputs: Path) -> None:
    frame = bytes_table(read_runs(outputs)).assign(kl=0.1, kl_low=0.05, kl_high=math.nan)
    left, _ = draw(frame).axes
    assert left.get_yscale() == "log"
    assert {"0.05", "0.1"} <= {tick.get_text() for tick in left.get_yticklabels()}, "no powers of ten"
    labels = left.get_legend_handles_labels()[1]
    assert len(labels) == len(set(labels)) == 4
    assert any(label.startswith("full, 4 bits") for label in labels), "one line for the full cache in few bits"
    (alone,) = draw(frame, ("kl",)).axes
    assert alone.get_yscale() == "log" and alone.get_title() == left.get_title()


def test_the_command(outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--view", "bytes", "--plot"]
    assert main([str(outputs), *wanted, str(tmp_path / "frontier.svg"), "--where", "method=h2o"]) == 0
    assert "h2o, 16 bits" in capsys.readouterr().out
    assert (tmp_path / "frontier.svg").stat().st_size > 1000
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw(bytes_table(read_runs(outputs, {"setting": "none"})))
    assert main([str(outputs), *wanted, str(tmp_path / "frontier.txt")]) == 2
    assert "must end in .png" in capsys.readouterr().err


# The heat-map's grid by hand, and a picture of it.


def row(length, depth, recall, name=None):
    metrics = {} if recall is None else {"word_recall": recall, "exact": 0.0}
    info = {"length": length, "depth": depth, "answers": ["x"]}
    return {
        "example": name or f"{length} {depth}",
        "metrics": metrics,
        "info": info,
        "skipped": None if metrics else "long",
    }


ROWS = [row(1000, 0, 100.0), row(1000, 50, 20.0), row(1000, 50, 40.0, "again"), row(2000, 0, 60.0), row(2000, 50, None)]


def test_cells_are_means_and_gaps_stay_gaps():
    cells = grid(ROWS)
    assert list(cells.index) == [0, 50] and list(cells.columns) == [1000, 2000]
    assert cells.loc[0].tolist() == [100.0, 60.0]
    assert cells.loc[50, 1000] == 30.0 and math.isnan(cells.loc[50, 2000])
    assert grid(ROWS, "exact").loc[0, 1000] == 0.0


def test_what_is_no_needle_run():
    with pytest.raises(ConfigError, match="no row has a length and a depth"):
        grid([{"example": "a", "metrics": {"rouge1": 1.0}, "info": {}}, {"example": "b", "metrics": {}}])
    with pytest.raises(ConfigError, match="no row has the metric 'f1'"):
        grid(ROWS, "f1")


def test_axes_name_the_cells():
    axes = Figure().add_subplot()
    heatmap(grid(ROWS), axes, "h2o 0.2")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1000", "2000"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "50"]
    assert axes.images[0].get_clim() == (0, 100) and axes.get_title() == "h2o 0.2"


def needles(outputs, wanted):
    return main([str(outputs), "--view", "needle", "--plot", str(outputs / "needle.png"), "--where", wanted])


def test_a_picture_of_a_run(tmp_path, capsys):
    labels = {"model": "tiny", "task": "needle", "method": "h2o", "kv_ratio": 0.2, "setting": ""}
    record = Run.open(tmp_path, {"task": "needle"}, labels, {}, baseline=None)
    for each in ROWS:
        record.append(each)
    assert needles(tmp_path, "hash=" + record.hash) == 0
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "recall by length (tokens, across)" in shown and "1000" in shown and "30.0" in shown
    assert needles(tmp_path, "hash=gone") == 2
    assert "has scores by length and depth; run: kvexp run task=needle" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["h2o", "a_method_of_a_very_long_name"])
def test_every_word_lies_within_the_picture_and_covers_no_other(tmp_path, monkeypatch, method):
    labels = {"model": "mistral_7b_instruct_v02", "task": "needle", "method": method, "kv_ratio": 0.2, "setting": ""}
    record = Run.open(tmp_path, {"task": "needle"}, labels, {}, baseline=None)
    for each in [row(length, depth, 50.0) for length in (1000, 200_000) for depth in (0, 50, 100)]:
        record.append(each)
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: made.append(figure))
    assert needles(tmp_path, "method=" + method) == 0
    (figure,) = made
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    words = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    boxes = [each.get_window_extent() for each in words]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


# The figure of quality against kv_ratio: nothing covers a point, every line is named once, bad wishes are one line.


METHODS = ("h2o", "keyformer", "a2sf", "window", "snapkv", "tova", "ideal", "random")


def frame(models=("testbed_rope",), methods=METHODS[:3], settings=("",), shared=""):
    """As kvexp.results.table gives it; the last point of every line lies in the lower right corner."""
    rows = []
    for model in models:
        rows.append({"model": model, "method": "full", "verdict99": "baseline", "setting": shared})
        for method in methods:
            for setting in settings:
                for ratio, percent in ((0.2, 60.0), (0.5, 30.0), (0.7, 5.0)):
                    found = {"kv_ratio": ratio, "rouge2_of_full": percent, "rouge2_low": percent - 4}
                    found |= {"rouge2_high": percent + 4, "verdict99": "fail", "paired": 12}
                    rows.append({"model": model, "method": method, "setting": f"{setting} {shared}".strip(), **found})
    return pd.DataFrame(rows).assign(task="testbed_summary", headline="rouge2", n=12)


def drawn(figure):
    """The figure with the boxes of its parts known."""
    FigureCanvasAgg(figure).draw()
    return figure


WIDE = ("testbed_rope", "testbed_learned", "testbed_alibi", "testbed_gqa", "cerebras_6b7")


SETTINGS = [("",), ("method.recent_ratio=0.2 method.impl=mask", "method.recent_ratio=0.9")]


@pytest.mark.parametrize(
    ("models", "methods", "settings"), in_turn([WIDE, WIDE[:2], WIDE[:1]], [METHODS, METHODS[:1]], SETTINGS[::-1], of=2)
)
def test_the_legend_covers_no_panel_and_lies_within_the_picture(models, methods, settings):
    figure = drawn(draw_quality(frame(models, methods, settings), None))
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1
    for axes in figure.axes:
        assert axes.get_tightbbox().y0 >= box.y1
        assert axes.get_tightbbox().x1 <= figure.bbox.x1 and axes.get_tightbbox().y1 <= figure.bbox.y1
        assert axes.bbox.height > 150 and axes.bbox.width > 200  # pixels of 1/100 inch: the legend does not squeeze it
    assert len(figure.axes) == len(models)
    named = [text.get_text() for text in legend.get_texts()]
    assert len(named) == len(set(named)) == 2 + len(methods) * len(settings)


def test_no_bar_hides_another():
    """Lines of several methods at one budget stand beside each other: of quality, divergence, and along bytes."""
    quality_of = frame(methods=METHODS[:3])
    ends = {"kl": 0.2, "kl_low": 0.1, "kl_high": 0.4}
    far = quality_of[quality_of["method"] != "full"].assign(**ends, epsilon=0.05, kv_bytes=1000.0)
    few_bits = far.assign(bits=16, rest="", bytes_share=0.5)
    axes = [Figure().add_subplot() for _ in range(3)]
    quality(quality_of, "rouge2", axes[0])
    divergence(far, axes[1])
    curves(few_bits, "kl", axes[2])
    for panel in axes:
        drawn(panel.figure)
        bars = [bar for container in panel.containers for bar in container.lines[2]]
        places = [round(bar.get_transform().transform(bar.get_segments()[0][0])[0], 1) for bar in bars]
        assert len(places) == 3 == len(set(places))


def test_the_mark_is_named_where_it_lies():
    figure = drawn(draw_quality(frame(), "rouge2"))
    (axes,) = figure.axes
    (word,) = (text for text in axes.texts if text.get_text() == "99 %")
    assert word.xy[1] == 99 and word.get_window_extent().x0 >= axes.bbox.x1
    level = {
        line.get_label(): line.get_ydata()[0] for line in axes.lines if line.get_label() in ("full", "99 % of full")
    }
    assert level == {"full": 100, "99 % of full": 99}


def test_a_methods_settings_differ_in_dashes_and_what_all_share_is_the_title():
    settings = ("method.recent_ratio=0.2", "method.recent_ratio=0.5")
    figure = draw_quality(frame(settings=settings, shared="task.size=120"), None)
    lines = [bars.lines[0] for bars in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 6
    assert len({line.get_color() for line in lines}) == 3
    (title,) = (" ".join(axes.get_title().split()) for axes in figure.axes)
    assert re.fullmatch(r"\S+ / \S+, task\.size=120 \(n = \d+\)", title) and not figure.get_suptitle()
    assert not any("task.size" in text.get_text() for text in figure.legends[0].get_texts())


def test_the_methods_of_the_papers_are_told_apart_without_color_too():
    looks = [(color_of(m), marker_of(m)) for m in METHODS]
    assert len(set(looks)) == len(METHODS) == len({marker for _, marker in looks})


def test_what_cannot_be_drawn_is_said(tmp_path, capsys):
    with pytest.raises(ConfigError, match="has no metric 'f1'"):
        draw_quality(frame(), "f1")
    with pytest.raises(ConfigError, match="run methods at several kv_ratio first"):
        draw_quality(frame(methods=()).assign(paired=None), None)
    with pytest.raises(ConfigError, match="nothing to draw"):
        quality(frame().assign(rouge2_of_full=float("nan")), "rouge2", Figure().add_subplot())
    assert main([str(tmp_path), "--plot", str(tmp_path / "x.jpeg")]) == 2
    assert "must end in .png, .pdf or .svg" in capsys.readouterr().err


def test_a_picture_of_runs_in_a_new_folder(tmp_path, capsys):
    scores = [50.0 + number % 3 for number in range(20)]
    base = write(tmp_path / "out", "full", scores, kv_ratio=None)
    for ratio in (0.2, 0.5):
        write(tmp_path / "out", "h2o", scores, base.hash, kv_ratio=ratio)
    picture = tmp_path / "new" / "quality.png"
    assert main([str(tmp_path / "out"), "--plot", str(picture), "--metric", "rouge1"]) == 0, capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bars_of_one_budget_stand_side_by_side_and_markers_at_an_axis_are_whole():
    given = frame(methods=METHODS)
    given.loc[given["kv_ratio"].eq(0.7), ["rouge2_of_full", "rouge2_low"]] = 0.0
    (axes,) = drawn(draw_quality(given, None)).axes
    columns = []
    for bars in axes.containers:
        assert list(bars.lines[0].get_xdata()) == [0.2, 0.5, 0.7] and not bars.lines[0].get_clip_on()
        upright = bars.lines[2][0]
        columns.append([upright.get_transform().transform(each)[0, 0] for each in upright.get_segments()])
    for budget in zip(*columns, strict=True):
        near = sorted(budget)
        assert min(b - a for a, b in itertools.pairwise(near)) > 2 and near[-1] - near[0] < 25  # pixels


def test_too_few_examples_are_hollow_and_have_no_bar():
    given = frame(methods=METHODS[:1]).assign(rouge2_low=float("nan"), rouge2_high=float("nan"))
    (axes,) = drawn(draw_quality(given, None)).axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[0.2, 0.5, 0.7]]  # 12 pairs each
    assert hollow[0].get_zorder() > axes.containers[0].lines[0].get_zorder(), "not hidden by the filled ones"
    assert axes.get_ylim()[0] == 0
    assert not any(
        line.get_markerfacecolor() == "white" and len(line.get_xdata())
        for line in draw_quality(given.assign(paired=60), None).axes[0].lines
    )
