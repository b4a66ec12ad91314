"""Everything stays on the device, as far as a CPU can tell: no devices meet, and every read by the host has a reason.

The devices are pretended (`pretend`), so that all numbers are real and whole generations run to their end.
"""

import pytest
import torch
from host_reads import DEVICE, HostReads, on_gpu, reads_of_decode_steps
from stream_checker import checked_streams
from test_retrieval import METHODS as RETRIEVAL
from test_retrieval import SCARCE
from tiny import CONFIGS, tiny

from kvexp.core import Budget
from kvexp.generate import CacheConfig, GenerationParams, decode, generate, prefill_together
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, SnapKV, SpAtten, StreamingLLM, Window

PROMPTS = [list(range(3, 20)), list(range(30, 41))]
HALF = Budget(kv_ratio=0.6)
METHODS = {
    method.name: method
    for method in (
        *(Full(), H2O(), A2SF(), Keyformer(), TOVA(), Window()),
        *(SnapKV(window=3), SpAtten(), StreamingLLM(n_sinks=2)),
    )
}
QUICK = [("llama", "h2o"), ("mpt", "keyformer"), ("gptj", "streaming_llm")]
# Learned position embeddings are added to the input: no cache can renumber them.
REFUSED = [("gpt2", "streaming_llm"), ("opt", "streaming_llm")]
ALL = [(family, method) for family in CONFIGS for method in METHODS if (family, method) not in REFUSED]
STEPS = 8

# Where the host may wait for the device once the prompt has been read, and why. PER_STEP: at every step.
PER_STEP = {"generate/decode_loop.py:<listcomp>": "which rows have ended, so that they stop and times are true"}
ONCE = {
    "generate/prefilled_context.py:prefill": "the time to the first token ends when the prompt has been computed",
    "models/cache.py:logits_were_finite": "whether any logit was NaN, asked at the end",
    "models/cache.py:<genexpr>": "the same, of every layer",
    "generate/finish_reason.py:truncate_at_end": "the tokens, when all are there",
}


def budget_of(method):
    return None if isinstance(method, Full) else HALF


def check_reads(reads, steps=STEPS):
    """Once at every step, and at places that have a reason."""
    per_step = {place: count for place, count in reads.places.items() if place in PER_STEP}
    assert set(reads.places) <= {*PER_STEP, *ONCE}, reads.places
    assert set(per_step) == set(PER_STEP) and max(per_step.values()) <= steps
    assert all(count <= 2 for place, count in reads.places.items() if place in ONCE), "not once for every step"


@pytest.mark.parametrize(
    ("family", "method"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK)]
)
def test_a_generation_stays_on_its_device(family, method):
    """Two padded prompts; the tokens are the CPU's."""
    model, of = on_gpu(family), METHODS[method]
    options = {"decoding": GenerationParams(STEPS, eos=None), "seeds": [1, 2]}
    with reads_of_decode_steps(model) as reads:
        made = generate(model, PROMPTS, of, budget_of(of), **options)
    check_reads(reads)
    assert made.tokens == generate(tiny(family), PROMPTS, of, budget_of(of), **options).tokens
    for state in made.cache.layer_states:
        assert {x.device for x in state.slots.tensors.values()} == {DEVICE}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_half_precision_stays_on_its_device(dtype):
    model = on_gpu("llama", dtype)
    with reads_of_decode_steps(model) as reads:
        made = generate(model, PROMPTS, H2O(), HALF, decoding=GenerationParams(STEPS, eos=None))
    check_reads(reads)
    slots = made.cache.layer_states[0].slots
    assert slots.keys.dtype == slots.values.dtype == dtype and slots.score.dtype == torch.float32


def test_runs_that_share_a_prefill_stay_on_their_device():
    model = on_gpu("llama")
    variants = [CacheConfig(H2O(), HALF), CacheConfig(A2SF(), Budget(tokens=9)), CacheConfig(Full(), None)]
    with reads_of_decode_steps(model) as reads:
        contexts = prefill_together(model, PROMPTS, variants, max_new_tokens=STEPS, seeds=[1, 2])
        decode(model, contexts, GenerationParams(STEPS, eos=None), [1, 2], None, start=0.0)
    own = {place: count for place, count in reads.places.items() if place in PER_STEP}
    assert max(own.values()) <= STEPS, "one wait for all variants of a step"


def test_a_fetching_step_waits_at_every_layer_and_nowhere_else(monkeypatch):
    """A retrieval method's choice has to reach the host, where the tokens are."""
    model, reads = on_gpu("llama"), HostReads()
    with monkeypatch.context() as patch, checked_streams(patch), reads:
        hook = model.register_forward_hook(lambda *_: setattr(reads, "on", True))
        generate(model, PROMPTS, RETRIEVAL["quest"], SCARCE, decoding=GenerationParams(4, eos=None))
        hook.remove()
    where = {place.partition(":")[0] for place in reads.places}
    assert "retrieval/offload.py" in where
    assert where <= {"retrieval/offload.py", *(place.partition(":")[0] for place in (*PER_STEP, *ONCE))}, reads.places


def test_a_planted_read_is_found(monkeypatch):
    """A score that is looked at on the host."""
    from kvexp.core.decode import fast_step

    original = fast_step.StackedLayer.forward

    def looks(self, *arguments):
        out = original(self, *arguments)
        float(self.slots.score.max())
        return out

    monkeypatch.setattr(fast_step.StackedLayer, "forward", looks)
    model = on_gpu("llama")
    with reads_of_decode_steps(model) as reads:
        generate(model, PROMPTS, H2O(), HALF, decoding=GenerationParams(4, eos=None))
    with pytest.raises(AssertionError):
        check_reads(reads)


def test_a_planted_tensor_on_the_cpu_is_found(monkeypatch):
    from kvexp.core.decode import fast_step

    original = fast_step.StackedLayer.forward

    def strays(self, query, *arguments):
        return original(self, query + torch.zeros(query.shape[-1]), *arguments)

    monkeypatch.setattr(fast_step.StackedLayer, "forward", strays)
    model = on_gpu("llama")
    with reads_of_decode_steps(model), pytest.raises(RuntimeError, match=r"of tensors on c"):
        generate(model, PROMPTS, H2O(), HALF, decoding=GenerationParams(4, eos=None))
