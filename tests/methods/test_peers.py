"""The sets kept after prefill against NVIDIA's kvpress 0.5.5, on the same weights (tests/fixtures/kvpress.md).

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
import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import composed
from recordings import Recording
from torch import Tensor

import kvexp.methods.compactor as compactor
from kvexp import generate as generation
from kvexp.core import Budget, EvictionContext, Method, QueryCalibration, SlotSelection
from kvexp.hf import EvictionCache, calibrate_heads
from kvexp.methods import (
    CUR,
    H2O,
    TOVA,
    Compactor,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    KVzip,
    KVzipPlus,
    LagKV,
    PyramidKV,
    QFilters,
    SnapKV,
    StreamingLLM,
)
from kvexp.run.settings import batch_cache, settings_of

part_of = functools.cache(functools.partial(Recording, "kvpress"))
model_of = functools.cache(lambda place: part_of(place).model())


def other_sets(cache: EvictionCache, want: Tensor, where: object) -> list[str]:
    """A line, which begins with `where`, for each head that keeps other positions than want [L, B, H, T] bool says."""
    bad = []
    for layer, rows in enumerate(want):
        kept = cache.kept_positions(layer)
        assert [len(per_head) for per_head in kept] == [want.shape[2]] * want.shape[1]
        for row, head in np.ndindex(*want.shape[1:3]):
            got, wanted = kept[row][head], rows[row, head].nonzero().flatten().tolist()
            if got != wanted:
                bad.append(f"{where} layer {layer} row {row} head {head}: {sorted(set(got) ^ set(wanted))}")
    return bad


# Each way to drop slots once, with each way to observe the prompt.
HOW: list[dict[str, Any]] = [{"mode": "overwrite"}, {"mode": "compact"}, {"mode": "mask", "observe": "naive"}]
HOW_ONCE = [pytest.param(how, id=how["mode"], marks=[pytest.mark.slow] * (i > 0)) for i, how in enumerate(HOW)]
CHUNKS, CRITICAL = SlotSelection(by="chunk", chunk=9), SlotSelection(values="critical")
KEYDIFF, QFILTERS, AVG = KeyDiff(protect_recent=0), QFilters(protect_recent=0), SnapKV(window=7, kernel=5, pool="avg")
MEAN = CUR(n_sinks=2, block=10, leverage="mean")
FEW = ExpectedAttention(n_sinks=3, n_future=3, covariance=False, epsilon=0.02)

# Export, press -> the method and further options of its cache; kvpress.npz holds two models, by their attention.
PRESSES: dict[tuple[str, str], tuple[Method, dict[str, Any]]] = {
    ("eager", "streaming_llm"): (StreamingLLM(), {}),
    ("eager", "knorm"): (KNorm(), {}),
    ("eager", "snapkv"): (AVG, {}),
    ("eager", "tova"): (TOVA(protect_recent=1), {}),
    ("eager", "keydiff"): (KEYDIFF, {}),
    ("eager", "lagkv"): (LagKV(n_sinks=1, lag=16), {}),
    ("eager", "cur"): (CUR(n_sinks=4, block=14), {}),
    ("eager", "expected_attention"): (ExpectedAttention(n_future=31), {}),
    ("eager", "qfilters"): (QFILTERS, {}),
    ("sdpa", "streaming_llm"): (StreamingLLM(n_sinks=3), {}),
    ("sdpa", "knorm"): (KNorm(), {}),
    ("sdpa", "snapkv"): (SnapKV(window=13, kernel=7, pool="avg"), {}),
    ("sdpa", "tova"): (TOVA(protect_recent=1), {}),
    ("sdpa", "keydiff"): (KEYDIFF, {}),
    ("sdpa", "lagkv"): (LagKV(n_sinks=3, lag=16), {}),
    ("sdpa", "cur"): (MEAN, {}),
    ("sdpa", "expected_attention"): (FEW, {}),
    ("sdpa", "qfilters"): (QFILTERS, {}),
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
# Another method, or one parameter off, and sets differ: the comparison is sharp.
NEAR_MISSES: list[tuple[str, str, Method, dict[str, Any]]] = [
    ("eager", "streaming_llm", StreamingLLM(n_sinks=5), {}),
    ("eager", "knorm", TOVA(protect_recent=1), {}),
    ("eager", "snapkv", SnapKV(window=7, kernel=5, pool="max"), {}),
    ("eager", "tova", TOVA(), {}),
    ("eager", "keydiff", KNorm(), {}),
    ("eager", "lagkv", LagKV(n_sinks=1, lag=15), {}),
    ("eager", "expected_attention", ExpectedAttention(n_future=31, covariance=False), {}),
    ("eager", "cur", CUR(block=14, leverage="mean"), {}),
    ("eager", "qfilters", QFilters(protect_recent=2), {}),
    ("adakv", "knorm", KNorm(), {"slip": 0.8}),
    ("wrappers", "pyramidkv", PyramidKV(window=7, kernel=5, pool="avg"), {}),
    ("wrappers", "knorm_chunks", KNorm(), {"select": SlotSelection(by="chunk", chunk=10)}),
    ("wrappers", "snapkv_critical", AVG, {}),
    ("wrappers", "expected_attention_critical", ExpectedAttention(n_future=31), {"select": CRITICAL}),
    ("wrappers", "compactor", Compactor(chunk=32, sketch=6, blending=0.0), {}),
]


class Presses:
    """One recording of kept sets, with its model."""

    def __init__(self, place: str) -> None:
        self.place, self.recording, self.model = place, part_of(place), model_of(place)
        self.about = self.recording.config

    def __getitem__(self, key: str) -> Tensor:
        return self.recording.tensor(key)

    def budgets(self, press: str, slip: float) -> Iterator[tuple[str, Budget]]:
        """What a press was asked for: the key of its kept positions, and kvexp's budget; slip: added to head floors."""
        about, length = self.about, self["ids"].shape[1]
        if self.place == "dms":
            for threshold in about["thresholds"][press]:
                yield f"{press}/{threshold}", Budget(threshold=threshold, threshold_recent=about["window"])
            return
        for ratio in about.get("own_ratios", {}).get(press, about["ratios"]):
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


@pytest.mark.parametrize("place", ["eager", "sdpa", "wrappers"])
def test_same_model(place: str) -> None:
    """Two versions of transformers, two attention functions, one model: else the sets would mean nothing."""
    presses = presses_of(place)
    ids, theirs = presses["ids"], presses["logits"]
    with torch.inference_mode():
        ours, exact = presses.model(ids).logits, copy.deepcopy(presses.model).double()(ids).logits
    errors = [(logits - exact).abs().max() for logits in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] < 5e-4, "both as near to float64, up to the order of sums"


@pytest.mark.parametrize("how", HOW_ONCE)
@pytest.mark.parametrize(("place", "press"), PRESSES)
def test_same_sets(place: str, press: str, how: dict[str, Any]) -> None:
    method, plan = PRESSES[place, press]
    assert presses_of(place).differences(press, method, **plan, **how) == []


def test_every_press_is_compared() -> None:
    for place in ("eager", "sdpa", "adakv", "dms", "wrappers"):
        presses, mine = presses_of(place), {press for where, press in PRESSES if where == place}
        named = presses.about.get("presses") or presses.about.get("thresholds")
        assert set(named) == mine, place


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


# Scores of heads and kept sets against NVIDIA's DuoAttentionPress with on-the-fly scoring.
#
# DuoAttentionPress(head_compression_ratio) is the share of heads that stream; Budget(heads="duo") has as many retrieval
# heads as the budget has room for, so the test takes the budget that leaves as many.


def test_duo_has_the_same_scores() -> None:
    duo, model = part_of("duo"), model_of("duo")
    made = calibrate_heads(model, duo["texts"].tolist())
    torch.testing.assert_close(made.scores, duo.tensor("scores"), rtol=1e-4, atol=1e-6)
    assert made.scores.flatten().argsort().tolist() == duo["scores"].flatten().argsort().tolist()
    other = calibrate_heads(model, duo["texts"][:2].tolist())
    assert not torch.allclose(other.scores, made.scores, rtol=1e-4, atol=1e-6), "the comparison is sharp"


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("method", [H2O(), KNorm()], ids=repr)
@torch.inference_mode()
def test_duo_keeps_the_same_sets(method: Any, mode: Any) -> None:
    """Whatever the method: it has no say at the end of the prompt."""
    duo, model = part_of("duo"), model_of("duo")
    about, scores = duo.config, calibrate_heads(model, duo["texts"].tolist())
    sinks, recent = about["stream"]
    for ratio in about["ratios"]:
        want = duo.tensor(str(ratio))  # [L, B, H, T] bool
        heads, length = scores.scores.numel(), want.shape[-1]
        full = int((want.sum(-1) == length)[:, 0].sum())
        assert full == heads - round(heads * ratio)
        slots = sinks + recent + -(-full * (length - sinks - recent) // heads)
        budget = Budget(tokens=slots, counts_self=False, heads="duo", stream_sinks=sinks, stream_recent=recent)
        cache = EvictionCache(model, method, budget, head_scores=scores, mode=mode, max_new_tokens=0)
        model(duo.tensor("ids"), past_key_values=cache)
        assert other_sets(cache, want, ratio) == []


# KVzip and KVzip+ against NVIDIA's KVzipPress, on the same weights.
#
# kvpress 0.5.5                                  kvexp
# KVzipPress(n_sink, chunk_size)                 KVzip(n_sinks, chunk): a template's prefix as long as the sinks
# KVzipPress(kvzip_plus_normalization=True)      KVzipPlus
# one cut for all layers, or one for each        each kv head keeps as many: the press's scores, cut like that here


KVZIP_CASES = ("whole", "chunks", "plus_whole", "plus_chunks")
KVZIP_MISSES: list[tuple[str, str, dict[str, Any]]] = [
    ("whole", "kvzip", {"instruct": False}),
    ("whole", "kvzip_plus", {}),
    ("chunks", "kvzip", {"end_turn": False}),
    ("plus_chunks", "kvzip_plus", {"chunk": 41}),
]
KVZIPS: dict[str, type[KVzip]] = {"kvzip": KVzip, "kvzip_plus": KVzipPlus}


class Letters:
    """The script's tokenizer: one token per character, modulo the vocabulary."""

    def __init__(self, vocabulary: int, template: bool) -> None:
        self.vocabulary, self.chat_template = vocabulary, "[u]{}[]" if template else None

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % self.vocabulary for letter in text])

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return str(self.chat_template).format(turns[0]["content"])


class KVzipCase:
    """One recorded case of KVzipPress: its scores [L, B, H, T], and kvexp on the same model and prompt."""

    def __init__(self, case: str) -> None:
        self.recording, self.model = part_of(f"kvzip_{case}"), model_of(f"kvzip_{case}")
        self.about, self.scores = self.recording.config, self.recording.tensor("scores")

    def method(self, **changes: Any) -> KVzip:
        """kvexp's method for the press, from the press's own parameters."""
        press = self.about["press"]
        cls = KVzipPlus if press.get("kvzip_plus_normalization") else KVzip
        return cls(n_sinks=press["n_sink"], chunk=press.get("chunk_size", 2048), **changes)

    @torch.inference_mode()
    def cache(self, method: KVzip, kept: int, heads: Any = "uniform") -> EvictionCache:
        """The prompt, prefilled and cut to `kept` slots."""
        tokenizer = Letters(self.about["config"]["vocab_size"], self.about["template"])
        budget = Budget(tokens=kept, counts_self=False, heads=heads)
        cache = EvictionCache(self.model, method, budget, tokenizer=tokenizer)
        self.model(self.recording.tensor("ids"), past_key_values=cache)
        return cache

    def differences(self, method: KVzip) -> list[str]:
        """At every ratio: where kept sets are not the best of the press's scores."""
        bad = []
        for ratio in self.about["ratios"]:
            kept = int(self.scores.shape[-1] * (1 - ratio))
            cache, want = self.cache(method, kept), self.scores.topk(kept).indices.sort().values
            for layer, row, head in np.ndindex(*self.scores.shape[:3]):
                got = cache.kept_positions(layer)[row][head]
                if got != want[layer, row, head].tolist():
                    bad.append(f"ratio {ratio} layer {layer} row {row} head {head}")
        return bad


kvzip_of = functools.cache(KVzipCase)


@pytest.mark.parametrize("case", KVZIP_CASES)
def test_kvzip_keeps_the_same_sets(case: str) -> None:
    assert kvzip_of(case).differences(kvzip_of(case).method()) == []


@pytest.mark.parametrize("case", KVZIP_CASES)
def test_kvzip_keeps_the_best_of_all_layers(case: str) -> None:
    """KVzip's own budget, `budget.heads=global`: the best of all layers' heads together, sinks first."""
    kvzip, compared = kvzip_of(case), 0
    method, scores = kvzip.method(), kvzip.scores
    for ratio in kvzip.about["ratios"]:
        kept = int(scores.shape[-1] * (1 - ratio))
        cache = kvzip.cache(method, kept, heads="global")
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


@pytest.mark.parametrize("case", KVZIP_CASES)
def test_kvzip_has_the_same_scores(case: str) -> None:
    kvzip, notes = kvzip_of(case), []
    method = kvzip.method()

    class Noting(type(method)):  # type: ignore[misc]
        def priority(self, ctx: EvictionContext) -> Tensor:
            notes.append(super().priority(ctx))
            return notes[-1]

    noting = Noting(**dataclasses.asdict(method))
    kvzip.cache(noting, max(method.n_sinks, 5))
    scores = kvzip.scores[..., method.n_sinks :]
    torch.testing.assert_close(torch.stack(notes)[..., method.n_sinks :], scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("case", "name", "changes"), KVZIP_MISSES)
def test_a_near_miss_of_kvzip_is_seen(case: str, name: str, changes: dict[str, Any]) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    own = dataclasses.asdict(kvzip_of(case).method()) | changes
    assert kvzip_of(case).differences(KVZIPS[name](**own))


# kvpress's own evaluation and protocol=kvpress give the same answers.


ANSWERED = {
    "knorm": ("method=knorm",),
    "streaming_llm": ("method=streaming_llm", "method.n_sinks=4", "cache.positions=original"),
    "snapkv": ("method=snapkv", "method.window=7", "method.kernel=5", "method.pool=avg"),
    "expected_attention": ("method=expected_attention", "method.n_future=31"),
}


def theirs(method: str, ratio: float) -> list[object]:
    answered: list[object] = part_of("answers")[f"{method}/{ratio}"].tolist()
    return answered


def answers(method: str, ratio: float, *changes: str) -> list[object]:
    """Answers of kvexp to all questions, of copies of each context's cache; -1 behind an end."""
    export, model = part_of("answers"), model_of("answers")
    model.generation_config.eos_token_id = end = export.config["config"]["eos_token_id"]
    words = ("protocol=kvpress", "model=tiny", "task=news_qa", *ANSWERED[method], f"kv_ratio={1 - ratio}", *changes)
    settings = settings_of(*composed(*words))
    assert settings.task.question == "after_eviction"
    made = np.full(np.shape(theirs(method, ratio)), -1)
    for c, words_of in enumerate(export["contexts"].tolist()):
        ids = [0, *words_of]  # the pipeline puts the start token in front
        cache = batch_cache(settings, [len(ids)])
        context = generation.prefill(model, [ids], cache, max_new_tokens=made.shape[2], seeds=[0])
        for q, asked in enumerate(export["questions"].tolist()):
            result = generation.generate_from_contexts(
                model, [context.fork([0])], [asked], max_new_tokens=made.shape[2]
            )[0]
            words = [token for token in result.tokens[0] if token != end]  # kvpress's text leaves it out
            made[c, q, : len(words)] = words
    found: list[object] = made.tolist()
    return found


@pytest.mark.parametrize("ratio", [0.5, *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in (0.25, 0.875))])
@pytest.mark.parametrize("method", ANSWERED)
def test_the_same_answers(method: str, ratio: float) -> None:
    assert answers(method, ratio) == theirs(method, ratio)


def test_the_protocol_is_what_makes_them_the_same() -> None:
    """Half of a cache that goes on evicting while question and answer come gives others, and so does another press."""
    assert answers("knorm", 0.5, "cache.evict_every=1") != theirs("knorm", 0.5)
    assert answers("knorm", 0.5) != theirs("snapkv", 0.5)
    assert len({str(theirs(name, 0.0)) for name in ANSWERED}) == 1, "nothing is dropped at 0"
    assert theirs("knorm", 0.0) != theirs("knorm", 0.5)
