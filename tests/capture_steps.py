"""Decode steps for tests of their capture: methods and budgets, contexts whose steps are taken one by one, a check."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_runs import METHODS, config_of
from host_reads import place_in_kvexp
from pretend import INDEXING, READS, SHAPED_BY_NUMBERS, has_mask, inner
from tiny import CONFIGS, prompts_of, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvexp.core import Budget, Cadence, QueryCalibration, Surrogate
from kvexp.core.graph import ReplayableStep, capture_obstacle, evicting
from kvexp.generate import CacheConfig, prefill_together
from kvexp.generate.loop import batched_cache
from kvexp.generate.prefill import decode_step
from kvexp.methods import H2O, VATP, Keyformer, StreamingLLM
from kvexp.run.build import build
from kvexp.run.compose import option, options

NOTHING = torch.zeros(0)
# What a pass over texts would have found, at which nothing here looks.
NOT_LOOKED_AT = {
    "calibration": QueryCalibration("", torch.ones(1), NOTHING, NOTHING),  # has directions, which qfilters asks for
    "surrogate": Surrogate("", NOTHING, NOTHING),
}
HALF = Budget(kv_ratio=0.5)
NEW = 30


def prompts_for(*methods):
    """Two prompts: of different length, but of one for a method that adds up the scores of the batch."""
    alike = any(method.score_spec is not None and method.score_spec.batch == "sum_all" for method in methods)
    return prompts_of(3, (40, 40) if alike else (40, 33))


def obstacles():
    """Option of `method` -> the method with its defaults, and what keeps its steps from being captured."""
    found = {}
    for name in options("method"):
        method = build(option("method", name), "method", within=("kvexp.methods", "kvexp.retrieval"))
        config = CacheConfig(method, HALF if method.evicts else None, mode="auto", **NOT_LOOKED_AT)
        found[name] = method, capture_obstacle(config)
    return found


SPECIAL = {
    "vatp": CacheConfig(VATP(n_sinks=2), HALF),  # its 20 sinks are as many as the budget
    "keyformer per key": CacheConfig(Keyformer(noise="gaussian", fresh=False), HALF),
    "streaming_llm, two sinks": CacheConfig(StreamingLLM(n_sinks=2), HALF),
    "pyramid, each layer for itself": CacheConfig(Keyformer(), Budget(kv_ratio=0.5, layers="pyramid")),
    "heads of different width": CacheConfig(H2O(), Budget(kv_ratio=0.5, heads="adaptive")),
    "every 4 steps": CacheConfig(Keyformer(), HALF, cadence=Cadence(every=4)),
    "no eviction while decoding": CacheConfig(H2O(), HALF, cadence=Cadence(every=None)),
}
CASES = [name for name, (_, why) in obstacles().items() if why is None and name not in SPECIAL] + [*SPECIAL]


def case_of(family: str, case: str) -> CacheConfig:
    """A case: a method whose steps are captured, with small settings where it has them, or one of SPECIAL."""
    if case in SPECIAL:
        return SPECIAL[case]
    return config_of(family, case) if case in METHODS else CacheConfig(obstacles()[case][0], HALF)


QUICK = [("llama", name) for name in ("keyformer", "full", "rkv", "every 4 steps", "heads of different width")]
QUICK.append(("mpt", "keyformer"))
ALL = [("llama", name) for name in CASES] + [(family, "keyformer") for family in CONFIGS if family != "llama"]
FAMILIES = [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK)]


class Stepped:
    """A context some steps after its prompt, whose next steps are taken one by one."""

    def __init__(self, family="llama", case="h2o", *, model=None, variants=None, warm=4):
        self.model = tiny(family) if model is None else model
        configs = [case_of(family, case)] if variants is None else variants
        prompts = prompts_for(*(config.method for config in configs))
        made = prefill_together(self.model, prompts, configs, max_new_tokens=NEW, seeds=[1, 2])
        self.contexts = made
        self.cache = batched_cache(made)
        device = made[0].ids.device
        self.token = torch.tensor([[5], [6]]).to(device).repeat(len(made), 1)
        self.positions = made[0].mask.sum(1, keepdim=True).repeat(len(made), 1)
        self.logits = [self.eager() for _ in range(warm)]

    def eager(self):
        logits = decode_step(self.model, self.token, self.positions, self.cache)
        self.feed(logits)
        return logits.clone()

    def feed(self, logits):
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.positions += 1

    def replayable(self):
        caches = getattr(self.cache, "caches", [self.cache])
        return ReplayableStep([[layer.state for layer in one.layers] for one in caches], self.stacks())

    def stacks(self):
        return [layer.state.decode_stacks for layer in self.cache.layers]

    def step(self):
        return decode_step(self.model, self.token, self.positions, self.cache)


def checked(stepped, steps=3):
    """All refusals of some steps, and how each differed from the one before that evicted, or did not, as it does."""
    step, seen = stepped.replayable(), {}
    caches = getattr(stepped.cache, "caches", [stepped.cache])
    flags = [cache.logits_nan_flag for cache in caches]  # told after a replay, outside of it
    before = step.addresses()
    for _ in range(steps):
        kind = evicting(stepped.stacks())
        step.begin()
        with CaptureChecker() as checker:
            logits = stepped.step()
        step.release()
        for cache, flag in zip(caches, flags, strict=True):
            cache.logits_nan_flag = flag
        stepped.feed(logits)
        seen.setdefault(kind, []).append(checker)
    moved = [name for name, address in step.addresses().items() if before[name] != address]
    found = [why for alike in seen.values() for checker in alike for why in checker.refusals]
    found += [why for alike in seen.values() for one, other in itertools.pairwise(alike) for why in changes(one, other)]
    return found + [f"{name} moved" for name in moved]


# Says of a decode step why it could not be captured as a CUDA graph; runs it on a CPU, under a dispatch mode.
# Refused are reads by the host, shapes that depend on numbers, copies between host and device, numbers of the host that
# are used as tensors, and, from one step to the next, other operators, other shapes, and tensors at another address.


class CaptureChecker(TorchDispatchMode):
    """While active, takes down one step. refusals: what could not be captured, and where kvexp did it.

    operators: per operator of the step, its name, the shapes it was given, and the addresses of tensors among them that
    the step has not made itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []
        self.operators: list[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...], str]] = []
        self._made: dict[int, Tensor] = {}  # kept alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name, where = func.overloadpacket.__name__, place_in_kvexp("transformers")
        why = _refusal(name, func, args, kwargs, given)
        if why is not None:
            self.refusals.append(f"{why}: {name} in {where}")
        outside = tuple(_address(x) for x in given if _storage(x) not in self._made)
        self.operators.append((name, tuple(tuple(x.shape) for x in given), outside, where))
        known = {_storage(x) for x in given}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _storage(x) not in known:
                self._made[_storage(x)] = x
        return out


def changes(one: CaptureChecker, next_one: CaptureChecker) -> list[str]:
    """How a step differed from the one before: in its operators, their shapes, or where it read and wrote."""
    names = [[step[0] for step in each.operators] for each in (one, next_one)]
    if names[0] != names[1]:
        place = next((i for i, (a, b) in enumerate(zip(*names, strict=False)) if a != b), min(map(len, names)))
        where = [each.operators[place][3] if place < len(each.operators) else "the end" for each in (one, next_one)]
        return [f"other operators, from number {place} on, in {where[0]} and {where[1]}"]
    found = []
    for (name, shapes, addresses, where), (_, others, there, _) in zip(one.operators, next_one.operators, strict=True):
        if shapes != others:
            found.append(f"other shapes: {name} of {shapes} and of {others} in {where}")
        elif addresses != there:
            found.append(f"a tensor at another address: {name} in {where}")
    return found


def _refusal(name: str, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> str | None:
    if name in READS or name == "_assert_async":
        return "the host reads a number"
    by_counts = name == "repeat_interleave" and "Tensor" in func._overloadname
    shaped = name in SHAPED_BY_NUMBERS or name == "unique_consecutive" or by_counts
    if shaped or (name in INDEXING and has_mask(args[1])):
        return "a shape depends on numbers"
    if name in ("lift_fresh", "lift_fresh_copy"):
        return "a tensor is made of numbers of the host"
    devices = {x.device.type for x in given}
    target = kwargs.get("device")
    if name == "_to_copy" and target is not None and devices and torch.device(target).type not in devices:
        return "a copy between host and device"
    if len(devices) > 1:
        return "a copy between host and device" if name == "copy_" else "a tensor of the host is used on the device"
    return None


def _address(x: Tensor) -> int:
    return inner(x).data_ptr()


def _storage(x: Tensor) -> int:
    return inner(x).untyped_storage().data_ptr()


# A stand-in for CUDA graphs on a CPU: the operators of a step on the very tensors they had, again and again.
# As `torch.cuda.CUDAGraph` it knows no Python and no host: numbers and addresses are those of the capture. A capture
# leaves all memory as it was, and its outputs undefined until the first replay.


class RecordedGraphs:
    """`kvexp.generate.graph.GraphDevice`. calls: "warm_up", "capture" and "replay", in order.

    forbidden: names of operators during which a capture fails, as it does on CUDA where the host would wait.
    """

    def __init__(self, forbidden: frozenset[str] = frozenset()) -> None:
        self.calls: list[str] = []
        self.forbidden = forbidden

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        self.calls.append("warm_up")
        return step()

    def capture(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.calls.append("capture")
        recorder = _Recorder(self.forbidden)
        try:
            with recorder:
                output = step()
        finally:
            recorder.undo()
        recorder.poison()

        def replay() -> None:
            self.calls.append("replay")
            recorder.replay()

        return output, replay


class _Recorder(TorchDispatchMode):
    """The operators of a step with their arguments and results, all of which it keeps alive."""

    def __init__(self, forbidden: frozenset[str]) -> None:
        super().__init__()
        self.forbidden = forbidden
        self.operators: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()  # storages that the step itself has allocated
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in self.forbidden:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        old = {x.untyped_storage().data_ptr() for x in given}
        for storage in (x.untyped_storage() for x in _written(func, args, kwargs)):
            if storage.data_ptr() not in self._made:
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in old]
        self._made |= {x.untyped_storage().data_ptr() for x in fresh}
        is_view = not fresh and not _written(func, args, kwargs)
        # Views are kept alive, and need no computation: what they show is at its address.
        self.operators.append((None if is_view else func, args, kwargs, tree_leaves(out) if is_view else fresh))
        return out

    def undo(self) -> None:
        """Give memory that was there before the step the numbers it had."""
        for storage, saved in self._before.values():
            storage.copy_(saved)

    def poison(self) -> None:
        """Fill what the step has allocated with NaN, or with numbers that are no index."""
        for func, _, _, fresh in self.operators:
            for x in fresh if func is not None else ():
                x.fill_(float("nan") if x.is_floating_point() else 1 if x.dtype == torch.bool else -(1 << 30))

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.operators:
            if func is None:
                continue
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            if fresh:
                for into, new in zip(fresh, again, strict=True):
                    into.copy_(new)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found
