"""The configuration of a cache: a method, its budget, and when and how slots are dropped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Unpack

from kvexp.core.budget import Budget
from kvexp.core.cache_settings import CacheOptions, CacheSettings
from kvexp.core.config_checks import check_choices, check_kinds
from kvexp.core.method import Method
from kvexp.errors import ConfigError


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """ConfigError for a keyword argument that is not known, naming known ones that are written like it."""
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 3) or [each for each in names if name in each]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"{name} is not a keyword that is known here; {hint}")


@dataclass(frozen=True)
class CacheConfig(CacheSettings):
    """How all layers of a cache behave.

    budget: None for methods that evict nothing.
    cadence: when to evict.
    mode: how slots are dropped: overwrite, compact or mask; auto becomes mask for methods that exist only as a
        simulation, overwrite for all others.
    positions: original ids, or renumbered 0..S-1 among the survivors at every step; None becomes what the method's
        paper uses.
    observe: how a prompt's attention is summed: blocked, naive (all rows at once) or triton (CUDA kernels).
    block: query rows per block of `observe=blocked`; None: as many as keep a block's logits under 64 MiB.
    beyond_context: allow more tokens than the model was built for.
    calibration: statistics of the model's queries, for methods that need them.
    quantization: how keys and values are stored in fewer bits once they are no longer new; None: as the model makes
        them.
    head_scores: of the model's kv heads, for budget.heads=duo.
    select: how slots are chosen by the method's priorities.
    surrogate: of the model, for methods whose scores a trained map predicts.
    bounded_chunk: prompts are fed in chunks of so many columns and evicted after each (`bounded_prefill`); None: they
        are evicted at their end.
    keep: what happens to marked spans of a prompt (`kvexp.core.spans`): span, they are never evicted; fair, they lose
        the same share as the rest; None, nothing.
    graph: auto, decode steps are captured as a CUDA graph where the model is on CUDA and they can be
        (`kvexp.generate.decode_graph`), which changes no number; off, they are not.

    ConfigError for choices that exclude each other. auto and None are replaced when the object is made: reading mode
    never gives auto, reading positions never None.
    """

    @classmethod
    def of(
        cls, method: Method | CacheConfig, budget: Budget | None = None, **options: Unpack[CacheOptions]
    ) -> CacheConfig:
        """A given configuration, or one made of a method, a budget and options.

        ConfigError for both at once, and for options that do not exist.
        """
        check_keywords(options, CacheOptions.__annotations__)
        if not isinstance(method, CacheConfig):
            return cls(method, budget, **options)
        if budget is not None or options:
            given = ", ".join([*(["budget"] if budget is not None else []), *options])
            raise ConfigError(f"a CacheConfig holds {given} itself: leave it out, or use dataclasses.replace")
        return method

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.mode == "auto":
            object.__setattr__(self, "mode", "mask" if self.is_simulation else "overwrite")
        if self.positions is None:
            object.__setattr__(self, "positions", self.method.positions)
        check_choices(self)
