"""A Hugging Face Cache over the eviction core: give it to `model.generate(past_key_values=...)`."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvexp.core import (
    Budget,
    CacheConfig,
    CacheOptions,
    EvictionLayer,
    MemoryTracker,
    Method,
    RoPE,
    SequenceState,
)
from kvexp.core.cache_budget import check_budget, may_evict
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.head_budgets import ModelHeadBudgets
from kvexp.core.layer_allocation import LayerAllocation, layer_budgets_of
from kvexp.core.layer_cache import LayerCache, RowsCache
from kvexp.core.span_room import check_spans
from kvexp.core.spans import Span
from kvexp.errors import CacheError, ConfigError
from kvexp.kept_text import KeptText
from kvexp.models.attention_hook import LAYER_ATTR, check_patched
from kvexp.models.families import (
    check_positions,
    check_quantization,
    max_positions,
    num_kv_heads,
    num_layers,
    query_shape,
    rope_of,
)
from kvexp.models.layer_input import LayerInput, layer_input
from kvexp.models.moving_rope import MovingRope, check_rope, turned_by
from kvexp.models.output_projection import output_blocks, output_factors
from kvexp.models.repeated_prompt import RepeatedPrompt
from kvexp.models.retrieval_calibration import calibrate, check_retrieval
from kvexp.models.texts import texts_of
from kvexp.retrieval.base import Retrieval
from kvexp.retrieval.retrieval_layer import LayerGroup, RetrievalLayer


class EvictionCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer as Hugging Face's `Cache` sees it. Lengths are columns seen, never slots held.

    state: the layer's cache in kvexp's core; rope: the model's RoPE where cached keys are rotated (renumbered
    positions); layer_input: of the model, where the method scores tokens by it.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(
        self, state: LayerCache, rope: RoPE | None, model_config: Any, layer_input: LayerInput | None = None
    ) -> None:
        super().__init__()
        self.state, self.rope, self.model_config, self.layer_input = state, rope, model_config, layer_input
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the core makes its slots at the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys, tagged with this layer: the attention function stores them."""
        check_patched(self.model_config)
        hidden = None if self.layer_input is None else self.layer_input.take()
        if hidden is not None:
            self.state.take_input(hidden)  # type: ignore[attr-defined]
        tagged = key_states.view_as(key_states)
        setattr(tagged, LAYER_ATTR, self)
        return tagged, value_states

    def get_seq_length(self, *_: Any) -> int:
        return self.state.seq_len

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(Columns a mask must span, 0 columns of offset), for a forward of so many new tokens."""
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.state.seq_len + count, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.select_rows(beam_idx, same_prompts=True)


class EvictionCache(Cache):  # type: ignore[misc]
    """The KV cache of one prompt or one batch of prompts.

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
        **options: Unpack[CacheOptions],
    ) -> None:
        check_patched(model.config, ConfigError)
        self.config = config = CacheConfig.of(method, budget, **options)
        method = config.method
        if isinstance(method, Retrieval):
            check_retrieval(model.config, method)
        check_positions(model.config, config)
        if config.quantization is not None:
            check_quantization(model.config, config.quantization, model.dtype)
        if config.calibration is not None and method.needs.calibration:
            config.calibration.check_shape(*query_shape(model.config))
        if config.head_scores is not None:
            config.head_scores.check_shape(*query_shape(model.config)[:2])
        check_rope(MovingRope.of(model.config), config)
        rope = rope_of(model) if turned_by(config) is not None else None
        self.sequence = SequenceState(
            prompt_columns=prompt_tokens,
            max_new_tokens=max_new_tokens,
            max_positions=None if config.beyond_context else max_positions(model.config),
            num_beams=num_beams,
            seeds=seeds,
        )
        count = num_layers(model.config)
        self.memory_tracker = MemoryTracker(count)
        spec = method.score_spec
        self.cross_layer_score = CrossLayerScore(self.sequence) if spec is not None and spec.across_layers else None
        states: list[EvictionLayer | RetrievalLayer]
        if isinstance(method, Retrieval):
            group = LayerGroup(calibration=calibrate(model, method))
            states = [RetrievalLayer(config, i, count, self.sequence, self.memory_tracker, group) for i in range(count)]
        else:
            common = (self.sequence, self.memory_tracker, self.cross_layer_score, CrossLayerBuffers(count))
            factors = output_factors(model) if method.needs.output_norms else [None] * count
            shares: LayerAllocation | None = None
            if config.shares_by_preference and config.budget is not None:
                shares = LayerAllocation(layer_budgets_of(method, config.budget), count)
            blocks = output_blocks(model) if config.select.values == "critical" else [None] * count
            heads = ModelHeadBudgets.of(config.budget, count)
            states = [
                EvictionLayer(config, i, count, *common, factors[i], heads, shares, blocks[i]) for i in range(count)
            ]
        if config.surrogate is not None and method.needs.surrogate:
            kv_heads, width = num_kv_heads(model.config), model.get_input_embeddings().weight.shape[1]
            config.surrogate.check_shape(count, kv_heads, width)
        told = layer_input(model) if method.needs.surrogate else None
        super().__init__(layers=[EvictionCacheLayer(state, rope, model.config, told) for state in states])
        self.prompts: list[list[int]] | None = None  # token ids of each sample, if known: for `show`
        self.logits_nan_flag: float | Tensor = 0.0  # NaN once the logits of a forward were not finite
        second = method.needs.second_pass
        self.repeated_prompt = None if second is None else RepeatedPrompt.of(second, tokenizer, method.name)
        if spec is not None:
            spec.tau_at(1, max_new_tokens)  # a missing max_new_tokens is said now, not at the first decode step

    @property
    def layer_states(self) -> list[EvictionLayer | RetrievalLayer]:
        """The layers' caches in kvexp's core, in order."""
        return [layer.state for layer in self.layers]

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
        if self.cross_layer_score is not None:
            self.cross_layer_score.reset()
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
        apart: dict[int, Any] = {id(part): None for state in self.layer_states for part in state.heavy_buffers}
        evicting = [state for state in self.layer_states if isinstance(state, EvictionLayer)]
        fixed = [
            part
            for state in evicting
            for part in (state.output_factors, state.output_projection, state.calibration, state.surrogate)
        ]
        for shared in (self.config, self.layers[0].model_config, self.layers[0].layer_input, *fixed):
            apart[id(shared)] = shared
        other = copy.deepcopy(self, apart)
        other._select(rows)
        pairs: Iterable[tuple[RowsCache, RowsCache]] = zip(self.layer_states, other.layer_states, strict=True)
        for mine, its in pairs:
            its.copy_rows_from(mine, rows)
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
        for state in self.layer_states:
            state.select_rows(rows, same_prompts=same_prompts)
        if self.cross_layer_score is not None:
            self.cross_layer_score.select_rows(rows)

    def check_budget(self, prompt_lengths: Sequence[int], padded: int) -> None:
        """ConfigError where a layer's budget cannot hold what the method protects, for prompts of these lengths.

        Also where a second pass over them is too long for the model. prompt_lengths: real tokens per row; padded:
        columns. To be called before the model runs.
        """
        method = self.config.method
        if method.evicts and method.score_spec is not None:
            method.score_spec.check_lengths(prompt_lengths)
        new, layers = self.sequence.max_new_tokens, len(self.layers)
        check_budget(self.config, prompt_lengths, padded, new, layers)
        if may_evict(self.config, prompt_lengths, padded, new, layers):
            self.check_second_pass(prompt_lengths)

    def mark_spans(self, spans: Sequence[Sequence[Span]] | None, prompt_lengths: Sequence[int], padded: int) -> None:
        """Mark spans of every prompt, which the configuration's `keep` spares; other arguments as of `check_budget`.

        spans: per prompt, (first, behind the last) in its real tokens; None: none. ConfigError where they are needed
        and not given, or no budget holds them. To be called before the model runs.
        """
        check_spans(self.config, spans, prompt_lengths, padded, self.sequence.max_new_tokens, len(self.layers))
        if self.config.keep is not None and spans is not None:
            self.sequence.mark_spans(spans, prompt_lengths)

    def check_second_pass(self, prompt_lengths: Sequence[int]) -> None:
        """ConfigError where the method's second pass over prompts of so many tokens is too long for the model."""
        if self.repeated_prompt is not None and self.sequence.max_positions is not None:
            for length in prompt_lengths:
                self.repeated_prompt.check_room(length, self.sequence.max_positions, self.config.method.name)

    def logits_were_finite(self) -> bool:
        """Whether the logits of all forwards through this cache were finite. Waits for the device."""
        return math.isfinite(float(self.logits_nan_flag))

    def scores_are_finite(self) -> bool:
        """Whether no layer holds a NaN score, by which slots cannot be chosen. Waits for the device."""
        slots = [state.slots for state in self.layer_states if state.slots is not None]
        stats = [state.selection_stats for state in self.layer_states if isinstance(state, RetrievalLayer)]
        if any(one is not None and one.has_nan is not None and bool(one.has_nan) for one in stats):
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
        """The prompt's tokens, coloured in a notebook by how many heads hold each one now; marks in a terminal.

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
        counts = [Counter(position for head in heads for position in head) for heads in held]
        by_layer = [[layer[place] for layer in counts] for place in range(len(ids))]
        return KeptText(texts_of(tokenizer, list(ids)), by_layer, [len(heads) for heads in held])
