"""The files that a user's module is made of: its own, its packages', those beside it that it imports; their code."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvexp.util import file_digest

OURS = ("kvexp", "hydra_plugins", "__main__")
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class ModulePlace:
    """A module's dotted name, its file, and the root: the folder in which its first name lies."""

    name: str
    file: Path
    root: Path

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def is_near(self, name: str) -> bool:
        """Whether the top-level name is the user's code too: the module's own package, or a neighbour in its folder.

        In a folder of installed packages only the package itself is.
        """
        if name in OURS:
            return False
        if name == self.top:
            return True
        alone = any(part in INSTALLED for part in self.root.parts)
        return not alone and ((self.root / f"{name}.py").is_file() or (self.root / name).is_dir())

    def holds(self, name: str, file: str | None) -> bool:
        """Whether a module of this dotted name and file is the user's code."""
        top = name.partition(".")[0]
        if file is None or not self.is_near(top):
            return False
        path = Path(file)
        return path in (self.file, self.root / f"{top}.py") or self.root / top in path.parents


def source_files(place: ModulePlace) -> dict[str, str]:
    """Path within the root -> SHA-256, of the module and of all it imports from its own package or folder.

    Import statements are read wherever they stand; what is imported by a computed name is not seen.
    """
    found: dict[Path, str] = {}
    todo = [(place.name, place.file), *_packages(place, place.name)]
    while todo:
        name, file = todo.pop()
        if file in found:
            continue
        found[file] = file_digest(file)
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except SyntaxError:  # importing says where
            continue
        for each in _imported(tree, name, file.name == "__init__.py"):
            if place.is_near(each.partition(".")[0]) and (path := _file(place.root, each)) is not None:
                todo += [(each, path), *_packages(place, each)]
    return {path.relative_to(place.root).as_posix(): digest for path, digest in sorted(found.items())}


def code_digest(root: Path, files: Mapping[str, str]) -> str:
    """SHA-256 of the code in these `source_files`: comments, blank lines, layout and docstrings do not count."""
    return texts_digest({name: (root / name).read_bytes() for name in files})


def texts_digest(texts: Mapping[str, str | bytes]) -> str:
    """`code_digest` of sources by name."""
    each = [f"{name}:{_bare(text)}" for name, text in sorted(texts.items())]
    return hashlib.sha256("\n".join(each).encode(errors="backslashreplace")).hexdigest()


def _bare(text: str | bytes) -> str:
    """The syntax tree in words; a text that is no Python as it stands. Docstrings stay where code may read them."""
    plain = text if isinstance(text, str) else text.decode(errors="backslashreplace")
    try:
        tree = ast.parse(textwrap.dedent(text) if isinstance(text, str) else text)
    except (SyntaxError, ValueError):
        return plain
    if "__doc__" in plain or "inspect" in plain:
        return ast.dump(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def place_of(reference: str) -> ModulePlace | None:
    """Where FILE.py:CLASS or MODULE.CLASS lies now, the current folder searched first; None where it is not found.

    Nothing is imported: a reference that stands in a run's folder is data.
    """
    if (path := reference.rpartition(":")[0]).endswith(".py"):
        plain = Path(path)
        return ModulePlace(plain.stem, plain, plain.parent) if plain.is_file() else None
    name = reference.rpartition(".")[0]
    file = _found(name) if name else None
    if file is None:
        return None
    return ModulePlace(name, file, file.parents[name.count(".") + (file.name == "__init__.py")])


def _found(name: str) -> Path | None:
    """The file of a dotted name."""
    path = [str(Path.cwd()), *sys.path]
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith(".py"):
        return None
    return Path(origin).absolute()


def _imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names of what may be a module among the imported names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - 1 if is_package else node.level
            parts = module.split(".")
            here = parts[: len(parts) - up] if node.level else []
            start = ".".join([*here, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def _packages(place: ModulePlace, name: str) -> list[tuple[str, Path]]:
    """The packages that importing the module runs first."""
    parts = name.split(".")
    each = [".".join(parts[:count]) for count in range(1, len(parts))]
    return [(one, file) for one in each if (file := place.root.joinpath(*one.split("."), "__init__.py")).is_file()]


def _file(root: Path, name: str) -> Path | None:
    path = root.joinpath(*name.split("."))
    return next((file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None)
