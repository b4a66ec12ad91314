"""Quantised slots against the plain path over tensors that were quantised by hand (`oracles_quantised`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from oracles_quantised import QuantisedHead, StoredHead, kivi_codes, restored
from test_step import scores
from tiny import Seen, Streams, later, prompts_of, run_core, scores_of, tiny

import kvexp.methods
from kvexp.core import (
    AttentionParams,
    Budget,
    CacheConfig,
    Cadence,
    EngineQuantization,
    EvictionLayer,
    Method,
    Quantization,
    SequenceState,
)
from kvexp.core.eviction import CacheState
from kvexp.core.quantized import Codec, QuantizedSlots, pack, unpack
from kvexp.generate import GenerationParams, divergence_from_full, generate, prefill, prefill_together
from kvexp.generate.loop import batched_cache
from kvexp.generate.prefill import decode_step
from kvexp.methods import (
    A2SF,
    CUR,
    H2O,
    TOVA,
    Full,
    KeyDiff,
    Keyformer,
    KNorm,
    KVzip,
    LagKV,
    SnapKV,
    StreamingLLM,
    Window,
)
from kvexp.retrieval import Quest
from kvexp.util.errors import ConfigError

HALF = Budget(kv_ratio=0.5)
DIM, VALUE_DIM = 8, 12  # groups of 4 divide both
KIVI = Quantization(4, 4, group=4, residual=5)
SETTINGS = [
    KIVI,
    Quantization(2, 2, group=4, residual=3),
    Quantization(8, 8, group=2, residual=0),
    Quantization(4, 2, "token", "token", group=4, residual=3),
    Quantization(2, 4, "channel", "channel", group=3, residual=2),
    Quantization(4, 4, group=4, residual=2, symmetric=True),
    Quantization(2, 8, "token", "channel", group=2, residual=1, symmetric=True),
    Quantization(4, 16, group=4, residual=3),
    Quantization(16, 4, group=4, residual=3),
]
IDS = [
    f"k{one.key_bits}v{one.value_bits}-{one.key_axis}-{one.value_axis}{'-symmetric' * one.symmetric}"
    for one in SETTINGS
]
METHODS: list[Method] = [
    *(Full(), H2O(), Keyformer(), A2SF(alpha=0.5), TOVA(), Window(), StreamingLLM(n_sinks=2), KNorm(), KeyDiff()),
    *(SnapKV(window=2, kernel=3), LagKV(n_sinks=1, lag=2), CUR(n_sinks=1, block=4)),
]


def head_of(how: Quantization | EngineQuantization, name: str) -> QuantisedHead:
    if isinstance(how, EngineQuantization):
        form = getattr(how, name).format

        def store(vector: list[float]) -> list[float]:
            return form.decode(form.encode(torch.tensor(vector)), len(vector)).tolist()

        return StoredHead(0, "token", 1, how.residual, store=store)
    bits, axis = (how.key_bits, how.key_axis) if name == "keys" else (how.value_bits, how.value_axis)
    return QuantisedHead(bits, axis, how.group, how.residual, how.symmetric)


def by_hand(
    config: CacheConfig,
    how: Quantization | EngineQuantization,
    streams: Streams,
    widths: Sequence[int],
    mask: Any,
    **given: Any,
) -> Seen:
    """`run_core` without quantisation, its slots overwritten after every forward by what the codes would stand for."""
    plain = dataclasses.replace(config, quantization=None)
    layers, batch, heads = streams.k.shape[:3]
    sequence = SequenceState(prompt_columns=given.get("prompt"), max_new_tokens=sum(widths), seeds=0)
    sequence.multi_token_steps_allowed = True
    common = CacheState(plain, layers, sequence)
    states = [EvictionLayer(plain, i, common) for i in range(layers)]
    for state in states:
        state.takes_step = False
    places = list(product(range(layers), range(batch), range(heads)))
    made = {(name, *place): head_of(how, name) for name in ("keys", "values") for place in places}
    seen, start = Seen([], [], [], states), 0
    params = AttentionParams(streams.q.shape[-1] ** -0.5)
    missing = [0] * batch if mask is None else (mask == 0).sum(1).tolist()
    for width in widths:
        part = slice(start, start + width)
        padding = None if mask is None else mask[:, : start + width]
        new = [tensor[:, :, :, part] for tensor in (streams.q, streams.k, streams.v)]
        form = how.keys.format if isinstance(how, EngineQuantization) and how.in_blocks and start else None
        if form is not None:
            new[0] = form.query.decode(form.query.encode(new[0]), new[0].shape[-1]).to(new[0].dtype)
        seen.out.append([state.forward(*(x[i] for x in new), params, padding) for i, state in enumerate(states)])
        seen.kept.append([state.kept_positions() for state in states])
        seen.score.append([scores_of(state) for state in states])
        for name, i, b, h in made:
            head, stream = made[name, i, b, h], streams.k if name == "keys" else streams.v
            for column in range(max(start, missing[b]), start + width):
                head.born(column - missing[b], stream[i, b, h, column].tolist())
            if start + width >= (given.get("prompt") or widths[0]):
                head.forward_ends(seen.kept[-1][i][b][h], start + width - 1 - missing[b])
            slots = states[i].require_slots()
            for slot, position in enumerate(slots.positions[b, h, : slots.length].tolist()):
                if position >= 0:
                    getattr(slots, name)[b, h, slot] = torch.tensor(head.read[position], dtype=stream.dtype)
        start += width
    return seen


def streams_of(seed: int, count: int, **changes: Any) -> Streams:
    return Streams.random(seed, count, **{"heads": 2, "group": 2, "dim": DIM, "value_dim": VALUE_DIM, **changes})


def agree(
    config: CacheConfig,
    how: Quantization | EngineQuantization,
    streams: Streams,
    widths: Sequence[int],
    mask: Any = None,
    **given: Any,
) -> Seen:
    truth = by_hand(config, how, streams, widths, mask, **given)
    seen = run_core(dataclasses.replace(config, quantization=how), streams, widths, mask=mask, **given)
    for step, (outs, want) in enumerate(zip(seen.out, truth.out, strict=True)):
        assert seen.kept[step] == truth.kept[step], step
        for out, expected in zip(outs, want, strict=True):
            live = torch.ones_like(out, dtype=torch.bool)
            if mask is not None and step == 0:
                live = mask[:, None, : out.shape[2], None].bool().expand_as(out)
            torch.testing.assert_close(out[live], expected[live], atol=1e-6, rtol=0)
        for mine, its in zip(seen.score[step], truth.score[step], strict=True):
            for row, other in zip(mine, its, strict=True):
                for head, expected_scores in zip(row, other, strict=True):
                    assert head == pytest.approx(expected_scores, abs=1e-6)
    assert all(isinstance(state.slots, QuantizedSlots) for state in seen.states)
    return seen


@pytest.mark.parametrize("how", SETTINGS, ids=IDS)
@pytest.mark.parametrize("mode", ["overwrite", pytest.param("compact", marks=pytest.mark.slow)])
def test_every_setting_is_the_plain_path_over_dequantised_tensors(mode: str, how: Quantization) -> None:
    config = CacheConfig(H2O(), HALF, mode=mode)  # type: ignore[arg-type]
    agree(config, how, streams_of(1, 40), [23, *[1] * 17])


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("mode", ["overwrite", pytest.param("compact", marks=pytest.mark.slow)])
def test_every_method_sees_what_attention_sees(mode: str, method: Method) -> None:
    config = CacheConfig(method, HALF if method.evicts else None, mode=mode, positions="original")  # type: ignore[arg-type]
    agree(config, KIVI, streams_of(2, 36), [22, *[1] * 14])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_of_a_model(dtype: torch.dtype) -> None:
    """Scales and codes are computed in float32: what is read is the dequantised number in the model's dtype."""
    streams = streams_of(11, 30, dtype=dtype)
    config = CacheConfig(Full())
    truth = by_hand(config, KIVI, streams, [21, *[1] * 9], None)
    made = run_core(CacheConfig(Full(), quantization=KIVI), streams, [21, *[1] * 9])
    for name in ("keys", "values"):
        mine, its = (getattr(seen.states[0].require_slots(), name)[:, :, :30] for seen in (made, truth))
        assert mine.dtype == its.dtype == dtype
        torch.testing.assert_close(mine, its, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=1e-6)
    torch.testing.assert_close(made.out[-1], truth.out[-1])


@pytest.mark.parametrize("every", [1, 3])
def test_padding_chunks_and_several_tokens_at_once(every: int) -> None:
    streams, mask = streams_of(3, 43, batch=3).padded([0, 6, 11])
    config = CacheConfig(H2O(), HALF, cadence=Cadence(every=every))
    agree(config, KIVI, streams, [9, 9, 9, 1, 1, 5, 1, 1, 3, 1, 1, 1, 1], mask, prompt=27)


def test_nothing_is_evicted_at_the_end_of_the_prompt() -> None:
    config = CacheConfig(KNorm(), Budget(tokens=12), cadence=Cadence(at_prefill=False))
    agree(config, KIVI, streams_of(4, 40), [20, *[1] * 20])


def test_eviction_leaves_groups_of_survivors() -> None:
    """A head's group is of the tokens it still holds: heads differ in it, and a group outlives some of its tokens."""
    seen = agree(CacheConfig(KNorm(), HALF), KIVI, streams_of(5, 60), [40, *[1] * 20])
    slots = seen.states[0].slots
    assert isinstance(slots, QuantizedSlots)
    starts: list[list[int]] = slots.key_states.start[0].tolist()  # type: ignore[attr-defined]
    assert starts[0] != starts[1] and len(starts[0]) >= 2
    held = seen.kept[-1][0][0][0]
    sizes = [sum(a <= p < b for p in held) for a, b in zip(starts[0], [*starts[0][1:], 10**9], strict=True)]
    assert min(sizes[:-1]) < KIVI.group  # of the last, tokens behind it count too


def test_scales_go_with_their_last_token() -> None:
    """A window passes whole groups: their number stays, while a cache of everything goes on making them."""
    how = Quantization(4, 16, group=4, residual=4)
    counts = {}
    for method in (Window(), Full()):
        config = CacheConfig(method, Budget(tokens=17) if method.evicts else None, quantization=how)
        states = run_core(config, streams_of(6, 90), [20, *[1] * 70]).states
        counts[method.name] = states[0].require_slots().key_states.start.shape[2]  # type: ignore[attr-defined]
    assert counts["full"] == (90 - 4) // 4
    assert counts["window"] <= 5


@pytest.mark.parametrize("method", [Full(), KNorm()], ids=repr)
def test_what_was_quantised_is_never_quantised_again(method: Method) -> None:
    """Attention reads the same numbers of a token behind the window from then on, to the bit."""
    config = CacheConfig(method, HALF if method.evicts else None, quantization=KIVI)
    streams = streams_of(7, 50)
    found: dict[tuple[int, int], torch.Tensor] = {}
    sequence = SequenceState(prompt_columns=30, max_new_tokens=20)
    state = EvictionLayer(config, 0, CacheState(config, 1, sequence))
    changed = set()
    for start, end in [(0, 30), *((i, i + 1) for i in range(30, 50))]:
        part = [x[0, :, :, start:end] for x in (streams.q, streams.k, streams.v)]
        state.forward(*part, AttentionParams(1.0), None)
        slots = state.require_slots()
        for h, s in product(range(2), range(slots.length)):
            position = int(slots.positions[0, h, s])
            if position >= 0:
                if (h, position) in found and not torch.equal(found[h, position], slots.keys[0, h, s]):
                    assert (h, position) not in changed
                    changed.add((h, position))
                found[h, position] = slots.keys[0, h, s].clone()
    assert len(changed) >= 8


# -- codes ------------------------------------------------------------------------------------------------------------


def test_the_formula_on_a_group_worked_out_by_hand() -> None:
    assert kivi_codes([0.0, 0.4, 1.1, 3.0], 2) == [0, 0, 1, 3]
    codec = Codec(2, "token", 4, 0, False)
    x = torch.tensor([[0.0, 0.4, 1.1, 3.0]])
    scale, zero = codec.fit(x, -1).float().unbind(-1)
    assert codec.encode(x, scale[:, None], zero[:, None]).tolist() == [[0, 0, 1, 3]]
    assert codec.decode(torch.tensor([[0, 0, 1, 3]]), scale[:, None], zero[:, None]).tolist() == [[0, 0, 1, 3]]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [1, 7, 8, 64])
def test_packing_loses_nothing(bits: int, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    codes = torch.randint(0, 1 << bits, (3, 5, width), generator=g).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == -(-width * bits // 8)
    assert torch.equal(unpack(packed, bits, width), codes)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_of_a_constant_of_zeros_and_of_large_numbers(bits: int, symmetric: bool) -> None:
    codec = Codec(bits, "token", 3, 0, symmetric)
    for group in ([0.0, 0.0, 0.0], [1.5, 1.5, 1.5], [-70000.0, 0.0, 3.0], [1e-9, 2e-9, 0.0]):
        x = torch.tensor([group], dtype=torch.float64)
        scale, *zero = (one[..., None] for one in codec.fit(x, -1).double().unbind(-1))
        codes = codec.encode(x, scale, zero[0] if zero else None)
        made = codec.decode(codes, scale, zero[0] if zero else None)
        assert torch.isfinite(made).all()
        if abs(group[0]) < 65504:
            assert made.tolist()[0] == pytest.approx(restored(group, bits, symmetric), abs=1e-12)


def kivi(
    keys: torch.Tensor, values: torch.Tensor, bits: int, group: int, residual: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, D] and values [N, D] as KIVI's section 3 has them after N tokens: float32, one group after the other.

    Keys: per channel over `group` tokens, all but the last N mod `group`; values: per token over `group` channels, all
    but the newest `residual`.
    """
    keys, values = keys.clone(), values.clone()
    for first in range(0, len(keys) // group * group, group):
        for channel in range(keys.shape[1]):
            part = keys[first : first + group, channel]
            keys[first : first + group, channel] = torch.tensor(restored(part.tolist(), bits, False))
    for token in range(max(0, len(values) - residual)):
        for first in range(0, values.shape[1], group):
            part = values[token, first : first + group]
            values[token, first : first + group] = torch.tensor(restored(part.tolist(), bits, False))
    return keys, values


@pytest.mark.parametrize("bits", [2, 4])
def test_kivis_cache_is_reproduced(bits: int) -> None:
    """A full cache whose keys wait for no window, and whose values do: KIVI's split of both, at every length."""
    streams = streams_of(8, 50, batch=1, heads=1, group=1, dim=8, value_dim=8, dtype=torch.float32)
    for how, name in (
        (Quantization(bits, 16, group=4, residual=0), "keys"),
        (Quantization(16, bits, group=4, residual=6), "values"),
    ):
        for end in (33, 41, 50):
            state = run_core(CacheConfig(Full(), quantization=how), streams, [33, *[1] * (end - 33)]).states[0]
            want = kivi(streams.k[0, 0, 0, :end], streams.v[0, 0, 0, :end], bits, 4, 6)[name == "values"]
            torch.testing.assert_close(getattr(state.require_slots(), name)[0, 0, :end], want, atol=1e-6, rtol=0)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bytes_are_those_of_the_buffers(bits: int) -> None:
    """64 channels of float32 in groups of 32, 1,000 tokens: counted by hand."""
    how = Quantization(bits, bits, group=32, residual=32)
    streams = streams_of(9, 1000, batch=1, heads=1, group=1, dim=64, value_dim=64, dtype=torch.float32)
    slots = run_core(CacheConfig(Full(), quantization=how), streams, [1000], max_new_tokens=1).states[0].require_slots()
    capacity = slots.positions.shape[2]
    groups = (1000 - 32) // 32
    codes = 2 * capacity * 64 * bits // 8
    keys = groups * (2 * 64 * 2 + 8) + 64 * (
        64 * 4 + 8
    )  # float16 scale and zero per channel, a start; 32 + 31 + 1 whole
    values = capacity * 2 * 2 * 2 + 33 * (64 * 4 + 8)
    assert slots.kv_bytes == codes + keys + values


def test_the_peak_counts_the_prompt_and_what_attention_reads() -> None:
    streams = streams_of(10, 101, batch=1, heads=1, group=1, dim=64, value_dim=64, dtype=torch.float32)
    config = CacheConfig(Full(), quantization=Quantization(4, 4))
    state = run_core(config, streams, [100]).states[0]
    held, prompt = state.memory_tracker.bytes, 200 * 64 * 2 * 4
    assert held == state.require_slots().kv_bytes < prompt / 2
    assert state.memory_tracker.peak_bytes == prompt + held
    after = run_core(config, streams, [100, 1], max_new_tokens=100).states[0]
    assert after.memory_tracker.bytes == held


# -- models -----------------------------------------------------------------------------------------------------------

TINY = Quantization(4, 4, group=7, residual=6)  # of 14 channels a head


def logits_of(made: Any) -> torch.Tensor:
    return torch.stack(made.logits)


@pytest.mark.parametrize(
    "method",
    [
        H2O(),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (Full(), Keyformer(), SnapKV(window=2, kernel=3), StreamingLLM())
        ),
    ],
    ids=repr,
)
def test_modes_rows_and_companies_agree(method: Method) -> None:
    """Overwriting and compacting, alone and padded in a batch: the same answers and slots."""
    model, rows, decoding = tiny("llama"), prompts_of(3, (40, 33, 21)), GenerationParams(14, eos=None)
    budget = HALF if method.evicts else None
    given: Any = {"decoding": decoding, "keep_logits": True, "quantization": TINY}
    one, other = (
        generate(model, rows, method, budget, seeds=[1, 2, 3], mode=m, **given) for m in ("overwrite", "compact")
    )
    assert one.tokens == other.tokens
    torch.testing.assert_close(logits_of(one), logits_of(other), atol=1e-4, rtol=0)
    assert [one.cache.kept_positions(i) for i in range(2)] == [other.cache.kept_positions(i) for i in range(2)]
    for place, row in enumerate(rows):
        alone = generate(model, [row], method, budget, seeds=[place + 1], **given)
        assert alone.tokens[0] == one.tokens[place]
        torch.testing.assert_close(logits_of(alone)[:, 0], logits_of(one)[:, place], atol=1e-4, rtol=0)


def test_quantisation_moves_the_logits_and_eight_bits_hardly() -> None:
    model, rows, decoding = tiny("llama"), prompts_of(3, (40, 33)), GenerationParams(10, eos=None)
    plain = generate(model, rows, H2O(), HALF, decoding=decoding, keep_logits=True)
    apart = []
    for bits in (8, 4, 2):
        how = Quantization(bits, bits, group=7, residual=0)
        made = generate(model, rows, H2O(), HALF, decoding=decoding, keep_logits=True, quantization=how)
        apart.append(float((made.logits[1] - plain.logits[1]).abs().max()))
    assert 0 < apart[0] < apart[1] < apart[2]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["overwrite", "compact"])
@pytest.mark.parametrize("method", [Full(), H2O()], ids=repr)
def test_copies_share_until_a_token_comes(method: Method, mode: Any) -> None:
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    budget = HALF if method.evicts else None
    made = [prefill(model, rows, method, budget, max_new_tokens=9, quantization=TINY, mode=mode) for _ in range(2)]
    token, places = torch.tensor([[5], [6]]), torch.tensor([[40], [33]])
    for context in made:
        decode_step(model, token, places, context.cache)
    context, untouched = made
    copies = [context.cache.fork(picked) for picked in ([0, 1], [1, 1], [1, 0])]
    mine = context.cache.layer_states[0].require_slots()
    its = copies[0].layer_states[0].require_slots()
    assert isinstance(mine, QuantizedSlots) and isinstance(its, QuantizedSlots)
    address = mine.key_states.tensors["codes"].data_ptr()
    assert its.key_states.tensors["codes"].data_ptr() == address
    assert copies[0].memory_tracker.bytes == context.cache.memory_tracker.bytes
    for step in range(4):
        want = decode_step(model, token + step, places + 1 + step, untouched.cache)
        for picked, copied in zip(([0, 1], [1, 1], [1, 0]), copies, strict=True):
            logits = decode_step(model, (token + step)[picked], (places + 1 + step)[picked], copied)
            torch.testing.assert_close(logits, want[picked], atol=1e-4, rtol=0)
    assert its.key_states.tensors["codes"].data_ptr() != address
    for step in range(4):  # what the copies were made of has stayed as it was
        untouched_again = decode_step(model, token + step, places + 1 + step, context.cache)
    torch.testing.assert_close(untouched_again, want, atol=1e-4, rtol=0)
    assert scores(context.cache) == pytest.approx(scores(untouched.cache), abs=1e-4)


@torch.no_grad()
def test_beams_take_their_slots_along() -> None:
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    decoding = GenerationParams(10, num_beams=3, eos=None)
    runs = [
        generate(model, rows, H2O(), HALF, decoding=decoding, quantization=TINY, mode=mode)
        for mode in ("overwrite", "compact")
    ]
    assert runs[0].tokens == runs[1].tokens
    plain = generate(model, rows, H2O(), HALF, decoding=decoding)
    assert len(plain.tokens) == len(runs[0].tokens)


@torch.no_grad()
def test_in_company_of_other_caches_a_cache_keeps_its_own_numbers() -> None:
    """One prefill for caches with and without codes; each decodes as it does alone."""
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    variants = [
        CacheConfig(Full()),
        CacheConfig(Full(), quantization=TINY),
        CacheConfig(H2O(), HALF),
        CacheConfig(H2O(), HALF, quantization=TINY),
        CacheConfig(Window(), Budget(kv_ratio=0.3), quantization=TINY),
    ]
    cache = batched_cache(prefill_together(model, rows, variants, max_new_tokens=14, seeds=[4, 5]))
    alone = [prefill(model, rows, variant, max_new_tokens=14, seeds=[4, 5]).cache for variant in variants]
    places = torch.tensor([[40], [33]])
    for step in range(6):
        token = later(7, 2, 6)[:, step : step + 1]
        together = decode_step(model, token.repeat(len(variants), 1), (places + step).repeat(len(variants), 1), cache)
        for own, part in zip(alone, together.split(2), strict=True):
            torch.testing.assert_close(part, decode_step(model, token, places + step, own), atol=1e-4, rtol=0)


@torch.no_grad()
def test_divergence_is_of_the_quantised_cache_and_from_the_plain_one() -> None:
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    contexts = [
        prefill(model, rows, Full(), max_new_tokens=8, **given)
        for given in ({}, *({"quantization": Quantization(b, b, group=7, residual=0)} for b in (8, 2)))
    ]
    found = divergence_from_full(model, contexts[0], contexts[1:], max_new_tokens=8)
    eight, two = (sum(text.kl[1:]) for (text, _) in found)
    assert 0 < eight < two
    with pytest.raises(ConfigError, match="got a context of a quantised cache"):
        divergence_from_full(model, contexts[1], contexts[2:], max_new_tokens=8)


def test_a_second_pass_sees_the_prompt_before_it_is_quantised() -> None:
    """KVzip evicts after its pass: the slots become codes then, and not before."""
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    method = KVzip(n_sinks=1, chunk=15, instruct=False)
    given: Any = {"decoding": GenerationParams(6, eos=None), "keep_logits": True}
    plain = generate(model, rows, method, HALF, **given)
    coded = generate(model, rows, method, HALF, quantization=TINY, **given)
    assert torch.equal(plain.logits[0], coded.logits[0])
    assert isinstance(coded.cache.layer_states[0].slots, QuantizedSlots)
    assert not torch.equal(plain.logits[1], coded.logits[1])


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key_bits": 3}, "key_bits must be one of 16, 8, 4, 2, got 3"),
        ({"value_bits": True}, "value_bits must be one of 16, 8, 4, 2, got True"),
        ({"key_bits": 16, "value_bits": 16}, "quantise nothing"),
        ({"key_axis": "head"}, "key_axis must be one of channel, token, got 'head'"),
        ({"group": 0}, "group must be at least 1"),
        ({"residual": -1}, "residual must be at least 0"),
        ({"symmetric": 1}, "symmetric must be true or false, got 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Quantization(**given)


def test_combinations_that_cannot_be_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="mode=mask is a simulation: it drops nothing"):
        CacheConfig(H2O(), HALF, mode="mask", quantization=KIVI)
    with pytest.raises(ConfigError, match="mode=mask is a simulation"):
        CacheConfig(kvexp.methods.Ideal(), HALF, mode="auto", quantization=KIVI)
    with pytest.raises(ConfigError, match="method quest keeps everything in a memory and an index of its own"):
        CacheConfig(Quest(), HALF, quantization=KIVI)
    with pytest.raises(ConfigError, match="quantization must be a Quantization"):
        CacheConfig(H2O(), HALF, quantization=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"group=32 does not divide the 14 channels .* set group=2 or 7 or 14"):
        generate(tiny("llama"), prompts_of(3, (20,)), H2O(), HALF, quantization=Quantization(4, 4))
    with pytest.raises(ConfigError, match=r"keys and values of torch\.float8_e4m3fn cannot be quantised"):
        KIVI.check_dtype(torch.float8_e4m3fn)
