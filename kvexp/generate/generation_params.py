"""How tokens are chosen: greedily, by seeded sampling or by beam search; and the logits processors for it.

Of a model's generation_config.json what changes its most probable tokens holds here as in Hugging Face's generate():
MODEL_PROCESSORS and its stop strings. How tokens are searched for and drawn, and how many, GenerationParams says alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvexp.core.cache_config import check_keywords
from kvexp.core.cache_settings import CacheOptions
from kvexp.errors import ConfigError
from kvexp.generate.sampling import SeededGumbelSampler
from kvexp.models.chat_template import Thinking

MOST_BEAMS = 1024  # each is a row of the batch
# Fields of a generation_config.json that change the logits, and their values that do not (None is one of each).
MODEL_PROCESSORS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}
# Fields that would change the tokens as well, by more than the logits of one step, and their values that do not.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (1,),
    "token_healing": (False,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
}


@dataclass(frozen=True)
class GenerationParams:
    """How tokens are chosen, and how many.

    num_beams > 1: beam search; sample: draw from softmax with temperature, top_k, top_p (never with beams).
    eos: token id, several, "model" for the model's own, or None for never stopping. prefill_chunk: prompt columns per
    forward (None: all at once). thinking: tags of what is no part of the answer yet, so that no stop string ends it;
    kvexp takes them from the chat template.
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
    thinking: Thinking | None = None

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
        if not isinstance(self.thinking, Thinking | None):
            raise ConfigError(f"thinking must be the tags of a chat template, got {self.thinking!r}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1 column, got {self.prefill_chunk}")


class GenerationOptions(CacheOptions, total=False):
    """Options of the cache, and `GenerationParams` under the names that transformers gives them."""

    max_new_tokens: int
    min_new_tokens: int
    num_beams: int
    early_stopping: bool
    length_penalty: float
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    eos_token_id: int | Sequence[int] | str | None
    stop_strings: str | Sequence[str]
    prefill_chunk_size: int | None


OWN_NAMES = {"do_sample": "sample", "eos_token_id": "eos", "prefill_chunk_size": "prefill_chunk"}
GENERATION_NAMES = tuple(GenerationOptions.__annotations__.keys() - CacheOptions.__annotations__.keys())


def parted(decoding: GenerationParams | None, options: Mapping[str, Any]) -> tuple[GenerationParams, dict[str, Any]]:
    """(GenerationParams, what is left of the keyword arguments): decoding with the arguments that transformers knows.

    ConfigError for an argument that neither transformers nor `CacheOptions` calls so.
    """
    check_keywords(options, GenerationOptions.__annotations__)
    words = {name: value for name, value in options.items() if name in GENERATION_NAMES}
    return with_keywords(decoding, words), {name: options[name] for name in options if name not in words}


def with_keywords(decoding: GenerationParams | None, words: Mapping[str, Any]) -> GenerationParams:
    """These parameters, or the defaults, with keyword arguments in transformers' words; ConfigError for others.

    None leaves an argument as it is, but for eos_token_id=None, which never stops.
    """
    check_keywords(words, GENERATION_NAMES)
    kept = {name: value for name, value in words.items() if value is not None or name == "eos_token_id"}
    given = {OWN_NAMES.get(name, name): value for name, value in kept.items()}
    if isinstance(stops := given.get("stop_strings", ()), str | list):
        given["stop_strings"] = (stops,) if isinstance(stops, str) else tuple(stops)
    return replace(decoding or GenerationParams(), **given)


def _token_ids(eos: Any) -> bool:
    """Whether `eos` is a token id or several."""
    each = eos if isinstance(eos, list | tuple) else [eos]
    return all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in each)


def set_fields(config: GenerationConfig, table: dict[str, tuple[Any, ...]]) -> list[str]:
    """The fields of MODEL_PROCESSORS or NOT_OFFERED that a generation configuration sets to what changes tokens."""
    values = {name: getattr(config, name, None) for name in table}
    return [name for name, value in values.items() if value is not None and value not in table[name]]


def check_generation_config(config: GenerationConfig) -> None:
    """ConfigError for generation settings of a model that Hugging Face's generate() would follow and kvexp cannot."""
    for name in set_fields(config, NOT_OFFERED):
        raise ConfigError(
            f"the model's generation_config.json sets {name}={getattr(config, name)!r}, which kvexp does not offer: "
            "use a copy of the model whose generation_config.json leaves it out"
        )


def stop_strings_of(model: PreTrainedModel, decoding: GenerationParams) -> tuple[str, ...]:
    """The stop strings of these parameters, or else those of the model's own generation configuration."""
    own = getattr(model.generation_config, "stop_strings", None) or ()
    return decoding.stop_strings or ((own,) if isinstance(own, str) else tuple(own))


def is_plain_greedy(model: PreTrainedModel, decoding: GenerationParams) -> bool:
    """Whether a greedy answer is the most probable token of every step, until an end token."""
    own = set_fields(model.generation_config, MODEL_PROCESSORS)
    return not (own or decoding.min_new_tokens or stop_strings_of(model, decoding))


class RowProcessors(LogitsProcessor):  # type: ignore[misc]
    """The logits processors of the model's own generation configuration, one list per row.

    Each sees a row's real tokens alone, so that no penalty is for padding and no row knows its neighbours. padding: how
    many columns of each row are; rows that are beams of one prompt follow each other.
    """

    def __init__(self, lists: Sequence[LogitsProcessorList], padding: Sequence[int]) -> None:
        self.lists, self.padding = list(lists), list(padding)

    @classmethod
    def of(
        cls, model: PreTrainedModel, decoding: GenerationParams, ids: Tensor, mask: Tensor, eos: list[int]
    ) -> RowProcessors | None:
        """The processors of the rows ids, mask [R, columns] (0: padding); None where the model has none.

        eos: ids of end tokens. ConfigError for what kvexp does not offer, and for values that transformers refuses.
        """
        own = copy.deepcopy(model.generation_config)
        check_generation_config(own)
        if not set_fields(own, MODEL_PROCESSORS):
            return None
        own.do_sample, own.num_beams, own.remove_invalid_values = False, decoding.num_beams, False
        own.min_new_tokens = decoding.min_new_tokens or own.min_new_tokens
        own._eos_token_tensor = torch.tensor(eos, device=ids.device) if eos else None
        if not eos:
            own.exponential_decay_length_penalty = None
        padding = (mask == 0).sum(1).tolist()
        lists = []
        for row, pads in zip(ids, padding, strict=True):
            prompt = row[None, pads:]
            one, length = copy.copy(own), prompt.shape[1]
            one.max_length = length + decoding.max_new_tokens
            if own.min_new_tokens:
                one.min_length = length + own.min_new_tokens
            try:
                made = model._get_logits_processor(
                    one, input_ids_seq_length=length, encoder_input_ids=prompt, device=ids.device
                )
            except (ValueError, TypeError) as error:
                raise ConfigError(f"the model's generation_config.json cannot be followed: {error}") from error
            lists.append(made)
        return cls(lists, padding)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        each = len(scores) // len(self.lists)  # 1, or the number of beams
        rows = [
            self.lists[row // each](input_ids[row : row + 1, self.padding[row // each] :], scores[row : row + 1])
            for row in range(len(scores))
        ]
        return torch.cat(rows)

    def keep(self, rows: Sequence[int]) -> RowProcessors:
        """The processors of these rows."""
        return RowProcessors([self.lists[row] for row in rows], [self.padding[row] for row in rows])


def logits_processors(
    decoding: GenerationParams, seeds: list[int], columns: int, eos: list[int], device: Any, own: RowProcessors | None
) -> LogitsProcessorList:
    """Hugging Face's processors for these parameters, sampling included.

    seeds: one per row; columns: of the prompt; eos: ids of end tokens; own: the model's, min_new_tokens among them.
    """
    steps: list[Any] = [] if own is None else [own]
    if own is None and decoding.min_new_tokens and eos and decoding.num_beams == 1:
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
