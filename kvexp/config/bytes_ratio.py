"""`bytes_ratio`: the budget of a run as a share of bytes, made from the configuration and the model's head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvexp.build import keys_named, quantization_of, typed
from kvexp.config.model_spec import ModelSpec, config_of_spec
from kvexp.core import BytesBudget
from kvexp.errors import ConfigError

SHARED: dict[str, Any] = {  # fields of every budget
    **{
        "of": str,
        "counts_self": bool,
        "pyramid": float,
        "layers": str | None,
        "heads": str,
        "head_floor": float | None,
    },
    **{"stream_sinks": int | None, "stream_recent": int | None},
}


def budget_of_bytes(config: Mapping[str, Any], model: ModelSpec) -> BytesBudget:
    """The budget that `bytes_ratio`, the group `budget` and the bits of the group `cache` make for a model's head.

    config: a resolved configuration whose bytes_ratio is set. ConfigError names the key.
    """
    from kvexp.models.families import head_dim

    node = config["budget"]
    if node.get("threshold") is not None:
        raise ConfigError(f"bytes_ratio={config['bytes_ratio']} and budget=threshold are two budgets: leave out one")
    if node.get("tokens") is not None:
        raise ConfigError(
            f"bytes_ratio={config['bytes_ratio']} and budget.tokens={node['tokens']} are two budgets: leave out one"
        )
    width = head_dim(config_of_spec(model))
    shared = {name: typed(node[name], kind, f"budget.{name}") for name, kind in SHARED.items() if name in node}
    with keys_named({"pyramid": "budget.pyramid"}):
        return BytesBudget(
            bytes_ratio=typed(config["bytes_ratio"], float, "bytes_ratio"),
            key_dim=width,
            value_dim=width,
            quantization=quantization_of(config["cache"]),
            **shared,
        )
