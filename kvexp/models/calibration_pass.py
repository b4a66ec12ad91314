"""A calibration pass: a model reads sequences, and the statistics of its queries are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core.calibration_layer import CalibrationLayer
from kvexp.core.head_scores import HeadScores
from kvexp.core.query_calibration import QueryCalibration
from kvexp.errors import ConfigError
from kvexp.models.attention_hook import check_patched
from kvexp.models.cache import EvictionCacheLayer
from kvexp.models.families import num_layers, rope_of
from kvexp.models.moving_rope import MovingRope, check_turns


@torch.no_grad()
def calibrate_queries(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], done: Callable[[], None] = lambda: None
) -> QueryCalibration:
    """Statistics of the queries that a patched model makes of these token ids, for `CacheConfig(calibration=...)`.

    sequences: each is read by itself from position 0, at full attention. done: called after each. ConfigError for no
    token, and for RoPE whose frequencies change with length.
    """
    return calibrate_queries_and_heads(model, sequences, done)[0]


@torch.no_grad()
def calibrate_heads(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], done: Callable[[], None] = lambda: None
) -> HeadScores:
    """Scores of a patched model's kv heads on these token ids, for `CacheConfig(head_scores=...)` (`budget.heads=duo`).

    Arguments and errors as of `calibrate_queries`; ConfigError also for models without RoPE, whose heads it cannot
    tell apart.
    """
    made = calibrate_queries_and_heads(model, sequences, done)[1]
    if made is None:
        raise ConfigError(
            f"heads are told apart by how their mean query and key look under RoPE, which a {model.config.model_type} "
            "model does not have: take another budget.heads"
        )
    return made


@torch.no_grad()
def calibrate_queries_and_heads(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], done: Callable[[], None] = lambda: None
) -> tuple[QueryCalibration, HeadScores | None]:
    """`calibrate_queries` and `calibrate_heads` in one pass; no scores of heads for models without RoPE."""
    check_patched(model.config, ConfigError)
    if not sequences or not all(sequences):
        raise ConfigError("a calibration pass needs at least one sequence, and a token in each")
    check_turns(MovingRope.of(model.config), "a calibration pass")
    rope = rope_of(model)
    states = [CalibrationLayer() for _ in range(num_layers(model.config))]
    cache = Cache(layers=[EvictionCacheLayer(state, rope, model.config) for state in states])
    device = model.get_input_embeddings().weight.device
    for ids in sequences:
        model(torch.tensor([list(ids)], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for state in states:
            state.reset()
        done()
    parts = zip(*(state.sums.statistics() for state in states), strict=True)
    scores = [score for state in states if (score := state.head_scores.mean()) is not None]
    heads = HeadScores.of(torch.stack(scores)) if len(scores) == len(states) else None
    return QueryCalibration.of(*(torch.stack(part) for part in parts)), heads
