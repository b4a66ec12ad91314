"""Configuration nodes to objects: `_target_` within kvexp only, every field known, every value of its type."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvexp.util import ConfigError

if TYPE_CHECKING:
    from kvexp.core import (
        Budget,
        CacheConfig,
        HeadScores,
        Method,
        Quantization,
        QueryCalibration,
        SlotSelection,
        Surrogate,
    )


# The group `cache` of conf/config.yaml: how keys and values are stored, and everything else.
STORAGE = {
    "bits": 16,
    "key_bits": None,
    "value_bits": None,
    "residual": 32,
    "group": 32,
    "key_axis": "channel",
    "value_axis": "token",
    "symmetric": False,
}
CACHE = {
    "mode": "auto",
    "positions": None,
    "evict_at_prefill": True,
    "evict_every": 1,
    "observe": "blocked",
    "beyond_context": False,
    "graph": "off",
    **STORAGE,
}
# Keys of the group `cache` that runs of older versions have not recorded.
ADDED_LATER = (*STORAGE, "graph")
# The group `select` of conf/config.yaml.
SELECT = {"by": "token", "values": "none", "chunk": None}
TOO_LARGE = 1 << 62  # sums of two such numbers do not fit into the 64 bits of a tensor's, nor into a slice


# The group `cache` as a user types it: fields of kvexp.core's CacheConfig and Cadence, and names its messages use.
CACHE_KEYS = {
    **{name: f"cache.{name}" for name in CACHE if name != "beyond_context"},
    "bounded_chunk at null": "prefill=whole",
    "bounded_chunk": "prefill.chunk",
    "cadence.every": "cache.evict_every",
    "score_source": "method.score_source",
}


def build(
    node: Mapping[str, Any],
    where: str,
    *,
    within: str | tuple[str, ...],
    admitted: Mapping[str, type[Any]] | None = None,
    keys: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """The dataclass named by node["_target_"] (in package `within`, or one of several), made from the other fields.

    where: the node's place in the configuration, for messages. admitted: dotted name -> class, of classes from
    elsewhere that may be named too. keys: field -> its dotted key, for fields that are not typed as `where.field`.
    ConfigError names the field, what was found, what is allowed.
    """
    fields = dict(node)
    target = fields.pop("_target_", None)
    cls = (admitted or {}).get(str(target)) or _class(target, where, within)
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(f"{where}.{name} is not a setting of {cls.__name__}; it has: {', '.join(sorted(known))}")
        fields[name] = typed(value, hints[name], f"{where}.{name}")
    with keys_named({**{name: f"{where}.{name}" for name in known}, **keys}, where):
        return cls(**fields)


@contextlib.contextmanager
def keys_named(keys: Mapping[str, str], where: str = "") -> Iterator[None]:
    """A ConfigError of the block names settings as they are typed: `num_beams` as `generation.num_beams`.

    keys: a constructor's name for a setting -> its dotted key; where: the group, said of an error that names no key.
    """
    try:
        yield
    except ConfigError as error:
        told = with_keys(str(error), keys)
        names_one = any(key in told for key in keys.values())
        raise ConfigError(told if names_one or not where else f"{where}: {told}") from error


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
    calibration: QueryCalibration | None = None,
    head_scores: HeadScores | None = None,
    select: Mapping[str, Any] = types.MappingProxyType({}),
    surrogate: Surrogate | None = None,
    bounded_chunk: int | None = None,
    keep: Any = None,
) -> CacheConfig:
    """What a cache does: a method, its budget and the group `cache`, whose missing keys are those of CACHE.

    calibration, surrogate: of the model, where the method needs one; head_scores: where the budget needs them; select:
    the group of that name, which a method that evicts nothing leaves alone; bounded_chunk: of the group `prefill`;
    keep: of the root.
    """
    from kvexp.core import CacheConfig, Cadence

    for name in node:
        if name not in CACHE:
            raise ConfigError(f"cache.{name} is not a setting of cache; it has: {', '.join(CACHE)}")
    known = {**CACHE, **node}
    every = typed(known["evict_every"], int | None, "cache.evict_every")
    at_prefill = typed(known["evict_at_prefill"], bool, "cache.evict_at_prefill")
    beyond = typed(known["beyond_context"], bool, "cache.beyond_context")
    asked = build_selection(select)  # also where nothing is chosen: a word may be misspelt
    chosen = asked if method.evicts else build_selection({})
    with keys_named(CACHE_KEYS):
        return CacheConfig(
            method,
            budget,
            Cadence(at_prefill, every),
            known["mode"],
            known["positions"],
            known["observe"],
            beyond_context=beyond,
            calibration=calibration,
            quantization=quantization_of(known),
            head_scores=head_scores,
            select=chosen,
            surrogate=surrogate,
            bounded_chunk=bounded_chunk,
            keep=keep,
            graph=known["graph"],
        )


def quantization_of(node: Mapping[str, Any]) -> Quantization | None:
    """What the keys of STORAGE in the group `cache` say, where missing its defaults; None: nothing is quantised.

    ConfigError names the key.
    """
    from kvexp.core import Quantization
    from kvexp.core.quantized import BITS, FULL_BITS

    known = {**STORAGE, **node}
    for name in ("bits", "key_bits", "value_bits"):
        value = known[name]
        if not (value is None and name != "bits") and (isinstance(value, bool) or value not in BITS):
            null = "" if name == "bits" else " or null for cache.bits"
            raise ConfigError(f"cache.{name} must be one of {', '.join(map(str, BITS))}{null}, got {value!r}")
    key_bits, value_bits = (
        known["bits"] if known[name] is None else known[name] for name in ("key_bits", "value_bits")
    )
    if key_bits == value_bits == FULL_BITS:
        return None
    rest = {name: known[name] for name in ("key_axis", "value_axis", "group", "residual", "symmetric")}
    with keys_named(CACHE_KEYS):
        return Quantization(key_bits, value_bits, **rest)


def build_selection(node: Mapping[str, Any]) -> SlotSelection:
    """How slots are chosen: the group `select`, whose missing keys are its defaults."""
    from kvexp.core import SlotSelection

    for name in node:
        if name not in SELECT:
            raise ConfigError(f"select.{name} is not a setting of select; it has: {', '.join(SELECT)}")
    known = {**SELECT, **node}
    return SlotSelection(known["by"], known["values"], typed(known["chunk"], int | None, "select.chunk"))


def _class(target: Any, where: str, within: str | tuple[str, ...]) -> Any:
    packages = (within,) if isinstance(within, str) else within
    if not isinstance(target, str) or not target.startswith(tuple(f"{package}." for package in packages)):
        own = f"; if it is code of your own, say so on the command line: method={target}" if where == "method" else ""
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


def typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits `hint`, whole numbers passing for floats and lists for tuples."""
    _check_size(value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return typed(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where} must be {_words(hint)}, got {value!r}")
    if origin is typing.Literal:
        fits = value in arguments
    elif hint in (tuple, list) or origin in (tuple, list):
        if isinstance(value, list | tuple):
            inner = arguments[0] if arguments else Any
            return tuple(typed(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
        fits = False
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        fits = False
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif hint is Any:
        fits = True
    else:
        fits = isinstance(value, hint) if isinstance(hint, type) else True
    if not fits:
        raise ConfigError(f"{where} must be {_words(hint)}, got {value!r}")
    return value


def _check_size(value: Any, where: str) -> None:
    """ConfigError for a whole number, alone or in a list, that no integer of 64 bits holds."""
    if isinstance(value, int) and abs(value) >= TOO_LARGE:
        raise ConfigError(f"{where} must be below 2**62, got a whole number of {_digits(value)} digits")
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_size(item, f"{where}[{i}]")


def _digits(value: int) -> int:
    """Nearly: Python writes out no number of thousands of digits."""
    return int(value.bit_length() * math.log10(2)) + 1


def _words(hint: Any) -> str:
    """A type in the words of a configuration file."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) in (tuple, list):
        return "a list"
    return getattr(hint, "__name__", str(hint))
