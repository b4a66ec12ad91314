"""One generation from prompt to last token, kvexp's or Hugging Face's: times to tokens, and peak memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.clock import Sample, settle
from benchmarks.memory import peak
from benchmarks.shapes import Shape, prompt_of
from benchmarks.variants import Variant
from benchmarks.yardstick import static_cache


def one(
    v: Variant, models: dict[str, Any], shape: Shape, prompt: int, batch: int, beams: int, new: int, budget_of: int
) -> Sample:
    """Seconds to the first and second token, per token after that; bytes needed above the weights at the peak.

    models: by `Variant.model`; budget_of: the prompt tokens that a kv_ratio is of.
    """
    model = models[v.model]
    device = str(next(model.parameters()).device)
    ids = prompt_of(shape, prompt)
    if v.theirs:
        stamps, took, how = peak(lambda: _hf(v, model, ids, batch, beams, new, device), device)
        return {**_times(stamps), "peak_bytes": took, "peak_by": how}
    made, took, how = peak(lambda: _kvexp(v, model, ids.tolist() * batch, beams, new, budget_of), device)
    timing, held = made.timing, made.cache.memory_tracker
    told = {"ttft_s": timing.ttft_s, "tt2t_s": timing.tt2t_s, "tpot_s": timing.tpot_s}
    return {**told, "peak_bytes": took, "peak_by": how, "kv_bytes": held.bytes, "offloaded_bytes": held.offloaded_bytes}


def _kvexp(v: Variant, model: Any, prompts: list[list[int]], beams: int, new: int, budget_of: int) -> Any:
    from kvexp.generate import GenerationParams, generate

    decoding = GenerationParams(new, num_beams=beams, eos=None)
    return generate(model, prompts, *v.plan(budget_of), decoding=decoding, beyond_context=True)


@torch.no_grad()
def _hf(v: Variant, model: Any, ids: Any, batch: int, beams: int, new: int, device: str) -> list[float]:
    """Seconds after which each token was known."""
    ids = ids.to(device).repeat(batch, 1)
    cache = static_cache(model, ids.shape[1] + new) if v.kind == "hf_static" else DynamicCache()
    settle(device)
    start = time.perf_counter()
    if beams > 1:
        clock = _Clock(start, device)
        options = {"num_beams": beams, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            use_cache=True,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
        return clock.stamps
    stamps, token, seen = [], ids, ids.shape[1]
    places = torch.arange(seen, device=device)[None].expand(batch, -1)
    for _ in range(new):
        options = {} if model.config.model_type == "mpt" else {"position_ids": places}
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1, **options).logits
        token, places = logits[:, -1:].argmax(-1), places[:, -1:] + 1
        token[0].item()
        stamps.append(time.perf_counter() - start)
    return stamps


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token of generate() is known; stops nothing."""

    def __init__(self, start: float, device: str) -> None:
        self.start, self.device, self.stamps = start, device, list[float]()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        settle(self.device)
        self.stamps.append(time.perf_counter() - self.start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _times(stamps: list[float]) -> Sample:
    return {
        "ttft_s": stamps[0],
        "tt2t_s": stamps[min(1, len(stamps) - 1)],
        "tpot_s": (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1),
    }
