"""Prompts longer than a model's positions: read in chunks with positions renumbered, refused where that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_conf import composed

import kvexp.core.eviction as layer_attention
from kvexp.run.batches import evaluate_run
from kvexp.run.settings import Settings, settings_of
from kvexp.util import ConfigError

HELD, CHUNK, LENGTH = 200, 200, 2300  # the models of the testbed have 2,048 positions
BEYOND = (
    "model=testbed_gqa",
    "task=testbed_needle",
    f"task.lengths=[{LENGTH}]",
    "task.depths=[100]",
    "limit=1",
    "batch_size=1",
    "method=h2o",
    "budget=tokens",
    f"budget.tokens={HELD}",
    "prefill=bounded",
    f"prefill.chunk={CHUNK}",
    "cache.positions=renumbered",
)


def settings(outputs: Path, *words: str) -> Settings:
    overrides = [*BEYOND, f"outputs_dir={outputs}", *words]
    config, choices = composed(*overrides)
    return settings_of(config, choices, overrides)


def test_a_prompt_beyond_the_models_positions_is_read_at_positions_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = layer_attention.with_renumbered_positions

    def watched(inputs: Any, positions: Any) -> Any:
        made = real(inputs, positions)
        seen.extend(int(each.max()) for each in made.rope_positions)
        return made

    monkeypatch.setattr(layer_attention, "with_renumbered_positions", watched)
    (row,) = evaluate_run(settings(tmp_path, "cache.beyond_context=true")).rows()
    assert row["skipped"] is None and row["prompt_tokens"] > 2048
    assert HELD + CHUNK - 20 <= max(seen) <= HELD + CHUNK, "the last chunk stands behind what is held"
    token = row["receipt"]["kv_bytes"] / row["receipt"]["slots"]
    assert row["receipt"]["peak_kv_bytes"] < 2 * (HELD + CHUNK) * token < 0.5 * LENGTH * token


def test_without_leave_and_where_a_model_has_a_table_of_positions_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long; the model holds 2048 positions"):
        evaluate_run(settings(tmp_path))
    with pytest.raises(ConfigError, match="a table of positions for 2048 tokens and no more"):
        evaluate_run(settings(tmp_path, "cache.beyond_context=true", "model=testbed_rope"))
    with pytest.raises(ConfigError, match="cannot work on"):
        evaluate_run(settings(tmp_path, "cache.beyond_context=true", "model=testbed_learned"))
