"""Divergence from the full cache: how far a method's next-token distributions are from the full cache's on one text.

A text is teacher-forced: the same token ids are fed to the full cache and to every variant, which stand as rows of one
batch, and at each position the two distributions over the whole vocabulary are compared. Quantities and their names
are those of llama.cpp's `--kl-divergence` (perplexity tool) and of "Accuracy is Not All You Need" (arXiv:2407.09141).
No distribution outlives its step: memory is O(rows * vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvexp.errors import ConfigError
from kvexp.generate.decode_loop import batched_cache
from kvexp.generate.inputs import check_length, check_tokens
from kvexp.generate.output import check_finite
from kvexp.generate.prefilled_context import PrefilledContext, decode_step

ROWS_AT_ONCE = 16  # rows whose log-softmax is held at a time: 16 x 49k x 4 bytes is 3 MB


@dataclass(frozen=True)
class TextDivergence:
    """One row's comparison with the full cache, a number per token of the forced text (N tokens).

    kl: KL(full || variant) of the next-token distributions in nats, >= 0 up to rounding.
    full_logprob, logprob: natural-log probability of the forced token under the full cache and under the variant.
    same_top1: whether both rank the same token first.
    tokens: the text's token ids. The first entry of each list is predicted by the prefill, before anything was evicted.
    """

    tokens: list[int]
    kl: list[float] = field(default_factory=list)
    full_logprob: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    same_top1: list[bool] = field(default_factory=list)


@torch.no_grad()
def divergence_from_full(
    model: PreTrainedModel,
    full: PrefilledContext,
    variants: Sequence[PrefilledContext],
    texts: Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int | None = None,
    eos: Sequence[int] = (),
) -> list[list[TextDivergence]]:
    """Compare each variant with the full cache along one text per prompt: variant -> row.

    full and variants are contexts of the same B prompts (`shared_prefill`, or `prefill` of each); all are used up.
    texts: token ids, one text per prompt; None: the full cache's own greedy answer, of up to max_new_tokens tokens, its
    end token (one of eos) included, which it writes while the variants are fed it. The last token of a text is
    predicted and not fed. Errors are ConfigError before the model runs.
    """
    size = len(full.ids)
    _check(model, full, variants, texts, max_new_tokens)
    contexts = [full, *variants]
    width = max(map(len, texts)) if texts is not None else int(max_new_tokens or 0)
    forced = None if texts is None else _padded(texts, width).to(full.ids.device)
    logits = torch.cat([context.logits for context in contexts])
    positions = (full.mask.sum(1, keepdim=True) - 1).repeat(len(contexts), 1)
    cache = batched_cache(contexts)
    ends = torch.tensor(list(eos), dtype=torch.int64, device=full.ids.device)
    over = torch.zeros(size, dtype=torch.bool, device=full.ids.device)
    steps, fed = [], []
    for column in range(width):
        token = logits[:size].argmax(-1).to(full.ids.device) if forced is None else forced[:, column]
        steps.append(compare(logits[:size], logits[size:], token))
        fed.append(token)
        over = over | torch.isin(token, ends) if forced is None else over
        if column + 1 == width or bool(over.all()):
            break
        positions = positions + 1
        logits = decode_step(model, token[:, None].repeat(len(contexts), 1), positions, cache)
    for context in contexts:
        check_finite(context.cache)
    found = torch.stack(steps).cpu()  # [N, 4, variants * B]: one transfer for the whole text
    if texts is None:
        texts = [_ended(row, eos) for row in torch.stack(fed, 1).tolist()]
    return [
        [_text(list(text), found[: len(text), :, place * size + row]) for row, text in enumerate(texts)]
        for place in range(len(variants))
    ]


@torch.no_grad()
def read_questions(
    model: PreTrainedModel, contexts: Sequence[PrefilledContext], questions: Sequence[Sequence[int]]
) -> None:
    """Feed a question per row (token ids, all of one length) to contexts of the same prompts, in place.

    Token by token, with eviction going on, as when they are answered (`generate_from_contexts`).
    """
    first, cache = contexts[0], batched_cache(contexts)
    asked = torch.as_tensor([list(question) for question in questions], device=first.ids.device)
    positions = (first.mask.sum(1, keepdim=True) - 1).repeat(len(contexts), 1)
    for column in range(asked.shape[1]):
        positions = positions + 1
        logits = decode_step(model, asked[:, column : column + 1].repeat(len(contexts), 1), positions, cache)
    ids, mask = torch.cat([first.ids, asked], dim=1), torch.cat([first.mask, torch.ones_like(asked)], dim=1)
    for context, last in zip(contexts, logits.split(len(first.ids)), strict=True):
        context.ids, context.mask, context.logits = ids, mask, last


def _padded(texts: Sequence[Sequence[int]], width: int) -> Tensor:
    """[B, width], zeros behind the shorter ones."""
    forced = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        forced[row, : len(text)] = torch.as_tensor(list(text))
    return forced


def _ended(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """Up to and with the first end token."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in set(eos)), tokens)


def compare(full: Tensor, logits: Tensor, token: Tensor) -> Tensor:
    """One position: full [B, V] and logits [n * B, V] of n variants, token [B] that is forced -> [4, n * B] float32.

    The rows are KL(full || variant) in nats, log p_full(token), log p_variant(token), and 1 where the top tokens agree.
    """
    size, many = len(full), len(logits) // len(full)
    token = token.to(full.device)
    reference = full.float().log_softmax(-1)
    weights, best = reference.exp(), reference.argmax(-1)
    chosen = reference.gather(1, token[:, None])[:, 0]
    parts = []
    step = max(1, ROWS_AT_ONCE // size)
    for first in range(0, many, step):
        block = logits[first * size : (first + step) * size].float().log_softmax(-1).view(-1, *reference.shape)
        kl = (weights * (reference - block)).sum(-1)
        own = block.gather(2, token[None, :, None].expand(len(block), -1, 1))[:, :, 0]
        same = (block.argmax(-1) == best).to(kl.dtype)
        parts.append(torch.stack([kl, chosen.expand_as(kl), own, same]).flatten(1))
    return torch.cat(parts, dim=1)


def _text(tokens: list[int], columns: Tensor) -> TextDivergence:
    """columns [N, 4] of `compare`."""
    kl, full_logprob, logprob, same = columns.T.tolist()
    return TextDivergence(tokens, kl, full_logprob, logprob, [each > 0.5 for each in same])


def _check(
    model: PreTrainedModel,
    full: PrefilledContext,
    variants: Sequence[PrefilledContext],
    texts: Sequence[Sequence[int]] | None,
    max_new_tokens: int | None,
) -> None:
    """ConfigError for contexts that are not of the same prompts, beams, and texts that cannot be fed."""
    if not variants:
        raise ConfigError("divergence compares variants with the full cache: got no variant")
    method = full.cache.config.method
    if method.evicts:
        raise ConfigError(f"divergence is measured from the full cache, got a context of {method.name}")
    for context in (full, *variants):
        if context.cache.sequence.num_beams != 1:
            raise ConfigError("divergence is not defined for beams: prefill with num_beams=1")
        if context.ids.shape != full.ids.shape or not torch.equal(context.ids, full.ids):
            raise ConfigError("divergence needs every context to be of the same prompts, in the same order")
    if texts is None:
        if max_new_tokens is None or max_new_tokens < 1:
            raise ConfigError("the full cache's own answer needs max_new_tokens, a whole number from 1; or give texts")
        check_length(model, max(full.lengths), max_new_tokens, full.cache.sequence.max_positions is None)
        return
    if len(texts) != len(full.ids):
        raise ConfigError(f"got {len(texts)} texts for {len(full.ids)} prompts: give one for each")
    if min(map(len, texts)) == 0:
        raise ConfigError("a text is empty: divergence needs at least one token")
    check_tokens(model, texts, "the text of ")
    check_length(model, max(full.lengths), max(map(len, texts)), full.cache.sequence.max_positions is None)
