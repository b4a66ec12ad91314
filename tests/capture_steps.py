"""Decode steps for tests of their capture: methods and budgets, and a stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_runs import METHODS, config_of
from pretend import INDEXING, READS, SHAPED_BY_NUMBERS, has_mask
from tiny import CONFIGS, prompts_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvexp.core import Budget, Cadence, QueryCalibration, Surrogate
from kvexp.core.graph import capture_obstacle
from kvexp.generate import CacheConfig
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
        keep = "prompt" if method.needs.state_changes else None
        budget = Budget(tokens=20, of="generated") if keep else HALF if method.evicts else None
        config = CacheConfig(method, budget, mode="auto", keep=keep, **NOT_LOOKED_AT)
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


# A stand-in for CUDA graphs on a CPU: the operators of a step on the very tensors they had, again and again.
# As `torch.cuda.CUDAGraph` it knows no Python and no host: numbers and addresses are those of the capture. A capture
# leaves all memory as it was, and its outputs undefined until the first replay.


NOT_CAPTURED = READS | SHAPED_BY_NUMBERS | {"_assert_async", "unique_consecutive", "lift_fresh", "lift_fresh_copy"}


class RecordedGraphs:
    """`kvexp.generate.graph.GraphDevice`. calls: "warm_up", "capture" and "replay", in order.

    forbidden: names of operators during which a capture fails, besides those where the host would wait.
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
        if func.overloadpacket.__name__ in self.forbidden or _waits_for_the_host(func, args):
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


def _waits_for_the_host(func: Any, args: Any) -> bool:
    """Whether CUDA captures no such operator: the host reads a number, gives some, or a shape depends on them."""
    name = func.overloadpacket.__name__
    by_counts = name == "repeat_interleave" and "Tensor" in func._overloadname
    return by_counts or name in NOT_CAPTURED or (name in INDEXING and has_mask(args[1]))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found
