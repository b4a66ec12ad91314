"""Engines' formats: bytes as other people's code makes them, numbers by hand from the formats' definitions."""

from __future__ import annotations

import itertools
import math

import gguf
import numpy as np
import pytest
import torch
from test_quantised import DIM, VALUE_DIM, agree, streams_of
from tiny import prompts_of, run_core, tiny

from kvexp.core import Budget, CacheConfig, EngineQuantization
from kvexp.core.codecs import (
    E2M1,
    FP8,
    NVFP4,
    U8,
    GGMLBlocks,
    TurboKeys,
    TurboValues,
    hadamard,
    lloyd_max,
    pack,
    random_signs,
    unpack,
)
from kvexp.core.quantized import SlotBytes
from kvexp.generate import generate
from kvexp.hf import EvictionCache
from kvexp.methods import H2O, Full
from kvexp.util.errors import ConfigError

FORMATS = {
    **{"fp8": FP8(), "fp8_truncated": FP8(truncate=True), "nvfp4": NVFP4(), "u8": U8()},
    **{"q8_0": GGMLBlocks(8), "q4_0": GGMLBlocks(4), "q4_0 keys of a llama": GGMLBlocks(4, neighbours=True, turn=-1)},
    **{f"turbo keys {bits}": TurboKeys(bits) for bits in (3, 4)},
    **{"turbo keys, signs": TurboKeys(3, signs=True), "turbo keys, not corrected": TurboKeys(4, correct=False)},
    **{f"turbo values {bits}": TurboValues(bits) for bits in (3, 4)},
}


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(form, x):
    """What is read of x, and that it took the bytes which the format says."""
    rows = form.encode(x)
    assert rows.dtype == torch.uint8 and rows.shape == (*x.shape[:-1], form.row_bytes(x.shape[-1]))
    return form.decode(rows, x.shape[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_vectors_bytes_do_not_depend_on_others(name):
    form, x = FORMATS[name], some(5, 7, 64) * torch.tensor([0.01, 1, 50, 0, 400])[:, None, None]
    together = form.encode(x)
    alone = torch.stack([form.encode(vector[None])[0] for vector in x.flatten(0, 1)])
    assert torch.equal(together.flatten(0, 1), alone)
    assert torch.equal(form.encode(x.double()), together)
    made = read(form, x)
    assert torch.isfinite(made).all() and made.dtype == torch.float32 and made[3].abs().max() < 1e-3


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_0")])
def test_llama_cpps_blocks_are_its_own_to_the_byte(bits, kind):
    form, of = GGMLBlocks(bits), gguf.GGMLQuantizationType[kind]
    for scale in (1e-3, 1.0, 300.0):
        x = some(40, 128, seed=1) * scale
        x[0] = 0
        x[1, :4] = torch.tensor([1.0, -1.0, 0.5, -0.5]) * scale
        wanted = gguf.quantize(x.numpy(), of)
        rows = form.encode(x)
        assert np.array_equal(rows.numpy(), wanted) and form.row_bytes(128) == wanted.shape[1]
        assert np.array_equal(form.decode(rows, 128).numpy(), gguf.dequantize(wanted, of))


def sylvester(width):
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


TURNS = {  # channels of a head, turn of the format -> channels that are turned together
    **{(64, 0): 1, (64, -1): 64, (64, 64): 64, (96, -1): 1, (128, -1): 128, (128, 64): 64, (192, -1): 64},
}


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("width", "turn"), TURNS)
def test_llama_cpp_turns_vectors_before_it_stores_them(width, turn, neighbours):
    """Whole numbers, whose sums are exact: its conversion's permutation, its matrix, then the bytes of its package."""
    size = TURNS[width, turn]
    order = np.arange(width).reshape(2, -1).swapaxes(0, 1).ravel() if neighbours else np.arange(width)
    q8_0, q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0

    def turned(x):
        return (x.reshape(30, -1, size) @ sylvester(size) / np.float32(math.sqrt(size))).reshape(30, width)

    generator = torch.Generator().manual_seed(11)
    x, query = (torch.randint(-40, 41, (30, width), generator=generator).float() for _ in range(2))
    for bits, kind in ((8, q8_0), (4, q4_0)):
        form, wanted = GGMLBlocks(bits, neighbours, turn), gguf.quantize(turned(x.numpy()[:, order]), kind)
        assert np.array_equal(form.encode(x).numpy(), wanted)
        back = turned(gguf.dequantize(wanted, kind))
        assert np.allclose(form.decode(form.encode(x), width).numpy()[:, order], back, atol=1e-4)
        rounded = gguf.dequantize(gguf.quantize(turned(query.numpy()[:, order]), q8_0), q8_0)
        read = form.query.decode(form.query.encode(query), width)
        products = (read * form.decode(form.encode(x), width)).sum(-1)
        assert np.allclose(products.numpy(), (rounded * gguf.dequantize(wanted, kind)).sum(-1), rtol=1e-4, atol=0.05)


def test_vllms_cpu_cuts_off_what_e4m3_cannot_hold():
    """The largest value that is not above a magnitude, subnormal numbers too."""
    positive = [e4m3(code) for code in range(127)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(positive)]
    just_below = [math.nextafter(np.float32(value), 0) for value in positive[1:]]
    numbers = [*positive, *middles, *just_below, *(some(200, seed=2) * 5).tolist(), 449.0, -1e6, -0.0]
    for x, code in zip(numbers, FP8(truncate=True).encode(torch.tensor(numbers)).tolist(), strict=True):
        assert code & 127 == max(n for n, value in enumerate(positive) if value <= abs(np.float32(x)))
        assert code >> 7 == (x < 0)


def e4m3(code):
    """The number of an E4M3 code by the format: 4 bits of exponent with bias 7, 3 of mantissa, no infinities."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest(x, values):
    """The code of the nearest value, the even code of two that are as near. values: of ascending codes from 0."""
    order = sorted(range(len(values)), key=lambda code: (abs(values[code] - x), code % 2))
    return order[0]


def test_fp8_is_e4m3_by_hand():
    positive = [e4m3(code) for code in range(127)]  # 0 … 448
    assert positive == sorted(positive) and positive[-1] == 448
    middles = [(low + high) / 2 for low, high in itertools.pairwise(positive)]
    numbers = [*positive, *middles, *(some(200, seed=2) * 5).tolist(), 449.0, 1e6, -1e6]
    for x, code in zip(numbers, FP8().encode(torch.tensor(numbers)).tolist(), strict=True):
        assert code & 127 == nearest(abs(x), positive) and code >> 7 == (x < 0)
    every = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    assert FP8().decode(every, len(every)).tolist() == [e4m3(code) for code in every.tolist()]


def test_nvfp4_by_hand():
    """16 numbers and their scale; ties, signs, the layout of halves and scales."""
    x = torch.tensor([6.0, -6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.2, -0.3, 0, 1, 2, 4])
    row = NVFP4().encode(torch.cat([x, x * 100]))
    codes = [7, 15, *(nearest(v, E2M1) for v in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)), 8 + 6, 0, 9, 0, 2, 4, 6]
    assert row[:8].tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert [e4m3(code) for code in row[16:].tolist()] == [1.0, 96.0]  # 100 lies between 96 and 104
    assert NVFP4().decode(row, 32)[:16].tolist() == [(-1 if code >> 3 else 1) * E2M1[code & 7] for code in codes]
    wanted = []
    for block in some(6, 16, seed=3):
        scale = e4m3(nearest(float(block.abs().max()) / 6, [e4m3(code) for code in range(127)]))
        wanted.append([math.copysign(E2M1[nearest(abs(float(v)) / scale, E2M1)] * scale, v) for v in block])
    assert torch.allclose(read(NVFP4(), some(6, 16, seed=3)), torch.tensor(wanted), atol=1e-6)
    assert NVFP4().row_bytes(64) == 36  # 4.5 bits a number


def test_u8_by_hand():
    for vector in (*some(4, 20, seed=4), torch.full((20,), 3.0)):
        row = U8().encode(vector)
        x = vector.numpy().astype(np.float32)
        scale = np.float32(x.max() - x.min()) / np.float32(255) or np.float32(0.0001)
        zero = -x.min() / scale
        assert np.array_equal(row[20:].numpy().view(np.float32), np.array([scale, zero]))
        codes = np.clip(np.rint(x * (np.float32(1) / scale) + zero), 0, 255)
        assert np.array_equal(row[:20].numpy(), codes.astype(np.uint8))
        assert np.abs(U8().decode(row, 20).numpy() - x).max() <= scale * 0.51 + 1e-6 * abs(x).max()


LLOYD = {  # positive halves for N(0, 1), and the mean squared error: Max (1960), table I
    1: ([0.7980], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", LLOYD)
def test_the_codebook_is_maxs(bits):
    wanted, error = LLOYD[bits]
    points = np.array(lloyd_max(bits))
    assert np.allclose(points, -points[::-1]) and np.allclose(points[len(points) // 2 :], wanted, atol=6e-4)
    grid = np.linspace(-8, 8, 200_001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    found = (np.abs(grid[:, None] - points).min(1) ** 2 * density).sum() * (grid[1] - grid[0])
    assert found == pytest.approx(error, rel=2e-3)


def test_the_hadamard_matrix_is_sylvesters():
    x = some(5, 64, seed=5).double()
    assert np.allclose(hadamard(x).numpy(), x.numpy() @ sylvester(64).T / 8)
    assert torch.allclose(hadamard(hadamard(x)), x)
    assert set(random_signs(64).tolist()) == {1.0, -1.0} and abs(float(random_signs(64).sum())) < 24


@pytest.mark.parametrize(("signs", "correct"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("bits", [3, 4])
def test_turboquants_keys_by_hand(bits, signs, correct):
    x = some(6, 64, seed=6) * torch.logspace(-2, 2, 6)[:, None]
    points = np.array(lloyd_max(bits)) / 8
    turn = hadamard(torch.eye(64).double()).numpy()
    flips = random_signs(64).numpy() if signs else np.ones(64)
    wanted = []
    for vector in x.double().numpy():
        norm = np.linalg.norm(vector)
        y = points[np.abs((turn @ (flips * vector / norm))[:, None] - points).argmin(1)]
        y = y / np.linalg.norm(y) if correct else y
        wanted.append(flips * (turn.T @ y) * float(np.float16(norm)))
    made = read(TurboKeys(bits, signs, correct), x)
    assert np.allclose(made.numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_turboquants_error_is_the_published_one():
    """Relative squared error of random directions, D = 64; a constant vector needs random signs (methods_2026, 2.7)."""
    x = some(4000, 64, seed=7)
    error = {
        (bits, correct): float(
            ((read(TurboKeys(bits, correct=correct), x) - x) ** 2).sum(-1).div((x**2).sum(-1)).mean()
        )
        for bits in (3, 4)
        for correct in (False, True)
    }
    for key, wanted in {(3, False): 0.0335, (4, False): 0.0092, (3, True): 0.0329, (4, True): 0.0089}.items():
        assert error[key] == pytest.approx(wanted, rel=0.03)
    flat = torch.full((64,), 2.0)
    plain, turned = (read(TurboKeys(3, signs, correct=False), flat) for signs in (False, True))
    assert float(((plain - 2) ** 2).mean() / 4) == pytest.approx(0.59, abs=0.01)
    assert float(((turned - 2) ** 2).mean() / 4) < 0.1


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquants_values_by_hand(bits):
    x = some(6, 24, seed=8) * 3 + 1
    made = read(TurboValues(bits), x).numpy()
    for vector, numbers in zip(x.numpy(), made, strict=True):
        least, scale = np.float16(vector.min()), np.float16((vector.max() - vector.min()) / (2**bits - 1))
        codes = np.clip(np.rint((vector - np.float32(least)) / np.float32(scale)), 0, 2**bits - 1)
        assert np.allclose(numbers, codes * np.float32(scale) + np.float32(least), atol=1e-6)


def test_three_bits_are_packed_without_loss():
    for width in (1, 5, 8, 24):
        codes = torch.randint(0, 8, (3, width), generator=torch.Generator().manual_seed(9), dtype=torch.uint8)
        packed = pack(codes, 3)
        assert packed.shape[-1] == -(-width * 3 // 8) and torch.equal(unpack(packed, 3, width), codes)
        number = int.from_bytes(bytes(packed[0].tolist()), "little")
        assert [number >> 3 * place & 7 for place in range(width)] == codes[0].tolist()


PRESETS = {"k8v4": (8, 4, 196), "4bit": (4, 4, 134), "k3v4": (3, 4, 118), "3bit": (3, 3, 102)}


@pytest.mark.parametrize("preset", PRESETS)
def test_vllms_presets_take_its_bytes(preset):
    keys, values, wanted = PRESETS[preset]
    how = EngineQuantization("turboquant", keys, values)
    assert how.keys.code_bytes(128) + how.values.code_bytes(128) == wanted
    slots = SlotBytes(128, 128, how)
    assert slots.of(101) - slots.of(100) == wanted


@pytest.mark.parametrize("codec", ["fp8", "fp8_truncated", "nvfp4", "q8_0", "q4_0", "u8"])
def test_bytes_are_those_of_the_buffers(codec):
    """A row of bytes for each slot, and one place in full precision (64 float32 and an index) for a token to come."""
    how = EngineQuantization(codec)
    streams = streams_of(9, 200, batch=1, heads=1, group=1, dim=64, value_dim=64, dtype=torch.float32)
    state = run_core(CacheConfig(Full(), quantization=how), streams, [200], max_new_tokens=1).states[0]
    slots = state.require_slots()
    row = {"fp8": 64, "fp8_truncated": 64, "nvfp4": 36, "q8_0": 68, "q4_0": 36, "u8": 72}[codec]
    assert slots.kv_bytes == 2 * (slots.positions.shape[2] * row + 64 * 4 + 8)
    assert SlotBytes(64, 64, how, itemsize=4).of(200) == 2 * (200 * row + 64 * 4 + 8)


HOWS = {
    **{name: EngineQuantization(name) for name in ("fp8", "u8")},
    "turboquant": EngineQuantization("turboquant", 4, 3),
    "turboquant, signs and a window": EngineQuantization("turboquant", 3, 4, signs=True, residual=3),
    "fp8 keys": EngineQuantization("turboquant", 8, 4),
}


@pytest.mark.parametrize("mode", ["overwrite", "compact"])
@pytest.mark.parametrize("name", HOWS)
def test_a_cache_is_the_plain_path_over_decoded_tensors(name, mode):
    """As tests/core/test_quantised.py holds KIVI: eviction, growth and window, slots by hand."""
    how = HOWS[name]
    assert (DIM, VALUE_DIM) == (8, 12)
    agree(CacheConfig(H2O(), Budget(kv_ratio=0.5), mode=mode), how, streams_of(1, 26), [14, *[1] * 12])


@pytest.mark.parametrize("codec", ["q8_0", "q4_0"])
@pytest.mark.parametrize("neighbours", [False, True])
def test_llama_cpps_query_is_rounded_at_every_step(codec, neighbours):
    """Prompts are read in full precision; then eviction, and queries as `GGMLBlocks.query` reads them."""
    how = EngineQuantization(codec, neighbours=neighbours)
    streams = streams_of(1, 26, dim=64, value_dim=128)
    agree(CacheConfig(H2O(), Budget(kv_ratio=0.5)), how, streams, [14, *[1] * 12])


def test_the_model_says_how_llama_cpp_orders_its_keys():
    for family, neighbours in {"llama": True, "qwen2": False}.items():
        for width, rotate in {32: False, 64: None}.items():
            cache = EvictionCache(tiny(family, head_dim=width), Full(), quantization=EngineQuantization("q8_0"))
            assert cache.config.quantization == EngineQuantization("q8_0", rotate=rotate, neighbours=neighbours)
    fp8 = EngineQuantization("fp8")
    assert EvictionCache(tiny("llama"), Full(), quantization=fp8).config.quantization == fp8


@pytest.mark.parametrize("codec", ["nvfp4", "q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_formats_of_blocks_run_under_a_model(codec):
    """Rows do not depend on their neighbours."""
    model = tiny("llama", head_dim=64)
    prompts = prompts_of(3, (40, 23))
    how = EngineQuantization(codec)
    both = generate(model, prompts, Full(), quantization=how)
    for row, prompt in enumerate(prompts):
        assert both.tokens[row] == generate(model, [prompt], Full(), quantization=how).tokens[0]


REFUSED = {
    "bits of q8_0": (dict(codec="q8_0", key_bits=4), "key_bits is of codec=turboquant, got codec=q8_0"),
    "values of 8 bits": (dict(codec="turboquant", key_bits=4, value_bits=8), "values in 4 or 3, got key_bits=4"),
    "signs of fp8 keys": (dict(codec="turboquant", key_bits=8, value_bits=4, signs=True), "no effect with key_bits=8"),
    "rotated fp8": (dict(codec="fp8", rotate=True), "rotate is of codec=q8_0 and q4_0, got codec=fp8"),
    "no codec": (dict(codec="q5_0"), "codec must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_is_refused(case):
    given, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        EngineQuantization(**given)


def test_heads_that_a_format_cannot_hold():
    with pytest.raises(ConfigError, match="packs 32 channels at a time; a key head has 48"):
        EngineQuantization("q8_0").check_head(48, 64)
    with pytest.raises(ConfigError, match=r"rotate=true turns 64 channels at a time.*a value head has 96"):
        EngineQuantization("q8_0", rotate=True).check_head(64, 96)
    EngineQuantization("q8_0").check_head(64, 96)
    with pytest.raises(ConfigError, match="a power of two; it has 96"):
        EngineQuantization("turboquant", 4, 4).check_head(96, 96)
    EngineQuantization("turboquant", 8, 4).check_head(96, 96)
