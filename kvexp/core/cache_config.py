"""The configuration of a cache: a method, its budget, and when and how slots are dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypedDict, Unpack, get_args

from kvexp.core import bounded_prefill, spans
from kvexp.core.budget import Budget, Cadence
from kvexp.core.bytes_budget import BytesBudget
from kvexp.core.head_scores import HeadScores
from kvexp.core.layer_budgets import layer_budgets_of
from kvexp.core.method import Method
from kvexp.core.needs import Needs
from kvexp.core.observe import triton_observe
from kvexp.core.quantization import Quantization
from kvexp.core.query_calibration import QueryCalibration
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.selection import SlotSelection
from kvexp.core.surrogate import Surrogate
from kvexp.errors import ConfigError

Mode = Literal["overwrite", "compact", "mask", "auto"]
Positions = Literal["original", "renumbered"]
Observe = Literal["blocked", "naive", "triton"]


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
    keep: spans.Keep | None


@dataclass(frozen=True)
class CacheConfig:
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

    ConfigError for choices that exclude each other. auto and None are replaced when the object is made: reading mode
    never gives auto, reading positions never None.
    """

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
    keep: spans.Keep | None = None

    @classmethod
    def of(
        cls, method: Method | CacheConfig, budget: Budget | None = None, **options: Unpack[CacheOptions]
    ) -> CacheConfig:
        """A given configuration, or one made of a method, a budget and options; ConfigError for both at once."""
        if not isinstance(method, CacheConfig):
            return cls(method, budget, **options)
        if budget is not None or options:
            given = ", ".join([*(["budget"] if budget is not None else []), *options])
            raise ConfigError(f"a CacheConfig holds {given} itself: leave it out, or use dataclasses.replace")
        return method

    def __post_init__(self) -> None:
        method = self.method
        if not isinstance(method, Method):
            raise ConfigError(f"method must be a method object such as kvexp.methods.H2O(), got {method!r}")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise ConfigError(f"budget must be a Budget such as Budget(kv_ratio=0.5), got {self.budget!r}")
        if not isinstance(self.cadence, Cadence):
            raise ConfigError(f"cadence must be a Cadence such as Cadence(every=8), got {self.cadence!r}")
        _check_declarations(method)
        simulated = method.simulation_only or (method.score_spec is not None and method.score_spec.over == "full")
        if self.mode == "auto":
            object.__setattr__(self, "mode", "mask" if simulated else "overwrite")
        if self.positions is None:
            object.__setattr__(self, "positions", method.positions)
        for key, allowed in (("mode", Mode), ("positions", Positions), ("observe", Observe)):
            if getattr(self, key) not in get_args(allowed):
                raise ConfigError(f"{key} must be one of {', '.join(get_args(allowed))}, got {getattr(self, key)!r}")
        if self.observe == "triton":
            triton_observe.check_installed()
        if self.block is not None and self.block < 1:
            raise ConfigError(f"block must be at least 1 row or null, got {self.block}")
        if method.needs.calibration and self.calibration is None:
            raise ConfigError(
                f"method {method.name} needs statistics of the model's queries from a calibration pass: give "
                "calibration=kvexp.models.calibrate_queries(model, prompts)"
            )
        if method.needs.surrogate and self.surrogate is None:
            raise ConfigError(
                f"method {method.name} needs scores that a trained surrogate predicts: give "
                "surrogate=kvexp.models.train_surrogate(...).surrogate"
            )
        if method.evicts and self.budget is None:
            raise ConfigError(f"method {method.name} needs a budget: give kv_ratio or tokens")
        if method.full_cache and isinstance(self.budget, BytesBudget):
            raise ConfigError(
                f"method {method.name} keeps everything: its budget is the number of tokens that a query attends to, "
                "whatever its index and windows take: give kv_ratio in place of bytes_ratio"
            )
        self._check_cadence()
        self._check_heads()
        self._check_layer_budgets()
        self.select.check_method(method, self.budget)
        if self.renumbered and method.needs.last_queries:
            raise ConfigError(
                f"method {method.name} compares earlier queries with the slots, which cache.positions=renumbered moves "
                "from step to step: set cache.positions=original"
            )
        if method.needs.second_pass is not None and method.evicts_while_decoding:
            raise ConfigError(
                f"method {method.name} needs a second pass over the prompt, which decoded tokens have none of: let "
                f"{type(method).__qualname__}.evicts_while_decoding be False"
            )
        if method.simulation_only and self.mode != "mask":
            raise ConfigError(f"method {method.name} drops nothing, it is a simulation: set mode=mask")
        if simulated and self.mode != "mask":
            raise ConfigError("score_source=full needs the rows of evicted tokens: set mode=mask")
        if self.quantization is not None:
            self._check_quantization(self.quantization)
        self._check_bounded()
        if self.keep is not None:
            if self.keep not in get_args(spans.Keep):
                raise ConfigError(f"keep must be one of {', '.join(get_args(spans.Keep))} or null, got {self.keep!r}")
            if (why := spans.obstacle(self)) is not None:
                raise ConfigError(why)

    def _check_bounded(self) -> None:
        """ConfigError where prompts are to be evicted between chunks and that is impossible."""
        if self.bounded_chunk is None:
            return
        if self.bounded_chunk < 1:
            raise ConfigError(f"bounded_chunk must be at least 1 token, got {self.bounded_chunk}")
        why = bounded_prefill.obstacle(self)
        if why is not None:
            raise ConfigError(why)

    def _check_quantization(self, quantization: Quantization) -> None:
        """ConfigError where slots in few bits cannot be combined with the rest."""
        method, shown = self.method, "key_bits and value_bits below 16"
        if not isinstance(quantization, Quantization):
            raise ConfigError(f"quantization must be a Quantization such as Quantization(4, 4), got {quantization!r}")
        if method.full_cache:
            raise ConfigError(
                f"method {method.name} keeps everything in a memory and an index of its own, which hold what the model "
                f"made: {shown} go with methods that evict, and with full"
            )
        if self.mode == "mask":
            why = f", as which method {method.name} exists only" if method.simulation_only else ""
            raise ConfigError(
                f"mode=mask is a simulation{why}: it drops nothing, so evicted tokens would stay in the groups that "
                f"share a scale, and no byte would be saved. For {shown} set mode=overwrite or mode=compact"
            )

    def _check_cadence(self) -> None:
        """ConfigError for a cadence under which this method never evicts, or at steps that its kind does not know."""
        method, cadence = self.method, self.cadence
        if method.evicts and not method.per_query and not cadence.at_prefill and cadence.every is None:
            raise ConfigError(
                "this cadence never evicts: set evict_at_prefill=true or evict_every to a number of steps"
            )
        if not method.evicts_while_decoding and (not cadence.at_prefill or (cadence.every or 1) > 1):
            raise ConfigError(
                f"method {method.name} evicts at the end of prefill and only then: leave evict_at_prefill and "
                "evict_every alone"
            )
        plain = ("overwrite", "original", Cadence())
        if method.full_cache and (self.mode, self.positions, cadence) != plain:
            raise ConfigError(
                f"method {method.name} keeps everything and chooses anew for every token: leave cache.mode, "
                "cache.positions, cache.evict_at_prefill and cache.evict_every alone"
            )

    def _check_heads(self) -> None:
        """ConfigError where budgets of kv heads do not go together with the method or the cadence."""
        method, heads = self.method, "uniform" if self.budget is None else self.budget.heads
        if heads == "uniform":
            return
        if method.full_cache or method.per_query:
            raise ConfigError(
                f"method {method.name} drops nothing, so no head's slots can go to another: set budget.heads=uniform"
            )
        if self.is_ragged and self.quantization is not None:
            raise ConfigError(
                f"budget.heads={heads} packs heads of different width, which slots in few bits do not know: set "
                "cache.bits=16, or budget.heads=union or uniform"
            )
        if heads == "duo" and self.head_scores is None:
            raise ConfigError(
                "budget.heads=duo needs scores of the model's heads from a calibration pass: give "
                "head_scores=kvexp.models.calibrate_heads(model, prompts)"
            )
        if self.is_ragged and not self.cadence.at_prefill:
            raise ConfigError(
                f"budget.heads={heads} shares out slots by the priorities at the end of the prompt, where "
                "evict_at_prefill=false evicts nothing: set cache.evict_at_prefill=true, or budget.heads=uniform"
            )

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
    def is_ragged(self) -> bool:
        """Whether kv heads of a layer may hold different numbers of slots."""
        return self.budget is not None and self.budget.ragged

    def _check_layer_budgets(self) -> None:
        """ConfigError where layers would share slots by the prompt's attention and nothing is evicted at its end."""
        method = self.method
        if not self.shares_by_preference:
            return
        if method.per_query or method.full_cache:
            raise ConfigError(
                f"method {method.name} drops nothing at the end of the prompt, where layers share slots by what they "
                "look at: leave budget.layers at uniform or pyramid"
            )
        if not self.cadence.at_prefill:
            raise ConfigError(
                "layers share slots at the end of the prompt, by what they look at, and this cadence evicts nothing "
                "there: set evict_at_prefill=true, or budget.layers=uniform"
            )

    @property
    def shares_by_preference(self) -> bool:
        """Whether layers share slots by what they look at, so that none knows its budget before the prompt's end."""
        how = None if self.budget is None or not self.method.evicts else layer_budgets_of(self.method, self.budget)
        return how is not None and how.window > 0

    @property
    def renumbered(self) -> bool:
        """Whether survivors get the positions 0, 1, 2 … in place of their original ones."""
        return self.positions == "renumbered"

    @property
    def evict_every(self) -> int | None:
        """Decode steps between evictions; None: none while decoding, by cadence or because the method does none."""
        return self.cadence.every if self.method.evicts_while_decoding else None


def _check_declarations(method: Method) -> None:
    """ConfigError where a method class declares a property of `Method` without @property, or `recent` as a field."""
    name = type(method).__qualname__
    spec: object = method.score_spec
    if spec is not None and not isinstance(spec, AttentionScoreSpec):
        raise ConfigError(
            f"{name}.score_spec must be a property (@property) that gives an AttentionScoreSpec or None, got a "
            f"{type(spec).__name__}"
        )
    needs: object = method.needs
    if not isinstance(needs, Needs):
        raise ConfigError(f"{name}.needs must be a property (@property) that gives a Needs, got {needs!r:.60}")
    sinks: object = method.sinks
    if not isinstance(sinks, int):
        raise ConfigError(f"{name}.sinks must be a property (@property) that gives a whole number, got {sinks!r:.60}")
    if not callable(method.recent):
        raise ConfigError(
            f"{name}.recent must be a method recent(self, budget) that gives a whole number, got "
            f"{method.recent!r:.60}; call the field otherwise"
        )
