"""What eviction really did to each row of a batch: slots and bytes held, when it began, what was kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvexp.models import EvictionCache
from kvexp.retrieval.retrieval_stats import account


@dataclass(frozen=True)
class EvictionStats:
    """slots: live slots per kv head at the row's end, mean over layers and heads; bytes: its share of the batch's.

    first_eviction_step: decode tokens seen when the row first lost a slot (0: at the end of prefill; None: never).
    kept_digest: hash of the positions held in every layer and head. attention_kept: share of the last prompt query's
    attention whose slots survived the first eviction, mean over layers and heads (None: nothing evicted at prefill).
    batch_size: samples that shared the cache; bytes hold their padding too, so compare them at equal batch sizes.

    Of a method that keeps everything: slots and kept_digest are of what the last token attended to, attention_kept is
    the first new token's, and first_eviction_step when something was first left out; kv_bytes is what stays on the
    device, the method's index included. `retrieval` says the rest.
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


def receipts(cache: EvictionCache, ends: Mapping[int, EvictionStats] | None = None) -> list[EvictionStats]:
    """One receipt per sample of the batch; of a sample's beams, the first stands for all.

    ends: of samples that ended before the batch did, theirs at that time; bytes are the batch's at its end for all.
    """
    rows = int(cache.timeline.seeds.shape[0]) // cache.timeline.num_beams
    made = [(ends or {}).get(sample) or receipt_of(cache, sample) for sample in range(rows)]
    held, peak = cache.ledger.bytes // rows, cache.ledger.peak_bytes // rows
    return [replace(one, kv_bytes=held, peak_kv_bytes=peak) for one in made]


def receipt_of(cache: EvictionCache, sample: int) -> EvictionStats:
    """Of one sample as it stands now: what follows its end is padding, which evicts and is held like any token."""
    beams = cache.timeline.num_beams
    row, rows = sample * beams, int(cache.timeline.seeds.shape[0]) // beams
    held = [state.kept(slice(row, row + 1))[0] for state in cache.states]
    by_layer = [sum(map(len, heads)) / len(heads) for heads in held]
    watched = [float(s.attention_kept[row]) for s in cache.states if s.attention_kept is not None]
    starts = [s.first_eviction[row] for s in cache.states if s.first_eviction]
    steps = [step for step in starts if step is not None]
    return EvictionStats(
        slots=sum(by_layer) / len(by_layer),
        slots_by_layer=by_layer,
        kv_bytes=cache.ledger.bytes // rows,
        peak_kv_bytes=cache.ledger.peak_bytes // rows,
        first_eviction_step=min(steps) if steps else None,
        kept_digest=hashlib.sha256(repr(held).encode()).hexdigest()[:16],
        attention_kept=sum(watched) / len(watched) if watched else None,
        batch_size=rows,
        retrieval=account(cache.states, range(row, row + beams)),
    )
