"""The copies of the offload path are ordered by events and waits, not by luck; an order that is missing is found."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from pretend import Placed, move, pretended
from stream_checker import checked_streams
from test_offload import DIM, HEADS, VALUE, marked
from test_retrieval import METHODS, PROMPTS, RELEASED, SCARCE
from tiny import later, tiny

from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.hf import EvictionCache
from kvexp.retrieval import PQCache, offload
from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.offload import BlockCache, BlockCacheConfig, CopyStreams, OffloadConfig, OffloadedKV, get_streams

DEVICE = torch.device("cuda:0")


def placed(x):
    return Placed(x, DEVICE)


def on_gpu(family):
    model = copy.deepcopy(tiny(family))
    move(model, DEVICE)
    return model


def random_program(seed, checker):
    """Tokens come in, are fetched, forked and grown in an order drawn by `seed`; returns what was read at the end."""
    luck, lengths, columns = random.Random(seed), [11, 7], 11
    cache = BlockCacheConfig(tokens=6, block=2, per_step=2) if luck.random() < 0.8 else None
    config = OffloadConfig(2, [1, 2], columns + luck.choice([0, 3, 20]), cache=cache)
    held = OffloadedKV(placed(marked(2, columns, DIM)), placed(-marked(2, columns, VALUE)), lengths, config)
    index = KVIndex()
    index.copy_streams = held.copy_streams
    index.register("codes", torch.zeros(2, HEADS, 16, 2), per=1, home=torch.device("cpu"))
    index.register("centroids", torch.ones(2, HEADS, 4))

    def slots():
        wanted = [luck.randrange(min(held.lengths)) for _ in range(5)]
        return placed(torch.tensor(wanted).expand(2, HEADS, -1).clone()) * 1

    def add():
        token = placed(torch.full((2, HEADS, 1, DIM), luck.random())) * 2
        value = placed(torch.full((2, HEADS, 1, VALUE), luck.random())) * 2
        held.add(token, value)
        if luck.random() < 0.7:
            index.write("codes", [n - 1 for n in held.lengths], (token[:, :, 0, :2] + 1))

    def fork():
        nonlocal held, index
        rows = torch.tensor([luck.randrange(2), luck.randrange(2)])
        held, index = held.index_rows(rows), index.index_rows(rows)

    steps = {
        add: 6,
        (lambda: held.fetch(slots())): 4,
        (lambda: held.read(slots())): 4,
        (lambda: held.all_keys() * 2): 1,
        (lambda: held.components(slots()[:, :, :2] % DIM) * 2): 1,
        (lambda: index.prefetch()): 3,
        (lambda: index["codes"] * 2): 3,
        (lambda: index["centroids"] * 2): 1,
        fork: 1,
    }
    for step in luck.choices(list(steps), list(steps.values()), k=25):
        step()
    return held.all_keys()


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 300), marks=pytest.mark.slow)], ids=str)
def test_no_order_is_left_to_luck(seeds, monkeypatch):
    """Programs in random order."""
    for seed in seeds:
        with monkeypatch.context() as patch, checked_streams(patch) as checker:
            random_program(seed, checker)
        assert not checker.problems, (seed, checker.problems)
        assert any("to device" in step for step in checker.steps) and any("to host" in step for step in checker.steps)


QUICK = [("pqcache", 4), ("released", 1)]
REST = [(name, beams) for name in [*METHODS, "released"] for beams in (1, 4) if (name, beams) not in QUICK]


@pytest.mark.parametrize(("name", "beams"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)])
def test_answers_are_made_without_luck(name, beams, monkeypatch):
    """Whole generations; whether an index is already made when the layer before asks is drawn."""
    method, decoding = METHODS.get(name, RELEASED), GenerationParams(4, num_beams=beams, eos=None)
    alone = generate(tiny("llama"), PROMPTS[1:], method, SCARCE, decoding=decoding)
    dice, model = random.Random(3), on_gpu("llama")
    with monkeypatch.context() as patch, checked_streams(patch, luck=lambda: dice.random() < 0.5) as checker:
        beside = generate(model, PROMPTS[1:], method, SCARCE, decoding=decoding)
        theirs = receipts(beside.cache)
    assert not checker.problems, checker.problems
    assert beside.tokens == alone.tokens
    assert any("to device" in step for step in checker.steps) == method.offload
    for layer in range(2):
        assert beside.cache.kept_positions(layer) == alone.cache.kept_positions(layer)
    for a, b in zip(theirs, receipts(alone.cache), strict=True):
        assert (a.attention_kept is None) == method.offload, "the keys are elsewhere"
        assert a.retrieval == b.retrieval


@pytest.mark.parametrize("window", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_codes_that_were_fetched_for_nothing_are_fetched_again(window, monkeypatch):
    """As long as all candidates fit, nobody asks for codes; those that came meanwhile know no later token.

    Without a recent window the newest candidate is the token before, so a code that is a step too old would show.
    """
    method = PQCache(n_sinks=2, m=1, b=2, recent_ratio=window, cache_tokens=0)
    options = {"decoding": GenerationParams(16, eos=None), "keep_logits": True}
    alone = generate(tiny("llama"), [PROMPTS[1]], method, Budget(tokens=17), **options)
    with monkeypatch.context() as patch, checked_streams(patch) as checker:
        beside = generate(on_gpu("llama"), [PROMPTS[1]], method, Budget(tokens=17), **options)
        logits = [x.cpu() for x in beside.logits]
    assert not checker.problems
    # The prompt is attended in tiles on a CPU, by SDPA elsewhere: float32 rounding of logits up to 3, layer by layer.
    torch.testing.assert_close(torch.stack(logits), torch.stack(alone.logits), atol=2e-5, rtol=0)


def test_room_that_was_not_foreseen_is_made_while_codes_are_on_their_way(monkeypatch):
    """The cache of `model.generate` does not know how many tokens will come."""

    def fed(model, place):
        cache = EvictionCache(model, METHODS["pqcache"], SCARCE)
        with torch.inference_mode():
            ids = torch.tensor(PROMPTS[:1])
            made = [model(place(ids), past_key_values=cache, use_cache=True).logits[:, -1].cpu()]
            for token in later(5, 1, 70).split(1, dim=1):
                made.append(model(place(token), past_key_values=cache, use_cache=True).logits[:, -1].cpu())
        return torch.cat(made)

    alone = fed(tiny("llama"), lambda x: x)
    with monkeypatch.context() as patch, checked_streams(patch) as checker:
        beside = fed(on_gpu("llama"), placed)
    assert not checker.problems
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


# -- planted bugs ------------------------------------------------------------------------------------------------------


def _never(*_):
    """Stands for a wait, or a note to the allocator, that somebody forgot."""


def _wait_without_keeping(self, event, *arrived):
    if event is not None:
        torch.cuda.current_stream(self.device).wait_event(event)


def _at_once(self, way):
    return torch.cuda.stream(self.streams[way])


def _holding_only(kept):
    """`CopyStreams.hold` that forgets the copies of the other way."""
    real = CopyStreams.hold
    return lambda self, way, *tensors: real(self, way, *tensors) if way == kept else None


def _flush_without_waiting(self):
    for _, key, value, positions in self._in_flight:
        self._write(key, value, positions)
    self._in_flight.clear()


def _index_flush(self):
    """`KVIndex.flush` that does not wait for who still reads where it stores."""
    for name, entries, part, event in self._pending_writes:
        event.synchronize()
        self.entries[name].tensor[torch.arange(len(entries)), :, torch.tensor(entries)] = part
    self._pending_writes.clear()


PLANTED = {
    "codes stored under a copy": (KVIndex, "flush", _index_flush, "host overwrites what to device"),
    "a read before its copy": (CopyStreams, "wait", _never, "compute reads what to device"),
    "a copy before its source is computed": (CopyStreams, "copying", _at_once, "to host reads what compute"),
    "the host reads before the copy": (OffloadedKV, "flush", _flush_without_waiting, "host reads what to host"),
    "prompt given back under a copy": (CopyStreams, "hold", _holding_only("h2d"), "gives memory back that to host"),
    "fetched tokens given back": (CopyStreams, "wait", _wait_without_keeping, "gives memory back that compute"),
    "cache given back under a copy": (CopyStreams, "hold", _holding_only("d2h"), "gives memory back that to device"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    owner, name, wrong, words = PLANTED[bug]
    found = []
    for seed in range(12):
        with monkeypatch.context() as patch, checked_streams(patch) as checker:
            patch.setattr(owner, name, wrong)
            random_program(seed, checker)
        found += checker.problems
        if any(words in problem for problem in found):
            return
    pytest.fail(f"no problem of these words, but: {found[:3]}")


def test_an_overwrite_before_its_read_is_found(monkeypatch):
    """A block cache that takes another block into a place the computation may still read."""
    with monkeypatch.context() as patch, checked_streams(patch) as checker:
        streams = get_streams(DEVICE, True)
        keys, values = marked(1, 12, DIM), -marked(1, 12, VALUE)
        cache = BlockCache(BlockCacheConfig(tokens=2, block=2, per_step=1), 0, keys, values, DEVICE)
        for block in (0, 4, 8):
            cache.insert(cache.count(torch.full((1, HEADS, 2), block)), [12], keys, values, streams)
            streams.wait(cache.ready)
            _ = cache.keys * 2
            patch.setattr(CopyStreams, "copying", _at_once)
    assert any("to device overwrites what compute may not have read" in problem for problem in checker.problems)


def test_a_cache_that_grows_and_one_whose_rows_are_picked_wait_for_their_blocks(monkeypatch):
    """Only the second row needs more places: the block of the first has not arrived when the buffers change."""
    with monkeypatch.context() as patch, checked_streams(patch) as checker:
        streams, parts = get_streams(DEVICE, True), (marked(2, 20, DIM), -marked(2, 20, VALUE))
        keys, values = (offload.empty_host(tuple(x.shape), x, x.device, pinned=True).copy_(x) for x in parts)
        cache = BlockCache(BlockCacheConfig(tokens=8, block=2, per_step=4), 0, keys, values, DEVICE)
        slots = torch.tensor([[[4, 5, -1, -1]] * HEADS, [[0, 2, 4, 6]] * HEADS])
        assert cache.insert(cache.count(slots), [20, 20], keys, values, streams) == [1, 4]
        picked = cache.index_rows(torch.tensor([1, 0]), streams)
        got = picked.keys[1, :, :2].cpu()
    assert torch.equal(got, keys[0, :, 4:6])
    assert not checker.problems, checker.problems


def test_the_checker_knows_bytes_and_clocks(monkeypatch):
    """By hand: other elements of a buffer do not conflict, the same ones do, and an event in between settles it."""
    with monkeypatch.context() as patch, checked_streams(patch) as checker:
        streams, home = CopyStreams(DEVICE, streams=True), torch.empty(8, pin_memory=True)
        source = placed(torch.ones(4)) * 3
        with streams.copying("d2h"):
            home[:4].copy_(source, non_blocking=True)
        home[4:].fill_(1)
        assert not checker.problems
        event = streams.record("d2h")
        event.synchronize()
        home[:2].fill_(2)
        assert not checker.problems
        with streams.copying("d2h"):
            home[:4].copy_(source, non_blocking=True)
        assert home[2].clone() is not None
        assert len(checker.problems) == 1 and "host reads what to host" in checker.problems[0]


def test_pretended_devices_move_and_copy_when_they_must():
    with pretended():
        x = placed(torch.ones(3))
        assert x.to("cpu").tolist() == x.tolist() == [1.0, 1.0, 1.0]
        assert x.to(torch.float64).device == DEVICE and x.to(x.device) is x
