"""LoRA adapters (peft's adapter_config.json and adapter_model.safetensors): found in a model's folder, and merged."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.peft_utils import find_adapter_config_file

from kvexp.util import WHEEL, ConfigError, path_of, unreachable

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
SHOWN = 4  # names of weights in a message


def adapter_settings(path: str) -> dict[str, Any] | None:
    """The adapter_config.json of the folder at `path`; None where it holds no adapter, or is no folder.

    ConfigError for half of an adapter, or a file that cannot be read.
    """
    folder = path_of(path, "model.path")
    if not folder.is_dir():
        return None
    there = [name for name in WEIGHTS if (folder / name).is_file()]
    if not (folder / CONFIG).is_file():
        if there:
            raise ConfigError(
                f"{folder} holds weights of a LoRA adapter ({there[0]}) without {CONFIG}: add or remove it"
            )
        return None
    if not there:
        raise ConfigError(
            f"{folder} holds {CONFIG} of a LoRA adapter without {WEIGHTS[0]}: add its weights or remove it"
        )
    try:
        settings = json.loads((folder / CONFIG).read_bytes())
        return dict(settings)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read ({error}): fetch or copy it again") from error


def base_of(path: str) -> str:
    """Where the weights are that an adapter at `path` changes: there, or where its adapter_config.json says.

    `path` comes back too where there is no adapter.
    """
    settings = adapter_settings(path)
    if settings is None or _has_weights(path_of(path, "model.path")):
        return path
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path} is a LoRA adapter that names no model (base_model_name_or_path in {CONFIG}): name its model there"
        )
    if adapter_settings(base) is not None:
        raise ConfigError(f"{path} is a LoRA adapter of {base}, which has an adapter of its own: merge that one first")
    return base


def beside_weights(path: str | None) -> bool:
    """Whether the folder at `path` holds weights and an adapter that changes them."""
    return path is not None and adapter_settings(path) is not None and _has_weights(path_of(path, "model.path"))


def tokenizer_place(path: str) -> str:
    """Where the tokenizer of the model at `path` is: an adapter's folder may have one or leave it to its model."""
    folder = path_of(path, "model.path")
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    return path if own else base_of(path)


def check_adapter(path: str, allow_pickle: bool = False) -> None:
    """ConfigError for an adapter that cannot be merged: nothing of it is left out. Loads no weights."""
    settings = adapter_settings(path)
    if settings is None:
        return
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{path} holds an adapter of kind {kind!r}: only LORA can be merged into a model's weights")
    if not allow_pickle and not (path_of(path, "model.path") / WEIGHTS[0]).is_file():
        raise ConfigError(
            f"{path} holds its adapter as pickled weights ({WEIGHTS[1]}), which can run code when read: save it as "
            f"{WEIGHTS[0]}, or set allow_pickle=true"
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"{path} holds a LoRA adapter ({CONFIG}), and peft, which merges it into the weights, is not installed; "
            f"run: pip install peft; or move {CONFIG} and {WEIGHTS[0]} away to run the model without it"
        )


@functools.lru_cache(maxsize=8)
def check_hub(path: str, revision: str | None = None) -> None:
    """ConfigError for a repository of the hub with an adapter: it can be merged from a folder.

    What is in the cache counts where the hub cannot be asked.
    """
    if path.startswith((WHEEL, ".", "/", "~")) or path_of(path, "model.path").exists():
        return
    try:
        found = find_adapter_config_file(path, revision=revision, local_files_only=bool(unreachable()))
    except Exception:  # told when the configuration is asked for
        found = None
    if found is not None:
        raise ConfigError(
            f"{path} holds a LoRA adapter ({CONFIG}), which is merged from a folder alone: fetch it (hf download "
            f"{path} --local-dir FOLDER) and set model=local model.path=FOLDER"
        )


def merged(model: Any, path: str) -> Any:
    """The model with the weights of the adapter at `path` added to its own, and no trace of peft.

    ConfigError where the adapter's weights are not those of its configuration on this model.
    """
    import peft

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that peft still calls in transformers
            wrapped = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(path))
            state = peft.utils.load_peft_weights(path, device="cpu")
            found: Any = peft.set_peft_model_state_dict(wrapped, state)
        missing = [name for name in found.missing_keys if "lora_" in name or "modules_to_save" in name]
        wrong = {"missing": missing, "unexpected": list(found.unexpected_keys)}
        said = "; ".join(f"{kind}: {', '.join(names[:SHOWN])}" for kind, names in wrong.items() if names)
        if said:
            raise ConfigError(f"the adapter in {path} is not one of this model ({said}): give it its own model")
        return wrapped.merge_and_unload(safe_merge=True)
    except ConfigError:
        raise
    except Exception as error:  # peft's own: no common base
        raise ConfigError(f"cannot merge the adapter in {path}: {' '.join(str(error).split())[:300]}") from error


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
            if file.name not in (CONFIG, *WEIGHTS):
                os.symlink(file, Path(place) / file.name)
        yield place


def _has_weights(folder: Path) -> bool:
    """Whether the folder holds weights of a model, beside those of an adapter."""
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.index.json")
    return any(file.name not in WEIGHTS for pattern in patterns for file in folder.glob(pattern))
