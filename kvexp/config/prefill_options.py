"""The group `prefill`: whether prompts are read whole, or in chunks with an eviction after each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvexp.build import typed
from kvexp.config.model_spec import moving_rope
from kvexp.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


def bounded_chunk(config: Mapping[str, Any]) -> int | None:
    """Tokens per chunk of a bounded prefill, None where prompts are read whole; of a resolved configuration.

    Configurations of before have no group `prefill`. ConfigError names the key.
    """
    node = config.get("prefill", {"chunk": None})
    if not isinstance(node, Mapping):
        raise ConfigError(f"prefill must be a group of settings, got {node!r}")
    for name in node:
        if name != "chunk":
            raise ConfigError(f"prefill.{name} is not a setting of prefill; it has: chunk")
    chunk: int | None = typed(node.get("chunk"), int | None, "prefill.chunk")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"prefill.chunk must be at least 1 token, got {chunk}")
    return chunk


def check_prefill(settings: Settings) -> None:
    """ConfigError where a prefill in chunks is asked for and other settings exclude it; no weights are needed."""
    from kvexp.tasks import LMEval

    chunk, decoding = settings.cache.bounded_chunk, settings.decoding
    if decoding.prefill_chunk is not None and (moving := moving_rope(settings.model)) is not None:
        raise ConfigError(f"{moving.why}, so a prompt is read whole: set generation.prefill_chunk=null")
    if chunk is None:
        return
    if decoding.prefill_chunk is not None:
        raise ConfigError(
            f"generation.prefill_chunk={decoding.prefill_chunk} has no effect with prefill.chunk={chunk}, which evicts "
            "after each chunk: set generation.prefill_chunk=null"
        )
    if decoding.num_beams > 1:
        raise ConfigError(f"prefill=bounded reads a prompt in one row, got generation.num_beams={decoding.num_beams}")
    if isinstance(settings.task, LMEval):
        raise ConfigError(
            "prefill=bounded does not reach lm-eval's tasks, which read a context whole: set prefill=whole"
        )
    if settings.batch_size > 1:
        raise ConfigError(
            f"batch_size must be 1 with prefill=bounded, got {settings.batch_size}: padding would cut the chunks of a "
            "shorter prompt elsewhere"
        )
