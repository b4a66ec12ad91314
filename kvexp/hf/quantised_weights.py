"""Weights that a checkpoint stores in few bits and transformers computes with: torchao, bitsandbytes, GPTQ, AWQ, …

They run as transformers loads them. The scheme is part of config.json, and so of what identifies a run. What rounds
activations by all rows of a forward is refused elsewhere (`check_activations`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kvexp.util.errors import ConfigError

# Scheme -> the modules that transformers needs for it, and what to install for each.
PACKAGES: dict[str, dict[str, str]] = {
    "torchao": {"torchao": "torchao"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes", "accelerate": "accelerate"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "awq": {"gptqmodel": "gptqmodel", "accelerate": "accelerate"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
}


def _settings(config: Any) -> dict[str, Any]:
    """The configuration's quantization_config as a dictionary, empty without one."""
    given = getattr(config, "quantization_config", None)
    if given is None or isinstance(given, dict):
        return given or {}
    return dict(given.to_dict())


def scheme_of(config: Any) -> str | None:
    """Scheme of the weights as tables show it, such as "torchao Int8WeightOnly" or "gptq 4 bits"; None for none.

    config: of Hugging Face. A GGUF file's weights are dequantised once and have none.
    """
    given = _settings(config)
    method = "bitsandbytes" if given.get("load_in_4bit") or given.get("load_in_8bit") else given.get("quant_method")
    if not method:
        return None
    method = str(getattr(method, "value", method))
    kind: Any = given.get("quant_type")
    if isinstance(kind, dict):  # torchao's: settings by module
        kind = next((settings.get("_type") for settings in kind.values() if isinstance(settings, dict)), None)
    details = {
        "bitsandbytes": given.get("bnb_4bit_quant_type") if given.get("load_in_4bit") else "8 bits",
        "torchao": str(kind or "").removesuffix("Config"),
        "compressed-tensors": given.get("format"),
    }
    bits = f"{given['bits']} bits" if isinstance(given.get("bits"), int) else None
    return " ".join(str(word) for word in (method, details.get(method) or bits) if word)


def check_scheme(config: Any, path: str, adapter: bool = False) -> None:
    """ConfigError where the package of the weights' scheme is not installed, or a LoRA adapter was to be merged.

    config: of Hugging Face; path: of the model, for the message; adapter: whether it has one.
    """
    scheme = scheme_of(config)
    if scheme is None:
        return
    wanted = PACKAGES.get(scheme.split()[0], {})
    missing = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the weights in {path} are quantised ({scheme}), which needs {' and '.join(missing)}: run: pip install "
            f"{' '.join(missing)}; or give a folder of weights that are not quantised"
        )
    if adapter:
        raise ConfigError(
            f"{path} is a LoRA adapter of quantised weights ({scheme}), and would be rounded when it is merged: give "
            "the adapter's model in weights that are not quantised"
        )


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a weight consists of: itself, or codes and scales of one of a class of its own."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield weight
        return
    for name in flatten()[0]:
        tensor = getattr(weight, name)
        if isinstance(tensor, Tensor):
            yield from plain_parts(tensor)
