"""English written for kvexp: fictional news articles, and sentences to hide among them.

Every place, person, company and number is invented, and nothing was taken from another text, so no model can have read
an article before. Each has three highlights, which together are its summary, and four questions, one to each quarter of
its words, whose answers stand in it once, letter for letter.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Question:
    """A question about one article, its answer, and the index of the paragraph the answer was taken from."""

    question: str
    answer: str
    paragraph: int


@dataclass(frozen=True)
class Article:
    """A news article of 450 to 900 words, title not counted, with its summary and questions."""

    id: str
    title: str
    topic: str
    style: str
    paragraphs: tuple[str, ...]
    highlights: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        """The paragraphs, one a line, without the title."""
        return "\n".join(self.paragraphs)


@dataclass(frozen=True)
class NeedleSentence:
    """A sentence that states one odd fact, to hide in a long text, and what to ask about it."""

    id: str
    needle: str
    question: str
    answer: str


@dataclass(frozen=True)
class AssistantFact:
    """A sentence of a system prompt, a question about it, and what a right answer has one of, in lower case."""

    statement: str
    ask: str
    accepted: tuple[str, ...]


@dataclass(frozen=True)
class Assistant:
    """A system prompt in parts: who the assistant is, three facts, and a secret with its code."""

    id: str
    assistant: str
    facts: tuple[AssistantFact, ...]
    secret: str
    code: str


@cache
def articles() -> tuple[Article, ...]:
    """All articles, in the order of their ids."""
    parsed = (_article(json.loads(content)) for content in _files().values())
    return tuple(sorted(parsed, key=lambda article: article.id))


def training_articles() -> tuple[Article, ...]:
    """The last twelve articles, from which a surrogate is trained where no other text is given.

    What was trained on them must not be evaluated on them: the first 24 are left for that.
    """
    return articles()[24:]


@cache
def needles() -> tuple[NeedleSentence, ...]:
    """All needles, in the order of the file."""
    return tuple(NeedleSentence(**row) for row in json.loads(_file("needles")))


@cache
def assistants() -> tuple[Assistant, ...]:
    """All assistants, in the order of the file."""
    return tuple(
        Assistant(
            row["id"],
            row["assistant"],
            tuple(AssistantFact(fact["statement"], fact["ask"], tuple(fact["accepted"])) for fact in row["facts"]),
            row["secret"]["statement"],
            row["secret"]["code"],
        )
        for row in json.loads(_file("assistants"))
    )


@cache
def own_words() -> dict[str, list[str]]:
    """Common English "adjectives" and "nouns", in small letters; none twice."""
    lists: dict[str, list[str]] = json.loads(_file("words"))
    return lists


@cache
def conversations() -> dict[str, Any]:
    """Own English of conversations: "names", "facts" of a person, pairs of "talk", and what is "heard" of facts."""
    words: dict[str, Any] = json.loads(_file("conversations"))
    return words


@cache
def articles_digest() -> str:
    """16 hex digits of the names and bytes of the articles' files."""
    total = hashlib.sha256()
    for name, content in _files().items():
        total.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def own_digest(name: str) -> str:
    """16 hex digits of the bytes of a file of own texts, such as "needles"."""
    return hashlib.sha256(_file(name)).hexdigest()[:16]


@cache
def _files() -> dict[str, bytes]:
    """Name -> bytes of each article's file, in the order of the names; read once, so that digest and texts agree."""
    files = (
        file
        for file in (resources.files("kvexp.tasks") / "articles_data" / "texts").iterdir()
        if file.name.endswith(".json")
    )
    return {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}


@cache
def _file(name: str) -> bytes:
    return (resources.files("kvexp.tasks") / "articles_data" / f"{name}.json").read_bytes()


def _article(row: dict[str, Any]) -> Article:
    """An article from its JSON object; a field too many or too few is a TypeError."""
    row["paragraphs"] = tuple(row["paragraphs"])
    row["highlights"] = tuple(row["highlights"])
    row["questions"] = tuple(Question(**question) for question in row["questions"])
    return Article(**row)
