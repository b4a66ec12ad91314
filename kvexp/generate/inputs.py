"""What generation takes and gives: prompts, parameters, results.

Prompts, seeds and lengths are checked before the model runs. Of a model's generation_config.json what changes its most
probable tokens holds here as in Hugging Face's generate(): MODEL_PROCESSORS and its stop strings. How tokens are
searched for and drawn, and how many, `GenerationParams` says alone.
"""

from __future__ import annotations

import copy
import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvexp.core import CacheConfig, EvictionLayer, MemoryTracker
from kvexp.core.config import OPTIONS, check_keywords
from kvexp.core.method import nan_error
from kvexp.core.noise import gumbel
from kvexp.hf import EvictionCache
from kvexp.hf.chat_template import Thinking, answer_begins
from kvexp.hf.moving_rope import MovingRope
from kvexp.hf.traits import max_positions, traits_of
from kvexp.retrieval.layer import retrieval_stats
from kvexp.util.errors import CacheError, ConfigError, NotFinite, Rule, refuse
from kvexp.util.fields import AtLeast, Range, check_fields
from kvexp.util.output import size


def check_prompts(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """ConfigError for prompts that are not rows of token ids the model knows."""
    if _text(prompts):
        raise ConfigError("prompts must be lists of token ids, one per row: tokenize first (tokenizer(text).input_ids)")
    if not prompts:
        raise ConfigError("no prompts were given")
    check_tokens(model, prompts)


def real_prompts(
    model: PreTrainedModel,
    prompts: Any,
    attention_mask: Any,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[list[int]]:
    """The prompts as lists of token ids without padding.

    prompts: a text, a chat (messages with role and content), token ids, a batch of one of these, a tensor with its
    mask, or a tokenizer's output as a whole. attention_mask: of each prompt, 0 for padding; None: a tokenizer's output
    has its own, and other prompts have no padding. ConfigError for a mask of another shape, for text or chats without a
    tokenizer, and for prompts without a mask that look padded.
    """
    if isinstance(prompts, Mapping):
        if "content" in prompts:
            raise ConfigError("a chat is a list of messages: write [{...}] in place of one message")
        if "input_ids" not in prompts:
            raise ConfigError(f"prompts has no input_ids; it holds {', '.join(map(str, prompts))}")
        attention_mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
        prompts = prompts["input_ids"]
    prompts = _tokenized(_as_lists(prompts), tokenizer)
    if not isinstance(prompts, Sequence):
        raise ConfigError(
            f"a prompt must be a text, a list of messages or token ids, or a batch of these, got {prompts!r}"
        )
    for prompt in prompts:
        if not isinstance(prompt, list | tuple) or not all(type(token) is int for token in prompt):
            raise ConfigError(f"token ids must be whole numbers, a list of them for each prompt, got {prompt!r:.80}")
    check_prompts(model, prompts)
    if attention_mask is None:
        _check_unpadded(model, prompts, tokenizer)
        return [list(prompt) for prompt in prompts]
    masks = _as_lists(attention_mask)
    masks = [masks] if masks and isinstance(masks[0], int | float) else masks  # of one prompt given by itself
    shapes = [len(prompt) for prompt in prompts], [len(mask) if isinstance(mask, Sequence) else 0 for mask in masks]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"attention_mask must have a 1 or 0 for every token of the prompts: they have {shapes[0]} tokens, it has "
            f"{shapes[1]}"
        )
    if wrong := {int(flag) for mask in masks for flag in mask} - {0, 1}:
        raise ConfigError(f"attention_mask must hold 1 for tokens and 0 for padding, got {min(wrong)}")
    return [[token for token, real in zip(*pair, strict=True) if real] for pair in zip(prompts, masks, strict=True)]


def _tokenized(prompts: Any, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Texts and chats as token ids, one prompt as a batch of one; anything else as it is. prompts: no tensors."""
    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else None
    if isinstance(prompts, str) or isinstance(first, int | Mapping):
        prompts, first = [prompts], prompts  # one text, one row of token ids, one chat
    chats = are_chats(prompts)
    if not isinstance(first, str) and not chats:
        return prompts
    if tokenizer is None:
        raise ConfigError(
            "prompts are texts or messages: give tokenizer= too, or token ids (tokenizer(text).input_ids)"
        )
    if chats and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("prompts are messages, but the tokenizer has no chat template: give texts or token ids")
    if chats:
        return [tokenizer(answer_begins(tokenizer, chat), add_special_tokens=False).input_ids for chat in prompts]
    return [tokenizer(text).input_ids for text in prompts]


def are_chats(prompts: Any) -> bool:
    """Whether prompts are a chat, a list of messages, or a batch of chats."""
    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else None
    return isinstance(first, Mapping) or (isinstance(first, list | tuple) and are_chats(first))


def _as_lists(rows: Any) -> Any:
    """Tensors and arrays, or rows of them, as lists."""
    if hasattr(rows, "tolist"):
        rows = rows.tolist()
    if isinstance(rows, list | tuple):
        return [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    return rows


def _check_unpadded(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """ConfigError for prompts that look padded: padding would be read as if somebody had written it.

    A padding token that begins or ends texts too is one token there; one that ends them, in a batch of one width, of
    all of them.
    """
    ends = {getattr(tokenizer, "eos_token_id", None), *eos_ids(model, "model")}
    begins = {getattr(tokenizer, "bos_token_id", None), model.config.bos_token_id} - ends
    text_ids = begins | ends
    pad_ids = {getattr(tokenizer, "pad_token_id", None), getattr(model.config, "pad_token_id", None)} - {None}
    one_width = len(prompts) > 1 and len({len(prompt) for prompt in prompts}) == 1
    for pad in pad_ids or text_ids - {None}:
        for side, rows in (("left", prompts), ("right", [prompt[::-1] for prompt in prompts])):
            runs = [next((n for n, token in enumerate(prompt) if token != pad), len(prompt)) for prompt in rows]
            usual = min(int(pad in text_ids), *runs) if one_width and pad not in begins else int(pad in text_ids)
            for row, run in enumerate(runs):
                if run > usual and len(rows[row]) > 1:
                    raise ConfigError(
                        f"row {row} of the prompts has {run} padding tokens (id {pad}) on the {side}, which would "
                        "count as prompt: give attention_mask= (the tokenizer's), or prompts without padding"
                    )


def _text(rows: Any) -> bool:
    """Whether `rows` is a text or a single row of token ids, where a list of rows is wanted."""
    return isinstance(rows, str | Tensor) or any(isinstance(row, str | int) for row in rows)


def check_tokens(model: PreTrainedModel, rows: Sequence[Sequence[int]], what: str = "") -> None:
    """ConfigError for a token id outside the model's vocabulary.

    rows: token ids; what: the beginning of the message.
    """
    size = model.get_input_embeddings().num_embeddings
    for row, ids in enumerate(rows):
        wrong = [token for token in ids if not 0 <= int(token) < size]
        if wrong:
            raise ConfigError(f"{what}row {row} holds token id {wrong[0]}, the model knows 0 to {size - 1}")


def question_lengths(model: PreTrainedModel, rows: int, questions: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each row's question; ConfigError for questions that are not one row of token ids per prompt."""
    if _text(questions):
        raise ConfigError("questions must be lists of token ids, one per row: tokenize first")
    if len(questions) != rows:
        raise ConfigError(f"got {len(questions)} questions for {rows} prompts: give one for each, or None")
    check_tokens(model, questions, "the question of ")
    return [len(question) for question in questions]


def equal_length(lengths: Sequence[int]) -> int:
    """The common length of a batch's questions; ConfigError where they differ, since padding would count as tokens."""
    if len(set(lengths)) > 1 or 0 in lengths:
        raise ConfigError(
            f"questions of {min(lengths)} to {max(lengths)} tokens: the questions of one batch must be of equal length "
            "and not empty; ask others in a batch of their own (PrefilledContext.fork)"
        )
    return lengths[0]


def seeds_per_row(seeds: int | Sequence[int], rows: int) -> list[int]:
    """One seed per row, from one seed or one per row; ConfigError for other numbers of seeds."""
    try:
        wanted = [operator.index(seeds)] * rows if not isinstance(seeds, Sequence | range) else list(seeds)
        result = [operator.index(seed) for seed in wanted]
    except TypeError as error:
        raise ConfigError(f"seeds must be a whole number or one per row, got {seeds!r}") from error
    if len(result) != rows:
        raise ConfigError(f"got {len(result)} seeds for a batch of {rows} rows: give one, or one per row")
    if any(not 0 <= seed < 1 << 63 for seed in result):
        raise ConfigError("seeds must be between 0 and 2**63 - 1")
    return result


def check_bounded(
    config: CacheConfig, prompts: Sequence[Sequence[int]], num_beams: int, chunk: int | None
) -> int | None:
    """The columns of a forward of these prompts; ConfigError where they cannot be evicted between chunks and are to be.

    chunk: the prefill_chunk asked for. Chunks of a shorter prompt would be cut by its padding, and what it keeps
    would depend on its neighbours.
    """
    if config.bounded_chunk is None:
        return chunk
    if chunk is not None:
        raise ConfigError(
            f"prefill_chunk={chunk} has no effect with bounded_chunk={config.bounded_chunk}: leave it out"
        )
    if num_beams > 1:
        raise ConfigError(f"num_beams={num_beams}: a prompt that is evicted between chunks is read by one row: set 1")
    if len(lengths := {len(prompt) for prompt in prompts}) > 1:
        raise ConfigError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens: they must be of equal length where they are evicted "
            "between chunks (bounded_chunk); read them one by one"
        )
    return config.bounded_chunk


def check_rows(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int, chunk: int | None = None) -> None:
    """ConfigError where the model would compute a row otherwise than alone, or than whole (`MovingRope`).

    new: tokens to come behind the prompts; chunk: columns of a forward, None: all.
    """
    traits, moving = traits_of(model.config), MovingRope.of(model.config)
    if chunk is not None and chunk < max(map(len, prompts)) and traits.whole_prompts:
        raise ConfigError(
            f"states of {traits.title} are right only where a prompt is fed in one forward: leave prefill_chunk at null"
        )
    if moving is not None:
        moving.check_prompts([len(prompt) for prompt in prompts], new, chunk=chunk)


def check_length(model: PreTrainedModel, length: int, new: int, beyond_context: bool) -> None:
    """ConfigError where `length` columns and `new` tokens are more than the model holds, unless beyond_context."""
    # The last new token is never fed back, so it needs no position.
    holds = max_positions(model.config)
    if not beyond_context and length + new - 1 > holds:
        raise ConfigError(
            f"the prompt has {length} tokens and max_new_tokens={new}, the model holds {holds}: shorten the prompt, "
            "lower max_new_tokens, or say beyond_context=True (not for learned positions)"
        )


def rows_that_fit(
    model: PreTrainedModel, lengths: Sequence[int], new: Sequence[int], beyond_context: bool
) -> list[int]:
    """How many rows, one group behind the other, the model holds together; lengths, new: tokens of each row.

    All rows of a batch are fed as many tokens as the one with most to come, the longest prompt's row too. ConfigError
    where a row is more than the model holds by itself.
    """
    groups: list[int] = []
    most_length = most_new = 0
    for length, count in zip(lengths, new, strict=True):
        check_length(model, length, count, beyond_context)
        most_length, most_new = max(most_length, length), max(most_new, count)
        if groups and (beyond_context or most_length + most_new - 1 <= max_positions(model.config)):
            groups[-1] += 1
        else:
            groups.append(1)
            most_length, most_new = length, count
    return groups


def pad_left(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left to ids and mask [B, columns] int64; mask is 0 for padding."""
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"row {row} of the batch has an empty prompt: every prompt needs at least one token")
    columns = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), columns), pad, dtype=torch.int64)
    mask = torch.zeros(len(prompts), columns, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, columns - len(prompt) :] = torch.as_tensor(list(prompt))
        mask[row, columns - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id used for padding: the tokenizer's or the model's padding token, else an end token, else 0."""
    for value in [getattr(owner, "pad_token_id", None) for owner in (tokenizer, model.config)] + eos_ids(
        model, "model"
    ):
        if isinstance(value, int) and 0 <= value < model.config.vocab_size:
            return value
    return 0


def eos_ids(model: PreTrainedModel, eos: int | Sequence[int] | str | None) -> list[int]:
    """The ids of end tokens: `eos` as a list, or the model's own for "model"."""
    if isinstance(eos, str):  # "model": GenerationParams lets no other word pass
        model_eos: Any = getattr(model.generation_config, "eos_token_id", None)
        eos = model_eos if model_eos is not None else getattr(model.config, "eos_token_id", None)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


class SeededGumbelSampler(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise of (row seed, step, token) to logits, so that their arg max is an exact sample of the softmax.

    Used as the last processor of a greedy generation: a row draws the same tokens alone or in any batch. seeds [R]:
    int64; prompt_columns: width of the prompt, so that the first new token is step 0.
    """

    def __init__(self, seeds: Tensor, prompt_columns: int) -> None:
        self.seeds, self.prompt_columns = seeds, prompt_columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = torch.full_like(self.seeds, input_ids.shape[1] - self.prompt_columns)
        tokens = torch.arange(scores.shape[-1], device=scores.device).expand(len(self.seeds), -1)
        # Layer -1 keeps these draws apart from the noise inside the model under the same seed.
        return scores.float() + gumbel(self.seeds, -1, step, tokens)


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
    """How tokens are chosen (greedily, by seeded sampling or by beam search), and how many.

    num_beams > 1: beam search; sample: draw from softmax with temperature, top_k, top_p (never with beams).
    eos: token id, several, "model" for the model's own, or None for never stopping. prefill_chunk: prompt columns per
    forward (None: all at once). thinking: tags of what is no part of the answer yet, so that no stop string ends it;
    kvexp takes them from the chat template.
    """

    max_new_tokens: Annotated[int, AtLeast(1)] = 128
    min_new_tokens: Annotated[int, AtLeast(0)] = 0
    num_beams: Annotated[int, Range(1, MOST_BEAMS)] = 1
    early_stopping: bool | Literal["never"] = True
    length_penalty: float = 1.0
    sample: bool = False
    temperature: float = 1.0
    top_k: Annotated[int, AtLeast(0)] = 0  # 0: no limit
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    eos: int | Sequence[int] | str | None = "model"
    stop_strings: tuple[str, ...] = ()
    prefill_chunk: Annotated[int, AtLeast(1)] | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        refuse(self, REFUSED)


def _are_tokens(eos: Any) -> bool:
    """Whether `eos` is a token id or several."""
    return all(type(token) is int and token >= 0 for token in (eos if isinstance(eos, list | tuple) else [eos]))


REFUSED: tuple[Rule[GenerationParams], ...] = (
    (
        lambda c: c.min_new_tokens > c.max_new_tokens,
        "min_new_tokens must be between 0 and max_new_tokens={c.max_new_tokens}, got {c.min_new_tokens}",
    ),
    (
        lambda c: c.sample and c.num_beams > 1,
        "sampling with beams is not offered: set sample=false or num_beams=1",
    ),
    (
        lambda c: c.sample and c.temperature <= 0,
        "temperature must be positive, got {c.temperature:g}; sample=false is greedy",
    ),
    (
        lambda c: c.eos not in (None, "model") and not _are_tokens(c.eos),
        "eos must be a token id, a list of them, 'model' or null, got {c.eos!r}",
    ),
    (lambda c: not all(c.stop_strings), "stop_strings must be texts that are not empty, got {c.stop_strings!r}"),
)
# `GenerationParams` under the names that transformers gives them.
OWN_NAMES = {"do_sample": "sample", "eos_token_id": "eos", "prefill_chunk_size": "prefill_chunk"}
_OURS = {field.name for field in fields(GenerationParams)} - {*OWN_NAMES.values(), "thinking"}
GENERATION_NAMES = (*OWN_NAMES, *sorted(_OURS))


def split_options(
    decoding: GenerationParams | None, options: Mapping[str, Any]
) -> tuple[GenerationParams, dict[str, Any]]:
    """(GenerationParams, what is left of the keyword arguments): decoding with the arguments that transformers knows.

    ConfigError for an argument that neither transformers nor `CacheConfig` calls so.
    """
    check_keywords(options, (*OPTIONS, *GENERATION_NAMES))
    ours = {name: value for name, value in options.items() if name in GENERATION_NAMES}
    return with_keywords(decoding, ours), {name: options[name] for name in options if name not in ours}


def with_keywords(decoding: GenerationParams | None, options: Mapping[str, Any]) -> GenerationParams:
    """These parameters, or the defaults, with keyword arguments under transformers' names; ConfigError for others.

    None leaves an argument as it is, but for eos_token_id=None, which never stops.
    """
    check_keywords(options, GENERATION_NAMES)
    kept = {name: value for name, value in options.items() if value is not None or name == "eos_token_id"}
    given = {OWN_NAMES.get(name, name): value for name, value in kept.items()}
    if isinstance(stops := given.get("stop_strings", ()), str | list):
        given["stop_strings"] = (stops,) if isinstance(stops, str) else tuple(stops)
    return replace(decoding or GenerationParams(), **given)


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
    """The stop strings of these parameters, or else of the model's own generation configuration."""
    model_stops = getattr(model.generation_config, "stop_strings", None) or ()
    return decoding.stop_strings or ((model_stops,) if isinstance(model_stops, str) else tuple(model_stops))


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
        settings = copy.deepcopy(model.generation_config)
        check_generation_config(settings)
        if not set_fields(settings, MODEL_PROCESSORS):
            return None
        settings.do_sample, settings.num_beams, settings.remove_invalid_values = False, decoding.num_beams, False
        settings.min_new_tokens = decoding.min_new_tokens or settings.min_new_tokens
        settings._eos_token_tensor = torch.tensor(eos, device=ids.device) if eos else None
        if not eos:
            settings.exponential_decay_length_penalty = None
        padding = (mask == 0).sum(1).tolist()
        lists = []
        for row, pads in zip(ids, padding, strict=True):
            prompt = row[None, pads:]
            row_settings, length = copy.copy(settings), prompt.shape[1]
            row_settings.max_length = length + decoding.max_new_tokens
            if settings.min_new_tokens:
                row_settings.min_length = length + settings.min_new_tokens
            try:
                processors = model._get_logits_processor(
                    row_settings, input_ids_seq_length=length, encoder_input_ids=prompt, device=ids.device
                )
            except (ValueError, TypeError) as error:
                raise ConfigError(f"the model's generation_config.json cannot be followed: {error}") from error
            lists.append(processors)
        return cls(lists, padding)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        beams = len(scores) // len(self.lists)  # 1, or the number of beams
        rows = [
            self.lists[row // beams](input_ids[row : row + 1, self.padding[row // beams] :], scores[row : row + 1])
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
        steps.append(SeededGumbelSampler(torch.tensor(seeds, device=device), columns))
    return LogitsProcessorList(steps)


@dataclass(frozen=True)
class Ending:
    """What ended a row.

    reason, in vLLM's words: "stop" at an end token (its id: token) or a stop string (text), else "length".
    """

    reason: str
    token: int | None = None
    text: str | None = None


class StopStrings:
    """Tells which rows have written a stop string. The prompt is no part of what a row has written.

    strings: the stop strings, none for never stopping; tokenizer: the model's. A row has written a string once the
    text of its new tokens holds it, as lm-eval sees it, special tokens included. thinking: tags of what no stop string
    ends: none inside the thinking, nor the white space behind it. ConfigError where there are strings but no tokenizer.
    """

    def __init__(
        self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None, thinking: Thinking | None = None
    ) -> None:
        if strings and tokenizer is None:
            raise ConfigError("stop_strings need the tokenizer: pass tokenizer=")
        self.strings, self.tokenizer, self.thinking = tuple(strings), tokenizer, thinking
        # A token may be a part of a character, or no text at all. The newest tokens suffice: the search is made anew
        # after every one of them.
        self.window = 16 + 2 * max((len(string.encode()) for string in self.strings), default=0)

    def __bool__(self) -> bool:
        return bool(self.strings)

    def found(self, new: Sequence[int]) -> str | None:
        """The stop string that ends last in the text of a row's new tokens; None: it holds none."""
        if not self.strings:
            return None
        assert self.tokenizer is not None
        text: str = self.tokenizer.decode(list(new[-self.window :]))
        ends = {string: text.rfind(string) + len(string) for string in self.strings if string in text}
        if ends and self.thinking is not None:
            answer = self.thinking.part(list(new), self.tokenizer)
            ends = {} if answer.cut else {string: end for string, end in ends.items() if string in answer.raw}
        return max(ends, key=ends.__getitem__) if ends else None

    def done(self, ids: Tensor, columns: int) -> Tensor:
        """[R] bool: the rows of ids [R, columns + new] that have written a stop string. columns: of the prompt."""
        new = ids[:, columns:]
        rows = (new if self.thinking is not None else new[:, -self.window :]).tolist()
        return torch.tensor([self.found(row) is not None for row in rows], device=ids.device)


def truncate_at_end(
    ids: Tensor, columns: int, eos: Sequence[int], stops: StopStrings
) -> tuple[list[list[int]], list[Ending]]:
    """New tokens of every row of ids [R, columns + new], cut at the row's end, and how it ended.

    The cut is behind the first end token, or behind the token that completes a stop string: what follows is padding.
    columns: of the prompt; eos: ids of end tokens.
    """
    ends = set(eos)
    tokens, endings = [], []
    for new in ids[:, columns:].tolist():
        ending = Ending("length")
        for count, token in enumerate(new, 1):
            if token in ends:
                ending = Ending("stop", token=token)
            elif stops and (text := stops.found(new[:count])):
                ending = Ending("stop", text=text)
            if ending.reason == "stop":
                new = new[:count]
                break
        tokens.append(new)
        endings.append(ending)
    return tokens, endings


PAGE = 16  # tokens, as vLLM's default


@dataclass(frozen=True)
class EvictionStats:
    """What eviction did to one sample.

    slots: live slots per kv head at the row's end, mean over layers and heads. kv_bytes, peak_kv_bytes: the row's share
    of the batch's bytes, with windows and states of layers that kvexp does not evict from.

    first_eviction_step: decode tokens seen when the row first lost a slot (0: at the end of prefill; None: never).
    kept_digest: hash of the positions held in every layer and head. attention_kept: share of the last prompt query's
    attention whose slots survived the first eviction, mean over layers and heads (None: nothing evicted at prefill).
    batch_size: samples that shared the cache; bytes hold their padding too, so compare them at equal batch sizes.

    For a retrieval method, which drops nothing: slots and kept_digest are of the tokens that the last token attended
    to, attention_kept is that of the first new token, first_eviction_step is when a token was first not attended to,
    kv_bytes are those on the device, index included; retrieval: see `retrieval_stats`.

    kv_bytes_at_16: of quantised caches and retrieval methods, kv_bytes with every floating-point number that is not
    quantised counted as 16 bits, whatever dtype ran; None elsewhere, where all numbers are of one dtype.

    page_slots: as slots, of whole pages: PAGE neighbouring tokens in all kv heads of a layer, which an engine frees
    where no head holds any of them. None for a retrieval method.
    """

    slots: float
    slots_by_layer: list[float]
    kv_bytes: int
    peak_kv_bytes: int
    first_eviction_step: int | None
    kept_digest: str
    attention_kept: float | None
    batch_size: int
    retrieval: dict[str, Any] | None = None
    kv_bytes_at_16: int | None = None
    page_slots: float | None = None


@dataclass(frozen=True)
class MixedStats(EvictionStats):
    """What eviction did to one sample of a model whose layers keep different things.

    ledger: how many layers were evicted from ("evicted_layers"), of how many ("layers"), and [bytes now, at the peak]
    of each line of `EvictionCache.ledger`, the row's share.
    """

    ledger: dict[str, Any] = field(default_factory=dict)


def receipts(cache: EvictionCache, ends: Mapping[int, EvictionStats] | None = None) -> list[EvictionStats]:
    """The statistics of every sample of the batch; of a sample's beams, the first stands for all.

    ends: statistics, by sample, of samples that ended before the batch did (`Generation.early_stats`). Bytes of these
    are replaced by the batch's at its end.
    """
    rows = int(cache.sequence.seeds.shape[0]) // cache.sequence.num_beams
    stats = [(ends or {}).get(sample) or receipt_of(cache, sample) for sample in range(rows)]
    held, peak = _bytes(cache, rows)
    now = {"kv_bytes": held, "peak_kv_bytes": peak, "kv_bytes_at_16": _at_16(cache, rows), **_ledger(cache, rows)}
    return [replace(receipt, **now) for receipt in stats]


def receipt_of(cache: EvictionCache, sample: int) -> EvictionStats:
    """The statistics of one sample (its index in the batch) as of now.

    To be taken when the sample ends: the padding that is fed to it afterwards is held and evicts like any token.
    """
    beams = cache.sequence.num_beams
    row, rows = sample * beams, int(cache.sequence.seeds.shape[0]) // beams
    held = [state.kept_positions(slice(row, row + 1))[0] for state in cache.layer_states]
    by_layer = [sum(map(len, heads)) / len(heads) for heads in held]
    pages = [len({position // PAGE for head in heads for position in head}) for heads in held]
    retrieval = retrieval_stats(cache.layer_states, range(row, row + beams))
    watched = [float(s.retained_attention[row]) for s in cache.layer_states if s.retained_attention is not None]
    starts = [s.first_eviction[row] for s in cache.layer_states if s.first_eviction]
    steps = [step for step in starts if step is not None]
    kv_bytes, peak_kv_bytes = _bytes(cache, rows)
    ledger = _ledger(cache, rows)
    return (MixedStats if ledger else EvictionStats)(
        slots=sum(by_layer) / len(by_layer),
        slots_by_layer=by_layer,
        kv_bytes=kv_bytes,
        peak_kv_bytes=peak_kv_bytes,
        first_eviction_step=min(steps) if steps else None,
        kept_digest=hashlib.sha256(repr(held).encode()).hexdigest()[:16],
        attention_kept=sum(watched) / len(watched) if watched else None,
        batch_size=rows,
        retrieval=retrieval,
        kv_bytes_at_16=_at_16(cache, rows),
        page_slots=PAGE * sum(pages) / len(pages) if retrieval is None else None,
        **ledger,
    )


def failed_fits(cache: EvictionCache) -> list[dict[str, int]]:
    """Count the heads of all layers whose kept slots could not be rewritten, by sample; {} for other methods."""
    beams, rewrites = cache.sequence.num_beams, bool(cache.config.rewritten)
    layers = [state for state in cache.layer_states if isinstance(state, EvictionLayer)]
    counts = [state.failed.sum(-1).cpu() for state in layers if rewrites and state.failed is not None]
    by_row = sum(counts, torch.zeros_like(cache.sequence.seeds, device="cpu"))[::beams].tolist()
    return [{"fits_failed": count} if rewrites else {} for count in by_row]


def _bytes(cache: EvictionCache, rows: int) -> tuple[int, int]:
    """A sample's equal share, of `rows`, of all bytes now and at the peak: slots, windows and states."""
    tracker, other = cache.memory_tracker, cache.other_bytes
    return (tracker.bytes + other) // rows, (tracker.peak_bytes + other) // rows


def _ledger(cache: EvictionCache, rows: int) -> dict[str, Any]:
    """The field of `MixedStats`, with a sample's equal share of bytes, of `rows`; empty for other models."""
    traits = cache.traits
    if not (traits.composed or traits.evicts_in_windows or traits.latent):
        return {}
    lines = {name: [now // rows, peak // rows] for name, (now, peak) in cache.ledger.items()}
    return {"ledger": {"evicted_layers": len(traits.held), "layers": len(traits.layers), **lines}}


def _at_16(cache: EvictionCache, rows: int) -> int | None:
    """A sample's share, of `rows`, of the layers' bytes_at_16, windows and states; None where a layer has none."""
    sizes = [state.bytes_at_16 for state in cache.layer_states]
    known = [held for held in sizes if held is not None]
    return (sum(known) + cache.other_bytes_at_16) // rows if len(known) == len(sizes) else None


@dataclass
class Timing:
    """Seconds from the call to the first and second token, then per output token; NaN for too few tokens."""

    ttft_s: float = float("nan")
    tt2t_s: float = float("nan")
    tpot_s: float = float("nan")

    @classmethod
    def of(cls, start: float, stamps: list[float]) -> Timing:
        """The times of tokens known at `stamps`, counted from `start`; both in `time.perf_counter()` seconds."""
        nan = float("nan")
        first = stamps[0] - start if stamps else nan
        second = stamps[1] - start if len(stamps) > 1 else nan
        per_token = (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else nan
        return cls(first, second, per_token)


@dataclass
class Generation:
    """The answers to a batch of B prompts.

    tokens: new token ids per row, cut after the end token or stop string. endings: how each row ended.
    sequences [B, columns]: prompts and new tokens, padded. timing: of the whole batch. memory_tracker: bytes.
    cache: as the last step left it. beam_scores: one per row, with beams. logits: [B, V] per step, if asked for.
    early_stats: statistics, by row, of rows that ended before the batch did, as of then (`receipts` takes them).
    cuda_graph: what became of cache.graph=auto, in plain words; None where it is off, and on a CPU.
    texts: the answers as text, without special tokens; empty where no tokenizer was given.
    """

    tokens: list[list[int]]
    endings: list[Ending]
    sequences: Tensor
    timing: Timing
    memory_tracker: MemoryTracker
    cache: EvictionCache
    beam_scores: list[float] | None = None
    logits: tuple[Tensor, ...] = field(default=(), repr=False)
    early_stats: dict[int, EvictionStats] = field(default_factory=dict, repr=False)
    cuda_graph: str | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first answer as text; ConfigError where no tokenizer was given."""
        if not self.texts:
            raise ConfigError("no tokenizer was given to generate: give tokenizer=, or decode tokens yourself")
        return self.texts[0]

    def decoded(self, tokenizer: PreTrainedTokenizerBase | None) -> Generation:
        """Fill in `texts` and return self; without a tokenizer they stay empty."""
        if tokenizer is not None:
            self.texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in self.tokens]
        return self

    def __repr__(self) -> str:
        shown = repr(self.texts[0] if self.texts else self.tokens[0])
        more = f" and {len(self.tokens) - 1} more" if len(self.tokens) > 1 else ""
        config, later = self.cache.config, self.timing.tpot_s
        sizes = {name: getattr(config.budget, name, None) for name in ("kv_ratio", "tokens", "threshold")}
        budget = [f"{name}={value}" for name, value in sizes.items() if value is not None]
        peak = size(self.memory_tracker.peak_bytes + self.cache.other_bytes)
        cost = ", ".join([config.method.name, *budget, f"KV peak {peak}"])
        times = f"first token after {self.timing.ttft_s:.2f} s"
        times += "" if math.isnan(later) else f", then {1000 * later:.3g} ms each"
        return f"Generation: {shown[:100]}{'…' * (len(shown) > 100)}{more}\n  {cost}\n  {times}"


def check_finite(cache: EvictionCache) -> None:
    """NotFinite where logits or scores held NaN or inf: tokens or slots were then chosen by no meaningful number.

    ConfigError where priorities of a user's method were NaN.
    """
    if not cache.logits_were_finite():
        raise NotFinite("the logits of this run hold NaN or inf, no number can be trusted")
    if any(bool(flag) for state in cache.layer_states if (flag := getattr(state, "nan_flag", None)) is not None):
        raise nan_error(type(cache.config.method), "priority")
    if not cache.scores_are_finite():
        raise NotFinite("the scores of this run hold NaN: the model produced NaN or inf, no number can be trusted")


def check_seq_length(cache: EvictionCache, columns: int, steps: int) -> None:
    """CacheError where the cache has not seen the prompt's `columns` and `steps` new tokens but the last."""
    seen = cache.get_seq_length()
    if seen != columns + steps - 1:
        raise CacheError(
            f"the cache has seen {seen} columns, {columns + steps - 1} were expected: this version of transformers "
            "feeds the model differently, no number of this run can be trusted"
        )
