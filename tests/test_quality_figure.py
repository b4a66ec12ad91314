"""The figure of quality against kv_ratio: nothing covers a point, every line is named once, bad wishes are one line."""

import itertools

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from turns import in_turn

from kvexp.errors import ConfigError
from kvexp.figures.quality import draw, main, quality
from kvexp.figures.style import color_of, marker_of
from kvexp.record import Run

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
    ("models", "methods", "settings"),
    in_turn([WIDE, WIDE[:2], WIDE[:1]], [METHODS, METHODS[:1]], SETTINGS[::-1], of=2),
)
def test_the_legend_covers_no_panel_and_lies_within_the_picture(models, methods, settings):
    figure = drawn(draw(frame(models, methods, settings), None))
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


def test_the_mark_is_named_where_it_lies():
    figure = drawn(draw(frame(), "rouge2"))
    (axes,) = figure.axes
    (word,) = (text for text in axes.texts if text.get_text() == "99 %")
    assert word.xy[1] == 99 and word.get_window_extent().x0 >= axes.bbox.x1
    level = {
        line.get_label(): line.get_ydata()[0] for line in axes.lines if line.get_label() in ("full", "99 % of full")
    }
    assert level == {"full": 100, "99 % of full": 99}


def test_a_methods_settings_differ_in_dashes_and_what_all_share_is_the_title():
    settings = ("method.recent_ratio=0.2", "method.recent_ratio=0.5")
    figure = draw(frame(settings=settings, shared="task.size=120"), None)
    lines = [bars.lines[0] for bars in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 6
    assert len({line.get_color() for line in lines}) == 3
    assert figure.get_suptitle() == "task.size=120"
    assert not any("task.size" in text.get_text() for text in figure.legends[0].get_texts())


def test_the_methods_of_the_papers_are_told_apart_without_color_too():
    looks = [(color_of(m), marker_of(m)) for m in METHODS]
    assert len(set(looks)) == len(METHODS) == len({marker for _, marker in looks})


def test_what_cannot_be_drawn_is_said(tmp_path, capsys):
    with pytest.raises(ConfigError, match="has no metric 'f1'"):
        draw(frame(), "f1")
    with pytest.raises(ConfigError, match="run a sweep over kv_ratio first"):
        draw(frame(methods=()).assign(paired=None), None)
    with pytest.raises(ConfigError, match="nothing to draw"):
        quality(frame().assign(rouge2_of_full=float("nan")), "rouge2", Figure().add_subplot())
    assert main([str(tmp_path), str(tmp_path / "x.jpeg")]) == 2
    assert "must end in .png, .pdf or .svg" in capsys.readouterr().err


def test_a_picture_of_runs_in_a_new_folder(tmp_path, capsys):
    receipt = {"first_eviction_step": 0, "slots": 4.0, "kv_bytes": 8, "peak_kv_bytes": 8, "batch_size": 1}
    labels = {"model": "tiny", "task": "xsum", "method": "full", "setting": ""}
    known = {"skipped": None, "new_tokens": 4, "seconds": {"ttft": 0.1, "tpot": 0.1}}
    base = None
    for method, ratio in (("full", None), ("h2o", 0.2), ("h2o", 0.5)):
        labels |= {"method": method, "kv_ratio": ratio}
        run = Run.open(tmp_path / "out", dict(labels), dict(labels), {}, baseline=base)
        for number in range(20):
            given = receipt if base else {"first_eviction_step": None}
            run.append({"example": str(number), "metrics": {"rouge1": 50.0 + number % 3}, "receipt": given, **known})
        run.finish(20)
        base = base or run.hash
    picture = tmp_path / "new" / "quality.png"
    assert main([str(tmp_path / "out"), str(picture), "--metric", "rouge1"]) == 0, capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bars_of_one_budget_stand_side_by_side_and_markers_at_an_axis_are_whole():
    given = frame(methods=METHODS)
    given.loc[given["kv_ratio"].eq(0.7), ["rouge2_of_full", "rouge2_low"]] = 0.0
    (axes,) = drawn(draw(given, None)).axes
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
    (axes,) = drawn(draw(given, None)).axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[0.2, 0.5, 0.7]]  # 12 pairs each
    assert hollow[0].get_zorder() > axes.containers[0].lines[0].get_zorder(), "not hidden by the filled ones"
    assert axes.get_ylim()[0] == 0
    assert not any(
        line.get_markerfacecolor() == "white" and len(line.get_xdata())
        for line in draw(given.assign(paired=60), None).axes[0].lines
    )
