"""What a run holds on its device, counted tensor by tensor as an allocator would, against what the memory tracker says.

The bounds. Between forwards: keys and values are the tracker's to the byte; position ids, scores, what a method keeps
of the model and of the newest queries are counted by their shapes; all else (tokens, logits, budgets, schedules) is
under `REST` bytes. At the peak of a prompt: the tracker's peak and what one layer's forward needs, see `prompt_bound`.
At the peak of a step: two copies of one layer's slots, see `step_bound`. More copies of keys and values break them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from device_runs import BEAM_STEP, FETCHING, ONCE, OWN_ANSWER, PER_STEP, SEEDS, check_waits, config_of, on_cpu
from device_runs import METHODS as DEVICE_METHODS
from device_runs import PROMPTS as DEVICE_PROMPTS
from device_runs import STEPS as DEVICE_STEPS
from fake_allocator import counted_gpu, storages_of
from host_reads import DEVICE, HostReads, on_gpu, reads_of_decode_steps
from pretend import Placed, move, pretended
from stream_checker import checked_streams
from test_retrieval import METHODS as RETRIEVAL
from test_retrieval import RELEASED, SCARCE
from tiny import CONFIGS, VOCAB, prompts_of, stock, tiny
from tiny import LAYERS as TINY_LAYERS

from kvexp.core import Budget, CacheConfig, Surrogate
from kvexp.core.decode_stack import StackedLayer
from kvexp.core.noise import pool
from kvexp.generate import GenerationParams, decode, divergence_from_full, generate, prefill, prefill_together
from kvexp.generate.prefill import decode_step
from kvexp.hf import calibrate_queries, load_model, patch_model
from kvexp.methods import A2SF, H2O, Full, Keyformer, SnapKV, SpAtten, StreamingLLM
from kvexp.retrieval import Oracle, Quest, SparQ
from kvexp.util.errors import ConfigError

LENGTHS = (96, 80)
LAYERS, HEADS, DIM = 6, 3, 64
WIDE: dict[str, Any] = {"head_dim": DIM, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
REST = 32 << 10
STEPS = 4
# Methods that look at pairs of slots or at every slot's attention in a step: matrices [B, H, S, S] they may hold then.
PAIRS = {"rkv": 6, "rkv_release": 6, "rkv_defensive": 6, "gkv": 6}
# Methods that compute with keys or values themselves, whatever the dtype: bytes of a number of such copies.
WIDTHS = {"triattention": 4, "h2o_critical": 4, "capkv": 8, "dropkv": 8, "caote_over_h2o": 8, "lagkv_causal": 4}
# Attributes of a layer: what a method keeps of the model, and of the newest queries.
OF_A_METHOD = ("output_factors", "output_projection", "calibration", "surrogate", "statistics")


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def some_quick(cases, *quick):
    """Cases of which all but the `quick` are slow."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@dataclass(frozen=True)
class Seen:
    """Bytes beyond the weights after the prompt and every step (held), at most in the prompt and in the steps (peaks).

    tracked: what the memory tracker said then; tracked_peak: its peak of the prompt; kv: keys and values, beside: the
    other buffers of the slots and what the method keeps (`OF_A_METHOD`), after the last step; slots: per head and row.
    """

    held: list[int]
    tracked: list[int]
    prompt_peak: int
    tracked_peak: int
    step_peak: int
    kv: int
    beside: int
    slots: int


def config_for(name: str) -> CacheConfig:
    """As of `config_of`, with statistics of the wide model."""
    method, options = DEVICE_METHODS[name], {}
    if method.needs.calibration:
        options["calibration"] = calibrate_queries(tiny("llama", **WIDE), prompts_of(11, (29, 31)))
    if method.needs.surrogate:
        options["surrogate"] = Surrogate.of(torch.ones(LAYERS, HEADS, 30), torch.zeros(LAYERS, HEADS))
    return config_of("llama", name, **options)


def held_by(config: CacheConfig, dtype: torch.dtype = torch.float32, block: int = 1) -> Seen:
    """What a prompt and some steps hold on the pretended device; block: as of `FakeAllocator`."""
    model = on_gpu("llama", dtype, **WIDE)
    with counted_gpu(block) as allocator:
        allocator.count([*model.parameters(), *model.buffers()])
        return seen_by(allocator, model, config)


def seen_by(allocator: Any, model: Any, config: CacheConfig) -> Seen:
    """A prompt and some steps of two rows, of which one is padded; allocator: a `FakeAllocator`, or the real one."""
    if "keyformer" in config.method.name:
        pool("gumbel", DEVICE)  # 20 MiB of draws, once per process and device
    allocator.begin()
    context = prefill(model, prompts_of(3, LENGTHS), config, max_new_tokens=STEPS, seeds=SEEDS)
    tracker, states = context.cache.memory_tracker, context.cache.layer_states
    prompt_peak, tracked_peak = allocator.peak_bytes, tracker.peak_bytes
    held, tracked = [allocator.bytes], [tracker.bytes]
    token, at = torch.tensor([[5], [6]], device=DEVICE), context.mask.sum(1, keepdim=True)
    allocator.reset_peak()
    for _ in range(STEPS):
        decode_step(model, token, at, context.cache)
        at = at + 1
        held.append(allocator.bytes)
        tracked.append(tracker.bytes)
    kv = [[state.slots.keys, state.slots.values] for state in states]
    others = [list(state.slots.tensors.values()) for state in states]
    parts = [[getattr(state, name, None) for name in OF_A_METHOD] for state in states]
    beside = storages_of([others, parts]) - storages_of([kv, *model.parameters(), *model.buffers()])
    width = states[0].slots.keys.shape[2]
    step_peak = allocator.peak_bytes
    return Seen(held, tracked, prompt_peak, tracked_peak, step_peak, total(storages_of(kv)), total(beside), width)


def total(storages: set[tuple[int, int]]) -> int:
    """Bytes of storages."""
    return sum(size for _, size in storages)


def widening(name: str, itemsize: int) -> int:
    """How many times as wide a method's copies of keys and values are."""
    return max(1, WIDTHS.get(name, 0) // itemsize)


def prompt_bound(seen: Seen, name: str, itemsize: int = 4) -> int:
    """Bound of a prompt's peak: the tracker's, what lies beside, and what one layer's forward takes.

    That is its keys and values four times (queries, rotated queries and keys, two copies), and four matrices of
    attention in float32 (logits, probabilities, noise, weighted).
    """
    rows, columns = len(LENGTHS), max(LENGTHS)
    one_layer = 2 * rows * HEADS * columns * DIM * itemsize
    states = (2 + 2 * widening(name, itemsize)) * one_layer
    return seen.tracked_peak + seen.beside + REST + states + 4 * rows * HEADS * columns**2 * 4


def step_bound(seen: Seen, name: str, itemsize: int = 4) -> int:
    """Bound of a step's peak: what is held before or after it, two copies of a layer's slots, pairs of slots."""
    pairs = PAIRS.get(name, 0) * len(LENGTHS) * HEADS * seen.slots**2 * 4
    return max(seen.held) + 2 * widening(name, itemsize) * max(seen.tracked) // LAYERS + pairs + REST


def check(seen: Seen, name: str, itemsize: int = 4) -> None:
    assert seen.kv == seen.tracked[-1], "keys and values, to the byte"
    assert seen.held[-1] - seen.kv - seen.beside <= REST, seen
    for held, tracked in zip(seen.held, seen.tracked, strict=True):
        assert tracked <= held <= tracked + seen.beside + REST, seen
    assert seen.tracked_peak <= seen.prompt_peak <= prompt_bound(seen, name, itemsize), seen
    assert seen.step_peak <= step_bound(seen, name, itemsize), seen


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_quick(product(DEVICE_METHODS, DTYPES), *((name, torch.float32) for name in ("full", "h2o", "snapkv"))),
    ids=str,
)
def test_the_device_holds_what_the_tracker_says(name, dtype):
    check(held_by(config_for(name), dtype), name, dtype.itemsize)


@pytest.mark.parametrize(
    "name",
    [name if name == "quest" else pytest.param(name, marks=pytest.mark.slow) for name in [*RETRIEVAL, "released"]],
)
def test_a_retrieval_method_has_on_the_device_what_the_tracker_says(name, monkeypatch):
    """Sinks, window, block cache and index; what is offloaded is in the host's memory, its copies on streams."""
    model, method = on_gpu("llama", torch.float32, **WIDE), RETRIEVAL.get(name, RELEASED)
    weights = storages_of([*model.parameters(), *model.buffers()])
    with monkeypatch.context() as patch, checked_streams(patch) as checker, HostReads():
        config = CacheConfig(method, SCARCE)
        context = prefill(model, prompts_of(3, LENGTHS), config, max_new_tokens=STEPS, seeds=SEEDS)
        cache, token = context.cache, torch.tensor([[5], [6]], device=DEVICE)
        at = context.mask.sum(1, keepdim=True)
        for step in range(STEPS + 1):
            held, tracked = total(storages_of(cache.layer_states) - weights), cache.memory_tracker.bytes
            assert tracked <= held <= tracked + REST, (step, tracked, held)
            if step < STEPS:
                decode_step(model, token, at + step, cache)
        everything = 2 * LAYERS * sum(LENGTHS) * HEADS * DIM * 4
        assert config.method.offload is False or sum(one.memory.host_bytes for one in cache.layer_states) >= everything
    assert not checker.problems


class Hoards(H2O):
    """Holds what it was shown."""

    hoard: ClassVar[list[torch.Tensor]] = []

    def priority(self, ctx):
        self.hoard.append(ctx.slots.keys.clone())
        return ctx.score


def test_a_planted_copy_is_found():
    Hoards.hoard.clear()
    with pytest.raises(AssertionError):
        check(held_by(CacheConfig(Hoards(), Budget(kv_ratio=0.5))), "h2o")
    Hoards.hoard.clear()


def test_the_allocator_counts_by_hand():
    with counted_gpu(block=512) as allocator:
        a = torch.zeros(100, device=DEVICE)
        allocator.begin()
        b = torch.ones(64, 64, device=DEVICE)
        c, view = torch.ones(3, device=DEVICE), b[:3]
        assert allocator.bytes == 64 * 64 * 4 + 512 and view is not None
        del b, c
        assert allocator.bytes == 64 * 64 * 4, "the view holds all of it"
        del view
        assert (allocator.bytes, allocator.peak_bytes) == (0, 64 * 64 * 4 + 512) and a is not None


def test_a_prompt_held_whole_would_be_found():
    """Keys and values of all layers beside the peak of what evicts layer by layer."""
    seen = held_by(config_for("knorm"))
    whole = 2 * LAYERS * len(LENGTHS) * HEADS * max(LENGTHS) * DIM * 4
    assert seen.prompt_peak + whole > prompt_bound(seen, "knorm")


# Everything stays on the device, as far as a CPU can tell: no devices meet, and every wait of the host has a reason.
#
# The devices are pretended (`pretend`), so that all numbers are real and whole generations run to their end.


TOGETHER = tuple(name for name in DEVICE_METHODS if name not in ("full", "h2o_c"))  # h2o_c: another prefill
SOME = ("keyformer", "kvzap")
FAMILIES = list(CONFIGS)


def alike(made, plain, dtype=torch.float32):
    """Slots are on the device; in float32 the tokens and the slots kept are the CPU's."""
    for one, other in zip(made.cache.layer_states, plain.cache.layer_states, strict=True):
        tensors = one.slots.tensors
        assert {x.device for x in tensors.values()} == {DEVICE}
        assert tensors["keys"].dtype == tensors["values"].dtype == dtype and tensors["score"].dtype == torch.float32
        assert dtype != torch.float32 or one.kept_positions() == other.kept_positions()
    assert dtype != torch.float32 or made.tokens == plain.tokens


@pytest.mark.parametrize(
    ("family", "name", "dtype", "beams"),
    some_quick(
        [*product(FAMILIES, DEVICE_METHODS, DTYPES, [1]), *product(FAMILIES, DEVICE_METHODS, [torch.float32], [3])],
        ("llama", "kvzap", torch.float32, 1),
        ("mistral", "caote", torch.bfloat16, 1),
        ("gptj", "streaming_llm", torch.float32, 1),
        ("gpt2", "snapkv", torch.float16, 1),
        ("mpt", "keyformer", torch.float32, 1),
        ("llama", "h2o", torch.float32, 3),
    ),
    ids=str,
)
def test_a_generation_stays_on_its_device(family, name, dtype, beams):
    """Two padded prompts and 20 steps, or 8 of beams."""
    model, config, steps = on_gpu(family, dtype), config_of(family, name), DEVICE_STEPS if beams == 1 else 8
    options = {"decoding": GenerationParams(steps, num_beams=beams, eos=None), "seeds": SEEDS}
    with reads_of_decode_steps(model) as reads:
        made = generate(model, DEVICE_PROMPTS, config, **options)
    check_waits(reads, steps, PER_STEP if beams == 1 else BEAM_STEP, name)
    alike(made, generate(on_cpu(family, dtype), DEVICE_PROMPTS, config, **options), dtype)


def contexts_of(model, family, names):
    """The contexts of the full cache and of these methods, after one prefill."""
    configs = [CacheConfig(Full(), None), *(config_of(family, name) for name in names)]
    return prefill_together(model, DEVICE_PROMPTS, configs, max_new_tokens=DEVICE_STEPS, seeds=SEEDS)


@pytest.mark.parametrize(
    ("family", "names"), some_quick([("llama", SOME), *((family, TOGETHER) for family in FAMILIES)], ("llama", SOME))
)
def test_runs_that_share_a_prefill_stay_on_their_device(family, names):
    """One wait for all of them at every step."""

    def tokens(model):
        contexts = contexts_of(model, family, names)
        made = decode(model, contexts, GenerationParams(DEVICE_STEPS, eos=None), SEEDS, None, start=0.0)
        return [one.tokens for one in made]

    model = on_gpu(family)
    with reads_of_decode_steps(model) as reads:
        made = tokens(model)
    check_waits(reads, DEVICE_STEPS, PER_STEP, *names, caches=1 + len(names))
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
    # No two tokens alike: no ties.
    fresh = [[token for token in range(VOCAB) if token not in prompt] for prompt in DEVICE_PROMPTS]
    texts = None if own else [fresh[0][:DEVICE_STEPS], fresh[1][: DEVICE_STEPS - 3]]

    def found(model):
        full, *variants = contexts_of(model, family, names)
        return divergence_from_full(model, full, variants, texts, max_new_tokens=DEVICE_STEPS, eos=[60] if own else [])

    model = on_gpu(family)
    with reads_of_decode_steps(model) as reads:
        made = found(model)
    check_waits(reads, DEVICE_STEPS, OWN_ANSWER if own else {}, *names, caches=1 + len(names))
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
    # The quick one is short: each operator is checked for its order too.
    steps = 4 if (family, name) == ("llama", "quest") else DEVICE_STEPS
    model, noted, options = on_gpu(family), HostReads(), {"decoding": GenerationParams(steps, eos=None)}
    with monkeypatch.context() as patch, checked_streams(patch) as checker, noted:
        hook = model.register_forward_hook(lambda *_: setattr(noted, "on", True))
        made = generate(model, DEVICE_PROMPTS, method, SCARCE, **options)
        hook.remove()
    assert made.tokens == generate(tiny(family), DEVICE_PROMPTS, method, SCARCE, **options).tokens
    assert not checker.problems
    waits = noted.places + noted.sends + noted.strays
    assert set(waits) <= {*PER_STEP, *ONCE, *FETCHING}, waits
    assert {"retrieval/offload.py:fetch", "retrieval/offload.py:_count_fetch"} & set(waits)
    assert all(waits[place] <= 4 * TINY_LAYERS * steps for place in FETCHING), waits
    assert all(waits[place] <= steps for place in PER_STEP) and all(waits[place] <= 4 for place in ONCE), waits


# -- planted offenders -------------------------------------------------------------------------------------------------


OFFENCES = {
    # A score that is looked at on the host, numbers of the host sent at every step, one that torch would hand over.
    "places": lambda score: float(score.max()),
    "sends": lambda score: score.add_(torch.tensor([0.0], device=DEVICE)),
    "strays": lambda score: score.add_(torch.zeros(())),
}


def generate_with(monkeypatch, forward):
    """What was noted of a generation in which `forward` stands for `StackedLayer.forward`."""
    monkeypatch.setattr(StackedLayer, "forward", forward)
    model = on_gpu("llama")
    with reads_of_decode_steps(model) as noted:
        generate(model, DEVICE_PROMPTS, config_of("llama", "h2o"), decoding=GenerationParams(4, eos=None))
    return noted


@pytest.mark.parametrize("found", OFFENCES)
def test_a_planted_wait_is_found(found, monkeypatch):
    original = StackedLayer.forward

    def forward(self, *arguments):
        out = original(self, *arguments)
        OFFENCES[found](self.slots.score)
        return out

    noted = generate_with(monkeypatch, forward)
    assert getattr(noted, found)
    with pytest.raises(AssertionError):
        check_waits(noted, DEVICE_STEPS, PER_STEP)


def test_a_planted_tensor_on_the_cpu_is_found(monkeypatch):
    original = StackedLayer.forward

    def forward(self, query, *arguments):
        return original(self, query + torch.zeros(query.shape[-1]), *arguments)

    with pytest.raises(RuntimeError, match=r"of tensors on c"):
        generate_with(monkeypatch, forward)


# A model over two devices: every layer's slots stay with it, and the tokens are those of one device.


PROMPTS = [list(range(3, 20)), list(range(30, 41))]
METHODS = [Full(), H2O(), Keyformer(), A2SF(), SnapKV(window=3), SpAtten(), StreamingLLM(n_sinks=2)]


def over_two(family):
    """The tiny model with its first layer, and what comes before it, on one device and the rest on another."""
    model = copy.deepcopy(tiny(family))
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    half = len(layers) // 2
    for number, layer in enumerate(layers):
        move(layer, "ipu:0" if number < half else "ipu:1")
    for name, module in model.named_modules():
        own = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
        if own and not any(isinstance(x, Placed) for x in own):
            last = name.endswith(("lm_head", "embed_out", "norm", "ln_f", "norm_f", "final_layer_norm"))
            move(module, "ipu:1" if last else "ipu:0")
    return model


def test_pretended_devices_refuse_to_meet():
    with pretended():
        one, other = torch.ones(3, device="ipu:0"), torch.ones(3, device="ipu:1")
        with pytest.raises(RuntimeError, match="on ipu:0, ipu:1"):
            one + other
        assert (one + other.to("ipu:0")).tolist() == [2.0, 2.0, 2.0] and (one * 2).device == torch.device("ipu:0")


CASES = [("llama", method) for method in METHODS] + [(family, Keyformer()) for family in CONFIGS if family != "llama"]
# RoPE, learned positions and ALiBi; a score of all layers.
DEVICES_QUICK = ("full", "h2o", "spatten", "mistral", "gpt2", "mpt")


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[] if {family, method.name} & {*DEVICES_QUICK} else pytest.mark.slow)
        for family, method in CASES
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_slots_stay_with_their_layer(family, method):
    budget = None if isinstance(method, Full) else Budget(kv_ratio=0.6)
    options = {"decoding": GenerationParams(6), "seeds": [1, 2]}
    alone = generate(tiny(family), PROMPTS, method, budget, **options)
    with pretended():
        done = generate(over_two(family), PROMPTS, method, budget, **options)
    assert done.tokens == alone.tokens
    devices = [str(state.slots.keys.device) for state in done.cache.layer_states]
    assert set(devices) == {"ipu:0", "ipu:1"} and devices == sorted(devices)
    assert [state.kept_positions() for state in done.cache.layer_states] == [
        state.kept_positions() for state in alone.cache.layer_states
    ]


@pytest.mark.parametrize("method", [Oracle(), Quest(), SparQ()], ids=lambda method: method.name)
def test_retrieval_stays_with_its_layer(method):
    """Without pqcache: its clusters are made in a thread, to which the pretence does not reach."""
    alone = generate(tiny("llama"), PROMPTS, method, Budget(kv_ratio=0.6), decoding=GenerationParams(4))
    with pretended():
        done = generate(over_two("llama"), PROMPTS, method, Budget(kv_ratio=0.6), decoding=GenerationParams(4))
    assert done.tokens == alone.tokens


def test_runs_that_share_prefills_do_so_over_two_devices():
    def answers(model):
        variants = [CacheConfig(H2O(), Budget(kv_ratio=0.6)), CacheConfig(Keyformer(), Budget(tokens=9))]
        each = prefill_together(model, PROMPTS, variants, max_new_tokens=5, seeds=[1, 2])
        return [result.tokens for result in decode(model, each, GenerationParams(5), [1, 2], None, start=0.0)]

    alone = answers(tiny("llama"))
    with pretended():
        assert answers(over_two("llama")) == alone


@pytest.mark.parametrize("word", ["foo", "disk", "cuda:9", ""])
def test_a_device_map_that_cannot_be_is_said_before_anything_loads(word, tmp_path):
    from kvexp.run.model_spec import ModelSpec

    node = {"kind": "pretrained", "path": "someone/model", "device_map": word}
    with pytest.raises(ConfigError, match=r"device_map.*(auto, balanced|no CUDA device)"):
        ModelSpec.of(node)
    with pytest.raises(ConfigError, match="not both"):
        ModelSpec.of({**node, "device_map": "auto", "device": "cpu"})


@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_accelerates_hooks_move_no_number(family):
    """The hooks that a spread model has, here with one device: they hand our cache on as it is."""
    accelerate = pytest.importorskip("accelerate")
    hooked = patch_model(accelerate.dispatch_model(copy.deepcopy(stock(family)), {"": "cpu"}, force_hooks=True))
    assert any(hasattr(module, "_hf_hook") for module in hooked.modules())
    options = {"decoding": GenerationParams(6), "seeds": [1, 2]}
    one, other = (
        generate(model, PROMPTS, Keyformer(), Budget(kv_ratio=0.6), **options).tokens
        for model in (hooked, tiny(family))
    )
    assert one == other


def test_device_map_auto_loads_where_there_is_one_device(tmp_path):
    pytest.importorskip("accelerate")
    stock("llama").save_pretrained(tmp_path)
    spread = load_model(str(tmp_path), device_map="auto")
    ours = generate(spread, PROMPTS, H2O(), Budget(kv_ratio=0.6), decoding=GenerationParams(6)).tokens
    assert ours == generate(tiny("llama"), PROMPTS, H2O(), Budget(kv_ratio=0.6), decoding=GenerationParams(6)).tokens


def test_a_model_that_does_not_fit_is_refused_instead_of_offloaded(tmp_path):
    pytest.importorskip("accelerate")
    stock("llama").save_pretrained(tmp_path)
    half = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(ConfigError, match="does not fit on the devices that device_map may use"):
        load_model(str(tmp_path), device_map={**half, "lm_head": "cpu", "model.layers.1": "disk"})
