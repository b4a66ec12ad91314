"""Pages of results have one form, few words and few numbers; tables of all pages are tables."""

from __future__ import annotations

import itertools
import re

import pytest
from pages import ROOT

from experiments import pages
from experiments.studies import llama_cpp

DOCS = ROOT / "docs"
WORDS, DECIMALS, ANSWER_NUMBERS, TABLE_ROWS, CURVES = 700, 25, 3, 12, 7
NUMBER = re.compile(r"(?<![\w.-])[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
RECORDING = re.compile(r"experiments/claims/|(tests/fixtures|benchmarks/results)/\S|\w\.csv")
DECIMAL = re.compile(r"\d[.]\d")
MARKDOWN = sorted(
    {path for folder in (".", "docs", "experiments", "benchmarks") for path in (ROOT / folder).glob("*.md")}
)


def lines_of(text: str) -> list[str]:
    """Lines without blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines()


def prose(text: str) -> str:
    """What is neither a table, nor code, nor a comment."""
    kept = [line for line in lines_of(text) if not line.startswith(("|", "    ", "<!--", "!["))]
    return "\n".join(kept)


def tables(text: str) -> list[list[str]]:
    """The tables of a page: lines that begin with a bar, one after another."""
    found: list[list[str]] = [[]]
    for line in lines_of(text):
        if line.startswith(("| ", "|-", "|:")):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def answer(text: str) -> str:
    """The first paragraph below the title, as words."""
    return re.sub(r"\]\([^)]*\)|[*`]", "", text.split("\n\n")[1]).replace("\n", " ")


RESULTS = [name for name in pages.named() if name != "index"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_of_results_has_the_form(name):
    text = pages.path_of(name).read_text("utf-8")
    folded = text.partition("<details")[2].partition("</details>")[0]
    opened = text.replace(folded, "")
    assert re.match(r"# .*\?\n\n\*\*", text), "its title is a question, its first words the answer in bold"
    assert len(re.findall(r"[.:?!](?: |$)", re.sub(r"\d[.]\d|vs\.", "", answer(text)))) <= 4, "three short sentences"
    names = r"SmolLM2-\d+M|[A-Z]\w*-?\d+(?:B|M)\b|gemma\w*|llama\.\w+|Fig\. \d+"
    assert len(NUMBER.findall(re.sub(names, "", answer(text)))) <= ANSWER_NUMBERS + 1, "three numbers (a range is one)"
    shown = re.findall(r"!\[[^]]+\]\((?:\.\./docs/)?(\S+)\)", text)
    assert shown == [f"{name}.svg"], "one figure, made by experiments.pages"
    assert len(tables(opened)) == 1, "one table that is not folded"
    assert len(tables(opened)[0]) <= TABLE_ROWS + 2
    says_not = opened.partition("## What this does not say\n\n")[2].partition("\n\n")[0]
    assert 1 <= len(re.findall(r"^- ", says_not, flags=re.M)) <= 2
    assert "<summary>How it was measured</summary>" in folded
    assert re.search(r"^## The command\n\n    \S", opened, flags=re.M)
    assert len(text.split()) <= WORDS
    assert len(DECIMAL.findall(prose(text))) <= DECIMALS


@pytest.mark.parametrize("name", pages.named())
def test_the_figure_and_table_are_made_of_the_recording(name, monkeypatch, tmp_path):
    text, copy = pages.path_of(name).read_text("utf-8"), tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    monkeypatch.setattr(pages, "path_of", lambda _: copy)
    pages.make(name)
    assert copy.read_text("utf-8") == text
    assert (tmp_path / f"{name}.svg").stat().st_size < 400_000
    assert (DOCS / f"{name}.svg").exists()


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_table_is_one(path):
    """A table has a head, a rule and as many cells in each row; a blank line inside would end it."""
    for table in tables(path.read_text("utf-8")):
        assert len(table) > 1 and re.fullmatch(r"\|(?: *:?-+:? *\|)+", table[1]), f"no table: {table[0]}"
        widths = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in table}
        assert len(widths) == 1, f"rows of {sorted(widths)} bars: {table[0]}"


def test_the_table_of_llama_cpp_is_made_of_its_recording(tmp_path):
    text, copy = (DOCS / "llama_cpp.md").read_text("utf-8"), tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    assert llama_cpp.main(["page", str(DOCS / "llama_cpp.csv"), "--page", str(copy)]) == 0
    assert copy.read_text("utf-8") == text


def test_answers_of_the_first_page_are_those_of_the_pages():
    """Every number of an answer is on a page that the row links to, and that is made of or names its recording."""
    recorded = {pages.path_of(name) for name in RESULTS}
    rows = tables((DOCS / "index.md").read_text("utf-8"))[0][2:]
    assert len(rows) == 10
    for row in rows:
        _, _, said, links, _ = row.split("|")
        linked = {path: path.read_text("utf-8") for path in map(DOCS.joinpath, re.findall(r"\]\(([^)#]+)", links))}
        sourced = [text for path, text in linked.items() if path.resolve() in recorded or RECORDING.search(text)]
        known = {number for text in sourced for number in NUMBER.findall(text)}
        assert set(NUMBER.findall(said)) <= known, row


def test_too_much_for_a_figure_or_a_table_is_refused():
    _, (axes,) = pages.blank()
    with pytest.raises(ValueError, match="8 curves"):
        pages.curves(axes, [pages.Curve(str(n), [1, 2], [1, 2]) for n in range(CURVES + 1)], "x")
    with pytest.raises(ValueError, match="13 rows"):
        pages.markdown(["a"], [["1"]] * (TABLE_ROWS + 1))
    with pytest.raises(ValueError, match="has no lines"):
        pages.with_table("# Page", "decoding", "| a |")


def test_names_at_the_ends_of_curves_do_not_overlap():
    _, (axes,) = pages.blank()
    pages.curves(axes, [pages.Curve(str(n), [1, 2], [1, 1 + n / 1000]) for n in range(CURVES)], "x")
    places = sorted(text.get_position()[1] for text in axes.texts)
    assert min(high - low for low, high in itertools.pairwise(places)) > 0.05
