"""Log-likelihoods of given continuations under eviction: prefill, evict, feed the continuation token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import Budget, CacheConfig, Method
from kvexp.generate.inputs import check_finite, check_tokens, question_lengths, real_prompts, rows_that_fit
from kvexp.generate.prefill import PrefilledContext, prefill
from kvexp.hf.moving_rope import MovingRope
from kvexp.hf.patch import forward_logits
from kvexp.util.errors import ConfigError


@torch.no_grad()
def continuation_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]] | Mapping[str, Any] | Tensor,
    continuations: Sequence[Sequence[int]],
    method: Method | CacheConfig,
    budget: Budget | None = None,
    *,
    attention_mask: Sequence[Sequence[int]] | Tensor | None = None,
    questions: Sequence[Sequence[int]] | None = None,
    seeds: int | Sequence[int] = 0,
    max_new_tokens: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> list[list[float]]:
    """Natural-log probability of every token of given continuations: prefill, evict, feed the tokens one by one.

    The first token is predicted by the full prefill, every later one by what survived. One list per row. questions: fed
    after the eviction and before the continuations, not scored; then no token is predicted by the full prefill.
    max_new_tokens: the length by which tau schedules and budget.of=sequence go, questions included; needed where rows
    differ in it, since a row must not depend on its neighbours. Other arguments as of `generate`. ConfigError before
    the model runs.
    """
    config = CacheConfig.of(method, budget, **options)
    prompts = real_prompts(model, prompts, attention_mask, tokenizer)
    lengths = _lengths(model, len(prompts), continuations, questions)
    length = _schedule(config, max_new_tokens, lengths)
    rows_that_fit(model, [len(prompt) for prompt in prompts], lengths, config.beyond_context)
    context = prefill(model, prompts, config, max_new_tokens=length, seeds=seeds, tokenizer=tokenizer)
    return score_continuations(model, context, continuations, questions, max_new_tokens=length)


def score_continuations(
    model: PreTrainedModel,
    context: PrefilledContext,
    continuations: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int | None = None,
) -> list[list[float]]:
    """`continuation_logprobs` from a prefilled context with one row per continuation; uses the context up."""
    rows = score_tokens(model, context, continuations, questions, max_new_tokens=max_new_tokens)
    return [[token.logprob for token in row] for row in rows]


class Token(NamedTuple):
    """Natural-log probability of a token, and whether greedy decoding would have taken it."""

    logprob: float
    is_greedy: bool


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel,
    context: PrefilledContext,
    continuations: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]] | None = None,
    *,
    max_new_tokens: int | None = None,
    one_forward: bool = False,
) -> list[list[Token]]:
    """Score given continuations token by token from a prefilled context; uses the context up.

    Returns one list of `Token` per row. one_forward: feed all tokens in one forward, for caches that evict and quantise
    nothing while decoding, where only rounding can differ. ConfigError for other caches: nothing would be evicted
    between the tokens. Rows that the model does not hold together are scored one group after the other
    (`rows_that_fit`), from copies: the context's own cache then stays at the prompts' end.
    """
    cache = context.cache
    before = questions or [[]] * len(continuations)
    lengths = _lengths(model, len(context.ids), continuations, questions)
    length = _schedule(cache.config, max_new_tokens, lengths)
    groups = rows_that_fit(model, context.lengths, lengths, cache.sequence.max_positions is None)
    if len(groups) > 1:
        scored: list[list[Token]] = []
        for size in groups:
            group = slice(len(scored), len(scored) + size)
            fork = context.fork(range(len(lengths))[group])
            some_questions = None if questions is None else questions[group]
            scored += score_tokens(
                model, fork, continuations[group], some_questions, max_new_tokens=length, one_forward=one_forward
            )
        return scored
    context.set_max_new_tokens(length)
    fed = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, (question, continuation) in enumerate(zip(before, continuations, strict=True)):
        fed[row, : lengths[row]] = torch.as_tensor([*question, *continuation])
    fed = fed.to(context.ids.device)
    if one_forward and not cache.config.only_grows:
        verb = "quantises" if cache.config.quantization is not None else "evicts"
        raise ConfigError(f"method {cache.config.method.name} {verb} while decoding: feed it one token at a time")
    if one_forward and (moving := MovingRope.of(model.config)) is not None:
        raise ConfigError(f"{moving.why}: feed the continuation one token at a time")
    width = fed.shape[1] - 1 if one_forward else 1
    tokens = [score_step(context.logits[:, None], fed[:, :1])]
    mask = context.mask
    cache.allow_multi_token_steps(width > 1)
    for step, following in zip(fed[:, :-1].split(width or 1, 1), fed[:, 1:].split(width or 1, 1), strict=True):
        mask = torch.cat([mask, torch.ones_like(step)], dim=1)
        if step.shape[1]:
            tokens.append(score_step(forward_logits(model, step, mask, cache, keep=step.shape[1]), following))
    check_finite(cache)
    rows = [[Token(*pair) for pairs in parts for pair in pairs] for parts in zip(*tokens, strict=True)]
    return [row[len(question) : length] for row, question, length in zip(rows, before, lengths, strict=True)]


def score_step(logits: Tensor, tokens: Tensor) -> list[list[tuple[float, bool]]]:
    """(log-probability, is_greedy) of tokens [B, Q] under the logits [B, Q, V] that predict them, row by row."""
    tokens = tokens.to(logits.device)
    chosen = logits.float().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0].tolist()
    is_greedy = (logits.argmax(-1) == tokens).tolist()
    return [list(zip(*row, strict=True)) for row in zip(chosen, is_greedy, strict=True)]


def _lengths(
    model: PreTrainedModel,
    rows: int,
    continuations: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]] | None,
) -> list[int]:
    """Tokens of question and continuation per row; ConfigError for what cannot be fed."""
    if rows != len(continuations) or not rows:
        raise ConfigError(f"got {rows} prompts and {len(continuations)} continuations: give one for each")
    if min(len(continuation) for continuation in continuations) == 0:
        raise ConfigError("a continuation is empty: every continuation needs at least one token")
    check_tokens(model, continuations, "the continuation of ")
    if questions is None:
        return [len(continuation) for continuation in continuations]
    question_sizes = question_lengths(model, rows, questions)
    return [length + len(continuation) for length, continuation in zip(question_sizes, continuations, strict=True)]


def _schedule(config: CacheConfig, max_new_tokens: int | None, lengths: list[int]) -> int:
    """The max_new_tokens by which tau schedules and budget.of=sequence go: as given, or the longest row's length.

    ConfigError where rows differ in length and the schedule depends on it: it would depend on the other rows of the
    batch.
    """
    spec, budget = config.method.score_spec, config.budget
    matters = (spec is not None and spec.tau[0] != spec.tau[1]) or (budget is not None and budget.counts_ahead)
    if max_new_tokens is None and matters and len(set(lengths)) > 1:
        raise ConfigError(
            f"continuations of {min(lengths)} to {max(lengths)} tokens: a tau schedule or a budget of tokens to come "
            "needs max_new_tokens, else a row would depend on its neighbours"
        )
    if max_new_tokens is not None and max_new_tokens < max(lengths):
        raise ConfigError(f"max_new_tokens={max_new_tokens}, but a continuation has {max(lengths)} tokens")
    return max_new_tokens or max(lengths)
