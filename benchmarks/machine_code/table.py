"""The table of docs/gpu.md: one line per specialisation, the three GPU generations side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine_code.bars import programs_at_once
from benchmarks.machine_code.launches import Specialisation
from benchmarks.machine_code.sass import MachineCode

BEGIN, END = "<!-- machine code: begin -->", "<!-- machine code: end -->"
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
            f"`{self.spec.kernel}` {self.calls[0]}",
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


def markdown(lines: list[Line], triton: str) -> str:
    """The generated part of the page, between its marks."""
    rows = [HEAD, ("---",) * len(HEAD), *(line.cells() for line in lines)]
    made = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{BEGIN}\n\nTriton {triton}; sm_80 / sm_90 / sm_100, or one number for all three.\n\n{made}\n\n{END}"


def differences(page: Path, made: str) -> list[str]:
    """The lines that a page's generated part lacks (+) and has too many (-); empty where it is up to date."""
    there = generated(page.read_text(encoding="utf-8")).splitlines()
    wanted = made.splitlines()
    return [f"+ {line}" for line in wanted if line not in there] + [f"- {line}" for line in there if line not in wanted]


def generated(text: str) -> str:
    """A page's generated part, its marks included; ValueError without marks."""
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def write(page: Path, made: str) -> None:
    """Put the generated part into the page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace(generated(text), made), encoding="utf-8")
