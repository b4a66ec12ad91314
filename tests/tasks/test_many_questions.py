"""questions=all: a context is prefilled and evicted once, and its questions are asked of copies of that cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import composed, settings

import kvexp.run.store
from kvexp.hf.load import byte_tokenizer
from kvexp.results.blocks import print_blocks
from kvexp.results.read import read_runs
from kvexp.results.views import shown
from kvexp.run.batches import evaluate_run
from kvexp.run.prompts import batches, tokenize
from kvexp.run.settings import settings_of
from kvexp.tasks import ContextQA, Example, LongBench, Needle, NewsNeedle, NewsQA
from kvexp.tasks.articles import articles, needles
from kvexp.tasks.base import with_shared_context
from kvexp.tasks.metrics import contains, normalise, qa_f1
from kvexp.util.errors import ConfigError
from kvexp.util.output import Console

AFTER = "after_eviction"
QA = ["model=testbed_rope", "task=testbed_qa", f"task.question={AFTER}", "task.per_document=5", "task.tokens=200"]
QA += ["task.facts=10", "task.marked=0", "task.updated=0", "task.max_new_tokens=4", "kv_ratio=0.4", "limit=7"]
QA += ["batch_size=1"]


def made(outputs, *words):
    overrides = [*QA, f"outputs_dir={outputs}", *words]
    config, choices = composed(*overrides)
    return settings_of(config, choices, overrides)


def rows_of(record, *without):
    without = ("seconds", "context", *without)
    return [{k: v for k, v in row.items() if k not in without} for row in record.rows()]


@pytest.mark.parametrize("method", [pytest.param("h2o", marks=pytest.mark.slow), "keyformer"])
def test_five_questions_share_one_eviction_and_no_answer_can_tell(tmp_path, prefills, monkeypatch, method) -> None:
    import kvexp.run.batches as module

    shared = evaluate_run(made(tmp_path / "all", f"method={method}", "questions=all"))
    assert prefills["contexts"] == 4  # two documents, for the method and for the full cache
    prefills.clear()
    monkeypatch.setattr(module, "MAX_QUESTIONS_PER_CONTEXT", 1)
    alone = evaluate_run(made(tmp_path / "each", f"method={method}"))
    assert prefills["contexts"] == 14
    assert rows_of(shared) == rows_of(alone)
    assert any(row["receipt"]["first_eviction_step"] == 0 for row in shared.rows())
    contexts = [row["context"] for row in shared.rows()]
    assert [(one["question"], one["questions"]) for one in contexts] == [(n % 5, 5) for n in range(7)]
    first, second = contexts[0]["digest"], contexts[6]["digest"]
    assert [one["digest"] for one in contexts] == [first] * 5 + [second] * 2 and first != second
    for row in shared.rows():
        assert 0 < row["seconds"]["prefill"] < row["seconds"]["ttft"] and row["seconds"]["copy"] > 0
    assert not any("context" in row or "prefill" in row["seconds"] for row in alone.rows())
    _check_table(tmp_path / "all", shared)


def _check_table(outputs, record) -> None:
    """The table of a run of seven questions, two of them about a second document, against sums made here."""
    full = {run.hash: run for run in kvexp.run.store.runs(outputs)}[record.baseline]
    made, blocks, below = shown(read_runs(outputs), "questions")
    frame = made.set_index("asked")
    assert list(frame.index) == list(range(1, 6)) and set(frame["question"]) == {AFTER}
    of_run = [run.rows() for run in (record, full)]
    for asked, documents in ((1, 2), (2, 2), (3, 1), (5, 1)):
        docs = [[row["index"] // 5 == n and row["index"] % 5 < asked for row in of_run[0]] for n in range(documents)]
        pairs = [[(a, b) for a, b, in_it in zip(*of_run, doc, strict=True) if in_it] for doc in docs]
        each = [[(a["metrics"]["f1"], b["metrics"]["f1"]) for a, b in pair] for pair in pairs]
        assert frame.loc[asked, "contexts"] == documents and sum(map(len, each)) == asked * documents
        assert frame.loc[asked, "score"] == pytest.approx(sum(a for one in each for a, _ in one) / asked / documents)
        assert frame.loc[asked, "full"] == pytest.approx(sum(b for one in each for _, b in one) / asked / documents)
        kept = [all(a >= b for a, b in one) for one in each]
        assert frame.loc[asked, "none_lost"] == 100 * sum(kept) / documents
    last = frame.loc[5]
    assert frame.loc[1, "shared_s"] > frame.loc[1, "one_by_one_s"]  # a copy that nobody else needs
    assert last["shared_s"] < last["one_by_one_s"]
    console = Console(markup=False, width=200, record=True)
    print_blocks(blocks, below, console)
    assert "by number of questions asked of one evicted cache, question after eviction" in console.export_text()


def test_rows_do_not_depend_on_batches_or_on_a_limit_that_cuts_a_context(tmp_path) -> None:
    whole = evaluate_run(made(tmp_path / "whole", "questions=all", "batch_size=3"))
    cut = evaluate_run(made(tmp_path / "cut", "questions=all", "limit=4"))
    padding = ("receipt",)  # padding is memory too
    assert rows_of(whole, *padding)[:4] == rows_of(cut, *padding)
    assert {row["context"]["questions"] for row in cut.rows()} == {5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["questions=some"], "questions must be one of each, all, got 'some'"),
        (["questions=all", "task.question=in_prompt"], "got task.question=in_prompt: set task.question=after_eviction"),
        (["questions=all", "budget.of=sequence"], "set budget.of=prompt, or questions=each"),
        (["+task.shared_context=true"], "task.shared_context is set by questions=all, without task. in front"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(tmp_path, words, message) -> None:
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, *words).task.check()
    assert message in str(caught.value)


def test_a_task_of_one_question_per_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="task=news has one: take news_qa, memory, news_needle"):
        settings_of(*composed("task=news", "questions=all"))


def test_only_questions_that_share_are_another_run(tmp_path) -> None:
    each, also, shared = (made(tmp_path, *words).identity for words in ([], ["questions=each"], ["questions=all"]))
    assert each == also != shared
    assert shared["task"].pop("shared_context") is True
    assert shared == each


def test_a_context_too_long_is_cut_alike_for_all_of_its_questions() -> None:
    text, tokenizer = "".join(f"Sentence {n} of many. " for n in range(40)), byte_tokenizer()
    asked = ("\nWho?", "\nAnd what else did anybody say about it?", "\nWhere?")
    each = [Example(str(n), text, "x", question=q, questions=asked, number=n) for n, q in enumerate(asked)]
    for truncate in ("middle", "halves", "right"):
        task = NewsQA(truncate=truncate)
        cut = [tokenize(example, task, tokenizer, 300, chat=False) for example in each]
        assert len({tuple(one.ids) for one in cut}) == 1 and all(one.truncated for one in cut)
        assert 290 - 2 <= max(one.size for one in cut) <= 300
        apart = [tokenize(replace(one, questions=(), number=0), task, tokenizer, 300, chat=False) for one in each]
        assert len({tuple(one.ids) for one in apart}) > 1  # as they are where each has its own prefill


def test_questions_that_share_are_never_parted() -> None:
    asked = tuple(f"\nq{n}" for n in range(11))
    some = [Example(f"a{n}", "A", "x", question=q, questions=asked, number=n) for n, q in enumerate(asked)]
    apart = [Example(f"b{n}", "B", "x", question=q) for n, q in enumerate(asked)]
    sizes = [[example.prompt for _, example in batch] for batch in batches(list(enumerate([*some, *apart])), 2, 4)]
    assert sizes == [["A"] * 11, ["B"] * 4, ["B"] * 4, ["B"] * 3]


def test_rows_about_one_text_are_brought_together(tmp_path) -> None:
    """LongBench has several questions about some of its texts, rows apart from each other."""
    rows = [(text, n) for n in range(2) for text in ("First text.", "Second text.")]
    file = tmp_path / "qasper.jsonl"
    lines = [
        {"context": text, "input": f"Question {n}?", "answers": ["x"], "_id": f"{text[0]}{n}", "length": 2}
        for text, n in rows
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = LongBench(subset="qasper", data_files=str(file), question=AFTER)
    assert [example.id for example in task.examples()] == ["F0", "S0", "F1", "S1"]
    together = list(with_shared_context(task, "longbench").examples())
    assert [(one.id, one.number, len(one.questions)) for one in together] == [
        *(("F0", 0, 2), ("F1", 1, 2), ("S0", 0, 2), ("S1", 1, 2))
    ]
    first = list(with_shared_context(replace(task, limit=1), "longbench").examples())
    assert [one.questions for one in first] == [together[0].questions]


def test_a_text_holds_the_needles_of_all_depths_and_each_is_asked_for() -> None:
    task = with_shared_context(NewsNeedle(question=AFTER, lengths=(300,), repeats=2), "news_needle")

    def count(words: str) -> int:
        return len(words.split())

    fitted = [task.fit(example, count, 10_000) for example in task.examples()]
    texts = list(dict.fromkeys(one.prompt for one in fitted))
    assert len(texts) == 2 and len(fitted) == 10
    assert len({one.question for one in fitted}) == 10
    for one in fitted:
        assert one.reference in one.prompt
        assert sum(other.reference in one.prompt for other in fitted) == 5
    longest = [max(count(one.prompt + one.question) for one in fitted if one.prompt == text) for text in texts]
    assert longest == [300, 300]


QUESTIONS = [
    {"question": "Where is Ann?", "answers": ["Rome", "the city of Rome"]},
    {"question": "And Ben?", "answer": "Oslo"},
]


def test_a_file_of_texts_with_lists_of_questions(tmp_path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"id": "a", "context": "Ann is in Rome, Ben in Oslo.", "questions": QUESTIONS}]))
    task = with_shared_context(ContextQA(data_files=str(file)), "context_qa")
    task.check()
    one, two = task.examples()
    assert (one.id, one.prompt, one.question) == ("a question 0", "Ann is in Rome, Ben in Oslo.", "\n\nWhere is Ann?")
    assert (two.reference, two.number, two.questions) == ("Oslo", 1, (one.question, two.question))
    assert task.score("She is in the city of Rome.", one.reference, one)["exact"] == 100
    assert task.score("the city of rome", one.reference, one) == {"f1": 100, "exact": 100}
    assert task.score("Oslo", one.reference, one) == {"f1": 0, "exact": 0}


# (right answer, what is answered, whether it is right), by hand
MARKED = [
    *(("A", said, said != "B") for said in ("A", "a", "(A)", "The answer is A.", "**A**", "B")),
    *(("A", said, False) for said in ("", "It is a dog", "the")),
    *(("the", said, True) for said in ("the", "The.", "It is the")),
    *(("-", said, said in "-" and said != "") for said in ("-", "", "the", "+")),
    ("-", "It is -.", True),
    *(("$", said, said == "$") for said in ("$", "", "%")),
    *(("C#", said, said.startswith("C#")) for said in ("C#", "C#.", "C", "C++", "F#")),
    *(("C++", said, "C++" in said) for said in ("C++", "I use C++, mostly", "C", "C#", "C+")),
    *(("C", said, said == "C") for said in ("C", "C#", "C++")),
    *(("-5", said, said in ("-5", "\u22125", "\u20135")) for said in ("-5", "\u22125", "\u20135", "5", "3-5")),
    *(("5", said, "-" not in said) for said in ("5", "It was 5.", "-5")),
    *(("3.5", said, said == "3.5") for said in ("3.5", "35", "5")),
    *(("1/2", said, said == "1/2") for said in ("1/2", "12")),
    *(("B-", said, said == "B-") for said in ("B-", "B", "B+")),
    *(("Vitamin A", said, said != "B") for said in ("It is vitamin A.", "vitamin a", "B")),
    *((reference, said, True) for reference, said in (("5", "\uff15"), ("\uff21", "A"), ("A-", "A\u2212"))),
    *((reference, said, True) for reference, said in (("-5", "negative 5"), ("-0.5", "-.5"), ("3-5", "3\u20135"))),
    *(("AB-", said, said == "AB-") for said in ("AB-", "AB", "AB+")),
    *(("-$5", said, said == "\u2212$5") for said in ("\u2212$5", "$5")),
    *((">5", said, said == ">5") for said in (">5", "<5", "5")),
    *(("5%", said, said == "5%") for said in ("5%", "-5%", "1.5%")),
    *((reference, "35", False) for reference in ("3-5", "3:5", "3.5", "3/5")),
    *(("1.2.3", said, said == "1.2.3") for said in ("1.2.3", "123", "12.3")),
]


def asked(tmp_path: Path, answer: str) -> ContextQA:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"context": "A text.", "question": "Which?", "answer": answer}))
    return ContextQA(data_files=str(file))


@pytest.mark.parametrize(("answer", "said", "right"), MARKED)
def test_an_answer_keeps_what_tells_it_from_others(tmp_path, answer, said, right) -> None:
    task = asked(tmp_path, answer)
    (example,) = task.examples()
    scores = task.score(said, answer, example)
    assert scores["exact"] == 100 * right
    assert (scores["f1"] > 0) == right
    assert task.corrected() == ("marks",)
    hay = Needle(filler="Sand. ", needles=("It is {key}.",), questions=("Which?",), answers=(answer,), lengths=(300,))
    needle = replace(example, info={"answers": [answer]})
    assert hay.score(said, answer, needle)["exact"] == 100 * right
    assert (hay.score(said, answer, needle)["word_recall"] > 0) == right
    assert hay.corrected() == ("marks",)


@pytest.mark.parametrize("answer", ["Rome", "the city of Rome", "twenty-one", "St. Ives", "John's", "1990s", "x"])
def test_other_answers_are_compared_as_they_were(tmp_path, answer) -> None:
    """A letter alone is one that a mark could make another; its score is SQuAD's all the same."""
    task = asked(tmp_path, answer)
    (example,) = task.examples()
    for said in (answer, answer.upper(), f"It is {answer}!", "no"):
        assert task.score(said, answer, example) == {
            "f1": 100 * qa_f1(said, answer),
            "exact": 100 * contains(said, answer),
        }
    assert task.corrected() == (("marks",) if answer == "x" else ())


@pytest.mark.parametrize("answers", [["Rome", "C#"], ["Rome"]])
def test_the_identity_names_corrections_of_the_runs_that_they_touch(tmp_path, answers) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        "".join(json.dumps({"context": "A text.", "question": "Which?", "answer": a}) + "\n" for a in answers)
    )
    identity = settings("task=context_qa", f"task.data_files={file}", "limit=1").identity
    assert identity["task"].get("corrected") == (["marks"] if "C#" in answers else None)  # whatever the limit


def test_own_generated_answers_need_no_marks_of_which_nothing_would_be_left() -> None:
    answers = {question.answer for article in articles() for question in article.questions}
    assert all(map(normalise, answers | {needle.answer for needle in needles()}))


def test_a_row_of_one_question_is_as_in_squad(tmp_path) -> None:
    file = tmp_path / "mine.jsonl"
    squad = {
        "context": "The lamp is in the hall.",
        "answers": {"text": ["in the hall", "hall"], "answer_start": [12, 19]},
    }
    flat = {"context": "The lamp is in the hall.", "question": "Where is the lamp?", "answer": "in the hall"}
    file.write_text(
        "\n".join(
            json.dumps(row) for row in (flat, squad | {"question": "Where?", "id": "7"}, squad | {"question": "Who?"})
        )
    )
    one, two, three = ContextQA(data_files=str(file)).examples()
    assert (one.prompt, one.question, one.reference) == (flat["context"], "\n\nWhere is the lamp?", "in the hall")
    assert two.id == "7 question 0" and two.info["answers"] == ["in the hall", "hall"]
    assert len({one.id, two.id, three.id}) == 3, "questions about one text are told apart"
