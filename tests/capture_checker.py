"""Says of a decode step why it could not be captured as a CUDA graph; runs it on a CPU, under a dispatch mode.

Refused are reads by the host, shapes that depend on numbers, copies between host and device, numbers of the host that
are used as tensors, and, from one step to the next, other operators, other shapes, and tensors at another address.
"""

from __future__ import annotations

from typing import Any

import torch
from host_reads import place_in_kvexp
from pretend import INDEXING, READS, SHAPED_BY_NUMBERS, has_mask, inner
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
