"""One sequence: its positions, padding and marked spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.util.errors import CacheError, ConfigError

Span = tuple[int, int]  # first position and the one behind the last, among the real tokens of a prompt


@dataclass
class MarkedSpans:
    """The marked spans of a batch of prompts, by position id: a system prompt, say, which an eviction is to spare.

    After "The Pitfalls of KV Cache Compression" (arXiv:2510.00231), for any method: a span is never evicted ("span";
    the paper whitelists tokens), or loses no larger share than the rest of the prompt ("fair").

    number [B, P + 1] int64: which span a prompt position belongs to, from 0, -1 for none; the last entry stands for
    positions behind the prompts. lengths: tokens of each span of each row; prompts: real tokens of each row.
    """

    number: Tensor
    lengths: list[list[int]]
    prompts: list[int]

    @classmethod
    def of(cls, spans: Sequence[Sequence[Span]], prompts: Sequence[int]) -> MarkedSpans:
        """Spans per row, in order and apart; ConfigError where one is empty, overlaps another or leaves its prompt."""
        number = torch.full((len(prompts), max(prompts) + 1), -1, dtype=torch.int64)
        for row, (row_spans, length) in enumerate(zip(spans, prompts, strict=True)):
            end = 0
            for place, (first, behind) in enumerate(row_spans):
                if not end <= first < behind <= length:
                    raise ConfigError(
                        f"row {row}: span {place} is tokens {first} to {behind} of a prompt of {length}; spans are not "
                        "empty, in order, and do not overlap"
                    )
                number[row, first:behind] = place
                end = behind
        return cls(number, [[behind - first for first, behind in row_spans] for row_spans in spans], list(prompts))

    def of_slots(self, positions: Tensor) -> Tensor:
        """The span [B, H, S] of every slot, -1 for none; positions [B, H, S]: position ids, -1 for dead slots."""
        last = self.number.shape[1] - 1
        places = torch.where(positions < 0, last, positions.clamp_max(last)).flatten(1)
        self.number = self.number.to(positions.device)
        return self.number.gather(1, places).view_as(positions)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        self.number = self.number[rows.to(self.number.device)]
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        self.prompts = [self.prompts[row] for row in rows.tolist()]


class SequenceState:
    """Counts the tokens of every row and gives every real token its position id; padding gets -1.

    prompt_columns: the column with which the prompt ends; None: with the first forward, so a prompt fed in chunks needs
    it. max_new_tokens: tokens to come, for budgets and temperatures that depend on them. max_positions: of the model;
    None: no limit. num_beams: rows of each sample. seeds [B]: of noise inside methods.

    by_token: whether each layer takes the tokens of a chunk one by one (`begin_chunk`); else a forward's at once.
    past_len: columns before the forward in progress; seq_len: columns with it; num_real [B] int64: real tokens so far;
    decode_steps: columns after the prompt and before the forward; layers_done: layers that have finished the forward.
    ConfigError for impossible prompts, CacheError for forwards out of order.
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
        self.multi_token_steps_allowed = False
        self.by_token = False
        self._declared_prompt = prompt_columns
        self.reset()

    def advance(
        self, columns: int, batch: int, width: int, mask: Tensor | None, device: torch.device, layers: int
    ) -> Tensor:
        """Let a layer that has seen `columns` columns take part in the forward in progress, or start the next one.

        width: Q new columns; mask [B, columns so far]: 0 for padding. Returns the position ids [B, Q] of the new
        columns, -1 for padding.
        """
        if columns == self.seq_len:
            self.start_forward(batch, width, mask, device, layers)
        elif columns != self.past_len:
            raise CacheError("this layer missed a forward: after an interrupted forward start again with a new cache")
        return self.positions(device)

    def layer_done(self) -> None:
        """Count one layer more that has finished the forward in progress."""
        self.layers_done += 1

    def reset(self) -> None:
        """Forget the sequence; another prompt may follow."""
        self.prompt_columns = self._declared_prompt
        self.past_len = self.seq_len = self.layers_done = 0
        self.prompt_lengths: list[int] = []
        self.padded = False
        self.num_real: Tensor | None = None
        self.seeds: Tensor = torch.zeros(0)
        self._positions: dict[torch.device, Tensor] = {}
        self._chunk: list[tuple[int, int, Tensor, dict[torch.device, Tensor]]] | None = None
        self._chunk_place = 0
        self.spans: MarkedSpans | None = None  # of the prompts, where any were marked

    @property
    def in_prompt(self) -> bool:
        """Whether the forward in progress is part of the prompt."""
        return self.prompt_columns is not None and self.seq_len <= self.prompt_columns

    @property
    def prompt_complete(self) -> bool:
        """Whether the prompt ends with the forward in progress, or has ended before."""
        return self.prompt_columns is not None and self.seq_len >= self.prompt_columns

    @property
    def decode_steps(self) -> int:
        """Columns after the prompt and before the forward in progress."""
        return max(0, self.past_len - self.prompt_columns) if self.prompt_columns is not None else 0

    @property
    def query_steps(self) -> list[int]:
        """The decode step of every query row of the forward in progress, from 1; 0 for prompt rows."""
        width = self.seq_len - self.past_len
        return [0] * width if self.in_prompt else [self.decode_steps + 1 + j for j in range(width)]

    def start_forward(self, batch: int, width: int, mask: Tensor | None, device: torch.device, layers: int = 1) -> None:
        """Start the next forward, of `width` columns.

        mask [B, columns so far]: 0 for padding; None: no padding. layers: how many layers must have finished the
        previous forward, else CacheError.
        """
        if self._chunk is not None and self._chunk_place + 1 < len(self._chunk):
            self._take_chunk_place(self._chunk_place + 1)
            return
        if self._chunk is None and self.seq_len and self.layers_done != layers:
            raise CacheError(
                f"the last forward reached {self.layers_done} of {layers} layers, so their caches are out of step: "
                "after an interrupted forward start again with a new cache"
            )
        self.past_len = self.seq_len
        if self.num_real is None:
            self.num_real = torch.zeros(batch, dtype=torch.int64, device=device)
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
        self.layers_done = 0
        self.seq_len = self.past_len + width
        num_real = self.num_real
        ahead = torch.arange(width, device=device)
        positions = num_real[:, None] + ahead
        new = mask[:, -width:].to(device=device, dtype=torch.bool) if mask is not None and mask.shape[-1] else None
        if new is not None:
            if self.in_prompt and bool((~new & ((num_real > 0)[:, None] | (new.cumsum(1) > 0))).any()):
                raise ConfigError("a prompt has padding after its first token: pad on the left (padding_side='left')")
            if not (self.in_prompt or self.padded):
                self.padded = not bool(new.all())
            positions = torch.where(new, num_real[:, None] + new.cumsum(1) - 1, -1)
            self.num_real = num_real + new.sum(1)
        else:
            self.num_real = num_real + width
        self._positions = {device: positions}
        if self._chunk is not None:
            self._chunk.append((self.past_len, self.seq_len, self.num_real, self._positions))
            self._chunk_place += 1
        if self.seq_len == self.prompt_columns:
            self.prompt_lengths = [int(n) for n in self.num_real.tolist()]
            if 0 in self.prompt_lengths:
                row = self.prompt_lengths.index(0)
                raise ConfigError(f"row {row} of the batch has an empty prompt: every prompt needs at least one token")
            self.padded = min(self.prompt_lengths) != self.prompt_columns

    # A chunk of a forced text passes layer by layer: each layer takes its tokens one by one, in forwards of one column,
    # and the next layer begins with the first token again, in the forwards that the first layer has started.

    def begin_chunk(self) -> None:
        """Begin a chunk of new tokens behind the prompt, all of which the first layer takes before the second."""
        assert self._chunk is None and self.num_real is not None
        self._chunk, self._chunk_place = [(self.past_len, self.seq_len, self.num_real, self._positions)], 0

    def restart_chunk(self) -> None:
        """Go back to the chunk's first token, for the next layer."""
        self._take_chunk_place(0)

    def end_chunk(self, layers: int) -> None:
        """End the chunk, which all `layers` layers have taken."""
        self._chunk, self.layers_done = None, layers

    def _take_chunk_place(self, place: int) -> None:
        """Be in the forward of the chunk's token number `place`, from 1; 0: before the first."""
        assert self._chunk is not None
        self._chunk_place = place
        self.past_len, self.seq_len, self.num_real, self._positions = self._chunk[place]

    def mark_spans(self, spans: Sequence[Sequence[Span]], prompts: Sequence[int]) -> None:
        """Mark spans of every sample's prompt, in its real tokens; prompts: real tokens of each. Before the prompt."""
        rows = [row for row in range(len(prompts)) for _ in range(self.num_beams)]
        self.spans = MarkedSpans.of([spans[row] for row in rows], [prompts[row] for row in rows])

    def prompt_lengths_ahead(self) -> list[int]:
        """Real tokens of each row's prompt; before it has ended, of a batch without padding."""
        assert self.num_real is not None and self.prompt_columns is not None
        return self.prompt_lengths or [self.prompt_columns] * self.num_real.shape[0]

    @property
    def tokens_by_row(self) -> list[int]:
        """Real tokens of every row, once its prompt has ended."""
        decoded = self.seq_len - (self.prompt_columns or 0)
        return [length + decoded for length in self.prompt_lengths]

    def first_eviction_steps(self, noted: list[int | None], limits: Sequence[int]) -> list[int | None]:
        """Per row, the number of decode tokens at which it first had more than its limit of tokens; None: not yet.

        limits: one number per row. noted: what the last call returned; a step once noted stays.
        """
        decoded = self.seq_len - (self.prompt_columns or 0)
        beyond = [decoded if n > limit else None for n, limit in zip(self.tokens_by_row, limits, strict=True)]
        return [new if old is None else old for old, new in zip(noted or [None] * len(beyond), beyond, strict=True)]

    def _check(self, batch: int, width: int) -> None:
        """CacheError for a forward that cannot follow.

        Of another batch size, across the prompt's end, of several new tokens where one was due, or past the model's
        context.
        """
        assert self.num_real is not None and self.prompt_columns is not None
        if batch != self.num_real.shape[0]:
            raise CacheError(
                f"this cache holds a batch of {self.num_real.shape[0]} rows, the forward has {batch}: "
                "make a new cache for another prompt"
            )
        if self.past_len < self.prompt_columns < self.past_len + width:
            raise CacheError(
                f"a forward of {width} columns crosses the end of the prompt at column {self.prompt_columns}: "
                "feed the prompt and the new tokens in separate forwards, or correct prompt_tokens"
            )
        if self.past_len >= self.prompt_columns and width > 1 and not self.multi_token_steps_allowed:
            raise self.occupied(width)
        # Columns that are padding in every row, the longest prompt's too.
        padding = self.prompt_columns - max(self.prompt_lengths) if self.prompt_lengths else 0
        if self.max_positions is not None and self.past_len + width > self.max_positions + padding:
            raise CacheError(
                f"{self.past_len + width} tokens, the model holds {self.max_positions}: shorten the prompt or "
                "max_new_tokens, or say beyond_context=True for a method whose positions are renumbered"
            )

    def occupied(self, width: int) -> CacheError:
        """The CacheError for `width` columns fed at once where one new token was due."""
        return CacheError(
            f"this cache already holds a prompt of {self.prompt_columns} columns and got {width} more at once. "
            "For another prompt make a new cache (or call reset()); for a prompt fed in chunks pass prompt_tokens=; "
            "to feed several new tokens in one forward call allow_multi_token_steps(). "
            "use_cache=False feeds everything again"
        )

    def positions(self, device: torch.device) -> Tensor:
        """Position ids [B, Q] int64 of the forward in progress, -1 for padding, on `device`."""
        if device not in self._positions:
            self._positions[device] = next(iter(self._positions.values())).to(device)
        return self._positions[device]

    def read_positions_from(self, buffer: Tensor) -> None:
        """Copy the position ids of the forward in progress into buffer [B, Q], where its layers then read them."""
        buffer.copy_(self.positions(buffer.device))
        self._positions = {buffer.device: buffer}

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows.

        same_prompts: only among the beams of a sample, where prompt lengths stay and no number is read from the device.
        """
        if self.num_real is None:
            return
        rows = rows.to(self.num_real.device)
        self.num_real, self.seeds = self.num_real[rows], self.seeds[rows]
        if self.prompt_lengths and not same_prompts:
            self.prompt_lengths = [self.prompt_lengths[i] for i in rows.tolist()]
        self._positions = {d: p[rows.to(d)] for d, p in self._positions.items()}
        if self.spans is not None and not same_prompts:
            self.spans.select_rows(rows)
