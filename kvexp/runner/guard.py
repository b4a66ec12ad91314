"""What a configuration may make run: kvexp's own classes, and Hydra's plugins. Nothing else it could name is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvexp.errors import ConfigError

MADE_BY_HYDRA = ("kvexp.runner.report.SweepTable", "hydra_plugins.", "hydra._internal.core_plugins.")
GROUPS = ("method", "budget", "task", "generation", "diagnose")  # kvexp.build makes these, within their own packages


def guard(words: Sequence[str]) -> None:
    """Before Hydra does anything: let it resolve no other `_target_`, and no class that a logging configuration names.

    words: the command line. A refusal is one line and exit code 1.
    """
    from hydra._internal.instantiate import _instantiate2 as hydra

    for word in words:
        if word.lstrip("+~").startswith(("hydra.job_logging", "hydra.hydra_logging")):
            _stop(
                f"{word}: logging configurations can name code to run; kvexp says what it does by itself, leave it out"
            )
    if hasattr(hydra._resolve_target, "guarded"):
        return
    resolve = hydra._resolve_target

    def resolved(target: Any, full_key: str) -> Any:
        name = target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
        if not name.startswith(MADE_BY_HYDRA):
            _stop(f"{full_key}: _target_ must be one of kvexp's own, got {name}; nothing was run")
        return resolve(target, full_key)

    resolved.guarded = True  # type: ignore[attr-defined]
    hydra._resolve_target = resolved


def check_targets(config: Mapping[str, Any]) -> None:
    """ConfigError for a `_target_` that stands where kvexp builds nothing."""
    for key, target in _targets(config, ""):
        if key not in GROUPS:
            raise ConfigError(f"{key}._target_={target!r}: only {', '.join(GROUPS)} have a _target_; remove it")


def _targets(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield place, node["_target_"]
        for key, value in node.items():
            yield from _targets(value, f"{place}.{key}".strip("."))
    elif isinstance(node, list | tuple):
        for number, value in enumerate(node):
            yield from _targets(value, f"{place}[{number}]")


def _stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
