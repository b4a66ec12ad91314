"""Needles: where they land, how long prompts get in a tokenizer's own tokens, what a score means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvexp.tasks import Needle
from kvexp.tasks.base import longest_fit
from kvexp.tasks.needle import from_sentence, hide, read, repeated
from kvexp.util.errors import ConfigError

FOLDER = str(Path(__file__).parents[1] / "fixtures" / "haystack")
ONE = Needle(
    haystack=FOLDER,
    lengths=(300, 500),
    depths=(0, 50, 100),
    needles=("The best cheese in Ghent is blue.",),
    questions=("What is the best cheese in Ghent?",),
    answers=("The blue cheese",),
    before="Read.\n\n",
    after="\n\n{question} Answer:",
)
MANY = replace(
    ONE,
    needles=("Ankara has {key} lamps.", "Bergen has {key} lamps.", "Cusco has {key} lamps."),
    questions=("How many lamps has Ankara?", "How many lamps has the town of Bergen, counting all?", "And Cusco?"),
    answers=("{key}", "{key}", "{key}"),
)
CHARACTERS, WORDS = len, lambda text: len(text.split())


def fitted(task, count=CHARACTERS):
    return [task.fit(example, count, 1 << 40) for example in task.examples()]


# ---- where needles land


def test_a_needle_goes_in_front_of_the_sentence_at_its_depth():
    text = "One. Two two. Three three three. Four."
    assert hide(text, [(0, "N!")]).text == "N! " + text
    assert hide(text, [(100, "N!")]).text == text + " N!"
    assert hide(text, [(50, "N!")]).text == "One. Two two. N! Three three three. Four."  # character 19 is in the third
    assert hide(text, [(1, "N!")]).text == "N! " + text
    assert hide(text, [(0, "A!"), (50, "B!"), (100, "C!")]).text == "A! One. Two two. B! Three three three. Four. C!"
    assert hide(text, [(50, "A!"), (50, "B!")]).text == "One. Two two. A! B! Three three three. Four."
    assert hide("", [(50, "N!")]).text == "N!"
    assert hide("word " * 3000, [(90, "N!")]).text.index("N!") == 13500  # nothing ends a sentence: between two words


def test_a_haystack_begins_elsewhere_and_loses_nothing():
    text = "One. Two. Three. Four."
    assert from_sentence(text, 0.0) == text
    assert from_sentence(text, 0.3) == "Three. Four.\n\nOne. Two."
    assert from_sentence(text, 0.99) == text
    assert repeated("Ab.", 9) == "Ab. Ab. Ab."


def test_files_are_read_in_the_order_of_their_names():
    whole = read(FOLDER)
    assert whole.index("A boat leaves") < whole.index("Bread rises") < whole.index("The tower clock")
    assert "hand, and every" in whole and "March.\n\nBread" in whole.replace("March. \n", "March.\n")


# ---- lengths


@pytest.mark.parametrize("count", [CHARACTERS, WORDS, lambda text: (len(text) + 2) // 3], ids=["1", "word", "3"])
def test_prompts_are_as_long_as_the_grid_says(count):
    task = replace(ONE, lengths=(120, 170), depths=(0, 30, 100))
    examples = fitted(task, count)
    assert [(e.info["length"], e.info["depth"]) for e in examples] == [
        *((120, 0), (120, 30), (120, 100)),
        *((170, 0), (170, 30), (170, 100)),
    ]
    for example in examples:
        assert example.info["length"] - 1 <= count(example.prompt) <= example.info["length"]
        assert example.prompt.count("The best cheese in Ghent is blue.") == 1
        assert example.prompt.startswith("Read.\n\n") and example.prompt.endswith("in Ghent? Answer:")
    assert examples[0].body.startswith("The best cheese")
    assert examples[2].body.endswith("is blue.")


def test_longest_fit_is_the_largest_or_exact():
    for limit in (0, 1, 7, 40, 41, 10**6):
        calls = []

        def count(n, calls=calls):
            calls.append(n)
            return 3 + n // 4

        found = longest_fit(count, limit, 1000)
        best = -1 if limit < 3 else max(n for n in range(1001) if 3 + n // 4 <= limit)
        assert found == best or 3 + found // 4 == limit
        assert len(calls) < 25
    assert longest_fit(lambda n: 5, 5, 10) == 0  # exactly what was asked for, at once


def test_questions_of_a_cell_share_one_context_whenever_they_are_asked():
    for question in ("in_prompt", "after_eviction"):
        task = replace(MANY, lengths=(400,), depths=(0, 40), question=question)
        examples = fitted(task)
        assert [e.info["question"] for e in examples] == [0, 1, 2] * 2
        for cell in (examples[:3], examples[3:]):
            assert len({e.body for e in cell}) == 1
            assert max(len(e.prompt + e.question) for e in cell) == 400  # the longest question sets the length
            assert (len({e.prompt for e in cell}) == 1) == (question == "after_eviction")
            assert [e.reference for e in cell] == [
                next(w for w in e.body.split(f"{town} has ")[1].split())
                for e, town in zip(cell, ("Ankara", "Bergen", "Cusco"), strict=True)
            ]
    assert [e.id for e in examples[:2]] == ["length 400 depth 0 question 0", "length 400 depth 0 question 1"]
    before = examples[0].body
    assert 0 == before.index("Ankara") < before.index("Bergen") < before.index("Cusco")  # depths 0, 33, 67


def test_keys_and_places_depend_on_the_cell_alone():
    task = replace(MANY, lengths=(400, 500), depths=(0, 50), repeats=2)
    keys = {e.id: e.info["answers"] for e in fitted(task)}
    assert len({key[0] for key in keys.values()}) == len(keys) == 2 * 2 * 2 * 3
    assert all(len(key[0]) == 5 and key[0].isdigit() for key in keys.values())
    fewer = replace(task, lengths=(500,), depths=(50,))
    assert {e.id: e.info["answers"] for e in fitted(fewer)}.items() <= keys.items()
    assert {e.info["answers"][0] for e in fitted(replace(task, seed=1))}.isdisjoint(k[0] for k in keys.values())
    bodies = [e.body for e in fitted(replace(ONE, lengths=(300,), depths=(0,), repeats=3))]
    assert len(set(bodies)) == 3 and bodies[0][len("The best cheese in Ghent is blue. ") :].startswith("A boat leaves")
    assert len(list(replace(task, limit=5).examples())) == 5


def test_passkey_has_no_haystack():
    task = replace(ONE, haystack=None, filler="The grass is green.", needles=("Key {key}.",), answers=("{key}",))
    task.check()
    for example in fitted(task):
        assert len(example.prompt) == example.info["length"]
        assert f"Key {example.reference}." in example.body and "The grass is green. The grass" in example.body


# ---- scores


def test_scores():
    example = next(ONE.examples())
    assert ONE.score("It is the BLUE cheese, I think", "", example) == {"word_recall": 100.0, "exact": 100.0}
    assert ONE.score("Cheese that is blue", "", example) == {"word_recall": 100.0, "exact": 0.0}
    assert ONE.score("Cheese", "", example) == {"word_recall": 50.0, "exact": 0.0}
    together = replace(MANY, questions=("How many lamps has each town?",))
    three = next(together.examples())
    first, second, _ = three.info["answers"]
    assert together.score(f"{first} and {second}", "", three)["exact"] == pytest.approx(200 / 3)
    assert three.reference == "\n".join(three.info["answers"])


# ---- mistakes


def test_a_haystack_too_short_in_tokens_is_said_before_the_model_loads():
    task = replace(ONE, lengths=(1500,))
    task.check()  # characters enough, so a tokenizer has to say
    with pytest.raises(ConfigError, match=r"makes a prompt of \d+ of this model's tokens, and 1500 are asked for"):
        fitted(task, WORDS)
    with pytest.raises(ConfigError, match="does not hold needle and question, which have"):
        fitted(replace(ONE, lengths=(20,)))


def test_a_folder_without_text(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match=r"found no text; give a folder of .txt files"):
        replace(ONE, haystack=str(tmp_path)).check()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="cannot read it as text"):
        replace(ONE, haystack=f"{tmp_path}/latin.txt").check()


def test_drawn_keys_are_compared_as_they_were():
    hay = Needle(filler="Sand. ", needles=("It is {key}.",), questions=("Which?",), answers=("{key}",), lengths=(300,))
    example = next(hay.examples())
    assert hay.corrected() == ()
    assert hay.score(f"-{example.reference}", example.reference, example)["exact"] == 100
