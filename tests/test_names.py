"""The glossary says each word once, its classes exist, and words it replaces do not come back."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "kvexp").rglob("*.py"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")


def classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]


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


PRIVATE = "sight|limbo|quota|timeline|ladder|rung|tempered_rows|moment|ledger|crew|tally"


def test_private_words_do_not_come_back() -> None:
    """Words that the glossary has a standard one for, as identifiers in the core and the layers above it."""
    words = set(PRIVATE.split("|"))
    found = []
    for path in FILES:
        if path.parts[-2] in ("decode", "observe", "core", "methods", "retrieval", "models", "generate"):
            text = path.read_text("utf-8")
            if not re.search(rf"\b({PRIVATE})\b", text):
                continue  # to parse every file takes seconds
            for node in ast.walk(ast.parse(text)):
                name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
                if name in words:
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []
