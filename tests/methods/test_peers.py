"""The sets kept after prefill against NVIDIA's kvpress 0.5.5, on the same weights (tests/peers/export_*.py).

What each parameter is called over there, and where the two differ on purpose:

    kvpress                               kvexp
    int(T * (1 - compression_ratio))      Budget(tokens=..., counts_self=False): a ratio may floor to another number
    StreamingLLMPress(n_sink)             StreamingLLM(n_sinks); it leaves keys where they stood, positions="original"
    KnormPress()                          KNorm()
    SnapKVPress(window_size, kernel_size) SnapKV(window, kernel, pool="avg"): softmax over all keys, window included
    TOVAPress()                           TOVA(protect_recent=1): it always keeps the newest token, the paper does not
    KeyDiffPress()                        KeyDiff(protect_recent=0): it protects nothing
    ExpectedAttentionPress(n_sink, ...)   ExpectedAttention(n_sinks, ...)
    CURPress(num_sinks, local_window_size) CUR(n_sinks, block): its last block is filled with zeros
    QFilterPress(), filters set by hand   QFilters(protect_recent=0), directions of query heads: filter = -mean
    LagKVPress(n_sink, lag_size)          LagKV(n_sinks, lag), where no rank is shared between kept and dropped tokens
    PyramidKVPress(window_size, ...)      PyramidKV(window, kernel, pool="avg", form="kvpress")
    CompactorPress(chunk_size, ...)       Compactor(chunk, sketch), with its draws; whole chunks between the ends
    ChunkKVPress(press, chunk_length)     select=SlotSelection(by="chunk", chunk=...), budgets of whole chunks
    CriticalKVPress(press)                select=SlotSelection(values="critical")
    AdaKVPress(press, alpha_safeguard)    Budget(heads="adaptive", head_floor): the share is of the uniform budget
    DMSPress(press, threshold, ...)       Budget(threshold, threshold_recent)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peer_export import PeerExport, other_sets
from torch import Tensor

import kvexp.methods.compactor as compactor
from kvexp.core import Budget, Method, QueryCalibration, SlotSelection
from kvexp.hf import EvictionCache
from kvexp.methods import (
    CUR,
    TOVA,
    Compactor,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    LagKV,
    PyramidKV,
    QFilters,
    SnapKV,
    StreamingLLM,
)

pytestmark = pytest.mark.peers

# Each way to drop slots once, with each way to observe the prompt.
HOW: list[dict[str, Any]] = [{"mode": "overwrite"}, {"mode": "compact"}, {"mode": "mask", "observe": "naive"}]
CHUNKS, CRITICAL = SlotSelection(by="chunk", chunk=9), SlotSelection(values="critical")
KEYDIFF, QFILTERS, AVG = KeyDiff(protect_recent=0), QFilters(protect_recent=0), SnapKV(window=7, kernel=5, pool="avg")
MEAN = CUR(n_sinks=2, block=10, leverage="mean")
FEW = ExpectedAttention(n_sinks=3, n_future=3, covariance=False, epsilon=0.02)

# Export, press -> the method and further options of its cache; kvpress.npz holds two models, by their attention.
PRESSES: dict[tuple[str, str], tuple[Method, dict[str, Any]]] = {
    ("kvpress/eager", "streaming_llm"): (StreamingLLM(), {}),
    ("kvpress/eager", "knorm"): (KNorm(), {}),
    ("kvpress/eager", "snapkv"): (AVG, {}),
    ("kvpress/eager", "tova"): (TOVA(protect_recent=1), {}),
    ("kvpress/eager", "keydiff"): (KEYDIFF, {}),
    ("kvpress/eager", "lagkv"): (LagKV(n_sinks=1, lag=16), {}),
    ("kvpress/eager", "cur"): (CUR(n_sinks=4, block=14), {}),
    ("kvpress/eager", "expected_attention"): (ExpectedAttention(n_future=31), {}),
    ("kvpress/eager", "qfilters"): (QFILTERS, {}),
    ("kvpress/sdpa", "streaming_llm"): (StreamingLLM(n_sinks=3), {}),
    ("kvpress/sdpa", "knorm"): (KNorm(), {}),
    ("kvpress/sdpa", "snapkv"): (SnapKV(window=13, kernel=7, pool="avg"), {}),
    ("kvpress/sdpa", "tova"): (TOVA(protect_recent=1), {}),
    ("kvpress/sdpa", "keydiff"): (KEYDIFF, {}),
    ("kvpress/sdpa", "lagkv"): (LagKV(n_sinks=3, lag=16), {}),
    ("kvpress/sdpa", "cur"): (MEAN, {}),
    ("kvpress/sdpa", "expected_attention"): (FEW, {}),
    ("kvpress/sdpa", "qfilters"): (QFILTERS, {}),
    ("adakv", "knorm"): (KNorm(), {}),
    ("adakv", "snapkv"): (AVG, {}),
    ("adakv", "expected_attention"): (FEW, {}),
    ("adakv", "cur"): (CUR(n_sinks=4, block=14), {}),
    ("adakv", "cur_mean"): (MEAN, {}),
    ("adakv", "keydiff"): (KEYDIFF, {}),
    ("adakv", "qfilters"): (QFILTERS, {}),
    ("adakv", "compactor"): (Compactor(chunk=17, sketch=6, blending=0.35), {}),
    ("dms", "knorm"): (KNorm(), {}),
    ("dms", "keydiff"): (KEYDIFF, {}),
    ("dms", "cur"): (CUR(n_sinks=4, block=14), {}),
    ("wrappers", "pyramidkv"): (PyramidKV(window=7, kernel=5, pool="avg", form="kvpress"), {}),
    ("wrappers", "knorm_chunks"): (KNorm(), {"select": CHUNKS}),
    ("wrappers", "keydiff_chunks"): (KEYDIFF, {"select": CHUNKS}),
    ("wrappers", "cur_chunks"): (CUR(n_sinks=0), {"select": CHUNKS}),
    ("wrappers", "snapkv_critical"): (AVG, {"select": CRITICAL}),
    ("wrappers", "expected_attention_critical"): (
        ExpectedAttention(n_future=31, weight="none"), {"select": CRITICAL},
    ),
    ("wrappers", "compactor"): (Compactor(chunk=32, sketch=6), {}),
}  # fmt: skip
# One parameter off, and sets differ.
NEAR_MISSES: list[tuple[str, str, Method, dict[str, Any]]] = [
    ("kvpress/eager", "streaming_llm", StreamingLLM(n_sinks=5), {}),
    ("kvpress/eager", "knorm", TOVA(protect_recent=1), {}),
    ("kvpress/eager", "snapkv", SnapKV(window=7, kernel=5, pool="max"), {}),
    ("kvpress/eager", "snapkv", SnapKV(window=7, kernel=3, pool="avg"), {}),
    ("kvpress/eager", "snapkv", SnapKV(window=8, kernel=5, pool="avg"), {}),
    ("kvpress/eager", "tova", TOVA(), {}),
    ("kvpress/eager", "keydiff", KNorm(), {}),
    ("kvpress/eager", "lagkv", LagKV(n_sinks=1, lag=15), {}),
    ("kvpress/eager", "expected_attention", ExpectedAttention(n_future=31, covariance=False), {}),
    ("kvpress/eager", "expected_attention", ExpectedAttention(n_future=31, weight="none"), {}),
    ("kvpress/eager", "expected_attention", ExpectedAttention(n_future=512), {}),
    ("kvpress/eager", "cur", CUR(block=15), {}),
    ("kvpress/eager", "cur", CUR(block=14, leverage="mean"), {}),
    ("kvpress/eager", "keydiff", KeyDiff(protect_recent=1), {}),
    ("kvpress/eager", "qfilters", QFilters(protect_recent=2), {}),
    ("kvpress/eager", "qfilters", KNorm(), {}),
    ("adakv", "knorm", TOVA(protect_recent=1), {}),
    ("adakv", "knorm", KNorm(), {"slip": 0.8}),
    ("adakv", "cur", CUR(n_sinks=4, block=13), {}),
    ("wrappers", "pyramidkv", AVG, {}),
    ("wrappers", "pyramidkv", PyramidKV(window=7, kernel=5, pool="avg"), {}),
    ("wrappers", "knorm_chunks", KNorm(), {}),
    ("wrappers", "knorm_chunks", KNorm(), {"select": SlotSelection(by="chunk", chunk=10)}),
    ("wrappers", "snapkv_critical", AVG, {}),
    ("wrappers", "expected_attention_critical", ExpectedAttention(n_future=31), {"select": CRITICAL}),
    ("wrappers", "compactor", Compactor(chunk=31, sketch=6), {}),
    ("wrappers", "compactor", Compactor(chunk=32, sketch=6, blending=0.0), {}),
    ("wrappers", "compactor", Compactor(chunk=32, sketch=6, n_recent=3), {}),
]


class Presses:
    """One export with its model; place: kvpress/CASE, or the name of a file with one model."""

    def __init__(self, place: str) -> None:
        self.place, (name, _, case) = place, place.partition("/")
        self.export, self.prefix = PeerExport(name), f"{case}/" if case else ""
        self.about = self.export.about["cases"][case] if case else self.export.about
        self.model = self.export.model(case or None)

    def __getitem__(self, key: str) -> Tensor:
        return self.export[f"{self.prefix}{key}"]

    def budgets(self, press: str, slip: float) -> Iterator[tuple[str, Budget]]:
        """What a press was asked for: the key of its kept positions, and kvexp's budget; slip: added to head floors."""
        about, length = self.export.about, self["ids"].shape[1]
        if self.place == "dms":
            for threshold in about["thresholds"][press]:
                yield f"{press}/{threshold}", Budget(threshold=threshold, threshold_recent=about["window"])
            return
        own = self.about["ratios"] if self.prefix else {}  # of presses that have other ratios
        for ratio in own.get(press, about["ratios"]):
            tokens = int(length * (1 - ratio))
            if self.place == "adakv":
                for floor in about["floors"]:
                    shared = Budget(tokens=tokens, counts_self=False, heads="adaptive", head_floor=floor + slip)
                    yield f"{press}/{floor}/{ratio}", shared
                continue
            kept = self[f"{press}/{ratio}"].sum(-1)
            assert press == "pyramidkv" or len(kept.unique()) == 1
            yield f"{press}/{ratio}", Budget(tokens=int(kept.double().mean().round()), counts_self=False)

    @torch.inference_mode()
    def differences(self, press: str, method: Method, *, slip: float = 0.0, **how: Any) -> list[str]:
        """Prefill under `method` at every budget: where its sets are not those of the press."""
        bad = []
        if method.needs.calibration:
            directions = self["directions"]
            none = torch.zeros_like(directions), torch.zeros(*directions.shape[:3], 0)
            how = {"calibration": QueryCalibration.of(directions, *none), **how}
        for key, budget in self.budgets(press, slip):
            cache = EvictionCache(self.model, method, budget, positions="original", **how)
            self.model(self["ids"], past_key_values=cache)
            bad += other_sets(cache, self[key], key)
        return bad


presses_of = functools.cache(Presses)


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compactor's Gaussian matrix is the one that the press had, not one drawn from the run's seed."""
    place = request.node.callspec.params.get("place") if hasattr(request.node, "callspec") else None
    if place in ("adakv", "wrappers"):
        draws = presses_of(place)["draws"]
        monkeypatch.setattr(compactor, "sketch_matrix", lambda seeds, layer, *_: draws[layer])


@pytest.mark.parametrize("place", ["kvpress/eager", "kvpress/sdpa", "wrappers"])
def test_same_model(place: str) -> None:
    """Two versions of transformers, two attention functions, one model: else the sets would mean nothing."""
    presses = presses_of(place)
    ids, theirs = presses["ids"], presses["logits"]
    with torch.inference_mode():
        ours, exact = presses.model(ids).logits, copy.deepcopy(presses.model).double()(ids).logits
    errors = [(logits - exact).abs().max() for logits in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] < 5e-4, "both as near to float64, up to the order of sums"


@pytest.mark.parametrize("how", HOW, ids=lambda how: how["mode"])
@pytest.mark.parametrize(("place", "press"), PRESSES)
def test_same_sets(place: str, press: str, how: dict[str, Any]) -> None:
    method, plan = PRESSES[place, press]
    assert presses_of(place).differences(press, method, **plan, **how) == []


def test_every_press_is_compared() -> None:
    for place in ("kvpress/eager", "kvpress/sdpa", "adakv", "dms", "wrappers"):
        presses, mine = presses_of(place), {press for where, press in PRESSES if where == place}
        named = presses.about.get("presses") or presses.about.get("thresholds")
        assert named is None or set(named) == mine, place


def test_heads_hold_different_numbers() -> None:
    """Else the sets would be those of uniform budgets."""
    for place, press in PRESSES:
        if place in ("adakv", "dms"):
            kept = [presses_of(place)[key].sum(-1) for key, _ in presses_of(place).budgets(press, 0.0)]
            assert max(len(np.unique(one)) for one in kept) > 3, (place, press)


@pytest.mark.parametrize(("place", "press", "other", "changes"), NEAR_MISSES)
def test_a_near_miss_is_seen(place: str, press: str, other: Method, changes: dict[str, Any]) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    assert presses_of(place).differences(press, other, **changes)
