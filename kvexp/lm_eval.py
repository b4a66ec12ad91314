"""lm-eval's requests answered with a cache that evicts: log-likelihoods and texts, under one of two protocols.

`prefill_then_step`: a context is prefilled and evicted once, then forked for what follows it. `row_mask`: one forward
over context and continuation, each row under its own mask (the papers' lm-eval). Importing this module imports no
lm-eval.

`kvexp lm-eval` is lm-eval's command line with the model kvexp; task=lm_eval writes the same numbers as rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvexp.core import Budget, CacheConfig, Method, Noise
from kvexp.core.budget import floor_share
from kvexp.core.budget_resolution import check_budget, may_evict
from kvexp.core.row_mask import MaskedLayer, MaskFn, causal_probs, global_mask, ideal_mask, local_mask, window_mask
from kvexp.generate import (
    EvictionStats,
    Generation,
    GenerationParams,
    PrefilledContext,
    Token,
    generate,
    prefill,
    receipts,
    score_tokens,
)
from kvexp.generate.inputs import rows_that_fit
from kvexp.generate.loglikelihood import score_step
from kvexp.hf import RowMaskCache
from kvexp.hf.chat_template import Thinking
from kvexp.hf.moving_rope import MovingRope
from kvexp.hf.second_pass import check_second_pass
from kvexp.hf.traits import CACHE_ARGUMENT, check_positions, max_positions, prompt_sizes
from kvexp.methods import A2SF, H2O, Full, Ideal, KeyAttention, Keyformer, KeyformerA2SF, Window
from kvexp.tasks.lm_eval import Protocol
from kvexp.util.errors import ConfigError


class NothingToJudge(ConfigError):
    """Texts of one request of which no token is left to judge, or to read before: the others can be answered."""


@dataclass(frozen=True)
class Ask:
    """The log-probability of `continuation` after context and question; lists of ids as tuples.

    group: asks of one group are compared with each other, so they share the length that tau schedules go by: that of
    the longest, question included. seed: of noise inside methods. whole: a text alone, of which a ratio is taken whole.
    base: tokens that ratios are of under the row mask (0: the ask's own). cut: tokens lost on the left.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    question: tuple[int, ...] = ()
    group: Hashable = None
    seed: int = 0
    whole: bool = False
    base: int = 0
    cut: int = 0

    @property
    def ahead(self) -> int:
        """Tokens to come after the prefill."""
        return len(self.question) + len(self.continuation)

    @property
    def ids(self) -> tuple[int, ...]:
        """Context, question and continuation."""
        return (*self.context, *self.question, *self.continuation)


@dataclass(frozen=True)
class Judged:
    """A measured `Ask`: tokens of the continuation; what eviction did; seconds of its prefill."""

    tokens: list[Token]
    receipt: EvictionStats
    prefill_s: float

    @property
    def total(self) -> float:
        """Log-probability of the continuation, in nats."""
        return float(sum(token.logprob for token in self.tokens))

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would have given exactly this."""
        return all(token.is_greedy for token in self.tokens)


def fitted(ask: Ask, holds: int) -> Ask | None:
    """The ask with its left end cut so that `holds` positions do; the last token is fed to nobody. None: it cannot."""
    over = len(ask.ids) - 1 - holds
    if over <= 0:
        return ask
    return replace(ask, context=ask.context[over:], cut=over) if over < len(ask.context) else None


def padded(asks: Sequence[Ask], batch: int, whole_text: bool) -> list[Ask]:
    """The asks with the length of their batch as base: longest first, `batch` at a time, padded to the longest.

    What lm-eval 0.4.0 fed a model, except that batches hold one task. Whatever an ask's batch, its own logits are
    causal; only its budget comes to depend on the neighbours.
    """
    order = sorted(range(len(asks)), key=lambda i: (-len(asks[i].ids), asks[i].ids))
    padded_asks = list(asks)
    for place, index in enumerate(order):
        longest = len(asks[order[place - place % batch]].ids)
        padded_asks[index] = replace(asks[index], base=longest - (not whole_text))
    return padded_asks


Ids = list[int]


class Encoder:
    """Texts to token ids, exactly as lm-eval makes them of Hugging Face models.

    add_bos: whether a start token goes in front (None: as the tokenizer does by itself). Facts of lm-eval 0.4.13: white
    space at a context's end moves to the continuation; the continuation's ids are what the whole text has beyond the
    context's number of ids; an empty context is the start (or else the end) token; a text that already begins with the
    start token gets no second one.
    """

    def __init__(self, tokenizer: Any, add_bos: bool | None = None) -> None:
        self.tokenizer, self.add_bos = tokenizer, add_bos
        start = tokenizer.bos_token_id
        self.prefix: int | None = tokenizer.eos_token_id if start is None else start

    def text(self, words: str, special: bool | None = None) -> Ids:
        """Ids of a text; special: with the tokenizer's special tokens or without (None: as `add_bos` says)."""
        if special is None:
            begins = self.prefix is not None and words.startswith(self.tokenizer.decode(self.prefix))
            special = False if begins else self.add_bos
        options = {} if special is None else {"add_special_tokens": special}
        ids: Ids = self.tokenizer(words, verbose=False, **options).input_ids
        return ids

    def pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """(context, continuation) of a log-likelihood; neither is empty."""
        if context == "":
            ids = self.text(continuation, special=False)
            pair = (ids[:1], ids[1:]) if ids[:1] == [self.start()] else ([self.start()], ids)
        else:
            kept = context.rstrip()
            whole, before = self.text(context + continuation), self.text(kept)
            pair = (before, whole[len(before) :])
        if not pair[0] or not pair[1]:
            raise NothingToJudge(
                f"there is nothing to judge in {continuation!r} after {context[-40:]!r}: no token is left"
            )
        return pair

    def triple(self, context: str, question: str, continuation: str) -> tuple[Ids, Ids, Ids]:
        """(context, question, continuation): the ids of the pair (context + question, continuation), parted in two."""
        whole, rest = self.pair(context + question, continuation)
        return (*self.part(whole, context), rest) if question else (whole, [], rest)

    def ask(self, context: str, question: str, continuation: str, holds: int) -> Ask | None:
        """The texts as an `Ask` that `holds` positions can take; None where they cannot."""
        before, ids, after = self.triple(context, question, continuation)
        return fitted(Ask(tuple(before), tuple(after), tuple(ids)), holds)

    def part(self, whole: Ids, context: str) -> tuple[Ids, Ids]:
        """Ids of context + question, parted where the context ends; a token across the border is the question's."""
        alone = self.text(context)
        differ = (i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b)
        same = min(next(differ, len(alone)), len(whole) - 1)
        if same < 1:
            raise NothingToJudge(f"no token of the context {context[-40:]!r} is left before the question")
        return whole[:same], whole[same:]

    def start(self) -> int:
        """The token that stands for an empty context."""
        if self.prefix is None:
            raise ConfigError("this tokenizer has no start and no end token, so nothing can stand for an empty context")
        return self.prefix


def of_whole(cache: CacheConfig) -> CacheConfig:
    """The configuration for a text alone, whose context is the start token: a ratio is of the whole text."""
    if cache.budget is None or cache.budget.kv_ratio is None:
        return cache
    return dataclasses.replace(cache, budget=dataclasses.replace(cache.budget, of="sequence"))


def _ahead(asks: Sequence[Ask]) -> list[int]:
    """Tokens to come after each ask's prefill as schedules see it: as many as after the longest of its group."""
    groups = [place if ask.group is None else (ask.group,) for place, ask in enumerate(asks)]
    longest: dict[Any, int] = defaultdict(int)
    for group, ask in zip(groups, asks, strict=True):
        longest[group] = max(longest[group], ask.ahead)
    return [longest[group] for group in groups]


# The protocol row_mask. Which mask a method stands for, and how a kv_ratio becomes its two numbers, follows each
# paper's own script.


KNOWN = (Full, Window, H2O, KeyAttention, Keyformer, KeyformerA2SF, A2SF, Ideal)
# Settings of a method that a mask of one forward cannot have: they must be as the class has them.
IDLE: dict[type, tuple[str, ...]] = {
    H2O: ("impl", "score_batch"),
    Keyformer: ("score_scope", "key_window", "score_batch"),
    KeyformerA2SF: ("score_scope", "key_window", "score_batch"),
    A2SF: ("score_source",),
}


def check_row_mask(cache: CacheConfig, mask: str) -> None:
    """ConfigError for what has no meaning in one masked forward; mask: local or global."""
    method, budget = cache.method, cache.budget
    if type(method) not in KNOWN:
        raise ConfigError(
            f"protocol=row_mask has no mask for method {method.name}; it has for "
            f"{', '.join(cls.name for cls in KNOWN)}. Use protocol=prefill_then_step"
        )
    if mask == "global" and not isinstance(method, H2O | Full):
        raise ConfigError(f"mask=global is H2O's alone (its LLaMA script), not for method {method.name}")
    for name in IDLE.get(type(method), ()):
        default = type(method).__dataclass_fields__[name].default
        if getattr(method, name) != default:
            raise ConfigError(
                f"method.{name}={getattr(method, name)} means nothing under protocol=row_mask: leave it at {default}"
            )
    plain = budget is None or (budget.of == "prompt" and budget.counts_self and not budget.layers)
    if not plain or (budget is not None and budget.shares_heads):
        raise ConfigError(
            "protocol=row_mask takes kv_ratio (or tokens) and nothing else of a budget: leave of, counts_self, "
            "layers, heads and threshold alone"
        )
    if not cache.select.plain:
        raise ConfigError("protocol=row_mask masks by the method's own priorities: leave the group select alone")
    if method.evicts and (not cache.cadence.at_prefill or cache.cadence.every != 1):
        raise ConfigError("protocol=row_mask masks every row: leave cache.evict_at_prefill and cache.evict_every alone")
    if cache.evict_sliding != "auto":
        raise ConfigError("protocol=row_mask masks layers that keep every token: leave cache.evict_sliding at auto")
    if cache.quantization is not None:
        raise ConfigError("protocol=row_mask is one forward of plain keys and values: set cache.bits=16")
    if cache.renumbered:
        raise ConfigError("protocol=row_mask keeps original positions: set cache.positions=original")


def mask_fn_of(
    method: Method, budget: Budget | None, mask: str, length: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> MaskFn:
    """The mask of a request that counts `length` tokens for its budget; seed: of Keyformer's noise.

    H2O floors heavy and recent each (its heavy_ratio and recent_ratio); Keyformer floors the budget, then the recent
    part of it, and keeps tau at tau_init; A2SF and key attention have no window; Local (Window) is the recent band
    alone. All bands let the row's own token in besides, as the scripts do.
    """
    if isinstance(method, Full):
        return lambda x, layer: window_mask(x.shape[-1], x.shape[-1], x.device).expand_as(x)
    assert budget is not None
    whole = budget.tokens if budget.tokens is not None else floor_share(budget.kv_ratio or 0, length)
    if isinstance(method, Ideal):
        return lambda x, layer: ideal_mask(x, max(whole, 1))
    if isinstance(method, Window):
        return lambda x, layer: local_mask(x, 0, whole, dtype=dtype)
    if isinstance(method, H2O):
        share = method.recent_ratio
        if budget.tokens is not None:
            recent = floor_share(share, whole)
            heavy = whole - recent
        else:
            ratio = budget.kv_ratio or 0
            heavy, recent = floor_share(ratio * (1 - share), length), floor_share(ratio * share, length)
        if mask == "global":
            return lambda x, layer: global_mask(x, heavy, recent)
        return lambda x, layer: local_mask(x, heavy, recent, dtype=dtype)
    recent = method.protect_recent if isinstance(method, A2SF) else method.recent(whole)
    decay = method.alpha if isinstance(method, A2SF | KeyformerA2SF) else 1.0

    def mask_fn(x: Tensor, layer: int) -> Tensor:
        scores = None  # the plain softmax
        if isinstance(method, Keyformer):
            zeta = None if method.noise == "none" else draw(Noise(method.noise, method.fresh), x, seed, layer)
            scores = causal_probs(x, zeta, method.tau_init)
        return local_mask(x, max(whole - recent, 0), recent, decay=decay, scores=scores, dtype=dtype)

    return mask_fn


def draw(noise: Noise, x: Tensor, seed: int, layer: int) -> Tensor:
    """Noise for logits [1, heads, n, n]: every row its own draw, as the release draws anew for every row."""
    places = torch.arange(x.shape[-1], device=x.device)[None]
    return noise.draw(torch.tensor([seed], device=x.device), layer, x.shape[1], places, places[:, None])


def receipt_of(states: Sequence[MaskedLayer]) -> EvictionStats:
    """Slots that the last row could see, per query head; the bytes are a full cache's, which a simulation holds."""
    masks = [state.mask for state in states if state.mask is not None]
    rows = [mask[0, :, -1] for mask in masks]
    by_layer = [float(row.sum(-1).float().mean()) for row in rows]
    held = [[head.nonzero()[:, 0].tolist() for head in row] for row in rows]
    size = sum(state.kv_bytes for state in states)
    n = masks[0].shape[-1]
    hides = any(int(mask.sum()) < mask[..., 0, 0].numel() * n * (n + 1) // 2 for mask in masks)
    return EvictionStats(
        slots=sum(by_layer) / len(by_layer),
        slots_by_layer=by_layer,
        kv_bytes=size,
        peak_kv_bytes=size,
        first_eviction_step=0 if hides else None,
        kept_digest=hashlib.sha256(repr(held).encode()).hexdigest()[:16],
        attention_kept=None,
        batch_size=1,
    )


@dataclass(frozen=True)
class Scorer:
    """Scorer of lm-eval's requests: a model, a method and a protocol.

    Numbers do not depend on what is asked together, nor on batch_size (rows in a forward). thinking: tags of what
    generated texts are returned without.
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
        ask = self.encoder.ask(context, question, continuation, self.holds)
        return None if ask is None else replace(ask, group=group, seed=seed)

    def windows(self, text: str, *, seed: int = 0) -> list[Ask]:
        """A whole text as lm-eval parts it: windows of the model's length, every token judged once.

        The first window follows the start token alone; eviction takes place from the first token on.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        start, most = self.encoder.start(), max_positions(self.model.config)
        parts = get_rolling_token_windows(self.encoder.text(text), start, most, context_len=1)
        windows = (make_disjoint_window(window) for window in parts)
        return [Ask(tuple(before), tuple(after), seed=seed, whole=True) for before, after in windows]

    def measure(self, asks: Sequence[Ask]) -> list[Judged]:
        """One judgement per ask, in order: what it would be alone, whatever else is measured."""
        return [self._in_one_forward(ask) for ask in asks] if self.masked else self._stepwise(asks)

    def _stepwise(self, asks: Sequence[Ask]) -> list[Judged]:
        """The protocol prefill_then_step: asks of equal context and seed share a prefill.

        Of a text alone a ratio is a share of the whole text, for its context is the start token.
        """
        judged: dict[int, Judged] = {}
        ahead = _ahead(asks)
        for whole, places in self._alike(asks, ahead):
            contexts: dict[Any, list[int]] = defaultdict(list)
            for place in places:
                contexts[asks[place].seed, asks[place].context].append(place)
            keys = list(contexts)
            for start in range(0, len(keys), self.batch_size):
                chunk = keys[start : start + self.batch_size]
                rows = [(row, place) for row, key in enumerate(chunk) for place in contexts[key]]
                longest = max(ahead[place] for _, place in rows)
                cache = of_whole(self.cache) if whole else self.cache
                seeds, prompts = [seed for seed, _ in chunk], [ids for _, ids in chunk]
                context = prefill(
                    self.model, prompts, cache, max_new_tokens=longest, seeds=seeds, tokenizer=self.tokenizer
                )
                judged |= self._judge(asks, context, rows, longest)
        return [judged[place] for place in range(len(asks))]

    def _alike(self, asks: Sequence[Ask], ahead: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
        """(whole, places): asks that one cache can serve; schedules and budgets that look ahead must end together."""
        spec, budget = self.cache.method.score_spec, self.cache.budget
        scheduled = (spec is not None and spec.tau[0] != spec.tau[1]) or (
            budget is not None and budget.of == "sequence"
        )
        parts: dict[Any, list[int]] = defaultdict(list)
        for place, ask in enumerate(asks):
            parts[ask.whole, ahead[place] if scheduled or ask.whole else None].append(place)
        for (whole, _), places in parts.items():
            yield whole, places

    def _judge(
        self, asks: Sequence[Ask], context: PrefilledContext, rows: Sequence[tuple[int, int]], ahead: int
    ) -> dict[int, Judged]:
        """Score each ask from its prefilled context, by its place.

        rows: (row of the context, place of the ask); ahead: tokens the context expects.
        """
        judged, moves = {}, MovingRope.of(self.model.config) is not None
        once = [row for row, _ in rows] == list(range(len(context.ids)))
        for group in self._together(asks, context, rows):
            forks = context if once and len(group) == len(rows) else context.fork([row for row, _ in group])
            tokens = score_tokens(
                self.model,
                forks,
                [asks[place].continuation for _, place in group],
                [asks[place].question for _, place in group],
                max_new_tokens=ahead,
                one_forward=forks.cache.config.only_grows and not moves,
            )
            for (_, place), judgement, receipt in zip(group, tokens, receipts(forks.cache), strict=True):
                judged[place] = Judged(judgement, receipt, context.seconds)
        return judged

    def _together(
        self, asks: Sequence[Ask], context: PrefilledContext, rows: Sequence[tuple[int, int]]
    ) -> Iterator[Sequence[tuple[int, int]]]:
        """The rows in groups of at most batch_size that the model holds together."""
        lengths, endless = context.lengths, context.cache.sequence.max_positions is None
        for start in range(0, len(rows), self.batch_size):
            chunk = rows[start : start + self.batch_size]
            ahead = [asks[place].ahead for _, place in chunk]
            for size in rows_that_fit(self.model, [lengths[row] for row, _ in chunk], ahead, endless):
                yield chunk[:size]
                chunk = chunk[size:]

    @torch.no_grad()
    def _in_one_forward(self, ask: Ask) -> Judged:
        """The protocol row_mask. A question is a part of the context here."""
        how = self.protocol
        fed = ask.ids if how.whole_text else ask.ids[:-1]
        dtype = {"float32": torch.float32, "float16": torch.float16}[how.score_dtype]
        length = ask.base or len(fed)
        rule = mask_fn_of(self.cache.method, self.cache.budget, how.mask, length, seed=ask.seed, dtype=dtype)
        cache = RowMaskCache(self.model, rule)
        device = self.model.get_input_embeddings().weight.device
        start = time.perf_counter()
        logits = self.model(torch.tensor([fed], device=device), use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0]
        first = len(ask.ids) - len(ask.continuation) - 1
        following = torch.tensor([ask.continuation], device=logits.device)
        tokens = [Token(*pair) for pair in score_step(logits[None, first : len(ask.ids) - 1], following)[0]]
        return Judged(tokens, receipt_of(cache.layer_states), time.perf_counter() - start)

    def result(self, judged: Judged) -> tuple[float, bool]:
        """(log-probability, greedy), as lm-eval's scorers take them."""
        return (judged.total / len(judged.tokens) if self.protocol.per_token else judged.total), judged.greedy

    def obstacle(self, asks: Sequence[Ask]) -> str | None:
        """Why a context is too short for its budget, None if none is. What no context could have is raised."""
        if self.masked or self.cache.budget is None:
            return None
        check_positions(self.model.config, self.cache)
        for length, ahead, whole in dict.fromkeys((len(ask.context), ask.ahead, ask.whole) for ask in asks):
            cache = of_whole(self.cache) if whole else self.cache
            try:
                prompts = prompt_sizes(self.model.config, cache, length, ahead)
                check_budget(cache, prompts)
                if may_evict(cache, prompts):
                    check_second_pass(cache, self.tokenizer, length, self.holds, MovingRope.of(self.model.config))
            except ConfigError as error:
                return str(error)
        return None

    def prompt(self, context: str, question: str, kwargs: Mapping[str, Any]) -> tuple[list[int], list[int], int]:
        """(context, question, tokens the context lost on the left to leave room for the answer) to generate after.

        kwargs: lm-eval's generation_kwargs. The context is empty where nothing would be left of it.
        """
        whole = self.encoder.text(context + question)
        ids, rest = self.encoder.part(whole, context) if question else (whole, [])
        room = self.holds - decoding_of(self.model, self.tokenizer, kwargs)[0].max_new_tokens
        over = max(0, len(whole) - room)
        return (ids[over:], rest, over) if over < len(ids) else ([], rest, over)

    def generate(
        self, contexts: Sequence[list[int]], questions: Sequence[list[int]], kwargs: Mapping[str, Any], seeds: list[int]
    ) -> tuple[list[str], Generation]:
        """Texts after contexts and questions (ids; all of one length, or all empty), cut at the stop texts.

        kwargs: lm-eval's generation_kwargs: until, max_gen_toks, do_sample, temperature, top_k, top_p.
        """
        decoding, until = decoding_of(self.model, self.tokenizer, kwargs)
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
        texts = []
        for tokens in result.tokens:
            if self.thinking is not None:
                text = self.thinking.part(tokens, self.tokenizer).text
            else:
                text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            for stop in until:  # before the first of each stop text in turn, as lm-eval cuts
                text = text.split(stop)[0]
            texts.append(text)
        return texts, result


def decoding_of(model: Any, tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[GenerationParams, list[str]]:
    """lm-eval's generation_kwargs as `GenerationParams`, and the texts to cut the answer at; others are refused."""
    from lm_eval.models.utils import normalize_gen_kwargs

    known = dict(normalize_gen_kwargs(dict(kwargs), 256))
    until = [stop for stop in known.pop("until") if stop]
    most, sample = known.pop("max_gen_toks"), bool(known.pop("do_sample", False))
    temperature = known.pop("temperature", 1.0)
    picked = {name: known.pop(name) for name in ("top_k", "top_p") if name in known}
    if known:
        raise ConfigError(
            f"generation_kwargs {sorted(known)[0]} is not offered; there are until, max_gen_toks, do_sample, "
            "temperature, top_k and top_p"
        )
    eos = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    options = {"temperature": float(temperature), **picked} if sample else {}
    decoding = GenerationParams(
        max_new_tokens=most, sample=sample, eos=sorted(ends), stop_strings=tuple(until), **options
    )
    return decoding, [*until, *([tokenizer.eos_token] if tokenizer.eos_token else [])]
