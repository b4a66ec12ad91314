"""Beam search by Hugging Face's own generate(), on kvexp's cache."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvexp.generate.decode_graph import graph_device
from kvexp.generate.finish_reason import StopStrings, truncate_at_end
from kvexp.generate.generation_params import GenerationParams, RowProcessors, stop_strings_of
from kvexp.generate.inputs import eos_ids, pad_id
from kvexp.generate.output import Generation, Timing, check_finite, check_seq_length
from kvexp.models import EvictionCache


class _TokenTimer(StoppingCriteria):  # type: ignore[misc]
    """Records the time at which each token was known.

    generate() reads every token, so the device has finished by then and no further wait is needed.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _StopAtStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends rows whose new tokens hold a stop string. columns: of the prompt."""

    def __init__(self, stops: StopStrings, columns: int) -> None:
        self.stops, self.columns = stops, columns

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self.stops.done(input_ids, self.columns)


def beam_search(
    model: PreTrainedModel,
    cache: EvictionCache,
    ids: Tensor,
    mask: Tensor,
    decoding: GenerationParams,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool,
) -> Generation:
    """Beam search from ids and mask [B, columns] int64, of which the cache may have seen a first part.

    mask: 0 for padding; start: the `time.perf_counter()` from which the times count. Other arguments as of `generate`.
    """
    stamps, eos = _TokenTimer(), eos_ids(model, decoding.eos)
    stops = StopStrings(stop_strings_of(model, decoding), tokenizer, decoding.thinking)
    own = RowProcessors.of(model, decoding, ids, mask, eos)
    criteria: list[StoppingCriteria] = [stamps, *([_StopAtStrings(stops, ids.shape[1])] if stops else [])]
    output: Any = without_generation_defaults(model).generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        do_sample=False,
        num_beams=decoding.num_beams,
        early_stopping=decoding.early_stopping,
        length_penalty=decoding.length_penalty,
        max_new_tokens=decoding.max_new_tokens,
        min_new_tokens=(decoding.min_new_tokens or None) if own is None else None,
        logits_processor=None if own is None else LogitsProcessorList([own]),
        eos_token_id=eos or None,
        pad_token_id=pad_id(model, tokenizer),
        prefill_chunk_size=decoding.prefill_chunk,
        stopping_criteria=StoppingCriteriaList(criteria),
        return_dict_in_generate=True,
        output_logits=keep_logits,
        output_scores=True,
    )
    check_seq_length(cache, ids.shape[1], len(stamps.times))
    check_finite(cache)
    tokens, ends = truncate_at_end(output.sequences, ids.shape[1], eos, stops)
    return Generation(
        tokens=tokens,
        endings=ends,
        sequences=output.sequences,
        timing=Timing.of(start, stamps.times),
        memory_tracker=cache.memory_tracker,
        cache=cache,
        beam_scores=output.sequences_scores.tolist(),
        logits=tuple(output.logits) if keep_logits else (),
        cuda_graph=None if graph_device(cache) is None else "beams are not captured: transformers feeds their steps",
    )


def without_generation_defaults(model: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of the model without its own generation defaults, such as a temperature in generation_config.json.

    They would change a result without being asked for; its logits processors are given apart (`RowProcessors`).
    """
    other = copy.copy(model)
    other.generation_config = GenerationConfig()
    return other
