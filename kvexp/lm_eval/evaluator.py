"""A model, a method and a protocol: log-likelihoods and texts as lm-eval asks for them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvexp.core import CacheConfig
from kvexp.core.cache_budget import check_budget, may_evict
from kvexp.errors import ConfigError
from kvexp.generate import Generation, GenerationParams, generate
from kvexp.lm_eval.encode import Encoder
from kvexp.lm_eval.requests import Ask, Judged, padded
from kvexp.lm_eval.row_mask_protocol import check_row_mask
from kvexp.lm_eval.row_mask_requests import Masked
from kvexp.lm_eval.stepwise import Stepwise, of_whole
from kvexp.models.chat_template import Thinking
from kvexp.models.families import check_positions, max_positions, num_layers
from kvexp.models.repeated_prompt import check_second_pass
from kvexp.tasks.lm_eval import Protocol


@dataclass(frozen=True)
class Bench:
    """What measures; numbers do not depend on what is asked together, nor on batch_size (rows in a forward).

    thinking: tags of what generated texts are returned without.
    """

    model: Any
    tokenizer: Any
    cache: CacheConfig
    protocol: Protocol = field(default_factory=Protocol)
    batch_size: int = 1
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        if self.masked:
            check_row_mask(self.cache, self.protocol.mask)

    @property
    def masked(self) -> bool:
        return self.protocol.mode == "row_mask"

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.protocol.add_bos)

    @property
    def holds(self) -> int:
        """Positions that may be used."""
        return 1 << 40 if self.cache.beyond_context else max_positions(self.model.config)

    def ask(
        self, context: str, question: str, continuation: str, *, group: Hashable = None, seed: int = 0
    ) -> Ask | None:
        """The log-likelihood of a continuation, cut on the left to what the model holds; None where that is too little.

        See `Ask` for group and seed.
        """
        made = self.encoder.ask(context, question, continuation, self.holds)
        return None if made is None else replace(made, group=group, seed=seed)

    def windows(self, text: str, *, seed: int = 0) -> list[Ask]:
        """A whole text as lm-eval parts it: windows of the model's length, every token judged once.

        The first window follows the start token alone; eviction takes place from the first token on.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        start, most = self.encoder.start(), max_positions(self.model.config)
        parts = get_rolling_token_windows(self.encoder.text(text), start, most, context_len=1)
        made = (make_disjoint_window(part) for part in parts)
        return [Ask(tuple(before), tuple(after), seed=seed, whole=True) for before, after in made]

    def with_batches(self, asks: Sequence[Ask]) -> list[Ask]:
        """The asks of a whole task with the budgets they have in padded batches, where the protocol wants that."""
        how = self.protocol
        return list(asks) if how.budget_length == "own" else padded(asks, how.padded_batch, how.whole_text)

    def measure(self, asks: Sequence[Ask]) -> list[Judged]:
        """One judgement per ask, in order."""
        if not self.masked:
            return Stepwise(self.model, self.cache, self.batch_size, self.tokenizer).measure(asks)
        how = self.protocol
        dtype = {"float32": torch.float32, "float16": torch.float16}[how.score_dtype]
        return Masked(self.model, self.cache, how.mask, how.whole_text, dtype).measure(asks)

    def result(self, judged: Judged) -> tuple[float, bool]:
        """What lm-eval's scorers take: (log-probability, greedy)."""
        return (judged.total / len(judged.tokens) if self.protocol.per_token else judged.total), judged.greedy

    def obstacle(self, asks: Sequence[Ask]) -> str | None:
        """Why a context is too short for its budget, None if none is. What no context could have is raised."""
        if self.masked or self.cache.budget is None:
            return None
        check_positions(self.model.config, self.cache)
        layers = num_layers(self.model.config)
        for length, ahead, whole in dict.fromkeys((len(ask.context), ask.ahead, ask.whole) for ask in asks):
            cache = of_whole(self.cache) if whole else self.cache
            try:
                check_budget(cache, [length], length, ahead, layers)
                if may_evict(cache, [length], length, ahead, layers):
                    check_second_pass(cache, self.tokenizer, length, self.holds)
            except ConfigError as error:
                return str(error)
        return None

    def prompt(self, context: str, question: str, asked: Mapping[str, Any]) -> tuple[list[int], list[int], int]:
        """(context, question, tokens the context lost on the left to leave room for the answer) to generate after.

        asked: lm-eval's generation_kwargs. The context is empty where nothing would be left of it.
        """
        whole = self.encoder.text(context + question)
        ids, rest = self.encoder.part(whole, context) if question else (whole, [])
        room = self.holds - decoding_of(self.model, self.tokenizer, asked)[0].max_new_tokens
        over = max(0, len(whole) - room)
        return (ids[over:], rest, over) if over < len(ids) else ([], rest, over)

    def generate(
        self, contexts: Sequence[list[int]], questions: Sequence[list[int]], asked: Mapping[str, Any], seeds: list[int]
    ) -> tuple[list[str], Generation]:
        """Texts after contexts and questions (ids; all of one length, or all empty), cut at the stop texts.

        asked: lm-eval's generation_kwargs: until, max_gen_toks, do_sample, temperature, top_k, top_p.
        """
        decoding, until = decoding_of(self.model, self.tokenizer, asked)
        decoding = replace(decoding, thinking=self.thinking)
        result = generate(
            self.model,
            list(contexts),
            self.cache,
            attention_mask=[[1] * len(ids) for ids in contexts],
            questions=list(questions) if any(questions) else None,
            decoding=decoding,
            tokenizer=self.tokenizer,
            seeds=seeds,
        )
        return [cut_at(self._answer(tokens), until) for tokens in result.tokens], result

    def _answer(self, tokens: list[int]) -> str:
        """The text of generated tokens, without the thinking before it."""
        if self.thinking is not None:
            return self.thinking.part(tokens, self.tokenizer).text
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def decoding_of(model: Any, tokenizer: Any, asked: Mapping[str, Any]) -> tuple[GenerationParams, list[str]]:
    """lm-eval's generation_kwargs as `GenerationParams`, and the texts to cut the answer at; others are refused."""
    from lm_eval.models.utils import normalize_gen_kwargs

    known = dict(normalize_gen_kwargs(dict(asked), 256))
    until = [stop for stop in known.pop("until") if stop]
    most, sample = known.pop("max_gen_toks"), bool(known.pop("do_sample", False))
    temperature = known.pop("temperature", 1.0)
    picked = {name: known.pop(name) for name in ("top_k", "top_p") if name in known}
    if known:
        raise ConfigError(
            f"generation_kwargs {sorted(known)[0]} is not offered; there are until, max_gen_toks, do_sample, "
            "temperature, top_k and top_p"
        )
    ends = {tokenizer.eos_token_id, *_ends(model)} - {None}
    options = {"temperature": float(temperature), **picked} if sample else {}
    decoding = GenerationParams(
        max_new_tokens=most, sample=sample, eos=sorted(ends), stop_strings=tuple(until), **options
    )
    return decoding, [*until, *([tokenizer.eos_token] if tokenizer.eos_token else [])]


def _ends(model: Any) -> list[int]:
    own = model.generation_config.eos_token_id
    return [] if own is None else own if isinstance(own, list) else [own]


def cut_at(text: str, until: Sequence[str]) -> str:
    """The text before the first of each stop text in turn, as lm-eval cuts it."""
    for stop in until:
        text = text.split(stop)[0]
    return text
