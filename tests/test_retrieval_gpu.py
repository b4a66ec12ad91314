"""Retrieval on CUDA: the choices and tokens of the CPU, copies that are in time, memory that stays flat."""

import pytest
import torch
from test_gpu import _exact, on  # noqa: F401  # the fixture is used by being here
from test_retrieval import LENGTHS, METHODS, PROMPTS, RELEASED, SCARCE
from tiny import CONFIGS, later

from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.models import EvictionCache, random_model
from kvexp.retrieval import Oracle, PQCache
from kvexp.retrieval.kmeans import init_rows, lloyd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", [*METHODS, "released"])
@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_cpu_and_gpu_choose_the_same(family, name, beams):
    method, decoding = METHODS.get(name, RELEASED), GenerationParams(9, num_beams=beams, eos=None)
    cpu, gpu = (generate(on(d, family), PROMPTS, method, SCARCE, decoding=decoding) for d in ("cpu", "cuda"))
    assert cpu.tokens == gpu.tokens
    for layer in range(2):
        assert cpu.cache.kept_positions(layer) == gpu.cache.kept_positions(layer)
    for ours, theirs in zip(receipts(cpu.cache), receipts(gpu.cache), strict=True):
        for key in ("attended", "moved_bytes", "fetched_bytes", "cache_hit_rate", "kmeans_iterations"):
            assert ours.retrieval[key] == pytest.approx(theirs.retrieval[key]), "what a CPU says would move does move"


@pytest.mark.parametrize("family", CONFIGS)
def test_offloading_changes_nothing(family):
    method = PQCache(n_sinks=2, m=1, b=2, cache_block=2, cache_tokens=4)
    model = on("cuda", family)
    away, here = (
        generate(model, PROMPTS, m, SCARCE, decoding=GenerationParams(9, eos=None), keep_logits=True)
        for m in (method, PQCache(n_sinks=2, m=1, b=2, offload=False))
    )
    assert away.tokens == here.tokens
    for a, b in zip(away.logits, here.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_everything_but_the_near_is_in_pinned_memory():
    out = generate(on("cuda", "llama"), PROMPTS, METHODS["pqcache"], SCARCE, decoding=GenerationParams(5, eos=None))
    for state in out.cache.layer_states:
        assert state.memory.keys.device.type == state.memory.values.device.type == "cpu"
        assert state.memory.keys.is_pinned() and state.memory.pinned
        assert state.memory.resident.recent_ring[0].device.type == "cuda"
        assert state.kv_index.entries["codes"].tensor.is_pinned()


@pytest.mark.parametrize("where", ["cpu", "model"])
def test_two_runs_are_identical_wherever_keys_are_clustered(where):
    """Copies that came too late, or sums in another order, would show here."""
    model = random_model("llama", seed=3, dtype="bfloat16", device="cuda", **_BIG)
    prompt = [torch.randint(0, 500, (1500,), generator=torch.Generator().manual_seed(1)).tolist()]
    method = PQCache(cluster_on=where, cache_tokens=512, cache_block=32)
    runs = [
        generate(model, prompt, method, Budget(kv_ratio=0.2), decoding=GenerationParams(40, eos=None), keep_logits=True)
        for _ in range(3)
    ]
    for other in runs[1:]:
        assert other.tokens == runs[0].tokens
        assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, other.logits, strict=True))


def test_clusters_are_those_of_the_cpu():
    points = torch.randn(6, 1500, 32, generator=torch.Generator().manual_seed(2))
    start = init_rows(1500, 64, 4321)
    cpu, gpu = lloyd(points, start, 10), lloyd(points.cuda(), start, 10)
    assert (cpu.labels == gpu.labels.cpu()).float().mean() > 0.999  # sums round differently, borders may tip
    torch.testing.assert_close(cpu.centroids, gpu.centroids.cpu(), atol=1e-2, rtol=0)


def test_memory_stays_flat_in_the_length_of_the_prompt():
    """A fixed number of tokens is attended to: four times the prompt holds as much there but for codes."""
    model = random_model("llama", seed=3, dtype="bfloat16", device="cuda", **_BIG)
    held, index = {}, {}
    for length in (1000, 4000):
        prompt = [torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(1)).tolist()]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = generate(
            model, prompt, PQCache(cache_tokens=512), Budget(tokens=200), decoding=GenerationParams(8, eos=None)
        )
        held[length] = torch.cuda.memory_allocated() - before
        index[length] = sum(state.kv_index.entries["codes"].tensor.nbytes for state in out.cache.layer_states)
        assert receipts(out.cache)[0].retrieval["offloaded_bytes"] > 8 * receipts(out.cache)[0].kv_bytes / 4
        del out
    assert held[4000] - held[1000] < 2 * index[4000] + 2**20


@pytest.mark.parametrize("beams", [1, 4])
def test_pinned_memory_stays_pinned(beams):
    """Rows that beams pick, and room that was not foreseen."""
    model, method = on("cuda", "llama"), METHODS["pqcache"]
    out = generate(model, PROMPTS, method, SCARCE, decoding=GenerationParams(5, num_beams=beams, eos=None))
    for state in out.cache.layer_states:
        assert state.memory.keys.is_pinned() and state.memory.values.is_pinned() and state.memory.pinned
        assert state.kv_index.entries["codes"].tensor.is_pinned() and state.kv_index.pinned


def test_room_that_was_not_foreseen():
    """The cache of `model.generate` does not know how many tokens will come: home and codes grow while copies run."""
    found = []
    for device in ("cpu", "cuda"):
        model = on(device, "llama")
        cache, ids = EvictionCache(model, METHODS["pqcache"], SCARCE), torch.tensor(PROMPTS[:1], device=device)
        with torch.inference_mode():
            made = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1]]
            for token in later(5, 1, 70).to(device).split(1, dim=1):
                made.append(model(token, past_key_values=cache, use_cache=True).logits[:, -1])
        found.append(torch.cat(made).cpu())
        assert device == "cpu" or cache.layer_states[0].memory.keys.is_pinned()
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_cached_blocks_hold_what_home_holds(policy):
    """Batch rows fill and replace blocks of a small cache for many steps, on a stream of their own."""
    model = random_model("llama", seed=3, dtype="bfloat16", device="cuda", **_BIG)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 500, (n,), generator=generator).tolist() for n in (900, 400, 700)]
    method = PQCache(cache_tokens=256, cache_block=32, cache_policy=policy, cache_blocks_per_step=8)
    out = generate(model, prompts, method, Budget(kv_ratio=0.2), decoding=GenerationParams(40, eos=None))
    torch.cuda.synchronize()
    for state in out.cache.layer_states:
        memory, cache = state.memory, state.memory.cache
        memory.flush()
        for row, held in enumerate(cache.policies):
            assert held.places
            for block, place in held.places.items():
                start, at = cache.first + block * 32, place * 32
                for mine, home in ((cache.keys, memory.keys), (cache.values, memory.values)):
                    assert torch.equal(mine[row, :, at : at + 32].cpu(), home[row, :, start : start + 32])


def test_clustering_waits_for_no_computation():
    """The host clusters while the device is busy with something long: it must be done before the device is."""
    model = random_model("llama", seed=3, dtype="bfloat16", device="cuda", **_BIG)
    ids = torch.randint(0, 500, (1, 600), generator=torch.Generator().manual_seed(1)).cuda()
    for turn in range(2):  # the first warms up
        cache = EvictionCache(model, PQCache(max_iter=1), Budget(kv_ratio=0.2), max_new_tokens=8)
        with torch.inference_mode():
            model(ids, past_key_values=cache, use_cache=True)
            torch.cuda._sleep(20_000_000_000 if turn else 1)  # about ten seconds, behind the prompt on its stream
            end = torch.cuda.Event()
            end.record()
            for state in cache.layer_states:
                state.index_job.wait()
            if turn:
                assert not end.query(), "the index was waiting for the device"
        torch.cuda.synchronize()


def test_no_pinned_memory_left_is_noted_and_changes_no_token(monkeypatch):
    model, decoding = on("cuda", "llama"), GenerationParams(7, eos=None)
    pinned = generate(model, PROMPTS, METHODS["pqcache"], SCARCE, decoding=decoding)
    real = torch.empty

    def refuse(*shape, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    pageable = generate(model, PROMPTS, METHODS["pqcache"], SCARCE, decoding=decoding)
    assert pageable.tokens == pinned.tokens
    notes = receipts(pageable.cache)[0].retrieval["notes"]
    assert any(note.startswith("no more memory could be pinned") for note in notes)


def test_oracle_in_half_precision_keeps_nearly_the_same():
    exact, rough = (
        generate(
            on("cuda", "llama", dtype), PROMPTS[:1], Oracle(n_sinks=2), SCARCE, decoding=GenerationParams(2, eos=None)
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    pairs = zip(exact.cache.kept_positions(0)[0], rough.cache.kept_positions(0)[0], strict=True)
    shared = [len(set(a) & set(b)) / len(a) for a, b in pairs]
    assert sum(shared) / len(shared) >= 0.8
    assert len(PROMPTS[0]) == LENGTHS[0]


_BIG = {
    "vocab_size": 500,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
