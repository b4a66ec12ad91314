"""Devices that are none: tensors on "ipu:0" and "ipu:1" live in main memory and refuse to meet, as on two GPUs.

With them a CPU shows where code takes for granted that a model is on one device. Operators of several tensors want them
on one device, but for scalars, indices and copies, which torch allows between devices.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
MEETING = {"copy_", "_to_copy"} | INDEXING
# Operators for which the host waits: their answer is a number of the host, or their shape depends on numbers.
READS = {"_local_scalar_dense", "is_nonzero", "equal"}
SHAPED_BY_NUMBERS = {"nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}


class Placed(torch.Tensor):
    """A tensor that says it is on `device`."""

    @staticmethod
    def __new__(cls, inner, device):
        shape = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **shape, dtype=inner.dtype, device="cpu")

    def __init__(self, inner, device):
        self.inner, self.place = inner, torch.device(device)

    @property
    def device(self):
        return self.place

    def to(self, *args, **kwargs):
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        if not copy and (device, dtype) == (self.device, self.dtype):
            return self
        moved = torch.ops.aten._to_copy.default(self, dtype=dtype, device=device, non_blocking=non_blocking)
        for mark in ("sight", "queries"):  # of a mask, which `SeenMask.to` keeps
            if hasattr(self, mark):
                setattr(moved, mark, getattr(self, mark))
        return moved

    def cpu(self):
        return self.to("cpu")

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.to("cpu").tolist()

    def __repr__(self):
        return f"{self.inner!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return perform(func, args, kwargs or {})


def perform(func, args, kwargs):
    tensors = []
    args, kwargs = _opened(args, tensors), _opened(kwargs, tensors)
    name = func.overloadpacket.__name__
    met = {tensors[0].device} if name in MEETING else {x.device for x in tensors if x.dim()}
    if len(met) > 1:
        raise RuntimeError(f"{func} of tensors on {', '.join(sorted(map(str, met)))}")
    device = next(iter(met)) if met else tensors[0].device if tensors else torch.device("cpu")
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")}
    given = {id(x.inner): x for x in tensors if isinstance(x, Placed)}
    return _closed(func(*args, **kwargs), given, device)


def _opened(x, found):
    """x, a tensor or something of lists and dictionaries, with what is inside placed tensors; all tensors go to found.

    By hand: it is done at every operator, and torch's own walk takes longer than the operator.
    """
    if isinstance(x, torch.Tensor):
        found.append(x)
        return x.inner if isinstance(x, Placed) else x
    if isinstance(x, (list, tuple)):
        return type(x)([_opened(part, found) for part in x])
    return {name: _opened(part, found) for name, part in x.items()} if isinstance(x, dict) else x


def tensors_in(x):
    """The tensors in lists, tuples and dictionaries."""
    found = []
    _opened(x, found)
    return found


def has_mask(indices):
    """Whether a mask is among the indices, so that their number depends on numbers."""
    return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(indices))


def inner(x):
    """The tensor in main memory behind a placed one; another is itself."""
    return x.inner if isinstance(x, Placed) else x


def _closed(x, given, device):
    """What an operator made, on the device; a tensor that it was given is the one that was given."""
    if isinstance(x, torch.Tensor):
        known = given.get(id(x))
        return known if known is not None else x if device.type == "cpu" else Placed(x, device)
    return type(x)([_closed(part, given, device) for part in x]) if isinstance(x, (list, tuple)) else x


class _Factories(TorchDispatchMode):
    """What makes tensors from nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return perform(func, args, kwargs or {})


class _BelowDispatcher(TorchFunctionMode):
    """What copies below the dispatcher: torch.tensor and as_tensor to a device, torch.softmax to the dtype it is given.

    The second copy would be to the device that torch takes a placed tensor to be on, which is the CPU.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.softmax and kwargs.get("dtype") is not None and isinstance(args[0], Placed):
            return func(args[0].to(dtype=kwargs.pop("dtype")), *args[1:], **kwargs)
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return func(*args, **kwargs)
        device = torch.device(kwargs.pop("device"))
        made = func(*args, **kwargs)
        return made if made.device == device else torch.ops.aten._to_copy.default(made, device=device)


def move(module, device):
    """A module's weights to a device; and, from now on, what it is given."""
    for part in module.modules():
        for name, x in list(part._parameters.items()):
            if x is not None and not isinstance(x, Placed):
                part._parameters[name] = torch.nn.Parameter(Placed(x.data, device), requires_grad=False)
        for name, x in list(part._buffers.items()):
            if x is not None and not isinstance(x, Placed):
                part._buffers[name] = Placed(x, device)
    module.register_forward_pre_hook(lambda _, args, kwargs: _sent((args, kwargs), device), with_kwargs=True)


def _sent(given, device):
    """As accelerate's hooks: tensors go to the device, caches stay as they are."""
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, given)


@contextlib.contextmanager
def pretended():
    with torch.no_grad(), _Factories(), _BelowDispatcher():
        yield
