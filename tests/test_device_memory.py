"""What a run holds on its device, counted tensor by tensor as an allocator would, against what the memory tracker says.

The bounds. Between forwards: keys and values are the tracker's to the byte; position ids, scores, what a method keeps
of the model and of the newest queries are counted by their shapes; all else (tokens, logits, budgets, schedules) is
under `REST` bytes. At the peak of a prompt: the tracker's peak and what one layer's forward needs, see `prompt_bound`.
At the peak of a step: two copies of one layer's slots, see `step_bound`. More copies of keys and values break them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from device_runs import METHODS, SEEDS, config_of
from fake_allocator import counted_gpu, storages_of
from host_reads import DEVICE, HostReads, on_gpu
from stream_checker import checked_streams
from test_retrieval import METHODS as RETRIEVAL
from test_retrieval import RELEASED, SCARCE
from tiny import prompts_of, tiny

from kvexp.core import Budget, CacheConfig, Surrogate
from kvexp.core.observe.noise import pool
from kvexp.generate import prefill
from kvexp.generate.prefilled_context import decode_step
from kvexp.methods import H2O
from kvexp.models import calibrate_queries

LENGTHS = (96, 80)
LAYERS, HEADS, DIM = 6, 3, 64
WIDE: dict[str, Any] = {"head_dim": DIM, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
REST = 32 << 10
STEPS = 4
# Methods that look at pairs of slots or at every slot's attention in a step: matrices [B, H, S, S] they may hold then.
PAIRS = {"rkv": 6, "rkv_release": 6}
# Methods that compute with keys or values themselves in a step, in float32 whatever the dtype: copies of that width.
IN_FLOAT32 = ("triattention", "h2o_critical")
# Attributes of a layer: what a method keeps of the model, and of the newest queries.
OF_A_METHOD = ("output_factors", "output_projection", "calibration", "surrogate", "statistics")
QUICK = ("full", "h2o", "snapkv")


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
    method, options = METHODS[name], {}
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


def prompt_bound(seen: Seen, itemsize: int = 4) -> int:
    """Of a prompt's peak: the tracker's, what lies beside, one layer's keys and values four times (queries, rotated
    queries and keys, copies), and four matrices of attention in float32 (logits, probabilities, noise, weighted)."""
    rows, columns = len(LENGTHS), max(LENGTHS)
    one_layer = 2 * rows * HEADS * columns * DIM * itemsize
    return seen.tracked_peak + seen.beside + REST + 4 * one_layer + 4 * rows * HEADS * columns**2 * 4


def step_bound(seen: Seen, name: str, itemsize: int = 4) -> int:
    """Of a step's peak: what is held after it, two copies of one layer's slots, and a method's matrices of pairs."""
    pairs = PAIRS.get(name, 0) * len(LENGTHS) * HEADS * seen.slots**2 * 4
    wider = 4 // itemsize if name in IN_FLOAT32 else 1
    return max(seen.held[1:]) + 2 * wider * max(seen.tracked) // LAYERS + pairs + REST


def check(seen: Seen, name: str, itemsize: int = 4) -> None:
    assert seen.kv == seen.tracked[-1], "keys and values, to the byte"
    assert seen.held[-1] - seen.kv - seen.beside <= REST, seen
    for held, tracked in zip(seen.held, seen.tracked, strict=True):
        assert tracked <= held <= tracked + seen.beside + REST, seen
    assert seen.tracked_peak <= seen.prompt_peak <= prompt_bound(seen, itemsize), seen
    assert seen.step_peak <= step_bound(seen, name, itemsize), seen


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_the_device_holds_what_the_tracker_says(name):
    check(held_by(config_for(name)), name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_in_half_precision_too(name, dtype):
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
    assert seen.prompt_peak + whole > prompt_bound(seen)
