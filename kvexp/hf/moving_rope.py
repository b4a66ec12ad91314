"""RoPE whose frequencies depend on the longest row of a forward: which models have it, which forwards are right.

transformers chooses the frequencies of `dynamic` and `longrope` by the largest position of a forward, in all of its
rows. What is computed for a row is what the row alone gives only where all of its forwards have the same frequencies as
they would have without the other rows: rows of equal length, or none on the other side of the limit. A prompt fed in
parts is turned by the frequencies of each part's end in place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvexp.core import CacheConfig
from kvexp.hf.traits import all_rope_parameters, text_config
from kvexp.retrieval.method import Retrieval
from kvexp.util.errors import CacheError, ConfigError


@dataclass(frozen=True)
class MovingRope:
    """The rule of one model. kind: dynamic or longrope; limit: tokens up to which no frequency changes."""

    kind: str
    limit: int

    @classmethod
    def of(cls, config: Any) -> MovingRope | None:
        """The rule of a Hugging Face config; None where a token is always turned by the same frequencies."""
        text = text_config(config)
        for rope in all_rope_parameters(config).values():
            kind = str(rope.get("rope_type", "default"))
            if kind == "longrope":
                return cls(kind, int(rope.get("original_max_position_embeddings") or text.max_position_embeddings))
            if "dynamic" in kind:
                return cls(kind, int(text.max_position_embeddings))
        return None

    def same(self, lengths: Sequence[int]) -> bool:
        """Whether forwards that end after so many tokens turn by the same frequencies."""
        least, most = min(lengths), max(lengths)
        if most <= self.limit or least == most:
            return True
        return self.has_sides and least > self.limit

    @property
    def has_sides(self) -> bool:
        """Whether forwards of different ends turn alike on one side of the limit, so that texts may come in parts."""
        return self.kind == "longrope"

    @property
    def why(self) -> str:
        """Why forwards of this RoPE are limited, as the beginning of an error."""
        return (
            f"rope_type={self.kind} chooses its frequencies by the longest row of a forward, from {self.limit + 1} "
            "tokens on"
        )

    def check_prompts(self, lengths: Sequence[int], new: int, *, chunk: int | None = None) -> None:
        """ConfigError for prompts of so many tokens that would change each other, or that are fed in chunks.

        new: tokens to come behind each.
        """
        if chunk is not None and not self.same([min(chunk, *lengths), *lengths]):
            raise ConfigError(
                f"{self.why}, and chunks of {chunk} tokens would be turned by others than the prompt of "
                f"{max(lengths)}: feed prompts whole (no prefill_chunk, no bounded_chunk)"
                + (f", or of at most {self.limit} tokens" if self.has_sides else "")
            )
        if len(set(lengths)) > 1 and not self.same([*lengths, max(lengths) + new]):
            raise ConfigError(
                f"{self.why}: prompts of {min(lengths)} to {max(lengths)} tokens in one batch would change each other; "
                "give them one by one, or prompts of equal length together"
            )


def check_turns(moving: MovingRope | None, feature: str) -> None:
    """ConfigError where `feature` turns keys or queries and no table of frequencies holds for all of them."""
    if moving is not None:
        raise ConfigError(f"{feature} cannot work with rope_type {moving.kind!r}: its frequencies change with length")


def check_rope(moving: MovingRope | None, cache: CacheConfig) -> None:
    """ConfigError for a cache that a model's RoPE excludes: it turns keys or queries, or reads prompts not once whole.

    moving: the model's, None where its RoPE excludes nothing.
    """
    if moving is None:
        return
    if (feature := turned_by(cache)) is not None:
        check_turns(moving, feature)
    if moving.has_sides:
        return  # `check_prompts` and `RepeatedPrompt.check_room` know on which side a prompt is
    if cache.bounded_chunk is not None:
        raise ConfigError(f"{moving.why}, so a prompt is read whole: set prefill=whole (bounded_chunk=None)")
    if cache.method.needs.second_pass is not None:
        raise ConfigError(
            f"{moving.why}, so method {cache.method.name} cannot read the prompt a second time behind itself: choose "
            "another method"
        )


def turned_by(cache: CacheConfig) -> str | None:
    """What of a cache needs the model's RoPE, to turn keys or queries by it, as the subject of an error; or None."""
    method = cache.method
    if cache.renumbered or (isinstance(method, Retrieval) and method.clamps_positions):
        return "positions=renumbered"
    if method.needs.queries_after is not None or method.needs.calibration:
        return f"method {method.name}, which turns queries back,"
    return f"method {method.name}, which turns keys back," if method.needs.rope else None


def check_forward(moving: MovingRope, width: int, positions: Tensor | None, mask: Tensor | None, cache: Any) -> None:
    """CacheError for a forward in which a row would be turned by other frequencies than alone, or than its prompt.

    width: new columns Q; positions [B or 1, Q] of them, None: the columns' own, in all rows. mask [B, columns so
    far]: 0 for padding, or None.
    """
    sequence = getattr(cache, "sequence", None)
    past = int(cache.get_seq_length()) if cache is not None else 0
    if positions is None:
        first, ends = past, [past + width]
        if mask is not None and mask.shape[-1] == past + width:  # by their columns rows are turned as the longest is
            ends += mask.ne(0).sum(-1).tolist()
    else:
        first = int(positions[:, 0].min())
        ends = (positions.max(-1).values + 1).tolist()
    if len(ends) > 1 and not moving.same(ends):
        raise CacheError(
            f"{moving.why}: rows that end at {min(ends)} to {max(ends)} tokens in one forward would change each other; "
            "give prompts one by one, or prompts of equal length together"
        )
    columns: Any = None if sequence is None else sequence.prompt_columns
    parted = columns is not None and past < columns and past + width < columns
    if (past and width > 1 and not moving.same([first + 1, *ends])) or (parted and not moving.same([*ends, columns])):
        raise CacheError(
            f"{moving.why}: tokens {first + 1} to {max(ends)} were fed in one forward of a longer text; feed a prompt "
            "whole, and what follows it token by token"
        )


def reset_frequencies(model: nn.Module) -> None:
    """Set rotary modules of rope_type=dynamic back to what a new model has.

    They keep the frequencies of the longest forward so far, by which the next row would be turned.
    """
    module: Any
    for module in model.modules():
        if "dynamic" in str(getattr(module, "rope_type", "")) and hasattr(module, "original_inv_freq"):
            fresh = module.original_inv_freq.to(module.inv_freq.device)
            module.register_buffer("inv_freq", fresh, persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len
