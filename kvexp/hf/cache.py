"""The cache that models of Hugging Face are given."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import east_asian_width
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core import Budget, BytesBudget, CacheConfig, EngineQuantization, EvictionLayer, Method, SequenceState
from kvexp.core.attention import AttentionParams
from kvexp.core.budget import PromptSizes
from kvexp.core.budget_resolution import check_budget, check_spans, may_evict
from kvexp.core.budget_shares import LayerBudgets, layer_budgets_of
from kvexp.core.decode import stack_kind, stack_order
from kvexp.core.decode_stack import CrossLayerBuffers, StackedLayer
from kvexp.core.eviction import CacheState
from kvexp.core.method import needs_heads
from kvexp.core.observe import ColumnSums, CrossLayerScore, PromptSums, SumsKey
from kvexp.core.row_mask import MaskedLayer, MaskFn
from kvexp.core.sequence import Span
from kvexp.core.statistics import StateChanges
from kvexp.hf.layers import (
    EvictionCacheLayer,
    WindowLayer,
    compose,
    hand_out,
    join,
    select_states,
    state_bytes,
    state_numbers,
)
from kvexp.hf.moving_rope import MovingRope, check_rope, turned_by
from kvexp.hf.patch import check_patched, layer_input, output_blocks, output_factors
from kvexp.hf.probe import check_heads, layer_ropes, other_layers
from kvexp.hf.second_pass import RepeatedPrompt
from kvexp.hf.traits import (
    Traits,
    check_logits,
    check_positions,
    check_quantization,
    head_dim,
    layers_in_words,
    max_positions,
    num_kv_heads,
    num_layers,
    quantization_for,
    query_shape,
    traits_of,
)
from kvexp.retrieval.layer import LayerGroup, RetrievalLayer, share_prompt
from kvexp.retrieval.method import Retrieval
from kvexp.util.errors import CacheError, ConfigError, Rule, refuse

LONGEST = 4  # bytes of a character: more tokens than that end none


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each of the tokens `ids` adds to the text.

    A token that ends inside a character adds nothing, and the next one adds the character. Tokenizers move the space
    between two words to either of them, so each token is decoded together with the one before.
    """

    def decoded(span: Sequence[int]) -> str:
        return str(tokenizer.decode(list(span), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts: list[str] = []
    before = shown = 0  # decoded together: from `before` on; of that, in `texts` already: up to `shown`
    for end in range(1, len(ids) + 1):
        known, whole = decoded(ids[before:shown]), decoded(ids[before:end])
        if whole.endswith("\ufffd") and end - shown < LONGEST and end < len(ids):
            texts.append("")
            continue
        texts.append(whole[len(known) :])
        before, shown = shown, end
    return texts


_CALIBRATIONS: WeakKeyDictionary[PreTrainedModel, dict[Retrieval, Any]] = WeakKeyDictionary()


def check_retrieval(config: Any, method: Retrieval) -> None:
    """ConfigError where the method cannot work on a model of this configuration."""
    method.check_heads(head_dim(config))
    traits = traits_of(config)
    if method.clamps_positions and traits.position == "learned":
        raise ConfigError(
            f"method.far_positions=clamped cannot work on {traits.title}: its learned positions are added to the "
            "input, not to the cache. Set method.far_positions=ordinary"
        )


# Reasons against evicting in sliding windows of models with layers that keep every token.
NO_WINDOWS: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: isinstance(c.method, Retrieval),
        "method {c.method.name} evicts nothing, and windows need no index",
    ),
    (
        lambda c: c.method.needs.second_pass is not None,
        "method {c.method.name} reads the prompt a second time, of which a window sees the end alone",
    ),
    (
        lambda c: c.method.needs.calibration or c.method.needs.surrogate or (c.budget and c.budget.heads == "duo"),
        "what kvexp calibrate measures is of the layers that keep every token",
    ),
    (
        lambda c: (
            c.budget
            and (c.joins_layers or not c.equal_layers or type(layer_budgets_of(c.method, c.budget)) is not LayerBudgets)
        ),
        "slots of all layers are shared out or chosen together ({c.layers_setting}), and windows hold other numbers of "
        "tokens",
    ),
)


# Reasons against caches whose slots are latents, which all heads of a layer share.
NO_LATENTS: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: isinstance(c.method, Retrieval) or needs_heads(c.method),
        "method {c.method.name} looks at keys or values of heads: take a method of attention or of positions, such "
        "as h2o, tova, snapkv, kvzip or streaming_llm",
    ),
    (
        lambda c: c.rewritten,
        "method {c.method.name} fits or merges keys and values of heads: take a method that drops slots alone",
    ),
    (
        lambda c: c.select.values == "critical",
        "select.values=critical weighs attention by values of heads: leave select.values at none",
    ),
    (
        lambda c: c.budget and c.budget.shares_heads,
        "{c.budget.heads_setting} is of heads with slots of their own: {c.budget.heads_remedy}",
    ),
    (
        lambda c: isinstance(c.quantization, EngineQuantization),
        "the codecs of engines are laid out for keys and values of heads: set cache.key_bits and cache.value_bits, of "
        "the rotary key and of the latent, in place of cache.codec",
    ),
    (
        lambda c: c.observe == "triton",
        "the CUDA kernels of observe=triton read keys and values of heads: leave it at blocked",
    ),
)


# Reasons against caches among whose slots an index chooses for each query.
NO_INDEX: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: c.renumbered,
        "its keys are at the positions that the text gave them: set cache.positions=original",
    ),
    (
        lambda c: c.method.needs.second_pass is not None or c.method.needs.last_queries or c.shares_by_preference,
        "what it chose for earlier queries, or would for a repeated prompt, is not kept: take a method that adds "
        "attention up, such as h2o, or leave budget.layers at uniform or pyramid",
    ),
)


def check_layers(traits: Traits, cache: CacheConfig) -> None:
    """ConfigError for a cache that cannot be put together with what the model's other layers keep."""
    if traits.evicts_in_windows:
        refuse(cache, [(when, f"{why}: leave cache.evict_sliding at auto") for when, why in NO_WINDOWS])
    if traits.latent:
        of = f"in {traits.title} a slot is a latent that all heads of a layer expand, and "
        refuse(cache, [(when, of + why) for when, why in NO_LATENTS])
    if traits.indexed:
        refuse(cache, [(when, f"in {traits.title} an index chooses among slots, and {why}") for when, why in NO_INDEX])
    keep_states = [layer for layer in traits.layers if layer.kind in ("state", "hybrid", "shared")]
    if keep_states and cache.method.needs.second_pass is not None:
        raise ConfigError(
            f"method {cache.method.name} reads the prompt a second time, which {traits.title} cannot: of its layers, "
            f"{layers_in_words(traits.layers)}, some keep a state that has gone on by then, or attend to keys that are "
            "not stored again. Choose another method"
        )
    if traits.shared and (isinstance(cache.method, Retrieval) or cache.quantization is not None):
        raise ConfigError(
            f"in {traits.title} some layers attend to the keys of another layer, which retrieval methods and "
            "cache.bits do not serve: choose a method that evicts, with cache.bits=16"
        )


def calibrate(model: PreTrainedModel, method: Retrieval) -> Any:
    """The result of `Retrieval.calibrate` for this model and machine; computed once per model and method."""
    known = _CALIBRATIONS.setdefault(model, {})
    if method not in known:
        config, device = model.config, model.get_input_embeddings().weight.device
        shape = (max_positions(config), num_kv_heads(config), head_dim(config), str(device))
        known[method] = method.calibrate(lambda tokens: measure_layer_time(model, tokens), *shape)
    return known[method]


@torch.no_grad()
def measure_layer_time(model: PreTrainedModel, tokens: int, repeats: int = 3) -> float:
    """Seconds that one layer takes for a prompt of `tokens` tokens: the fastest of `repeats` prefills."""
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best / len(traits_of(model.config).layers)


def mark(count: int, heads: int) -> str:
    """`.` no head, `#` all, else tenths of the heads, rounded down but at least 1."""
    if count <= 0:
        return "."
    return "#" if count >= heads else str(max(1, 10 * count // heads))


@dataclass(frozen=True)
class KeptText:
    """A prompt's tokens, printed with a mark below each of how many heads keep it.

    counts: heads of all layers that keep each token; heads: how many there are.
    """

    texts: list[str]
    counts: list[int]
    heads: int

    def __repr__(self) -> str:
        """Two lines each: the text, and under every token its mark."""
        lines, words, marks = [], "", ""
        for text, count in zip(self.texts, self.counts, strict=True):
            shown = "".join("\u21b5" if letter == "\n" else letter if letter.isprintable() else " " for letter in text)
            cells = sum(2 if east_asian_width(letter) in "WF" else 1 for letter in shown)
            if marks and len(marks) + cells > 80:
                lines += [words, marks]
                words, marks = "", ""
            words, marks = words + shown, marks + mark(count, self.heads) * cells
        return "\n".join([*lines, words, marks, f"# all {self.heads} heads, 9-1 tenths of them, . none"])


class EvictionCache(Cache):  # type: ignore[misc]
    """The KV cache of one prompt or one batch of prompts: give it to `model.generate(past_key_values=...)`.

    model: a patched model.
    method, budget (None for full), options: as `kvexp.core.CacheConfig`, or one of those in place of the method.
    num_beams: beams per sample, so that methods can add up the scores of a sample's beams.
    prompt_tokens: prompt columns, padding included; needed when the prompt is fed in chunks.
    max_new_tokens: needed by tau schedules and budget.of=sequence; else only spares allocations.
    seeds: of the noise; one, or one per sample.
    tokenizer: the model's, for methods that repeat the prompt behind an instruction (kvzip).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method | CacheConfig,
        budget: Budget | None = None,
        *,
        num_beams: int = 1,
        prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        seeds: int | Sequence[int] = 0,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        check_patched(model.config, ConfigError)
        self.config = config = CacheConfig.of(method, budget, **options)
        method = config.method
        if isinstance(method, Retrieval):
            check_retrieval(model.config, method)
        check_positions(model.config, config)
        check_logits(model.config, config)
        if config.quantization is not None:
            check_quantization(model.config, config.quantization, model.dtype)
            self.config = config = replace(config, quantization=quantization_for(model.config, config.quantization))
        if config.calibration is not None and method.needs.calibration:
            config.calibration.check_shape(*query_shape(model.config))
        if config.head_scores is not None:
            config.head_scores.check_shape(*query_shape(model.config)[:2])
        self.moving = MovingRope.of(model.config)
        check_rope(self.moving, config)
        traits = traits_of(model.config, config.evict_sliding)
        check_layers(traits, config)
        if traits.evicts_in_windows:
            check_heads(model, traits)
        ropes = layer_ropes(model, config.evict_sliding) if turned_by(config) is not None else None
        self.sequence = SequenceState(
            prompt_columns=prompt_tokens,
            max_new_tokens=max_new_tokens,
            max_positions=None if config.beyond_context else max_positions(model.config),
            num_beams=num_beams,
            seeds=seeds,
        )
        if isinstance(config.budget, BytesBudget):
            budget = replace(config.budget, others=other_layers(model, traits))
            self.config = config = replace(config, budget=budget)
        count = len(traits.held)
        common = CacheState(config, count, self.sequence, traits.windows, traits.latent, traits.indexed)
        self.memory_tracker, self.cross_layer_score = common.memory_tracker, common.cross_layer_score
        self.state_changes = common.state_changes
        states: list[EvictionLayer | RetrievalLayer]
        if isinstance(method, Retrieval):
            group = LayerGroup(calibration=calibrate(model, method))
            states = [RetrievalLayer(config, i, count, self.sequence, self.memory_tracker, group) for i in range(count)]
        else:
            factors = output_factors(model, traits.sliding) if method.needs.output_norms else [None] * count
            projected = config.select.values == "critical" or method.needs.output_projection
            blocks = output_blocks(model, traits.sliding) if projected else [None] * count
            states = [EvictionLayer(config, i, common, factors[i], blocks[i]) for i in range(count)]
        if config.surrogate is not None and method.needs.surrogate:
            kv_heads, width = num_kv_heads(model.config), model.get_input_embeddings().weight.shape[1]
            config.surrogate.check_shape(count, kv_heads, width)
        inputs = layer_input(model) if method.needs.surrogate or method.needs.state_changes else None
        super().__init__(layers=compose(model.config, states, self.sequence, ropes, inputs, config.evict_sliding))
        self.traits, self.held, self.budget_windows = traits, traits.held, traits.windows
        self.prompts: list[list[int]] | None = None  # token ids of each sample, if known: for `show`
        self.logits_nan_flag: float | Tensor = 0.0  # NaN once the logits of a forward were not finite
        second = method.needs.second_pass
        self.repeated_prompt = None if second is None else RepeatedPrompt.of(second, tokenizer, method.name)
        if (spec := method.score_spec) is not None:
            spec.tau_at(1, max_new_tokens)  # a missing max_new_tokens is said now, not at the first decode step

    @property
    def layer_states(self) -> list[EvictionLayer | RetrievalLayer]:
        """Caches in kvexp's core of the layers that kvexp holds, in order."""
        return [self.layers[number].state for number in self.held]

    @property
    def _of_all_layers(self) -> list[CrossLayerScore | StateChanges]:
        """What some layers note and others read."""
        return [common for common in (self.cross_layer_score, self.state_changes) if common is not None]

    @property
    def takes_chunks(self) -> bool:
        """Whether several known tokens can pass layer by layer, since no layer reads what another has made of them."""
        apart = not self._of_all_layers and not self.config.joins_layers and self.moving is None
        apart = apart and not self.traits.indexed
        return apart and all(type(layer) is EvictionCacheLayer and not layer.shared for layer in self.layers)

    @property
    def windows(self) -> list[WindowLayer]:
        """What the layers keep whose queries see a window or a chunk."""
        states = (getattr(layer, "state", None) for layer in self.layers)
        return [state for state in states if isinstance(state, WindowLayer)]

    @property
    def ledger(self) -> dict[str, tuple[int, int]]:
        """Bytes now and at the peak, by what keeps them: layers that keep every token, windows, states, latents.

        Where all layers with a window are evicted from because none keeps every token, they count as such. A window
        that is not evicted from, or a state, never shrinks, so that its peak is now; what a window attends to within
        one forward is that forward's, not the cache's.
        """
        tracker, windows = self.memory_tracker, sum(window.kv_bytes for window in self.windows)
        held, sliding = (tracker.bytes, tracker.peak_bytes), (0, 0)
        if tracker.groups:
            now = [tracker.bytes_of(layers) for layers in tracker.groups]
            held, sliding = zip(now, tracker.group_peaks, strict=True)
        states, latent = sum(map(state_bytes, self.layers)), (0, 0)
        if self.traits.latent:
            held, latent = latent, held
        return {
            "held": held,
            "window": (sliding[0] + windows, sliding[1] + windows),
            "state": (states, states),
            "latent": latent,
        }

    @property
    def other_bytes(self) -> int:
        """Bytes of windows and states, which layers keep that kvexp does not evict from."""
        return sum(window.kv_bytes for window in self.windows) + sum(map(state_bytes, self.layers))

    @property
    def other_bytes_at_16(self) -> int:
        """Bytes of windows and states with their numbers as 16 bits each."""
        return 2 * sum(window.numbers for window in self.windows) + 2 * sum(map(state_numbers, self.layers))

    def allow_multi_token_steps(self, allowed: bool = True) -> EvictionCache:
        """Allow forwards of several new tokens after the prompt, with one eviction after each; returns the cache."""
        self.sequence.multi_token_steps_allowed = allowed
        return self

    def reset(self) -> None:
        """Empty the cache: another prompt may follow."""
        self.sequence.reset()
        self.memory_tracker.reset()
        self.prompts = None
        self.logits_nan_flag = 0.0
        if self.repeated_prompt is not None:
            self.repeated_prompt.fed.clear()
        for common in self._of_all_layers:
            common.reset()
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows in beam search, so that the slots of every row follow its beam: beam_idx [B * num_beams]."""
        spec, beams = self.config.method.score_spec, self.sequence.num_beams
        if spec is not None and spec.batch == "per_sample":
            if beams == 1 and len(beam_idx) > 1:
                raise CacheError("beam search needs num_beams: this method adds up scores over the beams of a sample")
            home = torch.arange(len(beam_idx), device=beam_idx.device) // beams
            if bool((beam_idx // beams != home).any()):
                raise CacheError(
                    f"rows were reordered across samples of num_beams={beams}: give the number really used"
                )
        self._select(beam_idx, same_prompts=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        batch = self.sequence.num_real.shape[0] if self.sequence.num_real is not None else 0
        self._select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; rows may repeat."""
        self._select(torch.as_tensor(indices))

    def fork(self, samples: Sequence[int]) -> EvictionCache:
        """A copy of this cache for these samples, which may repeat; this cache stays as it is.

        Neighbouring samples, or one that repeats, share keys and values with this cache until a slot is overwritten.
        Its peak of bytes is the samples' share of this cache's, so that a sample costs the same in any company.
        """
        beams = self.sequence.num_beams
        rows = torch.tensor([sample * beams + beam for sample in samples for beam in range(beams)])
        # Slots are large: only the wanted rows are copied, or shared; everything else is copied whole.
        apart: dict[int, Any] = {id(buffer): None for state in self.layer_states for buffer in state.heavy_buffers}
        evicting = [state for state in self.layer_states if isinstance(state, EvictionLayer)]
        fixed = [
            constant
            for state in evicting
            for constant in (state.output_factors, state.output_projection, state.calibration, state.surrogate)
        ]
        first = self.layers[self.held[0]]
        windows = [buffer for window in self.windows for buffer in window.shareable]
        for shared in (self.config, first.model_config, first.layer_input, *fixed, *windows):
            apart[id(shared)] = shared
        other = copy.deepcopy(self, apart)
        other._select(rows)
        for state, other_state in zip(self.layer_states, other.layer_states, strict=True):
            other_state.copy_rows_from(state, rows)  # type: ignore[arg-type]  # layers of one kind
        if self.sequence.num_real is not None:
            other.memory_tracker.scale_peak_from(
                self.memory_tracker, len(samples), self.sequence.num_real.shape[0] // beams
            )
        return other

    def _select(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows in all layers; same_prompts: every row stays one of its own prompt."""
        if self.prompts is not None and not same_prompts:  # which rows they are would be read from the device
            beams = self.sequence.num_beams
            self.prompts = [self.prompts[row // beams] for row in rows[::beams].tolist()]
        self.sequence.select_rows(rows, same_prompts=same_prompts)
        for state in (*self.layer_states, *self.windows):
            state.select_rows(rows, same_prompts=same_prompts)
        for layer in self.layers:
            select_states(layer, rows)
        for common in self._of_all_layers:
            common.select_rows(rows)

    def _sizes(self, lengths: Sequence[int], padded: int) -> PromptSizes:
        """Prompts of so many real tokens and padded columns, as budgets of this cache are resolved for them."""
        return PromptSizes(lengths, padded, self.sequence.max_new_tokens, len(self.held), self.budget_windows)

    def check_budget(self, prompt_lengths: Sequence[int], padded: int) -> None:
        """ConfigError where a layer's budget cannot hold what the method protects, for prompts of these lengths.

        Also where a second pass over them is too long for the model. prompt_lengths: real tokens per row; padded:
        columns. To be called before the model runs.
        """
        method = self.config.method
        if method.evicts and method.score_spec is not None:
            method.score_spec.check_lengths(prompt_lengths)
        prompts = self._sizes(prompt_lengths, padded)
        check_budget(self.config, prompts)
        if may_evict(self.config, prompts):
            self.check_second_pass(prompt_lengths)

    def mark_spans(self, spans: Sequence[Sequence[Span]] | None, prompt_lengths: Sequence[int], padded: int) -> None:
        """Mark spans of every prompt, which the configuration's `keep` spares; other arguments as of `check_budget`.

        spans: per prompt, (first, behind the last) in its real tokens; None: none. ConfigError where they are needed
        and not given, or no budget holds them. To be called before the model runs.
        """
        prompts = self._sizes(prompt_lengths, padded)
        check_spans(self.config, prompts, spans)
        if self.config.keep in ("span", "fair") and spans is not None:
            self.sequence.mark_spans(spans, prompt_lengths)

    def check_second_pass(self, prompt_lengths: Sequence[int]) -> None:
        """ConfigError where the method's second pass over prompts of so many tokens is too long for the model."""
        holds = self.sequence.max_positions
        if self.repeated_prompt is not None and holds is not None:
            for length in prompt_lengths:
                self.repeated_prompt.check_room(length, holds, self.config.method.name, self.moving)

    def logits_were_finite(self) -> bool:
        """Whether the logits of all forwards through this cache were finite. Waits for the device."""
        return math.isfinite(float(self.logits_nan_flag))

    def scores_are_finite(self) -> bool:
        """Whether no layer holds a NaN score, by which slots cannot be chosen. Waits for the device."""
        slots = [state.slots for state in self.layer_states if state.slots is not None]
        stats = [state.selection_stats for state in self.layer_states if isinstance(state, RetrievalLayer)]
        if any(noted is not None and noted.has_nan is not None and bool(noted.has_nan) for noted in stats):
            return False
        return not any(bool((s.score.isnan() & (s.positions >= 0)).any()) for s in slots)

    def crop(self, *_: Any) -> None:
        """Always a CacheError: evicted or overwritten tokens cannot come back."""
        raise CacheError(
            "a kvexp cache cannot be cropped: evicted tokens cannot come back and scores cannot be un-summed. "
            "Assisted decoding and other methods that take tokens back need method=full with Hugging Face's own cache"
        )

    def kept_positions(self, layer: int) -> list[list[list[int]]]:
        """Position ids of the slots that a layer holds, per batch row and kv head, ascending."""
        return self.layer_states[layer].kept_positions()

    def show(self, tokenizer: Any, sample: int = 0, prompt: Sequence[int] | None = None) -> KeptText:
        """The prompt's tokens, with a mark below each of how many heads hold it now.

        sample: of the batch; of its beams the first stands for all. prompt: its token ids without padding, needed where
        kvexp.generate did not feed them. Methods that keep everything show what the newest token attended to.
        """
        ids = prompt if prompt is not None else self.prompts[sample] if self.prompts is not None else None
        if ids is None:
            raise ConfigError(
                "this cache was not filled by kvexp.generate and does not know the words: give the prompt's token ids, "
                "without padding, as in cache.show(tokenizer, prompt=ids)"
            )
        row = sample * self.sequence.num_beams
        held = [state.kept_positions(slice(row, row + 1))[0] for state in self.layer_states]
        heads = [head for layer_heads in held for head in layer_heads]
        counts = Counter(position for head in heads for position in head)
        return KeptText(texts_of(tokenizer, list(ids)), [counts[place] for place in range(len(ids))], len(heads))


State = EvictionLayer | RetrievalLayer
MAX_PAD_BYTES = 8 << 20  # about what a step of another stack takes to read on a CPU: half a millisecond


class FastStepGroup:
    """The caches that take a decode step together, because every layer of theirs can take the fast step.

    states: the layers of each cache. by_layer: as of `MultiMethodCache`; then each layer stacks the caches that can in
    it, and shares no buffers with others. eligible: indices of these caches, as of the step in progress.
    """

    def __init__(self, states: list[list[State]], *, by_layer: bool = False) -> None:
        self.states, self.by_layer = states, by_layer
        self.eligible: list[int] = []
        self._buffers: dict[tuple[int, ...], CrossLayerBuffers] = {}

    def refresh(self, index: int, query: Tensor, padding: Tensor | None) -> None:
        """Find the caches that are eligible in layer `index`, or the first layer's for all layers of a decode step.

        query [R, H * G, 1, D]; padding as of `LayerCache.forward`.
        """
        if index and not self.by_layer:
            return
        # Layers whose heads hold different numbers of slots take the fast step by themselves.
        eligible = [
            i
            for i, layers in enumerate(self.states)
            if all(
                isinstance(state, EvictionLayer)
                and not state.config.is_ragged
                and not (self.by_layer and state.config.only_grows)  # which take chunks at once
                and state.can_step(query, padding)
                for state in (layers[index : index + 1] if self.by_layer else layers)
            )
        ]
        if eligible != self.eligible:
            self.eligible = eligible
            self._buffers = {}

    def buffers(self, members: list[int]) -> CrossLayerBuffers:
        """The buffers that all layers of the stack of caches `members` (indices) share; made at the first call."""
        if self.by_layer:
            return CrossLayerBuffers(1)
        return self._buffers.setdefault(tuple(members), CrossLayerBuffers(len(self.states[0])))


class MultiLayer:
    """One layer of several caches, as one `LayerCache`.

    states: this layer of each cache; rows: batch rows of each cache. A prompt comes once, to caches of equally many
    rows, and is stored by every cache. Later forwards have the rows of the first cache, then of the second …
    """

    def __init__(self, states: list[State], rows: list[int], fast_group: FastStepGroup) -> None:
        self.states, self.rows, self.fast_group = states, rows, fast_group
        self._inputs: dict[int, tuple[Tensor, ...]] = {}  # of the layer, by cache, where methods score tokens by them
        self._eligible: list[int] = []
        self._stacks: list[tuple[list[int], StackedLayer]] = []

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, padding included."""
        return self.states[0].seq_len

    def take_input(self, *inputs: Tensor) -> None:
        """Hand what this layer gets, as `EvictionLayer.take_input`, to the caches whose methods score tokens by it."""
        parts = [[x] * len(self.states) if self.seq_len == 0 else x.split(self.rows) for x in inputs]
        self._inputs = dict(enumerate(zip(*parts, strict=True)))
        for state, member_inputs in zip(self.states, self._inputs.values(), strict=True):
            if isinstance(state, EvictionLayer) and not state.sequence.by_token:
                state.take_input(*member_inputs)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        if self.seq_len == 0:
            return self._prompt(query, key, value, params, padding)
        stacks = self._stacked(query, padding)
        if len(stacks) == 1 and stacks[0][0] == list(range(len(self.states))):
            return stacks[0][1].forward(query, key, value, params)
        inputs = dict(enumerate(zip(*(x.split(self.rows) for x in (query, key, value)), strict=True)))
        by_token = {i: inputs.pop(i) for i, state in enumerate(self.states) if state.sequence.by_token}
        outputs = self._step(inputs, stacks, params, padding)
        if by_token:
            steps = []
            for member in by_token:
                self.states[member].sequence.restart_chunk()
            for j in range(query.shape[2]):
                token = {i: tuple(x[:, :, j : j + 1] for x in qkv) for i, qkv in by_token.items()}
                for i in token:
                    if i in self._inputs and isinstance(state := self.states[i], EvictionLayer):
                        state.take_input(*(x[:, j : j + 1] for x in self._inputs[i]))
                stacks = self._stacked(query[:, :, j : j + 1], None)
                steps.append(self._step(token, stacks, params, None))
            outputs |= {i: torch.cat([step[i] for step in steps], dim=2) for i in by_token}
        return torch.cat([outputs[member] for member in range(len(self.states))])

    def _step(
        self,
        inputs: dict[int, tuple[Tensor, ...]],
        stacks: list[tuple[list[int], StackedLayer]],
        params: AttentionParams,
        padding: Tensor | None,
    ) -> dict[int, Tensor]:
        """The attention output of caches, by index; inputs: query, key and value of the rows of each."""
        outputs: dict[int, Tensor] = {}
        for members, stack in stacks:
            q, k, v = (torch.cat(parts) for parts in zip(*(inputs[member] for member in members), strict=True))
            sizes = [self.rows[member] for member in members]
            outputs |= zip(members, stack.forward(q, k, v, params).split(sizes), strict=True)
        for member, (q, k, v) in inputs.items():
            if member not in outputs:
                mask = None if padding is None else padding.split(self.rows)[member]
                outputs[member] = self.states[member].forward(q, k, v, params.split(self.rows)[member], mask)
        return outputs

    def _stacked(self, query: Tensor, padding: Tensor | None) -> list[tuple[list[int], StackedLayer]]:
        """The stacks of caches that take this step together, as pairs (indices of the caches, their stacked layer).

        Made anew when other caches are eligible. Caches of another `stack_kind` have stacks of their own.
        """
        if query.shape[2] > 1 and self.fast_group.by_layer:
            return []
        self.fast_group.refresh(self.states[0].index, query, padding)
        eligible = self.fast_group.eligible
        slots = {i: state for i in eligible if isinstance(state := self.states[i], EvictionLayer)}
        full = [state for state in slots.values() if state.config.only_grows and state.lacks_slot]
        for state in full:
            state.grow()
        if full or eligible != self._eligible:
            self._stacks = []
            for kind in dict.fromkeys(map(stack_kind, slots.values())):
                same_kind = {i: slot.require_slots() for i, slot in slots.items() if stack_kind(slot) == kind}
                for members in bin_by_bytes({i: (held.length, held.kv_bytes) for i, held in same_kind.items()}):
                    if len(members) > 1:
                        members = sorted(members, key=lambda i: stack_order(slots[i]))
                        stack = StackedLayer([slots[i] for i in members], self.fast_group.buffers(members))
                        self._stacks.append((members, stack))
            self._eligible = eligible
        return self._stacks

    @property
    def decode_stacks(self) -> list[StackedLayer] | None:
        """As `EvictionLayer.decode_stacks`, of all caches; None where one of them takes another step."""
        together = {member for members, _ in self._stacks for member in members}
        stacks = [stack for _, stack in self._stacks]
        for member, state in enumerate(self.states):
            if not isinstance(state, EvictionLayer) or not state.has_slot:
                return None
            if member not in together:
                state_stacks = state.decode_stacks
                if state_stacks is None:
                    return None
                stacks += state_stacks
        return stacks

    def _prompt(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """The prompt's forward: attend once, then let every cache store and observe it; see `LayerCache.forward`."""
        slots = [state for state in self.states if isinstance(state, EvictionLayer)]
        retrieval = [state for state in self.states if isinstance(state, RetrievalLayer)]
        # Retrieval methods index the prompt in their own way, each in buffers of its own.
        alone = None if slots else retrieval.pop(0).forward(query, key, value, params, padding)
        share_prompt(retrieval, query, key, value, params, padding)
        if alone is not None:
            return alone
        # First the cache whose buffers have room for the tokens to come: no other needs the room.
        slots.sort(key=lambda state: not state.final_length)
        first, *others = slots
        inputs = first.store(query, key, value, params, padding)
        for state in others:
            state.share_prefill(inputs, key, value, padding)
        sums: dict[SumsKey, ColumnSums] = {}
        for state in slots:
            state.observe(inputs, sums)
        out, _ = first.attend(inputs, sums.values())
        seen: PromptSums = {key: column_sums.sums for key, column_sums in sums.items()}
        for state in slots:
            state.update(inputs, None, seen)
        return out.flatten(1, 2)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: the rows belong to several caches."""
        raise CacheError("caches that decode together keep their rows: pick rows of each cache (fork), then join those")

    def reset(self) -> None:
        """Always a CacheError: each cache is reset by itself."""
        raise CacheError("caches that decode together are reset one by one: call reset() of each")


def bin_by_bytes(held: dict[int, tuple[int, int]]) -> list[list[int]]:
    """Indices of caches in groups of similar length, so that common buffers waste at most MAX_PAD_BYTES per layer.

    held: of each cache, by index: its slots in this layer, and the bytes of their keys and values.
    """
    groups: list[list[int]] = []
    for member in sorted(held, key=lambda member: held[member][0], reverse=True):
        if groups:
            length, size = held[groups[-1][0]]
            spare = [size * (1 - held[i][0] / length) for i in (*groups[-1], member)]
            if sum(spare) <= MAX_PAD_BYTES:
                groups[-1].append(member)
                continue
        groups.append([member])
    return groups


class MultiMethodCache(Cache):  # type: ignore[misc]
    """Caches of one model, for a prefill of the same prompts in one forward and then for decoding together.

    rows: batch rows of every cache, or one number for all. All caches are new, or all have seen their prompt, which may
    be another one for each where forwards are given position ids. Each keeps and counts what it would alone. by_layer:
    forwards are chunks of known tokens (`chunk`), for caches that `take_chunks`.
    """

    def __init__(self, caches: list[EvictionCache], rows: int | Sequence[int], *, by_layer: bool = False) -> None:
        sizes = [rows] * len(caches) if isinstance(rows, int) else list(rows)
        for cache in caches:
            if cache.config.method.modifies_prefill and cache.get_seq_length() == 0 and len(caches) > 1:
                raise ConfigError(f"{cache.config.method.name} computes prompts in its own way: prefill it apart")
            if cache.sequence.num_beams > 1:
                raise ConfigError("caches of beam searches cannot be decoded together: beams end at different times")
        self.caches, self.by_layer = caches, by_layer
        alike: dict[tuple[int, ...], list[int]] = {}  # caches that hold the same layers
        for member, cache in enumerate(caches):
            alike.setdefault(cache.held, []).append(member)
        together = {
            numbers: (members, FastStepGroup([caches[member].layer_states for member in members], by_layer=by_layer))
            for numbers, members in alike.items()
        }
        self.held = min(alike, key=len)
        layers = []
        for index in range(len(caches[0].layers)):
            parts = [cache.layers[index] for cache in caches]
            held = [
                (members, MultiLayer([parts[i].state for i in members], [sizes[i] for i in members], group))
                for numbers, (members, group) in together.items()
                if index in numbers
            ]
            layers.append(join(parts, held, sizes))
        super().__init__(layers=layers)
        self._new = caches[0].get_seq_length() == 0

    @property
    def layer_states(self) -> list[Any]:
        """The layers that every cache holds, in order, each of all caches."""
        return [self.layers[number].state for number in self.held]

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around a forward of several new tokens per row, all known: caches that evict take them one by one per layer.

        Those that only grow attend for all at once; linear layers see all in any case.
        """
        evicting = [cache for cache in self.caches if not cache.config.only_grows]
        for cache in evicting:
            cache.sequence.by_token = True
            cache.sequence.begin_chunk()
        for cache in self.caches:
            cache.allow_multi_token_steps()
        try:
            yield
            for cache in evicting:
                cache.sequence.end_chunk(len(cache.held))
        finally:  # after an error caches are out of step, and say so when they are used again
            for cache in self.caches:
                cache.allow_multi_token_steps(False)
                cache.sequence.by_token = False

    def hand_out(self) -> None:
        """Give every cache the states that the prompt has left in layers that kvexp does not hold."""
        if self._new:
            for index, layer in enumerate(self.layers):
                hand_out(layer, [cache.layers[index] for cache in self.caches])
            self._new = False

    def crop(self, *_: Any) -> None:
        """Always a CacheError: evicted tokens cannot come back."""
        self.caches[0].crop()


class RowMaskCache(Cache):  # type: ignore[misc]
    """The cache for one forward of a patched model under row masks; `mask_fn` makes a layer's mask of its full logits.

    Example: `RowMaskCache(model, lambda x, layer: local_mask(x, heavy=6, recent=6))`.
    """

    def __init__(self, model: PreTrainedModel, mask_fn: MaskFn) -> None:
        check_patched(model.config, ConfigError)
        states = [MaskedLayer(mask_fn, index) for index in range(num_layers(model.config))]
        super().__init__(layers=compose(model.config, states))
        self.layer_states = states  # with their masks and probabilities after the forward
