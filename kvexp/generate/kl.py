"""KL divergence of next-token predictions from the full cache's, along a text that both are fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvexp.core.decode import cat_rows
from kvexp.generate.inputs import check_finite, check_length, check_tokens, rows_that_fit
from kvexp.generate.loop import MIN_ENDED_SHARE, batched_cache
from kvexp.generate.prefill import PrefilledContext, decode_step, feed_chunk
from kvexp.hf import MultiMethodCache
from kvexp.util.errors import ConfigError
from kvexp.util.progress import TEXTS, worked

# Tokens of a text in one forward. A single one would be attended to by other products, so that a row's last digits
# would depend on the company that cuts its text into chunks.
MIN_CHUNK, MAX_CHUNK = 2, 32
MAX_LOGIT_BYTES = 256 << 20  # of such a forward
ROWS_AT_ONCE = 16  # rows whose log-softmax is held at a time: 16 x 49k x 4 bytes is 3 MB


@dataclass(frozen=True)
class KL:
    """One row's comparison with the full cache, a number per token of the text (N tokens).

    kl: KL(full || variant) of the next-token distributions in nats, >= 0 up to rounding.
    full_logprob, logprob: natural-log probability of the text's token under the full cache and under the variant.
    same_top1: whether both rank the same token first.
    tokens: the text's token ids. The first entry of each list is predicted by the prefill, before anything was evicted
        (unless prompts are evicted between chunks).
    """

    tokens: list[int]
    kl: list[float] = field(default_factory=list)
    full_logprob: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    same_top1: list[bool] = field(default_factory=list)

    @property
    def line(self) -> dict[str, Any]:
        """The fields as JSON has them: 0 and 1 for truths."""
        return asdict(self) | {"same_top1": [int(same) for same in self.same_top1]}

    def mean(self, skip: int = 0) -> dict[str, Any]:
        """Nats per token (kl) and share of equal top tokens (top1) behind the first `skip`; None without any."""
        kl, same = [max(0.0, nats) for nats in self.kl[skip:]], self.same_top1[skip:]
        if not kl:
            return {"kl": None, "top1": None, "kl_tokens": 0}
        return {"kl": sum(kl) / len(kl), "top1": sum(same) / len(same), "kl_tokens": len(kl)}


@dataclass(eq=False)
class Forcing:
    """A batch of B prompts whose variants are compared with the full cache along one text per prompt.

    full and variants are contexts of these prompts (`prefill_together`, or `prefill` of each); all are used up.
    texts: token ids, one text per prompt; None: the full cache's own greedy answer, its end token included, which it
    writes while the variants are fed it.

    The fields below belong to `divergence_of_batches`: logits [R, V], of R rows, one per context and prompt, for the
    next token; prompt_lengths [B, 1]; ended: nothing of the texts is left to compare.
    """

    full: PrefilledContext
    variants: Sequence[PrefilledContext]
    texts: Sequence[Sequence[int]] | None = None
    logits: Tensor = field(init=False, repr=False)
    prompt_lengths: Tensor = field(init=False, repr=False)
    ended: bool = field(init=False, default=False)

    @property
    def contexts(self) -> list[PrefilledContext]:
        """The full cache's context, then the variants'."""
        return [self.full, *self.variants]

    @property
    def size(self) -> int:
        """Prompts of the batch, B."""
        return len(self.full.ids)

    @property
    def rows(self) -> int:
        """Rows of all contexts, R."""
        return len(self.contexts) * self.size

    def begin(self, max_new_tokens: int | None, eos: Sequence[int]) -> None:
        """Set the state before the first token; max_new_tokens, eos: of the full cache's own answers."""
        self.logits = torch.cat([context.logits for context in self.contexts])
        self.prompt_lengths = self.full.mask.sum(1, keepdim=True)
        device = self.full.ids.device
        self._width = max(map(len, self.texts)) if self.texts is not None else int(max_new_tokens or 0)
        self._padded = None if self.texts is None else _padded(self.texts, self._width).to(device)
        self._over = torch.zeros(self.size, dtype=torch.bool, device=device)
        self._eos, self._end_ids = set(eos), torch.tensor(list(eos), dtype=torch.int64, device=device)
        self._steps: list[Tensor] = []
        self._fed: list[Tensor] = []

    def compare_next(self, logits: Tensor) -> None:
        """Compare the next token, unless all are, by the logits [R, V] that predict it."""
        if not self.ended:
            full, column = logits[: self.size], len(self._fed)
            token = full.argmax(-1).to(self._over.device) if self._padded is None else self._padded[:, column]
            self._steps.append(compare(full, logits[self.size :], token))
            self._fed.append(token)
            self.ended = column + 1 == self._width
            if self._padded is None and not self.ended:  # only own answers end early, and asking waits for the device
                self._over = self._over | torch.isin(token, self._end_ids)
                self.ended = bool(self._over.all())

    @property
    def left(self) -> int:
        """Tokens that are still to be compared."""
        return self._width - len(self._fed)

    def tokens_and_positions(self, count: int) -> tuple[Tensor, Tensor]:
        """What is fed next, [R, count]: tokens from the last compared one on, and their position ids."""
        ahead = len(self._fed) - 1 + torch.arange(count, device=self.prompt_lengths.device)
        last = self._width - 1  # which is repeated behind the text of a batch that has ended
        tokens = self._fed[-1][:, None] if self._padded is None else self._padded[:, ahead.clamp_max(last)]
        positions = self.prompt_lengths + ahead
        return tokens.repeat(len(self.contexts), 1), positions.repeat(len(self.contexts), 1)

    def found(self) -> list[list[KL]]:
        """Variant -> row, once all tokens are compared."""
        columns = torch.stack(self._steps).cpu()  # [N, 4, variants * B]: one transfer for the whole text
        texts = self.texts
        if texts is None:  # up to and with the first end token
            rows = torch.stack(self._fed, 1).tolist()
            ends = [next((place for place, token in enumerate(row) if token in self._eos), len(row)) for row in rows]
            texts = [row[: end + 1] for row, end in zip(rows, ends, strict=True)]

        def row_of(place: int, row: int) -> KL:
            text = list(texts[row])
            kl, full_logprob, logprob, same = columns[: len(text), :, place * self.size + row].T.tolist()
            return KL(text, kl, full_logprob, logprob, [agrees > 0.5 for agrees in same])

        return [[row_of(place, row) for row in range(self.size)] for place in range(len(self.variants))]

    def fitting(self, model: PreTrainedModel) -> list[Forcing]:
        """The batch, or copies of its rows in groups that the model holds together with their texts."""
        texts, full = self.texts, self.full
        if texts is None:
            return [self]
        unbounded = full.cache.sequence.max_positions is None
        sizes = rows_that_fit(model, full.lengths, [len(text) for text in texts], unbounded)
        if len(sizes) == 1:
            return [self]
        groups, start = [], 0
        for size in sizes:
            rows = range(start, start + size)
            variants = [variant.fork(rows) for variant in self.variants]
            groups.append(Forcing(full.fork(rows), variants, [texts[row] for row in rows]))
            start += size
        return groups

    def check(self, model: PreTrainedModel, max_new_tokens: int | None) -> None:
        """ConfigError for contexts that are not of the same prompts, beams, and texts that cannot be fed."""
        full, variants, texts = self.full, self.variants, self.texts
        if not variants:
            raise ConfigError("divergence compares variants with the full cache: got no variant")
        method = full.cache.config.method
        if method.evicts or full.cache.config.quantization is not None:
            kind = method.name if method.evicts else "a quantised cache"
            raise ConfigError(f"divergence is measured from the full cache, got a context of {kind}")
        for context in self.contexts:
            if context.cache.sequence.num_beams != 1:
                raise ConfigError("divergence is not defined for beams: prefill with num_beams=1")
            if context.ids.shape != full.ids.shape or not torch.equal(context.ids, full.ids):
                raise ConfigError("divergence needs every context to be of the same prompts, in the same order")
        unbounded = full.cache.sequence.max_positions is None
        if texts is None:
            if max_new_tokens is None or max_new_tokens < 1:
                raise ConfigError(
                    "the full cache's own answer needs max_new_tokens, a whole number from 1; or give texts"
                )
            check_length(model, max(full.lengths), max_new_tokens, unbounded)
            return
        if len(texts) != len(full.ids):
            raise ConfigError(f"got {len(texts)} texts for {len(full.ids)} prompts: give one for each")
        if min(map(len, texts)) == 0:
            raise ConfigError("a text is empty: divergence needs at least one token")
        check_tokens(model, texts, "the text of ")
        rows_that_fit(model, full.lengths, [len(text) for text in texts], unbounded)


def divergence_from_full(
    model: PreTrainedModel,
    full: PrefilledContext,
    variants: Sequence[PrefilledContext],
    texts: Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int | None = None,
    eos: Sequence[int] = (),
) -> list[list[KL]]:
    """Compare each variant with the full cache along one text per prompt: variant -> row.

    full, variants, texts: as of `Forcing`; own answers have up to max_new_tokens tokens and end with one of eos. The
    last token of a text is predicted and not fed. Errors are ConfigError before the model runs.
    """
    batch = Forcing(full, variants, texts)
    return divergence_of_batches(model, [batch], max_new_tokens=max_new_tokens, eos=eos)[0]


@torch.no_grad()
def divergence_of_batches(
    model: PreTrainedModel,
    batches: Sequence[Forcing],
    *,
    max_new_tokens: int | None = None,
    eos: Sequence[int] = (),
) -> list[list[list[KL]]]:
    """`divergence_from_full` for several batches: fed in the same steps, each of which reads the weights once for all.

    Batch -> variant -> row.
    """
    for batch in batches:
        batch.check(model, max_new_tokens)
    fitting = [batch.fitting(model) for batch in batches]
    if any(len(groups) > 1 for groups in fitting):
        all_parts = [group for groups in fitting for group in groups]
        divergences = iter(divergence_of_batches(model, all_parts, max_new_tokens=max_new_tokens, eos=eos))
        by_batch = [list(zip(*(next(divergences) for _ in groups), strict=True)) for groups in fitting]
        return [[[row for rows in groups for row in rows] for groups in variants] for variants in by_batch]
    for batch in batches:
        batch.begin(max_new_tokens, eos)
    going, feeder = batches, _Feeder(model, batches)
    texts = sum(len(batch.variants) * batch.size for batch in batches)
    longest = max((len(text) for batch in batches for text in batch.texts or ()), default=max_new_tokens or 0)
    while True:
        worked(TEXTS, texts / max(1, longest))
        for batch in going:
            batch.compare_next(batch.logits)
        if all(batch.ended for batch in going):
            break
        # Leaving some out copies the caches of the others: worth it once they are many.
        if sum(batch.rows for batch in going if batch.ended) >= MIN_ENDED_SHARE * sum(batch.rows for batch in going):
            going = [batch for batch in going if not batch.ended]
            feeder = _Feeder(model, going)
        width = feeder.width(min(batch.left for batch in going if not batch.ended))
        fed = [batch.tokens_and_positions(width) for batch in going]
        logits = feeder.feed(*(torch.cat(columns) for columns in zip(*fed, strict=True)))
        for batch, columns in zip(going, logits.split([batch.rows for batch in going]), strict=True):
            for column in range(width - 1):
                batch.compare_next(columns[:, column])
            batch.logits = columns[:, -1]
        worked(TEXTS, (width - 1) * texts / max(1, longest))
    for batch in batches:
        for context in batch.contexts:
            check_finite(context.cache)
    return [batch.found() for batch in batches]


class _Feeder:
    """Feeds the rows of some batches: texts in chunks of up to `most` tokens, own answers token by token.

    Caches that cannot take a chunk layer by layer (`EvictionCache.takes_chunks`) take its tokens in as many forwards.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Forcing]) -> None:
        contexts = [context for batch in batches for context in batch.contexts]
        self.model, self.sizes = model, [len(context.ids) for context in contexts]
        known = all(batch.texts is not None for batch in batches)
        token_bytes = 4 * contexts[0].logits.shape[-1] * sum(self.sizes)
        self.most = min(MAX_CHUNK, max(MIN_CHUNK, MAX_LOGIT_BYTES // token_bytes)) if known else 1
        chunked = [i for i, context in enumerate(contexts) if known and context.cache.takes_chunks]
        single = [i for i in range(len(contexts)) if i not in chunked]
        self.parts = [
            (members, batched_cache([contexts[i] for i in members], by_layer=members is chunked))
            for members in (chunked, single)
            if members
        ]

    def width(self, left: int) -> int:
        """Tokens to feed next where the shortest text has `left`, behind which its last token is repeated."""
        return min(self.most, max(left, MIN_CHUNK))

    def feed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, n, V] after each of n tokens per row, token ids and position ids [R, n]."""
        outputs: dict[int, Tensor] = {}
        rows = list(zip(tokens.split(self.sizes), positions.split(self.sizes), strict=True))
        for members, cache in self.parts:
            ids, position_ids = (torch.cat(columns) for columns in zip(*(rows[i] for i in members), strict=True))
            if isinstance(cache, MultiMethodCache) and cache.by_layer:
                logits = feed_chunk(self.model, ids, position_ids, cache)
            else:
                columns = zip(ids.split(1, dim=1), position_ids.split(1, dim=1), strict=True)
                logits = torch.stack([decode_step(self.model, *column, cache) for column in columns], dim=1)
            outputs |= zip(members, logits.split([self.sizes[i] for i in members]), strict=True)
        return cat_rows([outputs[i] for i in range(len(rows))]) if len(self.parts) > 1 else logits


@torch.no_grad()
def read_questions(
    model: PreTrainedModel, contexts: Sequence[PrefilledContext], questions: Sequence[Sequence[int]]
) -> None:
    """Feed a question per row (token ids, all of one length) to contexts of the same prompts, in place.

    Token by token, with eviction going on, as when they are answered (`generate_from_contexts`).
    """
    first, cache = contexts[0], batched_cache(contexts)
    questions_t = torch.as_tensor([list(question) for question in questions], device=first.ids.device)
    positions = (first.mask.sum(1, keepdim=True) - 1).repeat(len(contexts), 1)
    for column in range(questions_t.shape[1]):
        positions = positions + 1
        logits = decode_step(model, questions_t[:, column : column + 1].repeat(len(contexts), 1), positions, cache)
    ids, mask = torch.cat([first.ids, questions_t], dim=1), torch.cat([first.mask, torch.ones_like(questions_t)], dim=1)
    for context, last in zip(contexts, logits.split(len(first.ids)), strict=True):
        context.ids, context.mask, context.logits = ids, mask, last


def _padded(texts: Sequence[Sequence[int]], width: int) -> Tensor:
    """[B, width], zeros behind the shorter ones."""
    forced = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        forced[row, : len(text)] = torch.as_tensor(list(text))
    return forced


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
        logprob = block.gather(2, token[None, :, None].expand(len(block), -1, 1))[:, :, 0]
        same = (block.argmax(-1) == best).to(kl.dtype)
        parts.append(torch.stack([kl, chosen.expand_as(kl), logprob, same]).flatten(1))
    return torch.cat(parts, dim=1)
