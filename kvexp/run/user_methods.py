"""Eviction methods that are not kvexp's own: a class in a user's module or file, a notebook's cell, or a package.

Nothing here decides whether code may run: callers hand over what a person has typed or written in Python.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kvexp.run.source_files import INSTALLED, ModulePlace, code_digest, source_files, texts_digest
from kvexp.util import ConfigError, path_of

# The user's method classes that this process may build: those that were named on its command line or in Python.


@dataclass(frozen=True)
class AdmittedMethod:
    """A user's method class with what identifies its code.

    option: what `method=` calls the class. target: the class's dotted name, the `_target_` of its configuration.
    source: what of a run's identity stands for the code: the class's name and the SHA-256 of each file (of the
    notebook's cells, for a class in one). reference: how another process finds the class, None for a notebook's. code:
    digest of the same code without comments, layout and docstrings.
    """

    option: str
    target: str
    cls: type[Any]
    source: dict[str, Any]
    reference: str | None
    code: str


_ADMITTED: dict[str, AdmittedMethod] = {}


def admit(method: AdmittedMethod) -> AdmittedMethod:
    """Let configurations of this process name the class; a class of the same name and another place takes its place."""
    _ADMITTED[method.target] = method
    return method


def admitted() -> dict[str, AdmittedMethod]:
    """Target -> method, of all that were admitted."""
    return dict(_ADMITTED)


def source_of(cls: type[Any]) -> dict[str, Any] | None:
    """What identifies the code of a method class; None for kvexp's own, which NUMERICS stands for.

    ConfigError for a class of somebody else's that was never admitted.
    """
    if cls.__module__.partition(".")[0] == "kvexp":
        return None
    for method in _ADMITTED.values():
        if method.cls is cls:
            return method.source
    raise ConfigError(
        f"{cls.__module__}.{cls.__qualname__} is no method of kvexp's: name it on the command line, as in "
        f"method={cls.__module__}.{cls.__qualname__}, or give it to kvexp.compare"
    )


# Methods that installed packages offer: entry points of the group kvexp.methods.


GROUP = "kvexp.methods"


def installed_methods(own: Collection[str] = ()) -> dict[str, EntryPoint]:
    """Name -> entry point; nothing is imported. ConfigError for a name that two packages offer, or one of `own`."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in own:
            raise ConfigError(
                f"{package_of(point)} offers a method called {point.name}, which is one of kvexp's own; its entry "
                "point needs another name"
            )
        if point.name in found and found[point.name].value != point.value:
            raise ConfigError(
                f"{package_of(point)} and {package_of(found[point.name])} both offer a method called {point.name}; "
                "uninstall one of them"
            )
        found[point.name] = point
    return found


def package_of(point: EntryPoint) -> str:
    """ "kvexp-keydiff 0.1", the distribution that an entry point belongs to."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


# Importing a user's module as its files are now: nothing that was loaded or compiled before is taken up again.


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


# What a user's method class must be like for a configuration to build it, and its settings with their defaults.


MISSING = "???"  # OmegaConf's word for a value that has to be given


def methods_in(module: ModuleType) -> dict[str, type[Any]]:
    """Name -> class, of the methods that the module defines itself; names that begin with _ are none."""
    from kvexp.core import Method

    own = {name: value for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)}
    return {name: cls for name, cls in own.items() if cls.__module__ == module.__name__ and not name.startswith("_")}


def check_class(cls: type[Any]) -> None:
    """ConfigError for a class whose fields no configuration could set."""
    for each in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(each) or each.__module__.partition(".")[0] == "kvexp":
            continue
        fields = [name for name, hint in vars(each).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
        if fields:
            raise ConfigError(
                f"{each.__qualname__} has the field {fields[0]} and is no dataclass; write @dataclass(frozen=True) in "
                f"the line above class {each.__qualname__}"
            )
    typing.get_type_hints(cls)
    for name, value in settings_of_class(cls).items():
        if not _is_plain(value):
            raise ConfigError(
                f"{cls.__qualname__}.{name} is a {type(value).__name__}, which no configuration can hold; a field is a "
                "number, a text, true or false, None or a list of those"
            )


def settings_of_class(cls: type[Any]) -> dict[str, Any]:
    """Field -> default, "???" where there is none."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.init:
            value = field.default
            if field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            found[field.name] = MISSING if value is dataclasses.MISSING else value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


# A method class found by what somebody typed: my_module.MyMethod, keydiff.py, keydiff.py:KeyDiff, or a package's.


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


# A method class as a Python object, from a module or a cell of a notebook, and what identifies its code.


# What dataclasses compile from texts of their own.
MADE = (
    "__init__",
    "__repr__",
    "__eq__",
    "__hash__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__setattr__",
    "__delattr__",
)


def class_method(cls: type[Any]) -> AdmittedMethod:
    """The class as a configuration can build it; one of a module is imported anew, so that its file is what will run.

    ConfigError where its source cannot be had, or goes by a value that no digest can stand for.
    """
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if module is not None and file is not None and Path(file).is_file() and _is_in(cls, file):
        if "." in cls.__qualname__:
            raise ConfigError(f"{cls.__qualname__} stands within something else; put it at the top level of {file}")
        place = _place(module, Path(file))
        if module is not sys.modules["__main__"]:
            return load_from(place, cls.__name__)
        # A script that runs: importing it would run it again.
        check_class(cls)
        files = source_files(place)
        known = {"class": f"{place.name}.{cls.__name__}", "files": files}
        code = code_digest(place.root, files)
        return AdmittedMethod(f"{place.name}.{cls.__name__}", _target(cls), cls, known, None, code)
    check_class(cls)
    texts, codes = _cell_texts(cls)
    digest = hashlib.sha256("\n".join(f"{name}:\n{text}" for name, text in texts.items()).encode()).hexdigest()
    source = {"class": cls.__qualname__, "cells": digest}
    return AdmittedMethod(cls.__name__, _target(cls), cls, source, None, texts_digest(codes))


def _target(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _place(module: ModuleType, file: Path) -> ModulePlace:
    """A script that was started is known by its file's name, as kvexp run would know it."""
    name = file.stem if module is sys.modules["__main__"] else module.__name__
    parts = name.split(".")
    return ModulePlace(name, file, file.parents[len(parts) if file.name == "__init__.py" else len(parts) - 1])


def _is_in(cls: type[Any], file: str) -> bool:
    """Whether the class was compiled from this file; a class without functions of its own is taken to be."""
    return all(function.__code__.co_filename == file for function in _functions(cls))


def _functions(cls: type[Any]) -> Iterator[FunctionType]:
    """The functions that stand in the class's source, without decorators; those that dataclasses makes do not."""
    for name, value in vars(cls).items():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        inner = inspect.unwrap(inner) if callable(inner) else inner
        if isinstance(inner, FunctionType) and (name not in MADE or inner.__code__.co_filename != "<string>"):
            yield inner


# -- cells ------------------------------------------------------------------------------------------------------------


def _cell_texts(cls: type[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The source of a notebook's class and of all that it uses of the notebook, by name; plain values as they are now.

    Twice: a module that is used stands for its files in the first, for their code in the second.
    """
    found: dict[str, str] = {}
    codes: dict[str, str] = {}
    todo: list[tuple[str, Any]] = [(cls.__qualname__, cls), *((base.__qualname__, base) for base in cls.__mro__[1:])]
    while todo:
        name, item = todo.pop()
        if name in found or _is_of_a_library(item):
            continue
        if isinstance(item, ModuleType):
            place = _place(item, Path(str(item.__file__)))
            files = source_files(place)
            found[name], codes[name] = repr(files), code_digest(place.root, files)
            continue
        if not isinstance(item, type | FunctionType):
            found[name] = _plain_text(name, item, cls)
            continue
        text, known = _text(item, cls)
        found[name] = text
        todo += [(each, known[each]) for each in sorted(_names(text)) if each in known]
    return dict(sorted(found.items())), found | codes


def _is_of_a_library(item: Any) -> bool:
    """What installed packages, Python and kvexp define."""
    if not (isinstance(item, ModuleType) or callable(item)):
        return False
    module = item.__name__ if isinstance(item, ModuleType) else str(getattr(item, "__module__", None) or "builtins")
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in ("kvexp", "builtins") or top in sys.stdlib_module_names:
        return True
    return file is not None and any(part in INSTALLED for part in Path(file).parts)


def _text(item: type[Any] | FunctionType, cls: type[Any]) -> tuple[str, dict[str, Any]]:
    """The source of a class or function, and the names it can see."""
    functions = list(_functions(item)) if isinstance(item, type) else [item]
    if isinstance(item, type) and not functions:
        own = {name: value for name, value in vars(item).items() if not name.startswith("__") and _has_text(value)}
        return repr(sorted(own.items())), {}
    code = functions[0].__code__
    lines = linecache.getlines(code.co_filename)
    try:
        tree: ast.AST | None = ast.parse("".join(lines)) if lines else None
    except SyntaxError:
        tree = None
    kinds = ast.ClassDef if isinstance(item, type) else ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, kinds):
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        last = node.end_lineno or node.lineno
        if getattr(node, "name", item.__name__) == item.__name__ and first <= code.co_firstlineno <= last:
            return "".join(lines[first - 1 : last]), _seen_by(functions)
    raise ConfigError(
        f"the source of {item.__qualname__} cannot be had (made by exec(), or typed where no source is kept), so "
        f"rows of {cls.__qualname__} could not be told from those of its next version; put it into a file, or into a "
        "notebook's cell"
    )


def _seen_by(functions: list[FunctionType]) -> dict[str, Any]:
    """Name -> value, of the globals of functions of one cell and of what they hold of a function around them."""
    found = dict(functions[0].__globals__)
    for function in functions:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        found |= {name: cell.cell_contents for name, cell in cells}
    return found


def _has_text(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)


def _names(text: str) -> set[str]:
    tree = ast.parse(textwrap.dedent(text))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _plain_text(name: str, value: Any, cls: type[Any]) -> str:
    if isinstance(value, list | tuple | set | frozenset | dict):
        each = [*value, *value.values()] if isinstance(value, dict) else list(value)
        for item in each:
            _plain_text(name, item, cls)
        return repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise ConfigError(
        f"{cls.__qualname__} uses {name}, a {type(value).__name__} of the notebook, by whose value no run can be "
        "known; make it a field of the class, or compute it within a method of the class"
    )
