"""What a user's method class must be like for a configuration to build it, and its settings with their defaults."""

from __future__ import annotations

import dataclasses
import typing
from types import ModuleType
from typing import Any

from kvexp.errors import ConfigError

MISSING = "???"  # OmegaConf's word for a value that has to be given


def methods_in(module: ModuleType) -> dict[str, type[Any]]:
    """Name -> class, of the methods that the module defines itself; names that begin with _ are none."""
    from kvexp.core import Method

    own = {name: value for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)}
    return {name: cls for name, cls in own.items() if cls.__module__ == module.__name__ and not name.startswith("_")}


def check_class(cls: type[Any]) -> None:
    """ConfigError for a class whose fields no configuration could set."""
    for each in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(each) or each.__module__.partition(".")[0] == "kvexp":
            continue
        fields = [name for name, hint in vars(each).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
        if fields:
            raise ConfigError(
                f"{each.__qualname__} has the field {fields[0]} and is no dataclass; write @dataclass(frozen=True) in "
                f"the line above class {each.__qualname__}"
            )
    typing.get_type_hints(cls)
    for name, value in settings_of_class(cls).items():
        if not _is_plain(value):
            raise ConfigError(
                f"{cls.__qualname__}.{name} is a {type(value).__name__}, which no configuration can hold; a field is a "
                "number, a text, true or false, None or a list of those"
            )


def settings_of_class(cls: type[Any]) -> dict[str, Any]:
    """Field -> default, "???" where there is none."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.init:
            value = field.default
            if field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            found[field.name] = MISSING if value is dataclasses.MISSING else value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
