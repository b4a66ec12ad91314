"""A Hugging Face Cache over the eviction core: give it to `model.generate(past_key_values=...)`."""

from __future__ import annotations

import copy
import math
import warnings
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
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.eviction_backend import check_budget
from kvexp.core.layer_cache import LayerCache, RowsCache
from kvexp.errors import CacheError, ConfigError
from kvexp.kept_text import KeptText
from kvexp.models.attention_hook import TAG, check_patched
from kvexp.models.families import check_positions, layers_of, longest, rotation_of
from kvexp.models.retrieval_calibration import check_retrieval, prepare
from kvexp.models.texts import texts_of
from kvexp.retrieval.base import Retrieval
from kvexp.retrieval.retrieval_layer import LayerGroup, RetrievalState


class EvictionCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """What Hugging Face sees of one layer. Lengths are columns seen, never slots held."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: LayerCache, rotation: RoPE | None, model_config: Any) -> None:
        super().__init__()
        self.state, self.rotation, self.model_config = state, rotation, model_config
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the core makes its slots at the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Tag the new keys with this layer; the attention function stores them."""
        check_patched(self.model_config)
        tagged = key_states.view_as(key_states)
        setattr(tagged, TAG, self)
        return tagged, value_states

    def get_seq_length(self, *_: Any) -> int:
        return self.state.columns

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.state.columns + count, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.select_rows(beam_idx, same_prompts=True)


class EvictionCache(Cache):  # type: ignore[misc]
    """One prompt's cache (or one batch of prompts').

    model: a patched model.
    method, budget (None for full), options: as `kvexp.core.CacheConfig`, or one of those in place of the method.
    num_beams: beams per sample, so that methods can add up the scores of a sample's beams.
    prompt_tokens: prompt columns, padding included; needed when the prompt is fed in chunks.
    max_new_tokens: needed by tau schedules and budget.of=sequence; else only spares allocations.
    seeds: of the noise; one, or one per sample.
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
        **options: Unpack[CacheOptions],
    ) -> None:
        check_patched(model.config, ConfigError)
        self.config = config = CacheConfig.of(method, budget, **options)
        method = config.method
        if isinstance(method, Retrieval):
            check_retrieval(model.config, method)
        check_positions(model.config, config)
        moves_keys = config.renumbered or (isinstance(method, Retrieval) and method.clamps)
        rotation = rotation_of(model) if moves_keys else None
        self.timeline = SequenceState(
            prompt_columns=prompt_tokens,
            max_new_tokens=max_new_tokens,
            max_positions=None if config.beyond_context else longest(model.config),
            num_beams=num_beams,
            seeds=seeds,
        )
        count = layers_of(model.config)
        self.ledger = MemoryTracker(count)
        view = method.view
        self.shared = CrossLayerScore(self.timeline) if view is not None and view.across_layers else None
        states: list[EvictionLayer | RetrievalState]
        if isinstance(method, Retrieval):
            crew = LayerGroup(prepared=prepare(model, method))
            states = [RetrievalState(config, i, count, self.timeline, self.ledger, crew) for i in range(count)]
        else:
            common = (self.timeline, self.ledger, self.shared, CrossLayerBuffers(count))
            states = [EvictionLayer(config, i, count, *common) for i in range(count)]
        super().__init__(layers=[EvictionCacheLayer(state, rotation, model.config) for state in states])
        self.prompts: list[list[int]] | None = None  # token ids of each sample, if known: for `show`
        self.doubt: float | Tensor = 0.0  # NaN once a forward's logits were not finite
        if view is not None:
            view.tau_at(1, max_new_tokens)  # a missing max_new_tokens is said now, not at the first decode step

    @property
    def states(self) -> list[EvictionLayer | RetrievalState]:
        """The core's layers, in order."""
        return [layer.state for layer in self.layers]

    @property
    def plan(self) -> CacheConfig:
        """The old name of `config`, for one release."""
        warnings.warn("EvictionCache.plan is called EvictionCache.config now", DeprecationWarning, stacklevel=2)
        return self.config

    def several_tokens(self, allowed: bool = True) -> EvictionCache:
        """Allow forwards of several new tokens after the prompt; eviction then happens after each such forward."""
        self.timeline.several_tokens_allowed = allowed
        return self

    def reset(self) -> None:
        """Empty the cache: another prompt may follow."""
        self.timeline.reset()
        self.ledger.reset()
        self.prompts = None
        self.doubt = 0.0
        if self.shared is not None:
            self.shared.reset()
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: the state of every row follows its beam."""
        view, beams = self.config.method.view, self.timeline.num_beams
        if view is not None and view.batch == "per_sample":
            if beams == 1 and len(beam_idx) > 1:
                raise CacheError("beam search needs num_beams: this method adds up scores over the beams of a sample")
            home = torch.arange(len(beam_idx), device=beam_idx.device) // beams
            if bool((beam_idx // beams != home).any()):
                raise CacheError(
                    f"rows were reordered across samples of num_beams={beams}: give the number really used"
                )
        self._select(beam_idx, same_prompts=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, neighbours together."""
        batch = self.timeline.counts.shape[0] if self.timeline.counts is not None else 0
        self._select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; rows may repeat."""
        self._select(torch.as_tensor(indices))

    def fork(self, samples: Sequence[int]) -> EvictionCache:
        """A cache of its own that goes on from here for these samples, which may repeat; this one stays as it is.

        Its peak of bytes is the samples' share of this cache's, so that a sample costs the same in any company.
        """
        beams = self.timeline.num_beams
        rows = torch.tensor([sample * beams + beam for sample in samples for beam in range(beams)])
        # Slots are large: they are picked row by row, and only the rest is copied whole.
        apart: dict[int, Any] = {id(part): None for state in self.states for part in state.large}
        for shared in (self.config, self.layers[0].model_config):
            apart[id(shared)] = shared
        other = copy.deepcopy(self, apart)
        other._select(rows)
        pairs: Iterable[tuple[RowsCache, RowsCache]] = zip(self.states, other.states, strict=True)
        for mine, its in pairs:
            its.take_over(mine, rows)
        if self.timeline.counts is not None:
            other.ledger.peak_of(self.ledger, len(samples), self.timeline.counts.shape[0] // beams)
        return other

    def _select(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        if self.prompts is not None:
            beams = self.timeline.num_beams
            self.prompts = [self.prompts[row // beams] for row in rows[::beams].tolist()]
        self.timeline.select_rows(rows, same_prompts=same_prompts)
        for state in self.states:
            state.select_rows(rows, same_prompts=same_prompts)
        if self.shared is not None:
            self.shared.select_rows(rows)

    def resolve(self, prompt_lengths: Sequence[int], padded: int) -> None:
        """Raise what a layer's budget would raise for prompts of these lengths, before anything runs."""
        method = self.config.method
        if method.evicts and method.view is not None:
            method.view.check_lengths(prompt_lengths)
        check_budget(self.config, prompt_lengths, padded, self.timeline.max_new_tokens, len(self.layers))

    def logits_were_finite(self) -> bool:
        """False if a forward through this cache ended in NaN or inf. Waits for the device."""
        return math.isfinite(float(self.doubt))

    def scores_are_finite(self) -> bool:
        """False if any layer remembers NaN: its choices would mean nothing. Waits for the device."""
        slots = [state.slots for state in self.states if state.slots is not None]
        tallies = [state.tally for state in self.states if isinstance(state, RetrievalState)]
        if any(tally is not None and tally.broken is not None and bool(tally.broken) for tally in tallies):
            return False
        return not any(bool((s.score.isnan() & (s.positions >= 0)).any()) for s in slots)

    def crop(self, *_: Any) -> None:
        """Refused: slots that were evicted or overwritten cannot come back."""
        raise CacheError(
            "a kvexp cache cannot be cropped: evicted tokens cannot come back and scores cannot be un-summed. "
            "Assisted decoding and other methods that take tokens back need method=full with Hugging Face's own cache"
        )

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Position ids layer `layer` holds, per batch row and kv head."""
        return self.states[layer].kept()

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
        row = sample * self.timeline.num_beams
        held = [state.kept(slice(row, row + 1))[0] for state in self.states]
        counts = [Counter(position for head in heads for position in head) for heads in held]
        by_layer = [[layer[place] for layer in counts] for place in range(len(ids))]
        return KeptText(texts_of(tokenizer, list(ids)), by_layer, [len(heads) for heads in held])
