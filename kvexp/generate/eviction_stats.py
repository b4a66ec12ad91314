"""Statistics of what eviction did to each row of a batch: slots and bytes held, the first eviction, what was kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvexp.models import EvictionCache
from kvexp.retrieval.retrieval_stats import retrieval_stats


@dataclass(frozen=True)
class EvictionStats:
    """What eviction did to one sample.

    slots: live slots per kv head at the row's end, mean over layers and heads. kv_bytes, peak_kv_bytes: the row's share
    of the batch's bytes.

    first_eviction_step: decode tokens seen when the row first lost a slot (0: at the end of prefill; None: never).
    kept_digest: hash of the positions held in every layer and head. attention_kept: share of the last prompt query's
    attention whose slots survived the first eviction, mean over layers and heads (None: nothing evicted at prefill).
    batch_size: samples that shared the cache; bytes hold their padding too, so compare them at equal batch sizes.

    For a retrieval method, which drops nothing: slots and kept_digest are of the tokens that the last token attended
    to, attention_kept is that of the first new token, first_eviction_step is when a token was first not attended to,
    kv_bytes are those on the device, index included; retrieval: see `retrieval_stats`.

    kv_bytes_at_16: of quantised caches and retrieval methods, kv_bytes with every floating-point number that is not
    quantised counted as 16 bits, whatever dtype ran; None elsewhere, where all numbers are of one dtype.
    """

    slots: float
    slots_by_layer: list[float]
    kv_bytes: int
    peak_kv_bytes: int
    first_eviction_step: int | None
    kept_digest: str
    attention_kept: float | None
    batch_size: int
    retrieval: dict[str, Any] | None = None
    kv_bytes_at_16: int | None = None


def receipts(cache: EvictionCache, ends: Mapping[int, EvictionStats] | None = None) -> list[EvictionStats]:
    """The statistics of every sample of the batch; of a sample's beams, the first stands for all.

    ends: statistics, by sample, of samples that ended before the batch did (`Generation.early_stats`). Bytes of these
    are replaced by the batch's at its end.
    """
    rows = int(cache.sequence.seeds.shape[0]) // cache.sequence.num_beams
    made = [(ends or {}).get(sample) or receipt_of(cache, sample) for sample in range(rows)]
    held, peak = cache.memory_tracker.bytes // rows, cache.memory_tracker.peak_bytes // rows
    return [replace(one, kv_bytes=held, peak_kv_bytes=peak, kv_bytes_at_16=_at_16(cache, rows)) for one in made]


def receipt_of(cache: EvictionCache, sample: int) -> EvictionStats:
    """The statistics of one sample (its index in the batch) as of now.

    To be taken when the sample ends: the padding that is fed to it afterwards is held and evicts like any token.
    """
    beams = cache.sequence.num_beams
    row, rows = sample * beams, int(cache.sequence.seeds.shape[0]) // beams
    held = [state.kept_positions(slice(row, row + 1))[0] for state in cache.layer_states]
    by_layer = [sum(map(len, heads)) / len(heads) for heads in held]
    watched = [float(s.retained_attention[row]) for s in cache.layer_states if s.retained_attention is not None]
    starts = [s.first_eviction[row] for s in cache.layer_states if s.first_eviction]
    steps = [step for step in starts if step is not None]
    return EvictionStats(
        slots=sum(by_layer) / len(by_layer),
        slots_by_layer=by_layer,
        kv_bytes=cache.memory_tracker.bytes // rows,
        peak_kv_bytes=cache.memory_tracker.peak_bytes // rows,
        first_eviction_step=min(steps) if steps else None,
        kept_digest=hashlib.sha256(repr(held).encode()).hexdigest()[:16],
        attention_kept=sum(watched) / len(watched) if watched else None,
        batch_size=rows,
        retrieval=retrieval_stats(cache.layer_states, range(row, row + beams)),
        kv_bytes_at_16=_at_16(cache, rows),
    )


def _at_16(cache: EvictionCache, rows: int) -> int | None:
    """A sample's equal share, of `rows`, of the layers' bytes_at_16; None where a layer has none."""
    each = [state.bytes_at_16 for state in cache.layer_states]
    known = [held for held in each if held is not None]
    return sum(known) // rows if len(known) == len(each) else None
