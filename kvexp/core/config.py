"""Settings of a cache, checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, TypedDict, Unpack, get_args

from kvexp.core.budget import Budget, BytesBudget, Cadence
from kvexp.core.budget_shares import LayerBudgets, layer_budgets_of
from kvexp.core.method import AttentionScoreSpec, Method, Needs
from kvexp.core.quantized import Quantization
from kvexp.core.selection import SlotSelection
from kvexp.core.sequence import SequenceState
from kvexp.core.statistics import HeadScores, QueryCalibration, Surrogate
from kvexp.util import ConfigError

# The settings of a cache and what follows from them, before anything is said about which go together.


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


# Bounded prefill: a prompt read in chunks with an eviction after each, so that its keys and values are never all held.
#
# Which methods can: a score must be known before the prompt has ended, and must not need what has been evicted.


def bounded_prefill_obstacle(config: CacheSettings) -> str | None:
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


# Which settings of a cache go together: every choice that excludes another is a ConfigError before a model loads.


def check_kinds(config: CacheSettings) -> None:
    """ConfigError where method, budget or cadence are no such objects, or the method's class declares them wrongly."""
    if not isinstance(config.method, Method):
        raise ConfigError(f"method must be a method object such as kvexp.methods.H2O(), got {config.method!r}")
    if config.budget is not None and not isinstance(config.budget, Budget):
        raise ConfigError(f"budget must be a Budget such as Budget(kv_ratio=0.5), got {config.budget!r}")
    if not isinstance(config.cadence, Cadence):
        raise ConfigError(f"cadence must be a Cadence such as Cadence(every=8), got {config.cadence!r}")
    if not isinstance(config.select, SlotSelection):
        raise ConfigError(f"select must be a SlotSelection such as SlotSelection(by='chunk'), got {config.select!r}")
    _check_declarations(config.method)


def check_choices(config: CacheSettings) -> None:
    """ConfigError where settings have values that there are not, or that exclude each other; after `check_kinds`."""
    method = config.method
    _check_values(config)
    _check_method_has(config)
    _check_cadence(config)
    _check_heads(config)
    _check_layer_budgets(config)
    config.select.check_method(method, config.budget)
    if config.renumbered and method.needs.last_queries:
        raise ConfigError(
            f"method {method.name} compares earlier queries with the slots, which cache.positions=renumbered moves "
            "from step to step: set cache.positions=original"
        )
    if method.needs.second_pass is not None and method.evicts_while_decoding:
        raise ConfigError(
            f"method {method.name} needs a second pass over the prompt, which decoded tokens have none of: let "
            f"{type(method).__qualname__}.evicts_while_decoding be False"
        )
    if method.simulation_only and config.mode != "mask":
        raise ConfigError(f"method {method.name} drops nothing, it is a simulation: set mode=mask")
    if config.is_simulation and config.mode != "mask":
        raise ConfigError("score_source=full needs the rows of evicted tokens: set mode=mask")
    if config.quantization is not None:
        _check_quantization(config, config.quantization)
    _check_bounded(config)
    if config.keep is not None:
        if config.keep not in get_args(Keep):
            raise ConfigError(f"keep must be one of {', '.join(get_args(Keep))} or null, got {config.keep!r}")
        if (why := spans_obstacle(config)) is not None:
            raise ConfigError(why)


def _check_values(config: CacheSettings) -> None:
    """ConfigError for a value that a setting does not have, and for Triton where it is not installed."""
    for key, allowed in (("mode", Mode), ("positions", Positions), ("observe", Observe), ("graph", Graph)):
        if getattr(config, key) not in get_args(allowed):
            raise ConfigError(f"{key} must be one of {', '.join(get_args(allowed))}, got {getattr(config, key)!r}")
    if config.observe == "triton":
        check_installed()
    if config.block is not None and config.block < 1:
        raise ConfigError(f"block must be at least 1 row or null, got {config.block}")


def _check_method_has(config: CacheSettings) -> None:
    """ConfigError where the method lacks what it works with: calibration, surrogate, or a budget of its kind."""
    method = config.method
    if method.needs.calibration and config.calibration is None:
        raise ConfigError(
            f"method {method.name} needs statistics of the model's queries from a calibration pass: give "
            "calibration=kvexp.hf.calibrate_queries(model, prompts)"
        )
    if method.needs.surrogate and config.surrogate is None:
        raise ConfigError(
            f"method {method.name} needs scores that a trained surrogate predicts: give "
            "surrogate=kvexp.hf.train_surrogate(...).surrogate"
        )
    if method.evicts and config.budget is None:
        raise ConfigError(f"method {method.name} needs a budget: give kv_ratio or tokens")
    if method.full_cache and isinstance(config.budget, BytesBudget):
        raise ConfigError(
            f"method {method.name} keeps everything: its budget is the number of tokens that a query attends to, "
            "whatever its index and windows take: give kv_ratio in place of bytes_ratio"
        )


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


def _check_cadence(config: CacheSettings) -> None:
    """ConfigError for a cadence under which this method never evicts, or at steps that its kind does not know."""
    method, cadence = config.method, config.cadence
    if method.evicts and not method.per_query and not cadence.at_prefill and cadence.every is None:
        raise ConfigError("this cadence never evicts: set evict_at_prefill=true or evict_every to a number of steps")
    if not method.evicts_while_decoding and (not cadence.at_prefill or (cadence.every or 1) > 1):
        raise ConfigError(
            f"method {method.name} evicts at the end of prefill and only then: leave evict_at_prefill and "
            "evict_every alone"
        )
    plain = ("overwrite", "original", Cadence())
    if method.full_cache and (config.mode, config.positions, cadence) != plain:
        raise ConfigError(
            f"method {method.name} keeps everything and chooses anew for every token: leave cache.mode, "
            "cache.positions, cache.evict_at_prefill and cache.evict_every alone"
        )


def _check_heads(config: CacheSettings) -> None:
    """ConfigError where budgets of kv heads do not go together with the method or the cadence."""
    method, budget = config.method, config.budget
    if budget is None or not budget.shares_heads:
        return
    if method.full_cache or method.per_query:
        raise ConfigError(
            f"method {method.name} drops nothing, so {budget.heads_setting} has no head's slots to share out: "
            f"{budget.heads_remedy}"
        )
    if config.is_ragged and config.quantization is not None:
        others = ", or budget.heads=union" if budget.threshold is None else ""
        raise ConfigError(
            f"{budget.heads_setting} packs heads of different width, which slots in few bits do not know: set "
            f"cache.bits=16{others}, or {budget.heads_remedy}"
        )
    if budget.heads == "duo" and config.head_scores is None:
        raise ConfigError(
            "budget.heads=duo needs scores of the model's heads from a calibration pass: give "
            "head_scores=kvexp.hf.calibrate_heads(model, prompts)"
        )
    if config.is_ragged and not config.cadence.at_prefill:
        raise ConfigError(
            f"{budget.heads_setting} shares out slots by the priorities at the end of the prompt, where "
            f"evict_at_prefill=false evicts nothing: set cache.evict_at_prefill=true, or {budget.heads_remedy}"
        )


def _check_layer_budgets(config: CacheSettings) -> None:
    """ConfigError where layers share slots in two ways, or by the prompt's attention with no eviction at its end."""
    method, budget = config.method, config.budget
    own = type(method.layer_budgets) is not LayerBudgets
    if method.evicts and own and budget is not None and budget.layers is None and budget.among_all_layers:
        what, remedy = budget.heads_setting, budget.heads_remedy
        if budget.pyramid:
            what, remedy = f"budget.pyramid={budget.pyramid:g}", "set budget.pyramid=0"
        raise ConfigError(
            f"method {method.name} shares slots out among layers in a way of its own, and {what} says otherwise what a "
            f"layer holds: {remedy}, or set budget.layers=uniform to take {method.name}'s priorities alone"
        )
    if not config.shares_by_preference:
        return
    if method.per_query or method.full_cache:
        raise ConfigError(
            f"method {method.name} drops nothing at the end of the prompt, where layers share slots by what they "
            "look at: leave budget.layers at uniform or pyramid"
        )
    if not config.cadence.at_prefill:
        raise ConfigError(
            "layers share slots at the end of the prompt, by what they look at, and this cadence evicts nothing "
            "there: set evict_at_prefill=true, or budget.layers=uniform"
        )


def _check_quantization(config: CacheSettings, quantization: Quantization) -> None:
    """ConfigError where slots in few bits cannot be combined with the rest."""
    method, shown = config.method, "key_bits and value_bits below 16"
    if not isinstance(quantization, Quantization):
        raise ConfigError(f"quantization must be a Quantization such as Quantization(4, 4), got {quantization!r}")
    if method.full_cache:
        raise ConfigError(
            f"method {method.name} keeps everything in a memory and an index of its own, which hold what the model "
            f"made: {shown} go with methods that evict, and with full"
        )
    if config.mode == "mask":
        why = f", as which method {method.name} exists only" if method.simulation_only else ""
        raise ConfigError(
            f"mode=mask is a simulation{why}: it drops nothing, so evicted tokens would stay in the groups that "
            f"share a scale, and no byte would be saved. For {shown} set mode=overwrite or mode=compact"
        )


def _check_bounded(config: CacheSettings) -> None:
    """ConfigError where prompts are to be evicted between chunks and that is impossible."""
    if config.bounded_chunk is None:
        return
    if config.bounded_chunk < 1:
        raise ConfigError(f"bounded_chunk must be at least 1 token, got {config.bounded_chunk}")
    why = bounded_prefill_obstacle(config)
    if why is not None:
        raise ConfigError(why)


# The configuration of a cache: a method, its budget, and when and how slots are dropped.


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
    keep: what happens to marked spans of a prompt (`kvexp.core.sequence`): span, they are never evicted; fair, they
    lose
        the same share as the rest; None, nothing.
    graph: auto, decode steps are captured as a CUDA graph where the model is on CUDA and they can be
        (`kvexp.generate.graph`), which changes no number; off, they are not.

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


def spans_obstacle(config: CacheSettings) -> str | None:
    """Why marked spans cannot be spared under this configuration, and what to change; None if they can."""
    method = config.method
    if not method.evicts or method.full_cache or method.per_query:
        return f"method {method.name} evicts nothing that could be spared: leave out keep={config.keep}"
    if config.shares_by_preference:
        setting = config.layers_setting
        return f"{setting} gives layers numbers that no span is known to fit: leave out keep={config.keep}"
    if config.is_ragged:
        assert config.budget is not None
        gives = f"{config.budget.heads_setting} gives heads different numbers"
        return f"{gives}, and a span's share is of one: leave out keep={config.keep}"
    if config.mode == "mask" and method.simulation_only:
        return f"method {method.name} hides slots by a rule of its own: leave out keep={config.keep}"
    return None


def available() -> bool:
    """Whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def check_installed() -> None:
    """ConfigError where Triton is not installed."""
    if not available():
        raise ConfigError(
            "observe=triton needs Triton, which is not installed: pip install 'kvexp[gpu]', or set observe=blocked"
        )
