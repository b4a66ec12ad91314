"""Where and when: the position ids and steps of the forward in progress, shared by all layers of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvexp.errors import CacheError, ConfigError


class SequenceState:
    """Counts columns and gives every real token its position id; padding gets -1.

    seen: columns before the current forward; steps: decode columns before it; counts [B]: real tokens so far.
    A prompt ends with column `prompt_columns` (None: with the first forward, so a prompt fed in chunks needs it).
    """

    def __init__(
        self,
        *,
        prompt_columns: int | None = None,
        max_new_tokens: int | None = None,
        max_positions: int | None = None,
        num_beams: int = 1,
        seeds: int | Sequence[int] = 0,
    ) -> None:
        if prompt_columns is not None and prompt_columns < 1:
            raise ConfigError(f"a prompt needs at least one token, got prompt_tokens={prompt_columns}")
        if num_beams < 1:
            raise ConfigError(f"num_beams must be at least 1, got {num_beams}")
        self.prompt_columns, self.max_new_tokens = prompt_columns, max_new_tokens
        self.max_positions, self.num_beams, self.initial_seeds = max_positions, num_beams, seeds
        self.several_tokens_allowed = False
        self._declared_prompt = prompt_columns
        self.reset()

    def join(
        self, columns: int, batch: int, width: int, mask: Tensor | None, device: torch.device, layers: int
    ) -> Tensor:
        """A layer that has seen `columns` columns takes part in the forward in progress, or starts the next one.

        Returns the position ids [B, Q] of its columns, -1 for padding.
        """
        if columns == self.end:
            self.begin(batch, width, mask, device, layers)
        elif columns != self.seen:
            raise CacheError("this layer missed a forward: after an interrupted forward start again with a new cache")
        return self.positions(device)

    def arrive(self) -> None:
        """A layer has finished the forward in progress."""
        self.arrived += 1

    def reset(self) -> None:
        """Forget the prompt; a new one may follow."""
        self.prompt_columns = self._declared_prompt
        self.seen = self.end = self.arrived = 0
        self.prompt_lengths: list[int] = []
        self.padded = False
        self.counts: Tensor | None = None
        self.seeds: Tensor = torch.zeros(0)
        self._positions: dict[torch.device, Tensor] = {}

    @property
    def in_prompt(self) -> bool:
        """Is the forward in progress part of the prompt?"""
        return self.prompt_columns is not None and self.end <= self.prompt_columns

    @property
    def prompt_complete(self) -> bool:
        return self.prompt_columns is not None and self.end >= self.prompt_columns

    @property
    def steps(self) -> int:
        """Decode columns before this forward."""
        return max(0, self.seen - self.prompt_columns) if self.prompt_columns is not None else 0

    @property
    def query_steps(self) -> list[int]:
        """Decode step of every query row of this forward, 0 for prompt rows."""
        width = self.end - self.seen
        return [0] * width if self.in_prompt else [self.steps + 1 + j for j in range(width)]

    def begin(self, batch: int, width: int, mask: Tensor | None, device: torch.device, layers: int = 1) -> None:
        """Start the next forward of `width` columns. mask: [B, columns so far] or None; zero marks padding.

        layers: how many must have finished the forward before.
        """
        if self.end and self.arrived != layers:
            raise CacheError(
                f"the last forward reached {self.arrived} of {layers} layers, so their caches are out of step: "
                "after an interrupted forward start again with a new cache"
            )
        self.seen = self.end
        if self.counts is None:
            self.counts = torch.zeros(batch, dtype=torch.int64, device=device)
            seeds = self.initial_seeds
            rows = [seeds] * batch if isinstance(seeds, int) else [s for s in seeds for _ in range(self.num_beams)]
            if batch % self.num_beams:
                raise ConfigError(
                    f"a batch of {batch} rows is not a whole number of samples of num_beams={self.num_beams}"
                )
            if len(rows) != batch:
                raise ConfigError(f"got {len(rows)} seeds for a batch of {batch} rows: give one, or one per row")
            self.seeds = torch.tensor(rows, dtype=torch.int64, device=device)
            self.prompt_columns = self.prompt_columns or width
        self._check(batch, width)
        self.arrived = 0
        self.end = self.seen + width
        counts = self.counts
        ahead = torch.arange(width, device=device)
        positions = counts[:, None] + ahead
        new = mask[:, -width:].to(device=device, dtype=torch.bool) if mask is not None and mask.shape[-1] else None
        if new is not None:
            if self.in_prompt and bool((~new & ((counts > 0)[:, None] | (new.cumsum(1) > 0))).any()):
                raise ConfigError("a prompt has padding after its first token: pad on the left (padding_side='left')")
            positions = torch.where(new, counts[:, None] + new.cumsum(1) - 1, -1)
            self.counts = counts + new.sum(1)
        else:
            self.counts = counts + width
        self._positions = {device: positions}
        if self.in_prompt and self.end == self.prompt_columns:
            self._close_prompt()

    def note_losses(self, noted: list[int | None], limits: Sequence[int]) -> list[int | None]:
        """Per row the decode tokens seen when it first had more than `limits` tokens (None: not yet)."""
        noted = noted or [None] * len(self.prompt_lengths)
        decoded = self.end - (self.prompt_columns or 0)
        lengths = [length + decoded for length in self.prompt_lengths]
        beyond = [decoded if length > limit else None for length, limit in zip(lengths, limits, strict=True)]
        return [new if old is None else old for old, new in zip(noted, beyond, strict=True)]

    def _check(self, batch: int, width: int) -> None:
        assert self.counts is not None and self.prompt_columns is not None
        if batch != self.counts.shape[0]:
            raise CacheError(
                f"this cache holds a batch of {self.counts.shape[0]} rows, the forward has {batch}: "
                "make a new cache for another prompt"
            )
        if self.seen < self.prompt_columns < self.seen + width:
            raise CacheError(
                f"a forward of {width} columns crosses the end of the prompt at column {self.prompt_columns}: "
                "feed the prompt and the new tokens in separate forwards, or correct prompt_tokens"
            )
        if self.seen >= self.prompt_columns and width > 1 and not self.several_tokens_allowed:
            raise self.occupied(width)
        if self.max_positions is not None and self.seen + width > self.max_positions + self._least_padding():
            raise CacheError(
                f"{self.seen + width} tokens, the model holds {self.max_positions}: shorten the prompt or "
                "max_new_tokens, or say beyond_context=True for a method whose positions are renumbered"
            )

    def occupied(self, width: int) -> CacheError:
        """The error of feeding `width` columns where one new token was due."""
        return CacheError(
            f"this cache already holds a prompt of {self.prompt_columns} columns and got {width} more at once. "
            "For another prompt make a new cache (or call reset()); for a prompt fed in chunks pass prompt_tokens=; "
            "to feed several new tokens in one forward call several_tokens(). use_cache=False feeds everything again"
        )

    def _least_padding(self) -> int:
        return self.prompt_columns - max(self.prompt_lengths) if self.prompt_lengths and self.prompt_columns else 0

    def _close_prompt(self) -> None:
        assert self.counts is not None
        self.prompt_lengths = [int(n) for n in self.counts.tolist()]
        self.padded = min(self.prompt_lengths) != self.prompt_columns
        for row, length in enumerate(self.prompt_lengths):
            if length == 0:
                raise ConfigError(f"row {row} of the batch has an empty prompt: every prompt needs at least one token")

    def positions(self, device: torch.device) -> Tensor:
        """[B, Q] int64 position ids of this forward's columns, -1 for padding, on `device`."""
        if device not in self._positions:
            self._positions[device] = next(iter(self._positions.values())).to(device)
        return self._positions[device]

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows; `same_prompts`: only among the beams of a sample (spares a host sync)."""
        if self.counts is None:
            return
        rows = rows.to(self.counts.device)
        self.counts, self.seeds = self.counts[rows], self.seeds[rows]
        if self.prompt_lengths and not same_prompts:
            self.prompt_lengths = [self.prompt_lengths[i] for i in rows.tolist()]
        self._positions = {d: p[rows.to(d)] for d, p in self._positions.items()}
