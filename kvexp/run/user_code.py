"""Methods and tasks that are not kvexp's own: a class in a user's module, file or package.

Nothing here decides whether code may run: callers hand over what a person has typed or written in Python.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvexp.tasks import Task
from kvexp.util.errors import ConfigError, did_you_mean
from kvexp.util.fields import defaults_of
from kvexp.util.files import path_of

# Group of the configuration whose option may be a user's class -> the class of kvexp's that it extends.
BASES = {"method": "kvexp.core.Method", "task": "kvexp.tasks.Task"}
FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<name>\w+))?")
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class AdmittedClass:
    """A user's class with what identifies its code.

    option: what `method=` or `task=` calls the class. source: what of a run's identity stands for the code: the
    class's name and the `code_digest` of each file. reference: how another process finds the class, None for a running
    script's.
    """

    option: str
    cls: type[Any]
    source: dict[str, Any]
    reference: str | None

    @property
    def group(self) -> str:
        """The group of the configuration in which it is an option."""
        return group_of(self.cls)

    @property
    def target(self) -> str:
        """The class's dotted name, the `_target_` of its configuration."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"


def group_of(cls: type[Any]) -> str:
    """`task` for a class of tasks, `method` for any other."""
    return "task" if issubclass(cls, Task) else "method"


_ADMITTED: dict[str, AdmittedClass] = {}


def admit(users: AdmittedClass) -> AdmittedClass:
    """Let configurations of this process name the class; a class of the same name and another place takes its place."""
    _ADMITTED[users.target] = users
    return users


def admitted(*groups: str) -> dict[str, AdmittedClass]:
    """Target -> class, of all that were admitted to these groups, or to any."""
    return {target: users for target, users in _ADMITTED.items() if users.group in (groups or BASES)}


def source_of(cls: type[Any]) -> dict[str, Any] | None:
    """Identity of a class's code (`AdmittedClass.source`); None for kvexp's own, which NUMERICS covers.

    ConfigError for a class of somebody else's that was never admitted.
    """
    if cls.__module__.partition(".")[0] == "kvexp":
        return None
    for users in _ADMITTED.values():
        if users.cls is cls:
            return users.source
    group = group_of(cls)
    raise ConfigError(
        f"{cls.__module__}.{cls.__qualname__} is no {group} of kvexp's: name it on the command line, as in "
        f"{group}={cls.__module__}.{cls.__qualname__}, or give it to kvexp.compare"
    )


# -- the code of a class: the files of its module and of what that imports from its folder or package -----------------


@dataclass(frozen=True)
class ModulePlace:
    """A module's dotted name and its file."""

    name: str
    file: Path

    @property
    def root(self) -> Path:
        """The folder that holds the module or its outermost package."""
        return self.file.parents[self.name.count(".") + (self.file.name == "__init__.py")]


def code_digest(text: str | bytes) -> str:
    """SHA-256 of Python code: comments, blank lines, layout and docstrings do not count.

    Docstrings count where code may read them, and so does everything in a text that is no Python.
    """
    plain = text if isinstance(text, str) else text.decode(errors="backslashreplace")
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(textwrap.dedent(plain))
        for node in ast.walk(tree) if "__doc__" not in plain and "inspect" not in plain else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                ast.get_docstring(node, clean=False) is not None
            ):
                node.body = node.body[1:] or [ast.Pass()]
        plain = ast.unparse(tree)
    return hashlib.sha256(plain.encode(errors="backslashreplace")).hexdigest()


def source_files(place: ModulePlace) -> dict[str, str]:
    """Path within the root -> `code_digest`, of the module and of all it imports from its own package or folder.

    Import statements are read wherever they stand; what is imported by a computed name is not seen. In a folder of
    installed packages only the package itself counts.
    """
    digests: dict[Path, str] = {}
    todo = [place.file]
    while todo:
        file = todo.pop()
        if file not in digests:
            text = file.read_bytes()
            digests[file] = code_digest(text)
            todo += [imported for imported in _imported_files(file, text, place) if imported.is_file()]
    return {path.relative_to(place.root).as_posix(): digest for path, digest in sorted(digests.items())}


def _imported_files(file: Path, text: bytes, place: ModulePlace) -> Iterator[Path]:
    """Yield the files that import statements may mean within the root, and the packages around it, which run first."""
    root = place.root
    yield from (folder / "__init__.py" for folder in file.parents if root in folder.parents)
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # importing says where
        return
    names = [(root, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            start = file.parents[node.level - 1] if node.level else root
            names += [(start, f"{node.module}.{alias.name}" if node.module else alias.name) for alias in node.names]
    package, alone = place.name.partition(".")[0], any(folder in INSTALLED for folder in root.parts)
    for start, name in names:
        path = start.joinpath(*name.split("."))
        first = path.relative_to(root).parts[0] if root in path.parents else "kvexp"
        if first == "kvexp" or (alone and first != package):
            continue
        for module in (path, *path.parents):  # of a.b.c the last may be a name that a/b.py defines
            if root in module.parents:
                yield from (module / "__init__.py", module.with_name(f"{module.name}.py"))


def place_of(reference: str) -> ModulePlace | None:
    """The module of FILE.py:CLASS or MODULE.CLASS as it lies now, the current folder searched first; None if not found.

    Nothing is imported: a reference that stands in a run's folder is data.
    """
    if (path := reference.rpartition(":")[0]).endswith(".py"):
        return ModulePlace(Path(path).stem, Path(path)) if Path(path).is_file() else None
    name = reference.rpartition(".")[0]
    spec = _found(name) if name else None
    file = spec.origin if spec is not None else None
    return ModulePlace(name, Path(os.path.abspath(file))) if file is not None and file.endswith(".py") else None


def _found(name: str) -> importlib.machinery.ModuleSpec | None:
    """The specification of a dotted name."""
    path, spec = [str(Path.cwd()), *sys.path], None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


# -- a class found by what somebody typed: my_module.MyMethod, keydiff.py, keydiff.py:KeyDiff ------------------------


def load_class(group: str, words: str) -> AdmittedClass | None:
    """Import the class that these words name; None for words that have no dot.

    words: MODULE.CLASS, importable from the current folder or PYTHONPATH; FILE.py with one class of the group or
    FILE.py:CLASS. ConfigError says what is wrong with the module, the class or its fields.
    """
    name: str | None
    if match := FILE.fullmatch(words):
        file, name = Path(os.path.abspath(path_of(match["file"], group))), match["name"]
        if not file.is_file():
            raise ConfigError(f"{group}={match['file']}: there is no such file{_near_file(file)}")
        place = ModulePlace(file.stem, file)
    elif "." in words:
        module, _, name = words.rpartition(".")
        place = _place_of_module(module, f"{group}={words}")
    else:
        return None
    cls, files = _class_of(place, group, name, words)
    source = {"class": f"{cls.__module__}.{cls.__qualname__}", "files": files}
    if match:
        return AdmittedClass(f"{place.name}.{cls.__name__}", cls, source, f"{place.file}:{cls.__name__}")
    return AdmittedClass(words, cls, source, words)


def _place_of_module(name: str, words: str) -> ModulePlace:
    if not all(word.isidentifier() for word in name.split(".")) or Path(words.partition("=")[2]).is_file():
        rows = ", or of rows FILE.jsonl, .json, .parquet" if words.startswith("task=") else ""
        raise ConfigError(f"{words} must be MODULE.CLASS or a file FILE.py, FILE.py:CLASS{rows}")
    spec = _found(name)
    if spec is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)  # packages that were installed as links to their sources
    if spec is None or not (spec.origin or "").endswith(".py"):
        near = _near_file(Path(f"{name}.py"))
        raise ConfigError(f"{words}: there is no module {name} in {Path.cwd()} or on PYTHONPATH{near}")
    return ModulePlace(name, Path(os.path.abspath(str(spec.origin))))


def _near_file(file: Path) -> str:
    """ "; did you mean keydiff.py?", of the Python files in its folder."""
    folder = file.parent if file.parent.is_dir() else Path()
    return did_you_mean(file.name, sorted(path.name for path in folder.glob("*.py")))


def base_of(group: str) -> type[Any]:
    """The class of kvexp's that the options of a group extend."""
    module, _, name = BASES[group].rpartition(".")
    cls: type[Any] = getattr(importlib.import_module(module), name)
    return cls


def _class_of(place: ModulePlace, group: str, name: str | None, words: str) -> tuple[type[Any], dict[str, str]]:
    """The class, and the digests of the files that it was made from. name: None for the only one of the module."""
    base = base_of(group)
    module, files = _import_anew(place)
    classes, where = classes_in(module, base), f"{place.name} ({place.file})"
    if name is None:
        if len(classes) != 1:
            if not classes:
                raise ConfigError(f"{place.file} has no class that extends {BASES[group]}")
            first, names = next(iter(classes)), ", ".join(classes)
            raise ConfigError(
                f"{place.file} has {len(classes)} {group}s ({names}); say which one, as in {words}:{first}"
            )
        (name,) = classes
    cls = getattr(module, name, None)
    if cls is None:
        has = did_you_mean(name, classes) or f"; its {group}s are {', '.join(classes) or '(none)'}"
        raise ConfigError(f"{words}: there is no class {name} in {where}{has}")
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(f"{words}: {name} in {where} is no class that extends {BASES[group]}")
    if cls.__module__.partition(".")[0] == "kvexp":
        raise ConfigError(f"{words}: {name} in {where} is kvexp's own {cls.__name__}; `kvexp {group}s` lists those")
    try:
        check_class(cls)
    except NameError as error:  # an annotation that is a text
        raise ConfigError(f"{words}: {user_line(error, place.root)}") from error
    return cls, files


def classes_in(module: ModuleType, base: type[Any]) -> dict[str, type[Any]]:
    """Name -> class, of those that extend `base` and that the module itself defines; no name begins with _."""
    classes = {
        name: value for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)
    }
    return {
        name: cls for name, cls in classes.items() if cls.__module__ == module.__name__ and not name.startswith("_")
    }


def check_class(cls: type[Any]) -> None:
    """ConfigError for a class whose fields no configuration could set."""
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == "kvexp":
            continue
        hints = vars(base).get("__annotations__", {})
        for name in defaults_of(cls):
            if name in vars(base) and name not in hints:
                value = vars(base)[name]
                raise ConfigError(
                    f"{base.__qualname__}.{name} has no type, without which it is no setting's default: write "
                    f"{name}: {type(value).__name__} = {value!r}"
                )
        fields = [name for name, hint in hints.items() if "ClassVar" not in str(hint)]
        if fields and "__dataclass_fields__" not in vars(base):
            raise ConfigError(
                f"{base.__qualname__} has the field {fields[0]} and is no dataclass; write @dataclass(frozen=True) in "
                f"the line above class {base.__qualname__}"
            )
    maker = next(base for base in cls.__mro__ if "__init__" in vars(base))
    if "__dataclass_fields__" not in vars(maker):
        raise ConfigError(
            f"{maker.__qualname__} has an __init__ of its own, whose arguments cannot be set: settings are fields "
            "of a dataclass, as in @dataclass(frozen=True), alpha: float = 0.3"
        )
    typing.get_type_hints(cls)
    for name, value in settings_of_class(cls).items():
        if not isinstance(value, bool | int | float | str | list | tuple | None):
            raise ConfigError(
                f"{cls.__qualname__}.{name} is a {type(value).__name__}, which no configuration can hold; a field is a "
                "number, a text, true or false, None or a list of those"
            )
    if issubclass(cls, Task):
        cls.check_class()


def settings_of_class(cls: type[Any]) -> dict[str, Any]:
    """Field -> default, of those that a command line may set; "???" where there is none."""
    return cls.defaults() if issubclass(cls, Task) else defaults_of(cls)


# -- importing a user's module as its files are now: nothing that was loaded or compiled before is taken up again ------

_IMPORTED: set[str] = set()  # first names of the modules that were imported here


def _import_anew(place: ModulePlace) -> tuple[ModuleType, dict[str, str]]:
    """Import a module as its files are now; returns it and its `source_files`. ConfigError names the user's line."""
    import torch  # noqa: F401  # first: the methods' own imports of it are not the user's lines

    top, files = place.name.partition(".")[0], source_files(place)
    paths = {str(place.root / name) for name in files}
    loaded = getattr(sys.modules.get(top), "__file__", None)
    theirs = loaded is not None and loaded not in paths and top not in _IMPORTED
    if top in sys.stdlib_module_names or top == "kvexp" or theirs:
        owner = "kvexp itself" if top == "kvexp" else loaded or "Python's own"
        raise ConfigError(f"{place.file} is called as a module that is there already ({owner}); rename it")
    for name, module in list(sys.modules.items()):
        if name != "__main__" and (name.partition(".")[0] == top or getattr(module, "__file__", None) in paths):
            del sys.modules[name]
    _IMPORTED.add(top)
    # Python takes up compiled files by second and size: an edit of the same length could run the code of before.
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = True, os.devnull
    root = str(place.root)
    sys.path.insert(0, root)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(place.name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {place.name} failed: {user_line(error, place.root)}") from error
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before
        sys.path.remove(root)
        if root not in sys.path:
            sys.path.append(root)  # for imports within functions
    if module.__file__ != str(place.file):
        raise ConfigError(f"{place.file} is hidden by {module.__file__}, which comes first; rename one of them")
    if source_files(place) != files:
        raise ConfigError(f"{place.file} changed while it was imported; start again when nothing writes to it")
    return module, files


def user_line(error: BaseException, root: Path) -> str:
    """ "keydiff.py line 7: NameError: name 'torhc' is not defined": an error with the user's last line in its trace."""
    words = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name} line {error.lineno}: {type(error).__name__}: {error.msg}"
    files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    user_lines = [(file, line) for file, line in files if root in file.parents and "site-packages" not in str(file)]
    if not user_lines:
        return words
    file, line = user_lines[-1]
    return f"{file.relative_to(root)} line {line}: {words}"


# -- a class as a Python object ---------------------------------------------------------------------------------------


def in_its_file(cls: type[Any]) -> AdmittedClass:
    """Find the file of a class; a class of a module is imported anew, so that its file is what will run.

    ConfigError for a class that stands in no file, by whose digest its rows differ from its next version's.
    """
    if "." in cls.__qualname__:
        raise ConfigError(f"{cls.__qualname__} stands within something else; put it at the top level")
    module = sys.modules.get(cls.__module__)
    place = Path(getattr(module, "__file__", None) or "")
    text = place.read_text(errors="replace") if place.suffix == ".py" and place.is_file() else ""
    if re.search(rf"^\s*class {cls.__name__}\b", text, re.MULTILINE) is None:
        raise ConfigError(
            f"{cls.__qualname__} stands in no file: write it into one (in a notebook %%writefile FILE.py, as the first "
            "line of its cell) and give the name FILE.py"
        )
    if module is not sys.modules["__main__"]:
        words = f"{cls.__module__}.{cls.__name__}" if "." in cls.__module__ else f"{place}:{cls.__name__}"
        return typing.cast(AdmittedClass, load_class(group_of(cls), words))
    # A script that runs: importing it would run it again. It is known by its file's name, as kvexp run would know it.
    check_class(cls)
    option = f"{place.stem}.{cls.__name__}"
    return AdmittedClass(option, cls, {"class": option, "files": source_files(ModulePlace(place.stem, place))}, None)
