"""Arguments of generation: token ids, seeds and lengths, checked before the model runs, and padded to one batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import CacheConfig
from kvexp.errors import ConfigError
from kvexp.models.families import max_positions
from kvexp.models.moving_rope import MovingRope


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
    """The prompts without padding: lists of token ids, a tensor with its mask, or a tokenizer's output as a whole.

    attention_mask: of each prompt, 0 for padding; None: a tokenizer's output has its own, and other prompts have no
    padding. ConfigError for a mask of another shape, and for prompts without a mask that look padded.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise ConfigError(f"prompts has no input_ids; it holds {', '.join(map(str, prompts))}")
        attention_mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
        prompts = prompts["input_ids"]
    prompts = _as_lists(prompts)
    check_prompts(model, prompts)
    if attention_mask is None:
        _check_unpadded(model, prompts, tokenizer)
        return [list(row) for row in prompts]
    masks = _as_lists(attention_mask)
    shapes = [len(row) for row in prompts], [len(row) if isinstance(row, Sequence) else 0 for row in masks]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"attention_mask must have a 1 or 0 for every token of the prompts: they have {shapes[0]} tokens, it has "
            f"{shapes[1]}"
        )
    if wrong := {int(each) for row in masks for each in row} - {0, 1}:
        raise ConfigError(f"attention_mask must hold 1 for tokens and 0 for padding, got {min(wrong)}")
    return [[token for token, real in zip(*pair, strict=True) if real] for pair in zip(prompts, masks, strict=True)]


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
    own = {getattr(tokenizer, "pad_token_id", None), model.config.pad_token_id} - {None}
    one_width = len(prompts) > 1 and len({len(row) for row in prompts}) == 1
    for pad in own or text_ids - {None}:
        for side, rows in (("left", prompts), ("right", [row[::-1] for row in prompts])):
            runs = [next((n for n, token in enumerate(row) if token != pad), len(row)) for row in rows]
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
        wrong = [t for t in ids if not 0 <= int(t) < size]
        if wrong:
            raise ConfigError(f"{what}row {row} holds token id {wrong[0]}, the model knows 0 to {size - 1}")


def check_questions(model: PreTrainedModel, rows: int, questions: Sequence[Sequence[int]]) -> int:
    """The common length of a batch's questions; ConfigError where they differ, since padding would count as tokens."""
    if _text(questions):
        raise ConfigError("questions must be lists of token ids, one per row: tokenize first")
    if len(questions) != rows:
        raise ConfigError(f"got {len(questions)} questions for {rows} prompts: give one for each, or None")
    check_tokens(model, questions, "the question of ")
    lengths = {len(q) for q in questions}
    if len(lengths) > 1 or 0 in lengths:
        raise ConfigError(
            f"questions of {min(lengths)} to {max(lengths)} tokens: those of one batch must be of equal length and not "
            "empty; ask those of another length apart (Context.fork)"
        )
    return lengths.pop()


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

    chunk: as asked for beside the configuration. Chunks of a shorter prompt would be cut by its padding, and what it
    keeps would go by its neighbours.
    """
    if config.bounded_chunk is None:
        return chunk
    if chunk is not None:
        raise ConfigError(
            f"prefill_chunk={chunk} has no effect beside bounded_chunk={config.bounded_chunk}: leave it out"
        )
    if num_beams > 1:
        raise ConfigError(f"num_beams={num_beams}: a prompt that is evicted between chunks is read by one row: set 1")
    if len(lengths := {len(prompt) for prompt in prompts}) > 1:
        raise ConfigError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens: those of one batch must be of equal length where they"
            " are evicted between chunks (bounded_chunk); read them one by one"
        )
    return config.bounded_chunk


def check_rows(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int, chunk: int | None = None) -> None:
    """ConfigError where the model would compute a row otherwise than alone, or than whole (`MovingRope`).

    new: tokens to come behind the prompts; chunk: columns of a forward, None: all.
    """
    moving = MovingRope.of(model.config)
    if moving is not None:
        moving.check_prompts([len(prompt) for prompt in prompts], new, chunk=chunk)


def check_length(model: PreTrainedModel, prompt: int, new: int, beyond_context: bool) -> None:
    """ConfigError where `prompt` columns and `new` tokens are more than the model holds, unless beyond_context."""
    # The last new token is never fed back, so it needs no position.
    holds = max_positions(model.config)
    if not beyond_context and prompt + new - 1 > holds:
        raise ConfigError(
            f"the prompt has {prompt} tokens and max_new_tokens={new}, the model holds {holds}: shorten the prompt, "
            "lower max_new_tokens, or say beyond_context=True (not for learned positions)"
        )


def rows_that_fit(
    model: PreTrainedModel, prompts: Sequence[int], new: Sequence[int], beyond_context: bool
) -> list[int]:
    """How many rows, one group behind the other, the model holds together; prompts, new: tokens of each row.

    All rows of a batch are fed as many tokens as the one with most to come, the longest prompt's row too. ConfigError
    where a row is more than the model holds by itself.
    """
    groups: list[int] = []
    most_prompt = most_new = 0
    for length, count in zip(prompts, new, strict=True):
        check_length(model, length, count, beyond_context)
        most_prompt, most_new = max(most_prompt, length), max(most_new, count)
        if groups and (beyond_context or most_prompt + most_new - 1 <= max_positions(model.config)):
            groups[-1] += 1
        else:
            groups.append(1)
            most_prompt, most_new = length, count
    return groups


def pad_left(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left to ids and mask [B, columns] int64; mask is 0 for padding."""
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"row {row} of the batch has an empty prompt: every prompt needs at least one token")
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id used for padding: the tokenizer's or the model's padding token, else an end token, else 0."""
    for value in (getattr(tokenizer, "pad_token_id", None), model.config.pad_token_id, *eos_ids(model, "model")):
        if isinstance(value, int) and 0 <= value < model.config.vocab_size:
            return value
    return 0


def eos_ids(model: PreTrainedModel, eos: int | Sequence[int] | str | None) -> list[int]:
    """The ids of end tokens: `eos` as a list, or the model's own for "model"."""
    if isinstance(eos, str):  # "model": GenerationParams lets no other word pass
        own: Any = getattr(model.generation_config, "eos_token_id", None)
        eos = own if own is not None else getattr(model.config, "eos_token_id", None)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)
