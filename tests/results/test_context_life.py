"""A context's life: what charts have of its tables, figures, and the report's section."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from life_runs import EVIL, opened, outputs

from kvexp.results import report as life_section
from kvexp.results.read import folders, in_order, read_runs
from kvexp.results.report import page, read
from kvexp.results.views import RUNS, VIEWS, View, chart_of, main, shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outputs(tmp_path_factory.mktemp("life") / "outputs")


DRAWN = {name: view for name, view in VIEWS.items() if view.sides}


def framed(view: View, folder: Path) -> Any:
    return view.table(read_runs(folder))


def charts(folder: Path, name: str) -> list[Any]:
    """(places, lines as label -> [(place, values)]) of each block of a view."""
    view = VIEWS[name]
    found = [chart_of(view, block.rows) for block in view.blocks(framed(view, folder))]
    return [(places, {line.label: [(x, v) for x, _, v in line.points] for line in lines}) for places, lines in found]


def test_turns_and_distances_are_places_of_one_line_a_run(folder: Path) -> None:
    ((places, lines),) = charts(folder, "turns")
    assert places == ["0", "1", "2"]
    (points,) = lines.values()
    quality, kl = zip(*(values for _, values in points), strict=True)
    assert [round(each[0]) for each in quality] == [100, 50, 0] and quality[1][1] < 50 < quality[1][2]
    assert [each[0] for each in kl] == pytest.approx([0.1, 0.2, 0.3])
    ((_, lines),) = charts(folder, "distance")
    assert [round(v[0][0]) for _, v in next(iter(lines.values()))] == [0, 50, 100]


def test_questions_and_positions_in_long_answers(folder: Path) -> None:
    ((places, lines),) = charts(folder, "questions")
    ((_, first), (_, second)) = next(iter(lines.values()))
    assert places == ["1", "2"] and first[0][0] == 100 and second[0][0] == 75 and second[1][0] == 50
    ((places, lines),) = charts(folder, "long")
    assert places == ["to 64", "to 128"] and len(lines) == 1
    assert [v[0][0] for _, v in lines["h2o"]] == pytest.approx([0.1, 0.2])


def test_the_sizes_of_chunks_make_one_line_with_the_whole_prompt_last(folder: Path) -> None:
    ((places, lines),) = charts(folder, "chunks")
    assert places == ["32", "128", "whole"] and list(lines) == ["h2o"]
    quality, peak = zip(*(values for _, values in lines["h2o"]), strict=True)
    assert [each[0] for each in quality] == pytest.approx([100 * 39 / 99, 100 * 59 / 99, 100 * 89 / 99])
    assert [each[0] for each in peak] == pytest.approx([31.25, 50, 75]) and math.isnan(peak[0][1])


def test_a_view_says_where_there_is_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--view", "long", "--where", "task=news"]) == 1
    assert "wrote long answers; run: kvexp run task=long_answers" in capsys.readouterr().out
    assert main([str(folder), "--plot", str(tmp_path / "x.png"), "--view", "turns"]) == 2
    assert (
        "--plot draws the views runs, divergence, bytes and needle, not turns; kvexp report" in capsys.readouterr().err
    )


def test_the_table_of_all_runs_names_the_views_of_these(folder: Path) -> None:
    (line,) = (each for each in shown(read_runs(folder), RUNS)[2] if each.startswith("more of these runs"))
    assert line.endswith("--view questions or turns or distance or chunks or long")
    for wanted in ({"task": "news_qa", "question": "in_prompt"}, {"status": "refused"}):
        assert not any("more of these runs" in each for each in shown(read_runs(folder, wanted), RUNS)[2])


def test_the_report_has_a_part_for_each_kind_of_run(folder: Path) -> None:
    pytest.importorskip("plotly", reason="comes with kvexp[eval]")
    source = read(folder)
    parts = life_section.life_data(source)
    assert parts is not None and [part["name"] for part in parts] == list(DRAWN)
    for part in parts:
        for block in part["blocks"]:
            assert len(block["heads"]) == len(block["right"]) == len(block["rows"][0]) - 1
            assert all(place < len(block["places"]) for line in block["lines"] for place, _, _ in line["points"])
    text = page(source)
    assert '<section id="life">' in text and EVIL not in text
    only = life_section.life_data(read(folder, {"task": "news"}))
    assert only is not None and [part["name"] for part in only] == ["chunks"]


def test_a_question_seen_and_hidden_are_two_places_of_a_line(folder: Path) -> None:
    ((places, lines),) = charts(folder, "hidden")
    assert places == ["question in prompt", "after eviction"]
    ((_, (seen,)), (_, (hidden,))) = next(iter(lines.values()))
    assert seen[0] == 100 and hidden[0] == 75 and hidden[1] < 75 < hidden[2]


def test_runs_stand_in_the_order_of_their_labels_whatever_their_folders_are_called(tmp_path: Path) -> None:
    base = opened(tmp_path, "news", {"method": "full", "kv_ratio": None}, {}, None)
    for method, ratio in (("tova", 0.2), ("h2o", 0.5), ("h2o", 0.125), ("h2o", None)):
        opened(tmp_path, "news", {"method": method, "kv_ratio": ratio}, {"ratio": ratio}, base)
    opened(tmp_path, "dialogue", {"method": "window", "kv_ratio": 0.2}, {}, base)
    found = folders(tmp_path)
    labels = [(one.labels["method"], one.labels["kv_ratio"]) for one in in_order(found)]
    assert labels == [("window", 0.2), ("full", None), ("h2o", 0.125), ("h2o", 0.5), ("h2o", None), ("tova", 0.2)]
    assert in_order(reversed(found)) == in_order(found)
