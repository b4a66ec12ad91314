"""What the launchers hand to the kernels: they run on tensors without data, and every launch is noted, not made.

So shapes, strides, tiles and options come from a real call, and no list of them has to be kept in step by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.machine_code.cases import Case
from kvexp.core import triton_ops as triton_decode
from kvexp.core import triton_ops as triton_observe
from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.method import AttentionScoreSpec
from kvexp.core.noise import POOL_SIZE
from kvexp.core.observe import ObservedRows
from kvexp.core.slots import Slots
from kvexp.methods import H2O, Keyformer

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
METHODS = {
    "h2o": H2O(),
    "tempered": Keyformer(noise="none"),
    "keyformer": Keyformer(),
    "keyformer per key": Keyformer(fresh=False),
}
ALIGNED = 16  # bytes of an address, or a divisor of an integer, that Triton makes use of
DEVICE = torch.device("meta")  # a build of torch without CUDA cannot index pretended CUDA tensors


@dataclass(frozen=True)
class Specialisation:
    """What Triton compiles one machine code for.

    kernel: its name. signature: (argument, type) in order, "constexpr" for constants. constants: (argument, value).
    aligned: places of arguments that are divisible by 16. options: (name, value) of the compiler (warps, stages, …).
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def tile(self) -> dict[str, Any]:
        """The constants by name."""
        return dict(self.constants)


def specialise(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Specialisation:
    """The specialisation that Triton would compile for a call, by the rules of its just-in-time compiler.

    kernel: the jitted function; given, named: the call's arguments. Integers that are 1 become constants; of addresses
    and other integers it is known whether 16 divides them.
    """
    names = list(kernel.arg_names)
    values = {**dict(zip(names, given, strict=False)), **named}
    options = tuple(sorted((name, value) for name, value in values.items() if name not in names))
    declared = {param.name for param in kernel.params if param.is_constexpr}
    signature, constants, aligned = [], [], []
    for place, name in enumerate(names):
        value = values[name]
        kind = "constexpr" if name in declared else _type(value)
        signature.append((name, kind))
        if kind == "constexpr":
            constants.append((name, value))
        elif _is_aligned(value):
            aligned.append(place)
    return Specialisation(kernel.__name__, tuple(signature), tuple(constants), tuple(aligned), options)


def _type(value: Any) -> str:
    """Triton's name for the type of an argument; "constexpr" for those that it makes constants of."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _is_aligned(value: Any) -> bool:
    """Whether 16 divides an integer or a tensor's address; torch's allocations are aligned, so its offset decides."""
    if isinstance(value, Tensor):
        return int(value.storage_offset()) * value.element_size() % ALIGNED == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % ALIGNED == 0


class _Noted:
    """Stands for a kernel: takes its launches down."""

    def __init__(self, kernel: Any, made: list[Specialisation]) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **named: self.made.append(specialise(self.kernel, given, named))


def _pool(kind: str, device: torch.device) -> Tensor:
    """Stands for the pools of noise, which are kept for the whole process: a tensor without data must not be."""
    return torch.empty(POOL_SIZE, device=device)


@contextlib.contextmanager
def _noted(kernels: ModuleType, names: tuple[str, ...], launcher: ModuleType) -> Iterator[list[Specialisation]]:
    """The launches of the kernels `names` while this lasts."""
    made: list[Specialisation] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(kernels, name, _Noted(getattr(kernels, name), made)))
        stack.enter_context(patch.object(launcher, "pool", _pool))
        yield made


def specialisations(case: Case) -> list[Specialisation]:
    """What a case's launcher would compile, in the order of its launches."""
    return _prompt(case) if case.phase == "prompt" else _decode(case)


def _spec(case: Case) -> AttentionScoreSpec | None:
    return None if case.method == "unobserved" else METHODS[case.method].score_spec


def _params(case: Case) -> AttentionParams:
    h, g = case.heads
    return AttentionParams(
        case.head_size**-0.5,
        sliding_window=1000 if case.position == "window" else None,
        alibi=torch.empty(h * g, device=DEVICE) if case.position == "alibi" else None,
        upcast=case.upcast,
    )


def _prompt(case: Case) -> list[Specialisation]:
    from kvexp.core import triton_kernels as kernels

    (h, g), s, d, dtype = case.heads, case.slots, case.head_size, DTYPES[case.dtype]
    query = (
        torch.empty(2, s, h * g, d, dtype=dtype, device=DEVICE).transpose(1, 2).unflatten(1, (h, g))
    )  # strided, as models make it
    keys = torch.empty(2, s, h, d, dtype=dtype, device=DEVICE).transpose(1, 2)
    positions = torch.empty(2, 1 if case.in_order else h, s, dtype=torch.int64, device=DEVICE)
    inputs = AttentionInputs(
        query,
        keys,
        keys,
        positions,
        torch.empty(2, s, dtype=torch.int64, device=DEVICE),
        _params(case),
        in_column_order=case.in_order,
        padded=True,
    )
    spec = _spec(case)
    assert spec is not None
    with _noted(kernels, ("row_log_sum_exp", "column_sums"), triton_observe) as made:
        seeds = torch.empty(2, dtype=torch.int64, device=DEVICE)
        weights, taus = torch.empty(2, s, device=DEVICE), torch.empty(s, device=DEVICE)
        triton_observe.triton_column_sums(inputs, ObservedRows(spec, weights, taus, seeds, 0))
    return made


def _decode(case: Case) -> list[Specialisation]:
    from kvexp.core import triton_kernels as kernels

    (h, g), s, d, dtype = case.heads, case.slots, case.head_size, DTYPES[case.dtype]
    sequence = SimpleNamespace(
        query_steps=[1], max_new_tokens=64, seeds=torch.empty(2, dtype=torch.int64, device=DEVICE)
    )
    state: Any = SimpleNamespace(score_spec=_spec(case), sequence=sequence, index=0)
    slots = Slots(
        torch.empty(2, h, s, d, dtype=dtype, device=DEVICE),
        torch.empty(2, h, s, d, dtype=dtype, device=DEVICE),
        torch.empty(2, h, s, dtype=torch.int64, device=DEVICE),
        torch.empty(2, h, s, device=DEVICE),
    )
    query = torch.empty(2, h, g, 1, d, dtype=dtype, device=DEVICE)
    with _noted(kernels, ("split_kv_attention", "combine_splits"), triton_decode) as made:
        attention = triton_decode.FusedDecodeAttention([state], [2], DEVICE)
        attention(query, slots, torch.empty(2, 1, dtype=torch.int64, device=DEVICE), _params(case))
    return made
