"""OpenVINO's choice of blocks against the numbers of the engine's own unit tests, and what it refuses.

The numbers are those of tests/cpp/cache_eviction.cpp of openvinotoolkit/openvino.genai@da1db86; the engine itself is
run in tests/generate/test_openvino.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvexp.core import Budget, CacheConfig, EvictionContext
from kvexp.core.slots import Slots
from kvexp.methods import OpenVINO
from kvexp.methods.openvino import least_diverse, random_bits
from kvexp.util.errors import ConfigError

ENGINE = OpenVINO(block=4, start_size=32, recent_size=32, window=0)  # its tests' default, of 192 tokens
RAW = replace(ENGINE, aggregation="sum")


def context(scores, size, *, steps=1, block=4):
    """One head's slots 0, 1, 2 … with these scores, `steps` tokens after the prompt."""
    count = len(scores)
    slots = Slots.empty_like(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), masked=False)
    score = torch.tensor(scores, dtype=torch.float32)[None, None]
    slots.append(torch.zeros(1, 1, count, 2), torch.zeros(1, 1, count, 2), torch.arange(count)[None], score)
    whole = torch.tensor([size + block])
    return EvictionContext(slots, 0, whole, whole, torch.tensor([count - 1]), torch.tensor([0]), steps=steps)


def evicted(method, scores, size):
    """Blocks that go."""
    ctx = context(scores, size, block=method.block)
    gone = (~method.kept(ctx, method.priority(ctx))[0, 0]).nonzero()[:, 0].tolist()
    blocks = sorted({place // method.block for place in gone})
    assert gone == [block * method.block + i for block in blocks for i in range(method.block)]
    return blocks


@pytest.mark.parametrize(
    ("over", "size", "low", "gone"),
    [
        (1, 192, {17}, [17]),
        (1, 192, {9}, [9]),
        (10, 192, {28, 10, 11}, [10, 11, 28]),
        (10, 192, {18, 8, 31}, [8, 18, 31]),
        (6, 192, {15, 36, 13, 10}, [10, 13]),
        (6, 192, {9, 39, 31, 11}, [9, 11]),
        (22, 192, {30, 22}, [8, 9, 10, 11, 22, 30]),
        (22, 192, {0, 2, 7, 24, 31, 49}, [8, 9, 10, 11, 24, 31]),
        (22, 192, {5, 19, 27, 39, 50, 52}, [8, 9, 10, 19, 27, 39]),
        (17, 72, {0, 9, 10, 11, 13}, [8, 9, 10, 11, 13]),
        (17, 72, {12, 11, 8, 9, 17}, [8, 9, 10, 11, 12]),
    ],
)
def test_the_lowest_blocks_go(over, size, low, gone):
    """Tokens of low blocks have 0, all others 1; `over` tokens more than are held at most."""
    scores = [0.0 if place // 4 in low else 1.0 for place in range(size + 3 + over)]
    assert evicted(ENGINE, scores, size) == gone
    crushed = evicted(replace(ENGINE, crush=2, anchor="mean"), scores, size)  # its tests ask for no more of KVCrush
    if len(gone) >= 2:
        assert set(crushed) <= set(gone)
        assert len(crushed) == len(gone) - 2
    else:
        assert crushed == gone


@pytest.mark.parametrize("method", [ENGINE, RAW])
@pytest.mark.parametrize(
    ("power", "newer_larger", "norm", "raw"),
    [
        (1.1, False, [40, 41, 42], [40, 41, 42]),
        (1.1, True, [8, 9, 10], [8, 9, 10]),
        (0.9, False, [8, 9, 10], [40, 41, 42]),
        (0.9, True, [8, 9, 10], [8, 9, 10]),
    ],
)
def test_life_divides_the_score(method, power, newer_larger, norm, raw):
    count = 192 + 3 + 12
    scores = [float(place if newer_larger else count - 1 - place) ** power for place in range(count)]
    assert evicted(method, scores, 192) == (norm if method is ENGINE else raw)


@pytest.mark.parametrize("count", [8, 49, 190, 192, 193, 195])
def test_nothing_goes_before_a_block_is_too_many(count):
    assert evicted(ENGINE, [0.0] * count, 192) == []
    assert len(evicted(ENGINE, [0.0] * 196, 192)) == 1


@pytest.mark.parametrize(
    ("steps", "lives"), [(0, [4, 4, 4, 3, 2, 1]), (1, [5, 5, 5, 4, 3, 2, 1]), (2, [6, 6, 6, 5, 4, 3, 2, 1])]
)
def test_lives_of_a_prompt_of_six_whose_last_four_queries_count(steps, lives):
    ctx = context([1.0] * len(lives), 192, steps=steps)
    assert (1 / replace(ENGINE, window=4).priority(ctx))[0, 0].tolist() == pytest.approx(lives)


@pytest.mark.parametrize(
    ("scores", "diversity", "gone"),
    [
        ([999.0, 0, 0, 0, 0, 0], [10.5, 0.3, 18.5, 0.3, 23.65, 19.25], [1, 2, 3]),
        ([0.3, 0.7, 8.4, 11.0, 0.0], [2.15, 2.3, -20.2, 4.3, 1.15], [0, 4]),
    ],
)
def test_adaptive_rkv_fills_up_with_the_most_diverse(scores, diversity, gone):
    """Scores are of blocks; three stay, those with 0.9 of the attention first."""
    alike = -torch.tensor(diversity)[:, None].expand(-1, len(scores))
    assert least_diverse(torch.tensor(scores, dtype=torch.float64), alike, 0.9, 3) == gone


def test_the_anchor_is_the_top_bit_of_mersenne_twister():
    """C++: std::mt19937(5489) gives 3499211612 first and, as the standard says, 4123659995 as its 10,000th number."""
    assert random_bits(5489, 0, 1).tolist() == [3499211612 >> 31]
    assert random_bits(5489, 9999, 1).tolist() == [4123659995 >> 31]
    assert random_bits(0, 0, 64)[32:].tolist() == random_bits(0, 32, 32).tolist()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: OpenVINO(start_size=33), "start_size=33 is not a multiple of block=32"),
        (lambda: OpenVINO(crush=1, aggregation="adaptive_rkv"), "set crush=0"),
        (lambda: CacheConfig(OpenVINO(), Budget(tokens=256), mode="mask"), "set mode=compact"),
        (lambda: CacheConfig(OpenVINO(), Budget(tokens=256, heads="adaptive")), "budget.heads"),
        (lambda: CacheConfig(OpenVINO(), Budget(tokens=256), keep="span"), "chooses the slots itself"),
        (lambda: OpenVINO().effective_budget(170, 0), "5 blocks of 32 tokens, and must hold more than start_size=32"),
    ],
)
def test_what_cannot_be_is_refused(made, words):
    with pytest.raises(ConfigError, match=words):
        made()
