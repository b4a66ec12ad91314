"""Configuration nodes to objects: `_target_` within kvexp only, every field known, every value of its type."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvexp.run.compose import root_values
from kvexp.run.user_code import BASES, admitted
from kvexp.util.errors import ConfigError
from kvexp.util.fields import field_types, typed

if TYPE_CHECKING:
    from kvexp.core import Budget, CacheConfig, Method
    from kvexp.core.quantized import AnyQuantization


# The groups `cache`, `select` and `score` with the values that conf/config.yaml gives them.
CACHE: dict[str, Any] = root_values()["cache"]
SELECT: dict[str, Any] = root_values()["select"]
SCORE: dict[str, Any] = root_values()["score"]
# Keys of the group `cache` that say how keys and values are stored.
STORAGE = (
    *("bits", "key_bits", "value_bits", "residual", "group", "key_axis", "value_axis", "symmetric"),
    *("codec", "signs", "rotate"),
)
KIVI, TURBOQUANT = "kivi", "turboquant"
KIVI_KEYS = ("bits", "key_bits", "value_bits", "group", "key_axis", "value_axis", "symmetric")
KIVI_WINDOW, TURBO_BITS = 32, 4  # where cache.residual is null; where cache.bits is 16
# Keys of the group `cache` that runs of older versions have not recorded.
ADDED_LATER = (*STORAGE, "graph", "evict_sliding")
# The group `cache` as a user types it: fields of kvexp.core's CacheConfig and Cadence, and names its messages use.
CACHE_KEYS = {
    **{name: f"cache.{name}" for name in CACHE if name != "beyond_context"},
    "bounded_chunk at null": "prefill=whole",
    "bounded_chunk": "prefill.chunk",
    "every": "cache.evict_every",
    "score_source": "method.score_source",
    "score_sink": "score.sink",
}


def build(
    node: Mapping[str, Any],
    where: str,
    *,
    within: str | tuple[str, ...],
    keys: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """The dataclass named by node["_target_"] (in package `within`, or one of several), made from the other fields.

    where: the node's place in the configuration; a user's class that was admitted to that group may be named too.
    keys: field -> its dotted key, for fields that are not typed as `where.field`. ConfigError names the field, what
    was found, what is allowed.
    """
    fields = dict(node)
    target = fields.pop("_target_", None)
    users = admitted(where).get(str(target))
    return made(_class(target, where, within) if users is None else users.cls, fields, where, keys)


def build_method(node: Mapping[str, Any]) -> Method:
    """The method of a node."""
    method: Method = build(node, "method", within=("kvexp.methods", "kvexp.retrieval"))
    return method


def build_budget(node: Mapping[str, Any]) -> Budget:
    """The budget of a node, whose kv_ratio is typed without a group."""
    budget: Budget = build(node, "budget", within="kvexp.core", keys={"kv_ratio": "kv_ratio"})
    return budget


def made(cls: Any, node: Mapping[str, Any], where: str, keys: Mapping[str, str] = types.MappingProxyType({})) -> Any:
    """An object of a dataclass from a node that holds its fields; arguments and errors as of `build`."""
    hints, known = field_types(cls), {field.name for field in dataclasses.fields(cls)}
    for name in node:
        if name not in known:
            raise ConfigError(f"{where}.{name} is not a setting of {cls.__name__}; it has: {', '.join(sorted(known))}")
    values = {
        name: typed(value, hints.get(name, Any), keys.get(name, f"{where}.{name}")) for name, value in node.items()
    }
    with keys_named({**{name: f"{where}.{name}" for name in known}, **keys}, where):
        return cls(**values)


@contextlib.contextmanager
def keys_named(keys: Mapping[str, str], where: str = "") -> Iterator[None]:
    """Make a ConfigError of the block name settings as they are typed: `num_beams` as `generation.num_beams`.

    keys: a constructor's name for a setting -> its dotted key; where: the group, said of an error that names no key.
    """
    try:
        yield
    except ConfigError as error:
        message = with_keys(str(error), keys)
        names_one = any(key in message for key in keys.values())
        raise ConfigError(message if names_one or not where else f"{where}: {message}") from error


def with_keys(message: str, keys: Mapping[str, str]) -> str:
    """The message with the settings' dotted keys. A name that may be an English word counts at the start and in NAME=.

    Names within a dotted key, a quotation or behind `=` stay as they are.
    """

    def key_of(found: re.Match[str]) -> str:
        name = found[0]
        is_name = not name.isalpha() or found.start() == 0 or message[found.end() :].startswith("=")
        return keys[name] if is_name else name

    names = "|".join(re.escape(name) for name in sorted(keys, key=len, reverse=True))
    return re.sub(rf"(?<![\w.='\"])(?:{names})(?![\w.])", key_of, message) if names else message


def build_cache(
    method: Method,
    budget: Budget | None,
    node: Mapping[str, Any],
    select: Mapping[str, Any] = types.MappingProxyType({}),
    score: Mapping[str, Any] = types.MappingProxyType({}),
    **given: Any,
) -> CacheConfig:
    """Make a cache's configuration: a method, its budget and the group `cache`, whose missing keys are CACHE's.

    select, score: the groups of these names, checked always and left alone by a method that evicts nothing; given:
    further fields of CacheConfig.
    """
    from kvexp.core import CacheConfig, Cadence, SlotSelection
    from kvexp.core.config import Sliding
    from kvexp.core.method import SinkScore

    for name in node:
        if name not in CACHE:
            raise ConfigError(f"cache.{name} is not a setting of cache; it has: {', '.join(CACHE)}")
    known = {**CACHE, **node}
    at_prefill = typed(known["evict_at_prefill"], bool, "cache.evict_at_prefill")
    given["beyond_context"] = typed(known["beyond_context"], bool, "cache.beyond_context")
    given |= {name: known[name] for name in ("mode", "positions", "observe", "graph")}
    chosen = made(SlotSelection, {**SELECT, **select}, "select")
    for name in score:
        if name != "sink":
            raise ConfigError(f"score.{name} is not a setting of score; it has: sink")
    sink = typed({**SCORE, **score}["sink"], SinkScore, "score.sink")
    sliding = typed(known["evict_sliding"], Sliding, "cache.evict_sliding")
    if method.evicts:
        given |= {"select": chosen, "score_sink": sink, "evict_sliding": sliding}
    with keys_named(CACHE_KEYS):
        return CacheConfig(
            method, budget, Cadence(at_prefill, known["evict_every"]), quantization=quantization_of(known), **given
        )


def codec_keys() -> dict[str, tuple[str, ...]]:
    """Value of cache.codec -> the keys of STORAGE that it reads, `codec` and `residual` aside."""
    from kvexp.core.codecs import CODECS

    return {KIVI: KIVI_KEYS, **{name: codec.options for name, codec in CODECS.items()}}


def quantization_of(node: Mapping[str, Any]) -> AnyQuantization | None:
    """Quantisation by the keys of STORAGE in the group `cache`, defaults where missing; None: nothing is quantised.

    ConfigError names the key.
    """
    from kvexp.core import EngineQuantization, Quantization
    from kvexp.core.quantized import FULL_BITS, Bits, TurboBits

    known, codecs = {**CACHE, **node}, codec_keys()
    codec = typed(known["codec"], str, "cache.codec")
    if codec not in codecs:
        raise ConfigError(f"cache.codec must be one of {', '.join(codecs)}, got {codec!r}")
    allowed: Any = Bits if codec == KIVI else TurboBits
    both = typed(known["bits"], allowed, "cache.bits")
    each = (typed(known[name], allowed | None, f"cache.{name}") for name in ("key_bits", "value_bits"))
    bits = [both if own is None else own for own in each]
    window = known["residual"]
    if codec != KIVI:
        turbo = {"key_bits": bits[0], "value_bits": bits[1], "signs": known["signs"]} if codec == TURBOQUANT else {}
        turbo |= {name: TURBO_BITS for name in ("key_bits", "value_bits") if turbo.get(name) == FULL_BITS}
        rotate = typed(known["rotate"], bool | None, "cache.rotate")
        with keys_named(CACHE_KEYS):
            return EngineQuantization(codec, residual=0 if window is None else window, rotate=rotate, **turbo)
    if bits == [FULL_BITS, FULL_BITS]:
        return None
    rest = {name: known[name] for name in ("key_axis", "value_axis", "group", "symmetric")}
    rest["residual"] = KIVI_WINDOW if window is None else window
    with keys_named(CACHE_KEYS):
        return Quantization(*bits, **rest)


def _class(target: Any, where: str, within: str | tuple[str, ...]) -> Any:
    packages = (within,) if isinstance(within, str) else within
    if not isinstance(target, str) or not target.startswith(tuple(f"{package}." for package in packages)):
        own = f"; if it is code of your own, say so on the command line: {where}={target}" if where in BASES else ""
        raise ConfigError(f"{where}._target_ must name a class of {' or '.join(packages)}, got {target!r}{own}")
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or module):
            raise  # the module is there, something that it imports is not
        package = module.replace(".", "/")
        raise ConfigError(
            f"{where}._target_: there is no {target}; a new class has to be imported in {package}/__init__.py"
        ) from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{where}._target_: {target} cannot be configured")
    return cls
