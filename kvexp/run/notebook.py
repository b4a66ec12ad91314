"""Python for a notebook: a model by its name, and the answer to a text under an eviction method."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvexp.run import model_spec
from kvexp.run.compose import in_python, is_model_place, meant, named_class, option, options
from kvexp.run.labels import with_packaged_path
from kvexp.util.errors import ConfigError
from kvexp.util.fields import as_python
from kvexp.util.machine import watch_torch

if TYPE_CHECKING:
    from kvexp.core import Budget, CacheConfig, Method
    from kvexp.generate import Generation
    from kvexp.hf.load import Model, Tokenizer

MODEL = "smollm2_135m"  # as conf/config.yaml has it


@in_python(None)
def load(name: str = MODEL, **settings: Any) -> tuple[Model, Tokenizer]:
    """Do what `kvexp.load` says, which tells the arguments."""
    name, settings = as_python(name), {key: as_python(value) for key, value in settings.items()}
    if not isinstance(name, str):
        raise ConfigError(f"name must be a model's name, a folder, a GGUF file or a hub id, got {name!r}")
    watch_torch()
    model_spec.forget_changed()
    model, tokenizer = model_spec.load(spec_of(name, settings))
    return model, copy.deepcopy(tokenizer)  # whose template and tokens may be changed, where runs go on with theirs


def spec_of(name: str, settings: Mapping[str, Any]) -> model_spec.ModelSpec:
    """The model of a name, folder, GGUF file or hub id, with these settings of `model`; ConfigError where none is."""
    if name in options("model"):
        node = dict(option("model", name))
        if node.get("path") == "???":
            raise ConfigError(f"{name!r} stands for a folder or hub id of your own: give that in its place")
    elif is_model_place(name):
        node = {**option("model", "local"), "path": name}
    else:
        near = meant(name, options("model"))
        raise ConfigError(
            f"there is no model {name!r}{near or '; `kvexp models` lists them'} (or give a folder or hub id)"
        )
    return model_spec.ModelSpec.of({**with_packaged_path(node, "model.path"), **settings})


@in_python(None)
def generate(
    prompt: Any,
    model: Model | str = MODEL,
    method: Method | CacheConfig | str = "h2o",
    budget: Budget | None = None,
    *,
    kv_ratio: float | None = None,
    tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> Generation:
    """Answer a text, a chat or token ids, or a list of these, while a method evicts from the KV cache.

    prompt: a text, a list of messages with role and content (through the chat template), token ids, or a batch of one
        of these; also what a tokenizer returned.
    model: a loaded model, or what `load` takes (the tokenizer then comes with it).
    method: a method object, its name, or a user's MODULE.CLASS or FILE.py.
    kv_ratio or tokens: how much of the cache stays (default: half of the prompt's tokens), or a whole `budget`.
    max_new_tokens: of each answer, which an end token of the model or a chat's end of turn ends earlier.
    options: of the cache (`CacheConfig`) and of transformers' generate(): do_sample, num_beams, eos_token_id and so on.

    Returns a Generation; its `text` is the answer, `texts` has one per row. ConfigError for what cannot be done.
    """
    from kvexp.core import CacheConfig, Method
    from kvexp.core.config import OPTIONS, check_keywords
    from kvexp.generate.inputs import GENERATION_NAMES
    from kvexp.generate.loop import generate as generate_ids

    arguments = {*inspect.signature(generate).parameters, *inspect.signature(generate_ids).parameters}
    check_keywords(options, {*OPTIONS, *GENERATION_NAMES, *arguments} - {"options", "prompts"})
    if hasattr(prompt, "generate"):  # in the order of kvexp.generate.generate: model, prompts
        prompt, model = model, prompt
    model, method, kv_ratio, tokens = map(as_python, (model, method, kv_ratio, tokens))
    options = {name: as_python(value) for name, value in options.items()}
    if isinstance(model, str):
        loaded, model_tokenizer = load(model)
        model, tokenizer = loaded, tokenizer or model_tokenizer
    elif not callable(getattr(model, "get_input_embeddings", None)):
        raise ConfigError(f"model must be a model's name or what kvexp.load returns first, got {model!r:.80}")
    if isinstance(method, str):
        method = method_of(method)
    elif isinstance(method, type) and issubclass(method, Method):
        method = method()
    if not isinstance(method, Method | CacheConfig):
        raise ConfigError(f"method must be a name or a method object, as in method='h2o', got {method!r}")
    if isinstance(method, Method) and not method.evicts:
        kv_ratio = tokens = None  # so that "full" may stand in a loop over methods
    elif isinstance(method, Method) and (budget, kv_ratio, tokens) == (None, None, None):
        kv_ratio = 0.5
    return generate_ids(
        model,
        prompt,
        method,
        budget,
        kv_ratio=kv_ratio,
        tokens=tokens,
        tokenizer=tokenizer,
        max_new_tokens=as_python(max_new_tokens),
        **options,
    )


def method_of(name: str) -> Method:
    """The method of this name with its defaults: one of `kvexp methods`, MODULE.CLASS or FILE.py."""
    from kvexp.run.build import build_method

    if name in options("method"):
        return build_method(option("method", name))
    method: Method = named_class("method", name).cls()
    return method
