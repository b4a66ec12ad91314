"""On CUDA: the same indices as on the CPU in float32, a stated bound in bfloat16, and two runs that are identical."""

import copy

import pytest
import torch
from tiny import CONFIGS, stock

from kvexp.core import Budget
from kvexp.generate import generate
from kvexp.generate.generation_params import GenerationParams
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, SnapKV, StreamingLLM, Window
from kvexp.models import patch_model

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


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("family", CONFIGS)
def test_cpu_and_gpu_keep_the_same_slots(family, method, num_beams):
    decoding = GenerationParams(9, num_beams=num_beams, eos=None)
    cpu, gpu = (generate(on(d, family), PROMPTS, method, HALF, decoding=decoding) for d in ("cpu", "cuda"))
    assert cpu.tokens == gpu.tokens
    for layer in range(2):
        assert cpu.cache.kept_positions(layer) == gpu.cache.kept_positions(layer)
        ours, theirs = cpu.cache.layer_states[layer].slots, gpu.cache.layer_states[layer].slots
        assert torch.equal(ours.positions, theirs.positions.cpu())
        torch.testing.assert_close(ours.score, theirs.score.cpu(), atol=1e-4, rtol=1e-4)


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


def test_decode_makes_no_host_sync():
    """One decode step of every kind of bookkeeping runs with synchronisation forbidden."""
    model = on("cuda", "llama")
    for method in (H2O(), A2SF(alpha=0.5), Window()):
        from kvexp.models import EvictionCache

        cache = EvictionCache(model, method, HALF)
        ids = torch.tensor([PROMPTS[0]], device="cuda")
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            for _ in range(2):
                model(ids[:, :1], past_key_values=cache, position_ids=torch.full((1, 1), 30, device="cuda"))
            torch.cuda.set_sync_debug_mode("error")
            try:
                model(ids[:, :1], past_key_values=cache, position_ids=torch.full((1, 1), 31, device="cuda"))
            finally:
                torch.cuda.set_sync_debug_mode("default")


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
