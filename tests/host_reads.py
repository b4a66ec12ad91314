"""Finds where code waits for a device: tensors "on cuda:0" are pretended, and every read of their numbers is noted.

On a GPU each such read stops the host until all that was issued has run.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretend import Placed, move, pretended
from tiny import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda:0")
PACKAGE = Path(__file__).resolve().parents[1] / "kvexp"
# Operators whose answer is a number on the host, or whose shape depends on numbers.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "equal",
    "bincount",
    "is_nonzero",
}


class HostReads(TorchDispatchMode):
    """places: in which function of kvexp ("file:function") the host read from the device, and how often, while `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on and self._reads(func.overloadpacket.__name__, args, kwargs):
            self.places[place_in_kvexp("elsewhere")] += 1
        return func(*args, **kwargs)

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`."""
        if self.on:
            self.places[place_in_kvexp("elsewhere")] += 1

    @staticmethod
    def _reads(name: str, args: Any, kwargs: Any) -> bool:
        placed = any(isinstance(x, Placed) for x in tree_leaves((args, kwargs)))
        if name == "_to_copy":
            to = kwargs.get("device")
            return placed and to is not None and to.type == "cpu" and not kwargs.get("non_blocking")
        if name == "copy_":
            late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return isinstance(args[1], Placed) and not isinstance(args[0], Placed) and not late
        return placed and name in WAITING


def place_in_kvexp(otherwise: str) -> str:
    """The innermost function of kvexp under the caller's caller, or `otherwise`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return otherwise


def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model of a family on the pretended device."""
    model = copy.deepcopy(tiny(family)).to(dtype)
    move(model, DEVICE)
    return model


@contextlib.contextmanager
def reads_of_decode_steps(model: Any) -> Iterator[HostReads]:
    """Pretended devices, and the host's reads from the end of the model's first forward (the prompt) on."""
    reads = HostReads()
    hook = model.register_forward_hook(lambda *_: setattr(reads, "on", True))
    lazy = patch.object(torch.cuda, "_lazy_init", lambda: None)  # which naming the device would call
    waits = patch.object(torch.cuda, "synchronize", reads.synchronize)
    try:
        with lazy, waits, pretended(), reads:
            yield reads
    finally:
        hook.remove()
