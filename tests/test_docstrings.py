"""Docstrings start with a noun or a verb, no text is in the English of the first weeks, variables have real names."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(folder.name for folder in (ROOT / "kvexp").iterdir() if folder.is_dir() and any(folder.glob("*.py")))
# A docstring that begins like this leaves out its noun, which the reader then has to find in the body.
NO_NOUN = (
    "Of",
    "None",
    "The same",
    "Where",
    "With",
    "Those",
    "Nothing",
    "Nobody",
    "Nearly",
    "So",
    "And",
    "But",
    "Also",
)
# "Kept by layer": a participle without its noun. "Kept slots of a layer" has one.
PARTICIPLE = re.compile(
    r"(?:[A-Z]\w+ed|Told|Given|Kept|Made|Found|Written|Held|Seen|Taken|Known|Drawn|Chosen)"
    r"(?:[.,;:]| (?:by|of|from|in|at|with|as|to|for|on|when|where|once|before|after|if|unless|until|that|and|is|are)\b)"
)
MARKS = ("told", "beside", "goes by", "in words", "those of")
# Names of variables that say nothing of what they hold.
EMPTY_NAMES = frozenset(
    ("asked", "each", "found", "its", "made", "one", "own", "part", "some", "there", "those", "what")
)
# Files and folders whose variables are not read yet.
UNNAMED = re.compile(
    r"experiments/(findings|lib/league|methods_league|pages/|studies/(engines|ruler_board))"
    r"|kvexp/run/(build|session)"
)
# Uses that are the plain word: add one only where no standard term says the same.
ALLOWED: tuple[str, ...] = (
    '"told"',  # a column of recorded CSV files
    "above beside under",  # a word list of the testbed's language
    'f"beside {other.name}"',  # part of a fingerprint
)


def docstrings(folder: Path) -> list[tuple[str, str]]:
    """Every docstring of the Python files in `folder` and below, as (place, text)."""
    found = []
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}"
                    found.append((place, text))
    return found


def places(name: str) -> list[Path]:
    """What one case of the tests covers: a package of kvexp, the modules beside the packages, or another folder."""
    return sorted((ROOT / "kvexp").glob("*.py")) if name == "modules" else [ROOT / name]


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of a page's lines; of a Python file, of its comments, texts and names: `in words` is code."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text("utf-8").splitlines(), 1)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.NAME):
                yield from enumerate(token.string.splitlines(), token.start[0])


def empty_names(node: ast.AST, *, public: bool = True, in_class: bool = False) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable below `node` with an empty name, and of each argument that callers do not see.

    public: whether callers name the arguments of a function defined here; in_class: whether names bound here are a
    class's attributes, which its users see.
    """
    for child in ast.iter_child_nodes(node):
        inside = {"public": public, "in_class": in_class}
        name, line = None, getattr(child, "lineno", 0)
        if isinstance(child, ast.ClassDef):
            inside = {"public": public and not child.name.startswith("_"), "in_class": True}
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = child.name.startswith("_") and not child.name.endswith("__")
            if not public or hidden:
                yield from empty_arguments(child.args)
            inside = {"public": False, "in_class": False}
        elif isinstance(child, ast.Lambda):
            yield from empty_arguments(child.args)
        elif isinstance(child, ast.comprehension):
            inside["in_class"] = False
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            name = None if in_class else child.id
        elif isinstance(child, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = child.name
        if name in EMPTY_NAMES:
            yield line, name
        yield from empty_names(child, **inside)


def empty_arguments(arguments: ast.arguments) -> Iterator[tuple[int, str]]:
    """(line, name) of each argument with an empty name."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg) and argument.arg in EMPTY_NAMES:
            yield argument.lineno, argument.arg


PACKAGES = ["modules", *(f"kvexp/{name}" for name in FOLDERS), "experiments", "benchmarks", "hydra_plugins"]


@pytest.mark.parametrize("name", [*PACKAGES, "tests"])
def test_a_docstring_starts_with_its_noun_or_a_verb(name: str) -> None:
    wrong = [
        f"{place}: {text.splitlines()[0]}"
        for folder in places(name)
        for place, text in docstrings(folder)
        if re.match(rf"(?:{'|'.join(NO_NOUN)})\b", text) or PARTICIPLE.match(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [*PACKAGES, "pages"])
def test_no_text_has_the_marks_of_the_old_style(name: str) -> None:
    if name == "pages":
        files = [
            path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").glob("*.md"))
        ]
    else:
        files = [
            path for folder in places(name) for path in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])
        ]
    marks = re.compile(rf"\b(?:{'|'.join(MARKS)})\b")
    wrong = []
    for path in files:
        for number, line in lines_of(path):
            kept = line
            for allowed in ALLOWED:
                kept = kept.replace(allowed, "")
            if marks.search(kept):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, f"{len(wrong)} lines\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", PACKAGES)
def test_variables_say_what_they_hold(name: str) -> None:
    files = [
        path for folder in places(name) for path in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])
    ]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {empty}"
        for path in files
        if not UNNAMED.match(str(path.relative_to(ROOT)))
        for line, empty in empty_names(ast.parse(path.read_text("utf-8")))
    ]
    assert files
    assert not wrong, f"{len(wrong)} empty names\n" + "\n".join(wrong)


def test_empty_names_are_those_that_no_caller_sees() -> None:
    """Variables, and arguments of private, nested and lambda functions; not what a function or class is used by."""
    bad = (
        "found = 1",
        "for each in x: pass",
        "with x as made: pass",
        "def f(x):\n    own: int = x",
        "def f(x):\n    x = [one for one in x]",
        "def f(x):\n    return (part := x)",
        "def _f(asked): pass",
        "def f():\n    def g(what): pass",
        "class _A:\n    def f(self, there): pass",
        "class A:\n    def _f(self, *those): pass",
        "class A:\n    x = {one for one in y}",
        "f(lambda some: 0)",
    )
    good = (
        "def f(found): pass",
        "class A:\n    what: str\n    def __init__(self, own): pass",
        "f(made=1)",
        "x.own = x.found",
        "rows_found = each_row",
    )
    assert [len([*empty_names(ast.parse(text))]) for text in bad] == [1] * len(bad)
    assert not any([*empty_names(ast.parse(text))] for text in good)


def test_the_rules_see_what_they_are_for() -> None:
    """Sentences of the kind that the rules reject, and near ones that they must not."""
    bad = (
        "Of zeros.",
        "The same for heads.",
        "None where nobody asks.",
        "Kept by layer.",
        "Written, not read.",
        "Told by name.",
    )
    good = ("Kept slots of a layer.", "Read the rows.", "Set of slots.", "Offset of a row.", "Nonexistent folder.")
    pattern = re.compile(rf"(?:{'|'.join(NO_NOUN)})\b")
    assert all(pattern.match(text) or PARTICIPLE.match(text) for text in bad)
    assert not any(pattern.match(text) or PARTICIPLE.match(text) for text in good)
