"""The second pass over a prompt, for methods that need one: a forward hook runs it when the prompt has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core import EvictionLayer
from kvexp.core.second_pass import RepeatedChunk, SecondPassLayer
from kvexp.hf.cache import EvictionCache, EvictionCacheLayer
from kvexp.hf.patch import num_kv_heads


class SecondPassCache(Cache):  # type: ignore[misc]
    """The prompt of one or several caches as a model sees it during a second pass.

    caches: filled from one prefill, with equal slots, and not evicted yet.
    """

    def __init__(self, caches: Sequence[EvictionCache]) -> None:
        self.passes: list[SecondPassLayer] = []
        layers = []
        config = caches[0].layers[0].model_config
        group = config.num_attention_heads // num_kv_heads(config)
        for index, layer in enumerate(caches[0].layers):
            states = [cache.layer_states[index] for cache in caches]
            first = states[0]
            assert isinstance(first, EvictionLayer)
            observes = any(isinstance(state, EvictionLayer) and state.due_eviction is not None for state in states)
            self.passes.append(SecondPassLayer(first.require_slots(), group, observes=observes))
            layers.append(EvictionCacheLayer(self.passes[-1], layer.rope, layer.model_config))
        super().__init__(layers=layers)


def second_pass_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: remember the prompt's token ids; after its last forward make the passes that evictions wait for.

    Does nothing for caches whose methods need no second pass.
    """
    cache = kwargs.get("past_key_values")
    every: list[Any] = list(getattr(cache, "caches", (cache,)))
    caches = [one for one in every if getattr(one, "repeated_prompt", None) is not None]
    ids = args[0] if args else kwargs.get("input_ids")
    if not caches or ids is None or not caches[0].sequence.in_prompt:
        return
    groups: dict[Any, list[EvictionCache]] = {}
    for one in caches:
        one.repeated_prompt.fed.append(ids)
        if any(isinstance(state, EvictionLayer) and state.due_eviction is not None for state in one.layer_states):
            groups.setdefault(one.repeated_prompt.same_pass, []).append(one)
    for members in groups.values():
        repeat_prompts(model, members)
    if caches[0].sequence.prompt_complete:
        for one in caches:
            one.repeated_prompt.fed.clear()


@torch.no_grad()
def repeat_prompts(model: PreTrainedModel, caches: Sequence[EvictionCache]) -> None:
    """Make the second pass that serves all these caches of the same prompts, and evict from them.

    ConfigError where the model holds too few positions for it.
    """
    sequence, prompt = caches[0].sequence, caches[0].repeated_prompt
    assert prompt is not None and sequence.prompt_columns is not None
    caches[0].check_second_pass(sequence.prompt_lengths)
    columns, lengths = sequence.prompt_columns, torch.tensor(sequence.prompt_lengths)[:, None]
    real = (torch.arange(columns) >= columns - lengths).long()
    cache = SecondPassCache(caches)
    for ids, chunk in prompt.chunks(sequence.prompt_lengths, pad=0):
        for layer in cache.passes:
            layer.chunk = chunk
        mask = torch.cat([real[chunk.rows], (chunk.positions >= 0).long()], dim=1)
        with input_norms(model, chunk, wanted=prompt.how.over_input):
            logits = _forward(model, ids, mask, cache)
        for one in caches:
            one.logits_nan_flag = one.logits_nan_flag + 0 * logits.sum(dtype=torch.float32)
    for one in caches:
        for state, layer in zip(one.layer_states, cache.passes, strict=True):
            if isinstance(state, EvictionLayer) and state.due_eviction is not None:
                state.evict_after_second_pass(layer.attention, layer.peak_bytes)


def _forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: SecondPassCache) -> Tensor:
    """Logits [n, V] of the last column; ids [n, Q]; mask [n, columns of the prompt + Q]: 0 for padding."""
    device = model.get_input_embeddings().weight.device
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options: dict[str, Any] = {} if model.config.model_type == "mpt" else {"position_ids": positions.to(device)}
    options |= {"attention_mask": mask.to(device), "past_key_values": cache}
    output = model(ids.to(device), use_cache=True, logits_to_keep=1, **options)
    logits: Tensor = output.logits[:, -1]
    return logits


@contextmanager
def input_norms(model: PreTrainedModel, chunk: RepeatedChunk, *, wanted: bool) -> Iterator[None]:
    """In the block, each attention module first puts the 2-norm of its input, query by query, into the chunk.

    Does nothing where it is not wanted.
    """

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        chunk.input_norms = torch.linalg.vector_norm(hidden.float(), dim=-1)

    attentions = [module for module in model.modules() if type(module).__name__.endswith("Attention")] if wanted else []
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
