"""The synthetic language and its tasks."""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from kvexp.tasks import TestbedChoice, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedSummary
from kvexp.tasks.testbed import (
    END,
    LANGUAGE,
    LONGEST,
    ORDINALS,
    SPLITS,
    DocumentShape,
    dialogue,
    document,
    needle_document,
    split_of,
    vocabulary,
)

TASKS = (TestbedSummary, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedChoice)


def documents(split, count=30, shape=None):
    return [document(Random(f"{split} {i}"), split, shape or DocumentShape()) for i in range(count)]


@pytest.mark.parametrize("split", SPLITS)
def test_every_fact_belongs_to_its_split(split):
    for doc in documents(split):
        for fact in doc.facts:
            assert split_of(fact.name, fact.attribute, fact.value) == split


def test_documents_speak_the_vocabulary_and_have_the_length_asked_for():
    words = set(vocabulary())
    for tokens in (64, 288, 1024):
        for doc in documents("train", 10, DocumentShape(tokens, tokens // 30, tokens // 120, 1)):
            assert set(doc.text.split()) <= words
            assert tokens - 12 <= len(doc.text.split()) <= tokens


def test_a_seed_is_a_document():
    """A change here is another language: raise LANGUAGE, NUMERICS, and train again."""
    text = "\n".join(doc.text for doc in documents("test", 5))
    talk = "".join(dialogue(Random("talk"), "test", DocumentShape(), recalls=2))
    assert LANGUAGE == 1
    assert hashlib.sha256((text + talk).encode()).hexdigest()[:16] == "dc312f830e3c3d9e"


def test_an_update_comes_later_and_wins():
    seen = 0
    for doc in documents("train"):
        for update in (fact for fact in doc.facts if fact.update):
            first = next(i for i, fact in enumerate(doc.facts) if fact.key == update.key)
            assert first < doc.facts.index(update)
            assert not doc.facts[first].mark
            assert update in doc.current() and doc.facts[first] not in doc.current()
            seen += update.value != doc.facts[first].value
    assert seen > 30


def test_marked_facts_are_strewn_over_the_whole_text():
    places = []
    for doc in documents("test", 60):
        places += [i / len(doc.sentences) for i, s in enumerate(doc.sentences) if s.split()[0] in ORDINALS]
    assert min(places) < 0.05 and max(places) > 0.93
    assert 0.45 < sum(places) / len(places) < 0.55


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_stands_at_its_depth(depth):
    doc, fact = needle_document(Random("n"), "test", 256, depth)
    place = doc.sentences.index(fact.sentence())
    assert place == round(depth * (len(doc.sentences) - 1)) or abs(place - depth * (len(doc.sentences) - 1)) <= 1
    assert fact.attribute == "code" and len(fact.value.split()) == 3


@pytest.mark.parametrize("task", TASKS)
def test_tasks_are_repeatable_and_extend(task):
    few, many = list(task(limit=3).examples()), list(task(limit=9).examples())
    assert few == many[:3]
    assert len({example.id for example in many}) == 9
    words = set(vocabulary())
    for example in many:
        assert set((example.prompt + example.question + "".join(example.choices)).split()) <= words
        assert example.prompt.startswith("<s> ")
        assert example.reference and not example.reference.endswith(END)


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_score_full_marks_and_wrong_ones_do_not(task):
    made = task(limit=6)
    for example in made.examples():
        if example.choices:
            right = example.choices.index(f" {example.reference}")
            logprobs = [-9.0] * len(example.choices)
            logprobs[right] = -1.0
            assert made.score_choices(logprobs, [2] * len(logprobs), example) == {"acc": 100.0}
            logprobs[right] = -10.0
            assert made.score_choices(logprobs, [2] * len(logprobs), example) == {"acc": 0.0}
        else:
            assert set(made.score(example.reference, example.reference, example).values()) == {100.0}
            wrong = made.score("the river moved", example.reference, example)
            assert set(wrong) == set(made.metrics) and max(wrong.values()) < 5


@pytest.mark.parametrize("task", [TestbedNeedle, TestbedQA, TestbedChoice])
def test_the_question_comes_in_the_prompt_or_after(task):
    before, after = (list(task(limit=4, question=q).examples()) for q in ("in_prompt", "after_eviction"))
    for one, other in zip(before, after, strict=True):
        assert one.prompt == other.prompt + other.question and other.question.startswith(" ask ")
        assert not one.question and one.choices == other.choices


def test_choices_hold_the_answer_once_and_a_near_miss():
    near = 0
    for example in TestbedChoice(limit=40).examples():
        assert len(set(example.choices)) == 4 and f" {example.reference}" in example.choices
        first = example.reference.split()[0]
        near += any(c.split()[0] == first and c.strip() != example.reference for c in example.choices)
        assert all(len(c.split()) > 1 for c in example.choices)
    assert near > 30


def test_questions_of_a_document_share_its_context():
    examples = list(TestbedQA(limit=8, question="after_eviction").examples())
    assert len({example.prompt for example in examples}) == 2
    assert len({example.question for example in examples[:4]}) == 4


def test_shots_stand_before_the_question():
    (example,) = TestbedChoice(limit=1, num_fewshot=5).examples()
    assert example.prompt.count(" ask ") == 6 and example.prompt.count(f" {END}") == 5


@pytest.mark.parametrize(
    "make", [lambda s: document(Random("d"), s, DocumentShape()), lambda s: needle_document(Random("n"), s, 99, 0.5)]
)
def test_an_unknown_split_is_an_error_and_no_endless_search(make):
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'valid'"):
        make("valid")


def test_more_facts_than_there_are_is_an_error_and_no_endless_search():
    with pytest.raises(ValueError, match=r"have no more than these .* facts in split test"):
        document(Random("d"), "test", DocumentShape(facts=60, marked=1, updated=0), attribute="color")


def test_the_longest_fact_is_as_long_as_said():
    longest = max(len(fact.sentence().split()) for doc in documents("train", 60) for fact in doc.facts)
    assert longest == LONGEST


def test_no_two_splits_share_a_generator():
    """The seeds are texts: of training "seed step", of a task "split seed row"."""
    tasks = [TestbedSummary(split=split).random(n).random() for split in SPLITS for n in range(200)]
    training = [Random(f"{seed} {step}").random() for seed in (0, 12345) for step in range(200)]
    assert len({*tasks, *training}) == len(tasks) + len(training)


def test_every_word_that_is_asked_for_was_trained():
    """The numbers go to the tenth in training, whatever a Shape may hold."""
    from experiments.studies.testbed import CURRICULUM
    from kvexp.tasks.testbed import MOST_MARKED

    most = max(stage.shape(Random(f"{i}")).marked for stage in CURRICULUM for i in range(400))
    assert most == MOST_MARKED
