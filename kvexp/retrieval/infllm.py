"""InfLLM: blocks of the past, each known by its representative tokens; whole blocks are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, apply_probs, sdpa_attention
from kvexp.core.select import topk_slots
from kvexp.errors import ConfigError
from kvexp.retrieval.base import PrefillKV, Retrieval, StoredPrompt
from kvexp.retrieval.block_cache import BlockCacheConfig
from kvexp.retrieval.infllm_blocks import (
    block_scores,
    blockwise_prefill,
    clamped_inputs,
    clamped_query,
    representatives,
    window_attention_masses,
)
from kvexp.retrieval.kv_index import KVIndex
from kvexp.retrieval.query import RetrievalQuery, Selection


@dataclass(frozen=True)
class InfLLM(Retrieval):
    """block score = q.r, r the key of the block's token that got most attention while it was in the recent window.

    Source: Xiao et al. 2024, arXiv:2402.04617, as run in PQCache's release (arXiv:2407.12820). The past between sinks
    and window is cut into blocks; tokens of a block that is not complete yet are attended like the window. r is chosen
    per query head; with repr_tokens > 1 it is the mean of as many keys. choice: one for all heads of a layer (shared),
    per kv head, or per query head (as the authors' perhead; keys and values are then repeated for every query head).

    rounding: exact cuts the last block so that the budget holds to the token; blocks takes ceil(count / block) whole
    blocks and the incomplete one on top, as released. prefill: full, or blockwise in chunks of min(chunk, window + 1)
    that see sinks, chosen blocks and window only. far_positions: ordinary, or clamped: what is farther than the window
    stands at its edge. The release is rounding=blocks prefill=blockwise far_positions=clamped n_sinks=32; a chunk's
    rows then share what is far for the last of them, so that early rows see some tokens twice, and so it is here.
    """

    name: ClassVar[str] = "infllm"
    whole_prompt: ClassVar[bool] = True
    block: int = 128
    repr_tokens: int = 1
    choice: Literal["shared", "kv_head", "query_head"] = "shared"
    rounding: Literal["exact", "blocks"] = "exact"
    prefill: Literal["full", "blockwise"] = "full"
    far_positions: Literal["ordinary", "clamped"] = "ordinary"
    chunk: int = 512
    cache_tokens: int = 4096
    cache_policy: Literal["lfu", "lru"] = "lru"
    cache_blocks_per_step: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block", "repr_tokens", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 token, got {getattr(self, name)}")
        if self.repr_tokens > self.block:
            raise ConfigError(f"repr_tokens={self.repr_tokens} of a block of {self.block} tokens: lower repr_tokens")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        _ = self.cache  # checks its settings

    @property
    def cache(self) -> BlockCacheConfig | None:
        if self.cache_tokens == 0:
            return None
        return BlockCacheConfig(self.cache_tokens, self.block, self.cache_policy, self.cache_blocks_per_step)

    @property
    def per_query_head(self) -> bool:
        return self.choice == "query_head"

    @property
    def clamps_positions(self) -> bool:
        return self.far_positions == "clamped"

    def index_bits_per_token(self, dim: int) -> float:
        return 16.0 * dim / self.block

    # -- indexing -----------------------------------------------------------------------------------------------------

    @property
    def modifies_prefill(self) -> bool:
        return self.prefill == "blockwise"

    def attend_prompt(self, inputs: AttentionInputs, index: KVIndex, local: list[int], counts: list[int]) -> Tensor:
        if self.prefill == "full":
            (received,) = window_attention_masses(inputs, [local])
            out = sdpa_attention(inputs)
        else:
            out, received = blockwise_prefill(self, inputs, local, counts)
        index.register("received", received)
        return out

    @classmethod
    def observe_prompts(cls, prompts: Sequence[tuple[Self, StoredPrompt]]) -> None:
        """Caches whose heads select alike differ in their windows alone: the attention is computed once for them."""
        by_heads: dict[int, list[StoredPrompt]] = {}
        for method, prompt in prompts:
            if method.prefill == "full":
                by_heads.setdefault(prompt.inputs.keys.shape[1], []).append(prompt)
            else:
                super().observe_prompts([(method, prompt)])
        for alike in by_heads.values():
            masses = window_attention_masses(alike[0].inputs, [prompt.local for prompt in alike])
            for prompt, received in zip(alike, masses, strict=True):
                prompt.index.register("received", received)

    def build(self, index: KVIndex, prompt: PrefillKV) -> None:
        received = prompt.left_aligned(index["received"])
        blocks = max(0, max(prompt.lengths) - self.n_sinks) // self.block
        inside = slice(self.n_sinks, self.n_sinks + blocks * self.block)
        own = prompt.keys[:, :, inside], received[:, :, inside]
        keys, repr_positions = representatives(self, *own, self.n_sinks, prompt.params)
        index.register("repr", keys, per=self.block)
        index.register("repr_at", repr_positions, per=self.block)
        # From here on only tokens of the window and of the block behind it matter: position p at p % width.
        width = max(prompt.recent) + 1 + 2 * self.block
        ends = torch.tensor(prompt.lengths, device=received.device)[:, None]
        newest = ends - 1 - (ends - 1 - torch.arange(width, device=received.device)) % width
        ring_slots = newest.clamp(min=0, max=received.shape[2] - 1)[:, None, :, None]
        index.register("received", received.gather(2, ring_slots.expand(-1, received.shape[1], -1, received.shape[3])))

    def extend(self, index: KVIndex, key: Tensor, value: Tensor, positions: list[int]) -> None:
        received = index["received"]
        rows, ring_slots = torch.arange(len(positions)), torch.tensor([p % received.shape[2] for p in positions])
        received[rows, :, ring_slots] = 0.0
        index.grow(max(positions) + 1)

    def _observe(self, inputs: AttentionInputs, retrieval_query: RetrievalQuery, probabilities: Tensor) -> None:
        """Add the attention that the window's tokens received; index a block that is complete from the next step on.

        probabilities [B, H, G, 1, S]: of the new token.
        """
        index, memory, received = retrieval_query.index, retrieval_query.memory, retrieval_query.index["received"]
        local = torch.tensor(memory.config.local, device=inputs.positions.device)
        near = inputs.positions >= (retrieval_query.positions - local)[:, None, None]
        seen = probabilities[..., 0, :].transpose(2, 3).masked_fill(~near[..., None], 0.0)
        slots = (inputs.positions % received.shape[2])[..., None].expand_as(seen)
        received.scatter_add_(2, slots, seen.to(received.dtype))
        for row, (length, past) in enumerate(zip(memory.lengths, memory.config.local, strict=True)):
            behind = length - 1 - past - self.n_sinks  # tokens that lie in blocks at the next step
            if behind < self.block or behind % self.block:
                continue
            start, number = self.n_sinks + behind - self.block, behind // self.block - 1
            memory.flush()
            keys = memory.keys[row : row + 1, :, start : start + self.block].to(received.device)
            ring_slots = torch.arange(start, start + self.block, device=received.device) % received.shape[2]
            new, repr_positions = representatives(
                self, keys, received[row : row + 1, :, ring_slots], start, retrieval_query.params
            )
            index["repr"][row, :, number], index["repr_at"][row, :, number] = new[0, :, 0], repr_positions[0, :, 0]

    # -- searching ----------------------------------------------------------------------------------------------------

    def select(self, retrieval_query: RetrievalQuery) -> Selection:
        local, size = retrieval_query.memory.config.local, self.block
        lengths = retrieval_query.memory.lengths
        complete = [max(0, n - 2 - past - self.n_sinks) // size for n, past in zip(lengths, local, strict=True)]
        score = self._scores(retrieval_query, max(complete))
        numbers = torch.arange(score.shape[-1], device=score.device)
        done = torch.tensor(complete, device=score.device)
        if self.rounding == "exact":
            tokens = score.masked_fill(numbers >= done[:, None, None], torch.inf).repeat_interleave(size, dim=-1)
            spare = retrieval_query.memory.length - self.n_sinks - tokens.shape[-1]
            tokens = torch.nn.functional.pad(tokens, (0, max(0, spare)), value=torch.inf)
            tokens = torch.nn.functional.pad(tokens, (self.n_sinks, 0))[..., : retrieval_query.memory.length]
            return Selection(retrieval_query.topk(tokens))
        wanted = [-(-count // size) for count in retrieval_query.counts]
        widest = min(max(wanted), score.shape[-1])
        found = topk_slots(score, (numbers < done[:, None])[:, None], wanted, widest)[..., None]
        inside = torch.arange(size, device=score.device)
        slots = torch.where(found >= 0, self.n_sinks + found * size + inside, -1).flatten(2)
        rest = (self.n_sinks + done * size)[:, None] + torch.arange(size, device=score.device)
        open_end = retrieval_query.candidates[:, 0].gather(1, rest.clamp(max=retrieval_query.memory.length - 1))
        rest = rest.masked_fill(~open_end | (rest >= retrieval_query.memory.length), -1)
        return Selection(torch.cat([slots, rest[:, None].expand(-1, slots.shape[1], -1)], dim=2))

    def _scores(self, retrieval_query: RetrievalQuery, blocks: int) -> Tensor:
        """Scores [B, H, blocks] float32 of the first `blocks` blocks."""
        keys, repr_positions = (
            retrieval_query.index["repr"][:, :, :blocks],
            retrieval_query.index["repr_at"][:, :, :blocks],
        )
        query, query_positions = retrieval_query.query[..., None, :], retrieval_query.positions[:, None]
        if self.clamps_positions:
            edge = torch.tensor(retrieval_query.memory.config.local, device=query.device)
            query = clamped_query(query, query_positions, edge, retrieval_query.params)
        return block_scores(self, query, query_positions, keys, repr_positions, retrieval_query.params)

    def attend(self, inputs: AttentionInputs, retrieval_query: RetrievalQuery, chosen: Selection) -> Tensor:
        rows = slice(0, 1)
        x = inputs.logits(rows, inputs.keys.shape[2])
        if self.clamps_positions:
            edge = torch.tensor(retrieval_query.memory.config.local, device=x.device)
            far = clamped_inputs(inputs, edge).logits(rows, inputs.keys.shape[2])
            beyond = inputs.positions < (retrieval_query.positions - edge)[:, None, None]
            x = torch.where(beyond[:, :, None, None], far, x)
        probabilities = torch.softmax(x, dim=-1)
        self._observe(inputs, retrieval_query, probabilities)
        return apply_probs(probabilities, inputs.values)


_CHOICES = {
    "choice": ("shared", "kv_head", "query_head"),
    "rounding": ("exact", "blocks"),
    "prefill": ("full", "blockwise"),
    "far_positions": ("ordinary", "clamped"),
}
