"""Bounded prefill: a prompt read in chunks with an eviction after each, so that its keys and values are never all held.

Which methods can: a score must be known before the prompt has ended, and must not need what has been evicted.
"""

from __future__ import annotations

from kvexp.core.cache_settings import CacheSettings
from kvexp.core.sequence import SequenceState


def obstacle(config: CacheSettings) -> str | None:
    """Why prompts cannot be evicted between chunks under this configuration, with what to change; None if they can."""
    method, spec, name = config.method, config.method.score_spec, f"method {config.method.name}"
    leave = "leave bounded_chunk at null"
    if not method.evicts or method.full_cache:
        return f"{name} evicts nothing, so that its prompts have to fit: {leave}"
    if config.mode == "mask":
        return f"{name} under mode=mask drops nothing, it simulates: set mode=overwrite, or {leave}"
    if not config.cadence.at_prefill:
        return f"an eviction after every chunk is one at the prompt's end too: set evict_at_prefill=true, or {leave}"
    if spec is not None and spec.last_rows is not None and spec.decay > 0:
        return (
            f"{name} scores slots by the prompt's last {spec.last_rows} queries, which have not come when a chunk is "
            f"evicted: {leave}"
        )
    if spec is not None and spec.across_layers:
        return f"{name} adds scores up over all layers when a prompt has ended, and chunks end before: {leave}"
    if method.needs.second_pass is not None:
        return f"{name} reads the whole prompt a second time, over all of its keys and values: {leave}"
    if method.needs_whole_prompt:
        return f"{name} {method.needs_whole_prompt}, which must not be evicted before: {leave}"
    if method.needs.local_chunks is not None:
        return f"{name} compares each token of the prompt with those around it, behind it too: {leave}"
    if config.shares_by_preference:
        return f"{config.layers_setting} shares slots out among layers by what a whole prompt looked at: {leave}"
    if config.is_ragged:
        assert config.budget is not None
        shares = f"{config.budget.heads_setting} shares slots out among heads when a prompt has ended"
        return f"{shares}, and chunks end before: {leave}"
    if config.renumbered and method.needs.queries_after is not None:
        return (
            f"{name} turns the prompt's queries back by their positions, which positions=renumbered moves from chunk "
            f"to chunk: set positions=original, or {leave}"
        )
    if config.observe == "triton":
        return f"the CUDA kernels of observe=triton sum up whole prompts: set observe=blocked, or {leave}"
    return None


def evicts_after_chunk(config: CacheSettings, sequence: SequenceState, keep: list[int]) -> bool:
    """Whether the forward in progress is a chunk to be evicted, and not the prompt's last.

    keep: of every row, the slots it may hold. Rows of a bounded prefill have no padding, so all have seen as much.
    """
    if config.bounded_chunk is None or not sequence.in_prompt or sequence.prompt_complete:
        return False
    return any(sequence.seq_len > kept for kept in keep)


def rows_to_chunk_end(config: CacheSettings, sequence: SequenceState) -> int | None:
    """Query rows of the prompt that are still to come before the next eviction; None while decoding."""
    if not sequence.in_prompt or sequence.prompt_columns is None:
        return None
    return 0 if config.bounded_chunk is not None else sequence.prompt_columns - sequence.seq_len
