"""One word, one meaning: no two files or classes of kvexp share a name; the glossary's names exist; old names work."""

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "kvexp").rglob("*.py"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
TWICE = {"__init__", "__main__", "base"}  # what every package may have

OLD = {
    "kvexp.core": ("Attention", "Geometry", "LayerState", "Ledger", "Moment", "Plan", "Rotation", "Timeline"),
    "kvexp.generate": ("Context", "Decoding", "MethodSpec", "finish", "Receipt", "Variant"),
    "kvexp.models": ("JoinedCache", "install"),
}


def classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]


def test_no_file_name_is_used_twice() -> None:
    names = Counter(path.stem for path in FILES if path.stem not in TWICE)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_class_name_is_used_twice() -> None:
    where: dict[str, list[str]] = {}
    for path in FILES:
        for name in classes(path):
            where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def terms() -> list[str]:
    """The first cells of the glossary's tables."""
    cells = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    return [cell.strip() for cell in cells if cell.strip() not in ("term", "---") and not set(cell) <= set("- ")]


def test_the_glossary_says_each_word_once() -> None:
    assert len(terms()) > 30
    assert [term for term, count in Counter(terms()).items() if count > 1] == []


def test_the_glossarys_classes_are_there() -> None:
    known = {name for path in FILES for name in classes(path)}
    named = {
        name for cell in re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert len(named) >= 5 and named <= known, named - known


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in OLD.items() for name in names])
def test_an_old_name_works_and_says_the_new_one(module: str, name: str) -> None:
    package = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is called {module}\.\w+ now") as told:
        what = getattr(package, name)
    assert f"{module}.{what.__name__} now" in str(told[0].message) and what is getattr(package, what.__name__)


def test_a_name_that_never_was_is_an_error_as_ever() -> None:
    core = importlib.import_module("kvexp.core")
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        core.Nonsense  # noqa: B018  # that it raises is the test
