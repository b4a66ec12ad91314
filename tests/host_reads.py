"""Finds where code waits for a device: tensors "on cuda:0" are pretended, and every copy to and from them is noted.

On a GPU each read of its numbers, and each copy of the host's numbers to it, stops the host until all that was issued
has run; a tensor of the host beside one of the device is copied there by torch, or refused.
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
from pretend import INDEXING, READS, SHAPED_BY_NUMBERS, Placed, has_mask, move, pretended, tensors_in
from tiny import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
PACKAGE = Path(__file__).resolve().parents[1] / "kvexp"


class HostReads(TorchDispatchMode):
    """Counts by place in kvexp ("file:function"), while `on`, where the host waits.

    places: it read from the device; sends: it copied numbers to the device and waited; strays: a tensor of the host was
    used together with one of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self.sends: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()
        self.on = False
        self._torchs_own: dict[int, Tensor] = {}  # kept alive, so that no id is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        kind = self._kind(name, args, kwargs) if self.on else None
        if kind is not None:
            kind[place_in_kvexp("elsewhere")] += 1
        made = func(*args, **kwargs)
        if name == "scalar_tensor":  # torch makes it of a number, on a GPU there
            self._torchs_own[id(made)] = made
        return made

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`."""
        if self.on:
            self.places[place_in_kvexp("elsewhere")] += 1

    def _kind(self, name: str, args: Any, kwargs: Any) -> Counter[str] | None:
        """Under what an operator is noted; None: it neither waits nor mixes."""
        given = tensors_in((args, kwargs))
        placed = any(isinstance(x, Placed) for x in given)
        hosts = [x for x in given if not isinstance(x, Placed) and id(x) not in self._torchs_own]
        if name == "_to_copy":
            to = kwargs.get("device")
            if to is None or kwargs.get("non_blocking") or (to.type == "cpu") != placed:
                return None
            return self.places if placed else self.sends
        if name == "copy_":
            late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if late or not (placed and hosts):
                return None
            return self.places if isinstance(args[1], Placed) else self.sends
        if not placed:
            return None
        if name in READS | SHAPED_BY_NUMBERS or (name in INDEXING and has_mask(args[1])):
            return self.places
        # A number is written as it is: torch hands it over with the launch.
        return self.strays if hosts and not (name == "fill_" and not hosts[0].dim()) else None


def place_in_kvexp(otherwise: str) -> str:
    """The innermost function of kvexp under the caller's caller, or `otherwise`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return otherwise


def on_gpu(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The tiny model of a family on the pretended device."""
    model = copy.deepcopy(tiny(family, **changes)).to(dtype)
    move(model, DEVICE)
    return model


@contextlib.contextmanager
def pretended_gpu(reads: HostReads) -> Iterator[HostReads]:
    """The pretended device, of which `reads` takes notes once it is `on`."""
    lazy = patch.object(torch.cuda, "_lazy_init", lambda: None)  # which naming the device would call
    waits = patch.object(torch.cuda, "synchronize", reads.synchronize)
    with lazy, waits, pretended(), reads:
        yield reads


@contextlib.contextmanager
def reads_of_decode_steps(model: Any) -> Iterator[HostReads]:
    """Pretended devices, and what the host does from the model's first forward of one token on."""
    reads = HostReads()
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: _begin(reads, args, kwargs), with_kwargs=True)
    try:
        with pretended_gpu(reads):
            yield reads
    finally:
        hook.remove()


def _begin(reads: HostReads, args: Any, kwargs: Any) -> None:
    ids = args[0] if args else kwargs["input_ids"]
    reads.on = reads.on or ids.shape[1] == 1
