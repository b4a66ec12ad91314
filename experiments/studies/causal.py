"""The effect of removing tokens from the cache, and which methods' scores rank tokens by it (docs/causes.md).

python -m experiments.studies.causal RUN [--methods METHOD ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.text import Text
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core import CacheConfig, EvictionLayer
from kvexp.core.attention import AttentionInputs, AttentionParams, apply_probs, qk_matmul
from kvexp.core.backends import RecordingBackend, SlotsBefore
from kvexp.diagnose.case import Case, cases, chosen, rows_of, run_at, short_title, with_method
from kvexp.diagnose.options import check_diagnosable, nothing_to_log
from kvexp.diagnose.replay import CLASSES, classes_of
from kvexp.diagnose.show import RUN, carried_out
from kvexp.diagnose.twin import check_picture, save
from kvexp.generate import forward_last
from kvexp.generate.kl import compare
from kvexp.generate.prefill import new_cache
from kvexp.hf import MultiMethodCache
from kvexp.hf.cache import EvictionCache, texts_of
from kvexp.hf.layers import EvictionCacheLayer
from kvexp.hf.patch import output_factors
from kvexp.hf.traits import num_layers
from kvexp.results import stats
from kvexp.results.blocks import Column, absent, estimate, fixed, plain, print_columns
from kvexp.results.read import question_of, titled
from kvexp.run.batches import Row as RunRow
from kvexp.run.batches import settings_at, waiting_notice
from kvexp.run.compose import options
from kvexp.run.evictions import file_of, write_file
from kvexp.run.settings import Settings, batch_cache
from kvexp.run.store import Run
from kvexp.util import (
    AtLeast,
    CacheError,
    ConfigError,
    Console,
    Progress,
    check_fields,
    load,
    say,
    watch_pipes,
)

# A measurement lies in its run's folder of diagnoses, one set of files per example.
#
# outputs/<hash>/diagnose/NAME.removals.parquet     every removal and its effect; written first
#                         NAME.causal.parquet       every score at every removal
#                         NAME.methods.parquet      one row per score, and one per score and layer
#                         NAME.causal.json          the plan, and what the effects are over; written last

PROG = "python -m experiments.studies.causal"
T = TypeVar("T")
REMOVALS, SCORES, METHODS = "removals.parquet", "causal.parquet", "methods.parquet"
MEASURED = "causal.json"
TOKEN, SPAN, LAYER, HEAD = "token", "span", "layer", "head"  # kinds of removals


@dataclass(frozen=True)
class CausalExample:
    """NAME.causal.json.

    plan: of the removals; tokens, judged: of the prompt, and of the answer that effects are means over; floor: KL of a
    row from which nothing is removed, in nats: what rounding makes; seconds: the removals took; methods: of the scores.
    """

    example: str
    plan: dict[str, Any]
    tokens: int
    judged: int
    floor: float
    seconds: float
    methods: list[str]


def write(run: Run, example: str, ending: str, data: pd.DataFrame | CausalExample) -> None:
    """Write one file of an example's measurement, whole or not at all."""
    if isinstance(data, pd.DataFrame):
        content = data.to_parquet(None, index=False, compression="zstd")
    else:
        content = json.dumps(dataclasses.asdict(data)).encode()
    write_file(run, example, ending, content)


def _read(file: Path, parse: Callable[[Path], T]) -> T | None:
    """A file of a measurement; None where it is missing, ConfigError where it cannot be read."""
    if not file.exists():
        return None
    try:
        return parse(file)
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        again = f"remove it and run {PROG} again"
        raise ConfigError(f"cannot read {file}: {str(error).splitlines()[0]}; {again}") from error


def read_frame(run: Run, example: str, ending: str) -> pd.DataFrame | None:
    """A table of an example's measurement; None where it is missing."""
    return _read(file_of(run, example, ending), pd.read_parquet)


def read_measured(run: Run, example: str) -> CausalExample | None:
    """An example's measurement; None where it is not complete."""
    return _read(file_of(run, example, MEASURED), lambda file: CausalExample(**load(file)))


# How well a score ranks tokens by the effect of removing them, from a weighted sample of tokens. Every sampled token
# has a weight, the tokens of the prompt that it stands for, so sums estimate sums over the prompt and ranks are
# weighted midranks. What sampling leaves open is the standard error over bootstrap resamples of the sample.

Floats = NDArray[np.float64]
RESAMPLES = 200
TOP = 0.05  # share of the tokens of largest effect: few tokens hold nearly all of it
LEAST = 8  # sampled tokens of a group below which there is no rank correlation


@dataclass(frozen=True)
class ScoreQuality:
    """How well a score ranks the tokens of one prompt; NaN where a number is not defined.

    rho: rank correlation of score and effect; precision: of the tokens of largest effect, as many as the budget holds,
    the share that is kept; top: the same of the `TOP` share of tokens; mass: share of the summed effect that is kept;
    kept: share of tokens kept, which is what these three are of a random choice. rho_error, mass_error: standard
    errors of sampling.
    """

    rho: float
    rho_error: float
    precision: float
    top: float
    mass: float
    mass_error: float
    kept: float


def weighted_ranks(values: Floats, weights: Floats) -> Floats:
    """Weighted midranks [n]: the weight below each value and half the weight of its equals."""
    unique, place = np.unique(values, return_inverse=True)
    each = np.bincount(place, weights=weights, minlength=len(unique))
    below = np.concatenate([[0.0], np.cumsum(each)[:-1]])
    ranks: Floats = (below + each / 2)[place]
    return ranks


def rank_correlation(one: Floats, other: Floats, weights: Floats) -> float:
    """Weighted Spearman correlation of values [n]; NaN where all of one side are equal."""
    if len(one) < 2:
        return math.nan
    a, b = (weighted_ranks(each, weights) for each in (one, other))
    a, b = (each - np.average(each, weights=weights) for each in (a, b))
    spread = math.sqrt(float((weights * a * a).sum() * (weights * b * b).sum()))
    return float((weights * a * b).sum()) / spread if spread > 0 else math.nan


def mass_kept(effect: Floats, kept: Floats, weights: Floats) -> float:
    """Share of the summed effect [n] that shares `kept` [n] of the tokens hold; NaN without any effect."""
    effect = np.maximum(effect, 0)
    total = float((weights * effect).sum())
    return float((weights * effect * kept).sum()) / total if total > 0 else math.nan


def precision_at(effect: Floats, kept: Floats, weights: Floats, budget: float) -> float:
    """Share kept of the tokens of largest effect, up to `budget` of all tokens' weight."""
    counted = _largest(effect, weights, budget)
    return float((counted * kept).sum() / counted.sum()) if counted.sum() > 0 else math.nan


def mass_of_top(effect: Floats, weights: Floats, share: float = TOP) -> float:
    """Share of the summed effect [n] on the tokens of largest effect, up to `share` of all; NaN without any effect."""
    return mass_kept(effect, _largest(effect, weights, share) / weights, weights)


def _largest(effect: Floats, weights: Floats, share: float) -> Floats:
    """The part of each weight [n] that belongs to the tokens of largest effect, up to `share` of all weight."""
    order = np.argsort(-effect, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    counted: Floats = np.empty_like(weights)
    counted[order] = np.clip(share * weights.sum() - before, 0, weights[order])  # the last one in part
    return counted


def score_quality(effect: Floats, score: Floats, kept: Floats, weights: Floats, seed: int = 0) -> ScoreQuality:
    """The quality of a score over n sampled tokens: effect in nats, score (higher is kept), share kept in [0, 1].

    Where nothing was evicted, what is kept says nothing: NaN.
    """
    kept = np.where((kept >= 1).all(), math.nan, kept)
    draws = np.random.default_rng(seed)
    rhos, masses = [], []
    for _ in range(RESAMPLES):
        picked = draws.integers(0, len(effect), len(effect))
        rhos.append(rank_correlation(effect[picked], score[picked], weights[picked]))
        masses.append(mass_kept(effect[picked], kept[picked], weights[picked]))
    share = float(np.average(kept, weights=weights))
    return ScoreQuality(
        rank_correlation(effect, score, weights),
        _spread(rhos),
        precision_at(effect, kept, weights, share),
        precision_at(effect, kept, weights, TOP),
        mass_kept(effect, kept, weights),
        _spread(masses),
        share,
    )


def _spread(values: list[float]) -> float:
    """Standard deviation of the values that are defined."""
    some = [value for value in values if math.isfinite(value)]
    return float(np.std(some, ddof=1)) if len(some) > 1 else math.nan


def superiority(some: Floats, others: Floats) -> float:
    """Probability that a value of `some` exceeds one of `others`, equals counting half (area under the ROC curve)."""
    if not len(some) or not len(others):
        return math.nan
    difference = some[:, None] - others[None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


# Removals in one forward. A hidden slot gets the logit -inf, so softmax gives its share to the others: what is left is
# what a cache without that slot would compute, at the same position ids. Nothing is copied per row but the tokens that
# the row feeds itself.


@dataclass(frozen=True)
class Removal:
    """Prompt tokens removed from a cache: positions, in these places (layer, kv head); None: in all of them."""

    positions: tuple[int, ...]
    places: tuple[tuple[int, int], ...] | None = None


Trial = Sequence[Removal]  # what one row goes without: all of these; empty: nothing


class RemovalLayer:
    """One layer of a prompt's cache that rows share, a `LayerCache`: it attends, and keeps none of what rows feed.

    keys [1, H, S, D], values [1, H, S, Dv]: of the prompt, slot = position. factors [H, G, n, Dv]: of the output
    projection, or None. answer_scores [3, H, S]: of `ANSWER_SCORES`, added up over forwards while `watched` is set.
    """

    def __init__(self, keys: Tensor, values: Tensor, factors: Tensor | None = None) -> None:
        self.keys, self.values, self.factors = keys, values, factors
        self.hidden: tuple[Tensor, Tensor, Tensor] | None = None  # rows, kv heads, positions, of one length
        self.watched = False
        self.answer_scores: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the prompt."""
        return int(self.keys.shape[2])

    def hide(self, hidden: Sequence[tuple[int, int, int]]) -> None:
        """From now on hide these slots: (row, kv head, position) each."""
        columns = torch.tensor(hidden, dtype=torch.int64, device=self.keys.device).view(-1, 3).unbind(1)
        self.hidden = (columns[0], columns[1], columns[2]) if hidden else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`: the rows' own tokens stand behind the prompt, and are forgotten afterwards."""
        rows, heads, count = key.shape[:3]
        query = query.unflatten(1, (heads, query.shape[1] // heads))  # [R, H, G, Q, D]
        after = torch.arange(self.seq_len, self.seq_len + count, device=key.device)
        own = AttentionInputs(
            query=query,
            keys=key,
            values=value,
            positions=after.expand(rows, 1, count),
            query_positions=after.expand(rows, count),
            params=params,
        )
        x_own = own.logits(slice(0, count), count)  # [R, H, G, Q, Q]
        x = self._prompt_logits(query, after, params)
        if self.hidden is not None:
            row, head, position = self.hidden
            x[head, :, row, :, position] = -torch.inf
        x_own = x_own.permute(1, 2, 0, 3, 4)
        top = torch.maximum(x.amax(-1, keepdim=True), x_own.amax(-1, keepdim=True))
        weights, weights_own = x.sub_(top).exp_(), (x_own - top).exp_()
        total = weights.sum(-1, keepdim=True) + weights_own.sum(-1, keepdim=True)
        # Outputs are divided in place of the weights, of which there are more.
        out = apply_probs(weights.view(1, heads, -1, rows * count, self.seq_len), self.values)
        out = out.view(heads, -1, rows, count, value.shape[-1]).permute(2, 0, 1, 3, 4)
        out = out + apply_probs(weights_own.permute(2, 0, 1, 3, 4), value)
        out = out / total.permute(2, 0, 1, 3, 4).to(out.dtype)
        if self.watched:
            self._watch((weights / total)[:, :, 0], out[0])
        return out.flatten(1, 2)

    def _prompt_logits(self, query: Tensor, after: Tensor, params: AttentionParams) -> Tensor:
        """Logits [H, G, R, Q, S] float32 of queries [R, H, G, Q, D] at positions after [Q] over the prompt.

        All rows read the same keys: they are one row of R * Q queries.
        """
        rows, heads, _, count, width = query.shape
        joined = query.permute(1, 2, 0, 3, 4).reshape(1, heads, -1, width)  # [1, H, G * R * Q, D]
        if params.alibi is None and params.sliding_window is None:
            keys = self.keys.float() if params.upcast else self.keys
            scaled = (joined.float() if params.upcast else joined) * params.scale  # fewer than the logits
            return (
                qk_matmul(scaled, keys)
                .to(torch.promote_types(keys.dtype, torch.float32))
                .view(heads, -1, rows, count, self.seq_len)
            )
        shared = AttentionInputs(
            query=joined.view(1, heads, -1, rows * count, width),
            keys=self.keys,
            values=self.values,
            positions=torch.arange(self.seq_len, device=query.device)[None, None],
            query_positions=after.repeat(rows)[None],
            params=params,
            all_visible=params.sliding_window is None,
        )
        return shared.logits(slice(0, rows * count), self.seq_len).view(heads, -1, rows, count, self.seq_len)

    def _watch(self, weights: Tensor, out: Tensor) -> None:
        """Add up the scores of a forward: weights [H, G, Q, S] and out [H, G, Q, Dv] of its only row."""
        values, out = self.values[0, :, None].float(), out.float()  # [H, 1, S, Dv]
        if self.factors is not None:  # sizes behind the output projection
            values, out = values @ self.factors.transpose(-1, -2), out @ self.factors.transpose(-1, -2)
        sizes = values.norm(dim=-1)[:, :, None]
        inner = out @ values.transpose(-1, -2)
        distance = (out.square().sum(-1, keepdim=True) - 2 * inner + sizes.square()).clamp(min=0).sqrt()
        left = (1 - weights).clamp(min=torch.finfo(torch.float32).eps)
        found = torch.stack([each.sum((1, 2)) for each in (weights, weights * sizes, weights / left * distance)])
        self.answer_scores = found if self.answer_scores is None else self.answer_scores + found

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: rows are trials, which are chosen before a forward."""
        raise CacheError("rows of a removal cache are chosen by the trials that are hidden")

    def reset(self) -> None:
        """Hide nothing."""
        self.hidden = None


class RemovalCache(Cache):  # type: ignore[misc]
    """A prompt's full cache with removals per row; a forward leaves it as it was.

    cache: of a method that evicts nothing, filled with one prompt. factors [H, G, n, Dv] per layer: of the output
    projection, for `answer_scores`; None: sizes of the values themselves. first_layer: where its forwards begin.
    """

    first_layer = 0

    def __init__(
        self, model: PreTrainedModel, cache: EvictionCache, factors: Sequence[Tensor | None] | None = None
    ) -> None:
        states, sequence = cache.layer_states, cache.sequence
        if cache.config.method.evicts or sequence.prompt_lengths != [sequence.prompt_columns]:
            raise ConfigError("removals start from the full cache of one prompt without padding")
        given = list(factors) if factors is not None else [None] * len(states)
        self.states: list[RemovalLayer] = []
        for state, factor in zip(states, given, strict=True):
            slots = state.slots
            assert slots is not None
            held = slots.length
            self.states.append(RemovalLayer(slots.keys[:, :, :held], slots.values[:, :, :held], factor))
        super().__init__(layers=[EvictionCacheLayer(state, None, model.config) for state in self.states])

    @property
    def heads(self) -> list[int]:
        """kv heads of each layer."""
        return [int(state.keys.shape[1]) for state in self.states]

    def hide(self, trials: Sequence[Trial]) -> None:
        """Let row i of the next forward go without what trials[i] removes."""
        hidden: list[list[tuple[int, int, int]]] = [[] for _ in self.states]
        everywhere = [(layer, head) for layer, count in enumerate(self.heads) for head in range(count)]
        for row, trial in enumerate(trials):
            for removal in trial:
                for layer, head in everywhere if removal.places is None else removal.places:
                    hidden[layer] += [(row, head, position) for position in removal.positions]
        for state, mine in zip(self.states, hidden, strict=True):
            state.hide(mine)


ROWS = 8  # removals per forward
# What the answer's own queries tell of a prompt token, in the order of `RemovalLayer.answer_scores`: attention; it
# times the size of the value; and the distance by which each head's output moves without the token.
ANSWER_SCORES = ("answer_attention", "answer_attention_value", "answer_output_change")


@dataclass(frozen=True)
class Effect:
    """What a removal did to the answer.

    kl: KL(full || without) in nats, mean over the judged tokens; kl_max: the largest of a token; logprob: by how much
    the mean log-probability of the answer's tokens fell, in nats; flips: judged tokens whose likeliest token changed.
    """

    kl: float
    kl_max: float
    logprob: float
    flips: int


def first_layer(trial: Trial) -> int:
    """The first layer from which a trial removes something; 0 where it removes nothing."""
    if any(removal.places is None for removal in trial):
        return 0
    return min((layer for removal in trial for layer, _ in removal.places or ()), default=0)


class ForcedAnswer:
    """A case's own answer under the full cache, forced again without some of the prompt's tokens.

    The answer is fed in one forward per removal, `rows` removals at a time; a question that follows the eviction is fed
    ahead of it. A forward begins at the first layer from which something is removed: below, all is as with the full
    cache. The first token of an answer is predicted by the prompt's last token before anything is removed: it is
    judged only where a question stands between. answer: token ids; judged: how many of them are.
    """

    def __init__(self, case: Case, max_new_tokens: int, rows: int = ROWS) -> None:
        count = min(max_new_tokens, case.decoding.max_new_tokens)
        short = dataclasses.replace(
            case.decoding, max_new_tokens=count, min_new_tokens=min(case.decoding.min_new_tokens, count)
        )
        self.case, self.rows = dataclasses.replace(case, decoding=short).full(), rows
        self.answer: list[int] = self.case.generate_again().tokens[0]
        fed = [*case.question, *self.answer[:-1]]
        self.judged = len(self.answer) - (not case.question)
        if self.judged < 1:
            raise ConfigError("an answer of one token is predicted by the prompt itself: nothing can be removed before")
        context = self.case.prefill_prompt()
        self.cache = RemovalCache(case.model, context.cache, output_factors(case.model))
        device = context.ids.device
        self.fed = torch.tensor(fed, device=device)
        self.targets = torch.tensor(self.answer[-self.judged :], device=device)
        for state in self.cache.states:
            state.watched = True
        self.layers = KnownLayers(case.model)
        with self.layers.noted():
            self.full = self._logits([()])[0]
        for state in self.cache.states:
            state.watched = False

    @property
    def heads(self) -> list[int]:
        """kv heads of each layer."""
        return self.cache.heads

    def answer_scores(self) -> dict[str, Tensor]:
        """Name of `ANSWER_SCORES` -> [L, H, S] float32: sums over query heads and the tokens fed after the prompt."""
        found = [state.answer_scores for state in self.cache.states]
        whole = torch.stack([each for each in found if each is not None]).cpu()  # [L, n, H, S]
        return dict(zip(ANSWER_SCORES, whole.unbind(1), strict=True))

    def effects(self, trials: Sequence[Trial]) -> Iterator[Effect]:
        """The effect of each trial, in order; made `rows` at a time, sorted by first layer."""
        found: dict[int, Effect] = {}
        order = sorted(range(len(trials)), key=lambda place: first_layer(trials[place]))
        for start in range(0, len(order), self.rows):
            some = order[start : start + self.rows]
            found |= zip(some, self._effects([trials[place] for place in some]), strict=True)
        for place in range(len(trials)):
            yield found[place]

    def _effects(self, trials: Sequence[Trial]) -> list[Effect]:
        self.cache.first_layer = min(map(first_layer, trials))
        with self.layers.beginning_at(self.cache.first_layer, len(trials)):
            logits = self._logits(trials)
        kl, full, own, same = compare(self.full, logits.flatten(0, 1), self.targets).view(4, len(trials), -1).cpu()
        return [
            Effect(
                float(kl[row].mean()),
                float(kl[row].max()),
                float((full[row] - own[row]).mean()),
                int((same[row] < 0.5).sum()),
            )
            for row in range(len(trials))
        ]

    @torch.no_grad()
    def _logits(self, trials: Sequence[Trial]) -> Tensor:
        """[R, judged, V] float32: of the judged tokens, without what each trial removes."""
        model, rows = self.case.model, len(trials)
        self.cache.hide(trials)
        first = len(self.case.prompt)
        positions = torch.arange(first, first + len(self.fed), device=self.fed.device).expand(rows, -1)
        options = {} if model.config.model_type == "mpt" else {"position_ids": positions}
        output = model(
            self.fed.expand(rows, -1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=self.judged,
            attention_mask=self.fed.new_ones(rows, 0),
            **options,
        )
        logits: Tensor = output.logits
        return logits.float()


class KnownLayers:
    """What each layer of a model gave in one forward of one row of tokens: `noted`, then `beginning_at`.

    outputs: of each layer, as it returned them: a tensor [1, Q, n], or a tuple that begins with one; n: the model's
    width. A layer that is passed over sees none of its hooks called and its cache not touched.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = blocks_of(model)
        self.outputs: list[Any] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the layers give in the forward inside the block."""
        self.outputs = []
        hooks = [block.register_forward_hook(lambda _, __, made: self.outputs.append(made)) for block in self.blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def beginning_at(self, layer: int, rows: int) -> Iterator[None]:
        """Compute no layer below `layer` in forwards inside the block, of `rows` rows of the tokens that were noted."""
        passed = self.blocks[:layer]
        for block, made in zip(passed, self.outputs, strict=False):
            vars(block)["forward"] = _giving(made, rows)
        try:
            yield
        finally:
            for block in passed:
                vars(block).pop("forward", None)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model, from the first on; ConfigError where no module lists them."""
    count = num_layers(model.config)
    found = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    blocks = next(found, None)
    if blocks is None:
        raise ConfigError(f"{type(model).__name__} has no list of its {count} layers: its forwards begin at the first")
    return blocks


def _giving(made: Any, rows: int) -> Any:
    """A forward of a layer that gives what it gave before, to every row."""
    first = made if isinstance(made, Tensor) else made[0]
    wide = first.expand(rows, *first.shape[1:])
    given = wide if isinstance(made, Tensor) else (wide, *made[1:])
    return lambda *_, **__: given


# The tables of a measurement.

LEAST_EXAMPLES = 5  # below it there is no interval: Student's t of fewer is wider than the number
LEAST_METHODS = 5  # of an example, below which there is no correlation across methods
YARDSTICK = ANSWER_SCORES[0]


def mean_with_interval(values: Floats) -> tuple[float, float, float]:
    """Mean over the examples that are defined, and its 95 % interval.

    The interval is that of `kvexp.results.stats` from `stats.MIN_PAIRS` examples on, of fewer Student's t, of fewer
    than `LEAST_EXAMPLES` NaN.
    """
    values = values[np.isfinite(values)]
    n = len(values)
    if n < LEAST_EXAMPLES:
        return (float(values.mean()) if n else math.nan), math.nan, math.nan
    mean = float(values.mean())
    if n < stats.MIN_PAIRS:
        half = stats.t_quantile((1 + stats.LEVEL) / 2, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
        return mean, mean - half, mean + half
    return mean, *stats.interval_of_mean(values)


def pair_rows(quality: pd.DataFrame) -> list[dict[str, Any]]:
    """Per score, means of differences within an example, each with its interval: keys *, *_low, *_high.

    behind: rank correlation of `YARDSTICK` less the score's; mass, precision, top: less the share of tokens kept,
    which is what a random choice has. quality: `CausalTables.quality`.
    """
    best = quality[quality["method"] == YARDSTICK].set_index("example")["rho"]
    rows: list[dict[str, Any]] = []
    for name, part in quality.groupby("method", sort=False):
        row: dict[str, Any] = {"method": name, "n": len(part)}
        differences = {
            "behind": part["example"].map(best) - part["rho"],
            "mass": part["mass"] - part["kept"],
            "precision": part["precision"] - part["kept"],
            "top": part["top"] - part["kept"],
        }
        for key, values in differences.items():
            found = mean_with_interval(values.to_numpy(dtype=np.float64))
            row[key], row[f"{key}_low"], row[f"{key}_high"] = found
        rows.append(row)
    return sorted(rows, key=lambda row: row["behind"] if math.isfinite(row["behind"]) else math.inf)


def company_rows(quality: pd.DataFrame, joint: pd.DataFrame) -> list[dict[str, Any]]:
    """What goes with the KL of all that a method evicts: rank correlations across methods, within an example.

    One row for each of: the share of tokens that no head holds, the effect on those, the effect on whatever is evicted,
    and the score's rank correlation with the effect; means over examples, with stats. An example on which fewer
    than `LEAST_METHODS` methods were measured is left out. quality, joint: of `CausalTables`.
    """
    keys = ["example", "method"]
    both = joint[[*keys, "kl", "gone", "gone_mass"]].merge(quality[[*keys, "rho", "mass"]], on=keys)
    both = both.assign(evicted=1 - both["mass"])
    rows: list[dict[str, Any]] = []
    for key in ("gone", "gone_mass", "evicted", "rho"):
        each = []
        for _, part in both.groupby("example"):
            part = part[np.isfinite(part[key].to_numpy(dtype=np.float64))]
            if len(part) >= LEAST_METHODS:
                values, kl = (part[name].to_numpy(dtype=np.float64) for name in (key, "kl"))
                each.append(rank_correlation(values, kl, np.ones(len(part))))
        mean, low, high = mean_with_interval(np.array(each, dtype=np.float64))
        rows.append({"what": key, "n": len(each), "rho": mean, "rho_low": low, "rho_high": high})
    return [row for row in rows if row["n"]]


FIFTHS = ("0-20 %", "20-40 %", "40-60 %", "60-80 %", "80-100 %")  # of the prompt, by position


@dataclass(frozen=True)
class CausalTables:
    """What was measured of one run. removals: every removal; quality: a row per score and example, of tokens.

    other: rank correlation per score and example of spans, tokens in one layer, tokens in one head; groups: of tokens
    of a class or a fifth of the prompt; layers: of each layer's score with the effect of tokens; joint: per method and
    example, all that it evicts at the prompt's end removed at once, where that is something. All have the columns
    `example` and (but removals) `method`.
    """

    examples: list[CausalExample]
    removals: pd.DataFrame
    quality: pd.DataFrame
    other: pd.DataFrame
    groups: pd.DataFrame
    layers: pd.DataFrame
    joint: pd.DataFrame


def causal_tables(run: Run, examples: Sequence[CausalExample]) -> CausalTables:
    """The tables of these examples of a run, which are complete."""
    removals, quality, other, groups, lines = [], [], [], [], []
    for each in examples:
        effects, scores, methods = (read_frame(run, each.example, part) for part in (REMOVALS, SCORES, METHODS))
        assert effects is not None and scores is not None and methods is not None, "an example is complete"
        named = {"example": each.example}
        fifths = [FIFTHS[len(FIFTHS) * int(at) // each.tokens] for at in effects["position"]]
        removals.append(effects.assign(fifth=fifths, **named))
        lines.append(methods.assign(**named))
        for name, own in scores.groupby("method", sort=False):
            joined = removals[-1].join(own.set_index("unit")[["rank", "kept"]])
            tokens = joined[joined["kind"] == TOKEN]
            if len(tokens):
                found = score_quality(*(_column(tokens, key) for key in ("kl", "rank", "kept", "weight")))
                quality.append(named | {"method": name} | vars(found))
            other += [
                named | {"method": name, "kind": kind, "rho": _rho(joined[joined["kind"] == kind])}
                for kind in (SPAN, LAYER, HEAD)
            ]
            groups += [
                named | {"method": name, "by": by, "group": group, "rho": _rho(part)}
                for by in ("class", "fifth")
                for group, part in tokens.groupby(by)
            ]
    whole = pd.concat(lines, ignore_index=True)
    return CausalTables(
        list(examples),
        pd.concat(removals, ignore_index=True),
        pd.DataFrame(quality),
        pd.DataFrame(other),
        pd.DataFrame(groups),
        whole[whole["layer"] >= 0],
        whole[(whole["layer"] < 0) & (whole["kept"] < 1)],
    )


def _column(frame: pd.DataFrame, name: str) -> Floats:
    return frame[name].to_numpy(dtype=np.float64)


def _rho(part: pd.DataFrame) -> float:
    if len(part) < LEAST:
        return math.nan
    return rank_correlation(_column(part, "kl"), _column(part, "rank"), _column(part, "weight"))


def score_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """One row per score, the largest mean rank correlation first."""
    rows: list[dict[str, Any]] = []
    for name, part in tables.quality.groupby("method", sort=False):
        row: dict[str, Any] = {"method": name, "n": len(part)}
        for key in ("rho", "precision", "top", "mass", "kept"):
            row[key], row[f"{key}_low"], row[f"{key}_high"] = mean_with_interval(_column(part, key))
        for key in ("rho_error", "mass_error"):  # of the mean over examples
            each = _column(part[part[key].notna()], key)
            row[key] = float(np.sqrt((each**2).mean() / len(each))) if len(each) else math.nan
        for kind in (SPAN, LAYER, HEAD):
            own = tables.other[(tables.other["method"] == name) & (tables.other["kind"] == kind)]
            row[f"rho_{kind}"] = mean_with_interval(_column(own, "rho"))[0]
        own = tables.joint[tables.joint["method"] == name]
        for key in ("kl", "gone", "gone_mass"):
            found = mean_with_interval(_column(own, key))
            row[f"joint_{key}"], row[f"joint_{key}_low"], row[f"joint_{key}_high"] = found
        rows.append(row)
    return sorted(rows, key=lambda row: -row["rho"] if math.isfinite(row["rho"]) else math.inf)


def rounded_scores(tables: CausalTables, text: str) -> pd.DataFrame:
    """The rows of docs/causes.csv for one kind of text: correlations, shares in percent, nats per token; rounded."""
    shown = {
        **{"rank_correlation": ("rho", 1), "low": ("rho_low", 1), "high": ("rho_high", 1), "of_spans": ("rho_span", 1)},
        **{"in_one_layer": ("rho_layer", 1), "in_one_head": ("rho_head", 1), "precision": ("precision", 100)},
        **{"top_5": ("top", 100), "effect_kept": ("mass", 100)},
        **{"kl": ("joint_kl", 1), "kl_low": ("joint_kl_low", 1), "kl_high": ("joint_kl_high", 1)},
    }
    return pd.DataFrame(
        {"text": text, "score": row["method"]}
        | {
            name: "" if absent(row[key]) else f"{factor * row[key]:.{2 if factor == 1 else 0}f}"
            for name, (key, factor) in shown.items()
        }
        for row in score_rows(tables)
    )


def group_rows(tables: CausalTables, by: str) -> list[dict[str, Any]]:
    """One row per score: its mean rank correlation within each group of tokens. by: class or fifth."""
    mine = tables.groups[tables.groups["by"] == by]
    means = mine.groupby(["method", "group"])["rho"].mean().unstack("group")
    order = [row["method"] for row in score_rows(tables)]
    return [{"method": name, **means.loc[name].to_dict()} for name in order]


def mass_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """Share of tokens and of the summed effect of tokens by class and by fifth, means over examples."""
    tokens = tables.removals[tables.removals["kind"] == TOKEN]
    tokens = tokens.assign(mass=tokens["weight"] * tokens["kl"].clip(lower=0))
    rows: list[dict[str, Any]] = []
    for by, order in (("class", CLASSES), ("fifth", FIFTHS)):
        sums = tokens.groupby(["example", by])[["weight", "mass"]].sum()
        shares = sums / sums.groupby("example").transform("sum")
        means = shares.groupby(by).sum() / tokens["example"].nunique()  # an example without the group has 0 of it
        each: dict[str, dict[Any, float]] = {key: means[key].to_dict() for key in ("weight", "mass")}
        rows += [
            {"group": name, **{key: values[name] for key, values in each.items()}}
            for name in order
            if name in means.index
        ]
    return rows


def gone_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """Per method: tokens in no head of any layer, where its evictions changed a likeliest token and where not."""
    rows = []
    for name, part in tables.joint.groupby("method", sort=False):
        flipped = part["flips"] > 0
        row: dict[str, Any] = {"method": name, "n": len(part), "wrong": int(flipped.sum())}
        for key in ("gone", "gone_mass"):
            row[f"{key}_wrong"] = float(part.loc[flipped, key].mean()) if flipped.any() else math.nan
            row[f"{key}_right"] = float(part.loc[~flipped, key].mean()) if (~flipped).any() else math.nan
        some, others = _column(part[flipped], "gone_mass"), _column(part[~flipped], "gone_mass")
        rows.append(row | {"auc": superiority(some, others)})
    return rows


METHOD, BY_ANSWER, EFFECT, TOKENS = "#4477aa", "#aaaaaa", "#d55e00", "#bbbbbb"
HEIGHT = 0.24  # inches of a row
Row = dict[str, Any]


def draw_causal(tables: CausalTables, title: str) -> Figure:
    """Draw each score's rank correlation, by layer too, effect kept and KL of all evicted; and where the effect is."""
    rows = score_rows(tables)
    figure = Figure(figsize=(12, 4.2 + HEIGHT * len(rows)), layout="constrained")
    figure.suptitle(f"{title} (n = {len(tables.examples)}, bars: 95 % over examples)", fontsize=11)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.2 + HEIGHT * len(rows), 2.6])
    above, below = parts
    bars, heat, kept, kl = above.subplots(1, 4, sharey=True, width_ratios=[1.1, 1.1, 1, 1])
    names = [str(row["method"]) for row in rows]
    colors = [BY_ANSWER if row["method"] in ANSWER_SCORES else METHOD for row in rows]
    bars.barh(range(len(rows)), _values(rows, "rho"), color=colors, height=0.7)
    _intervals(bars, rows, "rho")
    bars.axvline(0, color="k", lw=0.8)
    bars.grid(axis="x", alpha=0.3)
    bars.set_title("rank correlation of the score\nwith the effect of a token", fontsize=9)
    means = tables.layers.groupby(["method", "layer"])["rho"].mean().unstack("layer").loc[names]
    image = heat.imshow(means.to_numpy(dtype=float), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="none")
    heat.set_xlabel("layer", fontsize=8)
    heat.set_title("the same,\nof the score in one layer", fontsize=9)
    solids = heat.figure.colorbar(image, ax=heat, location="bottom", aspect=30).solids
    solids.set_rasterized(True)  # else 256 shapes in an .svg
    scaled = [{key: 100 * row[key] for key in ("mass", "mass_low", "mass_high", "kept")} for row in rows]
    _dots(kept, scaled, "mass", EFFECT, "effect")
    kept.plot(_values(scaled, "kept"), range(len(rows)), "|", color="k", ms=8, label="tokens")
    kept.legend(fontsize=7, loc="upper center")  # next to the yardsticks, which keep nothing
    kept.set_title("effect kept\n(percent of the sum over tokens)", fontsize=9)
    kl.set_xscale("log")
    _dots(kl, rows, "joint_kl", METHOD, "")
    kl.set_title("KL of all evicted\n(nats per token)", fontsize=9)
    bars.set_yticks(range(len(rows)), names, fontsize=8)
    bars.set_ylim(len(rows) - 0.5, -0.5)
    _where(below, tables)
    return figure


def _dots(axis: Axes, rows: list[Row], key: str, color: str, label: str) -> None:
    axis.plot(_values(rows, key), range(len(rows)), "o", color=color, ms=5, label=label)
    _intervals(axis, rows, key, color)
    axis.grid(alpha=0.3)


def _intervals(axis: Axes, rows: list[Row], key: str, color: str = "k") -> None:
    low, high = (_values(rows, f"{key}_{end}") for end in ("low", "high"))
    some = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    # On a log scale an interval that reaches 0 ends at a third of the smallest value.
    least = np.nanmin(_values(rows, key)) / 3 if axis.get_xscale() == "log" else -np.inf
    axis.hlines(some, np.maximum(low[some], least), high[some], color=color, lw=1)


def _values(rows: list[Row], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], dtype=float)


def _where(below: Any, tables: CausalTables) -> None:
    shares = {str(row["group"]): row for row in mass_rows(tables)}
    for axis, groups, words in zip(
        below.subplots(1, 2, sharey=True), (CLASSES, FIFTHS), ("class", "place in the prompt"), strict=True
    ):
        names = [name for name in groups if name in shares]
        places = np.arange(len(names))
        for shift, key, color, label in ((-0.2, "weight", TOKENS, "tokens"), (0.2, "mass", EFFECT, "effect")):
            axis.bar(places + shift, [100 * shares[name][key] for name in names], width=0.4, color=color, label=label)
        axis.set_xticks(places, names, fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.set_title(f"where the effect is: {words} (percent)", fontsize=9)
        axis.legend(fontsize=7)


@dataclass(frozen=True)
class PromptScores:
    """One method at the end of a prompt of S tokens.

    priority [L, H, S] float32: higher is kept longer; protected [L, H, S]: sinks and recent window, kept whatever their
    priority; kept [L, H, S]: held after the eviction. Where a layer evicts nothing all of it is kept, at priority 0.
    """

    priority: Tensor
    protected: Tensor
    kept: Tensor


def _by_position(values: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[H, S] by position, of one row's values [1, H, C] by slot; slots at position -1 are left out."""
    made = values.new_zeros(*values.shape[1:2], tokens + 1)
    made.scatter_(-1, torch.where(positions[0] < 0, tokens, positions[0]), values[0])
    return made[:, :tokens].cpu()


@torch.no_grad()
def prompt_scores(case: Case, methods: Mapping[str, CacheConfig]) -> dict[str, PromptScores]:
    """The scores of every method at the end of the case's prompt, its question not yet fed.

    Methods that read a prompt as the model does share one forward of it.
    """
    apart = [name for name, config in methods.items() if config.method.modifies_prefill]
    together = [name for name in methods if name not in apart]
    found: dict[str, PromptScores] = {}
    for names in ([together] if together else []) + [[name] for name in apart]:
        found |= _scores(case, {name: methods[name] for name in names})
    return {name: found[name] for name in methods}


def _scores(case: Case, methods: Mapping[str, CacheConfig]) -> dict[str, PromptScores]:
    """`prompt_scores` of methods that share a forward."""
    model, prompt = case.model, case.prompt
    ids = torch.tensor([prompt], device=model.get_input_embeddings().weight.device)
    caches: dict[str, EvictionCache] = {}
    first: dict[tuple[str, int], SlotsBefore] = {}  # of each cache and layer: its first eviction
    for name, config in methods.items():
        caches[name] = new_cache(
            model,
            [prompt],
            config,
            len(prompt),
            case.max_tokens_to_come,
            [case.seed],
            tokenizer=case.tokenizer,
            spans=[case.spans],
        )
        for state in caches[name].layer_states:
            if isinstance(state, EvictionLayer):
                state.backend = RecordingBackend(state.backend, partial(first.setdefault, (name, state.index)))
    forward_last(model, ids, torch.ones_like(ids), MultiMethodCache(list(caches.values()), 1))
    return {
        name: _prompt_scores([first.get((name, layer)) for layer in range(len(cache.layers))], cache, len(prompt))
        for name, cache in caches.items()
    }


def _prompt_scores(evictions: Sequence[SlotsBefore | None], cache: EvictionCache, tokens: int) -> PromptScores:
    """The scores of one method from every layer's first eviction; None: the layer evicted nothing."""
    layers = []
    for eviction, state in zip(evictions, cache.layer_states, strict=True):
        assert isinstance(state, EvictionLayer)
        heads = state.require_slots().positions.shape[1]
        if eviction is None:
            nothing = torch.zeros(heads, tokens, dtype=torch.bool)
            layers.append((nothing.float(), nothing, ~nothing))
        else:
            columns = (eviction.priority, eviction.protected, eviction.kept)
            layers.append(tuple(_by_position(each, eviction.positions, tokens) for each in columns))
    priority, protected, kept = (torch.stack(each) for each in zip(*layers, strict=True))
    return PromptScores(priority.float(), protected, kept)


def everything_evicted(scores: PromptScores) -> list[Removal]:
    """What a method did not keep, as removals: one for each layer and kv head that lost something."""
    return [
        Removal(tuple((~kept).nonzero()[:, 0].tolist()), ((layer, head),))
        for layer, heads in enumerate(scores.kept)
        for head, kept in enumerate(heads)
        if not bool(kept.all())
    ]


# Samples whose inclusion probabilities are known, so that errors can be stated. Four kinds of unit are removed from the
# full cache: a token (its slot in every layer and head), a span of neighbouring tokens, a token in one layer, and a
# token in one kv head. Spans cover the prompt. Tokens are drawn without replacement within each token class, with first
# and last taken whole; a class of few is taken whole as well. Layers and heads are drawn as pairs: a token of the
# prompt at random, the layers (heads) in equal shares.

WHOLE = 6  # a class of at most so many tokens is taken whole, and no other class gets fewer
ALWAYS = ("first", "last")  # classes that are taken whole


@dataclass(frozen=True)
class RemovalPlan:
    """How many removals of each kind are made of every prompt, 0: none; tokens None: every token.

    span: tokens of a span; spans: at most so many of them, drawn at random (None: all).
    """

    tokens: Annotated[int, AtLeast(0)] | None = 300
    span: Annotated[int, AtLeast(1)] = 8
    spans: Annotated[int, AtLeast(0)] | None = None
    layers: Annotated[int, AtLeast(0)] = 150
    heads: Annotated[int, AtLeast(0)] = 180
    __post_init__ = check_fields


@dataclass(frozen=True)
class RemovalUnit:
    """One removal of a plan. layer, head: -1 where all are meant; weight: units of its kind that it stands for."""

    kind: str
    positions: tuple[int, ...]
    layer: int
    head: int
    weight: float

    def removal(self, heads: Sequence[int]) -> Removal:
        """heads: kv heads of each layer."""
        if self.layer < 0:
            return Removal(self.positions)
        mine = range(heads[self.layer]) if self.head < 0 else (self.head,)
        return Removal(self.positions, tuple((self.layer, head) for head in mine))


def removal_units(plan: RemovalPlan, classes: Sequence[str], heads: Sequence[int], seed: int) -> list[RemovalUnit]:
    """The removals of one prompt. classes: of its tokens; heads: kv heads of each layer; seed: of the draws."""
    draw = random.Random(seed)
    units = [RemovalUnit(TOKEN, (at,), -1, -1, weight) for at, weight in _tokens(plan, classes, draw)]
    spans = [tuple(range(at, min(at + plan.span, len(classes)))) for at in range(0, len(classes), plan.span)]
    chosen = spans if plan.spans is None else sorted(draw.sample(spans, min(plan.spans, len(spans))))
    units += [RemovalUnit(SPAN, span, -1, -1, len(spans) / len(chosen)) for span in chosen]
    everywhere = [(layer, head) for layer, count in enumerate(heads) for head in range(count)]
    units += _places(LAYER, plan.layers, len(classes), [(layer, -1) for layer in range(len(heads))], draw)
    return units + _places(HEAD, plan.heads, len(classes), everywhere, draw)


def _tokens(plan: RemovalPlan, classes: Sequence[str], draw: random.Random) -> list[tuple[int, float]]:
    """(position, tokens that it stands for) of the tokens to remove, ascending."""
    strata: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(classes):
        strata[name].append(at)
    if plan.tokens is None or plan.tokens >= len(classes):
        return [(at, 1.0) for at in range(len(classes))]
    if plan.tokens == 0:
        return []
    whole = [name for name, mine in strata.items() if name in ALWAYS or len(mine) <= WHOLE]
    left = max(plan.tokens - sum(len(strata[name]) for name in whole), 0)
    rest = sum(len(mine) for name, mine in strata.items() if name not in whole)
    chosen = []
    for name, mine in strata.items():
        count = len(mine) if name in whole else min(len(mine), max(WHOLE, round(left * len(mine) / rest)))
        chosen += [(at, len(mine) / count) for at in draw.sample(mine, count)]
    return sorted(chosen)


def _places(
    kind: str, count: int, tokens: int, places: Sequence[tuple[int, int]], draw: random.Random
) -> list[RemovalUnit]:
    """`count` pairs of a token and a place (layer, head or -1): every place in turn, from a random order of them."""
    order = list(places)
    draw.shuffle(order)
    weight = tokens * len(places) / count if count else 0.0
    chosen = [(draw.randrange(tokens), *order[number % len(order)]) for number in range(count)]
    return [RemovalUnit(kind, (at,), layer, head, weight) for at, layer, head in sorted(chosen)]


ALL = "all"


@dataclass(frozen=True)
class CausalOptions:
    """What is measured: the plan of removals; methods: names, or `ALL`; first: so many of the run's examples.

    examples: ids of those that are measured in place of the first (none: the first); new_tokens: of the forced answer,
    at most; rows: removals per forward.
    """

    plan: RemovalPlan
    methods: tuple[str, ...] = (ALL,)
    first: Annotated[int, AtLeast(1)] = 12
    examples: tuple[str, ...] = ()
    new_tokens: Annotated[int, AtLeast(1)] = 32
    rows: Annotated[int, AtLeast(1)] = ROWS
    __post_init__ = check_fields


def measure_causes(run: Run, options: CausalOptions) -> list[CausalExample]:
    """The measurements of the asked examples, made where they are missing; each is written once complete."""
    settings = settings_at(run)
    check_diagnosable(settings)
    methods = method_settings(settings, options.methods)
    known_rows = rows_of(run)
    named = {row["example"]: row for row in (chosen(known_rows, name) for name in options.examples)}
    rows = sorted((named or known_rows).values(), key=lambda row: row["index"])
    rows = rows if named else rows[: options.first]
    if not rows:
        raise ConfigError(f"{run.path} has no answered example: run it first")
    plan = {**dataclasses.asdict(options.plan), "new_tokens": options.new_tokens}
    known = {row["example"]: read_measured(run, row["example"]) for row in rows}

    def complete(made: CausalExample | None) -> bool:
        return made is not None and made.plan == plan and set(methods) <= set(made.methods)

    todo = [row for row in rows if not complete(known[row["example"]])]
    if todo:
        with (
            run.claim(waiting=waiting_notice(run), part="causal"),
            Progress(f"causal {short_title(run)}", len(rows), len(rows) - len(todo), "examples") as progress,
        ):
            for _ in _measured(run, settings, todo, methods, options, plan):
                progress.advance()
    found = [read_measured(run, row["example"]) for row in rows]
    return [each for each in found if each is not None]


def method_settings(settings: Settings, names: Sequence[str]) -> dict[str, Settings]:
    """Settings of the run with each method in place of its own, which stays as it was set; a line for what cannot be.

    ConfigError for a name that is no method, and where no method is left.
    """
    known = [name for name in options("method") if name != "full"]
    for name in names:
        if name not in (*known, ALL):
            raise ConfigError(f"--methods: no method {name!r}; one of {', '.join(known)}, or {ALL}")
    own = settings.command["choices"].get("method", settings.method.name)
    found: dict[str, Settings] = {}
    if settings.method.evicts and (ALL in names or own in names):
        found[own] = settings
    for name in known if ALL in names else names:
        if name in found:
            continue
        try:
            made = with_method(settings, name)
            if (why := nothing_to_log(made)) is not None:
                raise ConfigError(why)
            if not made.cache.cadence.at_prefill:
                raise ConfigError("the run evicts nothing at the end of the prompt (cache.evict_at_prefill=false)")
        except ConfigError as error:
            if name in names:
                raise
            say(f"causal: without {name}: {error}")
            continue
        found[name] = made
    if not found:
        raise ConfigError("no method is left whose score could be measured: name one that evicts, as in --methods h2o")
    return found


def _measured(
    run: Run,
    settings: Settings,
    todo: list[RunRow],
    methods: Mapping[str, Settings],
    options: CausalOptions,
    plan: dict[str, object],
) -> Iterator[CausalExample]:
    for row, case, _ in cases(settings, todo):
        name = row["example"]
        known = read_measured(run, name)
        before = read_frame(run, name, REMOVALS) if known is not None and known.plan == plan else None
        try:
            forced = ForcedAnswer(case, options.new_tokens, options.rows)
        except ConfigError as error:
            say(f"causal: example {name}: {error}")
            continue
        classes = classes_of(texts_of(case.tokenizer, case.prompt))
        units = removal_units(options.plan, classes, forced.heads, zlib.crc32(name.encode()))
        if known is None or before is None:
            start = time.perf_counter()
            trials = [[unit.removal(forced.heads)] for unit in units]
            frame = removal_frame(units, list(forced.effects(trials)), classes)
            seconds = time.perf_counter() - start
            floor = max(abs(effect.kl) for effect in forced.effects([[] for _ in range(options.rows)]))
            write(run, name, REMOVALS, frame)
            there: list[str] = []
        else:
            frame, seconds, floor, there = before, known.seconds, known.floor, known.methods
        configs = {
            method: batch_cache(made, [len(case.prompt)]) for method, made in methods.items() if method not in there
        }
        scores = prompt_scores(case, configs)
        for part, made_now in (
            (SCORES, score_frame(units, scores, forced)),
            (METHODS, method_frame(frame, scores, forced)),
        ):
            old = read_frame(run, name, part) if there else None
            if old is not None:
                made_now = pd.concat([old[~old["method"].isin(made_now["method"])], made_now], ignore_index=True)
            write(run, name, part, made_now)
        every = list(dict.fromkeys([*there, *scores, *ANSWER_SCORES]))
        made = CausalExample(name, dict(plan), len(case.prompt), forced.judged, floor, seconds, every)
        write(run, name, MEASURED, made)
        yield made


def removal_frame(units: Sequence[RemovalUnit], effects: Sequence[Effect], classes: Sequence[str]) -> pd.DataFrame:
    """One row per removal: kind, position (the first), length, layer, head, weight, class, and fields of `Effect`."""
    return pd.DataFrame(
        {
            "kind": unit.kind,
            "position": unit.positions[0],
            "length": len(unit.positions),
            "layer": unit.layer,
            "head": unit.head,
            "weight": unit.weight,
            "class": classes[unit.positions[0]],
            **dataclasses.asdict(effect),
        }
        for unit, effect in zip(units, effects, strict=True)
    )


def score_frame(units: Sequence[RemovalUnit], scores: Mapping[str, PromptScores], forced: ForcedAnswer) -> pd.DataFrame:
    """One row per method and removal: rank, the percentile in [0, 1] of its tokens' score among the prompt's, and kept.

    Both are means over the tokens and the layers and heads that the removal takes them from. Scores of the answer's own
    queries keep nothing: kept is NaN.
    """
    parts = []
    for name, values, kept in _all_scores(scores, forced):
        ranks = percentiles(values)
        rows = [_of_unit(unit, ranks, kept) for unit in units]
        parts.append(pd.DataFrame(rows, columns=["rank", "kept"]).assign(method=name, unit=range(len(units))))
    return pd.concat(parts, ignore_index=True)


def _all_scores(
    scores: Mapping[str, PromptScores], forced: ForcedAnswer
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, values [L, H, S], kept [L, H, S] or None) of methods, then of the answer's own queries."""
    for name, each in scores.items():
        yield name, each.priority, each.kept
    for name, values in forced.answer_scores().items():
        yield name, values, None


def percentiles(values: Tensor) -> Tensor:
    """[L, H, S]: the rank of each token's value within its layer and head, in (0, 1], equals at their mean rank."""
    layers, heads, tokens = values.shape
    flat = pd.DataFrame(values.reshape(-1, tokens).T.numpy()).replace({-np.inf: -np.finfo(np.float32).max})
    ranks: Tensor = torch.from_numpy(flat.rank(pct=True).to_numpy().T.copy()).view(layers, heads, tokens)
    return ranks


def _of_unit(unit: RemovalUnit, ranks: Tensor, kept: Tensor | None) -> tuple[float, float]:
    layers = slice(None) if unit.layer < 0 else slice(unit.layer, unit.layer + 1)
    heads = slice(None) if unit.head < 0 else slice(unit.head, unit.head + 1)
    place = (layers, heads, list(unit.positions))
    return float(ranks[place].mean()), float("nan") if kept is None else float(kept[place].double().mean())


def method_frame(removals: pd.DataFrame, scores: Mapping[str, PromptScores], forced: ForcedAnswer) -> pd.DataFrame:
    """Rows of layer -1, one per method: what removing all that it evicts does (kl, flips); kept, gone: shares of the
    prompt's tokens held on average, and held in no head of any layer; gone_mass: of the summed effect of tokens, the
    share of these. And one row per score and layer: rho, of the layer's score with the effect of tokens.
    """
    tokens = removals[removals["kind"] == TOKEN]
    at, weights = tokens["position"].to_numpy(), tokens["weight"].to_numpy(dtype=float)
    effect = tokens["kl"].to_numpy(dtype=float)
    joint_effects = forced.effects([everything_evicted(each) for each in scores.values()])
    joints = dict(zip(scores, joint_effects, strict=True))
    rows: list[dict[str, object]] = []
    for name, values, kept in _all_scores(scores, forced):
        by_layer = percentiles(values).mean(1).numpy()
        for layer, ranks in enumerate(by_layer):
            rows.append({"method": name, "layer": layer, "rho": rank_correlation(effect, ranks[at], weights)})
        if kept is None:
            continue
        joint = joints[name]
        gone = ~kept.any(0).any(0).numpy()
        mass = float((weights * np.maximum(effect, 0)).sum())
        row = {"method": name, "layer": -1, "kl": joint.kl, "flips": joint.flips, "judged": forced.judged}
        row |= {"kept": float(kept.double().mean()), "gone": float(gone.mean())}
        rows.append(row | {"gone_mass": float((weights * np.maximum(effect, 0) * gone[at]).sum()) / (mass or 1.0)})
    return pd.DataFrame(rows)


COMPANY = {  # of `company_rows`
    "gone": "tokens gone in all heads",
    "gone_mass": "effect on those tokens",
    "evicted": "effect on tokens evicted",
    "rho": "the score's rank correlation",
}


def causal_title(run: Run) -> str:
    """Task, budget and model of a measurement, what else was set, and whether eviction has seen the question.

    The run's own method is one of those that are judged, and no part of it.
    """
    labels = run.asked[-1]
    budget = "" if labels.get("kv_ratio") is None else f"kv_ratio={labels['kv_ratio']:g}"
    known = (labels.get("task"), budget, labels.get("model"), labels.get("setting"))
    return titled(", ".join(word for word in known if word), [question_of(run.config)])


def show_causal(tables: CausalTables, title: str, console: Console) -> None:
    """Print every table, and what is needed to read it."""
    for words, rows, columns in _printed(tables):
        if rows:
            console.print(Text(f"{title}: {words}", style="bold"))
            print_columns(rows, columns, 1, console)
    for line in notes(tables):
        console.print(line, highlight=False, markup=False)


def _printed(tables: CausalTables) -> Iterator[tuple[str, list[dict[str, Any]], list[Column]]]:
    name = plain("method", "score", right=False)
    yield (
        "scores against the effect of removing tokens",
        score_rows(tables),
        [
            name,
            Column("rank\ncorrelation", lambda row: estimate(row, "rho", 3)),
            Column("sampling\nerror", lambda row: fixed(row["rho_error"], 3)),
            Column("of\nspans", lambda row: fixed(row["rho_span"], 2)),
            Column("in one\nlayer", lambda row: fixed(row["rho_layer"], 2)),
            Column("in one\nhead", lambda row: fixed(row["rho_head"], 2)),
            Column("precision\nat budget", lambda row: _share(row["precision"])),
            Column(f"top {TOP:.0%}\nkept", lambda row: _share(row["top"])),
            Column("effect\nkept", lambda row: _share(row["mass"])),
            Column("tokens\nkept", lambda row: _share(row["kept"])),
            Column("KL of all\nevicted", lambda row: estimate(row, "joint_kl", 3)),
            Column("gone in\nall heads", lambda row: _share(row["joint_gone"])),
        ],
    )
    yield (
        "differences within an example",
        pair_rows(tables.quality),
        [
            name,
            Column(f"rank correlation\nbehind {YARDSTICK}", lambda row: estimate(row, "behind", 3)),
            Column("effect kept less\ntokens kept", lambda row: estimate(row, "mass", 1, 100)),
            Column("precision less\ntokens kept", lambda row: estimate(row, "precision", 1, 100)),
            Column(f"top {TOP:.0%} kept less\ntokens kept", lambda row: estimate(row, "top", 1, 100)),
        ],
    )
    for by, groups, words in (("class", CLASSES, "class of token"), ("fifth", FIFTHS, "position")):
        found = [group for group in groups if group in set(tables.groups.get("group", ()))]
        columns = [Column(group, lambda row, group=group: fixed(row.get(group), 2)) for group in found]  # type: ignore[misc]
        yield f"rank correlation by {words}", group_rows(tables, by), [name, *columns]
    share = [Column("tokens", lambda row: _share(row["weight"])), Column("effect", lambda row: _share(row["mass"]))]
    yield "where the effect is", mass_rows(tables), [plain("group", "tokens of", right=False), *share]
    yield (
        "tokens gone in all heads of all layers, against wrong answers",
        gone_rows(tables),
        [
            name,
            Column("wrong", lambda row: f"{row['wrong']} of {row['n']}"),
            Column("gone,\nwrong", lambda row: _share(row["gone_wrong"])),
            Column("gone,\nright", lambda row: _share(row["gone_right"])),
            Column("their effect,\nwrong", lambda row: _share(row["gone_mass_wrong"])),
            Column("their effect,\nright", lambda row: _share(row["gone_mass_right"])),
            Column("tells apart", lambda row: fixed(row["auc"], 2)),
        ],
    )
    yield (
        "what goes with the KL of all evicted, across methods",
        company_rows(tables.quality, tables.joint),
        [
            Column("", lambda row: COMPANY[row["what"]], right=False),
            plain("n", "examples"),
            Column("rank correlation", lambda row: estimate(row, "rho", 3)),
        ],
    )


def _share(value: Any) -> str:
    return "-" if absent(value) else f"{100 * value:.1f} %"


def notes(tables: CausalTables) -> list[str]:
    """What a reader must know of the numbers."""
    examples, counts = tables.examples, tables.removals["kind"].value_counts()
    made, seconds = len(tables.removals), sum(each.seconds for each in examples)
    floor = max(each.floor for each in examples)
    tokens = tables.removals[tables.removals["kind"] == TOKEN]
    below = (tables.removals["kl"] <= floor).groupby(tables.removals["kind"]).mean()
    top = [
        mass_of_top(part["kl"].to_numpy(dtype=float), part["weight"].to_numpy(dtype=float))
        for _, part in tokens.groupby("example")
    ]
    held = _share(float(np.mean(top)) if top else math.nan)
    kinds = [kind for kind in (TOKEN, SPAN, LAYER, HEAD) if kind in counts]
    removed = ", ".join(f"{counts[kind]} {kind}s" for kind in kinds)
    noise = ", ".join(f"{_share(below[kind])} of {kind}s" for kind in kinds)
    return [
        f"{len(examples)} examples of {np.mean([each.tokens for each in examples]):.0f} tokens; {made} removals "
        f"({removed}), {60 * made / max(seconds, 1e-9):.0f} a minute; judged over "
        f"{np.mean([each.judged for each in examples]):.1f} tokens of the full cache's own answer",
        f"a row without a removal has KL up to {floor:.1e} nats; no more than that, so that rounding ranks them, "
        f"have {noise}; the {TOP:.0%} of tokens of largest effect hold {held} of the effect",
        "effect: mean KL(full || without the token) per token of the answer. rank correlation: Spearman's, weighted by "
        "the sampling plan, of a score's percentile (mean over layers and heads); (..): 95 % over examples, "
        f"Student's t of fewer than {stats.MIN_PAIRS}; sampling "
        "error: of that mean, by the tokens drawn. effect kept: share of the summed effect on tokens that are kept; a "
        "random choice has tokens kept, in precision and of the top too. KL of all evicted: all that the method does "
        "not keep at the prompt's end, removed at once; wrong: that changes a likeliest token; tells apart: how "
        "probably a wrong example has more of the effect on tokens gone in all heads than a right one (0.5: it says "
        "nothing).",
        f"{', '.join(ANSWER_SCORES)}: by the answer's own queries, which no method can see.",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if the request cannot work."""
    return carried_out(parser(), sys.argv[1:] if argv is None else argv)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").partition("\n")[0])
    result.set_defaults(command=_causal)
    add = result.add_argument
    add("run", metavar="RUN", help=RUN)
    add("--methods", nargs="+", metavar="METHOD", default=["all"], help="whose scores (default: all)")
    add("--first", type=int, default=12, metavar="N", help="of the run's first so many examples (default: 12)")
    add("--example", nargs="+", default=[], metavar="EXAMPLE", help="these in place of the first ones")
    add("--tokens", default="300", metavar="N", help="single tokens removed per example, or all (default: 300)")
    add("--span", type=int, default=8, metavar="M", help="tokens of a span (default: 8)")
    add("--spans", type=int, metavar="N", help="spans removed per example (default: all, which cover the prompt)")
    add("--layers", type=int, default=150, metavar="N", help="tokens removed in one layer (default: 150)")
    add("--heads", type=int, default=180, metavar="N", help="tokens removed in one kv head (default: 180)")
    add("--new-tokens", type=int, default=32, metavar="N", help="of the forced answer, at most (default: 32)")
    add("--rows", type=int, default=8, metavar="N", help="removals per forward (default: 8)")
    add("--draw", type=Path, metavar="FILE", help="a picture: .png, .pdf or .svg")
    add("--csv", type=Path, metavar="FILE", help="write every removal and its effect")
    add("--scores", type=Path, metavar="FILE", help="write the table of scores, as docs/causes.csv has it")
    return result


def _causal(args: argparse.Namespace, console: Console) -> None:
    if args.draw is not None:
        check_picture(args.draw)
    if args.tokens != "all" and not args.tokens.isdigit():
        raise ConfigError(f"--tokens must be a whole number or all, got {args.tokens!r}")
    tokens = None if args.tokens == "all" else int(args.tokens)
    plan = RemovalPlan(tokens, args.span, args.spans, args.layers, args.heads)
    run = run_at(args.run)
    asked = CausalOptions(plan, tuple(args.methods), args.first, tuple(args.example), args.new_tokens, args.rows)
    tables = causal_tables(run, measure_causes(run, asked))
    show_causal(tables, causal_title(run), console)
    if args.draw is not None:
        save(draw_causal(tables, causal_title(run)), args.draw)
        console.print(f"wrote {args.draw}", highlight=False, markup=False)
    if args.csv is not None:
        tables.removals.to_csv(args.csv, index=False)
        console.print(f"wrote {args.csv}", highlight=False, markup=False)
    if args.scores is not None:
        rounded_scores(tables, str(run.asked[-1].get("task"))).to_csv(args.scores, index=False)
        console.print(f"wrote {args.scores}", highlight=False, markup=False)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
