"""How tokens are chosen: greedily, by seeded sampling or by beam search; and the logits processors for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvexp.errors import ConfigError
from kvexp.generate.sampling import SeededGumbelSampler

MOST_BEAMS = 1024  # each is a row of the batch


@dataclass(frozen=True)
class GenerationParams:
    """How tokens are chosen, and how many.

    num_beams > 1: beam search; sample: draw from softmax with temperature, top_k, top_p (never with beams).
    eos: token id, several, "model" for the model's own, or None for never stopping. prefill_chunk: prompt columns per
    forward (None: all at once).
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    num_beams: int = 1
    early_stopping: bool = True
    length_penalty: float = 1.0
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    eos: int | Sequence[int] | str | None = "model"
    stop_strings: tuple[str, ...] = ()
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "num_beams", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens must be between 0 and max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}"
            )
        if self.num_beams < 1:
            raise ConfigError(f"num_beams must be at least 1, got {self.num_beams}")
        if self.num_beams > MOST_BEAMS:
            raise ConfigError(f"num_beams may be at most {MOST_BEAMS}, got {self.num_beams}")
        if self.sample and self.num_beams > 1:
            raise ConfigError("sampling with beams is not offered: set sample=false or num_beams=1")
        if self.sample and self.temperature <= 0:
            raise ConfigError(f"temperature must be positive, got {self.temperature:g}; sample=false is greedy")
        if self.eos not in (None, "model") and not _token_ids(self.eos):
            raise ConfigError(f"eos must be a token id, a list of them, 'model' or null, got {self.eos!r}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p:g}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 1, or 0 for no limit, got {self.top_k}")
        stops: Any = self.stop_strings
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise ConfigError(f"stop_strings must be a list of texts, got {stops!r}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1 column, got {self.prefill_chunk}")


def _token_ids(eos: Any) -> bool:
    """Whether `eos` is a token id or several."""
    each = eos if isinstance(eos, list | tuple) else [eos]
    return all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in each)


def logits_processors(
    decoding: GenerationParams, seeds: list[int], columns: int, eos: list[int], device: Any
) -> LogitsProcessorList:
    """Hugging Face's processors for these parameters, sampling included.

    seeds: one per row; columns: of the prompt; eos: ids of end tokens.
    """
    steps: list[Any] = []
    if decoding.min_new_tokens and eos and decoding.num_beams == 1:
        steps.append(MinNewTokensLengthLogitsProcessor(columns, decoding.min_new_tokens, eos, device=device))
    if decoding.sample:
        if decoding.temperature != 1:
            steps.append(TemperatureLogitsWarper(decoding.temperature))
        if decoding.top_k:
            steps.append(TopKLogitsWarper(decoding.top_k))
        if decoding.top_p < 1:
            steps.append(TopPLogitsWarper(decoding.top_p))
        steps.append(SeededGumbelSampler(seeds, columns))
    return LogitsProcessorList(steps)
