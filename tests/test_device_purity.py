"""Everything stays on the device, as far as a CPU can tell: no devices meet, and every wait of the host has a reason.

The devices are pretended (`pretend`), so that all numbers are real and whole generations run to their end.
"""

from itertools import product

import pytest
import torch
from device_runs import (
    BEAM_STEP,
    FETCHING,
    METHODS,
    ONCE,
    OWN_ANSWER,
    PER_STEP,
    PROMPTS,
    SEEDS,
    STEPS,
    check_waits,
    config_of,
    on_cpu,
)
from host_reads import DEVICE, HostReads, on_gpu, reads_of_decode_steps
from stream_checker import checked_streams
from test_retrieval import METHODS as RETRIEVAL
from test_retrieval import RELEASED, SCARCE
from tiny import CONFIGS, LAYERS, VOCAB, tiny

from kvexp.generate import CacheConfig, GenerationParams, decode, divergence_from_full, generate, prefill_together
from kvexp.methods import Full

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOGETHER = tuple(name for name in METHODS if name not in ("full", "h2o_c"))  # h2o_c: prompt tokens attend otherwise
SOME = ("keyformer", "kvzap")
FAMILIES = list(CONFIGS)


def some_quick(cases, *quick):
    """Cases of which all but the `quick` are slow."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def alike(made, plain, dtype=torch.float32):
    """Slots are on the device; in float32 the tokens and the slots kept are the CPU's."""
    for one, other in zip(made.cache.layer_states, plain.cache.layer_states, strict=True):
        tensors = one.slots.tensors
        assert {x.device for x in tensors.values()} == {DEVICE}
        assert tensors["keys"].dtype == tensors["values"].dtype == dtype and tensors["score"].dtype == torch.float32
        assert dtype != torch.float32 or one.kept_positions() == other.kept_positions()
    assert dtype != torch.float32 or made.tokens == plain.tokens


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    some_quick(
        product(FAMILIES, METHODS, DTYPES),
        ("llama", "kvzap", torch.float32),
        ("mistral", "caote", torch.bfloat16),
        ("gptj", "streaming_llm", torch.float32),
        ("gpt2", "snapkv", torch.float16),
        ("mpt", "keyformer", torch.float32),
    ),
    ids=str,
)
def test_a_generation_stays_on_its_device(family, name, dtype):
    """Two padded prompts and 20 steps."""
    model, config = on_gpu(family, dtype), config_of(family, name)
    options = {"decoding": GenerationParams(STEPS, eos=None), "seeds": SEEDS}
    with reads_of_decode_steps(model) as reads:
        made = generate(model, PROMPTS, config, **options)
    check_waits(reads, STEPS, PER_STEP, name)
    alike(made, generate(on_cpu(family, dtype), PROMPTS, config, **options), dtype)


@pytest.mark.parametrize(("family", "name"), some_quick(product(FAMILIES, METHODS), ("llama", "h2o")))
def test_beams_stay_on_their_device(family, name):
    model, config, steps = on_gpu(family), config_of(family, name), 8
    options = {"decoding": GenerationParams(steps, num_beams=3, eos=None), "seeds": SEEDS}
    with reads_of_decode_steps(model) as reads:
        made = generate(model, PROMPTS, config, **options)
    check_waits(reads, steps, BEAM_STEP, name)
    alike(made, generate(tiny(family), PROMPTS, config, **options))


def contexts_of(model, family, names):
    """The contexts of the full cache and of these methods, after one prefill."""
    configs = [CacheConfig(Full(), None), *(config_of(family, name) for name in names)]
    return prefill_together(model, PROMPTS, configs, max_new_tokens=STEPS, seeds=SEEDS)


@pytest.mark.parametrize(
    ("family", "names"), some_quick([("llama", SOME), *((family, TOGETHER) for family in FAMILIES)], ("llama", SOME))
)
def test_runs_that_share_a_prefill_stay_on_their_device(family, names):
    """One wait for all of them at every step."""

    def tokens(model):
        contexts = contexts_of(model, family, names)
        made = decode(model, contexts, GenerationParams(STEPS, eos=None), SEEDS, None, start=0.0)
        return [one.tokens for one in made]

    model = on_gpu(family)
    with reads_of_decode_steps(model) as reads:
        made = tokens(model)
    check_waits(reads, STEPS, PER_STEP, *names, caches=1 + len(names))
    assert made == tokens(tiny(family))


@pytest.mark.parametrize(
    ("family", "names", "own"),
    some_quick(
        [("mpt", SOME, False), *((family, TOGETHER, own) for family in FAMILIES for own in (False, True))],
        ("mpt", SOME, False),
    ),
)
def test_divergence_stays_on_its_device(family, names, own):
    """Along given texts the host waits for nothing; along own answers it asks at every step whether they have ended."""
    fresh = [[token for token in range(VOCAB) if token not in prompt] for prompt in PROMPTS]  # no two alike: no ties
    texts = None if own else [fresh[0][:STEPS], fresh[1][: STEPS - 3]]

    def found(model):
        full, *variants = contexts_of(model, family, names)
        return divergence_from_full(model, full, variants, texts, max_new_tokens=STEPS, eos=[60] if own else [])

    model = on_gpu(family)
    with reads_of_decode_steps(model) as reads:
        made = found(model)
    check_waits(reads, STEPS, OWN_ANSWER if own else {}, *names, caches=1 + len(names))
    for one, other in zip(made, found(tiny(family)), strict=True):
        assert [row.tokens for row in one] == [row.tokens for row in other]
        assert own or [row.kl for row in one] == [pytest.approx(row.kl, abs=1e-4) for row in other]


@pytest.mark.parametrize(
    ("family", "name"),
    some_quick([(family, name) for family in FAMILIES for name in [*RETRIEVAL, "released"]], ("llama", "quest")),
)
def test_a_fetching_step_waits_at_every_layer_and_nowhere_else(family, name, monkeypatch):
    """A retrieval method's choice has to reach the host, where the tokens are, and what it chose the device."""
    method = RETRIEVAL.get(name, RELEASED)
    if name == "released" and family in ("gpt2", "opt", "mpt"):
        pytest.skip("clamps positions of RoPE, which the family has not")
    steps = (
        4 if (family, name) == ("llama", "quest") else STEPS
    )  # the quick one: each operator is checked for its order too
    model, noted, options = on_gpu(family), HostReads(), {"decoding": GenerationParams(steps, eos=None)}
    with monkeypatch.context() as patch, checked_streams(patch) as checker, noted:
        hook = model.register_forward_hook(lambda *_: setattr(noted, "on", True))
        made = generate(model, PROMPTS, method, SCARCE, **options)
        hook.remove()
    assert made.tokens == generate(tiny(family), PROMPTS, method, SCARCE, **options).tokens
    assert not checker.problems
    waits = noted.places + noted.sends + noted.strays
    assert set(waits) <= {*PER_STEP, *ONCE, *FETCHING}, waits
    assert "retrieval/offload.py:fetch" in waits
    assert all(waits[place] <= 4 * LAYERS * steps for place in FETCHING), waits
    assert all(waits[place] <= steps for place in PER_STEP) and all(waits[place] <= 4 for place in ONCE), waits


# -- planted offenders -------------------------------------------------------------------------------------------------


def reads(self, *arguments):
    """A score that is looked at on the host."""
    float(self.slots.score.max())


def sends(self, *arguments):
    """Numbers of the host that are sent at every step."""
    self.slots.score.add_(torch.tensor([0.0], device=DEVICE))


def strays(self, *arguments):
    """A number of the host, which torch would hand over."""
    self.slots.score.add_(torch.zeros(()))


@pytest.mark.parametrize(("offence", "found"), [(reads, "places"), (sends, "sends"), (strays, "strays")])
def test_a_planted_wait_is_found(offence, found, monkeypatch):
    from kvexp.core.decode import fast_step

    original = fast_step.StackedLayer.forward

    def forward(self, *arguments):
        out = original(self, *arguments)
        offence(self)
        return out

    monkeypatch.setattr(fast_step.StackedLayer, "forward", forward)
    model = on_gpu("llama")
    with reads_of_decode_steps(model) as noted:
        generate(model, PROMPTS, config_of("llama", "h2o"), decoding=GenerationParams(4, eos=None))
    assert getattr(noted, found)
    with pytest.raises(AssertionError):
        check_waits(noted, STEPS, PER_STEP)


def test_a_planted_tensor_on_the_cpu_is_found(monkeypatch):
    from kvexp.core.decode import fast_step

    original = fast_step.StackedLayer.forward

    def strays(self, query, *arguments):
        return original(self, query + torch.zeros(query.shape[-1]), *arguments)

    monkeypatch.setattr(fast_step.StackedLayer, "forward", strays)
    model = on_gpu("llama")
    with reads_of_decode_steps(model), pytest.raises(RuntimeError, match=r"of tensors on c"):
        generate(model, PROMPTS, config_of("llama", "h2o"), decoding=GenerationParams(4, eos=None))
