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
from kvexp.generate.decode_loop import joined
from kvexp.generate.inputs import check_length, check_tokens
from kvexp.generate.output import check_scores
from kvexp.generate.prefilled_context import PrefilledContext, one_step

ROWS_AT_ONCE = 16  # rows whose log-softmax is held at a time: 16 x 49k x 4 bytes is 3 MB


@dataclass(frozen=True)
class TextDivergence:
    """One row's comparison with the full cache, a number per token of the forced text (N tokens).

    kl: KL(full || variant) of the next-token distributions in nats, >= 0 up to rounding.
    full_logprob, logprob: natural-log probability of the forced token under the full cache and under the variant.
    same_top1: whether both rank the same token first.
    The first token of each list is predicted by the prefill, before anything was evicted.
    """

    kl: list[float] = field(default_factory=list)
    full_logprob: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    same_top1: list[bool] = field(default_factory=list)


@torch.no_grad()
def divergence_from_full(
    model: PreTrainedModel,
    full: PrefilledContext,
    variants: Sequence[PrefilledContext],
    texts: Sequence[Sequence[int]],
) -> list[list[TextDivergence]]:
    """Compare each variant with the full cache along one text (token ids) per prompt: variant -> row.

    full and variants are contexts of the same B prompts (`shared_prefill`, or `prefill` of each); all are used up.
    The last token of a text is predicted and not fed. Errors are ConfigError before the model runs.
    """
    size = len(full.ids)
    _check(model, full, variants, texts)
    contexts = [full, *variants]
    width = max(map(len, texts))
    forced = torch.zeros(size, width, dtype=torch.int64)
    for row, text in enumerate(texts):
        forced[row, : len(text)] = torch.as_tensor(list(text))
    forced = forced.to(full.ids.device)
    logits = torch.cat([context.logits for context in contexts])
    positions = (full.mask.sum(1, keepdim=True) - 1).repeat(len(contexts), 1)
    cache = joined(contexts)
    steps: list[Tensor] = []
    for column in range(width):
        token = forced[:, column : column + 1]
        steps.append(compare(logits[:size], logits[size:], token[:, 0]))
        if column + 1 == width:
            break
        positions = positions + 1
        logits = one_step(model, token.repeat(len(contexts), 1), positions, cache)
    for context in contexts:
        check_scores(context.cache)
    found = torch.stack(steps).cpu()  # [N, 4, variants * B]: one transfer for the whole text
    return [
        [_text(found[: len(text), :, place * size + row]) for row, text in enumerate(texts)]
        for place in range(len(variants))
    ]


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


def _text(columns: Tensor) -> TextDivergence:
    """columns [N, 4] of `compare`."""
    kl, full_logprob, logprob, same = columns.T.tolist()
    return TextDivergence(kl, full_logprob, logprob, [each > 0.5 for each in same])


def _check(
    model: PreTrainedModel,
    full: PrefilledContext,
    variants: Sequence[PrefilledContext],
    texts: Sequence[Sequence[int]],
) -> None:
    """ConfigError for contexts that are not of the same prompts, beams, and texts that cannot be fed."""
    if not variants:
        raise ConfigError("divergence compares variants with the full cache: got no variant")
    if full.cache.plan.method.evicts:
        raise ConfigError(f"divergence is measured from the full cache, got a context of {full.cache.plan.method.name}")
    for context in (full, *variants):
        if context.cache.timeline.num_beams != 1:
            raise ConfigError("divergence is not defined for beams: prefill with num_beams=1")
        if context.ids.shape != full.ids.shape or not torch.equal(context.ids, full.ids):
            raise ConfigError("divergence needs every context to be of the same prompts, in the same order")
    if len(texts) != len(full.ids):
        raise ConfigError(f"got {len(texts)} texts for {len(full.ids)} prompts: give one for each")
    if min(map(len, texts)) == 0:
        raise ConfigError("a text is empty: divergence needs at least one token")
    check_tokens(model, texts, "the text of ")
    check_length(model, max(full.lengths), max(map(len, texts)), full.cache.timeline.max_positions is None)
