"""Retrieval methods on the command line: what cannot work is said before weights, and rows say what fell back."""

import pytest
from test_runner import settings

from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.record import runs
from kvexp.results.render import notes, to_markdown
from kvexp.results.table import table

FEW = "no more tokens to cluster than centroids: searched exactly"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["method=pqcache", "method.m=3"], "method.m=3 does not divide"),
        (["method=sparq", "method.r=1000"], "method.r=1000"),
        (["method=pqcache", "method.cache_tokens=64"], "cannot hold one block of 128"),
        (["method=infllm", "method.cache_tokens=5"], "cannot hold one block of 128"),
    ],
)
def test_what_cannot_work_is_said_before_weights_load(tmp_path, monkeypatch, overrides, says):
    """Not even those of the full-attention baseline, which has no such setting and would come first."""
    monkeypatch.setattr("kvexp.evaluate.evaluate_run.load", lambda spec: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=says):
        evaluate_run(settings(tmp_path, *overrides))
    assert not [found for found in runs(tmp_path) if found.rows()]


def test_rows_and_table_say_what_fell_back(tmp_path):
    """4096 centroids are more than any prompt here has tokens: an exact search must not pass for PQCache."""
    record = evaluate_run(settings(tmp_path, "method=pqcache", "method.b=12", "method.n_sinks=1", "kv_ratio=0.5"))
    assert [row["receipt"]["retrieval"]["notes"] for row in record.rows()] == [[FEW], [FEW]]
    frame = table(tmp_path)
    by_method = {row["method"]: row for row in frame.to_dict("records")}
    assert by_method["pqcache"]["fell_back"] == f"2 of 2 rows: {FEW}"
    assert by_method["full"]["fell_back"] == ""
    assert by_method["pqcache"]["moved_bytes"] > by_method["pqcache"]["offloaded_bytes"] > 0
    assert any(line.endswith(f"2 of 2 rows: {FEW}") for line in notes(frame))
    assert "| TT2T | moved | cache hits |" in to_markdown(frame)
    assert "moved" not in to_markdown(frame[frame["method"] == "full"])
