"""The synthetic language, its tasks and the training code; the trained models where they lie in the checkout."""

import hashlib
import json
from pathlib import Path
from random import Random

import pytest

from kvexp.errors import ConfigError
from kvexp.tasks import TestbedChoice, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedSummary
from kvexp.testbed import LANGUAGE
from kvexp.testbed.document import SPLITS, Shape, document, split_of
from kvexp.testbed.forms import dialogue
from kvexp.testbed.needle import needle_document
from kvexp.testbed.words import END, ORDINALS, vocabulary

MODELS = Path(__file__).resolve().parents[1] / "kvexp" / "testbed" / "models"
TASKS = (TestbedSummary, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedChoice)


def documents(split, count=30, shape=None):
    return [document(Random(f"{split} {i}"), split, shape or Shape()) for i in range(count)]


@pytest.mark.parametrize("split", SPLITS)
def test_every_fact_belongs_to_its_split(split):
    for doc in documents(split):
        for fact in doc.facts:
            assert split_of(fact.name, fact.attribute, fact.value) == split


def test_documents_speak_the_vocabulary_and_have_the_length_asked_for():
    words = set(vocabulary())
    for tokens in (64, 288, 1024):
        for doc in documents("train", 10, Shape(tokens, tokens // 30, tokens // 120, 1)):
            assert set(doc.text.split()) <= words
            assert tokens - 12 <= len(doc.text.split()) <= tokens


def test_a_seed_is_a_document():
    """A change here is another language: raise LANGUAGE, NUMERICS, and train again."""
    text = "\n".join(doc.text for doc in documents("test", 5))
    talk = "".join(dialogue(Random("talk"), "test", Shape(), recalls=2))
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
    ("task", "options", "words"),
    [
        (TestbedSummary, {"marked": 0}, "task.marked must be at least 1"),
        (TestbedSummary, {"marked": 13}, "task.facts=14 must be at least task.marked=13"),
        (TestbedSummary, {"facts": 4000}, "at most 40"),
        (TestbedSummary, {"split": "dev"}, "task.split must be one of train, validation, test"),
        (TestbedSummary, {"data_files": "x.json"}, "makes its own rows"),
        (TestbedSummary, {"sample": "shuffled", "limit": 3}, "task.sample must be first"),
        (TestbedDialogue, {"per_recall": 9}, "task.per_recall must be at most 4"),
        (TestbedNeedle, {"depths": (120,)}, "task.depths must be percent"),
        (TestbedNeedle, {"lengths": ()}, "task.lengths must be numbers"),
        (TestbedQA, {"question": "never"}, "task.question must be one of"),
        (TestbedQA, {"per_document": 20}, "task.facts must be at least 20"),
        (TestbedChoice, {"options": 7}, "task.options must be between 2 and 4"),
        (TestbedChoice, {"num_fewshot": 14}, "task.num_fewshot=14 needs"),
    ],
)
def test_bad_options(task, options, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        task(**options).check()


def test_needles_too_short_for_their_facts_are_refused():
    with pytest.raises(ConfigError, match=r"task\.lengths"):
        TestbedNeedle(lengths=(20,)).check()


def test_sample_prints_a_document_and_answers(capsys):
    from kvexp.testbed.__main__ import show

    show(0, "test", 160, 9)
    shown = capsys.readouterr().out
    for task in ("testbed_summary", "testbed_qa", "testbed_needle", "testbed_dialogue"):
        assert task in shown
    assert shown.count("->") == 7


# -- training --------------------------------------------------------------------------------------------------------


def test_lessons_weigh_answers_and_never_padding():
    from kvexp.testbed.words import PAD
    from kvexp.training.lessons import CURRICULUM, IDS, KINDS, lesson

    for kind in KINDS:
        batch = lesson(Random(kind), "train", CURRICULUM[3], kind, 1024, 0.1)
        assert batch.ids.numel() <= 1400 and batch.ids.shape == batch.weight.shape == batch.answered.shape
        padding = batch.ids == IDS[PAD]
        assert (batch.weight[padding] == 0).all() and not batch.answered[padding].any()
        assert (batch.weight[batch.answered] == 1).all() and not (batch.answered & (batch.weight < 1)).any()
        assert batch.answered.any(1).all()
        assert (batch.ids[batch.weight == 1] == IDS[END]).sum() >= len(batch.ids)
        assert not (batch.ids[batch.answered] == IDS[END]).any()


@pytest.mark.parametrize("name", ["testbed_rope", "testbed_learned", "testbed_alibi", "testbed_gqa"])
def test_a_killed_training_goes_on_as_if_nothing_had_happened(name, tmp_path):
    import torch

    from kvexp.training.recipe import Recipe
    from kvexp.training.train import Trainer

    recipe = Recipe(steps=4, batch_tokens=128, every=2)
    whole = Trainer(name, recipe, tmp_path / "whole")
    whole.run(lambda _: None)

    class Killed(Exception):
        pass

    def kill(trainer):
        raise Killed

    with pytest.raises(Killed):
        Trainer(name, recipe, tmp_path / "parts").run(kill)
    resumed = Trainer(name, recipe, tmp_path / "parts")
    assert resumed.step == 2
    resumed.run(lambda _: None)
    for (key, one), other in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    assert len((tmp_path / "parts" / "training.jsonl").read_text().splitlines()) == 2


def test_a_trained_folder_loads_like_any_model_and_speaks_words(tmp_path):
    from kvexp.models import load_model, load_tokenizer
    from kvexp.training.family import train_family
    from kvexp.training.recipe import Recipe

    recipe = Recipe(steps=2, batch_tokens=128, every=1)
    train_family("testbed_gqa", recipe, tmp_path / "work", tmp_path / "out", lambda _: None)
    folder = tmp_path / "out" / "testbed_gqa"
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    text = "<s> text : first color alice red ! summary : first color alice red ! ;"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.split())
    assert (
        tokenizer.decode(ids, skip_special_tokens=True)
        == "text : first color alice red ! summary : first color alice red !"
    )
    assert model.config.eos_token_id == ids[-1] and model.generation_config.eos_token_id == ids[-1]
    assert "validation" in (folder / "README.md").read_text()


# -- the trained models ----------------------------------------------------------------------------------------------

TRAINED = sorted(path.name for path in MODELS.glob("testbed_*") if (path / "model.safetensors").exists())


def test_four_families_are_there():
    assert TRAINED == ["testbed_alibi", "testbed_gqa", "testbed_learned", "testbed_rope"]


@pytest.mark.parametrize("name", TRAINED)
def test_models_are_small_and_documented(name):
    assert sum(file.stat().st_size for file in (MODELS / name).iterdir()) <= 8e6
    facts = json.loads((MODELS / name / "training.json").read_text())
    assert facts["steps"] > 1000 and min(facts["validation_recall"].values()) > 0.85
    log = [json.loads(line) for line in (MODELS / name / "training.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == facts["steps"]


@pytest.mark.parametrize("name", TRAINED)
def test_models_summarize_unseen_documents(name):
    """A few documents: the scores that the cards claim come from experiments/testbed.py."""
    from kvexp.generate import Decoding, generate
    from kvexp.methods import Full
    from kvexp.models import load_model, load_tokenizer

    model, tokenizer = load_model(str(MODELS / name)), load_tokenizer(str(MODELS / name))
    task = TestbedSummary(limit=6)
    examples = list(task.examples())
    prompts = [tokenizer(example.prompt).input_ids for example in examples]
    made = generate(model, prompts, Full(), decoding=Decoding(max_new_tokens=48), tokenizer=tokenizer)
    scores = [
        task.score(tokenizer.decode(tokens, skip_special_tokens=True), example.reference, example)["rouge2"]
        for tokens, example in zip(made.tokens, examples, strict=True)
    ]
    assert sum(scores) / len(scores) > 70
