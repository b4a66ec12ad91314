"""The configuration of a cache: a method, its budget, when and how slots are dropped; and what goes together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from kvexp.core.budget import Budget, BytesBudget, Cadence
from kvexp.core.budget_shares import LayerBudgets, layer_budgets_of
from kvexp.core.method import AttentionScoreSpec, Method, Needs, SinkScore
from kvexp.core.quantized import EngineQuantization, Quantization
from kvexp.core.selection import SlotSelection
from kvexp.core.special_methods import ChoosesSlots, JoinsLayers, KeepsEverything, Rewrites, Simulated
from kvexp.core.statistics import HeadScores, QueryCalibration, Surrogate
from kvexp.util.errors import ConfigError, Rule, did_you_mean, refuse
from kvexp.util.fields import AtLeast, check_fields

Keep = Literal["span", "fair", "prompt"]
Sliding = Literal["auto"] | bool


@dataclass(frozen=True)
class CacheConfig:
    """How all layers of a cache behave. ConfigError for settings that exclude each other (`REFUSED`).

    mode=auto and positions=None are replaced when the object is made: reading them never gives auto or None.
    """

    method: Method
    budget: Budget | None = None  # None: of a method that evicts nothing
    cadence: Cadence = field(default_factory=Cadence)  # when to evict
    # How slots are dropped; auto: mask for methods that exist only as a simulation, overwrite for all others, which is
    # compact for methods that need their slots in order.
    mode: Literal["overwrite", "compact", "mask", "auto"] = "overwrite"
    # Original position ids, or 0..S-1 among the survivors at every step; None: what the method's paper uses.
    positions: Literal["original", "renumbered"] | None = None
    # How a prompt's attention is summed; naive: all rows at once, a second time; triton: CUDA kernels.
    observe: Literal["blocked", "naive", "triton"] = "blocked"
    beyond_context: bool = False  # whether to allow more tokens than the model was built for
    calibration: QueryCalibration | None = None  # statistics of the model's queries, for methods that need them
    # How keys and values are stored in fewer bits once they are no longer new; None: as the model makes them.
    quantization: Quantization | EngineQuantization | None = None
    head_scores: HeadScores | None = None  # of the model's kv heads, for budget.heads=duo
    select: SlotSelection = field(default_factory=SlotSelection)  # how slots are chosen by the method's priorities
    surrogate: Surrogate | None = None  # of the model, for methods whose scores a trained map predicts
    # Prompts are fed in chunks of so many columns and evicted after each; None: they are evicted at their end.
    bounded_chunk: Annotated[int, AtLeast(1)] | None = None
    # Marked spans of a prompt (`kvexp.core.sequence`): span, never evicted; fair, they lose the rest's share. prompt:
    # no token of a prompt is evicted, so that what is generated shares the other slots. None: no difference.
    keep: Keep | None = None
    # What methods see of the attention of heads with sinks (gpt-oss): as it weighs the values, or over tokens alone.
    score_sink: SinkScore = "applied"
    # Whether layers with a sliding window are evicted from; auto: where all attention of the model slides. Elsewhere
    # such a layer's budget is of what its window holds.
    evict_sliding: Sliding = "auto"
    # auto: decode steps are captured as a CUDA graph where they can be, which changes no number (`kvexp.core.graph`).
    graph: Literal["auto", "off"] = "auto"

    @classmethod
    def of(cls, method: Method | CacheConfig, budget: Budget | None = None, **options: Any) -> CacheConfig:
        """A given configuration, or one made of a method, a budget and OPTIONS.

        ConfigError for both at once, and for options that do not exist.
        """
        if wrong := [name for name in ("kv_ratio", "tokens") if name in options]:
            raise ConfigError(
                f"{wrong[0]} is of a budget: give Budget({wrong[0]}={options[wrong[0]]!r}) behind the method"
            )
        check_keywords(options, OPTIONS)
        if not isinstance(method, CacheConfig):
            return cls(method, budget, **options)
        if budget is not None or options:
            given = ", ".join([*(["budget"] if budget is not None else []), *options])
            raise ConfigError(f"a CacheConfig holds {given} itself: leave it out, or use dataclasses.replace")
        return method

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigError(f"method must be a method object such as kvexp.methods.H2O(), got {self.method!r}")
        if isinstance(self.budget, int | float):
            raise ConfigError(
                f"budget must be a Budget or null, got {self.budget!r}: write Budget(kv_ratio=0.5) or "
                "Budget(tokens=128), or give kvexp.generate kv_ratio= or tokens="
            )
        check_fields(self)
        check_declarations(self.method)
        if self.mode == "auto":
            object.__setattr__(self, "mode", "mask" if self.is_simulation else "overwrite")
        if self.chooses_slots and self.mode == "overwrite":
            object.__setattr__(self, "mode", "compact")
        if self.positions is None:
            object.__setattr__(self, "positions", self.method.positions)
        if self.slot_bias and isinstance(self.budget, BytesBudget):
            object.__setattr__(self, "budget", replace(self.budget, bias=self.slot_bias))
        refuse(self, REFUSED)
        if self.bounded_chunk is not None:
            refuse(self, [(when, f"{why}: leave bounded_chunk at null") for when, why in NOT_BOUNDED])
        if self.keep is not None:
            refuse(self, [(when, f"{why}: leave out keep={self.keep}") for when, why in NO_SPANS])
        if self.keep == "prompt":
            refuse(self, NO_PROMPT)

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        """The method's, with `score_sink`."""
        spec = self.method.score_spec
        return spec if spec is None or self.score_sink == spec.sink else replace(spec, sink=self.score_sink)

    @property
    def sees_attention(self) -> bool:
        """Whether what is evicted depends on the model's attention as `score_sink` says."""
        needs, spec = self.method.needs, self.method.score_spec
        looks = needs.newest_attention or needs.last_queries or needs.second_pass is not None or self.per_query
        return self.method.evicts and (spec is not None or bool(looks) or self.shares_by_preference)

    @property
    def is_simulation(self) -> bool:
        """Whether the method exists only as a simulation, as which it needs the rows of evicted tokens."""
        spec = self.method.score_spec
        return self.simulation_only or (spec is not None and spec.over == "full")

    @property
    def per_query(self) -> bool:
        """Whether each query attends to its own choice of everything seen."""
        return isinstance(self.method, Simulated) and self.method.per_query

    @property
    def simulation_only(self) -> bool:
        """Whether this variant of the method exists only as a simulation."""
        return isinstance(self.method, Simulated) and self.method.simulation_only

    @property
    def keeps_everything(self) -> bool:
        """Whether the method retrieves: nothing is dropped, the budget counts attended slots."""
        return isinstance(self.method, KeepsEverything)

    @property
    def chooses_slots(self) -> bool:
        """Whether the method says itself which slots stay, which needs them in the order of their positions."""
        return isinstance(self.method, ChoosesSlots)

    @property
    def rewritten(self) -> tuple[str, ...]:
        """What the method gives the slots it keeps other numbers of: bias, values, keys; empty: nothing."""
        return self.method.rewrites if isinstance(self.method, Rewrites) else ()

    @property
    def slot_bias(self) -> int:
        """Bytes of a slot's bias, which is float32; 0 where slots have none."""
        return 4 if "bias" in self.rewritten else 0

    @property
    def joins_layers(self) -> bool:
        """Whether an eviction waits for the last layer's priorities."""
        return isinstance(self.method, JoinsLayers) and self.method.joins_layers

    @property
    def drops_nothing(self) -> bool:
        """Whether the method has a budget and drops no slot: each query attends to its own choice."""
        return self.keeps_everything or self.per_query

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
    def plain_choice(self) -> bool:
        """Whether priorities, sinks and recent window alone say which slots go, without `select` and `keep`."""
        return self.select.plain and self.keep is None

    @property
    def rewrites_priorities(self) -> bool:
        """Whether slots are chosen otherwise than by the method's own priorities."""
        return self.method.evicts and not self.select.plain

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
    def equal_layers(self) -> bool:
        """Whether every layer holds as many slots."""
        budget = self.budget
        return budget is None or not (budget.splits_layers or budget.fixes_layer_budgets)

    @property
    def layers_setting(self) -> str:
        """What says how many slots each layer holds, as it is typed."""
        layers = None if self.budget is None else self.budget.layers
        return f"method {self.method.name}" if layers is None else f"budget.layers={layers}"

    @property
    def layers_shared_twice(self) -> bool:
        """Whether the method shares slots out among layers in a way of its own, and the budget in another."""
        shares_out = self.method.evicts and type(self.method.layer_budgets) is not LayerBudgets
        return shares_out and self.budget is not None and self.budget.layers is None and self.budget.fixes_layer_budgets

    @property
    def renumbered(self) -> bool:
        """Whether survivors get the positions 0, 1, 2 … in place of their original ones."""
        return self.positions == "renumbered"

    @property
    def evict_every(self) -> int | None:
        """Decode steps between evictions; None: none while decoding, by cadence or because the method does none."""
        return self.cadence.every if self.method.evicts_while_decoding else None

    @property
    def only_grows(self) -> bool:
        """Whether no slot is evicted, selected or quantised while decoding: a forward may take several new tokens."""
        selects = self.drops_nothing or self.quantization is not None
        return not selects and (not self.method.evicts or self.evict_every is None)


OPTIONS = tuple(option.name for option in fields(CacheConfig) if option.name not in ("method", "budget"))


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """ConfigError for a keyword argument that is not known, naming known ones that are written like it."""
    names = sorted(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
            raise ConfigError(f"{name} is not a keyword that is known here{hint}")


def check_declarations(method: Method) -> None:
    """ConfigError where a method class declares a property of `Method` without @property, or `recent` as a field."""
    name = type(method).__qualname__
    for declared, kind, words in (
        ("score_spec", AttentionScoreSpec | None, "an AttentionScoreSpec or None"),
        ("needs", Needs, "a Needs"),
        ("sinks", int, "a whole number"),
    ):
        if not isinstance(attribute := getattr(method, declared), kind):
            got = attribute if declared != "score_spec" else f"a {type(attribute).__name__}"
            raise ConfigError(f"{name}.{declared} must be a property (@property) that gives {words}, got {got!s:.60}")
    if not callable(method.recent):
        raise ConfigError(
            f"{name}.recent must be a method recent(self, budget) that gives a whole number, got "
            f"{method.recent!r:.60}; call the field otherwise"
        )


TRITON = "observe=triton needs Triton, which is not installed: pip install 'kvexp[gpu]', or set observe=blocked"


def check_installed() -> None:
    """ConfigError where Triton is not installed."""
    if not available():
        raise ConfigError(TRITON)


def available() -> bool:
    """Whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


# Settings of a cache that exclude each other, looked through from top to bottom.
REFUSED: tuple[Rule[CacheConfig], ...] = (
    (lambda c: c.observe == "triton" and not available(), TRITON),
    # What the method works with.
    (
        lambda c: c.method.needs.calibration and c.calibration is None,
        "method {c.method.name} needs statistics of the model's queries from a calibration pass: give "
        "calibration=kvexp.hf.calibrate_queries(model, prompts)",
    ),
    (
        lambda c: c.method.name == "qfilters" and c.calibration and not c.calibration.direction.any(),
        "method qfilters needs directions of the model's queries, which statistics out of TriAttention's file lack: "
        "run kvexp calibrate without --from",
    ),
    (
        lambda c: c.method.needs.surrogate and c.surrogate is None,
        "method {c.method.name} needs scores that a trained surrogate predicts: give "
        "surrogate=kvexp.hf.train_surrogate(...).surrogate",
    ),
    (
        lambda c: c.method.needs.state_changes and c.keep != "prompt",
        "method {c.method.name} scores generated tokens alone, by how they change hidden states: add keep=prompt",
    ),
    (
        lambda c: c.method.evicts and c.budget is None,
        "method {c.method.name} needs a budget: give kv_ratio or tokens",
    ),
    (
        lambda c: c.keeps_everything and isinstance(c.budget, BytesBudget),
        "method {c.method.name} keeps everything: its budget is the number of tokens that a query attends to: give "
        "kv_ratio in place of bytes_ratio",
    ),
    (
        lambda c: c.score_sink != "applied" and (c.keeps_everything or not c.sees_attention),
        "score.sink={c.score_sink} says how a method sees attention by which it evicts, and {c.method.name} evicts by "
        "none: leave score.sink at applied",
    ),
    # When it evicts.
    (
        lambda c: c.method.evicts and not c.per_query and c.cadence == Cadence(at_prefill=False, every=None),
        "this cadence never evicts: set evict_at_prefill=true or evict_every to a number of steps",
    ),
    (
        lambda c: not c.method.evicts_while_decoding and (not c.cadence.at_prefill or (c.cadence.every or 1) > 1),
        "method {c.method.name} evicts at the end of prefill alone: leave evict_at_prefill and evict_every alone",
    ),
    (
        lambda c: c.keeps_everything and (c.mode, c.positions, c.cadence) != ("overwrite", "original", Cadence()),
        "method {c.method.name} keeps everything and chooses anew for every token: leave cache.mode, cache.positions, "
        "cache.evict_at_prefill and cache.evict_every alone",
    ),
    (
        lambda c: c.budget and c.budget.of == "generated" and c.keep != "prompt",
        "budget.of=generated counts slots on top of a prompt that is never evicted: add keep=prompt, or set "
        "budget.of=sequence",
    ),
    # How kv heads share slots.
    (
        lambda c: c.budget and c.budget.shares_heads and c.drops_nothing,
        "method {c.method.name} drops nothing, so {c.budget.heads_setting} has no head's slots to share out: "
        "{c.budget.heads_remedy}",
    ),
    (
        lambda c: c.is_ragged and c.quantization is not None,
        "{c.budget.heads_setting} packs heads of different width, which quantised slots do not support: set "
        "cache.bits=16, or {c.budget.heads_remedy}",
    ),
    (
        lambda c: c.budget and c.budget.heads == "duo" and c.head_scores is None,
        "budget.heads=duo needs scores of the model's heads from a calibration pass: give "
        "head_scores=kvexp.hf.calibrate_heads(model, prompts)",
    ),
    (
        lambda c: c.is_ragged and not c.cadence.at_prefill,
        "{c.budget.heads_setting} shares out slots at the end of the prompt, where evict_at_prefill=false evicts "
        "nothing: set cache.evict_at_prefill=true, or {c.budget.heads_remedy}",
    ),
    # How layers do.
    (
        lambda c: c.layers_shared_twice,
        "method {c.method.name} shares slots out among layers in a way of its own, and {c.budget.heads_setting} says "
        "otherwise what a layer holds: {c.budget.heads_remedy}, or set budget.layers=uniform to take "
        "{c.method.name}'s priorities alone",
    ),
    (
        lambda c: c.shares_by_preference and c.drops_nothing,
        "method {c.method.name} drops nothing at the end of the prompt, where layers share slots by what they look at: "
        "leave budget.layers at uniform or pyramid",
    ),
    (
        lambda c: c.shares_by_preference and not c.cadence.at_prefill,
        "layers share slots at the end of the prompt, by what they look at, and this cadence evicts nothing there: set "
        "evict_at_prefill=true, or budget.layers=uniform",
    ),
    (
        lambda c: c.joins_layers and (c.is_ragged or c.shares_by_preference or not c.equal_layers),
        "method {c.method.name} with these settings keeps the same positions in all layers, and this budget gives "
        "layers or heads different numbers: leave budget.layers and budget.heads alone",
    ),
    (
        lambda c: c.joins_layers and c.quantization is not None,
        "method {c.method.name} with these settings evicts when the last layer has seen a token, and slots of a layer "
        "are quantised before: set cache.bits=16",
    ),
    # What only some ways of dropping slots can do.
    (
        lambda c: c.renumbered and c.method.needs.last_queries,
        "method {c.method.name} compares earlier queries with the slots, which cache.positions=renumbered moves from "
        "step to step: set cache.positions=original",
    ),
    (
        lambda c: c.method.needs.second_pass is not None and c.method.evicts_while_decoding,
        "method {c.method.name} needs a second pass over the prompt, which decoded tokens have none of: let "
        "{c.method.__class__.__qualname__}.evicts_while_decoding be False",
    ),
    (
        lambda c: c.is_simulation and c.mode != "mask",
        "method {c.method.name} with these settings simulates and drops nothing: set mode=mask",
    ),
    (
        lambda c: c.chooses_slots and c.mode == "mask",
        "method {c.method.name} looks at slots that are next to each other, which mode=mask does not put there: set "
        "mode=compact",
    ),
    (
        lambda c: c.chooses_slots and c.budget and c.budget.shares_heads,
        "method {c.method.name} chooses the slots itself, the same in all kv heads of a layer: leave budget.heads, "
        "budget.layers and budget.threshold alone",
    ),
    (
        lambda c: c.chooses_slots and (c.rewrites_priorities or not c.cadence.at_prefill or c.cadence.every != 1),
        "method {c.method.name} chooses the slots itself, and when to drop some: leave the group select, "
        "evict_at_prefill and evict_every alone",
    ),
    # Methods that rewrite what they keep.
    (
        lambda c: c.rewritten and c.mode == "mask",
        "method {c.method.name} puts other numbers into the slots it keeps, and mode=mask drops and changes none: set "
        "mode=overwrite",
    ),
    (
        lambda c: c.rewritten and c.renumbered,
        "method {c.method.name} rewrites slots for queries at their positions, which cache.positions=renumbered "
        "moves: set cache.positions=original",
    ),
    (
        lambda c: c.rewritten and c.is_ragged,
        "method {c.method.name} rewrites as many slots in every kv head: {c.budget.heads_remedy}",
    ),
    (
        lambda c: c.quantization is not None and c.keeps_everything,
        "method {c.method.name} keeps everything in a memory and an index of its own: key_bits and value_bits below 16 "
        "go with methods that evict, and with full",
    ),
    (
        lambda c: c.quantization is not None and c.mode == "mask",
        "mode=mask is a simulation: it drops nothing, so that no byte would be saved. For key_bits and value_bits "
        "below 16 set mode=overwrite or mode=compact, or take a method that drops slots",
    ),
    # Wrappers around the method's priorities.
    (
        lambda c: c.rewrites_priorities and c.budget and c.budget.shares_heads,
        "{c.select.setting} makes other numbers of the priorities by which {c.budget.heads_setting} shares out slots: "
        "{c.budget.heads_remedy}, or leave the group select alone",
    ),
    (
        lambda c: c.rewrites_priorities and (c.method.is_window or c.drops_nothing),
        "{c.select.setting} chooses by priorities which slots are dropped, and method {c.method.name} drops none by "
        "priority: leave the group select alone",
    ),
    (
        lambda c: c.rewrites_priorities and c.select.values == "critical" and c.method.priority_kind == "order",
        "select.values=critical weighs attention by values, and the priorities of method {c.method.name} are no "
        "attention (Method.priority_kind): leave select.values at none, or take h2o, snapkv or expected_attention",
    ),
)

# Reasons against bounded prefill: a prompt read in chunks with an eviction after each, so that its keys and values are
# never all held. A score must be known before the prompt has ended, and must not need what has been evicted.
NOT_BOUNDED: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: not c.method.evicts or c.keeps_everything,
        "method {c.method.name} evicts nothing, so that its prompts have to fit",
    ),
    (lambda c: c.mode == "mask", "mode=mask drops nothing, it simulates"),
    (lambda c: not c.cadence.at_prefill, "the last chunk's eviction is one at prefill (set evict_at_prefill=true)"),
    (
        lambda c: (spec := c.method.score_spec) and spec.last_rows is not None and spec.decay > 0,
        "method {c.method.name} scores slots by the prompt's last {c.method.score_spec.last_rows} queries, which have "
        "not come when a chunk is evicted",
    ),
    (
        lambda c: (spec := c.method.score_spec) and spec.across_layers,
        "method {c.method.name} adds scores up over all layers when a prompt has ended",
    ),
    (
        lambda c: c.method.needs.second_pass is not None,
        "method {c.method.name} reads the whole prompt a second time",
    ),
    (lambda c: c.chooses_slots, "method {c.method.name} drops nothing before a prompt has ended"),
    (lambda c: c.rewritten, "method {c.method.name} rewrites what is left of a whole prompt"),
    (lambda c: c.method.needs_whole_prompt, "method {c.method.name} {c.method.needs_whole_prompt}"),
    (
        lambda c: c.method.needs.local_chunks is not None,
        "method {c.method.name} compares each token of the prompt with those around it, later ones too",
    ),
    (lambda c: c.shares_by_preference, "{c.layers_setting} shares slots out among layers by a whole prompt's queries"),
    (lambda c: c.joins_layers, "method {c.method.name} with these settings needs the priorities of all layers"),
    (lambda c: c.is_ragged, "{c.budget.heads_setting} shares slots out among heads when a prompt has ended"),
    (
        lambda c: c.renumbered and c.method.needs.queries_after is not None,
        "method {c.method.name} turns the prompt's queries back by their positions, which positions=renumbered moves",
    ),
    (lambda c: c.observe == "triton", "the CUDA kernels of observe=triton sum up whole prompts"),
)

# Reasons against sparing marked spans of a prompt.
NO_SPANS: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: not c.method.evicts or c.drops_nothing,
        "method {c.method.name} evicts nothing that could be spared",
    ),
    (lambda c: c.shares_by_preference, "{c.layers_setting} gives layers numbers that no span is known to fit"),
    (lambda c: c.is_ragged, "{c.budget.heads_setting} gives heads different numbers, and a span's share is of one"),
    (
        lambda c: c.mode == "mask" and c.simulation_only,
        "method {c.method.name} hides slots by a rule of its own",
    ),
    (lambda c: c.chooses_slots, "method {c.method.name} chooses the slots itself"),
)

# Reasons against keeping whole prompts.
NO_PROMPT: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: not c.method.evicts_while_decoding,
        "method {c.method.name} evicts at the end of the prompt alone, and keep=prompt leaves it nothing there: take a "
        "method that evicts while decoding, or keep=null",
    ),
    (
        lambda c: c.cadence.every is None,
        "keep=prompt leaves generated tokens alone to evict, and cache.evict_every=null evicts none: set "
        "cache.evict_every to a number of steps",
    ),
    (
        lambda c: c.bounded_chunk is not None,
        "prefill=bounded evicts between chunks of a prompt, of which keep=prompt keeps everything: set prefill=whole",
    ),
    (
        lambda c: c.budget and c.budget.tokens is None and c.budget.of in ("prompt", "padded"),
        "keep=prompt keeps every token of the prompt, of which the budget is a share: set budget.of=sequence (a share "
        "of prompt and answer), budget.of=generated (of the answer, the prompt on top) or budget=tokens",
    ),
)
