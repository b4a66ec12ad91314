"""kvexp as a model of lm-eval, registered as "kvexp": importing this module needs lm-eval."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from kvexp.errors import ConfigError
from kvexp.lm_eval.arguments import ModelArguments
from kvexp.lm_eval.evaluator import Bench
from kvexp.lm_eval.requests import Ask
from kvexp.models import cpu_linear, load_model, load_tokenizer
from kvexp.models.chat_template import Thinking, check_arguments, facts_of, render, with_arguments
from kvexp.models.half_precision import one_row_per_forward
from kvexp.models.moving_rope import MovingRope

AGAIN = 1 << 24  # from the seeds of an item's first answer to those of its second: more than there are items


@register_model("kvexp")
class KvexpLM(TemplateLM):  # type: ignore[misc]
    """A causal LM under an eviction method.

    pretrained: a folder, a hub id, or a model that kvexp has loaded (then with its tokenizer). The other arguments are
    run.py's: method, kv_ratio, protocol and its switches, method.recent_ratio, budget.tokens, cache.evict_every and so
    on, seed, dtype, device. The numbers are those of `run.py task=lm_eval` with the same settings: an item's noise goes
    by seed + its number in its task. chat_template_args, enable_thinking, think_end_token: as of lm-eval's own hf
    model; where its template is applied, answers go without their thinking by the template's own tags too.
    batch_size: rows per forward (one in half precision on a CPU), of no effect on any number but in half precision on
    a GPU.
    """

    def __init__(
        self,
        pretrained: Any,
        method: str = "full",
        kv_ratio: float | None = None,
        protocol: str = "prefill_then_step",
        *,
        seed: int = 0,
        tokenizer: Any = None,
        dtype: str = "float32",
        device: str | None = None,
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        pack_linear: bool = True,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        asked = ModelArguments.of(method, kv_ratio, protocol, settings)
        if not str(batch_size or 1).isdigit() or int(batch_size or 1) < 1:
            raise ConfigError(f"batch_size must be a number of rows, at least 1, got {batch_size!r}")
        if isinstance(pretrained, str):
            hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
            place: dict[str, Any] = {"device_map": device_map} if device_map else {"device": device}
            tokenizer = load_tokenizer(tokenizer or pretrained, **hub)
            pretrained = load_model(pretrained, dtype=dtype, allow_pickle=allow_pickle, **hub, **place)
            if pack_linear:
                cpu_linear.pack_linear(pretrained)
        elif tokenizer is None:
            raise ConfigError("a model that is loaded already needs tokenizer=")
        given = dict(chat_template_args or {})
        given |= {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if given:
            check_arguments(tokenizer, given, "chat_template_args")
        self.seed, self.tokenizer = seed, with_arguments(tokenizer, given)
        self.think_end = None if think_end_token is None else _end_of(think_end_token, tokenizer)
        weight = pretrained.get_input_embeddings().weight
        by_itself = one_row_per_forward(str(weight.dtype).removeprefix("torch."), weight.device.type)
        by_itself |= MovingRope.of(pretrained.config) is not None
        how, rows = asked.protocol, 1 if by_itself else int(batch_size or 1)
        thinking = None if self.think_end is None else Thinking.ending(self.think_end)
        self.bench = Bench(pretrained, tokenizer, asked.cache, how, rows, thinking)

    @property
    def eot_token_id(self) -> int:
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        return self.bench.encoder.start()

    @property
    def max_length(self) -> int:
        return self.bench.holds

    @property
    def tokenizer_name(self) -> str:
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.bench.encoder.text(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """lm-eval's messages through the tokenizer's template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("--apply_chat_template, but this tokenizer has no chat template")
        if self.think_end is None:
            self.bench = replace(self.bench, thinking=self._thinking)
        return render(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @functools.cached_property
    def _thinking(self) -> Thinking | None:
        """The tags of the tokenizer's template."""
        return facts_of(self.tokenizer).thinking

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, greedy) per request. Requests of one item share what they have in common."""
        asks = [self._ask(request, place) for place, request in enumerate(requests)]
        tasks: dict[Any, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            tasks[request.task_name].append(place)
        for places in tasks.values():
            for place, ask in zip(places, self.bench.with_batches([asks[p] for p in places]), strict=True):
                asks[place] = ask
        results: list[tuple[float, bool]] = []
        for part in _items(asks, self.bench.batch_size):
            results += map(self.bench.result, self.bench.measure(part))
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def _ask(self, request: Instance, place: int) -> Ask:
        context, continuation = request.args[:2]
        group = place if request.doc_id is None else (request.task_name, request.doc_id)
        ask = self.bench.ask(context, "", continuation, group=group, seed=self._seed(request))
        if ask is None:
            raise ConfigError(f"the model holds {self.max_length} tokens, too few for the answer {continuation[:40]!r}")
        return ask

    def _seed(self, request: Instance) -> int:
        return self.seed + (request.doc_id or 0)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        """For callers that bring token ids themselves: [(texts, context ids, continuation ids)]."""
        asks = [Ask(tuple(context), tuple(continuation), seed=self.seed) for _, context, continuation in requests]
        return [self.bench.result(judged) for judged in self.bench.measure(asks)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's length."""
        totals = []
        for request in requests:
            windows = self.bench.windows(request.args[0], seed=self._seed(request))
            totals.append(sum(judged.total for judged in self.bench.measure(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts. A request that comes again (lm-eval's repeats) samples anew."""
        texts, again = [], Counter[Any]()
        for start in range(0, len(requests), self.bench.batch_size):
            for part in _alike(requests[start : start + self.bench.batch_size]):
                seeds = []
                for request in part:
                    key = (request.task_name, request.doc_id, request.idx)
                    seeds.append(self._seed(request) + again[key] * AGAIN)
                    again[key] += 1
                contexts = [self._prompt(request) for request in part]
                texts += self.bench.generate(contexts, [[]] * len(part), part[0].args[1], seeds)[0]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, request: Instance) -> list[int]:
        ids, _, _ = self.bench.prompt(request.args[0], "", request.args[1])
        if not ids:
            raise ConfigError(f"max_gen_toks leaves no room for a prompt: the model holds {self.max_length} tokens")
        return ids


def _end_of(token: str | int, tokenizer: Any) -> str:
    """The text of lm-eval's think_end_token, a text or a token id."""
    return str(tokenizer.decode([int(token)])) if str(token).isdigit() else str(token)


def _items(asks: list[Ask], size: int) -> list[list[Ask]]:
    """Neighbouring asks of `size` items at a time."""
    parts: list[list[Ask]] = []
    groups: list[Any] = []
    for ask in asks:
        if not parts or (ask.group != groups[-1] and len(groups) == size):
            parts.append([])
            groups = []
        if not groups or ask.group != groups[-1]:
            groups.append(ask.group)
        parts[-1].append(ask)
    return parts


def _alike(requests: list[Instance]) -> list[list[Instance]]:
    """Neighbours of equal generation_kwargs together."""
    parts: list[list[Instance]] = []
    for request in requests:
        if not parts or request.args[1] != parts[-1][-1].args[1]:
            parts.append([])
        parts[-1].append(request)
    return parts
