"""Arguments of generation: token ids, seeds and lengths, checked before the model runs, and padded to one batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import CacheConfig
from kvexp.errors import ConfigError
from kvexp.models.families import max_positions


def check_prompts(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """ConfigError for prompts that are not rows of token ids the model knows."""
    if _text(prompts):
        raise ConfigError("prompts must be lists of token ids, one per row: tokenize first (tokenizer(text).input_ids)")
    if not prompts:
        raise ConfigError("no prompts were given")
    check_tokens(model, prompts)


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


def check_length(model: PreTrainedModel, prompt: int, new: int, beyond_context: bool) -> None:
    """ConfigError where `prompt` columns and `new` tokens are more than the model holds, unless beyond_context."""
    # The last new token is never fed back, so it needs no position.
    holds = max_positions(model.config)
    if not beyond_context and prompt + new - 1 > holds:
        raise ConfigError(
            f"the prompt has {prompt} tokens and max_new_tokens={new}, the model holds {holds}: shorten the prompt, "
            "lower max_new_tokens, or say beyond_context=True (not for learned positions)"
        )


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
