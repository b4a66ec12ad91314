"""On CUDA: the same indices as on the CPU in float32, a stated bound in bfloat16, and two runs that are identical."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capture_steps import CASES, NEW, case_of, prompts_for
from test_device import WIDE, config_for, seen_by
from test_retrieval import METHODS as RETRIEVAL_METHODS
from test_retrieval import PROMPTS as RETRIEVAL_PROMPTS
from test_retrieval import RELEASED, SCARCE
from tiny import CONFIGS, later, stock

from kvexp.core import Budget
from kvexp.generate import CacheConfig, decode, generate, prefill_together, receipts
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, patch_model, random_model
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, SnapKV, StreamingLLM, Window
from kvexp.retrieval import PQCache
from kvexp.retrieval.index import init_rows, lloyd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = [list(range(3, 26)), list(range(50, 37, -1)), [7, 7, 9, 7, 7, 9, 7, 7, 9, 11, 13, 11, 13, 17]]
HALF = Budget(kv_ratio=0.5)
METHODS = [H2O(), Keyformer(), A2SF(alpha=0.5), TOVA(), Window(), SnapKV(window=3)]


def on(device, family, dtype=torch.float32):
    return patch_model(copy.deepcopy(stock(family)).to(device=device, dtype=dtype))


@pytest.fixture(autouse=True)
def _exact():
    """TensorFloat-32 would round float32 products to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def score_of_positions(state) -> list[dict[int, float]]:
    """Per row and head of a layer, what it holds: the score of every position; which slot holds it is left open."""
    slots = state.slots
    heads = zip(slots.positions.flatten(0, 1).tolist(), slots.score.flatten(0, 1).tolist(), strict=True)
    return [{at: score for at, score in zip(*head, strict=True) if at >= 0} for head in heads]


@pytest.fixture
def before_reorder(monkeypatch):
    """Layers' kept positions whenever beams are about to be reordered.

    After the last token transformers reorders once more, among beams that all have ended and tie at -1e9: which one
    comes first is up to the device, so that what a cache holds after that says nothing.
    """
    seen, reorder = [], EvictionCache.reorder_cache

    def noting(cache, beam_idx):
        seen.append([cache.kept_positions(layer) for layer in range(len(cache.layer_states))])
        reorder(cache, beam_idx)

    monkeypatch.setattr(EvictionCache, "reorder_cache", noting)
    return seen


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("family", CONFIGS)
def test_cpu_and_gpu_keep_the_same_slots(family, method):
    decoding = GenerationParams(9, eos=None)
    cpu, gpu = (generate(on(d, family), PROMPTS, method, HALF, decoding=decoding) for d in ("cpu", "cuda"))
    assert cpu.tokens == gpu.tokens
    for layer in range(2):
        assert cpu.cache.kept_positions(layer) == gpu.cache.kept_positions(layer)
        ours, theirs = (score_of_positions(made.cache.layer_states[layer]) for made in (cpu, gpu))
        for mine, its in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(its, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("family", CONFIGS)
def test_cpu_and_gpu_keep_the_same_slots_of_beams(family, method, before_reorder):
    decoding = GenerationParams(9, num_beams=4, eos=None)
    cpu, gpu = (generate(on(d, family), PROMPTS, method, HALF, decoding=decoding) for d in ("cpu", "cuda"))
    assert cpu.tokens == gpu.tokens
    assert len(before_reorder) == 18 and before_reorder[:9] == before_reorder[9:]


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_keeps_nearly_the_same(family):
    """bfloat16 rounds logits at 2**-8: at least nine in ten of the slots of float32 survive the prompt."""
    exact = generate(on("cuda", family), PROMPTS[:1], H2O(), HALF, decoding=GenerationParams(1))
    rough = generate(on("cuda", family, torch.bfloat16), PROMPTS[:1], H2O(), HALF, decoding=GenerationParams(1))
    pairs = zip(exact.cache.kept_positions(0)[0], rough.cache.kept_positions(0)[0], strict=True)
    shared = [len(set(a) & set(b)) / len(a) for a, b in pairs]
    assert sum(shared) / len(shared) >= 0.9


@pytest.mark.parametrize("method", [Full(), *METHODS], ids=lambda m: m.name)
def test_two_runs_are_identical(method):
    model = on("cuda", "llama", torch.bfloat16)
    budget = None if method.name == "full" else HALF
    first, second = (
        generate(model, PROMPTS, method, budget, decoding=GenerationParams(20), keep_logits=True) for _ in "ab"
    )
    assert first.tokens == second.tokens
    assert all(torch.equal(a, b) for a, b in zip(first.logits, second.logits, strict=True))


@contextmanager
def syncing_forbidden():
    """An operation that waits for the device raises RuntimeError."""
    try:
        with warnings.catch_warnings():  # torch warns once that it knows not every such operation
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_decode_makes_no_host_sync():
    """One decode step of every kind of bookkeeping runs with synchronisation forbidden."""
    model = on("cuda", "llama")
    for method in (H2O(), A2SF(alpha=0.5), Window()):
        cache = EvictionCache(model, method, HALF)
        ids = torch.tensor([PROMPTS[0]], device="cuda")
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            for _ in range(2):
                model(ids[:, :1], past_key_values=cache, position_ids=torch.full((1, 1), 30, device="cuda"))
            with syncing_forbidden():
                model(ids[:, :1], past_key_values=cache, position_ids=torch.full((1, 1), 31, device="cuda"))


def test_renumbered_positions_on_gpu():
    cpu, gpu = (
        generate(on(d, "gptj"), PROMPTS, StreamingLLM(), HALF, decoding=GenerationParams(9)) for d in ("cpu", "cuda")
    )
    assert cpu.tokens == gpu.tokens


def test_state_follows_its_layer_over_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    from accelerate import dispatch_model

    model = copy.deepcopy(stock("llama"))
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    split = patch_model(dispatch_model(model, {**places, "model.rotary_emb": 0}))
    result = generate(split, PROMPTS, H2O(), HALF, decoding=GenerationParams(9))
    assert [s.slots.keys.device.index for s in result.cache.layer_states] == [0, 1]
    assert result.tokens == generate(on("cpu", "llama"), PROMPTS, H2O(), HALF, decoding=GenerationParams(9)).tokens


# On CUDA: what the pretended device's allocator counted on a CPU is what CUDA's caching allocator counts.
#
# The bounds were written without a GPU: what is held between forwards within 1 % and 64 KiB, peaks within a quarter and
# 1 MiB (kernels of other shapes than the CPU's hold other intermediate results).


HERE = Path(__file__).resolve().parents[1]
COUNT = """
import dataclasses, json, sys, torch
from test_device import config_for, held_by
print(json.dumps(dataclasses.asdict(held_by(config_for(sys.argv[1]), getattr(torch, sys.argv[2]), block=512))))
"""


class CachingAllocator:
    """CUDA's, as a `FakeAllocator`."""

    before = 0

    @property
    def bytes(self):
        return torch.cuda.memory_allocated() - self.before

    @property
    def peak_bytes(self):
        return torch.cuda.max_memory_allocated() - self.before

    def begin(self):
        gc.collect()
        self.before = torch.cuda.memory_allocated()
        self.reset_peak()

    def reset_peak(self):
        torch.cuda.reset_peak_memory_stats()


def pretended(name, dtype):
    """The fake allocator's numbers, from a process that sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, name, str(dtype).removeprefix("torch.")],
        cwd=HERE,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(
                map(str, (HERE.parent, HERE, *(path for path in HERE.iterdir() if path.is_dir())))
            ),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "h2o", "keyformer", "snapkv", "window"])
def test_the_fake_allocator_counts_what_the_real_one_does(name, dtype):
    model = patch_model(copy.deepcopy(stock("llama", **WIDE)).to(device="cuda", dtype=dtype))
    seen_by(CachingAllocator(), model, config_for(name))  # libraries take their workspaces
    real, fake = seen_by(CachingAllocator(), model, config_for(name)), pretended(name, dtype)
    print(f"{name}, {dtype}: held {real.held}, fake {fake['held']}; peaks {real.prompt_peak} and {real.step_peak}, ")
    print(f"    fake {fake['prompt_peak']} and {fake['step_peak']}; tracked {real.tracked}")
    assert real.tracked == fake["tracked"] and real.kv == real.tracked[-1]
    for ours, theirs in zip(real.held, fake["held"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.01, abs=64 << 10)
    for peak in ("prompt_peak", "step_peak"):
        assert getattr(real, peak) == pytest.approx(fake[peak], rel=0.25, abs=1 << 20)


# Retrieval on CUDA: the choices and tokens of the CPU, copies that are in time, memory that stays flat.


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", [*RETRIEVAL_METHODS, "released"])
@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_cpu_and_gpu_choose_the_same(family, name, beams, before_reorder):
    method, decoding = RETRIEVAL_METHODS.get(name, RELEASED), GenerationParams(9, num_beams=beams, eos=None)
    cpu, gpu = (generate(on(d, family), RETRIEVAL_PROMPTS, method, SCARCE, decoding=decoding) for d in ("cpu", "cuda"))
    assert cpu.tokens == gpu.tokens
    if beams == 1:
        before_reorder[:] = [[made.cache.kept_positions(layer) for layer in range(2)] for made in (cpu, gpu)]
    half = len(before_reorder) // 2
    assert half and before_reorder[:half] == before_reorder[half:]
    for ours, theirs in zip(receipts(cpu.cache), receipts(gpu.cache), strict=True) if beams == 1 else ():
        for key in ("attended", "moved_bytes", "fetched_bytes", "cache_hit_rate", "kmeans_iterations"):
            assert ours.retrieval[key] == pytest.approx(theirs.retrieval[key]), "what a CPU says would move does move"


@pytest.mark.parametrize("family", CONFIGS)
def test_offloading_changes_nothing(family):
    method = PQCache(n_sinks=2, m=1, b=2, cache_block=2, cache_tokens=4)
    model = on("cuda", family)
    options = {"decoding": GenerationParams(9, eos=None), "keep_logits": True}
    variants = (method, PQCache(n_sinks=2, m=1, b=2, offload=False))
    away, here = (generate(model, RETRIEVAL_PROMPTS, each, SCARCE, **options) for each in variants)
    assert away.tokens == here.tokens
    for a, b in zip(away.logits, here.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("where", ["cpu", "model"])
def test_two_runs_are_identical_wherever_keys_are_clustered(where):
    """Copies that came too late, or sums in another order, would show here."""
    model = random_model("llama", seed=3, dtype="bfloat16", device="cuda", **_BIG)
    prompt = [torch.randint(0, 500, (1500,), generator=torch.Generator().manual_seed(1)).tolist()]
    method = PQCache(cluster_on=where, cache_tokens=512, cache_block=32)
    options = {"decoding": GenerationParams(40, eos=None), "keep_logits": True}
    runs = [generate(model, prompt, method, Budget(kv_ratio=0.2), **options) for _ in range(3)]
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
    held, index, offloaded = {}, {}, {}
    for length in (1000, 4000):
        prompt = [torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(1)).tolist()]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        decoding = GenerationParams(8, eos=None)
        out = generate(model, prompt, PQCache(cache_tokens=512), Budget(tokens=200), decoding=decoding)
        held[length] = torch.cuda.memory_allocated() - before
        index[length] = sum(state.kv_index.entries["codes"].tensor.nbytes for state in out.cache.layer_states)
        offloaded[length] = receipts(out.cache)[0].retrieval["offloaded_bytes"]
        del out
    assert held[4000] - held[1000] < 2 * index[4000] + 2**20
    assert offloaded[4000] > 3.9 * offloaded[1000] > 0


@pytest.mark.parametrize("beams", [1, 4])
def test_everything_but_the_near_is_in_pinned_memory_and_stays_there(beams):
    """Rows that beams pick, and room that was not foreseen."""
    decoding = GenerationParams(5, num_beams=beams, eos=None)
    out = generate(on("cuda", "llama"), RETRIEVAL_PROMPTS, RETRIEVAL_METHODS["pqcache"], SCARCE, decoding=decoding)
    for state in out.cache.layer_states:
        memory, codes = state.memory, state.kv_index.entries["codes"].tensor
        assert memory.keys.device.type == memory.values.device.type == codes.device.type == "cpu"
        assert memory.keys.is_pinned() and memory.values.is_pinned() and memory.pinned
        assert memory.resident[0].ring.device.type == "cuda"
        assert codes.is_pinned() and state.kv_index.pinned


def test_room_that_was_not_foreseen():
    """The cache of `model.generate` does not know how many tokens will come: home and codes grow while copies run."""
    found = []
    for device in ("cpu", "cuda"):
        model = on(device, "llama")
        cache = EvictionCache(model, RETRIEVAL_METHODS["pqcache"], SCARCE)
        ids = torch.tensor(RETRIEVAL_PROMPTS[:1], device=device)
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
            assert held.slots
            for block, place in held.slots.items():
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
    pinned = generate(model, RETRIEVAL_PROMPTS, RETRIEVAL_METHODS["pqcache"], SCARCE, decoding=decoding)
    real = torch.empty

    def refuse(*shape, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    pageable = generate(model, RETRIEVAL_PROMPTS, RETRIEVAL_METHODS["pqcache"], SCARCE, decoding=decoding)
    assert pageable.tokens == pinned.tokens
    notes = receipts(pageable.cache)[0].retrieval["notes"]
    assert any(note.startswith("no more memory could be pinned") for note in notes)


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


# On CUDA: decode steps replayed from a CUDA graph give the tokens, logits, scores and kept sets of eager ones.


DECODING = GenerationParams(NEW, eos=None)


def on_cuda(family, dtype=torch.float32):
    return patch_model(copy.deepcopy(stock(family)).to(device="cuda", dtype=dtype))


def runs(model, method, budget=None, **options):
    """(graph=auto, graph=off)."""
    options |= {"decoding": DECODING, "seeds": [1, 2], "keep_logits": True}
    config = CacheConfig.of(method, budget)
    hows = [replace(config, graph=how) for how in ("auto", "off")]
    return tuple(generate(model, prompts_for(config.method), how, **options) for how in hows)


def alike(made, plain):
    assert made.tokens == plain.tokens
    assert all(torch.equal(a, b) for a, b in zip(made.logits, plain.logits, strict=True))
    for a, b in zip(made.cache.layer_states, plain.cache.layer_states, strict=True):
        assert a.kept_positions() == b.kept_positions() and a.first_eviction == b.first_eviction
        assert torch.equal(a.slots.score, b.slots.score)


def replayed(made):
    return int(made.cuda_graph.partition(" of ")[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_the_eager_ones(case, dtype):
    made, plain = runs(on_cuda("llama", dtype), case_of("llama", case))
    assert plain.cuda_graph is None and replayed(made) > NEW - 9, made.cuda_graph
    alike(made, plain)


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "llama"])
def test_on_every_family(family):
    made, plain = runs(on_cuda(family), case_of(family, "keyformer"))
    assert replayed(made) > NEW - 9, made.cuda_graph
    alike(made, plain)


def test_with_the_triton_kernels():
    pytest.importorskip("triton")
    made, plain = runs(on_cuda("llama"), replace(case_of("llama", "keyformer"), observe="triton"))
    assert replayed(made) > NEW - 9, made.cuda_graph
    alike(made, plain)


def test_caches_that_decode_together():
    model = on_cuda("llama")
    made = {}
    for how in ("auto", "off"):
        variants = [replace(case_of("llama", name), graph=how) for name in ("keyformer", "h2o", "window", "full")]
        contexts = prefill_together(model, prompts_for(), variants, max_new_tokens=NEW, seeds=[1, 2])
        made[how] = decode(model, contexts, GenerationParams(NEW, eos=[7, 11, 19]), [1, 2], None, start=0.0)
    for one, other in zip(made["auto"], made["off"], strict=True):
        assert one.tokens == other.tokens and one.cache.kept_positions(0) == other.cache.kept_positions(0)


def test_what_cannot_be_captured_says_so():
    made, plain = runs(on_cuda("llama"), PQCache(), SCARCE)
    assert made.tokens == plain.tokens and replayed(made) == 0 and "pqcache is not captured" in made.cuda_graph


def test_a_method_that_waits_for_the_device_falls_back():
    """A capture that CUDA refuses leaves a context that still works."""

    class Waits(H2O):
        def priority(self, ctx):
            return ctx.score + float(ctx.score.max()) * 0

    made, plain = runs(on_cuda("llama"), Waits(), Budget(kv_ratio=0.5))
    assert made.tokens == plain.tokens and replayed(made) == 0 and "the capture failed" in made.cuda_graph
    assert torch.full((3,), 2.0, device="cuda").sum().item() == 6.0
