"""Reads what cuobjdump says of a kernel's machine code: resources and instructions (SASS)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

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
    copies included; wide_loads: those of 16 bytes per thread, and bulk copies. global_stores. atomics.
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
