"""The settings at the root of a configuration, checked by themselves: a mistake is told before torch is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvexp.build import typed
from kvexp.config.known_keys import root_values
from kvexp.errors import ConfigError

KINDS: dict[str, Any] = {
    "outputs_dir": str,
    "limit": int | None,
    "seed": int,
    "batch_size": int,
    "timeout_s": float | None,
    "retry": bool,
}


def check_values(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """ConfigError in the words of the command line. choices: group -> the option taken."""
    for name, kind in KINDS.items():
        typed(config[name], kind, name)
    limit, seed, timeout = config["limit"], config["seed"], config["timeout_s"]
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 example or null for all, got {limit}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    if config["batch_size"] < 1:
        raise ConfigError(f"batch_size must be at least 1, got {config['batch_size']}")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds or null, got {timeout:g}")
    budget = config.get("budget")
    if isinstance(budget, Mapping):
        _check_budget(budget, config.get("kv_ratio"), choices.get("budget"))


def check_idle(config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]) -> None:
    """ConfigError for an option of a number of slots that was asked for and would do nothing.

    overrides: what was typed or is swept. A kv_ratio other than conf/config.yaml's stands in a file that was named.
    """
    budget = config.get("budget")
    if not isinstance(budget, Mapping) or budget.get("tokens") is None:
        return
    typed_keys = {word.lstrip("+").partition("=")[0] for word in overrides}
    ratio, option = config.get("kv_ratio"), choices.get("budget", "tokens")
    if budget.get("kv_ratio") is None and ("kv_ratio" in typed_keys or ratio != root_values()["kv_ratio"]):
        raise ConfigError(
            f"kv_ratio has no effect with budget={option}; leave out kv_ratio={ratio}, or take budget=ratio instead of "
            f"budget.tokens={budget['tokens']}"
        )
    if "budget.of" in typed_keys:
        raise ConfigError(
            f"budget.of has no effect with budget={option}, a number of slots for prompts of any length; leave it out, "
            "or take budget=ratio"
        )


def _check_budget(budget: Mapping[str, Any], at_root: Any, option: str | None) -> None:
    ratio, tokens = budget.get("kv_ratio"), budget.get("tokens")
    if ratio is not None and tokens is not None:
        if option == "tokens":
            raise ConfigError(f"budget=tokens takes no ratio, got budget.kv_ratio={ratio}: leave out one of the two")
        raise ConfigError(f"budget.tokens={tokens} needs budget=tokens; budget={option or 'ratio'} takes a ratio")
    if ratio is None:
        return
    name = "kv_ratio" if ratio == at_root else "budget.kv_ratio"
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ConfigError(f"{name} must be a number in (0, 1], got {ratio!r}")
    if not 0 < ratio <= 1:
        percent = f"; {ratio:g} % is {name}={ratio / 100:g}" if 2 <= ratio <= 100 else ""
        raise ConfigError(f"{name} must be in (0, 1], got {ratio:g}{percent}")
