"""The user's method classes that this process may build: those that were named on its command line or in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvexp.errors import ConfigError


@dataclass(frozen=True)
class AdmittedMethod:
    """A user's method class with what identifies its code.

    option: what `method=` calls the class. target: the class's dotted name, the `_target_` of its configuration.
    source: what of a run's identity stands for the code: the class's name and the SHA-256 of each file (of the
    notebook's cells, for a class in one). reference: how another process finds the class, None for a notebook's. code:
    digest of the same code without comments, layout and docstrings.
    """

    option: str
    target: str
    cls: type[Any]
    source: dict[str, Any]
    reference: str | None
    code: str


_ADMITTED: dict[str, AdmittedMethod] = {}


def admit(method: AdmittedMethod) -> AdmittedMethod:
    """Let configurations of this process name the class; a class of the same name and another place takes its place."""
    _ADMITTED[method.target] = method
    return method


def admitted() -> dict[str, AdmittedMethod]:
    """Target -> method, of all that were admitted."""
    return dict(_ADMITTED)


def source_of(cls: type[Any]) -> dict[str, Any] | None:
    """What identifies the code of a method class; None for kvexp's own, which NUMERICS stands for.

    ConfigError for a class of somebody else's that was never admitted.
    """
    if cls.__module__.partition(".")[0] == "kvexp":
        return None
    for method in _ADMITTED.values():
        if method.cls is cls:
            return method.source
    raise ConfigError(
        f"{cls.__module__}.{cls.__qualname__} is no method of kvexp's: name it on the command line, as in "
        f"method={cls.__module__}.{cls.__qualname__}, or give it to kvexp.compare"
    )
