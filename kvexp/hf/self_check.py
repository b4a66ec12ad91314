"""The self-check of a patched model: with nothing evicted, kvexp's logits against the logits of its own attention.

It is what lets any type of transformers in, known or not: a wrong reading of a model shows as other logits. What is
compared is random tokens in two rows, one of them padded on the left, and a few decode steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvexp import NUMERICS
from kvexp.core import Method
from kvexp.hf.cache import EvictionCache
from kvexp.hf.patch import (
    ATTN_IMPLEMENTATION,
    SHIMS,
    attention_modules,
    forward_columns,
    forward_logits,
)
from kvexp.hf.quantised_weights import plain_parts
from kvexp.hf.traits import KIND_TITLES, text_config, traits_of
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.files import cache_folder, replace

Check = Literal["always", "once", "never"]
TOKENS, STEPS = 48, 4  # columns of the prompt, of a model that holds so many; decode steps
ATOL, RTOL = 1e-4, 2e-5  # of float32 logits; RTOL is of the largest one
# In float32 and in half precision: times the model's own rounding, where that is more; and what rounding may come to,
# of the logits' size (`logits_size`).
NOISE, NOISE_IN_HALF = 3, 1.5
MOST, MOST_IN_HALF = 1e-3, 0.2


@dataclass(frozen=True)
class _Everything(Method):
    """The method that keeps every token; `kvexp.methods.Full` belongs to a layer above."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits of the model's configuration, a sample of each of its weights, and the versions that compute it."""
    hashed = hashlib.sha256(f"{transformers.__version__} {NUMERICS} {torch.__version__}".encode())
    hashed.update(json.dumps(model.config.to_diff_dict(), sort_keys=True, default=str).encode())
    for name, weight in ((name, tensor) for name, whole in model.state_dict().items() for tensor in plain_parts(whole)):
        flat = weight.detach().flatten()
        few = flat[:: max(1, flat.numel() // 256)].cpu()
        hashed.update(f"{name} {tuple(weight.shape)} {weight.dtype} {weight.device.type}".encode())
        hashed.update(few.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def check_model(model: PreTrainedModel, check: Check) -> None:
    """ConfigError where a patched model's logits are not its own, with the difference and the first layer that has one.

    check: once, where this model passed before with these versions (a file in kvexp's cache folder says so), nothing is
    computed; always; never.
    """
    if check == "never":
        return
    passed = cache_folder() / "checked" / fingerprint(model) if check == "once" else None
    if passed is not None and passed.is_file():
        return
    difference = measure(model)
    if passed is not None:
        with suppress(OSError):  # a folder that cannot be written: checked again the next time
            passed.parent.mkdir(parents=True, exist_ok=True)
            replace(passed, f"{traits_of(model.config).type} {difference:.3g}\n".encode())


@torch.no_grad()
def measure(model: PreTrainedModel) -> float:
    """Size (`logits_size`) of the difference between the logits of kvexp and of the model's own attention.

    ConfigError as of `check_model`.
    """
    title = traits_of(model.config).title
    ids, mask = random_tokens(model)
    with _own_attention(model) as swap:
        swap(stock=True)
        stock = _stock(model, ids, mask)
        swap(stock=False)
        try:
            got, cache = _kvexp(model, ids, mask)
        except CacheError as error:
            raise ConfigError(f"model family {title!r} is not supported: {error}") from error
        _check_shapes(model, cache)
        size, whole = logits_size(stock, model.dtype), model.dtype == torch.float32
        difference, allowed = logits_size(got - stock, model.dtype), max(ATOL, RTOL * size)
        if difference > allowed or not whole:
            swap(stock=True)
            noise, most = (NOISE, MOST) if whole else (NOISE_IN_HALF, MOST_IN_HALF)
            allowed = max(allowed, min(noise * _rounding(model, ids, mask, stock), most * size))
            swap(stock=False)
        if not difference <= allowed:
            layer = _first_bad_layer(model, ids, mask, swap)
            if layer and traits_of(model.config).latent:
                module = type(attention_modules(model)[0]).__name__
                layer += (
                    f": what {module}.forward attends to is not what its expand_kv makes of the latents that it caches"
                )
            raise ConfigError(
                f"model family {title!r} is not supported: with nothing evicted, kvexp's logits differ from the "
                f"model's own by {difference:.2g}, where {allowed:.2g} is rounding{layer}"
            )
    return difference


def random_tokens(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Random token ids [2, N + STEPS] and a mask of the first N columns; a third of the second row's is padding."""
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(0)
    size = int(text_config(model.config).vocab_size)
    columns = max(3, min(TOKENS, (traits_of(model.config).limit or TOKENS + STEPS) - STEPS))
    ids = torch.randint(min(3, size - 1), size, (2, columns + STEPS), generator=generator).to(device)
    mask = torch.ones_like(ids[:, :columns])
    mask[1, : (columns + 2) // 3] = 0
    return ids, mask


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[Callable[..., None]]:
    """A block with a function that switches between the model's own eager attention and kvexp's, which it ends with."""
    shims = [(module, type(module)) for module in model.modules() if type(module) in SHIMS.values()]

    def swap(*, stock: bool) -> None:
        name = "eager" if stock else ATTN_IMPLEMENTATION
        if not shims:
            model.set_attn_implementation(name)
            return
        model.config._attn_implementation_internal = name
        for module, shim in shims:
            module.__class__ = shim.__mro__[1] if stock else shim
            if "_old_forward" in vars(module):  # accelerate's hook around the forward of the class it had
                module._old_forward = MethodType(type(module).forward, module)

    try:
        yield swap
    finally:
        swap(stock=False)


def _stock(model: PreTrainedModel, ids: Tensor, mask: Tensor, width: int = TOKENS) -> Tensor:
    """Logits [2, 1 + STEPS, V] float32 by transformers' own cache; width: columns of the prompt's forwards."""
    cache, last_logits, columns = DynamicCache(config=model.config), [], mask.shape[1]
    logits = torch.zeros(0)
    for start in range(0, columns, width):
        block = ids[:, start : min(start + width, columns)]
        logits = forward_logits(model, block, mask[:, : start + block.shape[1]], cache, keep=1)[:, -1]
    last_logits.append(logits)
    for step in range(STEPS):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        at = columns + step
        last_logits.append(forward_logits(model, ids[:, at : at + 1], mask, cache, keep=1)[:, -1])
    return torch.stack(last_logits, dim=1).float()


def _kvexp(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, EvictionCache]:
    """As `_stock`, through a cache of kvexp that keeps everything, and that cache."""
    columns = mask.shape[1]
    cache = EvictionCache(model, _Everything(), prompt_tokens=columns, max_new_tokens=STEPS)
    last_logits = [forward_logits(model, ids[:, :columns], mask, cache, keep=1)[:, -1]]
    positions = mask.sum(1, keepdim=True)
    for step in range(STEPS):
        token = ids[:, columns + step : columns + step + 1]
        last_logits.append(forward_columns(model, token, token.new_ones(2, 0), positions + step, cache, keep=1)[:, -1])
    return torch.stack(last_logits, dim=1).float(), cache


def _rounding(model: PreTrainedModel, ids: Tensor, mask: Tensor, stock: Tensor) -> float:
    """How much the model's own logits move with its rounding.

    Compared are prompts in parts, torch's SDPA where the model can, and inputs that differ in the last bit of their
    dtype, by which experts are chosen otherwise, say.
    """
    others = [_stock(model, ids, mask, width=max(1, mask.shape[1] // 3))]
    for seed in range(2):
        signs = torch.Generator().manual_seed(seed)
        with _last_bits(model, signs):
            others.append(_stock(model, ids, mask))
    if getattr(model, "_supports_sdpa", False):
        before = model.config._attn_implementation
        with suppress(ValueError, ImportError):
            model.set_attn_implementation("sdpa")
            others.append(_stock(model, ids, mask))
        model.set_attn_implementation(before)
    return max(logits_size(other - stock, model.dtype) for other in others)


def logits_size(logits: Tensor, dtype: torch.dtype) -> float:
    """The largest absolute value; of a model in half precision the root mean square.

    There one token for which rounding chooses another expert has differences of any size, and wrong attention differs
    at all of them.
    """
    return float(logits.abs().max() if dtype == torch.float32 else logits.square().mean().sqrt())


@contextmanager
def _last_bits(model: PreTrainedModel, signs: torch.Generator) -> Iterator[None]:
    """A block in which embeddings of tokens are larger or smaller by one unit in the last place."""
    unit = torch.finfo(model.dtype).eps

    def shake(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        sign = torch.randint(0, 2, output.shape, generator=signs).to(output.device) * 2 - 1
        return output * (1 + unit * sign).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(shake)
    try:
        yield
    finally:
        hook.remove()


def _check_shapes(model: PreTrainedModel, cache: EvictionCache) -> None:
    """ConfigError where keys and values have other shapes than the configuration says, by which budgets are made."""
    traits = traits_of(model.config)
    said = (traits.kv_heads, traits.key_dim, traits.value_dim)
    for number, state in zip(traits.held, cache.layer_states, strict=True):
        slots: Any = state.slots
        shape = (slots.keys.shape[1], slots.keys.shape[-1], slots.values.shape[-1])
        if shape != said:
            raise ConfigError(
                f"model family {traits.title!r} is not supported: its layer {number} has {shape[0]} kv heads with keys "
                f"of {shape[1]} and values of {shape[2]} numbers, where its configuration says {said[0]}, {said[1]} "
                f"and {said[2]}"
            )


def _first_bad_layer(model: PreTrainedModel, ids: Tensor, mask: Tensor, swap: Any) -> str:
    """The first layer whose attention output differs by more than rounding, as text; empty where none does."""
    seen: list[list[Tensor]] = []
    for stock in (True, False):
        swap(stock=stock)
        with _outputs(attention_modules(model)) as outputs:
            _stock(model, ids, mask) if stock else _kvexp(model, ids, mask)
        seen.append(outputs)
    layers = traits_of(model.config).layers
    real, rounding = mask.bool(), max(1e-3, 4 * torch.finfo(model.dtype).eps)
    for number, (mine, others) in enumerate(zip(*seen, strict=False)):
        if mine.shape != others.shape or mine.shape[:2] != mask.shape:
            continue
        if logits_size((mine - others)[real], model.dtype) > rounding * logits_size(mine[real], model.dtype):
            which = number % len(layers)
            kind = f", {KIND_TITLES[layers[which].kind]}" if len(layers) > which else ""
            return f"; first in the attention of layer {which}{kind}"
    return ""


@contextmanager
def _outputs(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A block in which the list receives the outputs [B, Q, n] of these modules, forward by forward."""
    outputs: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs.append(first.detach().float())

    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
