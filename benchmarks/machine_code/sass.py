"""What cuobjdump says of a kernel's machine code, what the code must hold, and the rows of table.csv."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.machine_code.launches import Specialisation

# `/*0010*/  @!P0 LDG.E.128 R4, [R2.64] ;`: an address, perhaps a predicate, then the instruction.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
TENSOR_CORES = re.compile(r"HMMA|HGMMA|UTC\w*MMA")  # of sm_80, sm_90 and sm_100
ASYNC_COPIES = ("LDGSTS", "UBLKCP", "UTMALDG")  # global to shared memory, past the registers
ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")  # on global memory; sm_100 hands out its tensor memory by ATOMS


@dataclass(frozen=True)
class MachineCode:
    """One kernel for one GPU generation.

    registers: per thread. stack: bytes per thread. shared: bytes of shared memory per program, static and dynamic.
    warps: per program. spill_stores, spill_loads: instructions on local memory, which is where registers are spilled
    to. tensor: instructions of the tensor cores. fma: float32 multiply-adds. global_loads: from global memory, async
    copies included; wide_loads: of 16 bytes per thread, and bulk copies. global_stores. atomics.
    """

    registers: int
    stack: int
    shared: int
    warps: int
    spill_stores: int
    spill_loads: int
    tensor: int
    fma: int
    global_loads: int
    wide_loads: int
    global_stores: int
    atomics: int

    @property
    def spills(self) -> int:
        """Spill stores and loads together."""
        return self.spill_stores + self.spill_loads


def read(usage: str, sass: str, *, shared: int, warps: int) -> MachineCode:
    """Read `cuobjdump -res-usage` and `cuobjdump -sass` of one kernel.

    shared: bytes of dynamic shared memory, which only the compiler knows. ValueError where there is no kernel.
    """
    found = RESOURCES.search(usage)
    names = INSTRUCTION.findall(sass)
    if found is None or not names:
        raise ValueError(f"cuobjdump shows no kernel: {usage[:200]!r}")
    registers, stack, static, _ = map(int, found.groups())
    kinds = Counter(name.partition(".")[0] for name in names)
    loads = [name for name in names if name.partition(".")[0] in ("LDG", *ASYNC_COPIES)]
    return MachineCode(
        registers,
        stack,
        static + shared,
        warps,
        spill_stores=kinds["STL"],
        spill_loads=kinds["LDL"],
        tensor=sum(count for kind, count in kinds.items() if TENSOR_CORES.fullmatch(kind)),
        fma=kinds["FFMA"] + 2 * kinds["FFMA2"],
        global_loads=len(loads),
        wide_loads=sum(".128" in name or name.startswith(("UBLKCP", "UTMALDG")) for name in loads),
        global_stores=kinds["STG"],
        atomics=sum(kinds[name] for name in ATOMICS),
    )


@dataclass(frozen=True)
class Device:
    """Limits of a GPU generation (CUDA C++ Programming Guide, table of compute capabilities).

    shared: bytes of shared memory that one program may have, and that a multiprocessor has. warps: that a
    multiprocessor runs at once. title: a GPU of this generation.
    """

    title: str
    shared: int
    shared_of_all: int
    warps: int = 64


KIB = 1024
DEVICES = {
    80: Device("A100", 163 * KIB, 164 * KIB),
    90: Device("H100", 227 * KIB, 228 * KIB),
    100: Device("B200", 227 * KIB, 228 * KIB),
}
REGISTERS = 64 * KIB  # of a multiprocessor
RESERVED = KIB  # bytes of shared memory that CUDA takes of every program
WITH_PRODUCTS = ("row_log_sum_exp", "column_sums", "split_kv_attention")  # combine_splits multiplies no matrices
MIN_WARPS = 4  # of 64 on a multiprocessor at once: one for each of its four schedulers

# (kernel, head size): why these may spill. Empty: none does.
MAY_SPILL: dict[tuple[str, int], str] = {}


def programs_at_once(code: MachineCode, capability: int) -> int:
    """How many programs of a kernel one multiprocessor holds at once: by registers, shared memory and warps."""
    device = DEVICES[capability]
    of_a_warp = -(-code.registers * 32 // 256) * 256  # registers are handed out to warps in pieces of 256
    by_registers = REGISTERS // (of_a_warp * code.warps)
    return min(by_registers, device.shared_of_all // (code.shared + RESERVED), device.warps // code.warps)


def broken(spec: Specialisation, code: MachineCode, capability: int) -> list[str]:
    """Texts of what is wrong with a kernel's machine code; empty where it holds all bars."""
    device, wrong = DEVICES[capability], []
    head_size = spec.tile.get("BLOCK_D", spec.tile.get("BLOCK_DV"))
    if code.spills and (spec.kernel, head_size) not in MAY_SPILL:
        wrong.append(f"{code.spill_stores} spill stores and {code.spill_loads} spill loads")
    if code.stack and not code.spills:
        wrong.append(f"{code.stack} bytes of stack")
    if code.shared > device.shared:
        wrong.append(f"{code.shared} bytes of shared memory, {device.title} gives a program {device.shared}")
    elif programs_at_once(code, capability) * code.warps < MIN_WARPS:
        wrong.append(f"{code.registers} registers for {code.warps} warps: no program fits a multiprocessor of 64 Ki")
    half = dict(spec.signature).get("q") in ("*bf16", "*fp16")
    if spec.kernel != "split_kv_attention":  # which weights values in their own dtype, whatever the logits' is
        half = half and not spec.tile.get("UPCAST")
    if spec.kernel in WITH_PRODUCTS and half != (code.tensor > 0):
        wrong.append("half-precision products take no tensor cores" if half else "float32 products take tensor cores")
    if code.atomics:
        wrong.append(f"{code.atomics} atomic operations: two runs could differ")
    return wrong


HEAD = (
    "kernel and call",
    "tile, warps",
    "registers",
    "shared KiB",
    "spills",
    "tensor cores",
    "loads, wide",
    "programs",
)


@dataclass(frozen=True)
class Line:
    """One specialisation: the calls it serves, and its machine code by compute capability."""

    spec: Specialisation
    calls: tuple[str, ...]
    codes: dict[int, MachineCode]

    def cells(self) -> tuple[str, ...]:
        """The cells of the table's row; three values stand for sm_80, sm_90 and sm_100, one for all."""
        tile, codes = self.spec.tile, self.codes
        rows = f"{tile['M']} x {tile['N']}" if "M" in tile else f"{tile['G']} x {tile['N']}"
        options = dict(self.spec.options)
        return (
            f"{self.spec.kernel} {self.calls[0]}",
            f"{rows}, {options.get('num_warps', 4)}",
            _each(codes, lambda code, _: str(code.registers)),
            _each(codes, lambda code, _: f"{code.shared / 1024:.3g}"),
            _each(codes, lambda code, _: str(code.spills)),
            _each(codes, lambda code, _: str(code.tensor)),
            _each(codes, lambda code, _: f"{code.global_loads}, {code.wide_loads}"),
            _each(codes, lambda code, capability: str(programs_at_once(code, capability))),
        )


def _each(codes: dict[int, MachineCode], what: Callable[[MachineCode, int], str]) -> str:
    """A value of every generation; once where all agree."""
    values = [what(code, capability) for capability, code in sorted(codes.items())]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def table(lines: list[Line], triton: str) -> str:
    """The table as CSV; its first column's name says which Triton made it."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow((f"Triton {triton}: {HEAD[0]}", *HEAD[1:]))
    rows.writerows(line.cells() for line in lines)
    return file.getvalue()


def differences(recorded: str, made: str) -> list[str]:
    """The lines that a recorded table lacks (+) and has too many (-); empty where it is up to date."""
    there, wanted = recorded.splitlines(), made.splitlines()
    return [f"+ {line}" for line in wanted if line not in there] + [f"- {line}" for line in there if line not in wanted]
