"""A stand-in for CUDA graphs on a CPU: the operators of a step on the very tensors they had, again and again.

As `torch.cuda.CUDAGraph` it knows no Python and no host: numbers and addresses are those of the capture. A capture
leaves all memory as it was, and its outputs undefined until the first replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
