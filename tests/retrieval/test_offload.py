"""Places of tokens: what is fetched equals what was stored, byte by byte, and every byte that moves is counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.offload import (
    BackgroundTask,
    BlockCacheConfig,
    BlockPolicy,
    OffloadConfig,
    OffloadedKV,
    empty_host,
    get_streams,
    step_layout,
)

HEADS, DIM, VALUE = 3, 5, 7
TOKEN = (DIM + VALUE) * 4  # bytes of a key and a value in one head


def marked(batch, count, dim):
    """[B, H, S, D] in which every number tells row, head, column and component apart."""
    parts = (torch.arange(n).float() for n in (batch, HEADS, count, dim))
    b, h, s, d = torch.meshgrid(*parts, indexing="ij")
    return 1000 * b + 100 * h + s + d / 100 + 0.001


def memory(lengths, sinks=2, local=(1, 3), columns=11, **layout):
    keys, values = marked(len(lengths), columns, DIM), -marked(len(lengths), columns, VALUE)
    plan = OffloadConfig(sinks, list(local)[: len(lengths)], layout.pop("room", columns), **layout)
    return keys, values, OffloadedKV(keys, values, list(lengths), plan)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 11), min_size=2, max_size=2),
    local=st.lists(st.integers(0, 6), min_size=2, max_size=2),
    sinks=st.integers(0, 4),
    new=st.integers(0, 9),
)
def test_every_token_is_where_it_should_be(lengths, local, sinks, new):
    """Near and home hold the same tokens after any number of new ones, also where a row is shorter than its sinks."""
    columns = max(lengths)
    keys, _, held = memory(lengths, sinks=sinks, local=local, columns=columns)
    truth = [[keys[i, :, columns - n + p] for p in range(n)] for i, n in enumerate(lengths)]
    for step in range(new):
        key = torch.full((2, HEADS, 1, DIM), 5000.0 + step) + torch.arange(2)[:, None, None, None]
        held.add(key, torch.zeros(2, HEADS, 1, VALUE))
        for row in range(2):
            truth[row].append(key[row, :, 0])
    assert held.lengths == [n + new for n in lengths]
    layout = step_layout(held.lengths, held.config.local, sinks, torch.device("cpu"))
    near = [(held.resident[0].sinks, layout.first), (held.resident[0].window(torch.tensor(held.lengths)), layout.last)]
    for row, (n, past) in enumerate(zip(held.lengths, local, strict=True)):
        slots = torch.full((2, HEADS, n), -1)
        slots[row] = torch.arange(n)
        got = held.fetch(slots)[0][row]
        for p in range(n):
            assert torch.equal(got[:, p], truth[row][p])
        there = []
        for k, positions in near:
            for place, p in enumerate(positions[row, 0].tolist()):
                if p >= 0:
                    there.append(p)
                    assert torch.equal(k[row, :, place], truth[row][p])
        assert sorted(there) == sorted(set(range(min(sinks, n))) | set(range(max(sinks, n - 1 - past), n)))


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    local=st.lists(st.integers(0, 6), min_size=2, max_size=2),
    sinks=st.integers(0, 4),
    count=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_a_read_at_once_is_a_read_in_parts(lengths, local, sinks, count, seed):
    """Keys, values, positions and transfers of one gather from home, and of sinks, fetched slots and window."""
    layout = {"columns": max(lengths), "room": 50, "cache": BlockCacheConfig(8, 2, per_step=3)}
    _, _, whole = memory(lengths, sinks=sinks, local=local, **layout)
    _, _, parts = memory(lengths, sinks=sinks, local=local, **layout)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(4):
        new = torch.rand(2, HEADS, 1, DIM, generator=drawn), torch.rand(2, HEADS, 1, VALUE, generator=drawn)
        for held in (whole, parts):
            held.add(*new)
        slots = torch.stack([torch.randint(-1, n + 1, (HEADS, count), generator=drawn) for n in lengths])
        keys, values, positions, complete = whole.read(slots)
        each = zip(parts.resident, parts.fetch(slots), strict=True)
        live = positions >= 0
        assert complete == bool(live.all())
        assert torch.equal(positions[:, :, sinks : sinks + count], slots)
        for got, (near, far) in zip((keys, values), each, strict=True):
            expected = torch.cat([near.sinks, far, near.window(torch.tensor(parts.lengths))], dim=2)
            assert torch.equal(got[live], expected[live])
            assert (got[~live] == 0).all()
        assert whole.traffic == parts.traffic
        assert [one.slots for one in whole.cache.policies] == [one.slots for one in parts.cache.policies]


def test_room_grows_and_nothing_is_lost():
    keys, _, held = memory((3,), columns=3, room=3, local=(1,))
    for step in range(150):
        held.add(torch.full((1, HEADS, 1, DIM), float(step)), torch.zeros(1, HEADS, 1, VALUE))
    k, _ = held.fetch(torch.tensor([[[0, 2, 3, 152]] * HEADS]))
    assert torch.equal(k[0, :, :2], keys[0][:, [0, 2]])
    assert (k[0, :, 2] == 0).all() and (k[0, :, 3] == 149).all()


def test_bytes_are_counted():
    """3 heads x 48 bytes per token: 17 tokens out; 3 heads x 4 rows in, then one more token out."""
    _, _, held = memory((11, 6))
    assert [row.d2h for row in held.traffic] == [11 * HEADS * TOKEN, 6 * HEADS * TOKEN]
    held.fetch(torch.tensor([[[2, 3, 4]] * HEADS, [[3, -1, -1]] * HEADS]))
    assert [row.h2d for row in held.traffic] == [3 * HEADS * TOKEN, HEADS * TOKEN]
    held.add(torch.zeros(2, HEADS, 1, DIM), torch.zeros(2, HEADS, 1, VALUE))
    assert held.traffic[0].d2h == 12 * HEADS * TOKEN
    held.all_keys()
    assert held.traffic[0].h2d == 3 * HEADS * TOKEN + 12 * HEADS * DIM * 4
    held.components(torch.zeros(2, HEADS, 2, dtype=torch.int64))
    assert held.traffic[1].h2d == HEADS * TOKEN + 7 * HEADS * (DIM + 2) * 4
    assert held.host_bytes == 2 * 12 * HEADS * TOKEN or held.host_bytes > 2 * 12 * HEADS * TOKEN  # room to grow
    assert held.resident_bytes == 2 * (2 + 4) * HEADS * TOKEN


def test_nothing_is_counted_where_nothing_leaves():
    _, _, held = memory((11, 6), offload=False, cache=BlockCacheConfig(4, 2))
    held.fetch(torch.tensor([[[2, 3, 4]] * HEADS, [[3, -1, -1]] * HEADS]))
    held.all_keys()
    assert [(row.d2h, row.h2d) for row in held.traffic] == [(0, 0), (0, 0)]
    assert held.cache is None


def test_components_are_gathered():
    keys, _, held = memory((11, 11))
    dims = torch.tensor([[[4, 0]] * HEADS, [[1, 2]] * HEADS])
    assert torch.equal(held.components(dims), torch.stack([keys[0][..., [4, 0]], keys[1][..., [1, 2]]]))


def test_rows_move_together():
    keys, _, held = memory((11, 6), cache=BlockCacheConfig(4, 2))
    held.fetch(torch.tensor([[[4, 5]] * HEADS, [[2, -1]] * HEADS]))
    other = held.index_rows(torch.tensor([1, 0, 1]))
    held.add(torch.zeros(2, HEADS, 1, DIM), torch.zeros(2, HEADS, 1, VALUE))  # the first goes its own way
    assert other.lengths == [6, 11, 6]
    assert other.config.local == [3, 1, 3]
    k, _ = other.fetch(torch.tensor([[[3]] * HEADS, [[4]] * HEADS, [[0]] * HEADS]))
    assert torch.equal(k[0, :, 0], keys[1][:, 8])
    assert torch.equal(k[1, :, 0], keys[0][:, 4])
    assert torch.equal(k[2, :, 0], keys[1][:, 5])
    assert [row.hits for row in other.traffic] == [0, HEADS, 0]
    assert held.traffic[0].hits == 0


# -- blocks on the device ----------------------------------------------------------------------------------------------


def test_blocks_hit_from_the_step_after_and_are_counted():
    """Blocks of two after two sinks: 2 3 | 4 5 | 6 7 | 8 ..., the window starts at 9. Capacity: two blocks."""
    keys, _, held = memory((11,), local=(1,), cache=BlockCacheConfig(tokens=4, block=2, policy="lfu", per_step=2))
    row = held.traffic[0]
    held.fetch(torch.tensor([[[4, 5, 6]] * HEADS]))
    assert (row.lookups, row.hits) == (3 * HEADS, 0)
    # Three rows per head, then blocks 4 5 and 6 7 come to the device.
    assert row.h2d == 3 * HEADS * TOKEN + 2 * 2 * HEADS * TOKEN
    k, _ = held.fetch(torch.tensor([[[7, 4, 8]] * HEADS]))
    assert (row.lookups, row.hits) == (6 * HEADS, 2 * HEADS)
    assert torch.equal(k[0], keys[0][:, [7, 4, 8]])


def test_a_block_that_may_still_change_stays_out():
    """In PQCache's release the half filled last block is cached, and what comes into it later is read stale."""
    keys, _, held = memory((11,), local=(1,), cache=BlockCacheConfig(tokens=8, block=2, per_step=4))
    held.fetch(torch.tensor([[[8]] * HEADS]))  # block 8 9, of which 9 is still in the window
    assert held.cache.policies[0].slots == {}
    held.add(torch.full((1, HEADS, 1, DIM), 7.0), torch.zeros(1, HEADS, 1, VALUE))
    held.add(torch.full((1, HEADS, 1, DIM), 8.0), torch.zeros(1, HEADS, 1, VALUE))
    held.fetch(torch.tensor([[[8]] * HEADS]))
    assert held.cache.policies[0].slots == {3: 0}
    k, _ = held.fetch(torch.tensor([[[8, 9]] * HEADS]))
    assert torch.equal(k[0], keys[0][:, [8, 9]])
    assert held.traffic[0].hits == 2 * HEADS


def test_heads_share_blocks_and_the_most_wanted_come_first():
    _, _, held = memory((11,), local=(1,), cache=BlockCacheConfig(tokens=2, block=2, per_step=1))
    slots = torch.tensor([[[2, 4, 5], [4, 6, 7], [4, 5, 7]]])  # block 0: 1, block 1: 5, block 2: 3
    held.fetch(slots)
    assert held.cache.policies[0].slots == {1: 0}


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["lfu", "lru"]),
    block=st.integers(1, 4),
    tokens=st.integers(4, 12),
    per_step=st.integers(1, 5),
)
def test_what_comes_out_of_the_cache_is_what_was_stored(data, policy, block, tokens, per_step):
    """Long runs of fetches and new tokens: never a stale or foreign row, and at most the capacity is held."""
    _, _, held = memory((11, 7), cache=BlockCacheConfig(tokens, block, policy, per_step))
    for step in range(12):
        held.add(torch.full((2, HEADS, 1, DIM), -10.0 - step), torch.full((2, HEADS, 1, VALUE), 10.0 + step))
        slots = torch.tensor(
            [
                [sorted(data.draw(st.lists(st.integers(2, n - 5), min_size=3, max_size=3))) for _ in range(HEADS)]
                for n in held.lengths
            ]
        )
        k, v = held.fetch(slots)
        index = slots[..., None]
        assert torch.equal(k, held.keys.gather(2, index.expand(-1, -1, -1, DIM)))
        assert torch.equal(v, held.values.gather(2, index.expand(-1, -1, -1, VALUE)))
        for places in (p.slots for p in held.cache.policies):
            assert len(places) <= tokens // block
            assert len(set(places.values())) == len(places)
    assert held.cache.keys.shape[2] <= tokens // block * block


def test_policies_by_hand():
    """LFU: 1 is used twice, 2 and 3 once, 2 came first: 2 goes. LRU: 1 was used longest ago after 2 3."""
    lfu, lru = BlockPolicy("lfu", 3), BlockPolicy("lru", 3)
    for block in (1, 1, 2, 3, 4):
        lfu.insert(block)
    for block in (1, 2, 3, 4, 2, 5):
        lru.insert(block)
    assert set(lfu.slots) == {1, 3, 4}
    assert lfu.slots[4] == 1, "in the place of 2"
    assert set(lru.slots) == {2, 4, 5}


# -- the index and the rest --------------------------------------------------------------------------------------------


def test_an_index_grows_writes_and_moves_with_the_rows():
    index = KVIndex()
    index.register("codes", torch.zeros(2, HEADS, 4, 2, dtype=torch.uint8), per=1)
    index.register("pages", torch.zeros(2, HEADS, 2, DIM), per=3)
    index.register("sum", torch.arange(2.0)[:, None])
    index.notes["exact"] = [True, False]
    index.write("codes", [3, 80], torch.full((2, HEADS, 2), 9))
    assert index["codes"].shape[2] > 80 and index["pages"].shape[2] * 3 > 80
    assert index["codes"].dtype == torch.uint8
    assert (index["codes"][0, :, 3] == 9).all() and (index["codes"][1, :, 80] == 9).all()
    assert index["codes"].sum() == 2 * HEADS * 2 * 9
    other = index.index_rows(torch.tensor([1, 1, 0]))
    assert other.notes == {"exact": [False, False, True]}
    assert other["sum"][:, 0].tolist() == [1, 1, 0]
    index.write("codes", [0, 0], torch.full((2, HEADS, 2), 5))
    assert (other["codes"][2, :, 0] == 0).all()


def test_on_a_cpu_nothing_is_shipped_but_it_is_counted_apart():
    index = KVIndex()
    index.copy_streams = get_streams(torch.device("cpu"), False)
    index.register("codes", torch.zeros(1, HEADS, 4, 2, dtype=torch.uint8), per=1, home=torch.device("cpu"))
    index.register("centroids", torch.zeros(1, HEADS, 4))
    index.prefetch()
    assert index.nbytes(ship=True) == HEADS * 8
    assert index.nbytes(ship=False) == HEADS * 16


def test_memory_that_cannot_be_pinned_is_ordinary(monkeypatch):
    def refuse(*_, pin_memory=False, **__):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*_, **__)

    real = torch.empty
    monkeypatch.setattr(torch, "empty", refuse)
    assert empty_host((2, 3), torch.zeros(1), torch.device("cpu"), pinned=True).shape == (2, 3)


def test_later_runs_once_and_raises_what_it_raised():
    calls = []
    job = BackgroundTask(lambda: calls.append(1), run_async=False)
    assert not job.done and not calls
    job.wait(), job.wait()
    assert job.done and calls == [1]
    beside = BackgroundTask(lambda: calls.append(2), run_async=True)
    beside.wait()
    assert calls == [1, 2]

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        BackgroundTask(fail, run_async=True).wait()
