"""The kernels against all rows at once: compiled on a CUDA device, else under Triton's interpreter where it is there.

`make gpu-compile` runs them so, with a Triton of its own beside the environment.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from test_observe import METHODS as OBSERVED
from test_step import HALF, ROWS, alike, scores
from tiny import prompts_of, tiny

from kvexp.core import AttentionParams, Budget, CacheConfig, triton_ops
from kvexp.core.attention import AttentionInputs
from kvexp.core.decode_stack import StackedLayer
from kvexp.core.observe import ObservedRows, column_sums_by, row_weights
from kvexp.generate import GenerationParams, generate, prefill_together
from kvexp.generate.loop import decode
from kvexp.methods import A2SF, H2O, TOVA, Keyformer, StreamingLLM, Window
from kvexp.util.errors import ConfigError

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNELS = "kvexp.core.triton_kernels"
installed = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

WORLDS = {
    "plain": {},
    "padding": {"padding": (0, 29)},
    "alibi": {"alibi": True, "padding": (0, 11)},
    "window": {"window": 21, "padding": (0, 31)},
    "later chunk": {"ahead": 23, "padding": (0, 7)},
    "heads disagree": {"disagree": True},
}


def sight_of(
    count=65, heads=2, groups=3, dim=24, padding=(0, 0), alibi=False, window=None, ahead=0, disagree=False, dtype=None
):
    dice = torch.Generator().manual_seed(2)
    slots = count + ahead
    query = torch.randn(2, count, heads * groups, dim, generator=dice).to(DEVICE, dtype) * 2
    keys = torch.randn(2, heads, slots, dim, generator=dice).to(DEVICE, dtype)
    columns = (torch.arange(slots) - torch.tensor(padding)[:, None]).clamp(min=-1)
    seen = columns[:, None]
    if disagree:  # as after an eviction
        seen = torch.stack([columns, columns.flip(1)], dim=1)
    slopes = torch.arange(1, heads * groups + 1, device=DEVICE) / 7 if alibi else None
    params = AttentionParams(dim**-0.5, sliding_window=window, alibi=slopes)
    return AttentionInputs(
        query.transpose(1, 2).unflatten(1, (heads, groups)),  # strided, as models hand it in
        keys,
        keys,
        seen.to(DEVICE),
        columns[:, ahead:].to(DEVICE),
        params,
        in_column_order=not disagree,
        padded=True,
    )


def sums(inputs, method, how):
    spec = method.score_spec
    weights = row_weights(spec, inputs.query_positions, 0)
    taus = torch.full((inputs.query.shape[3],), spec.tau[0], device=DEVICE)
    observed = ObservedRows(spec, weights, taus, torch.tensor([5, 6], device=DEVICE), 3, 0)
    return column_sums_by(how, inputs, observed)


def same(got, expected):
    """Tolerance: logits up to 20 at 2**-24 each, through exp, over at most 390 rows that add up."""
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


AWKWARD = [{"count": count, "heads": 1, "groups": 2, "dim": 7} for count in (1, 17, 63, 64, 65, 130)]


@installed
@pytest.mark.parametrize(
    ("method", "world"),
    [*product(OBSERVED, WORLDS.values()), *product(["h2o", "keyformer", "snapkv"], AWKWARD)],
    ids=str,
)
def test_kernels_are_naive(method, world):
    inputs = sight_of(**world)
    same(sums(inputs, OBSERVED[method], "triton"), sums(inputs, OBSERVED[method], "naive"))


@installed
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_tiles_of_every_head_size(dtype, dim):
    """Each has tiles of its own (`triton_tiles`). float16: the products' rounding, relative to the largest score."""
    inputs = sight_of(67, heads=1, groups=2, dim=dim, dtype=dtype)
    got, expected = sums(inputs, Keyformer(), "triton"), sums(inputs, Keyformer(), "naive")
    if dtype == torch.float32:
        same(got, expected)
    else:
        assert (got - expected).abs().max() < 2e-3 * expected.max()


@installed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_products_as_the_truth_does(dtype):
    """A product between two numbers of the dtype may be summed up to either; the rounding itself is far larger."""
    if not GPU and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly: it takes the bits for whole numbers")
    inputs = sight_of(dtype=dtype)
    rounded = sums(inputs, H2O(), "naive")
    error = (sums(inputs, H2O(), "triton") - rounded).abs().max()
    exact = sums(replace(inputs, query=inputs.query.float(), keys=inputs.keys.float()), H2O(), "naive")
    assert error < 0.1 * (exact - rounded).abs().max()


@installed
def test_two_runs_agree_to_the_bit():
    inputs = sight_of(130, padding=(0, 5))
    assert torch.equal(sums(inputs, Keyformer(), "triton"), sums(inputs, Keyformer(), "triton"))


@installed
def test_padding_neither_gives_nor_takes():
    score = sums(sight_of(padding=(0, 29)), H2O(), "triton").cpu()
    torch.testing.assert_close(score.sum(-1), torch.tensor([[65.0], [36.0]]).expand(2, 2) * 3, atol=1e-3, rtol=0)
    assert (score[1, :, :29] == 0).all()


@installed
def test_three_tokens_by_hand():
    """Logits 0 and ln 2 only: rows (1), (1/3, 2/3), (1/4, 1/2, 1/4)."""
    keys = torch.tensor([[0.0], [math.log(2)], [0.0]], device=DEVICE)[None, None]
    at = torch.arange(3, device=DEVICE)[None]
    inputs = AttentionInputs(
        torch.ones(1, 1, 1, 3, 1, device=DEVICE),
        keys,
        keys,
        at[:, None],
        at,
        AttentionParams(1.0),
        in_column_order=True,
    )
    seeds, taus = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.ones(3, device=DEVICE)
    for method, columns in ((H2O(), [19 / 12, 7 / 6, 1 / 4]), (A2SF(alpha=0.5), [2 / 3, 5 / 6, 1 / 4])):
        weights = row_weights(method.score_spec, at, 0)
        observed = ObservedRows(method.score_spec, weights, taus, seeds, 0, 0)
        got = column_sums_by("triton", inputs, observed)
        torch.testing.assert_close(got[0, 0].cpu(), torch.tensor(columns))


def test_what_cannot_be_said_without_triton_is_said_before_a_model_loads(monkeypatch):
    monkeypatch.setattr("kvexp.core.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="observe=triton needs Triton, which is not installed"):
        CacheConfig(H2O(), Budget(tokens=9), observe="triton")


@installed
def test_what_the_kernels_refuse(monkeypatch):
    with pytest.raises(ConfigError, match="float64: set observe=blocked"):
        sums(sight_of(dtype=torch.float64), H2O(), "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not GPU:
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            sums(sight_of(), H2O(), "triton")


@installed
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("method", ["h2o", "keyformer", "a2sf"])
def test_long_prompts_on_a_gpu(method):
    """4096 tokens of the 7B shape in bfloat16: the kernels against blocks of rows, relative to the largest score."""
    inputs = sight_of(4096, heads=32, groups=1, dim=128, dtype=torch.bfloat16)
    expected = sums(inputs, OBSERVED[method], "blocked")
    assert (sums(inputs, OBSERVED[method], "triton") - expected).abs().max() < 2e-3 * expected.max()


# The kernels of a decode step against the eager step.


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
    original = triton_ops.FusedDecodeAttention.__call__

    def counted(self, *arguments):
        steps.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(triton_ops.FusedDecodeAttention, "__call__", counted)
    monkeypatch.setattr(triton_ops, "requested", lambda states: True)  # and the prompt in the eager way, for speed
    options = {"decoding": decoding, "seeds": seeds, "keep_logits": True}
    kernels = generate(model, rows, method, budget, **options)
    monkeypatch.setattr(triton_ops, "requested", lambda states: False)
    return kernels, generate(model, rows, method, budget, **options), len(steps)


@installed
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_kernels_are_the_eager_step(method, rows, monkeypatch):
    kernels, eager, steps = pair("llama", METHODS[method], HALF, ROWS[rows], monkeypatch)
    assert steps == 7 * 2, "every decode step of both layers goes through the kernels, or nothing is tested"
    alike(kernels, eager)


WORLDS_OF_STEPS = {
    **{family: (family, HALF, ROWS["padded"], {}) for family in ("mpt", "gptj", "gpt2")},  # ALiBi, float32 logits
    "a sliding window and rows with empty slots": ("mistral", HALF, (40, 33, 40), {"sliding_window": 11}),
    "rows that have not filled their budget": ("llama", Budget(tokens=30), (40, 22, 18), {}),
}


@installed
@pytest.mark.parametrize("method", ["a2sf", "keyformer"])
@pytest.mark.parametrize("world", WORLDS_OF_STEPS)
def test_kernels_are_the_eager_step_of_every_family(world, method, monkeypatch):
    family, budget, lengths, changes = WORLDS_OF_STEPS[world]
    kernels, eager, steps = pair(family, METHODS[method], budget, lengths, monkeypatch, **changes)
    assert steps > 0
    alike(kernels, eager)


@installed
@pytest.mark.parametrize("tokens", [63, 64, 65, 130])
def test_slots_that_fill_tiles_and_parts_unevenly(tokens, monkeypatch):
    monkeypatch.setattr(triton_ops, "MAX_KV_SPLITS", 2)
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
        monkeypatch.setattr(triton_ops, "requested", lambda states, kernels=kernels: kernels)
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
        assert triton_ops.supported(list(generation.cache.layer_states)) == able
        assert (StackedLayer([generation.cache.layer_states[0]]).fused is not None) == able
