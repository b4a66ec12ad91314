"""Importing a user's module as its files are now: nothing that was loaded or compiled before is taken up again."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from kvexp.errors import ConfigError
from kvexp.source_files import ModulePlace, source_files


def fresh_module(place: ModulePlace) -> tuple[ModuleType, dict[str, str]]:
    """The module, and its `source_files` as they were imported. ConfigError names the user's line where that fails."""
    import torch  # noqa: F401  # first: the methods' own imports of it are not the user's lines

    before = source_files(place)
    with _alone(place):
        try:
            module = _load(place)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"importing {place.name} failed: {user_line(error, place.root)}") from error
    if source_files(place) != before:
        raise ConfigError(f"{place.file} changed while it was imported; start again when nothing writes to it")
    return module, before


def user_line(error: BaseException, root: Path) -> str:
    """ "keydiff.py line 7: NameError: name 'torhc' is not defined": the last line of the user's on the way to it."""
    words = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name} line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if root in Path(frame.filename).parents and "site-packages" not in frame.filename]
    if not own:
        return words
    return f"{Path(own[-1].filename).relative_to(root)} line {own[-1].lineno}: {words}"


def _load(place: ModulePlace) -> ModuleType:
    if place.file.parent != place.root or place.file.name == "__init__.py":
        return importlib.import_module(place.name)
    # By its file: a folder of the same name beside it would come first otherwise.
    loader = _Uncompiled(place.name, str(place.file))
    spec = importlib.util.spec_from_file_location(place.name, place.file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[place.name]
        raise
    return module


def is_ours(name: str, place: ModulePlace) -> bool:
    """Whether a module of the place's top-level name was imported here before, from whatever folder."""
    loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
    return name.partition(".")[0] == place.top and isinstance(loader, _Uncompiled)


class _Uncompiled(importlib.machinery.SourceFileLoader):
    """Compiles the source. Python goes by seconds and sizes, and would take up the compiled form of before an edit."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _UserCodeFinder(importlib.abc.MetaPathFinder):
    def __init__(self, place: ModulePlace) -> None:
        self.place = place

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        if not self.place.holds(name, spec.origin):
            return None
        spec.loader = _Uncompiled(name, str(spec.origin))
        return spec


@contextlib.contextmanager
def _alone(place: ModulePlace) -> Iterator[None]:
    """In the block the user's modules are not imported yet, and their folder is searched first; afterwards last."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    held = {
        name: sys.modules.pop(name) for name, file in files.items() if place.holds(name, file) or is_ours(name, place)
    }
    root, finder = str(place.root), _UserCodeFinder(place)
    sys.path.insert(0, root)
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(root)
        if root not in sys.path:
            sys.path.append(root)  # for imports within functions
        for name, module in held.items():
            sys.modules.setdefault(name, module)
