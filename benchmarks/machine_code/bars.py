"""What the machine code of a kernel must hold, on three generations of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.machine_code.launches import Specialisation
from benchmarks.machine_code.sass import MachineCode


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
    """What is wrong with a kernel's machine code, in words; empty where it holds all bars."""
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
