"""InfLLM: blocks of the past, each known by its representative tokens; whole blocks are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvexp.core.attention import (
    AttentionInputs,
    AttentionParams,
    apply_probs,
    attention_probs,
    compute_attention,
    softcapped,
)
from kvexp.core.observe import BLOCK_ELEMENTS
from kvexp.core.slot_order import topk_slots
from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.method import PrefillKV, Retrieval, RetrievalQuery, Selection, StoredPrompt, left_aligned
from kvexp.retrieval.offload import BlockCacheConfig
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast

# InfLLM's arithmetic: block representatives, positions clamped at the window's edge, blockwise prefill.


def clamped_query(query: Tensor, positions: Tensor, edge: Tensor, params: AttentionParams) -> Tensor:
    """Queries [B, H, G, Q, D] at positions [B, Q], rotated by RoPE to position edge [B]."""
    if params.rope is None:
        return query
    b, h, g, q, _ = query.shape
    by = (edge[:, None] - positions)[:, None].expand(b, h * g, q)
    return params.rope.rotate_by(query.flatten(1, 2), by).view_as(query)


def clamped_keys(keys: Tensor, positions: Tensor, params: AttentionParams) -> Tensor:
    """Keys [B, H, S, D] at positions [B, H, S], rotated by RoPE to position 0."""
    return keys if params.rope is None else params.rope.rotate_by(keys, -positions.clamp(min=0))


def clamped_inputs(inputs: AttentionInputs, edge: Tensor) -> AttentionInputs:
    """Copy of the inputs with every key edge [B] positions away from every query."""
    positions = inputs.positions.expand(inputs.keys.shape[:3])
    zero = torch.zeros_like(positions)
    query_positions = edge[:, None, None].expand(-1, inputs.keys.shape[1], inputs.query.shape[3])
    return replace(
        inputs,
        query=clamped_query(inputs.query, inputs.query_positions, edge, inputs.params),
        keys=clamped_keys(inputs.keys, positions, inputs.params),
        rope_positions=(zero, query_positions),
    )


def window_attention_masses(inputs: AttentionInputs, windows: Sequence[list[int]]) -> list[Tensor]:
    """Attention [B, H, S, G] float32 that each column receives from query rows within a window after it, per window.

    windows: of each, how many positions after a column its rows lie at most, per batch row.
    """
    b, h, g, count, _ = inputs.query.shape
    slots = inputs.keys.shape[2]
    pasts = [torch.tensor(local, device=inputs.keys.device)[:, None, None, None] for local in windows]
    totals = [torch.zeros(b, h, g, slots, device=inputs.keys.device) for _ in windows]
    block = max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        kv_len = inputs.kv_len(rows)
        probabilities = attention_probs(inputs.logits(rows, kv_len), inputs.params.sinks)
        query, key = inputs.query_positions[:, None, rows, None], inputs.positions[:, :, None, :kv_len]
        for past, total in zip(pasts, totals, strict=True):
            near = (query >= 0) & (key >= 0) & (query - key <= past)
            total[..., :kv_len] += probabilities.masked_fill(~near[:, :, None], 0.0).sum(3)
    return [total.transpose(2, 3) for total in totals]


def representatives(
    method: InfLLM, keys: Tensor, received: Tensor, start: int, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """The representatives of n blocks from position `start`: keys [B, H, n, G, D], positions [B, H, n, G].

    keys [B, H, n * block, D]: of the blocks' tokens; received [B, H, n * block, G]: attention that they received, by
    which the best tokens of a block represent it.
    """
    b, h, tokens, d = keys.shape
    g, size = received.shape[3], method.block
    count = tokens // size
    # [B, H, n, repr_tokens, G]
    best_of = received.reshape(b, h, count, size, g).topk(method.repr_tokens, dim=3).indices
    index = (best_of + torch.arange(count, device=keys.device)[:, None, None] * size).flatten(2)
    best_keys, positions = keys.gather(2, index[..., None].expand(-1, -1, -1, d)), index + start
    if method.clamps_positions:
        best_keys = clamped_keys(best_keys, positions, params)
    return best_keys.view(b, h, count, method.repr_tokens, g, d).mean(3), positions.view(best_of.shape)[:, :, :, 0]


def blockwise_prefill(
    method: InfLLM, inputs: AttentionInputs, local: list[int], counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Prefill in chunks, row by row: output [B, H, G, Q, Dv] and the attention [B, H, S, G] received by each column.

    local: past tokens of the recent window, per row; counts: slots to select, per row.
    """
    b, h, g, columns, _ = inputs.query.shape
    out = inputs.values.new_zeros(b, h, g, columns, inputs.values.shape[3])
    received = torch.zeros(b, h, columns, g, device=inputs.keys.device)
    for row in range(b):
        pad = columns - int((inputs.query_positions[row] >= 0).sum())
        at = slice(row, row + 1)
        alone = replace(
            inputs,
            query=inputs.query[at, ..., pad:, :],
            keys=inputs.keys[at, :, pad:],
            values=inputs.values[at, :, pad:],
            positions=inputs.positions[at, :, pad:],
            query_positions=inputs.query_positions[at, pad:],
        )
        _one_row(method, alone, local[row], counts[row], out[at, ..., pad:, :], received[at, :, pad:])
    return out, received


def block_scores(
    method: InfLLM,
    query: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    repr_positions: Tensor,
    params: AttentionParams,
) -> Tensor:
    """Score [B, H, n] float32 of n blocks: logits with their representatives, mean over query rows, summed over heads.

    query [B, H, G, Q, D] at query_positions [B, Q]; keys [B, H, n, G, D] at repr_positions [B, H, n, G]: of
    `representatives`. The sum is over the heads that select together.
    """
    x = torch.einsum("bhgd,bhngd->bhgn", query.float().mean(3), keys.float()) * params.scale
    x = softcapped(x, params.softcap)
    if params.alibi is not None and not method.clamps_positions:
        slopes = params.alibi.to(x.device).view(1, *x.shape[1:3], 1)
        x = x + slopes * (repr_positions.transpose(2, 3) - query_positions.float().mean(1)[:, None, None, None])
    x = x.sum(2)
    return x.sum(1, keepdim=True).expand_as(x) if method.choice == "shared" else x


def _one_row(method: InfLLM, inputs: AttentionInputs, local: int, count: int, out: Tensor, received: Tensor) -> None:
    """Blockwise prefill of one unpadded row; writes out [1, H, G, T, Dv] and received [1, H, T, G].

    local: past tokens of the recent window; count: slots to select.
    """
    window, total = local + 1, inputs.keys.shape[2]
    chunk, edge = min(method.chunk, window), torch.tensor([local], device=inputs.keys.device)
    for start in range(0, total, chunk):
        rows = slice(start, min(start + chunk, total))
        blocks = max(0, start - window - method.n_sinks) // method.block
        near = torch.arange(max(0, start - local), rows.stop, device=edge.device).expand(1, inputs.keys.shape[1], -1)
        far = distant_slots(method, inputs, rows, blocks, count, received, edge)
        logits, values = [], []
        for slots, beyond in ((near, False), (far, True)):
            slot_inputs = _part(inputs, rows, slots)
            values.append(slot_inputs.values)
            distance = slot_inputs.query_positions[:, None, :, None] - slots[:, :, None]
            turned = clamped_inputs(slot_inputs, edge) if beyond and method.clamps_positions else slot_inputs
            x = turned.logits(slice(0, rows.stop - start), slots.shape[2])
            # Clamped, all rows share what is far for the last: early ones see some of it as near, too (as released).
            hidden = (
                torch.zeros_like(distance, dtype=torch.bool)
                if beyond and method.clamps_positions
                else distance <= local
            )
            logits.append(x.masked_fill((hidden if beyond else ~hidden)[:, :, None], -torch.inf))
        probabilities = attention_probs(torch.cat(logits, dim=-1), inputs.params.sinks)
        out[..., rows, :] = apply_probs(probabilities, torch.cat(values, dim=2))
        seen = probabilities[..., : near.shape[2]].sum(3).transpose(2, 3)
        received[:, :, max(0, start - local) : rows.stop] += seen


def distant_slots(
    method: InfLLM, inputs: AttentionInputs, rows: slice, blocks: int, count: int, received: Tensor, edge: Tensor
) -> Tensor:
    """Slots [1, H, N] that a chunk sees beyond its window: sinks, selected blocks, and tokens in no complete block.

    rows: the chunk's query rows; blocks: complete blocks before its window; count: slots to select; received [1, H, T,
    G]: attention so far; edge [1]: the window's farthest position.
    """
    heads, size, device = inputs.keys.shape[1], method.block, inputs.keys.device
    end = max(0, rows.stop - 1 - int(edge))
    if not blocks:
        return torch.arange(end, device=device).expand(1, heads, -1)
    inside = slice(method.n_sinks, method.n_sinks + blocks * size)
    block_states = inputs.keys[:, :, inside], received[:, :, inside]
    keys, repr_positions = representatives(method, *block_states, method.n_sinks, inputs.params)
    query, query_positions = inputs.query[..., rows, :], inputs.query_positions[:, rows]
    query = clamped_query(query, query_positions, edge, inputs.params) if method.clamps_positions else query
    score = block_scores(method, query, query_positions, keys, repr_positions, inputs.params)
    wanted = min(blocks, -(-count // size))
    known = torch.ones(1, 1, blocks, dtype=torch.bool, device=device)
    chosen = topk_slots(score, known, [wanted] * len(score), wanted)
    slots = (method.n_sinks + chosen[..., None] * size + torch.arange(size, device=device)).flatten(2)
    rest = torch.arange(method.n_sinks + blocks * size, end, device=device)
    always = torch.cat([torch.arange(method.n_sinks, device=device), rest])
    return torch.cat([always.expand(1, heads, -1), slots], dim=2)


def _part(inputs: AttentionInputs, rows: slice, slots: Tensor) -> AttentionInputs:
    """The inputs restricted to some query rows and to slots [1, H, N] of one unpadded row, where slot = position."""
    keys, values = (x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3])) for x in (inputs.keys, inputs.values))
    return replace(
        inputs,
        query=inputs.query[..., rows, :],
        keys=keys,
        values=values,
        positions=slots,
        query_positions=inputs.query_positions[:, rows],
        in_column_order=False,
        padded=True,
    )


@dataclass(frozen=True)
class InfLLM(Retrieval):
    """block score = q.r, r the key of the block's token that got most attention while it was in the recent window.

    Source: Xiao et al. 2024, arXiv:2402.04617, as run in PQCache's release (arXiv:2407.12820). The past between
    sinks and window is cut into blocks; an incomplete block is attended like the window. r is chosen per query
    head; with repr_tokens > 1 it is the mean of as many keys. choice: one for all heads of a layer (shared), per kv
    head, or per query head (the authors' perhead; repeats keys and values).

    rounding: exact cuts the last block, so that the budget holds to the token; blocks takes ceil(count / block)
    whole ones and the incomplete one on top. prefill: full, or blockwise in chunks of min(chunk, window + 1) that
    see sinks, chosen blocks and window only. far_positions: ordinary, or clamped to the window's edge. The release
    is rounding=blocks prefill=blockwise far_positions=clamped n_sinks=32; a chunk's rows then share what is far for
    the last of them (early rows see some tokens twice).
    """

    name: ClassVar[str] = "infllm"
    whole_prompt: ClassVar[bool] = True
    block: Annotated[int, AtLeast(1)] = 128
    repr_tokens: Annotated[int, AtLeast(1)] = 1  # representative tokens per block
    choice: Literal["shared", "kv_head", "query_head"] = "shared"  # kv_head | query_head (keys and values repeated)
    rounding: Literal["exact", "blocks"] = "exact"  # blocks: whole blocks, rounded up, and the incomplete one on top
    # blockwise: the prompt is read in chunks that see only chosen blocks
    prefill: Literal["full", "blockwise"] = "full"
    # clamped: all that is beyond the window stands at its edge
    far_positions: Literal["ordinary", "clamped"] = "ordinary"
    chunk: Annotated[int, AtLeast(1)] = 512
    cache_tokens: Annotated[int, AtLeast(0)] = 4096  # block cache on the device, per kv head; 0: none
    cache_policy: Literal["lfu", "lru"] = "lru"
    cache_blocks_per_step: Annotated[int, AtLeast(1)] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repr_tokens > self.block:
            raise ConfigError(f"repr_tokens={self.repr_tokens} of a block of {self.block} tokens: lower repr_tokens")
        _ = self.cache  # checks that it holds a block

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
            out = compute_attention(inputs)
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
        received = left_aligned(index["received"], prompt.lengths)
        blocks = max(0, max(prompt.lengths) - self.n_sinks) // self.block
        inside = slice(self.n_sinks, self.n_sinks + blocks * self.block)
        block_states = prompt.keys[:, :, inside], received[:, :, inside]
        keys, repr_positions = representatives(self, *block_states, self.n_sinks, prompt.params)
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
        chosen = topk_slots(score, (numbers < done[:, None])[:, None], wanted, widest)[..., None]
        inside = torch.arange(size, device=score.device)
        slots = torch.where(chosen >= 0, self.n_sinks + chosen * size + inside, -1).flatten(2)
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
        probabilities = attention_probs(x, inputs.params.sinks)
        self._observe(inputs, retrieval_query, probabilities)
        return apply_probs(probabilities, inputs.values)
