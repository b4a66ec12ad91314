"""Why decode steps of a configuration cannot be captured as a CUDA graph: a replay runs the same operators on the same
addresses and shapes, without the host.
"""

from __future__ import annotations

from kvexp.core.cache_config import CacheConfig
from kvexp.core.decode.fast_step import supports_fast_decode
from kvexp.core.observe.noise import Noise


def capture_obstacle(config: CacheConfig) -> str | None:
    """Why no decode step of this configuration can be captured; None where steps can be, once the budget is full."""
    method, spec = config.method, config.method.score_spec
    if method.full_cache:
        return "every layer's choice is read by the host"
    if not method.evicts or config.evict_every is None:
        return "every new token is kept: shapes change from step to step"
    if config.mode == "mask":
        return "a simulation drops nothing: shapes change from step to step"
    if config.mode == "compact":
        return "every eviction copies what is kept into new buffers"
    if config.evict_every != 1:
        return f"only every {config.evict_every}th step evicts: steps differ"
    if config.quantization is not None:
        return "tokens that leave the window are quantised into new buffers"
    if spec is not None and spec.noise is not None and type(spec.noise) is not Noise:
        return "its noise is a recording that the host reads"
    shared = spec is not None and spec.across_layers
    if not supports_fast_decode(config, shared):
        return "it takes the general step, which computes shapes and schedules on the host"
    return None
