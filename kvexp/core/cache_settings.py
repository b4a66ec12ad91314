"""The settings of a cache and what follows from them, before anything is said about which go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypedDict

from kvexp.core.budget import Budget, Cadence
from kvexp.core.head_scores import HeadScores
from kvexp.core.layer_allocation import layer_budgets_of
from kvexp.core.method import Method
from kvexp.core.quantization import Quantization
from kvexp.core.query_calibration import QueryCalibration
from kvexp.core.selection import SlotSelection
from kvexp.core.surrogate import Surrogate

Mode = Literal["overwrite", "compact", "mask", "auto"]
Positions = Literal["original", "renumbered"]
Observe = Literal["blocked", "naive", "triton"]
Keep = Literal["span", "fair"]
Graph = Literal["auto", "off"]


class CacheOptions(TypedDict, total=False):
    """`CacheConfig` without method and budget, as keyword arguments of `kvexp.generate` and `EvictionCache`."""

    cadence: Cadence
    mode: Mode
    positions: Positions | None
    observe: Observe
    block: int | None
    beyond_context: bool
    calibration: QueryCalibration | None
    quantization: Quantization | None
    head_scores: HeadScores | None
    select: SlotSelection
    surrogate: Surrogate | None
    bounded_chunk: int | None
    keep: Keep | None
    graph: Graph


@dataclass(frozen=True)
class CacheSettings:
    """The fields of `CacheConfig`, which says what each means and checks them, and what follows from them."""

    method: Method
    budget: Budget | None = None
    cadence: Cadence = field(default_factory=Cadence)
    mode: Mode = "overwrite"
    positions: Positions | None = None
    observe: Observe = "blocked"
    block: int | None = None
    beyond_context: bool = False
    calibration: QueryCalibration | None = None
    quantization: Quantization | None = None
    head_scores: HeadScores | None = None
    select: SlotSelection = field(default_factory=SlotSelection)
    surrogate: Surrogate | None = None
    bounded_chunk: int | None = None
    keep: Keep | None = None
    graph: Graph = "off"

    @property
    def is_simulation(self) -> bool:
        """Whether the method exists only as a simulation, as which it needs the rows of evicted tokens."""
        spec = self.method.score_spec
        return self.method.simulation_only or (spec is not None and spec.over == "full")

    @property
    def stacks(self) -> bool:
        """Whether caches of this kind take decode steps together, in common buffers."""
        drops = self.method.evicts and self.mode == "overwrite"
        return drops and self.quantization is None and not self.is_ragged

    @property
    def is_union(self) -> bool:
        """Whether all kv heads of a layer keep the same positions."""
        return self.budget is not None and self.budget.heads == "union"

    @property
    def compares_heads(self) -> bool:
        """Whether priorities of different kv heads are held against each other, averaged, or held against a threshold.

        With budget.heads=duo they are not: there only the heads' scores say how many slots a head has.
        """
        shared = self.budget is not None and self.budget.shares_heads and self.budget.heads != "duo"
        return shared or self.select.by == "chunk"

    @property
    def is_ragged(self) -> bool:
        """Whether kv heads of a layer may hold different numbers of slots."""
        return self.budget is not None and self.budget.ragged

    @property
    def shares_by_preference(self) -> bool:
        """Whether layers share slots by what they look at, so that none knows its budget before the prompt's end."""
        how = None if self.budget is None or not self.method.evicts else layer_budgets_of(self.method, self.budget)
        return how is not None and how.window > 0

    @property
    def layers_setting(self) -> str:
        """What says how many slots each layer holds, as it is typed."""
        layers = None if self.budget is None else self.budget.layers
        return f"method {self.method.name}" if layers is None else f"budget.layers={layers}"

    @property
    def renumbered(self) -> bool:
        """Whether survivors get the positions 0, 1, 2 … in place of their original ones."""
        return self.positions == "renumbered"

    @property
    def evict_every(self) -> int | None:
        """Decode steps between evictions; None: none while decoding, by cadence or because the method does none."""
        return self.cadence.every if self.method.evicts_while_decoding else None
