"""The kernels of a decode step against the eager step: compiled on a CUDA device, else under Triton's interpreter.

`make gpu-compile` runs them so, with a Triton of its own beside the environment.
"""

import importlib.util

import pytest
import torch
from test_step import HALF, ROWS, alike, scores
from tiny import prompts_of, tiny

from kvexp.core import Budget
from kvexp.core.decode import triton_decode
from kvexp.core.decode.fast_step import StackedLayer
from kvexp.generate import CacheConfig, GenerationParams, generate, prefill_together
from kvexp.generate.decode_loop import decode
from kvexp.methods import A2SF, H2O, TOVA, Keyformer, StreamingLLM, Window

GPU = torch.cuda.is_available()
installed = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
METHODS = {
    "h2o": H2O(),
    "a2sf": A2SF(alpha=0.3),
    "tova": TOVA(),
    "window": Window(),
    "keyformer": Keyformer(),
    "gaussian": Keyformer(noise="gaussian"),
    "constant": Keyformer(noise="constant"),
    "tempered": Keyformer(noise="none", tau_end=3.0),
}


def pair(family, method, budget, lengths, monkeypatch, new=8, **changes):
    """(by the kernels, eager) with the same prefill; counts what the kernels did."""
    model, rows = tiny(family, **changes), prompts_of(3, lengths)
    model = model.to("cuda") if GPU else model
    decoding, seeds, steps = GenerationParams(new, eos=None), list(range(len(lengths))), []
    original = triton_decode.FusedDecodeAttention.__call__

    def counted(self, *arguments):
        steps.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(triton_decode.FusedDecodeAttention, "__call__", counted)
    monkeypatch.setattr(triton_decode, "requested", lambda states: True)  # and the prompt in the eager way, for speed
    options = {"decoding": decoding, "seeds": seeds, "keep_logits": True}
    kernels = generate(model, rows, method, budget, **options)
    monkeypatch.setattr(triton_decode, "requested", lambda states: False)
    return kernels, generate(model, rows, method, budget, **options), len(steps)


@installed
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_kernels_are_the_eager_step(method, rows, monkeypatch):
    kernels, eager, steps = pair("llama", METHODS[method], HALF, ROWS[rows], monkeypatch)
    assert steps == 7 * 2, "every decode step of both layers goes through the kernels, or nothing is tested"
    alike(kernels, eager)


@installed
@pytest.mark.parametrize("family", ["mpt", "gptj", "gpt2"])
def test_alibi_float32_logits_and_heads_of_their_own(family, monkeypatch):
    for method in (H2O(), Keyformer()):
        kernels, eager, steps = pair(family, method, HALF, ROWS["padded"], monkeypatch)
        assert steps > 0
        alike(kernels, eager)
        monkeypatch.undo()


@installed
def test_a_sliding_window_and_rows_with_empty_slots(monkeypatch):
    kernels, eager, steps = pair("mistral", A2SF(alpha=0.5), HALF, (40, 33, 40), monkeypatch, sliding_window=11)
    assert steps > 0
    alike(kernels, eager)


@installed
def test_rows_that_have_not_filled_their_budget(monkeypatch):
    kernels, eager, steps = pair("llama", Keyformer(), Budget(tokens=30), (40, 22, 18), monkeypatch)
    assert steps > 0
    alike(kernels, eager)


@installed
@pytest.mark.parametrize("tokens", [63, 64, 65, 130])
def test_slots_that_fill_tiles_and_parts_unevenly(tokens, monkeypatch):
    monkeypatch.setattr(triton_decode, "MAX_KV_SPLITS", 2)
    kernels, eager, steps = pair("llama", Keyformer(), Budget(tokens=tokens), (140,), monkeypatch, new=4)
    assert steps == 3 * 2
    alike(kernels, eager)


@installed
def test_a_stack_of_every_kind_of_row(monkeypatch):
    """Plain, tempered, noised twice and unobserved rows of several sizes side by side, as the general path has them."""
    methods = [H2O(), A2SF(alpha=0.5), Window(), Keyformer(), Keyformer(noise="gaussian"), Keyformer(noise="none")]
    variants = [CacheConfig(method, Budget(kv_ratio=share)) for method in methods for share in (0.3, 0.6)]
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    model = model.to("cuda") if GPU else model
    made = []
    for kernels in (True, False):
        monkeypatch.setattr(triton_decode, "requested", lambda states, kernels=kernels: kernels)
        contexts = prefill_together(model, rows, variants, max_new_tokens=9, seeds=[4, 5])
        made.append(decode(model, contexts, GenerationParams(9, eos=None), [4, 5], None, start=0.0))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        mine, theirs = scores(one.cache), scores(other.cache)
        assert mine.keys() == theirs.keys()
        assert max(abs(mine[place] - theirs[place]) for place in mine) < 1e-4


def test_what_the_kernels_leave_to_the_eager_step():
    """Noise per key, renumbered positions, and whoever did not ask for kernels."""
    asked = {"observe": "triton"} if importlib.util.find_spec("triton") else None
    if asked is None:
        pytest.skip("triton is not installed")
    for method, plan, able in (
        (H2O(), {}, False),
        (H2O(), asked, True),
        (Keyformer(fresh=False), asked, False),
        (StreamingLLM(), asked, False),
    ):
        generation = generate(
            tiny("llama"), prompts_of(3, (40,)), method, HALF, decoding=GenerationParams(2, eos=None), **plan
        )
        assert triton_decode.supported(list(generation.cache.layer_states)) == able
        assert (StackedLayer([generation.cache.layer_states[0]]).fused is not None) == able
