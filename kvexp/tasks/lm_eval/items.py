"""lm-eval's items as examples: what each asks of the model, and lm-eval's own metrics of the answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.lm_eval.package import quiet

# Metrics that are shares of 1; others keep lm-eval's own scale.
PER_UNIT = {"word_perplexity": "word_nll", "byte_perplexity": "byte_nll", "bits_per_byte": "byte_nll"}
SHARES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1")


@dataclass(frozen=True)
class Request:
    """A log-likelihood to measure: of `continuation` after context + question.

    question: the part of the prompt that arrives after the eviction; empty where the whole prompt is the context. A
    text alone (rolling) has no context.
    """

    continuation: str
    context: str = ""
    question: str = ""


@dataclass(frozen=True)
class Item(Example):
    """One item of an lm-eval task: document `number` of it.

    kind: loglikelihood (a request per choice; contexts may differ, as in winogrande), loglikelihood_rolling (one
    request), or generate_until (the prompt, with `generation` as lm-eval's generation_kwargs).
    """

    kind: str = "loglikelihood"
    number: int = 0
    requests: tuple[Request, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    instances: tuple[Any, ...] = field(default=(), repr=False, compare=False)


def items(task: Any, limit: int | None, after_eviction: bool) -> Iterator[Item]:
    """The items of an lm-eval task object, made exactly as its evaluator makes them.

    Examples are drawn item after item, so always from the first one on: fresh task objects give equal items.
    """
    for number, doc in task.doc_iterator(limit=limit):
        try:
            with quiet():
                made = _item(task, number, doc, after_eviction)
        except ConfigError:
            raise
        except Exception as error:  # jinja's, a missing key, the assertions of lm-eval: no common base
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            raise ConfigError(
                f"row {number + 1} of the data of lm-eval's task {task.config.task} cannot be asked ({reason}); it "
                f"has the columns {', '.join(doc)}"
            ) from error
        yield made


def _item(task: Any, number: int, doc: Any, after_eviction: bool) -> Item:
    name, prefix = task.config.task, task.doc_to_prefix(doc)
    _check_columns(task, number, doc)
    context = task.fewshot_context(doc, num_fewshot=task.config.num_fewshot or 0, gen_prefix=prefix)
    made = task.construct_requests(doc=doc, ctx=context, metadata=(name, number, task.config.repeats))
    instances = tuple(made) if isinstance(made, list) else (made,)
    shape = {"kind": instances[0].request_type, "number": number, "instances": instances}
    reference = _reference(task, doc)
    if shape["kind"] == "generate_until":
        prompt, generation = instances[0].args[:2]
        question = _question(task, doc, prompt, prefix) if after_eviction else ""
        return Item(
            f"{name}/{number}",
            prompt.removesuffix(question),
            reference,
            question=question,
            generation=generation,
            **shape,
        )
    requests = tuple(_request(task, doc, instance.args, prefix, after_eviction) for instance in instances)
    return Item(f"{name}/{number}", requests[0].context, reference, requests=requests, **shape)


def _check_columns(task: Any, number: int, doc: Mapping[str, Any]) -> None:
    """A column that only some rows have is None in the others, and would be asked about as the word None."""
    config = task.config
    templates = [t for t in (config.doc_to_text, config.doc_to_target, config.doc_to_choice) if isinstance(t, str)]
    for column in (key for key, value in doc.items() if value is None):
        if any(re.search(rf"\b{re.escape(column)}\b", template) for template in templates):
            raise ConfigError(f"row {number + 1} of the data of lm-eval's task {config.task} has no {column!r}")


def _request(task: Any, doc: Any, args: Sequence[str], prefix: str | None, after_eviction: bool) -> Request:
    if len(args) == 1:
        if after_eviction:
            raise ConfigError(
                f"task.question=after_eviction: {task.config.task} measures whole texts, which hold no question"
            )
        return Request(args[0])
    context, continuation = args[:2]
    question = _question(task, doc, context, prefix) if after_eviction and context else ""
    return Request(continuation, context.removesuffix(question), question)


def _question(task: Any, doc: Any, prompt: str, prefix: str | None) -> str:
    """The end of a prompt that is this item's own, with the white space that parts it from the examples."""
    alone = task.fewshot_context(doc, num_fewshot=0, gen_prefix=prefix)
    described = len(task.resolve_field(doc, task.config.description) or "")
    ends = [text[described:] for text in ([alone] if isinstance(alone, str) else alone)]
    own = max((end for end in ends if prompt.endswith(end)), key=len, default="")
    if len(own) in (0, len(prompt)):
        raise ConfigError(
            f"task.question=after_eviction: an item of {task.config.task} cannot be told from the examples before it"
        )
    before = prompt.removesuffix(own)
    return prompt[len(before.rstrip()) :]


def _reference(task: Any, doc: Any) -> str:
    """The right answer in words."""
    target = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(target, int) and task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(doc)
        return str(choices[target]) if target < len(choices) else ""
    return target if isinstance(target, str) else str(target)


def score(task: Any, item: Item, results: Sequence[Any]) -> dict[str, float]:
    """lm-eval's metrics of one item, shares of 1 in percent; results: one per instance, as its models return them.

    Metrics of a whole corpus (F1 over classes) cannot be an item's and are left out; perplexities become nats (per
    word, per byte, or of the answer), and any other metric of which less is better is left out too.
    """
    for instance, result in zip(item.instances, results, strict=True):
        instance.resps, instance.filtered_resps = [result], {}
    task._instances = list(item.instances)
    with quiet():
        task.apply_filters()
        found: dict[str, float] = {}
        names = list(item.instances[0].filtered_resps)
        for name in names:
            values = task.process_results(item.instances[0].doc, [i.filtered_resps[name] for i in item.instances])
            ending = "" if len(names) == 1 else f",{name}"
            for metric, value in values.items():
                less = task.higher_is_better().get(metric) is False
                found |= {f"{key}{ending}": number for key, number in _numbers(metric, value, less).items()}
    return found


def _numbers(metric: str, value: Any, less_is_better: bool) -> dict[str, float]:
    if metric == "perplexity" and isinstance(value, float):
        return {"nll": -value}
    if metric in PER_UNIT:
        loglikelihood, units = value
        return {PER_UNIT[metric]: -loglikelihood / units}
    if less_is_better or not (isinstance(value, bool | int | float) or getattr(value, "shape", None) == ()):
        return {}
    return {metric: 100.0 * float(value) if metric in SHARES else float(value)}
