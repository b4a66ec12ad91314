"""A full cache of one prompt that many rows share, from each of which some tokens are hidden: removals in one forward.

A hidden slot gets the logit -inf, so softmax gives its share to the others: what is left is what a cache without that
slot would compute, at the same position ids. Nothing is copied per row but the tokens that the row feeds itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core.attention import AttentionInputs, AttentionParams, apply_probs, qk_matmul
from kvexp.errors import CacheError, ConfigError
from kvexp.models.cache import EvictionCache, EvictionCacheLayer


@dataclass(frozen=True)
class Removal:
    """Prompt tokens removed from a cache: positions, in these places (layer, kv head); None: in all of them."""

    positions: tuple[int, ...]
    places: tuple[tuple[int, int], ...] | None = None


Trial = Sequence[Removal]  # what one row goes without: all of these; empty: nothing


class RemovalLayer:
    """One layer of a prompt's cache that rows share, a `LayerCache`: it attends, and keeps none of what rows feed.

    keys [1, H, S, D], values [1, H, S, Dv]: of the prompt, slot = position. factors [H, G, n, Dv]: of the output
    projection, or None. answer_scores [3, H, S]: of `ANSWER_SCORES`, added up over forwards while `watched` is set.
    """

    def __init__(self, keys: Tensor, values: Tensor, factors: Tensor | None = None) -> None:
        self.keys, self.values, self.factors = keys, values, factors
        self.hidden: tuple[Tensor, Tensor, Tensor] | None = None  # rows, kv heads, positions, of one length
        self.watched = False
        self.answer_scores: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the prompt."""
        return int(self.keys.shape[2])

    def hide(self, hidden: Sequence[tuple[int, int, int]]) -> None:
        """From now on hide these slots: (row, kv head, position) each."""
        columns = torch.tensor(hidden, dtype=torch.int64, device=self.keys.device).view(-1, 3).unbind(1)
        self.hidden = (columns[0], columns[1], columns[2]) if hidden else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`: the rows' own tokens stand behind the prompt, and are forgotten afterwards."""
        rows, heads, count = key.shape[:3]
        query = query.unflatten(1, (heads, query.shape[1] // heads))  # [R, H, G, Q, D]
        after = torch.arange(self.seq_len, self.seq_len + count, device=key.device)
        own = AttentionInputs(
            query=query,
            keys=key,
            values=value,
            positions=after.expand(rows, 1, count),
            query_positions=after.expand(rows, count),
            params=params,
        )
        x_own = own.logits(slice(0, count), count)  # [R, H, G, Q, Q]
        x = self._prompt_logits(query, after, params)
        if self.hidden is not None:
            row, head, position = self.hidden
            x[head, :, row, :, position] = -torch.inf
        x_own = x_own.permute(1, 2, 0, 3, 4)
        top = torch.maximum(x.amax(-1, keepdim=True), x_own.amax(-1, keepdim=True))
        weights, weights_own = x.sub_(top).exp_(), (x_own - top).exp_()
        total = weights.sum(-1, keepdim=True) + weights_own.sum(-1, keepdim=True)
        # Outputs are divided in place of the weights, of which there are more.
        out = apply_probs(weights.view(1, heads, -1, rows * count, self.seq_len), self.values)
        out = out.view(heads, -1, rows, count, value.shape[-1]).permute(2, 0, 1, 3, 4)
        out = out + apply_probs(weights_own.permute(2, 0, 1, 3, 4), value)
        out = out / total.permute(2, 0, 1, 3, 4).to(out.dtype)
        if self.watched:
            self._watch((weights / total)[:, :, 0], out[0])
        return out.flatten(1, 2)

    def _prompt_logits(self, query: Tensor, after: Tensor, params: AttentionParams) -> Tensor:
        """Logits [H, G, R, Q, S] float32 of queries [R, H, G, Q, D] at positions after [Q] over the prompt.

        All rows read the same keys: they are one row of R * Q queries.
        """
        rows, heads, _, count, width = query.shape
        joined = query.permute(1, 2, 0, 3, 4).reshape(1, heads, -1, width)  # [1, H, G * R * Q, D]
        if params.alibi is None and params.sliding_window is None:
            keys = self.keys.float() if params.upcast else self.keys
            scaled = (joined.float() if params.upcast else joined) * params.scale  # fewer than the logits
            return (
                qk_matmul(scaled, keys)
                .to(torch.promote_types(keys.dtype, torch.float32))
                .view(heads, -1, rows, count, self.seq_len)
            )
        shared = AttentionInputs(
            query=joined.view(1, heads, -1, rows * count, width),
            keys=self.keys,
            values=self.values,
            positions=torch.arange(self.seq_len, device=query.device)[None, None],
            query_positions=after.repeat(rows)[None],
            params=params,
            all_visible=params.sliding_window is None,
        )
        return shared.logits(slice(0, rows * count), self.seq_len).view(heads, -1, rows, count, self.seq_len)

    def _watch(self, weights: Tensor, out: Tensor) -> None:
        """Add up the scores of a forward: weights [H, G, Q, S] and out [H, G, Q, Dv] of its only row."""
        values, out = self.values[0, :, None].float(), out.float()  # [H, 1, S, Dv]
        if self.factors is not None:  # sizes behind the output projection
            values, out = values @ self.factors.transpose(-1, -2), out @ self.factors.transpose(-1, -2)
        sizes = values.norm(dim=-1)[:, :, None]
        inner = out @ values.transpose(-1, -2)
        distance = (out.square().sum(-1, keepdim=True) - 2 * inner + sizes.square()).clamp(min=0).sqrt()
        left = (1 - weights).clamp(min=torch.finfo(torch.float32).eps)
        found = torch.stack([each.sum((1, 2)) for each in (weights, weights * sizes, weights / left * distance)])
        self.answer_scores = found if self.answer_scores is None else self.answer_scores + found

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: rows are trials, which are chosen before a forward."""
        raise CacheError("rows of a removal cache are chosen by the trials that are hidden")

    def reset(self) -> None:
        """Hide nothing."""
        self.hidden = None


class RemovalCache(Cache):  # type: ignore[misc]
    """A prompt's full cache with removals per row; a forward leaves it as it was.

    cache: of a method that evicts nothing, filled with one prompt. factors [H, G, n, Dv] per layer: of the output
    projection, for `answer_scores`; None: sizes are those of the values.
    """

    def __init__(
        self, model: PreTrainedModel, cache: EvictionCache, factors: Sequence[Tensor | None] | None = None
    ) -> None:
        states, sequence = cache.layer_states, cache.sequence
        if cache.config.method.evicts or sequence.prompt_lengths != [sequence.prompt_columns]:
            raise ConfigError("removals start from the full cache of one prompt without padding")
        given = list(factors) if factors is not None else [None] * len(states)
        self.states: list[RemovalLayer] = []
        for state, factor in zip(states, given, strict=True):
            slots = state.slots
            assert slots is not None
            held = slots.length
            self.states.append(RemovalLayer(slots.keys[:, :, :held], slots.values[:, :, :held], factor))
        super().__init__(layers=[EvictionCacheLayer(state, None, model.config) for state in self.states])

    @property
    def heads(self) -> list[int]:
        """kv heads of each layer."""
        return [int(state.keys.shape[1]) for state in self.states]

    def hide(self, trials: Sequence[Trial]) -> None:
        """Let row i of the next forward go without what trials[i] removes."""
        hidden: list[list[tuple[int, int, int]]] = [[] for _ in self.states]
        everywhere = [(layer, head) for layer, count in enumerate(self.heads) for head in range(count)]
        for row, trial in enumerate(trials):
            for removal in trial:
                for layer, head in everywhere if removal.places is None else removal.places:
                    hidden[layer] += [(row, head, position) for position in removal.positions]
        for state, mine in zip(self.states, hidden, strict=True):
            state.hide(mine)
