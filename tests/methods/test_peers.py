"""The sets kept after prefill against NVIDIA's kvpress 0.5.5, on the same weights (tests/peers/export_kvpress.py).

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
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_export import PeerExport, other_sets

from kvexp.core import Budget, Method, QueryCalibration
from kvexp.hf import EvictionCache
from kvexp.methods import CUR, TOVA, ExpectedAttention, KeyDiff, KNorm, LagKV, QFilters, SnapKV, StreamingLLM

pytestmark = pytest.mark.peers

CASES = ("eager", "sdpa")
METHODS = ("streaming_llm", "knorm", "snapkv", "tova", "keydiff", "lagkv", "cur", "expected_attention", "qfilters")
# Each way to drop slots once, with each way to observe the prompt.
HOW: list[dict[str, Any]] = [
    {"mode": "overwrite"},
    {"mode": "compact", "block": 5},
    {"mode": "mask", "observe": "naive"},
]


class Export(PeerExport):
    """kvpress.npz, and its models with kvexp installed."""

    def __init__(self) -> None:
        super().__init__("kvpress")
        self.models = {case: self.model(case) for case in CASES}

    def method(self, case: str, name: str) -> Method:
        """kvexp's method for a press, from the press's own parameters."""
        options = self.about["cases"][case]["presses"][name]
        if name == "streaming_llm":
            return StreamingLLM(n_sinks=options.get("n_sink", 4))
        if name == "snapkv":
            return SnapKV(window=options["window_size"], kernel=options["kernel_size"], pool="avg")
        if name == "lagkv":
            return LagKV(n_sinks=options["n_sink"], lag=options["lag_size"])
        if name == "expected_attention":
            return ExpectedAttention(
                n_sinks=options.get("n_sink", 4),
                n_future=options.get("n_future_positions", 512),
                covariance=options.get("use_covariance", True),
                epsilon=options.get("epsilon", 0.0),
            )
        if name == "cur":
            leverage = "mean" if options.get("leverage_type") == "kv_avg" else "product"
            return CUR(n_sinks=options["num_sinks"], block=options["local_window_size"], leverage=leverage)
        plain = (KNorm(), TOVA(protect_recent=1), KeyDiff(protect_recent=0), QFilters(protect_recent=0))
        return {method.name: method for method in plain}[name]

    def calibration(self, case: str) -> QueryCalibration:
        directions = self[f"{case}/directions"]
        return QueryCalibration.of(directions, torch.zeros_like(directions), torch.zeros(*directions.shape[:3], 0))

    @torch.inference_mode()
    def differences(self, case: str, name: str, method: Method, **how: Any) -> list[str]:
        """Prefill under `method` at every ratio: where its sets are not those of the press called `name`."""
        bad, model = [], self.models[case]
        if method.needs.calibration:
            how = {"calibration": self.calibration(case), **how}
        for ratio in self.about["cases"][case]["ratios"].get(name, self.about["ratios"]):
            want = self[f"{case}/{name}/{ratio}"]  # [L, B, H, T] bool
            sizes = want.sum(-1).unique().tolist()
            assert len(sizes) == 1
            budget = Budget(tokens=sizes[0], counts_self=False)
            cache = EvictionCache(model, method, budget, positions="original", **how)
            model(self[f"{case}/ids"], past_key_values=cache)
            bad += other_sets(cache, want, f"ratio {ratio}")
        return bad


@pytest.fixture(scope="module")
def export() -> Export:
    return Export()


@pytest.mark.parametrize("case", CASES)
def test_same_model(export: Export, case: str) -> None:
    """Two versions of transformers, two attention functions, one model: else the sets would mean nothing."""
    with torch.inference_mode():
        logits = export.models[case](export[f"{case}/ids"]).logits
    torch.testing.assert_close(logits, export[f"{case}/logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", HOW, ids=lambda how: how["mode"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_same_sets(export: Export, case: str, name: str, how: dict[str, Any]) -> None:
    assert export.differences(case, name, export.method(case, name), **how) == []


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("streaming_llm", StreamingLLM(n_sinks=5)),
        ("knorm", TOVA(protect_recent=1)),
        ("snapkv", SnapKV(window=7, kernel=5, pool="max")),
        ("snapkv", SnapKV(window=7, kernel=3, pool="avg")),
        ("snapkv", SnapKV(window=8, kernel=5, pool="avg")),
        ("tova", TOVA()),
        ("keydiff", KNorm()),
        ("lagkv", LagKV(n_sinks=1, lag=15)),
        ("expected_attention", ExpectedAttention(n_future=31, covariance=False)),
        ("expected_attention", ExpectedAttention(n_future=31, weight="none")),
        ("expected_attention", ExpectedAttention(n_future=512)),
        ("cur", CUR(block=15)),
        ("cur", CUR(block=14, leverage="mean")),
        ("keydiff", KeyDiff(protect_recent=1)),
        ("qfilters", QFilters(protect_recent=2)),
        ("qfilters", KNorm()),
    ],
)
def test_a_near_miss_is_seen(export: Export, name: str, other: Method) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    assert export.differences("eager", name, other)
