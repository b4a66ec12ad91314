"""Methods that rewrite what they keep, against stock models whose cache was rewritten by hand, and authors' code.

The stock model reads the prompt; a head's slots are chosen and rewritten in plain Python from its attention weights,
keys and values; then it goes on over those slots, with biases added to its mask.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from recordings import Recording
from tiny import LAYERS, Streams, distinct, feed, run_core, stock, tiny
from torch import Tensor
from transformers import DynamicCache

from kvexp.core import Budget, CacheConfig, Cadence, Method, Quantization
from kvexp.core.budget import BytesBudget
from kvexp.core.fitting import least_squares, matching_pursuit
from kvexp.core.slots import Slots
from kvexp.generate import failed_fits, pad_left
from kvexp.hf import EvictionCache
from kvexp.methods import D2O, AttentionMatching, CaM
from kvexp.util.errors import ConfigError

LENGTHS, NEW, BUDGET = (23, 17, 19), 5, 10
SINKS, WINDOW, QUERIES = 1, 3, 11
KV_HEADS, GROUP = 3, 5
SEQUENCES = distinct(29, len(LENGTHS), max(LENGTHS) + NEW)
PROMPTS = [SEQUENCES[row, NEW : NEW + n].tolist() for row, n in enumerate(LENGTHS)]
CONTINUATION = SEQUENCES[:, :NEW]
MATCHING: dict[str, Any] = {"n_sinks": SINKS, "window": WINDOW, "queries": QUERIES, "reference": "prompt"}

# A head's slots: attention [query heads, N, N], keys [N, D], values [N, D] -> kept positions, biases, keys, values.
Head = tuple[list[int], np.ndarray, np.ndarray, np.ndarray]


def chosen(value: Any, count: int, recent: int, sinks: int) -> list[int]:
    """`BUDGET` positions less the coming token: sinks, newest, and those of the largest value."""
    must = {*range(sinks), *range(count - recent, count)}
    rest = sorted((p for p in range(count) if p not in must), key=lambda p: (value[p], p), reverse=True)
    return sorted([*must, *rest[: BUDGET - 1 - len(must)]])


def bounded(a: np.ndarray, b: np.ndarray, low: float, high: float, steps: int) -> np.ndarray:
    w = np.clip(np.linalg.lstsq(a, b, rcond=None)[0], low, high)
    u = np.ones(len(w))
    for _ in range(3):
        u = a.T @ (a @ u)
        u /= np.linalg.norm(u)
    for _ in range(steps):
        w = np.clip(w - a.T @ (a @ w - b) / np.sum((a @ u) ** 2), low, high)
    return w


def pursued(e: np.ndarray, slots: list[int], count: int) -> list[int]:
    """The slots that the simple form of the authors' pursuit takes."""
    taken: list[int] = []
    current = np.zeros(len(e))
    target = e[:, slots].sum(1)
    for _ in range(count):
        gains = {p: e[:, p] @ (target - current) for p in slots if p not in taken}
        taken.append(max(gains, key=gains.__getitem__))
        w = np.linalg.lstsq(e[:, taken], target, rcond=None)[0]
        current = e[:, taken] @ np.clip(w, 1e-12, math.exp(7))
    return taken


def matched(method: AttentionMatching, attention: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Head:
    count = len(keys)
    open_slots = list(range(SINKS, count - WINDOW + 1))  # the budget counts the coming token as one of the window
    queries: Any = slice(-QUERIES, None)
    if method.reference == "repeat":
        fed = range(attention.shape[1] - count)
        queries = [count + p for p in fed if (p + 1) * QUERIES // count > p * QUERIES // count]
    rows = [row[:count] for head in attention[:, queries] for row in head]
    e = np.zeros((len(rows), count))
    for q, row in enumerate(rows):
        e[q, open_slots] = row[open_slots] / max(row[open_slots])
    total = e.sum(1)
    if method.choose == "rms":
        kept = chosen(np.sqrt(((e / total[:, None]) ** 2).mean(0)), count, WINDOW - 1, SINKS)
    else:
        frame = [p for p in range(count) if p not in open_slots]
        kept = sorted([*frame, *pursued(e, open_slots, BUDGET - 1 - len(frame))])
    fitted = [p for p in kept if p in open_slots]
    part, weights = e[:, fitted], np.ones(len(fitted))
    if method.bias == "fitted":
        bounds = (math.exp(-3), math.exp(3), 2) if method.choose == "rms" else (1e-12, math.exp(7), 0)
        weights = bounded(part, total, *bounds)
    elif method.bias == "mass":
        weights /= (part.sum(1) / total).mean()
    new = values.copy()
    if method.values == "fitted":
        share = part * weights / (part * weights).sum(1, keepdims=True)
        new[fitted] = np.linalg.lstsq(share, (e / total[:, None]) @ values, rcond=None)[0]
    bias = np.zeros(count)
    bias[fitted] = np.log(weights)
    return kept, bias[kept], keys[kept], new[kept]


def merged_d2o(method: D2O, attention: np.ndarray, keys: np.ndarray, values: np.ndarray, layer: list[Any]) -> Head:
    """layer: attention, keys and values of all kv heads, whose dropped tokens share a threshold."""

    def likest(attention: np.ndarray, keys: np.ndarray) -> tuple[list[int], dict[int, tuple[float, int]]]:
        kept = chosen(attention.sum((0, 1)), len(keys), int(BUDGET * 0.25) - 1, 1)
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        return kept, {i: max((float(unit[i] @ unit[j]), j) for j in kept) for i in range(len(keys)) if i not in kept}

    all_heads = [likest(a, k)[1] for a, k, _ in layer]
    threshold = np.mean([u for head in all_heads for u, _ in head.values()])
    kept, likeness = likest(attention, keys)
    new = []
    for states in (keys, values):
        rewritten = states.copy()
        for j in kept:
            given = [(u, i) for i, (u, into) in likeness.items() if into == j and u >= threshold]
            if method.weights == "softmax":
                parts = [(math.e, states[j]), *((math.exp(u), states[i]) for u, i in given)]
                rewritten[j] = sum(w * x for w, x in parts) / sum(w for w, _ in parts)
            else:
                rewritten[j] = (states[j] + sum((u * states[i] for u, i in given), 0)) / (1 + len(given))
        new.append(rewritten[kept])
    return kept, np.zeros(len(kept)), new[0], new[1]


def merged_cam(method: CaM, attention: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Head:
    score = attention.sum((0, 1))
    kept = chosen(score, len(keys), BUDGET // 2 - 1, 1)
    new = values.copy()
    for i in range(len(keys)):
        following = range(i + 1, min(i + 1 + method.share, len(keys)))
        if i not in kept and score[i] > np.mean(score[following]):
            new[following] += new[i] / method.share
    return kept, np.zeros(len(kept)), keys[kept], new[kept]


@torch.inference_mode()
def by_hand(method: Method, row: int) -> list[Tensor]:
    """Logits [V] of the prompt's last token and of each following one, of the stock model with a rewritten cache."""
    model, cache = stock("llama"), DynamicCache()
    read = model(torch.tensor([PROMPTS[row]]), past_key_values=cache, use_cache=True, output_attentions=True)
    twice = model(torch.tensor([PROMPTS[row] * 2]), output_attentions=True)
    repeats = isinstance(method, AttentionMatching) and method.reference == "repeat"
    logits, biases, count = [read.logits[0, -1]], [], len(PROMPTS[row])
    for layer in range(LAYERS):
        attention = (twice if repeats else read).attentions[layer][0].double().unflatten(0, (KV_HEADS, GROUP)).numpy()
        stored = cache.layers[layer]
        heads = [
            (attention[h], stored.keys[0, h].double().numpy(), stored.values[0, h].double().numpy())
            for h in range(KV_HEADS)
        ]
        if isinstance(method, AttentionMatching):
            slots = [matched(method, *head) for head in heads]
        elif isinstance(method, D2O):
            slots = [merged_d2o(method, *head, heads) for head in heads]
        else:
            assert isinstance(method, CaM)
            slots = [merged_cam(method, *head) for head in heads]
        stored.keys = torch.tensor(np.stack([keys for _, _, keys, _ in slots]))[None].float()
        stored.values = torch.tensor(np.stack([values for *_, values in slots]))[None].float()
        biases.append(torch.tensor(np.stack([bias for _, bias, _, _ in slots])).repeat_interleave(GROUP, 0).float())
    modules = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    for step, token in enumerate(CONTINUATION[row]):
        hooks = []
        for module, bias in zip(modules, biases, strict=True):

            def biased(_: Any, args: Any, kwargs: Any, bias: Tensor = bias, step: int = step) -> Any:
                mask = torch.cat([bias, torch.zeros(len(bias), step + 1)], dim=-1)[None, :, None]
                return args, kwargs | {"attention_mask": mask}

            hooks.append(module.register_forward_pre_hook(biased, with_kwargs=True))
        place = torch.tensor([[count + step]])
        out = model(token.view(1, 1), past_key_values=cache, use_cache=True, position_ids=place)
        logits.append(out.logits[0, -1])
        for hook in hooks:
            hook.remove()
    return logits


METHODS = {
    "matching": AttentionMatching(**MATCHING),
    "matching_omp": AttentionMatching(choose="omp", **MATCHING),
    "matching_mass": AttentionMatching(bias="mass", values="kept", **MATCHING),
    "matching_bias": AttentionMatching(values="kept", **MATCHING),
    "matching_values": AttentionMatching(bias="none", **MATCHING),
    "matching_repeat": AttentionMatching(**(MATCHING | {"reference": "repeat", "instruct": False})),
    "matching_plain": AttentionMatching(bias="none", values="kept", **MATCHING),
    "d2o": D2O(n_sinks=1),
    "d2o_mean": D2O(n_sinks=1, weights="mean"),
    "cam": CaM(n_sinks=1, share=3, draw="above"),
}


def fed(method: Method, rows: list[int], **options: Any) -> Any:
    prompt, mask = pad_left([PROMPTS[row] for row in rows], 0, "cpu")
    chunk = options.pop("chunk", None)
    size = {"max_new_tokens": NEW, "prompt_tokens": prompt.shape[1]}
    cache = EvictionCache(tiny("llama"), method, Budget(tokens=BUDGET), **size, **options)
    return feed(cache, tiny("llama"), prompt, CONTINUATION[rows], mask=mask, chunk=chunk)


@pytest.mark.parametrize("name", METHODS)
def test_a_cache_rewritten_by_hand_gives_the_same_logits(name: str) -> None:
    for rows, chunk in (([1], None), ([0, 2, 1], 6)):
        out = fed(METHODS[name], rows, chunk=chunk)
        for place, row in enumerate(rows):
            for step, want in enumerate(by_hand(METHODS[name], row)):
                torch.testing.assert_close(out.logits[step][place], want, rtol=2e-4, atol=2e-4)


AUTHORS = Recording("authors_rewriting")  # the .md beside it says what of the authors' code was run, and how


@pytest.mark.parametrize("choose", AUTHORS.config["attention_matching"]["cases"])
def test_the_authors_fits(choose: str) -> None:
    held = {name: AUTHORS.tensor(f"attention_matching/{name}") for name in ("queries", "keys", "values")}
    queries, keys, values = (states.double() for states in held.values())
    x = queries @ keys.T / keys.shape[1] ** 0.5
    e = torch.exp(x - x.amax(-1, keepdim=True))[None]
    wanted = AUTHORS.tensor(f"attention_matching/{choose}_index")[None]
    method = AttentionMatching(choose=choose)  # type: ignore[arg-type]
    if choose == "omp":
        assert matching_pursuit(e, e.sum(-1), wanted.shape[1], math.exp(7)).tolist() == wanted.tolist()
    else:
        share = e / e.sum(-1, keepdim=True)
        assert set(share.square().mean(1)[0].topk(wanted.shape[1]).indices.tolist()) == set(wanted[0].tolist())
    bias, fitted, failed = method._fit(e, values[None], wanted)
    assert not failed.any()
    np.testing.assert_allclose(bias[0], AUTHORS[f"attention_matching/{choose}_bias"], atol=1e-5)
    np.testing.assert_allclose(fitted[0], AUTHORS[f"attention_matching/{choose}_values"], atol=2e-5)


def rewritten(method: Method, budget: int, rows: int = 1) -> Slots:
    """Slots of one layer after the authors' queries, keys and values [H, T, D], in rows that differ in their seeds."""
    streams = Streams(*(AUTHORS.tensor(f"{method.name}/{name}").expand(1, rows, -1, -1, -1) for name in "qkv"))
    config = CacheConfig(method, Budget(tokens=budget, counts_self=False))
    return run_core(config, streams, [streams.q.shape[3]], seeds=range(rows)).states[0].require_slots()


def test_the_slots_that_the_authors_d2o_merges() -> None:
    (case,) = AUTHORS.config["d2o"]["cases"]
    budget = case["hh_size"] + case["recent_size"]
    method = D2O(recent_ratio=case["recent_size"] / budget, weights="mean", threshold="rank")
    slots = rewritten(method, budget)
    assert torch.equal(slots.positions[0, :, :budget], AUTHORS.tensor("d2o/index").long())
    for got, name in ((slots.keys, "keys"), (slots.values, "values")):
        np.testing.assert_allclose(got[0, :, :budget], AUTHORS[f"d2o/{name}"], atol=1e-6)


def given_by_cam(number: int, rows: int = 1, **options: Any) -> tuple[Tensor, Tensor]:
    """Values [rows, H, kept, D] as they are after the case's only eviction, and as the authors' code leaves them."""
    case = AUTHORS.config["cam"]["cases"][number]
    budget = case["start"] + case["recent"]
    sizes = {"n_sinks": case["start"], "recent_ratio": case["recent"] / budget, "share": case["share"]}
    slots = rewritten(CaM(**sizes, **options), budget, rows)
    return slots.values[:, :, :budget], AUTHORS.tensor(f"cam/{number}/values")


@pytest.mark.parametrize("number", [0, 1])
def test_the_authors_cam_gives_the_same_value_as_often(number: int) -> None:
    """One token leaves: `probability` [H] that its value is given, and the values where it is, are theirs."""
    case, probability = AUTHORS.config["cam"]["cases"][number], AUTHORS.tensor(f"cam/{number}/probability")
    plain = AUTHORS.tensor("cam/v")
    plain = torch.cat([plain[:, : case["start"]], plain[:, case["start"] + 1 :]], dim=1)
    above, merged = given_by_cam(number, draw="above")
    torch.testing.assert_close(above[0], torch.where(probability[:, None, None] == 1, merged, plain), rtol=0, atol=1e-6)
    drawn, merged = given_by_cam(number, rows=400)
    gives = [(drawn - values).abs().amax((-1, -2)) < 1e-6 for values in (plain, merged)]
    assert bool((gives[0] ^ gives[1]).all())
    torch.testing.assert_close(gives[1].float().mean(0), probability, rtol=0, atol=4 * 0.5 / 400**0.5)


@pytest.mark.parametrize("block", [256, 7])
def test_the_authors_cam_gives_on_what_a_token_was_given(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 tokens leave one after the other, and all of them give."""
    monkeypatch.setattr("kvexp.methods.cam.BLOCK", block)
    monkeypatch.setattr(CaM, "_draws", lambda self, ctx: torch.zeros_like(ctx.score))
    given, theirs = given_by_cam(2)
    torch.testing.assert_close(given[0], theirs, rtol=0, atol=1e-6)


def test_equations_without_one_solution_leave_the_slots_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.rand(2, 9, 4, dtype=torch.float64)
    a[1, :, 3] = 2 * a[1, :, 0]
    x, failed = least_squares(a, torch.rand(2, 9, 3, dtype=torch.float64))
    assert failed.tolist() == [False, True] and bool(x.isfinite().all()) and not x[1].any()
    plain = fed(METHODS["matching_plain"], [0, 1])
    assert failed_fits(plain.cache) == [{}, {}]
    monkeypatch.setattr("kvexp.methods.attention_matching.least_squares", unsolved)
    out = fed(METHODS["matching"], [0, 1])
    assert failed_fits(out.cache) == [{"fits_failed": LAYERS * KV_HEADS}] * 2
    for got, want in zip(out.logits, plain.logits, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def unsolved(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(a), a.shape[-1], b.shape[-1], dtype=a.dtype), torch.ones(len(a), dtype=torch.bool)


def test_bytes_count_four_a_slot_and_head() -> None:
    whole = AttentionMatching(**MATCHING)
    plain = AttentionMatching(bias="none", **MATCHING)
    size = {"max_new_tokens": NEW, "prompt_tokens": LENGTHS[0]}
    caches = [EvictionCache(tiny("llama"), m, Budget(tokens=BUDGET), **size) for m in (whole, plain)]
    for cache in caches:
        feed(cache, tiny("llama"), torch.tensor([PROMPTS[0]]), CONTINUATION[:1])
    slots = [state.require_slots() for state in caches[0].layer_states]
    more = sum(4 * held.positions.numel() for held in slots)
    assert caches[0].memory_tracker.bytes - caches[1].memory_tracker.bytes == more > 0
    bits = BytesBudget(bytes_ratio=0.5, key_dim=14, value_dim=14)
    held = [CacheConfig(m, bits).budget for m in (whole, plain)]
    assert isinstance(held[0], BytesBudget) and isinstance(held[1], BytesBudget)
    assert held[0].slot_bytes.of(7) - held[1].slot_bytes.of(7) == 28


def test_rows_that_lose_nothing_stay_as_they_are() -> None:
    alone = fed(METHODS["matching"], [1])
    prompt, mask = pad_left([PROMPTS[1], PROMPTS[1][:6]], 0, "cpu")
    cache = EvictionCache(
        tiny("llama"), METHODS["matching"], Budget(tokens=BUDGET), max_new_tokens=NEW, prompt_tokens=prompt.shape[1]
    )
    both = feed(cache, tiny("llama"), prompt, CONTINUATION[[1, 1]], mask=mask)
    for one, two in zip(alone.logits, both.logits, strict=True):
        torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-5)
    bias = cache.layer_states[0].require_slots().bias
    assert bias is not None and bool(bias[0].any()) and not bias[1].any()


@pytest.mark.parametrize("name", ["matching", "d2o", "cam"])
@pytest.mark.parametrize("bits", [None, 8])
def test_several_tokens_at_once_and_few_bits(name: str, bits: Any) -> None:
    quantization = None if bits is None else Quantization(bits, bits, "token", "token", group=7, residual=0)
    prompt, size = torch.tensor([PROMPTS[0]]), {"max_new_tokens": NEW, "prompt_tokens": LENGTHS[0]}
    exact = fed(METHODS[name], [0])
    for width in (1, NEW):
        cache = EvictionCache(tiny("llama"), METHODS[name], Budget(tokens=BUDGET), quantization=quantization, **size)
        cache.allow_multi_token_steps()
        out = feed(cache, tiny("llama"), prompt, CONTINUATION[[0]], width=width)
        near = 1e-4 if bits is None else 0.6  # logits are of the order of 10
        torch.testing.assert_close(out.logits[-1], exact.logits[-1], rtol=near, atol=near)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "mask"}, "mode=overwrite"),
        ({"positions": "renumbered"}, "cache.positions=original"),
        ({"bounded_chunk": 4}, "whole prompt"),
        ({"budget": Budget(tokens=9, heads="global")}, "every kv head"),
        ({"cadence": Cadence(every=4)}, "end of prefill alone"),
    ],
)
@pytest.mark.parametrize("method", [AttentionMatching(), D2O(), CaM()], ids=lambda method: method.name)
def test_refused(method: Method, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CacheConfig(method, **{"budget": Budget(tokens=9)} | options)
