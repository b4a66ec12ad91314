"""lm-eval's items as the runner asks them: their token ids as lm-eval makes them, and their answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvexp.evaluate.model_output import NO_TIMES, ModelOutput
from kvexp.evaluate.outputs import outputs_of
from kvexp.evaluate.tokenized_examples import TokenizedExample
from kvexp.tasks.lm_eval import Item, LMEval

if TYPE_CHECKING:
    from kvexp.config.settings import Settings
    from kvexp.lm_eval import Bench
    from kvexp.models.types import Model, Tokenizer


@dataclass(frozen=True)
class ItemPrompt(TokenizedExample):
    """asks: the log-likelihoods to measure (kvexp.lm_eval.requests.Ask); ids are the first one's context."""

    asks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ItemAnswer(ModelOutput):
    """results: what lm-eval's models return for the item's requests."""

    results: list[Any] = field(default_factory=list)


def bench_of(settings: Settings, model: Model, tokenizer: Tokenizer) -> Bench:
    from kvexp.lm_eval import Bench

    assert isinstance(settings.task, LMEval)
    return Bench(model, tokenizer, settings.cache, settings.task.measured, settings.batch_size, settings.thinking)


def item_prompt(settings: Settings, model: Model, tokenizer: Tokenizer, item: Item) -> TokenizedExample:
    """The item in tokens, or why it is skipped."""
    bench = bench_of(settings, model, tokenizer)
    if item.kind == "generate_until":
        return _generation_prompt(settings, bench, item)
    seed = settings.seed + item.number
    if item.kind == "loglikelihood_rolling":
        asks = bench.windows(item.requests[0].continuation, seed=seed)
    else:
        asked = [bench.ask(r.context, r.question, r.continuation, group=item.number, seed=seed) for r in item.requests]
        asks = [ask for ask in asked if ask is not None]
        if len(asks) < len(asked):
            return TokenizedExample(item, "", [], skipped="too long")
    assert isinstance(settings.task, LMEval)
    if bench.protocol.budget_length == "padded":
        bases = _bases(settings.task, settings.task.pinned, tokenizer, bench.holds)
        asks = [dataclasses.replace(ask, base=bases[item.number, place]) for place, ask in enumerate(asks)]
    cut = max(ask.cut for ask in asks)
    tokens = len(asks[0].context) + len(asks[0].question) + asks[0].cut
    if cut and settings.task.truncate == "skip":
        return TokenizedExample(item, "", [], skipped="too long", tokens=tokens)
    if obstacle := bench.obstacle(asks):
        return TokenizedExample(item, "", [], skipped=obstacle, tokens=tokens)
    ids, question = list(asks[0].context), list(asks[0].question)
    return ItemPrompt(item, item.prompt, ids, bool(cut), tokens=tokens, question_ids=question, asks=tuple(asks))


def _generation_prompt(settings: Settings, bench: Bench, item: Item) -> TokenizedExample:
    from kvexp.lm_eval.requests import Ask

    ids, question, cut = bench.prompt(item.prompt, item.question, item.generation)
    count = len(ids) + len(question) + cut
    if not ids or (cut and settings.task.truncate == "skip"):
        return TokenizedExample(item, "", [], skipped="too long", tokens=count)
    if obstacle := bench.obstacle([Ask(tuple(ids), tuple(question) or (0,))]):
        return TokenizedExample(item, "", [], skipped=obstacle, tokens=count)
    return ItemPrompt(item, item.prompt, ids, bool(cut), tokens=count, question_ids=question)


@functools.lru_cache(maxsize=1)
def _bases(task: LMEval, data: str, tokenizer: Tokenizer, holds: int) -> dict[tuple[int, int], int]:
    """(item, request) -> the tokens its budget counts, from the batches of the whole task, whatever the limit.

    data: the task's fingerprint, for equal tasks whose files have changed.
    """
    from kvexp.lm_eval.encode import Encoder
    from kvexp.lm_eval.requests import padded

    how, keys, asks = task.measured, [], []
    encoder = Encoder(tokenizer, how.add_bos)
    for item in task.everything():
        for place, request in enumerate(item.requests):
            ask = encoder.ask(request.context, "", request.continuation, holds)
            if ask is not None:
                keys.append((item.number, place))
                asks.append(ask)
    return {key: ask.base for key, ask in zip(keys, padded(asks, how.padded_batch, how.whole_text), strict=True)}


def item_answers(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Sequence[tuple[int, TokenizedExample]]
) -> dict[int, ModelOutput]:
    """Index -> answer. Items are measured together; what each answers does not depend on that."""
    bench = bench_of(settings, model, tokenizer)
    measured = [(index, prompt) for index, prompt in batch if isinstance(prompt, ItemPrompt) and prompt.asks]
    made: dict[int, ModelOutput] = {}
    judged = iter(bench.measure([ask for _, prompt in measured for ask in prompt.asks]))
    for index, prompt in measured:
        made[index] = _judged(bench, prompt, [next(judged) for _ in prompt.asks])
    others = {index: prompt for index, prompt in batch if index not in made}
    return made | {index: _generated(settings, bench, tokenizer, prompt) for index, prompt in others.items()}


def _judged(bench: Bench, prompt: ItemPrompt, judged: Sequence[Any]) -> ModelOutput:
    """The likeliest request gives the receipt and the output; a text in windows is one request."""
    item = prompt.example
    assert isinstance(item, Item)
    best = max(range(len(judged)), key=lambda i: judged[i].total)
    logprobs, counts = [each.total for each in judged], [len(each.tokens) for each in judged]
    results: list[Any] = [bench.result(each) for each in judged]
    output = item.requests[min(best, len(item.requests) - 1)].continuation
    if item.kind == "loglikelihood_rolling":
        results, output = [sum(logprobs)], ""
    # No time per token: full is fed a whole choice at once, what evicts while decoding one token at a time.
    seconds = {**NO_TIMES, "ttft": judged[best].prefill_s}
    receipt = dataclasses.asdict(judged[best].receipt)
    return ItemAnswer(output, sum(counts), receipt, seconds, logprobs, counts, results=results)


def _generated(settings: Settings, bench: Bench, tokenizer: Tokenizer, prompt: TokenizedExample) -> ModelOutput:
    item = prompt.example
    assert isinstance(item, Item)
    seed = settings.seed + item.number
    (text,), result = bench.generate([prompt.ids], [prompt.question_ids], item.generation, [seed])
    answer = outputs_of(result, tokenizer)[0]
    output = text if settings.thinking is None else answer.output  # the text with its thinking stays in the row
    return ItemAnswer(**{**vars(answer), "output": output}, results=[text])
