"""Compile every kernel for sm_80, sm_90 and sm_100 without a GPU: all compile, fit and spill no register.

    make gpu-compile                      # ARGS='--only column_sums': kernels and calls with this text

The launchers run on tensors without data, and every launch is noted, not made: shapes, strides, tiles and options come
from real calls. Ends with 1 where a machine code spills.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvexp.core import triton_ops
from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.noise import POOL_SIZE
from kvexp.core.observe import ObservedRows
from kvexp.core.slots import Slots
from kvexp.methods import H2O, Keyformer
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes

# Which calls are compiled: head sizes, dtypes, methods and position encodings of supported models.

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
METHODS = {  # no noise, temperature alone, fresh noise, fixed noise
    "h2o": H2O(),
    "tempered": Keyformer(noise="none"),
    "keyformer": Keyformer(),
    "keyformer per key": Keyformer(fresh=False),
}
UNOBSERVED = "unobserved"  # of a decode step alone


@dataclass(frozen=True)
class Case:
    """One call of a launcher.

    phase: prompt (`triton_column_sums`) or decode (`FusedDecodeAttention`). head_size: D = Dv. dtype: of DTYPES.
    method: of METHODS, or UNOBSERVED. position: rope, alibi or window. upcast: logits in float32 whatever the dtype
    (GPT-J). in_order: slot i holds column i, as in a prompt that nothing was evicted from. slots: S.
    """

    phase: str
    head_size: int
    dtype: str
    method: str
    position: str = "rope"
    upcast: bool = False
    in_order: bool = True
    slots: int = 4099  # no multiple of 16: what holds for every length

    @property
    def heads(self) -> tuple[int, int]:
        """(kv heads, query heads of each): grouped heads but for the families that have none."""
        return (32, 1) if self.position == "alibi" or self.upcast else (8, 4)

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            self.head_size**-0.5,
            sliding_window=1000 if self.position == "window" else None,
            alibi=torch.empty(self.heads[0] * self.heads[1], device=DEVICE) if self.position == "alibi" else None,
            upcast=self.upcast,
        )

    def __str__(self) -> str:
        words = [f"D={self.head_size}", self.dtype, self.method, *([self.position] if self.position != "rope" else [])]
        words += ["float32 logits"] * self.upcast + ["slots in any order"] * (not self.in_order)
        return " ".join(words) + (f" S={self.slots}" if self.slots != 4099 else "")


def cases() -> Iterator[Case]:
    """Every branch of every kernel at one head size, and every head size with the heaviest branches."""
    for size, dtype, method in product((64, 128, 256), ("bf16", "fp32"), ("h2o", "keyformer")):
        yield Case("prompt", size, dtype, method)
        yield Case("decode", size, dtype, method)
    for size in (80, 96):
        yield Case("prompt", size, "bf16", "keyformer")
        yield Case("decode", size, "bf16", "keyformer")
    for method in ("h2o", "keyformer"):
        yield Case("prompt", 128, "fp16", method)
    yield Case("decode", 128, "fp16", "keyformer")
    for method in ("tempered", "keyformer per key"):
        yield Case("prompt", 128, "bf16", method)
    for position in ("alibi", "window"):
        yield Case("prompt", 128, "bf16", "keyformer", position)
        yield Case("decode", 128, "bf16", "keyformer", position)
    yield Case("prompt", 128, "fp32", "keyformer", "alibi")
    yield Case("prompt", 128, "bf16", "keyformer", in_order=False)
    yield Case("decode", 128, "bf16", UNOBSERVED)
    yield Case("decode", 128, "bf16", "keyformer", slots=51)
    for phase in ("prompt", "decode"):
        yield Case(phase, 256, "fp16", "keyformer", upcast=True)


# What the launchers hand to the kernels.

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
ALIGNED = 16  # bytes of an address, or a divisor of an integer, that Triton makes use of
DEVICE = torch.device("meta")  # a build of torch without CUDA cannot index pretended CUDA tensors
KERNELS = {"prompt": ("row_log_sum_exp", "column_sums"), "decode": ("split_kv_attention", "combine_splits")}


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

    def __init__(self, kernel: Any, launches: list[Specialisation]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **named: self.launches.append(specialise(self.kernel, given, named))


def _pool(kind: str, device: torch.device) -> Tensor:
    """Stands for the pools of noise, which are kept for the whole process: a tensor without data must not be."""
    return torch.empty(POOL_SIZE, device=device)


def specialisations(case: Case) -> list[Specialisation]:
    """What a case's launcher would compile, in the order of its launches."""
    from kvexp.core import triton_kernels

    launches: list[Specialisation] = []
    with contextlib.ExitStack() as stack:
        for name in KERNELS[case.phase]:
            kernel = getattr(triton_kernels, name)
            stack.enter_context(patch.object(triton_kernels, name, _Noted(kernel, launches)))
        stack.enter_context(patch.object(triton_ops, "pool", _pool))
        (_launch_prompt if case.phase == "prompt" else _launch_decode)(case)
    return launches


def _launch_prompt(case: Case) -> None:
    (h, g), s, d, dtype = case.heads, case.slots, case.head_size, DTYPES[case.dtype]
    # strided, as models make it
    query = torch.empty(2, s, h * g, d, dtype=dtype, device=DEVICE).transpose(1, 2).unflatten(1, (h, g))
    keys = torch.empty(2, s, h, d, dtype=dtype, device=DEVICE).transpose(1, 2)
    positions = torch.empty(2, 1 if case.in_order else h, s, dtype=torch.int64, device=DEVICE)
    inputs = AttentionInputs(
        query,
        keys,
        keys,
        positions,
        torch.empty(2, s, dtype=torch.int64, device=DEVICE),
        case.params,
        in_column_order=case.in_order,
        padded=True,
    )
    spec = METHODS[case.method].score_spec
    assert spec is not None
    seeds = torch.empty(2, dtype=torch.int64, device=DEVICE)
    weights, taus = torch.empty(2, s, device=DEVICE), torch.empty(s, device=DEVICE)
    triton_ops.triton_column_sums(inputs, ObservedRows(spec, weights, taus, seeds, 0))


def _launch_decode(case: Case) -> None:
    (h, g), s, d, dtype = case.heads, case.slots, case.head_size, DTYPES[case.dtype]
    sequence = SimpleNamespace(
        query_steps=[1], max_new_tokens=64, seeds=torch.empty(2, dtype=torch.int64, device=DEVICE)
    )
    spec = None if case.method == UNOBSERVED else METHODS[case.method].score_spec
    state: Any = SimpleNamespace(score_spec=spec, sequence=sequence, index=0)
    slots = Slots(
        torch.empty(2, h, s, d, dtype=dtype, device=DEVICE),
        torch.empty(2, h, s, d, dtype=dtype, device=DEVICE),
        torch.empty(2, h, s, dtype=torch.int64, device=DEVICE),
        torch.empty(2, h, s, device=DEVICE),
    )
    query = torch.empty(2, h, g, 1, d, dtype=dtype, device=DEVICE)
    attention = triton_ops.FusedDecodeAttention([state], [2], DEVICE)
    attention(query, slots, torch.empty(2, 1, dtype=torch.int64, device=DEVICE), case.params)


# Compiled for GPUs that are not there.

WARP = 32  # threads
SHARED = {80: 163, 90: 227, 100: 227}  # compute capability -> KiB of shared memory that one program may have
RESOURCES = re.compile(r"REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def check_installed() -> None:
    """ConfigError where Triton is not installed or set to interpret."""
    if find_spec("triton") is None:
        raise ConfigError("Triton is not installed: run make gpu-compile, which fetches the pinned version")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 interprets kernels instead of compiling them: unset it")


def compiled(task: tuple[Specialisation, int]) -> list[str]:
    """Texts of what is wrong with a specialisation's machine code for a compute capability; empty: nothing."""
    spec, capability = task
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvexp.core import triton_kernels

    source = ASTSource(
        fn=getattr(triton_kernels, spec.kernel),
        signature=dict(spec.signature),
        constexprs=dict(spec.constants),
        attrs={(place,): [["tt.divisibility", 16]] for place in spec.aligned},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=dict(spec.options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        program = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return broken(usage, kernel.metadata.shared, capability)


def broken(usage: str, shared: int, capability: int) -> list[str]:
    """Texts of what a kernel's resources break. usage: of `cuobjdump -res-usage`; shared: bytes of dynamic memory.

    Registers are spilled to the stack, so one without a byte has no spills. ValueError where there is no kernel.
    """
    resources = RESOURCES.search(usage)
    if resources is None:
        raise ValueError(f"cuobjdump shows no kernel: {usage[:200]!r}")
    stack, local = map(int, resources.groups())
    wrong = [f"registers are spilled: {stack} bytes of stack, {local} of local memory"] if stack or local else []
    if shared > SHARED[capability] * 1024:
        wrong.append(f"{shared} bytes of shared memory, of {SHARED[capability]} KiB")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_code", description=__doc__)
    parser.add_argument("--only", default="", help="calls and kernels that contain this text")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        check_installed()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    start = time.perf_counter()
    calls: dict[Specialisation, str] = {}
    for case in cases():
        for spec in specialisations(case):
            if options.only in (call := f"{spec.kernel} {case}"):
                calls.setdefault(spec, call)
    tasks = [(spec, capability) for spec in calls for capability in SHARED]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        faults = [
            f"sm_{capability} {calls[spec]}: {why}"
            for (spec, capability), wrong in zip(tasks, pool.map(compiled, tasks), strict=True)
            for why in wrong
        ]
    seconds = time.perf_counter() - start
    summary = f"{len(tasks)} machine codes of {len(calls)} specialisations in {seconds:.0f} s; "
    print("\n".join([*faults, summary + f"{len(faults) or 'nothing'} wrong"]))
    return 1 if faults else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
