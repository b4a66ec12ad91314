"""Compiles specialisations to machine code for a GPU that need not be there, and reads the code."""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.machine_code.launches import Specialisation
from benchmarks.machine_code.sass import MachineCode, read
from kvexp.util import ConfigError

WARP = 32  # threads


def check_installed() -> str:
    """Triton's version; ConfigError where it is not installed or set to interpret."""
    if find_spec("triton") is None:
        raise ConfigError("Triton is not installed: run make gpu-compile, which fetches the pinned version")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 interprets kernels instead of compiling them: unset it")
    try:
        return version("triton")
    except PackageNotFoundError:
        import triton

        return str(triton.__version__)


def _kernel(name: str) -> Any:
    from kvexp.core import triton_kernels as triton_decode_kernels
    from kvexp.core import triton_kernels as triton_observe_kernels

    module = triton_observe_kernels if hasattr(triton_observe_kernels, name) else triton_decode_kernels
    return getattr(module, name)


def compile_one(task: tuple[Specialisation, int]) -> MachineCode:
    """The machine code of a specialisation for a compute capability (80, 90, …)."""
    spec, capability = task
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=_kernel(spec.kernel),
        signature=dict(spec.signature),
        constexprs=dict(spec.constants),
        attrs={(place,): [["tt.divisibility", 16]] for place in spec.aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=dict(spec.options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(made.asm["cubin"])
        usage, sass = (_cuobjdump(triton, option, path) for option in ("-res-usage", "-sass"))
    return read(usage, sass, shared=made.metadata.shared, warps=made.metadata.num_warps)


def _cuobjdump(triton: Any, option: str, path: Path) -> str:
    """What Triton's own cuobjdump prints of a file."""
    program = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([program, option, str(path)], capture_output=True, text=True, check=True).stdout


def compile_all(tasks: list[tuple[Specialisation, int]], workers: int) -> list[MachineCode]:
    """The machine code of every task, in their order, in so many processes."""
    if workers == 1:
        return list(map(compile_one, tasks))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(compile_one, tasks, chunksize=1))
