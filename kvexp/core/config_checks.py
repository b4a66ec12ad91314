"""Which settings of a cache go together: every choice that excludes another is a ConfigError before a model loads."""

from __future__ import annotations

from typing import get_args

from kvexp.core import bounded_prefill, spans
from kvexp.core.budget import Budget, Cadence
from kvexp.core.bytes_budget import BytesBudget
from kvexp.core.cache_settings import CacheSettings, Graph, Keep, Mode, Observe, Positions
from kvexp.core.layer_budgets import LayerBudgets
from kvexp.core.method import Method
from kvexp.core.needs import Needs
from kvexp.core.observe import triton_observe
from kvexp.core.quantization import Quantization
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.selection import SlotSelection
from kvexp.errors import ConfigError


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
        if (why := spans.obstacle(config)) is not None:
            raise ConfigError(why)


def _check_values(config: CacheSettings) -> None:
    """ConfigError for a value that a setting does not have, and for Triton where it is not installed."""
    for key, allowed in (("mode", Mode), ("positions", Positions), ("observe", Observe), ("graph", Graph)):
        if getattr(config, key) not in get_args(allowed):
            raise ConfigError(f"{key} must be one of {', '.join(get_args(allowed))}, got {getattr(config, key)!r}")
    if config.observe == "triton":
        triton_observe.check_installed()
    if config.block is not None and config.block < 1:
        raise ConfigError(f"block must be at least 1 row or null, got {config.block}")


def _check_method_has(config: CacheSettings) -> None:
    """ConfigError where the method lacks what it works with: calibration, surrogate, or a budget of its kind."""
    method = config.method
    if method.needs.calibration and config.calibration is None:
        raise ConfigError(
            f"method {method.name} needs statistics of the model's queries from a calibration pass: give "
            "calibration=kvexp.models.calibrate_queries(model, prompts)"
        )
    if method.needs.surrogate and config.surrogate is None:
        raise ConfigError(
            f"method {method.name} needs scores that a trained surrogate predicts: give "
            "surrogate=kvexp.models.train_surrogate(...).surrogate"
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
            "head_scores=kvexp.models.calibrate_heads(model, prompts)"
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
    why = bounded_prefill.obstacle(config)
    if why is not None:
        raise ConfigError(why)
