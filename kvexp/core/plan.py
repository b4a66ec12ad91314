"""How all layers of a cache behave."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from kvexp.core.budget import Budget, Cadence
from kvexp.core.method import Method
from kvexp.core.observe import triton_observe
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """How all layers of a cache behave: a method, its budget, when and how slots are dropped.

    mode: overwrite (default), compact or mask. positions: original ids, or renumbered 0..S-1 among the survivors at
    every step. observe: blocked, naive (all prompt rows at once) or triton (CUDA kernels); block: rows per block
    (None: by memory).
    """

    method: Method
    budget: Budget | None
    cadence: Cadence = field(default_factory=Cadence)
    mode: Literal["overwrite", "compact", "mask"] = "overwrite"
    positions: Literal["original", "renumbered"] = "original"
    observe: Literal["blocked", "naive", "triton"] = "blocked"
    block: int | None = None

    def __post_init__(self) -> None:
        method = self.method
        _check_declarations(method)
        for key, allowed in (
            ("mode", ("overwrite", "compact", "mask")),
            ("positions", ("original", "renumbered")),
            ("observe", ("blocked", "naive", "triton")),
        ):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"{key} must be one of {', '.join(allowed)}, got {getattr(self, key)!r}")
        if self.observe == "triton":
            triton_observe.check_installed()
        if self.block is not None and self.block < 1:
            raise ConfigError(f"block must be at least 1 row or null, got {self.block}")
        if method.evicts and not method.per_query and not self.cadence.at_prefill and self.cadence.every is None:
            raise ConfigError(
                "this cadence never evicts: set evict_at_prefill=true or evict_every to a number of steps"
            )
        if not method.evicts_while_decoding and (not self.cadence.at_prefill or (self.cadence.every or 1) > 1):
            raise ConfigError(
                f"method {method.name} evicts at the end of prefill and only then: leave evict_at_prefill and "
                "evict_every alone"
            )
        if method.evicts and self.budget is None:
            raise ConfigError(f"method {method.name} needs a budget: give kv_ratio or tokens")
        plain = ("overwrite", "original", Cadence())
        if method.keeps_everything and (self.mode, self.positions, self.cadence) != plain:
            raise ConfigError(
                f"method {method.name} keeps everything and chooses anew for every token: leave cache.mode, "
                "cache.positions, cache.evict_at_prefill and cache.evict_every alone"
            )
        if method.needs_mask and self.mode != "mask":
            raise ConfigError(f"method {method.name} drops nothing, it is a simulation: set mode=mask")
        if method.view is not None and method.view.over == "full" and self.mode != "mask":
            raise ConfigError("score_source=full needs the rows of evicted tokens: set mode=mask")
        if not method.evicts_while_decoding and self.cadence.every is not None:
            object.__setattr__(self, "cadence", replace(self.cadence, every=None))


def _check_declarations(method: Method) -> None:
    """ConfigError where a class declares with a method what is read as a property, or the other way round."""
    name = type(method).__qualname__
    view: object = method.view
    if view is not None and not isinstance(view, AttentionScoreSpec):
        raise ConfigError(
            f"{name}.view must be a property (@property) that gives an AttentionScoreSpec or None, got a "
            f"{type(view).__name__}"
        )
    sinks: object = method.sinks
    if not isinstance(sinks, int):
        raise ConfigError(f"{name}.sinks must be a property (@property) that gives a whole number, got {sinks!r:.60}")
    if not callable(method.recent):
        raise ConfigError(
            f"{name}.recent must be a method recent(self, budget) that gives a whole number, got "
            f"{method.recent!r:.60}; call the field otherwise"
        )
