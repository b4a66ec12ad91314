"""What the fields of a dataclass may hold: said at the field, as its type and a constraint, and checked here alone."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from kvexp.util.errors import ConfigError

MISSING = "???"  # OmegaConf's word for a value that has to be given
TOO_LARGE = 1 << 62  # sums of two such numbers do not fit into the 64 bits of a tensor's, nor into a slice


@dataclass(frozen=True)
class Range:
    """The finite numbers from low to high, as in `Annotated[float, Range(0, 1)]`; above: low itself is not allowed."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high and value < math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above else 'at least'} {self.low}"
        return f"in {'(' if self.above else '['}{self.low}, {self.high}]"


class AtLeast(Range):
    """The finite numbers from low on, as in `Annotated[int, AtLeast(0)]`."""


class Odd(Range):
    """The odd numbers from low on."""

    def __contains__(self, value: float) -> bool:
        return super().__contains__(value) and value % 2 == 1

    def __str__(self) -> str:
        return f"odd and {super().__str__()}"


@functools.cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    """Field -> its type, constraints included; none where the class's module does not have the names in them."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:
        return {}


def defaults_of(cls: type[Any]) -> dict[str, Any]:
    """Field -> default, MISSING where there is none, of the fields that a constructor takes."""
    defaults = {}
    for field in dataclasses.fields(cls):
        if field.init:
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            defaults[field.name] = MISSING if value is dataclasses.MISSING else value
    return defaults


def check_fields(item: Any) -> None:
    """ConfigError where a field of a dataclass's object holds what its type or constraint does not allow."""
    cls: Any = type(item)
    hints = field_types(cls)
    for field in fields(item):
        typed(getattr(item, field.name), hints.get(field.name, Any), field.name)


def typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits `hint`, whole numbers passing for floats and lists for tuples.

    hint: a type, `Annotated` where a constraint such as `Range` goes with it. where: the setting's name, for messages.
    """
    _check_size(value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        checked = typed(value, arguments[0], where)
        if any(isinstance(limit, Range) and checked not in limit for limit in arguments[1:]):
            raise ConfigError(f"{where} must be {_allowed(hint, value)}, got {value!r}")
        return checked
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            with suppress(ConfigError):
                return typed(value, option, where)
        fits = False
    elif origin is typing.Literal:
        fits = value in arguments
    elif hint in (tuple, list) or origin in (tuple, list):
        if isinstance(value, list | tuple):
            inner = arguments[0] if arguments else Any
            return tuple(typed(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
        fits = False
    elif hint in (int, float):
        fits = isinstance(value, int) or (hint is float and isinstance(value, float))
        if fits and not isinstance(value, bool):
            return hint(value)
        fits = False
    else:
        is_class = isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False)
        fits = not is_class or isinstance(value, hint)
    if not fits:
        raise ConfigError(f"{where} must be {_allowed(hint, value)}, got {value!r}")
    return value


def typed_words(words: Sequence[str], kinds: Mapping[str, tuple[Any, str]]) -> tuple[dict[str, Any], list[str]]:
    """(Values of KEY=VALUE words, all words whose key is not in `kinds`). kinds: key -> its type, and what it is."""
    values: dict[str, Any] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in kinds:
            rest.append(word)
            continue
        if key in values:
            raise ConfigError(f"{key} is given twice, as {values[key]} and as {value}: give one")
        kind = kinds[key][0]
        is_text = kind is str or typing.get_origin(kind) is typing.Literal
        values[key] = typed(value if is_text else number_of(value, key), kind, key)
    return values, rest


def number_of(text: str, key: str) -> Any:
    """The number that a word of a command line gives; ConfigError for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number, got {text!r}")
    return value


def keys_text(kinds: Mapping[str, tuple[Any, str]]) -> str:
    """A command's keys as lines of its --help."""
    lines = (f"  {name + '=':<12} {about}" for name, (_, about) in kinds.items())
    return "\n".join(textwrap.fill(line, 79, subsequent_indent=" " * 15) for line in lines)


def as_python(value: Any) -> Any:
    """Numbers of NumPy and torch, their arrays, paths, dtypes and devices as plain numbers, lists and texts.

    Lists and tuples hold them too; anything else is as it was.
    """
    if isinstance(value, list | tuple):
        return type(value)(as_python(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    return value.tolist() if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist") else value


def _check_size(value: Any, where: str) -> None:
    """ConfigError for a whole number, alone or in a list, that no integer of 64 bits holds."""
    if isinstance(value, int) and abs(value) >= TOO_LARGE:
        digits = int(value.bit_length() * math.log10(2)) + 1  # nearly: Python writes out no number of thousands of them
        raise ConfigError(f"{where} must be below 2**62, got a whole number of {digits} digits")
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_size(item, f"{where}[{i}]")


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    dict: "a group of settings",
}


def _allowed(hint: Any, value: Any) -> str:
    """What `typed` takes, in the words of a configuration file; of a value of the right type: its constraints alone."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin is typing.Annotated:
        limits = " and ".join(str(limit) for limit in arguments[1:] if isinstance(limit, Range))
        try:
            typed(value, arguments[0], "")
        except ConfigError:
            return _allowed(arguments[0], value)
        return limits
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(option) for option in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(option, value) for option in arguments)
    return "a list" if tuple in (hint, origin) or list in (hint, origin) else f"a {getattr(hint, '__name__', hint)}"
