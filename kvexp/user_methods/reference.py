"""A method class found by what somebody typed: my_module.MyMethod, keydiff.py, keydiff.py:KeyDiff, or a package's."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvexp.errors import ConfigError
from kvexp.paths import path_of
from kvexp.source_files import ModulePlace, code_digest
from kvexp.user_methods.admitted import AdmittedMethod
from kvexp.user_methods.fresh_import import fresh_module, is_ours, user_line
from kvexp.user_methods.installed import installed_methods
from kvexp.user_methods.method_class import check_class, methods_in

FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<name>\w+))?")


def load_method(words: str) -> AdmittedMethod | None:
    """Import the class that these words name; None for words that have no dot and that no installed package offers.

    words: MODULE.CLASS, importable from the current folder or PYTHONPATH; FILE.py with one method or FILE.py:CLASS; the
    name of an entry point. ConfigError says what is wrong with the module, the class or its fields.
    """
    if found := FILE.fullmatch(words):
        place = _place_of_file(found["file"])
        cls = _class_of(place, found["name"], words)
        return _described(cls[0], f"{place.name}.{cls[0].__name__}", f"{place.file}:{cls[0].__name__}", cls[1], place)
    if "." in words:
        module, _, name = words.rpartition(".")
        place = _place_of_module(module, words)
        cls = _class_of(place, name, words)
        return _described(cls[0], words, words, cls[1], place)
    point = installed_methods().get(words)
    if point is None:
        return None
    place = _place_of_module(point.module, words)
    cls = _class_of(place, point.attr, f"{words} ({point.value})")
    return _described(cls[0], words, words, cls[1], place)


def load_from(place: ModulePlace, name: str) -> AdmittedMethod:
    """Import the class of this name, of a module that is known."""
    words = f"{place.name}.{name}"
    cls = _class_of(place, name, words)
    return _described(cls[0], words, f"{place.file}:{name}" if "." not in place.name else words, cls[1], place)


def _described(
    cls: type[Any], option: str, reference: str, files: dict[str, str], place: ModulePlace
) -> AdmittedMethod:
    target = f"{cls.__module__}.{cls.__qualname__}"
    source = {"class": target, "files": files}
    return AdmittedMethod(option, target, cls, source, reference, code_digest(place.root, files))


def _class_of(place: ModulePlace, name: str | None, words: str) -> tuple[type[Any], dict[str, str]]:
    """The class, and the digests of the files that it was made from. name: None for the only method of the module."""
    module, files = fresh_module(place)
    there = methods_in(module)
    if name is None:
        if len(there) != 1:
            some = f"{len(there)} methods ({', '.join(there)})" if there else "no class that extends kvexp.core.Method"
            told = f"; say which one, as in {words}:{next(iter(there))}" if there else ""
            raise ConfigError(f"{place.file} has {some}{told}")
        (cls,) = there.values()
    else:
        cls = _named(module, name, list(there), words)
    try:
        check_class(cls)
    except NameError as error:  # an annotation that is a text
        raise ConfigError(f"{words}: {user_line(error, place.root)}") from error
    return cls, files


def _named(module: ModuleType, name: str, there: Sequence[str], words: str) -> type[Any]:
    from kvexp.core import Method

    where = f"{module.__name__} ({module.__file__})"
    cls = getattr(module, name, None)
    if cls is None:
        near = difflib.get_close_matches(name, there, 1, cutoff=0.5)
        has = f"; did you mean {near[0]}?" if near else f"; its methods are {', '.join(there) or '(none)'}"
        raise ConfigError(f"{words}: there is no class {name} in {where}{has}")
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        kind = "a module" if isinstance(cls, ModuleType) else type(cls).__name__ if not isinstance(cls, type) else ""
        raise ConfigError(
            f"{words}: {name} in {where} is {kind or 'a class that does not extend kvexp.core.Method'}; a method is a "
            "class that extends kvexp.core.Method"
        )
    if cls.__module__.partition(".")[0] == "kvexp":
        raise ConfigError(f"{words}: {name} in {where} is kvexp's own {cls.__name__}; `kvexp methods` lists those")
    return cls


def _place_of_file(words: str) -> ModulePlace:
    file = Path(os.path.abspath(path_of(words, "method_file")))
    if not file.is_file():
        raise ConfigError(f"method_file={words}: there is no such file{_near_file(file)}")
    place = ModulePlace(file.stem, file, file.parent)
    _check_name(place)
    return place


def _place_of_module(name: str, words: str) -> ModulePlace:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"method={words} must be MODULE.CLASS or a file FILE.py, FILE.py:CLASS")
    origin = _origin(name)
    if origin is None:
        near = _near_file(Path(f"{name}.py"))
        raise ConfigError(f"method={words}: there is no module {name} in {Path.cwd()} or on PYTHONPATH{near}")
    file = Path(os.path.abspath(origin))
    parts = name.split(".")
    up = len(parts) if file.name == "__init__.py" else len(parts) - 1
    place = ModulePlace(name, file, file.parents[up])
    _check_name(place)
    return place


def _origin(name: str) -> str | None:
    """The module's file, the current folder searched first; nothing is imported for that, unless a finder needs to."""
    path: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or [])
    if spec is None:
        try:
            spec = importlib.util.find_spec(name)  # packages that were installed as links to their sources
        except (ImportError, ValueError):
            return None
    return spec.origin if spec is not None and (spec.origin or "").endswith(".py") else None


def _check_name(place: ModulePlace) -> None:
    """ConfigError for a module that Python or somebody else has a module of the same name for."""
    loaded = getattr(sys.modules.get(place.top), "__file__", None)
    theirs = loaded is not None and not place.holds(place.top, loaded) and not is_ours(place.top, place)
    if place.top in sys.stdlib_module_names or place.top == "kvexp" or theirs:
        owner = "kvexp itself" if place.top == "kvexp" else loaded or "Python's own"
        raise ConfigError(f"{place.file} is called as a module that is there already ({owner}); rename it")


def _near_file(file: Path) -> str:
    """ "; did you mean keydiff.py?", of the Python files beside it."""
    folder = file.parent if file.parent.is_dir() else Path()
    near = difflib.get_close_matches(file.name, sorted(path.name for path in folder.glob("*.py")), 1)
    return f"; did you mean {near[0]}?" if near else ""
