"""Retrieval on CUDA: the choices and tokens of the CPU, copies that are in time, memory that stays flat."""

import copy

import pytest
import torch
from test_retrieval import LENGTHS, METHODS, PROMPTS, RELEASED, SCARCE
from tiny import CONFIGS, stock

from kvexp.core import Budget
from kvexp.generate import Decoding, generate, receipts
from kvexp.models import install, random_model
from kvexp.retrieval import Oracle, PQCache
from kvexp.retrieval.kmeans import lloyd, starting_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on(device, family, dtype=torch.float32):
    return install(copy.deepcopy(stock(family)).to(device=device, dtype=dtype))


@pytest.fixture(autouse=True)
def _exact():
    """TensorFloat-32 would round float32 products to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", [*METHODS, "released"])
@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_cpu_and_gpu_choose_the_same(family, name, beams):
    method, decoding = METHODS.get(name, RELEASED), Decoding(9, num_beams=beams, eos=None)
    cpu, gpu = (generate(on(d, family), PROMPTS, method, SCARCE, decoding=decoding) for d in ("cpu", "cuda"))
    assert cpu.tokens == gpu.tokens
    for layer in range(2):
        assert cpu.cache.kept(layer) == gpu.cache.kept(layer)
    for ours, theirs in zip(receipts(cpu.cache), receipts(gpu.cache), strict=True):
        for key in ("attended", "moved_bytes", "fetched_bytes", "cache_hit_rate", "kmeans_iterations"):
            assert ours.retrieval[key] == pytest.approx(theirs.retrieval[key]), "what a CPU says would move does move"


@pytest.mark.parametrize("family", CONFIGS)
def test_offloading_changes_nothing(family):
    method = PQCache(n_sinks=2, m=1, b=2, cache_block=2, cache_tokens=4)
    model = on("cuda", family)
    away, here = (
        generate(model, PROMPTS, m, SCARCE, decoding=Decoding(9, eos=None), keep_logits=True)
        for m in (method, PQCache(n_sinks=2, m=1, b=2, offload=False))
    )
    assert away.tokens == here.tokens
    for a, b in zip(away.logits, here.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_everything_but_the_near_is_in_pinned_memory():
    out = generate(on("cuda", "llama"), PROMPTS, METHODS["pqcache"], SCARCE, decoding=Decoding(5, eos=None))
    for state in out.cache.states:
        assert state.memory.keys.device.type == state.memory.values.device.type == "cpu"
        assert state.memory.keys.is_pinned() and state.memory.pinned
        assert state.memory.near.ring[0].device.type == "cuda"
        assert state.known.entries["codes"].tensor.is_pinned()


@pytest.mark.parametrize("where", ["cpu", "model"])
def test_two_runs_are_identical_wherever_keys_are_clustered(where):
    """Copies that came too late, or sums in another order, would show here."""
    model = random_model("llama", seed=3, dtype="bfloat16", device="cuda", **_BIG)
    prompt = [torch.randint(0, 500, (1500,), generator=torch.Generator().manual_seed(1)).tolist()]
    method = PQCache(cluster_on=where, cache_tokens=512, cache_block=32)
    runs = [
        generate(model, prompt, method, Budget(kv_ratio=0.2), decoding=Decoding(40, eos=None), keep_logits=True)
        for _ in range(3)
    ]
    for other in runs[1:]:
        assert other.tokens == runs[0].tokens
        assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, other.logits, strict=True))


def test_clusters_are_those_of_the_cpu():
    points = torch.randn(6, 1500, 32, generator=torch.Generator().manual_seed(2))
    start = starting_rows(1500, 64, 4321)
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
        out = generate(model, prompt, PQCache(cache_tokens=512), Budget(tokens=200), decoding=Decoding(8, eos=None))
        held[length] = torch.cuda.memory_allocated() - before
        index[length] = sum(state.known.entries["codes"].tensor.nbytes for state in out.cache.states)
        assert receipts(out.cache)[0].retrieval["offloaded_bytes"] > 8 * receipts(out.cache)[0].kv_bytes / 4
        del out
    assert held[4000] - held[1000] < 2 * index[4000] + 2**20


def test_oracle_in_half_precision_keeps_nearly_the_same():
    exact, rough = (
        generate(on("cuda", "llama", dtype), PROMPTS[:1], Oracle(n_sinks=2), SCARCE, decoding=Decoding(2, eos=None))
        for dtype in (torch.float32, torch.bfloat16)
    )
    pairs = zip(exact.cache.kept(0)[0], rough.cache.kept(0)[0], strict=True)
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
