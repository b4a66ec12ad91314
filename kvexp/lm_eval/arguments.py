"""`--model_args` in the words of run.py: pretrained=…,method=keyformer,kv_ratio=0.5,method.recent_ratio=0.2,…"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import kvexp.methods
import kvexp.retrieval
from kvexp.build import build, build_cache, typed
from kvexp.core import Budget, CacheConfig, Method
from kvexp.errors import ConfigError
from kvexp.lm_eval.row_mask_protocol import check_row_mask
from kvexp.models.load import check_source
from kvexp.tasks.lm_eval import Protocol, protocol_of
from kvexp.user_methods import admitted

# Words of `KvexpLM` itself: about the model, and about the measurement.
LOADING = (
    *("pretrained", "tokenizer", "dtype", "device", "device_map", "revision", "trust_remote_code", "allow_pickle"),
    *("pack_linear", "seed", "batch_size", "max_batch_size"),
    *("chat_template_args", "enable_thinking", "think_end_token"),
)
FILES = {"calibration": "statistics of the model's queries", "surrogate": "a trained surrogate"}
CACHE_GROUPS = ("method", "budget", "cache", "select")
OWN = {"method": "full", "kv_ratio": None, "protocol": "prefill_then_step"}


def method_of(name: Any, settings: Mapping[str, Any]) -> Method:
    """The method of this name with its own defaults, but for `settings`; a Method itself, as given in Python.

    A user's method goes by the option under which it was admitted (`kvexp.user_methods`): nothing is loaded here.
    """
    if isinstance(name, Method):
        if settings:
            raise ConfigError(f"method is a {type(name).__name__} already: give it its settings, not as method.NAME")
        return name
    packages = (kvexp.methods, kvexp.retrieval)
    classes = {getattr(p, found).name: f"{p.__name__}.{found}" for p in packages for found in p.__all__}
    users = {method.option: method for method in admitted().values()}
    if name not in classes and name not in users:
        raise ConfigError(
            f"method must be one of {', '.join(sorted(classes))}, or a class of yours, named in --model_args as "
            f"method=FILE.py or method=MODULE.CLASS, got {name!r}"
        )
    target = users[name].target if name in users else classes[name]
    method: Method = build(
        {"_target_": target, **settings},
        "method",
        within=("kvexp.methods", "kvexp.retrieval"),
        admitted={one.target: one.cls for one in users.values()},
    )
    return method


def budget_of(method: Method, kv_ratio: Any, settings: Mapping[str, Any]) -> Budget | None:
    """The budget of a method that evicts; kv_ratio, or tokens or a threshold among the settings."""
    if not method.evicts:
        return None
    if kv_ratio is None and settings.get("tokens") is None and settings.get("threshold") is None:
        raise ConfigError(
            f"method={method.name} needs a budget: give kv_ratio=RATIO, budget.tokens=NUMBER or budget.threshold=NUMBER"
        )
    ratio = {} if kv_ratio is None else {"kv_ratio": kv_ratio}
    node, keys = {"_target_": "kvexp.core.Budget", **ratio, **settings}, {"kv_ratio": "kv_ratio"}
    budget: Budget = build(node, "budget", within="kvexp.core", keys=keys)
    return budget


@dataclass(frozen=True)
class ModelArguments:
    """What is to be measured with a model, checked without one."""

    cache: CacheConfig
    protocol: Protocol

    @classmethod
    def of(cls, method: Any, kv_ratio: Any, protocol: Any, settings: Mapping[str, Any]) -> ModelArguments:
        """settings: method.x, budget.x, cache.x, select.x and the protocol's switches. ConfigError otherwise."""
        groups = parted(settings)
        made = method_of(method, groups["method"])
        missing = [name for name in FILES if getattr(made.needs, name, False)]  # what declares none: see CacheConfig
        if missing:
            raise ConfigError(
                f"method={made.name} needs {FILES[missing[0]]}, which --model_args cannot give: use "
                f"kvexp run task=lm_eval method={made.name}, or another method"
            )
        if groups["budget"].get("heads") == "duo":
            raise ConfigError(
                "budget.heads=duo needs scores of the model's heads, which --model_args cannot give: use kvexp run "
                "task=lm_eval budget.heads=duo, or another way to share slots out"
            )
        budget = budget_of(made, kv_ratio, groups["budget"])
        cache = build_cache(made, budget, groups["cache"], select=groups["select"])
        how = protocol_from(protocol, groups["protocol"])
        if how.mode == "row_mask":
            check_row_mask(cache, how.mask)
        return cls(cache, how)


def check_arguments(given: Mapping[str, Any]) -> None:
    """All that can be wrong with `--model_args`, before anything is loaded."""
    settings = {key: value for key, value in given.items() if key not in LOADING}
    if not isinstance(given.get("pretrained"), str):
        raise ConfigError("model_args: pretrained=FOLDER (or a hub id) is missing")
    asked = {key: settings.pop(key, default) for key, default in OWN.items()}
    ModelArguments.of(asked["method"], asked["kv_ratio"], asked["protocol"], settings)
    trusted = (bool(given.get(key, False)) for key in ("allow_pickle", "trust_remote_code"))
    check_source(given["pretrained"], *trusted)


def parted(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """method.x, budget.x, cache.x, select.x and the protocol's switches, by group; ConfigError for any other word."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in (*CACHE_GROUPS, "protocol")}
    switches = {field.name for field in fields(Protocol)} - {"mode", "fewshot_split", "fewshot_excludes_item"}
    for key, value in given.items():
        group, _, name = key.partition(".")
        if name and group in CACHE_GROUPS:
            groups[group][name] = value
        elif key in switches:
            groups["protocol"][key] = value
        else:
            raise ConfigError(
                f"model_args: {key} is not known; there are pretrained, method, kv_ratio, protocol, seed, dtype, "
                "tokenizer, revision, trust_remote_code, allow_pickle, device_map, chat_template_args, "
                "enable_thinking, think_end_token, method.NAME, budget.NAME, "
                f"cache.NAME and select.NAME, and the protocol's {', '.join(sorted(switches))}"
            )
    return groups


def protocol_from(name: Any, switches: Mapping[str, Any]) -> Protocol:
    """The protocol; its values of the types they must have."""
    made = protocol_of(typed(name, str, "protocol"), **switches)
    kinds = {"padded_batch": int, "whole_text": bool, "add_bos": bool | None, "per_token": bool}
    for key, kind in kinds.items():
        typed(getattr(made, key), kind, key)
    return made
