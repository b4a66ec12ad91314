"""`make size`: code lines, files, words of text and public names of every room, held against the ceilings of size.toml.

    python tests/size.py

Exit code 1 above a ceiling. Code alone is counted: no blank line, comment or docstring, so to shorten those wins
nothing. A ceiling is raised in a commit of its own, which says what the lines buy and what is retired for them.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_suffix(".toml")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """What Python files hold. words: of docstrings and comments; names: public classes and functions of modules."""

    lines: int = 0
    files: int = 0
    words: int = 0
    names: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


def size_of(source: str) -> Size:
    """The size of one file with this source text."""
    tree, lines = ast.parse(source), source.splitlines()
    text = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            text |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code = [line for number, line in enumerate(lines, 1) if line.strip() and number not in text]
    words = sum(len(lines[number - 1].split()) for number in text)
    named = [node for node in tree.body if isinstance(node, DOCUMENTED[1:])]
    return Size(len(code), 1, words, sum(not node.name.startswith("_") for node in named))


def room_of(path: Path) -> str:
    """The room of a file, by its path below the root: a folder of kvexp, or a folder beside it."""
    parts = path.parts[:-1]
    return "/".join(parts[:2] if parts[0] == "kvexp" else parts[:1])


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """Room -> its size, of all rooms with Python files, and of kvexp as a whole."""
    found: dict[str, Size] = {}
    for top in ("kvexp", "hydra_plugins", "tests", "experiments", "benchmarks", "docs"):
        for path in sorted((root / top).rglob("*.py")):
            room = room_of(path.relative_to(root))
            size = size_of(path.read_text("utf-8"))
            found[room] = found.get(room, Size()) + size
    whole = [size for room, size in found.items() if room.partition("/")[0] == "kvexp"]
    return {**found, "all of kvexp": sum(whole, Size())}


def above(found: dict[str, Size], ceilings: dict[str, int]) -> list[str]:
    """What is wrong: rooms above their ceilings, rooms without one, and ceilings without a room."""
    wrong = [
        f"{room}: {size.lines:,} code lines, {size.lines - ceilings[room]:,} above its ceiling"
        for room, size in found.items()
        if size.lines > ceilings.get(room, size.lines)
    ]
    wrong += [f"{room}: no ceiling in size.toml" for room in found if room not in ceilings]
    return wrong + [f"{room}: a ceiling in size.toml, and no such room" for room in ceilings if room not in found]


def ceilings_of(text: str) -> dict[str, int]:
    """Room -> ceiling, of the lines `"room" = number` of a TOML table (Python 3.10 has no reader of TOML)."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {room.strip(' "'): int(number) for room, _, number in pairs}


def main() -> int:
    """Print the table and what is wrong; exit code 1 where something is."""
    found, ceilings = sizes(), ceilings_of(CEILINGS.read_text("utf-8"))
    print(f"{'room':<18}{'code lines':>11}{'ceiling':>9}{'files':>7}{'words':>8}{'public names':>14}")
    for room, size in found.items():
        lines, files, words, names = astuple(size)
        print(f"{room:<18}{lines:>11,}{ceilings.get(room, 0):>9,}{files:>7,}{words:>8,}{names:>14,}")
    wrong = above(found, ceilings)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
