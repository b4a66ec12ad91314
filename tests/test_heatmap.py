"""The heat-map's grid by hand, and a picture of it."""

import itertools
import math

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvexp.errors import ConfigError
from kvexp.figures.heatmap import grid, heatmap, main
from kvexp.record import Run


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


def test_a_picture_of_a_run(tmp_path, capsys):
    labels = {"model": "tiny", "task": "needle", "method": "h2o", "kv_ratio": 0.2, "setting": ""}
    record = Run.open(tmp_path, {"task": "needle"}, labels, {}, baseline=None)
    for each in ROWS:
        record.append(each)
    assert main([str(record.path), str(tmp_path / "needle.png")]) == 0
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(tmp_path / "gone"), str(tmp_path / "x.png")]) == 2
    assert "is no run; name its folder" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["h2o", "a_method_of_a_very_long_name"])
def test_every_word_lies_within_the_picture_and_covers_no_other(tmp_path, monkeypatch, method):
    labels = {"model": "mistral_7b_instruct_v02", "task": "needle", "method": method, "kv_ratio": 0.2, "setting": ""}
    record = Run.open(tmp_path, {"task": "needle"}, labels, {}, baseline=None)
    for each in [row(length, depth, 50.0) for length in (1000, 200_000) for depth in (0, 50, 100)]:
        record.append(each)
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: made.append(figure))
    assert main([str(record.path), str(tmp_path / "needle.png")]) == 0
    (figure,) = made
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    words = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    boxes = [each.get_window_extent() for each in words]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
