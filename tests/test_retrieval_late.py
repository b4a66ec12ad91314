"""Nothing reads what a copy stream has not brought yet: the same answers with copies at once and at the last moment."""

import pytest
import torch
from late import LateCopyStreams
from test_offload import DIM, HEADS, VALUE, marked
from test_retrieval import METHODS, PROMPTS, RELEASED, SCARCE
from tiny import later, tiny

from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate, prefill, receipts
from kvexp.generate.api import generate_from_context
from kvexp.models import EvictionCache
from kvexp.retrieval import PQCache, offload
from kvexp.retrieval.block_cache import BlockCache, BlockCacheConfig
from kvexp.retrieval.kv_index import KVIndex
from kvexp.retrieval.offload import OffloadedKV
from kvexp.retrieval.offload_config import OffloadConfig


@pytest.fixture
def late(monkeypatch):
    """Device and home are both the CPU, but are taken for different ones with slow copies between them.

    `pinned`: of all memory that `empty_host` has made, whether it was to be pinned; here it only seems to be.
    """
    copy_streams, real = LateCopyStreams(), torch.empty
    copy_streams.pinned = []

    def empty(*shape, pin_memory=None, **options):
        if pin_memory is not None:
            copy_streams.pinned.append(pin_memory)
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(offload, "should_offload", lambda config, device: config.offload)
    monkeypatch.setattr(offload, "get_streams", lambda device, offloaded: copy_streams)
    return copy_streams


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", [*METHODS, "released"])
def test_answers_do_not_depend_on_when_copies_arrive(late, monkeypatch, name, beams):
    method, decoding = METHODS.get(name, RELEASED), GenerationParams(9, num_beams=beams, eos=None)
    slow = generate(tiny("llama"), PROMPTS, method, SCARCE, decoding=decoding)
    monkeypatch.undo()
    quick = generate(tiny("llama"), PROMPTS, method, SCARCE, decoding=decoding)
    assert slow.tokens == quick.tokens
    for layer in range(2):
        assert slow.cache.kept_positions(layer) == quick.cache.kept_positions(layer)
    for a, b in zip(receipts(slow.cache), receipts(quick.cache), strict=True):
        for key in ("attended", "moved_bytes", "fetched_bytes", "cache_hit_rate", "kmeans_iterations", "notes"):
            assert a.retrieval[key] == b.retrieval[key], key
    if method.offload:
        assert late.waits > 0, "or nothing was late"


@pytest.mark.parametrize("window", [0.0, 0.5])
def test_codes_that_were_fetched_for_nothing_are_fetched_again(late, monkeypatch, window):
    """As long as all candidates fit, nobody asks for codes; those that came meanwhile know no later token.

    Without a recent window the newest candidate is the token before, so a code that is a step too old would show.
    """
    method, logits = PQCache(n_sinks=2, m=1, b=2, recent_ratio=window, cache_tokens=0), []
    for _ in range(2):
        made = generate(
            tiny("llama"),
            [PROMPTS[1]],
            method,
            Budget(tokens=17),
            decoding=GenerationParams(16, eos=None),
            keep_logits=True,
        )
        logits.append(torch.stack(made.logits))
        monkeypatch.undo()
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=0)


def test_room_that_was_not_foreseen_is_made_while_codes_are_on_their_way(late, monkeypatch):
    """The cache of `model.generate` does not know how many tokens will come."""
    model, logits = tiny("llama"), []
    for _ in range(2):
        cache = EvictionCache(model, METHODS["pqcache"], SCARCE)
        ids = torch.tensor(PROMPTS[:1])
        with torch.inference_mode():
            made = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1]]
            for token in later(5, 1, 70).split(1, dim=1):
                made.append(model(token, past_key_values=cache, use_cache=True).logits[:, -1])
        logits.append(torch.cat(made))
        monkeypatch.undo()
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)


def test_a_context_forks_while_blocks_are_on_their_way(late, monkeypatch):
    model, decoding = tiny("llama"), GenerationParams(7, eos=None)
    method = PQCache(n_sinks=2, m=1, b=2, cache_block=2, cache_tokens=6)
    found = []
    for _ in range(2):
        context = prefill(model, [PROMPTS[0]], method, SCARCE, max_new_tokens=40)
        first = generate_from_context(model, context.fork([0]), [list(range(37, 41))], decoding=decoding)
        again = generate_from_context(model, context.fork([0, 0]), [list(range(45, 49))] * 2, decoding=decoding)
        found.append((first.tokens, again.tokens))
        monkeypatch.undo()
    assert found[0] == found[1]


def test_a_cache_that_grows_takes_along_what_is_on_its_way():
    """Two rows, and only the second needs more places: the block of the first has not arrived when buffers change."""
    keys, values, copy_streams = marked(2, 20, DIM), -marked(2, 20, VALUE), LateCopyStreams()
    cache = BlockCache(BlockCacheConfig(tokens=8, block=2, per_step=4), 0, keys, values, torch.device("cpu"))
    slots = torch.tensor([[[4, 5, -1, -1, -1, -1]] * HEADS, [[0, 2, 4, 6, -1, -1]] * HEADS])
    assert cache.update(slots, [20, 20], keys, values, copy_streams) == [1, 4]
    copy_streams.wait(cache.ready)
    held = cache.lookup(slots)
    assert (held >= 0).sum() == HEADS * (2 + 4)
    for row in range(2):
        for head in range(HEADS):
            for slot, at in zip(slots[row, head].tolist(), held[row, head].tolist(), strict=True):
                if at >= 0:
                    assert torch.equal(cache.keys.view(-1, DIM)[at], keys[row, head, slot])
                    assert torch.equal(cache.values.view(-1, VALUE)[at], values[row, head, slot])


def test_rows_are_picked_once_their_blocks_have_come(late):
    keys, values = marked(2, 11, DIM), -marked(2, 11, VALUE)
    held = OffloadedKV(keys, values, [11, 11], OffloadConfig(2, [1, 1], 11, cache=BlockCacheConfig(4, 2)))
    held.fetch(torch.tensor([[[4, 5]] * HEADS, [[2, -1]] * HEADS]))
    other = held.index_rows(torch.tensor([1, 0]))
    k, _ = other.fetch(torch.tensor([[[3]] * HEADS, [[4]] * HEADS]))
    assert [row.hits for row in other.traffic] == [HEADS, HEADS]
    assert torch.equal(k[:, :, 0], torch.stack([keys[1, :, 3], keys[0, :, 4]]))


def test_what_a_host_job_made_comes_to_the_device_when_it_is_asked_for():
    """A copy in the job itself would wait for all the prefill that was issued before it."""
    index = KVIndex()
    index.copy_streams = LateCopyStreams()
    made = torch.arange(4.0)[None]
    index.register("centroids", made)
    assert index.entries["centroids"].tensor is made
    assert torch.equal(index["centroids"], made)


def test_memory_that_is_pinned_stays_pinned(late):
    """Growing, and the rows of beams: ordinary memory there would make every later copy wait."""
    keys, values = marked(2, 11, DIM), -marked(2, 11, VALUE)
    held = OffloadedKV(keys, values, [11, 11], OffloadConfig(2, [1, 1], 11))
    other = held.index_rows(torch.tensor([0, 0, 1]))
    index = KVIndex()
    index.copy_streams = late
    index.register("codes", torch.zeros(2, HEADS, 4, 1), per=1, home=torch.device("cpu"))
    index.index_rows(torch.tensor([1])).grow(50)
    assert late.pinned == [True] * (2 + 2 + 1 + 2)
    assert other.pinned and index.pinned
