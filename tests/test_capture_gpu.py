"""On CUDA: decode steps replayed from a CUDA graph give the tokens, logits, scores and kept sets of eager ones."""

import copy
import time

import pytest
import torch
from capture_steps import CASES, NEW, prompts_for
from tiny import CONFIGS, stock

from kvexp.core import Budget
from kvexp.generate import CacheConfig, GenerationParams, decode, generate, prefill_together
from kvexp.methods import H2O, Full
from kvexp.models import patch_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DECODING = GenerationParams(NEW, eos=None)


def on_cuda(family, dtype=torch.float32):
    return patch_model(copy.deepcopy(stock(family)).to(device="cuda", dtype=dtype))


def runs(model, method, budget, **options):
    """(graph=auto, graph=off)."""
    made = [
        generate(
            model,
            prompts_for(method),
            method,
            budget,
            decoding=DECODING,
            seeds=[1, 2],
            keep_logits=True,
            graph=how,
            **options,
        )
        for how in ("auto", "off")
    ]
    return made[0], made[1]


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
    made, plain = runs(on_cuda("llama", dtype), *CASES[case])
    assert plain.cuda_graph is None and replayed(made) > NEW - 9, made.cuda_graph
    alike(made, plain)


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "llama"])
def test_on_every_family(family):
    made, plain = runs(on_cuda(family), *CASES["keyformer"])
    assert replayed(made) > NEW - 9, made.cuda_graph
    alike(made, plain)


def test_with_the_triton_kernels():
    pytest.importorskip("triton")
    made, plain = runs(on_cuda("llama"), *CASES["keyformer"], observe="triton")
    assert replayed(made) > NEW - 9, made.cuda_graph
    alike(made, plain)


def test_caches_that_decode_together():
    model = on_cuda("llama")
    made = {}
    for how in ("auto", "off"):
        variants = [CacheConfig(*CASES[name], graph=how) for name in ("keyformer", "h2o", "window")]
        contexts = prefill_together(model, prompts_for(), variants, max_new_tokens=NEW, seeds=[1, 2])
        made[how] = decode(model, contexts, GenerationParams(NEW, eos=[7, 11, 19]), [1, 2], None, start=0.0)
    for one, other in zip(made["auto"], made["off"], strict=True):
        assert one.tokens == other.tokens and one.cache.kept_positions(0) == other.cache.kept_positions(0)


def test_what_cannot_be_captured_says_so():
    made, plain = runs(on_cuda("llama"), Full(), None)
    assert made.tokens == plain.tokens and replayed(made) == 0 and "full is not captured" in made.cuda_graph


def test_a_method_that_waits_for_the_device_falls_back():
    """A capture that CUDA refuses leaves a context that still works."""

    class Waits(H2O):
        def priority(self, ctx):
            return ctx.score + float(ctx.score.max()) * 0

    made, plain = runs(on_cuda("llama"), Waits(), Budget(kv_ratio=0.5))
    assert made.tokens == plain.tokens and replayed(made) == 0 and "the capture failed" in made.cuda_graph
    assert torch.cuda.FloatTensor(3).fill_(2.0).sum().item() == 6.0


def test_times_are_told():
    """Not a bar: seconds per token of both ways, for the report."""
    model = on_cuda("llama", torch.bfloat16)
    for how in ("off", "auto", "off", "auto"):
        start = time.perf_counter()
        made = generate(model, prompts_for(), *CASES["h2o"], decoding=GenerationParams(120, eos=None), graph=how)
        print(f"graph={how}: {made.timing.tpot_s * 1e3:.3f} ms per token, {time.perf_counter() - start:.2f} s in all")
        assert made.timing.tpot_s > 0
