"""The articles and needles that come with kvexp: complete, apart from each other, each answer found in one place."""

import json
import re
from dataclasses import FrozenInstanceError
from importlib import resources

import pytest

from kvexp.articles import Article, Question, articles, needles

ARTICLES = articles()
# Words that say nothing alone: an answer may share them with its question.
SMALL_WORDS = {"a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "the", "to", "with"}
GUESSED = {"yes", "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"}
SHARED = 8  # words in a row that no two texts may have in common

each_article = pytest.mark.parametrize("article", ARTICLES, ids=[article.id for article in ARTICLES])


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """Every SHARED words of a text that follow each other."""
    found = words(text)
    return {tuple(found[start : start + SHARED]) for start in range(len(found) - SHARED + 1)}


def places(answer: str, text: str) -> list[int]:
    """Where an answer stands in a text as whole words."""
    return [match.start() for match in re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text)]


def sentences(text: str) -> int:
    return len(re.findall(r"[.!?]['\"]?(?= [A-Z\"']|$)", text))


def in_whole(article: Article) -> str:
    return f"{article.title}\n{article.text}"


def test_there_are_enough_and_no_two_are_alike():
    assert len(ARTICLES) >= 32
    for field in ("id", "title", "topic", "text"):
        assert len({getattr(article, field) for article in ARTICLES}) == len(ARTICLES), field
    assert len({article.style for article in ARTICLES}) >= 12
    assert [article.id for article in ARTICLES] == sorted(article.id for article in ARTICLES)


def test_the_lengths_are_spread():
    lengths = [len(article.text.split()) for article in ARTICLES]
    for least, most in ((450, 550), (550, 700), (700, 900)):
        assert sum(least <= length <= most for length in lengths) >= len(ARTICLES) / 4


@each_article
def test_an_article_is_complete(article):
    assert re.fullmatch(r"\d\d(-[a-z]+)+", article.id)
    assert article.title and article.topic and article.style
    assert 450 <= len(article.text.split()) <= 900
    assert len(article.highlights) == len(set(article.highlights)) == 3
    assert len(article.questions) == 4
    for line in (*article.paragraphs, *article.highlights, article.title):
        assert line == " ".join(line.split()) != ""
    for highlight in article.highlights:
        assert sentences(highlight) == 1
        assert 8 <= len(highlight.split()) <= 35


@each_article
def test_plain_text(article):
    for line in (*article.paragraphs, *article.highlights, article.title):
        assert not re.search(r"[<>*_#`\[\]{}|~\\^=@]|&\w+;|https?:|--", line)
        assert line.isascii()


@each_article
def test_an_answer_stands_once_in_its_quarter(article):
    start = 0
    starts = []  # of the paragraphs
    for paragraph in article.paragraphs:
        starts.append(start)
        start += len(paragraph) + 1
    for quarter, question in enumerate(article.questions):
        assert 1 <= len(question.answer.split()) <= 5
        assert len(places(question.answer, in_whole(article))) == 1, question.answer
        (place,) = places(question.answer, article.text)
        assert place >= starts[question.paragraph]
        assert place + len(question.answer) <= starts[question.paragraph] + len(article.paragraphs[question.paragraph])
        before = len(article.text[:place].split())
        assert 4 * before // len(article.text.split()) == quarter, question.answer


@each_article
def test_no_question_gives_an_answer_away(article):
    asked = {word for question in article.questions for word in words(question.question)}
    for question in article.questions:
        assert question.question.endswith("?")
        assert not asked & (set(words(question.answer)) - SMALL_WORDS), question.answer
        assert question.answer.lower() not in GUESSED
    assert len({question.answer.lower() for question in article.questions}) == 4


def test_no_two_texts_share_a_run_of_words():
    owner: dict[tuple[str, ...], str] = {}
    texts = {article.id: in_whole(article) for article in ARTICLES} | {one.id: one.needle for one in needles()}
    for name, text in texts.items():
        for run in runs(text):
            assert owner.setdefault(run, name) == name, f"{name} and {owner[run]}: {' '.join(run)}"


def test_needles():
    assert len(needles()) == 24
    for field in ("id", "needle", "question", "answer"):
        assert len({getattr(one, field).lower() for one in needles()}) == 24, field
    for one in needles():
        assert sentences(one.needle) == 1 and one.needle.isascii() and one.question.endswith("?")
        assert len(places(one.answer, one.needle)) == 1
        assert 1 <= len(one.answer.split()) <= 6
        assert not set(words(one.question)) & (set(words(one.answer)) - SMALL_WORDS), one.answer


def test_a_needles_answer_stands_nowhere_else():
    texts = {article.id: in_whole(article) for article in ARTICLES} | {one.id: one.needle for one in needles()}
    for one in needles():
        lower = one.answer.lower()
        assert [name for name, text in texts.items() if places(lower, text.lower())] == [one.id]


def test_a_file_is_called_as_its_article():
    folder = resources.files("kvexp.articles") / "texts"
    names = {file.name: json.loads(file.read_text("utf-8"))["id"] for file in folder.iterdir()}
    assert all(name == f"{identity}.json" for name, identity in names.items())


def test_an_article_cannot_be_changed():
    assert isinstance(ARTICLES[0].questions[0], Question)
    with pytest.raises(FrozenInstanceError):
        ARTICLES[0].title = "Another"
