"""LoRA adapters of Hugging Face: found, checked, merged into the weights of their base model."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from kvexp.hf.patch import (
    named_weights,
)
from kvexp.hf.self_check import MOST, MOST_IN_HALF, logits_size, random_tokens
from kvexp.util.errors import ConfigError, as_config_error
from kvexp.util.files import WHEEL, path_of
from kvexp.util.hub import unreachable

# LoRA adapters (peft's files): found in a model's folder, and merged.
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Endings of the names of what has a row per token, of embeddings.
BY_TOKEN = (".weight", ".base_layer.weight", ".token_adapter.base_layer.weight", ".lora_B.weight", ".lora_embedding_A")


def adapter_settings(path: str) -> dict[str, Any] | None:
    """The adapter_config.json of the folder at `path`; None where it holds no adapter, or is no folder.

    ConfigError for half of an adapter, or a file that cannot be read.
    """
    folder = path_of(path, "model.path")
    described = (folder / ADAPTER).is_file()
    weights = [name for name in ADAPTER_WEIGHTS if (folder / name).is_file()]
    if described != bool(weights):
        held, lacking = (ADAPTER, ADAPTER_WEIGHTS[0]) if described else (weights[0], ADAPTER)
        raise ConfigError(f"{folder} holds {held} of a LoRA adapter without {lacking}: add the one or remove the other")
    if not described:
        return None
    try:
        return dict(json.loads((folder / ADAPTER).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder / ADAPTER} cannot be read ({error}): fetch or copy it again") from error


def base_of(path: str) -> str:
    """Place of the weights that an adapter at `path` changes: the same, or the one its adapter_config.json names.

    `path` comes back too where there is no adapter.
    """
    settings = adapter_settings(path)
    if settings is None or _has_weights(path_of(path, "model.path")):
        return path
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path} is a LoRA adapter that names no model (base_model_name_or_path in {ADAPTER}): name its model there"
        )
    if adapter_settings(base) is not None:
        raise ConfigError(f"{path} is a LoRA adapter of {base}, which has an adapter of its own: merge that one first")
    return base


def check_adapter(path: str, allow_pickle: bool = False) -> None:
    """ConfigError for an adapter that cannot be merged: nothing of it is left out. Loads no weights."""
    settings = adapter_settings(path)
    if settings is None:
        return
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{path} holds an adapter of kind {kind!r}: only LORA can be merged into a model's weights")
    if settings.get("layer_replication"):
        raise ConfigError(
            f"{path} holds an adapter with layer_replication, which repeats layers and gives those that share weights "
            "an adapter each: it cannot be merged; give an adapter without layer_replication"
        )
    if not allow_pickle and not (path_of(path, "model.path") / ADAPTER_WEIGHTS[0]).is_file():
        raise ConfigError(
            f"{path} holds its adapter as pickled weights ({ADAPTER_WEIGHTS[1]}), which can run code when read: save "
            f"it as {ADAPTER_WEIGHTS[0]}, or set allow_pickle=true"
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"{path} holds a LoRA adapter ({ADAPTER}), and peft, which merges it into the weights, is not installed; "
            f"run: pip install peft; or move {ADAPTER} and {ADAPTER_WEIGHTS[0]} away to run the model without it"
        )


@functools.lru_cache(maxsize=8)
def check_hub(path: str, revision: str | None = None) -> None:
    """ConfigError for a repository of the hub with an adapter: it can be merged from a folder.

    What is in the cache counts where the hub cannot be asked.
    """
    if path.startswith((WHEEL, ".", "/", "~")) or path_of(path, "model.path").exists():
        return
    try:
        adapter = find_adapter_config_file(path, revision=revision, local_files_only=bool(unreachable()))
    except Exception:  # reported when the configuration is asked for
        adapter = None
    if adapter is not None:
        raise ConfigError(
            f"{path} holds a LoRA adapter ({ADAPTER}), which is merged from a folder alone: fetch it (hf download "
            f"{path} --local-dir FOLDER) and set model=local model.path=FOLDER"
        )


def merge_adapter(model: Any, path: str) -> Any:
    """Add the weights of the adapter at `path` to the model's own; returns the model without a trace of peft.

    ConfigError where the adapter's weights do not fit its configuration or this model, or where the merged model's
    logits are not the unmerged ones.
    """
    with as_config_error(f"cannot merge the adapter in {path}"), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of tied weights, which are untied, and of names that peft calls
        wrapped = with_adapter(model, path).eval()
        ids, _ = random_tokens(model)
        unmerged = wrapped(ids).logits.float()
        if untie_changed(wrapped):
            model.config.tie_word_embeddings = False
        merged = wrapped.merge_and_unload(safe_merge=True)
        difference = logits_size(merged(ids).logits.float() - unmerged, model.dtype)
        allowed = (MOST if model.dtype == torch.float32 else MOST_IN_HALF) * logits_size(unmerged, model.dtype)
        if not difference <= allowed:
            raise ConfigError(
                f"merged, its logits differ from the unmerged ones by {difference:.2g}, where {allowed:.2g} "
                "is rounding: give another adapter, or dtype=float32 in place of half precision"
            )
        return merged


def with_adapter(model: Any, path: str) -> Any:
    """peft's model of this one with the adapter at `path`, unmerged; ConfigError where it is not one of this model."""
    import peft

    vocabulary = model.get_input_embeddings().weight.shape[0]
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"base_model.model.{name}" for name, module in model.named_modules() if module in embeddings]
    state = peft.utils.load_peft_weights(path, device="cpu")
    for key, weight in state.items():
        tokens = weight.shape["lora_embedding_A" in key] if key in {n + end for n in names for end in BY_TOKEN} else 0
        if tokens not in (0, vocabulary):
            raise ConfigError(
                f"it was saved after the vocabulary was resized to {tokens} tokens, and its model has {vocabulary}: "
                f"call resize_token_embeddings({tokens}) on the model, save it into a folder and name that as "
                f"base_model_name_or_path in {ADAPTER}"
            )
    config: Any = peft.PeftConfig.from_pretrained(path)
    if model.device.type == "meta":
        config.init_lora_weights = False  # some first values are made of the weights
    wrapped = peft.get_peft_model(model, config)
    try:
        loaded: Any = peft.set_peft_model_state_dict(wrapped, state)
    except RuntimeError as error:
        if len(lines := str(error).split("size mismatch for ")) < 2:
            raise
        raise ConfigError(
            f"its weights have other sizes than r and its model ask for ({lines[1].strip()}); give it the model and "
            f"the {ADAPTER} that it was trained with"
        ) from error
    missing = [name for name in loaded.missing_keys if "lora_" in name or "modules_to_save" in name]
    if said := named_weights({"missing": missing, "unexpected": loaded.unexpected_keys}):
        raise ConfigError(f"it is not one of this model ({said}); give it its own model")
    return wrapped


def untie_changed(wrapped: Any) -> bool:
    """Copy the weights that the adapter changes for each module that shares them; returns whether any was shared.

    Unmerged, an adapter of tied embeddings changes lm_head or the embeddings; added to the one weight of both it would
    change both.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module.get_base_layer() for module in wrapped.modules() if isinstance(module, LoraLayer)]
    changed = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}
    holders = defaultdict(list)
    for module in wrapped.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in changed:
                holders[id(weight)].append((module, name, weight))
    others = [holder for shared in holders.values() for holder in shared[1:]]
    for module, name, weight in others:
        setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
    return bool(others)


@contextmanager
def without_adapter(path: str) -> Iterator[str]:
    """A folder with all files of the one at `path` but the adapter's, inside the block.

    transformers would otherwise load the adapter itself, on weights from elsewhere. Other paths come back as they are.
    """
    if adapter_settings(path) is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as place:
        for file in path_of(path, "model.path").resolve().iterdir():
            if file.name not in (ADAPTER, *ADAPTER_WEIGHTS):
                os.symlink(file, Path(place) / file.name)
        yield place


def _has_weights(folder: Path) -> bool:
    """Whether the folder holds weights of a model, an adapter's left out."""
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.index.json")
    return any(file.name not in ADAPTER_WEIGHTS for pattern in patterns for file in folder.glob(pattern))
