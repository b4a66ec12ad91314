"""The figure of divergence and quality against bytes, and the share of bytes it stands on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from test_quantised_runs import settings

from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.figures.bytes_frontier import draw, frontier, main
from kvexp.record import Run
from kvexp.results.table import table

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
    frame = frontier(outputs, {})
    assert set(frame["line"]) == {"full_quantised, 4 bits", "h2o, 16 bits", "h2o, 4 bits", "pqcache, 16 bits"}
    assert frame["kl"].isna().all()
    left, right = draw(frame).axes
    assert [axes.texts[0].get_text() for axes in (left, right)] == ["not measured"] * 2  # two examples are too few
    _, quality = draw(frame.assign(quality=90.0, quality_low=80.0, quality_high=95.0)).axes
    assert quality.get_xlabel().startswith("bytes, share") and quality.get_xscale() == "log"


def test_divergence_has_a_panel_where_it_was_measured(outputs: Path) -> None:
    frame = frontier(outputs, {}).assign(kl=0.1, kl_low=0.05, kl_high=math.nan)
    left, _ = draw(frame).axes
    assert left.get_yscale() == "log"
    labels = left.get_legend_handles_labels()[1]
    assert len(labels) == len(set(labels)) == 4
    assert any(label.startswith("full, 4 bits") for label in labels), "one line for the full cache in few bits"
    (alone,) = draw(frame, ("kl",)).axes
    assert alone.get_yscale() == "log" and alone.get_title() == left.get_title()


def test_the_command(outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(outputs), str(tmp_path / "frontier.svg"), "--where", "method=h2o"]) == 0
    assert (tmp_path / "frontier.svg").stat().st_size > 1000
    with pytest.raises(ConfigError, match="nothing to draw"):
        frontier(outputs, {"method": "full"})
    assert main([str(outputs), str(tmp_path / "frontier.txt")]) == 2
    assert "must end in .png" in capsys.readouterr().err
