"""KVzip and KVzip+ against NVIDIA's KVzipPress, on the same weights (tests/peers/export_kvzip.py).

kvpress 0.5.5                                  kvexp
KVzipPress(n_sink, chunk_size)                 KVzip(n_sinks, chunk): a template's prefix as long as the sinks
KVzipPress(kvzip_plus_normalization=True)      KVzipPlus
one cut for all layers, or one for each        each kv head keeps as many: the press's scores, cut like that here
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peer_export import PeerExport
from torch import Tensor

from kvexp.core import Budget, EvictionContext
from kvexp.hf import EvictionCache
from kvexp.methods import KVzip, KVzipPlus

pytestmark = pytest.mark.peers

CASES = ("whole", "chunks", "plus_whole", "plus_chunks")
NEAR_MISSES: list[tuple[str, str, dict[str, Any]]] = [
    ("whole", "kvzip", {"chunk": 96}),
    ("whole", "kvzip", {"instruct": False}),
    ("whole", "kvzip_plus", {}),
    ("chunks", "kvzip", {"chunk": 51}),
    ("chunks", "kvzip", {"end_turn": False}),
    ("plus_whole", "kvzip", {}),
    ("plus_chunks", "kvzip_plus", {"chunk": 41}),
]
METHODS: dict[str, type[KVzip]] = {"kvzip": KVzip, "kvzip_plus": KVzipPlus}


class Letters:
    """The script's tokenizer: one token per character, modulo the vocabulary."""

    def __init__(self, vocabulary: int, template: bool) -> None:
        self.vocabulary, self.chat_template = vocabulary, "[u]{}[]" if template else None

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % self.vocabulary for letter in text])

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return str(self.chat_template).format(turns[0]["content"])


class Export(PeerExport):
    """kvzip.npz, and its models with kvexp installed."""

    def method(self, case: str, **changes: Any) -> KVzip:
        """kvexp's method for the press of a case, from the press's own parameters."""
        press = self.about["cases"][case]["press"]
        cls = KVzipPlus if press.get("kvzip_plus_normalization") else KVzip
        return cls(n_sinks=press["n_sink"], chunk=press.get("chunk_size", 2048), **changes)

    @torch.inference_mode()
    def cache(self, case: str, method: KVzip, kept: int, heads: Any = "uniform") -> EvictionCache:
        """The prompt of a case, prefilled and cut to `kept` slots."""
        what = self.about["cases"][case]
        tokenizer = Letters(what["config"]["vocab_size"], what["template"])
        model, budget = self.model(case), Budget(tokens=kept, counts_self=False, heads=heads)
        cache = EvictionCache(model, method, budget, tokenizer=tokenizer)
        model(self[f"{case}/ids"], past_key_values=cache)
        return cache

    def differences(self, case: str, method: KVzip) -> list[str]:
        """At every ratio: where kept sets are not the best of the press's scores."""
        bad, scores = [], self[f"{case}/scores"]
        for ratio in self.about["ratios"]:
            kept = int(scores.shape[-1] * (1 - ratio))
            cache, want = self.cache(case, method, kept), scores.topk(kept).indices.sort().values
            for layer, row, head in np.ndindex(*scores.shape[:3]):
                got = cache.kept_positions(layer)[row][head]
                if got != want[layer, row, head].tolist():
                    bad.append(f"ratio {ratio} layer {layer} row {row} head {head}")
        return bad


@pytest.fixture(scope="module")
def export() -> Export:
    return Export("kvzip")


@pytest.mark.parametrize("case", CASES)
def test_same_sets(export: Export, case: str) -> None:
    assert export.differences(case, export.method(case)) == []


@pytest.mark.parametrize("case", CASES)
def test_the_best_of_all_layers(export: Export, case: str) -> None:
    """KVzip's own budget, `budget.heads=global`: the best of all layers' heads together, sinks first."""
    method, scores, compared = export.method(case), export[f"{case}/scores"], 0
    for ratio in export.about["ratios"]:
        kept = int(scores.shape[-1] * (1 - ratio))
        cache = export.cache(case, method, kept, heads="global")
        for row in range(scores.shape[1]):
            values = scores[:, row].clone()
            values[..., : method.n_sinks] = torch.inf
            ranked = values.flatten().sort(descending=True)
            last = kept * values.shape[0] * values.shape[1]
            worst, best = ranked.values[last - 1 : last + 1].tolist()
            if worst - best < 1e-4 * worst:
                continue  # it hangs on rounding
            want = torch.zeros(values.numel(), dtype=torch.bool)
            want[ranked.indices[:last]] = True
            for layer, heads in enumerate(want.view(values.shape)):
                assert cache.kept_positions(layer)[row] == [head.nonzero().flatten().tolist() for head in heads]
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize("case", CASES)
def test_same_scores(export: Export, case: str) -> None:
    method, notes = export.method(case), []

    class Noting(type(method)):  # type: ignore[misc]
        def priority(self, ctx: EvictionContext) -> Tensor:
            notes.append(super().priority(ctx))
            return notes[-1]

    noting = Noting(**dataclasses.asdict(method))
    export.cache(case, noting, max(method.n_sinks, 5))
    scores = export[f"{case}/scores"][..., method.n_sinks :]
    torch.testing.assert_close(torch.stack(notes)[..., method.n_sinks :], scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("case", "name", "changes"), NEAR_MISSES)
def test_a_near_miss_is_seen(export: Export, case: str, name: str, changes: dict[str, Any]) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    own = dataclasses.asdict(export.method(case)) | changes
    assert export.differences(case, METHODS[name](**own))
