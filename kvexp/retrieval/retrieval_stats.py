"""What retrieval cost a sample: `retrieval` in every row of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvexp.retrieval.base import Retrieval
from kvexp.retrieval.kv_index import KVIndex
from kvexp.retrieval.offload import OffloadedKV
from kvexp.retrieval.retrieval_layer import RetrievalLayer
from kvexp.retrieval.selection_stats import SelectionStats


def retrieval_stats(states: Sequence[Any], rows: Sequence[int]) -> dict[str, Any] | None:
    """Statistics of one sample's batch rows over all layers; None for methods that evict.

    attended: keys per kv head and new token, mean. offloaded_bytes: kept off the device. moved_bytes: everything that
    crossed either way, fetched_bytes of it to the device; on a CPU what would cross. search_share: what the choice
    reads per step over the size of the keys, in the papers' accounting (codes of m * b bits, keys of 16 bits a
    component). cache_hit_rate: of the (kv head, token) pairs chosen, those found in the block cache. kmeans_iterations:
    mean. notes: fallbacks in plain words.
    """
    found = [_Layer.of(state) for state in states if isinstance(state, RetrievalLayer)]
    layers = [layer for layer in found if layer is not None]
    if not layers:
        return None
    memory, method = layers[0].memory, layers[0].method
    traffic = [layer.memory.traffic[row] for layer in layers for row in rows]
    steps = sum(layer.selection_stats.steps for layer in layers) * len(rows)
    near = sum(layer.selection_stats.num_resident[row] for layer in layers for row in rows)
    asked, hits = sum(t.lookups for t in traffic), sum(t.hits for t in traffic)
    away = sum(layer.memory.host_bytes + layer.index.nbytes(ship=True) for layer in layers) if method.offload else 0
    iterations = _noted(layers, "kmeans_iterations", rows)
    return {
        "attended": (near + asked / memory.keys.shape[1]) / steps if steps else None,
        "offloaded_bytes": away * len(rows) // len(memory.lengths),
        "moved_bytes": sum(t.d2h + t.h2d for t in traffic),
        "fetched_bytes": sum(t.h2d for t in traffic),
        "search_share": method.index_bits_per_token(memory.keys.shape[3]) / (16 * memory.keys.shape[3]),
        "cache_hit_rate": hits / asked if asked and memory.cache is not None else None,
        "kmeans_iterations": sum(iterations) / len(iterations) if iterations else None,
        "notes": _notes(layers, rows),
    }


@dataclass(frozen=True)
class _Layer:
    """The parts of a layer whose prompt has ended."""

    memory: OffloadedKV
    index: KVIndex
    selection_stats: SelectionStats
    method: Retrieval

    @classmethod
    def of(cls, state: RetrievalLayer) -> _Layer | None:
        if state.memory is None or state.selection_stats is None:
            return None
        return cls(state.memory, state.countable_index, state.selection_stats, state.method)


def _noted(layers: list[_Layer], name: str, rows: Iterable[int]) -> list[Any]:
    """The notes called `name` of these batch rows in all layers' indices, as one list."""
    notes = [layer.index.notes.get(name) for layer in layers]
    return [values[row] for values in notes if values is not None for row in rows]


def _notes(layers: list[_Layer], rows: Sequence[int]) -> list[str]:
    """Sentences on where these batch rows were not searched or stored as configured."""
    notes = []
    if any(_noted(layers, "exact", rows)):
        notes.append("no more tokens to cluster than centroids: searched exactly")
    if any(not (layer.memory.pinned and layer.index.pinned) for layer in layers):
        notes.append("no more memory could be pinned: ordinary memory was used, copies wait for each other")
    return notes
