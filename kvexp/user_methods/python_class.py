"""A method class as a Python object, from a module or a cell of a notebook, and what identifies its code."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from kvexp.errors import ConfigError
from kvexp.source_files import INSTALLED, ModulePlace, code_digest, source_files, texts_digest
from kvexp.user_methods.admitted import AdmittedMethod
from kvexp.user_methods.method_class import check_class
from kvexp.user_methods.reference import load_from

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
