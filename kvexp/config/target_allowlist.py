"""Puts kvexp's rules on configurations (`kvexp.config.composed`) where Hydra composes, before it acts on anything.

Hydra makes callbacks, launchers, sweepers and loggers of what a configuration names before a job begins, imports
packages that it searches for configurations, and unpickles what --experimental-rerun names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvexp.config.composed import check_hydra, check_job, check_source, check_targets
from kvexp.errors import ConfigError
from kvexp.session import current
from kvexp.terminal import say

OURS = ("kvexp.sweep.sweep_summary.SweepTable", "hydra_plugins.", "hydra._internal.core_plugins.")


def guard() -> None:
    """Before Hydra does anything. A refusal is one line and exit code 1."""
    from hydra import main
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.instantiate import _instantiate2
    from omegaconf import OmegaConf

    _ruled(ConfigLoaderImpl, "load_configuration", after=_check_composed)
    _ruled(ConfigRepository, "initialize_sources", before=_check_sources)
    _ruled(_instantiate2, "_resolve_target", before=_check_target)
    _ruled(sys.modules[main.__module__], "_get_rerun_conf", before=_check_rerun)
    OmegaConf.register_new_resolver("oc.env", _no_environment, replace=True)


def check_stored(config: Mapping[str, Any]) -> None:
    """`check` of a configuration out of a run folder, which anybody may have written: what was not typed is refused."""
    check_targets(config)
    check_job(config, current().typed_keys or ())


def check(config: Mapping[str, Any], typed: Collection[str] | None) -> None:
    """ConfigError for a job that names code to run. config: resolved, without its `hydra`; typed: see `Session`."""
    check_targets(config)
    if typed is not None:
        check_job(config, typed)


def _check_composed(composed: Any) -> None:
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher
    from hydra.plugins.sweeper import Sweeper
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(composed, resolve=False)
    kinds = {"launcher": Launcher, "sweeper": Sweeper}
    known = {
        kind: {f"{made.__module__}.{made.__qualname__}" for made in Plugins.instance().discover(base)}
        for kind, base in kinds.items()
    }
    check_hydra(plain.pop("hydra"), known, current().typed_keys or ())
    check_targets(plain)


def _check_sources(_: Any, config_search_path: Any) -> None:
    for source in config_search_path.get_path():
        check_source(str(source.path))


def _check_target(target: Any, full_key: str) -> None:
    """Of all that Hydra instantiates, whatever composed it."""
    name = target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
    if not name.startswith(OURS):
        raise ConfigError(f"{full_key}: _target_ must be one of kvexp's own, got {name}; nothing was run")


def _check_rerun(file: str, *_: Any) -> None:
    raise ConfigError(f"--experimental-rerun unpickles {file}, which can run code; type the command again instead")


def _no_environment(name: Any, *_: Any) -> None:
    _stop(
        f"${{oc.env:{name}}}: configurations read no environment variables, for rows, tables and messages repeat what "
        f'they resolve to; let the shell fill it in, as in "KEY=${name}"'
    )


def _ruled(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    """Let a function of Hydra's stop for a ConfigError of `before` (of its arguments) or `after` (of its result)."""
    call = getattr(owner, name)
    if hasattr(call, "guarded"):
        return

    @functools.wraps(call)
    def guarded(*given: Any, **named: Any) -> Any:
        if before is not None:
            _held(before, *given, **named)
        made = call(*given, **named)
        if after is not None:
            _held(after, made)
        return made

    guarded.guarded = True  # type: ignore[attr-defined]
    setattr(owner, name, guarded)


def _held(rule: Callable[..., None], *given: Any, **named: Any) -> None:
    try:
        rule(*given, **named)
    except ConfigError as error:
        _stop(str(error))


def _stop(message: str) -> None:
    say(f"error: {message}", file=sys.stderr)
    sys.exit(1)
