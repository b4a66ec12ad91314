"""The articles and needles that come with kvexp: complete, apart from each other, each answer found in one place."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest
from commands import composed

import kvexp.run.batches as runner
from kvexp.results.table import table
from kvexp.run.settings import settings_of
from kvexp.run.store import Run
from kvexp.tasks import News, NewsNeedle, NewsQA
from kvexp.tasks.articles import Article, articles, articles_digest, needles
from kvexp.tasks.needle import related, topic_words
from kvexp.util.errors import ConfigError

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
    """Places at which an answer stands in a text as whole words."""
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


@each_article
def test_an_article_is_complete(article):
    assert re.fullmatch(r"\d\d(-[a-z]+)+", article.id)
    assert article.title and article.topic and article.style
    assert 450 <= len(article.text.split()) <= 900
    assert len(article.highlights) == len(set(article.highlights)) == 3
    assert len(article.questions) == 4
    for line in (*article.paragraphs, *article.highlights, article.title):
        assert line == " ".join(line.split()) != "" and line.isascii()
    for highlight in article.highlights:
        assert sentences(highlight) == 1
        assert 8 <= len(highlight.split()) <= 35


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


# Tasks on kvexp's own English: prompts to the letter, questions that count, needles where the grid says.


WORDS = lambda text: len(text.split())  # noqa: E731
FIRST = articles()[0]
CELLS = NewsNeedle(lengths=(150, 220), depths=(0, 50, 100), repeats=2, after="\n\nQuestion: {question}")


def fitted(task, count=WORDS):
    return [task.fit(example, count, 1 << 40) for example in task.examples()]


def settings(folder, *overrides):
    return settings_of(*composed(f"outputs_dir={folder}", "kv_ratio=0.3", "task.max_new_tokens=3", *overrides))


# ---- news


def test_a_summary_is_asked_of_the_article_without_its_title():
    examples = list(News().for_model(chat=True).examples())
    assert [example.id for example in examples] == [article.id for article in articles()]
    first = examples[0]
    instruction = "Summarize the following news article in three sentences:"
    assert first.prompt == f"{instruction}\n\n{FIRST.text}\n\n" and first.body == FIRST.text
    assert FIRST.title not in first.prompt
    assert first.reference == "\n".join(FIRST.highlights) and first.reference.count("\n") == 2
    base = next(News().for_model(chat=False).examples())
    assert base.prompt.startswith("Below is an instruction") and base.prompt.endswith("\n\n### Response:")
    assert f"### Instruction:\n{instruction}\n\n### Input:\n{FIRST.text}\n\n" in base.prompt


def test_a_summary_is_scored_by_rouge():
    task, example = News(), next(News().examples())
    assert task.score(example.reference, example.reference, example) == dict.fromkeys(task.metrics, 100.0)
    assert task.score("Dredging", example.reference, example)["rouge1"] < 10
    lead = task.score(" ".join(FIRST.paragraphs[0].split()[:60]), example.reference, example)
    assert 20 < lead["rouge1"] < 70  # the words of the article's beginning, not the highlights' own


def test_the_fingerprint_is_of_the_bytes(monkeypatch):
    import kvexp.tasks.articles as english

    files = dict(english._files())
    name = next(iter(files))
    monkeypatch.setattr(english, "_files", lambda: files)
    before = articles_digest.__wrapped__()
    assert before == articles_digest()
    files[name] = files[name].replace(b"Brown Thirza", b"Brown Thirsa")
    assert articles_digest.__wrapped__() != before


# ---- news_qa


def test_questions_of_an_article_share_one_context():
    task = NewsQA(before="Read.\n\n", after="\n\nQuestion: {question}", answer_prefix="\nAnswer:", limit=8)
    examples = list(task.examples())
    assert [len({example.prompt for example in examples[start : start + 4]}) for start in (0, 4)] == [1, 1]
    assert examples[0].prompt == f"Read.\n\n{FIRST.text}"
    asked = FIRST.questions[0]
    assert examples[0].question == f"\n\nQuestion: {asked.question}\nAnswer:" and examples[0].reference == asked.answer
    chat = next(task.for_model(chat=True).examples())
    assert chat.question == f"\n\nQuestion: {asked.question}"
    known = next(replace(task, question="in_prompt").examples())
    assert known.prompt == examples[0].prompt + examples[0].question and not known.question
    assert examples[5].info == {
        "article": articles()[1].id,
        "question": 1,
        "paragraph": articles()[1].questions[1].paragraph,
    }


def test_an_answer_is_right_where_it_holds_the_reference():
    task, example = NewsQA(), next(NewsQA().examples())
    assert example.reference == "Brown Thirza"
    for output, right in (
        ("The dredger is the brown Thirza.", True),
        ("Brown Thirza", True),
        ("Brown", False),
        ("Brown Thirzas", False),
        ("Thirza Brown", False),
        ("", False),
    ):
        assert task.answered(output, example) is right, output
        assert task.score(output, example.reference, example)["exact"] == 100 * right
    assert task.score("It is Brown Thirza.", example.reference, example)["f1"] == pytest.approx(200 / 3)


# ---- questions that count


def row(index, right, score):
    receipt = {"slots": 5.0, "kv_bytes": 10, "peak_kv_bytes": 20, "first_eviction_step": 0}
    return {
        **{"example": f"e{index}", "index": index, "metrics": {"exact": score, "f1": score / 2}, "answered": right},
        **{"skipped": None, "new_tokens": 5, "prompt_tokens": 9, "prompt_cut": False, "receipt": receipt},
        **{"seconds": {"ttft": None, "tt2t": None, "tpot": None}, "output": "o", "reference": "r"},
    }


def write(folder, method, rights, baseline=None, drop=()):
    labels = {"model": "m", "task": "news_qa", "method": method, "kv_ratio": None if method == "full" else 0.5}
    run = Run.open(folder, labels, labels, baseline=baseline)
    for index, right in enumerate(rights):
        if index not in drop:
            run.append(row(index, right, 100.0 * right))
    run.finish(len(rights) - len(drop))
    return run


def shown(folder, method):
    (found,) = table(folder, {"method": method}).to_dict("records")
    return found


def test_the_table_counts_what_the_full_cache_answers(tmp_path, capsys):
    rights = [index % 3 > 0 for index in range(60)]
    full = write(tmp_path, "full", rights)
    write(tmp_path, "h2o", [True] * 30 + [False] * 30, full.hash)
    base, run = shown(tmp_path, "full"), shown(tmp_path, "h2o")
    assert (base["n"], base["questions"], base["exact"]) == (40, 60, 100.0)
    assert (run["n"], run["questions"], run["paired"]) == (40, 60, 40)
    assert run["exact"] == run["exact_of_full"] == 50.0  # 20 of the 40 that count, whatever it said of the others
    assert run["verdict99"] == "fail"
    from kvexp.results.views import main

    assert main([str(tmp_path), "--full", "--explain"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "of asked" in told and "m / news_qa: n of the questions asked count" in told and "(40 of 60, 67 %)" in told


def test_the_table_says_where_it_is_not_known_what_counts(tmp_path):
    full = write(tmp_path, "full", [True, False] * 20)
    write(tmp_path, "h2o", [True] * 40, full.hash)
    for file in full.path.iterdir():
        file.unlink()
    full.path.rmdir()
    run = shown(tmp_path, "h2o")
    assert run["n"] == 40 and pd.isna(run["questions"])
    assert "which questions the full cache answers is not known here: all are counted" in run["note"]
    assert run["verdict99"] == "undecided"


@pytest.mark.parametrize(("rights", "drop", "counted"), [([False] * 40, (), (0, 40)), ([True] * 40, (3, 4), (38, 38))])
def test_questions_that_the_full_cache_does_not_answer_do_not_count(tmp_path, rights, drop, counted):
    full = write(tmp_path, "full", rights, drop=drop)
    write(tmp_path, "h2o", [True] * 40, full.hash)
    run = shown(tmp_path, "h2o")
    assert (run["n"], run["questions"]) == counted
    if not counted[0]:
        assert run["verdict99"] == "undecided" and "the full cache answers none of the 40 questions" in run["note"]


# ---- news_needle


def test_a_needle_is_at_its_depth_in_a_prompt_of_its_length():
    examples = fitted(CELLS)
    grid = [(length, depth, repeat) for repeat in (0, 1) for length in (150, 220) for depth in (0, 50, 100)]
    assert [tuple(example.info[key] for key in ("length", "depth", "repeat")) for example in examples] == grid
    known = {needle.id: needle for needle in needles()}
    for example in examples:
        needle = known[example.info["needle"]]
        assert WORDS(example.prompt) == example.info["length"]
        assert example.body.count(needle.needle) == 1 and example.reference == needle.answer
        assert example.prompt.endswith(f"\n\nQuestion: {needle.question}")
        around = example.body.replace(needle.needle, "")
        place, wanted = example.body.index(needle.needle), len(around) * example.info["depth"] / 100
        assert place <= wanted + 1, example.id  # one more for the space beside the needle
        assert not re.search(r"[.!?][\"')]*\s", around[place : max(place, int(wanted) - 1)]), (
            "another sentence begins in between"
        )
        assert around.rstrip()[-1] in ".\"'!?" or example.info["depth"] == 100


def test_the_filler_shares_no_word_with_the_needle_that_is_not_common():
    texts = {article.id: f"{article.title} {article.text}" for article in articles()}
    for needle in needles():
        left_out = related(needle)
        assert len(left_out) <= 12  # enough is left for 8k tokens
        words = topic_words(f"{needle.needle} {needle.answer}")
        for name in set(texts) - left_out:
            shared = words & topic_words(texts[name])
            assert all(sum(word in topic_words(text) for text in texts.values()) > 4 for word in shared)
    train = next(needle for needle in needles() if needle.id == "train")
    assert "25-travel-slow-railway" in related(train)


def test_cells_depend_on_nothing_but_themselves():
    whole = {example.id: example for example in fitted(CELLS)}
    assert len({example.info["needle"] for example in whole.values()}) > 4
    few = {example.id: example for example in fitted(replace(CELLS, lengths=(220,), depths=(50,)))}
    assert few.items() <= whole.items()
    assert [example.id for example in replace(CELLS, limit=3).examples()] == list(whole)[:3]
    other = fitted(replace(CELLS, seed=1))
    assert [example.body for example in other] != [example.body for example in whole.values()]
    one, two = (whole[f"length 220 depth 50 repeat {repeat}"] for repeat in (0, 1))
    assert one.info["needle"] != two.info["needle"] and one.body != two.body
    last = {example.body[-60:] for example in whole.values() if example.info["depth"] < 100}
    assert len(last) >= 6  # of 8: an order of the articles per cell


def test_the_cells_of_a_length_ask_for_different_needles():
    for depths in ((0, 25, 50, 75, 100), tuple(range(0, 101, 10))):
        examples = list(NewsNeedle(depths=depths, repeats=20 // len(depths)).examples())
        for length in NewsNeedle().lengths:
            asked = [example.info["needle"] for example in examples if example.info["length"] == length]
            assert len(asked) == len(set(asked)) == len(depths) * (20 // len(depths))


def test_a_length_that_cannot_be_is_said():
    with pytest.raises(ConfigError, match="does not hold needle and question, which have"):
        fitted(replace(CELLS, lengths=(20,)))
    with pytest.raises(ConfigError, match=r"the articles make a prompt of \d+ of this model's tokens, and 99999 are"):
        fitted(replace(CELLS, lengths=(99999,)))


# ---- through the runner


def test_rows_say_whether_the_answer_is_right(tmp_path):
    run = runner.evaluate_run(settings(tmp_path, "task=news_qa", "limit=4"))
    rows = run.rows()
    assert [row["answered"] for row in rows] == [False] * 4  # random weights
    assert len({(row["prompt_tokens"], row["receipt"]["slots"] - row["question_tokens"]) for row in rows}) <= 4
    assert len({row["prompt_tokens"] for row in rows}) == 1 and min(row["question_tokens"] for row in rows) > 20
    assert table(tmp_path, {"method": "h2o"})["questions"].tolist() == [4]
    (summary,) = runner.evaluate_run(settings(tmp_path, "task=news", "limit=1")).rows()
    assert "answered" not in summary


def test_a_needle_row_has_its_length(tmp_path):
    found = runner.evaluate_run(
        settings(tmp_path, "task=news_needle", "task.lengths=[700]", "task.depths=[0,100]", "limit=2")
    ).rows()
    for row in found:
        assert 690 <= row["prompt_tokens"] + row["question_tokens"] <= 700
        assert set(row["metrics"]) == {"word_recall", "exact"} and row["answered"] is False
