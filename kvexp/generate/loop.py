"""Generate with a cache that evicts: token by token (greedy or sampled), or with beams by Hugging Face's generate().

Token by token gives the tokens of Hugging Face's generate() without its cost per step.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvexp.core import Budget, CacheConfig, Method
from kvexp.core.decode import cat_rows
from kvexp.core.sequence import Span
from kvexp.generate.graph import DecodeSteps, GraphCounts, graph_device
from kvexp.generate.inputs import (
    EvictionStats,
    Generation,
    GenerationParams,
    RowProcessors,
    StopStrings,
    Timing,
    are_chats,
    check_bounded,
    check_finite,
    check_length,
    check_rows,
    check_seq_length,
    eos_ids,
    equal_length,
    logits_processors,
    pad_id,
    pad_left,
    question_lengths,
    real_prompts,
    receipt_of,
    seeds_per_row,
    split_options,
    stop_strings_of,
    truncate_at_end,
    with_keywords,
)
from kvexp.generate.prefill import PrefilledContext, forward_last, new_cache, prefill
from kvexp.hf import EvictionCache, MultiMethodCache
from kvexp.hf.chat_template import end_of_turn
from kvexp.hf.traits import CACHE_ARGUMENT
from kvexp.util.errors import ConfigError
from kvexp.util.progress import ANSWERS, worked

# Contexts of several batches that have ended are left out of a step once they are such a share of all: leaving some out
# copies the caches of the others, which takes as long as several steps. Those of one batch are left out at once.
MIN_ENDED_SHARE = 0.25


def decode(
    model: PreTrainedModel,
    contexts: Sequence[PrefilledContext],
    decoding: GenerationParams,
    seeds: list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool = False,
) -> list[Generation]:
    """Decode from contexts of the same prompts, together; uses them up. Every row is what it would be alone.

    seeds: of sampling, one per prompt; start: the `time.perf_counter()` from which the times count. Returns one
    Generation per context.
    """
    return decode_batches(model, [contexts], decoding, [seeds], tokenizer, start=start, keep_logits=keep_logits)[0]


@torch.no_grad()
def decode_batches(
    model: PreTrainedModel,
    batches: Sequence[Sequence[PrefilledContext]],
    decoding: GenerationParams,
    seeds: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool = False,
) -> list[list[Generation]]:
    """`decode` for several batches of prompts at once, so that a step reads the model's weights once for all of them.

    batches, seeds: the contexts and the seeds of each batch of prompts. Returns one list of Generations per batch.
    """
    eos, pad = eos_ids(model, decoding.eos), pad_id(model, tokenizer)
    stops, prepared = StopStrings(stop_strings_of(model, decoding), tokenizer, decoding.thinking), []
    for contexts, row_seeds in zip(batches, seeds, strict=True):
        processors = RowProcessors.of(model, decoding, contexts[0].ids, contexts[0].mask, eos)
        prepared.append(_Batch(contexts, decoding, row_seeds, eos, pad, stops, processors))
    note = _decode_loop(model, prepared, decoding.max_new_tokens, keep_logits)
    return [batch.generations(start, note) for batch in prepared]


def _decode_loop(model: PreTrainedModel, batches: list[_Batch], max_new_tokens: int, keep_logits: bool) -> str | None:
    """Up to max_new_tokens tokens per row, of which the last is not fed; returns `Generation.cuda_graph`."""
    going, counts = batches, GraphCounts()
    cache = batched_cache([context for batch in batches for context in batch.contexts])
    steps = DecodeSteps(model, cache, counts)
    answers = sum(len(batch.ids) for batch in batches)
    for left in reversed(range(max_new_tokens)):
        # 1. Choose the next token of every row.
        tokens = [batch.next_token(keep_logits) for batch in going]
        # 2. See which rows have ended. This waits for the device, so that the time is true.
        done = [batch.done.view(-1, batch.size).tolist() for batch in going]
        now = time.perf_counter()
        for batch, ended in zip(going, done, strict=True):
            batch.record(ended, now, last=left == 0)
        worked(ANSWERS, answers / max_new_tokens)
        if left == 0 or not any(batch.num_going for batch in going):
            worked(ANSWERS, answers * left / max_new_tokens)  # the steps that no row needed
            break
        # 3. Leave out the contexts all of whose rows have ended, once they are many; the others go on.
        ended_share = 1 - sum(batch.num_going for batch in going) / sum(len(batch.outputs) for batch in going)
        if ended_share >= MIN_ENDED_SHARE or (ended_share and len(batches) == 1):
            pairs = [(batch, token) for batch, token in zip(going, tokens, strict=True) if batch.num_going]
            going, tokens = [batch for batch, _ in pairs], [batch.drop_ended(token) for batch, token in pairs]
            cache = batched_cache([context for batch in going for context in batch.contexts])
            steps = DecodeSteps(model, cache, counts)
        for batch in going:
            batch.copy_ended()
        # 4. Feed the tokens.
        logits = steps(cat_rows(tokens), cat_rows([batch.positions for batch in going]))
        for batch, batch_logits in zip(going, logits.split([len(token) for token in tokens]), strict=True):
            batch.logits = batch_logits
    return counts.note


class _Batch:
    """The rows R of one batch of prompts while they decode: `size` rows of each context, one context after the other.

    eos: ids of end tokens; pad: id of padding; processors: the model's own logits processors, one list per prompt.
    ids [R, columns]: all tokens read and written; positions [R, 1]: of the last one; logits [R, V]: of the next one;
    seeds: of sampling, by row; done [R] bool: the rows that have ended, at an end token or a stop string. outputs: of
    the contexts that are still fed; all_outputs: of all, in the order of the contexts.
    """

    def __init__(
        self,
        contexts: Sequence[PrefilledContext],
        decoding: GenerationParams,
        seeds: list[int],
        eos: list[int],
        pad: int,
        stops: StopStrings,
        processors: RowProcessors | None,
    ) -> None:
        self.decoding, self.eos, self.pad, self.stops = decoding, eos, pad, stops
        first, many = contexts[0], len(contexts)
        (self.size, self.columns), device = first.ids.shape, first.ids.device
        self.ids = first.ids.repeat(many, 1)
        self.positions = (first.mask.sum(1, keepdim=True) - 1).repeat(many, 1)
        self.logits = torch.cat([context.logits for context in contexts])
        self.seeds = seeds * many
        self.done = torch.zeros(len(self.ids), dtype=torch.bool, device=device)
        self.eos_ids = torch.tensor(eos, dtype=torch.int64, device=device)
        self.processors = processors and processors.keep(list(range(self.size)) * many)
        self.logits_processors = logits_processors(decoding, self.seeds, self.columns, eos, device, self.processors)
        self.outputs = self.all_outputs = [_Output(context) for context in contexts]

    @property
    def contexts(self) -> list[PrefilledContext]:
        """The contexts that are still fed."""
        return [output.context for output in self.outputs]

    @property
    def num_going(self) -> int:
        """Contexts with a row that goes on."""
        return sum(not output.ended for output in self.outputs)

    def next_token(self, keep_logits: bool) -> Tensor:
        """Choose the next token [R, 1] of every row, padding for rows that have ended, and append it.

        keep_logits: let the outputs of contexts that go on keep the logits it was chosen by.
        """
        if keep_logits:
            for output, logits in zip(self.outputs, self.logits.split(self.size), strict=True):
                if not output.ended:
                    output.logits.append(logits.float())
        scores = self.logits_processors(self.ids, self.logits.to(self.ids.device, torch.float32, copy=True))
        token: Tensor = scores.argmax(-1).masked_fill_(self.done, self.pad)[:, None]
        self.ids, self.positions = torch.cat([self.ids, token], dim=1), self.positions + 1
        if len(self.eos_ids):
            self.done = self.done | torch.isin(token[:, 0], self.eos_ids)
        if self.stops:
            self.done = self.done | self.stops.done(self.ids, self.columns)
        return token

    def record(self, done: list[list[bool]], now: float, *, last: bool) -> None:
        """Record one step in the outputs. done: per context, which rows have ended; last: no step follows."""
        for output, ids, ended in zip(self.outputs, self.ids.split(self.size), done, strict=True):
            output.record(ids, ended, now, last=last)

    def drop_ended(self, token: Tensor) -> Tensor:
        """Leave out the contexts that have ended; returns the others' tokens out of token [R, 1]."""
        going = [not output.ended for output in self.outputs]
        if all(going):
            return token
        rows = torch.tensor(going, device=self.ids.device).repeat_interleave(self.size).nonzero()[:, 0]
        self.outputs = [output for output in self.outputs if not output.ended]
        self.ids, self.positions, self.done = self.ids[rows], self.positions[rows], self.done[rows]
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.processors = self.processors and self.processors.keep(rows.tolist())
        self.logits_processors = logits_processors(
            self.decoding, self.seeds, self.columns, self.eos, self.ids.device, self.processors
        )
        return token[rows]

    def copy_ended(self) -> None:
        """Let the outputs of contexts that have ended and will be fed padding hold a copy of their cache as it is."""
        for output in self.outputs:
            cache = output.context.cache
            if output.ended and output.cache is cache:
                output.cache = cache.fork(range(self.size))
                # A copy has no room to grow: its own bytes would be fewer than those that were held.
                output.cache.memory_tracker = copy.deepcopy(cache.memory_tracker)

    def generations(self, start: float, cuda_graph: str | None) -> list[Generation]:
        """One Generation per context; start: the `time.perf_counter()` from which its times count; cuda_graph: its."""
        generations = []
        for output in self.all_outputs:
            check_seq_length(output.cache, self.columns, len(output.token_times))
            check_finite(output.cache)
            tokens, ends = truncate_at_end(output.ids, self.columns, self.eos, self.stops)
            generations.append(
                Generation(
                    tokens=tokens,
                    endings=ends,
                    sequences=output.ids,
                    timing=Timing.of(start, output.token_times),
                    memory_tracker=output.cache.memory_tracker,
                    cache=output.cache,
                    logits=tuple(output.logits),
                    early_stats=output.early_stats,
                    cuda_graph=cuda_graph,
                )
            )
        return generations


class _Output:
    """The output of one context's rows.

    cache: the context's own, or a copy as it stood at the end, where the context is fed padding after that. ended:
    whether all rows have. ids [B, columns]; token_times: when each token was known; logits: [B, V] of each token, if
    asked for; early_stats: of rows that ended before the others of this context, as they stood then.
    """

    def __init__(self, context: PrefilledContext) -> None:
        self.context, self.cache, self.ids = context, context.cache, context.ids
        self.ended = False
        self.token_times: list[float] = []
        self.logits: list[Tensor] = []
        self.early_stats: dict[int, EvictionStats] = {}

    def record(self, ids: Tensor, ended: list[bool], now: float, *, last: bool) -> None:
        """Record one step: ids [B, columns] with the new tokens; ended: which rows have; last: no step follows."""
        if self.ended:
            return
        self.ids = ids
        self.token_times.append(now)
        if last:
            return
        if all(ended):
            self.ended = True
            return
        fresh = (row for row, over in enumerate(ended) if over and row not in self.early_stats)
        self.early_stats |= {row: receipt_of(self.cache, row) for row in fresh}


def batched_cache(contexts: Sequence[PrefilledContext], *, by_layer: bool = False) -> EvictionCache | MultiMethodCache:
    """The cache through which the rows of all contexts take their next tokens; by_layer: as of `MultiMethodCache`."""
    if len(contexts) == 1 and not by_layer:
        return contexts[0].cache
    sizes = [len(context.ids) for context in contexts]
    return MultiMethodCache([context.cache for context in contexts], sizes, by_layer=by_layer)


class _TokenWatch(StoppingCriteria):  # type: ignore[misc]
    """Records when each token was known, and ends rows whose new tokens hold a stop string. columns: of the prompt."""

    def __init__(self, stops: StopStrings, columns: int) -> None:
        self.stops, self.columns = stops, columns
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        if self.stops:
            return self.stops.done(input_ids, self.columns)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def beam_search(
    model: PreTrainedModel,
    cache: EvictionCache,
    ids: Tensor,
    mask: Tensor,
    decoding: GenerationParams,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool,
) -> Generation:
    """Beam search from ids and mask [B, columns] int64, of which the cache may have seen a first part.

    mask: 0 for padding; start: the `time.perf_counter()` from which the times count. Other arguments as of `generate`.
    """
    eos = eos_ids(model, decoding.eos)
    stops = StopStrings(stop_strings_of(model, decoding), tokenizer, decoding.thinking)
    watch = _TokenWatch(stops, ids.shape[1])
    processors = RowProcessors.of(model, decoding, ids, mask, eos)
    # Without the model's own generation defaults, such as a temperature, which would change a result without being
    # asked for; its logits processors are passed on.
    plain = copy.copy(model)
    plain.generation_config = GenerationConfig()
    output: Any = plain.generate(
        ids,
        attention_mask=mask,
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
        do_sample=False,
        num_beams=decoding.num_beams,
        early_stopping=decoding.early_stopping,
        length_penalty=decoding.length_penalty,
        max_new_tokens=decoding.max_new_tokens,
        min_new_tokens=(decoding.min_new_tokens or None) if processors is None else None,
        logits_processor=None if processors is None else LogitsProcessorList([processors]),
        eos_token_id=eos or None,
        pad_token_id=pad_id(model, tokenizer),
        prefill_chunk_size=decoding.prefill_chunk,
        stopping_criteria=StoppingCriteriaList([watch]),
        return_dict_in_generate=True,
        output_logits=keep_logits,
        output_scores=True,
    )
    check_seq_length(cache, ids.shape[1], len(watch.times))
    check_finite(cache)
    tokens, ends = truncate_at_end(output.sequences, ids.shape[1], eos, stops)
    return Generation(
        tokens=tokens,
        endings=ends,
        sequences=output.sequences,
        timing=Timing.of(start, watch.times),
        memory_tracker=cache.memory_tracker,
        cache=cache,
        beam_scores=output.sequences_scores.tolist(),
        logits=tuple(output.logits) if keep_logits else (),
        cuda_graph=None if graph_device(cache) is None else "beams are not captured: transformers feeds their steps",
    )


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]] | Mapping[str, Any] | Tensor,
    method: Method | CacheConfig,
    budget: Budget | None = None,
    *,
    kv_ratio: float | None = None,
    tokens: int | None = None,
    attention_mask: Sequence[Sequence[int]] | Tensor | None = None,
    questions: Sequence[Sequence[int]] | None = None,
    decoding: GenerationParams | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    keep_logits: bool = False,
    prepare: Callable[[EvictionCache], object] | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
    **options: Any,
) -> Generation:
    """Generate for a batch of prompts under an eviction method.

    prompts: token ids per row, all that the tokenizer gave, or with `tokenizer` texts or chats. A chat goes through the
        chat template as in `kvexp run`, whose end of a turn ends the answer; a last turn of the assistant is gone on
        with.
    method, budget, options: what the cache does, as of `CacheConfig`; or a CacheConfig in place of the method.
    kv_ratio, tokens: the budget in a word, in place of `budget`.
    attention_mask: of the prompts, 0 for padding, which is left out; None: a tokenizer's output has its own, and token
        ids by themselves are unpadded.
    questions: token ids, one list per prompt, all of one length, fed token by token after the prompts were prefilled
        and evicted; the budget is that of the prompt alone.
    decoding: how tokens are chosen, and how many; or in transformers' words among the options: max_new_tokens,
        min_new_tokens, num_beams, do_sample, temperature, top_k, top_p, eos_token_id, stop_strings and so on.
    tokenizer: needed for texts, chats and stop strings; with it the result has `texts`.
    seeds: of sampling and of noise inside methods, one for all rows or one per row: a row's tokens depend on its
        prompt, question and seed alone.
    keep_logits: keep one [B, V] tensor per step.
    prepare: is called with the new cache before anything is fed.
    spans: of each prompt what `keep` of the options spares, as (first token, one behind the last).

    Errors are ConfigError, before the model runs.
    """
    decoding, of_cache = split_options(decoding, options)
    if kv_ratio is not None or tokens is not None:
        if budget is not None:
            raise ConfigError("give budget, or kv_ratio or tokens, not both")
        budget = Budget(kv_ratio=kv_ratio, tokens=tokens)
    config = CacheConfig.of(method, budget, **of_cache)
    chats = are_chats(prompts)
    prompts = real_prompts(model, prompts, attention_mask, tokenizer)
    if chats and decoding.eos == "model" and (end := end_of_turn(tokenizer)):
        decoding = dataclasses.replace(decoding, eos=tuple(dict.fromkeys([*eos_ids(model, "model"), *end])))
    _check_decoding(model, decoding, tokenizer)
    row_seeds = seeds_per_row(seeds, len(prompts))
    new = decoding.max_new_tokens
    if questions is not None:
        new += equal_length(question_lengths(model, len(prompts), questions))
    check_length(model, max(len(prompt) for prompt in prompts), new, config.beyond_context)
    start = time.perf_counter()
    if questions is None and decoding.num_beams > 1:  # Hugging Face's generate() does the prefill too
        check_bounded(config, prompts, decoding.num_beams, decoding.prefill_chunk)
        check_rows(model, prompts, new, decoding.prefill_chunk)
        ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
        cache = new_cache(model, prompts, config, ids.shape[1], new, row_seeds, decoding.num_beams, tokenizer, spans)
        if prepare is not None:
            prepare(cache)
        answer = beam_search(model, cache, ids, mask, decoding, tokenizer, start=start, keep_logits=keep_logits)
        return answer.decoded(tokenizer)
    context = prefill(
        model,
        prompts,
        config,
        max_new_tokens=new,
        num_beams=decoding.num_beams,
        chunk=decoding.prefill_chunk,
        tokenizer=tokenizer,
        seeds=row_seeds,
        prepare=prepare,
        spans=spans,
    )
    if questions is None:
        answers = decode(model, [context], decoding, row_seeds, tokenizer, start=start, keep_logits=keep_logits)
        return answers[0].decoded(tokenizer)
    return generate_from_context(
        model, context, questions, decoding=decoding, tokenizer=tokenizer, seeds=row_seeds, keep_logits=keep_logits
    ).decoded(tokenizer)


def generate_from_context(
    model: PreTrainedModel, context: PrefilledContext, questions: Sequence[Sequence[int]], **options: Any
) -> Generation:
    """Generate the answer to one question (token ids) per row of a prefilled context; uses the context up.

    Questions are of one length and count as decode steps, so eviction goes on while they are read. options: decoding,
    tokenizer and keep_logits as of `generate`; seeds, of sampling alone, as noise inside methods keeps the context's;
    arguments of decoding under transformers' names. Times include the context's prefill.
    """
    return generate_from_contexts(model, [context], questions, **options)[0]


@torch.no_grad()
def generate_from_contexts(
    model: PreTrainedModel,
    contexts: Sequence[PrefilledContext],
    questions: Sequence[Sequence[int]],
    *,
    decoding: GenerationParams | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    keep_logits: bool = False,
    **options: Any,
) -> list[Generation]:
    """`generate_from_context` for several caches of the same contexts (`prefill_together`), as rows of one batch.

    Not with beams. Returns one Generation per context.
    """
    decoding, first = with_keywords(decoding, options), contexts[0]
    _check_decoding(model, decoding, tokenizer)
    rows, beams = len(first.ids), decoding.num_beams
    row_seeds, length = seeds_per_row(seeds, rows), equal_length(question_lengths(model, rows, questions))
    new = length + decoding.max_new_tokens
    for context in contexts:
        if context.cache.sequence.num_beams != beams:
            was = context.cache.sequence.num_beams
            raise ConfigError(f"the context was prefilled for num_beams={was}, not for {beams}")
        check_length(model, max(context.lengths), new, context.cache.sequence.max_positions is None)
        context.set_max_new_tokens(new)
    start = time.perf_counter() - first.seconds
    questions_t = torch.as_tensor([list(question) for question in questions]).to(first.ids.device)
    before, ids = first.ids.shape[1], torch.cat([first.ids, questions_t], dim=1)
    mask = torch.cat([first.mask, torch.ones_like(questions_t)], dim=1)
    steps = questions_t.repeat_interleave(beams, 0).repeat(len(contexts), 1)
    seen = mask.repeat_interleave(beams, 0).repeat(len(contexts), 1)
    cache, logits = batched_cache(contexts), first.logits
    for j in range(length - 1 if beams > 1 else length):  # generate(), which does the beams, feeds the last one itself
        logits = forward_last(model, steps[:, j : j + 1], seen[:, : before + j + 1], cache)
    if beams > 1:
        whole = dataclasses.replace(decoding, prefill_chunk=None)
        return [beam_search(model, first.cache, ids, mask, whole, tokenizer, start=start, keep_logits=keep_logits)]
    for context, last in zip(contexts, logits.split(rows), strict=True):
        context.ids, context.mask, context.logits = ids, mask, last
    return decode(model, contexts, decoding, row_seeds, tokenizer, start=start, keep_logits=keep_logits)


def _check_decoding(
    model: PreTrainedModel, decoding: GenerationParams, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """ConfigError for stop strings without a tokenizer, and for the model's own settings that cannot be followed."""
    StopStrings(stop_strings_of(model, decoding), tokenizer)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    RowProcessors.of(model, decoding, ids, ids + 1, eos_ids(model, decoding.eos))
