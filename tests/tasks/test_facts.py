"""Facts: answers against a story told again from its text, lengths, places, what is refused."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from kvexp.tasks import BABILong, Facts
from kvexp.tasks.articles import articles
from kvexp.tasks.facts import KINDS, LEFT, NUMBERS, PEOPLE, ROOMS, THINGS, TOOK, story
from kvexp.util import ConfigError


def count(words: str, opening: str = "") -> int:
    return 7 + -(-len(words + opening) // 4)


def told_again(said: list[str]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, set[str]]]:
    """(room by person, rooms by thing one after the other, things by person), read from the sentences alone."""
    room: dict[str, str] = {}
    rooms: dict[str, list[str]] = {thing: [] for thing in THINGS}
    has: dict[str, set[str]] = {person: set() for person in PEOPLE}
    for sentence in said:
        person, verb, last = re.fullmatch(r"(\w+) (.+) the (\w+)\.", sentence).groups()
        if verb in TOOK:
            assert not any(last in each for each in has.values())  # nobody has it
            assert not rooms[last] or rooms[last][-1] == room[person]  # and it is here
            has[person].add(last)
        elif verb in LEFT:
            has[person].remove(last)
        else:
            room[person] = last
        for thing in has[person]:
            if not rooms[thing] or rooms[thing][-1] != room[person]:
                rooms[thing].append(room[person])
    return room, rooms, has


def answer_of(question: str, said: list[str]) -> str:
    room, rooms, has = told_again(said)
    words = re.findall(r"\w+", question)
    if question.startswith("How many"):
        return {1: "one", 2: "two", 3: "three"}[len(has[words[4]])]
    if question.startswith("Is "):
        return "yes" if room[words[1]] == words[4] else "no"
    if " before " in question:
        path = rooms[words[3]]
        assert path.count(words[6]) == 1
        return path[path.index(words[6]) - 1]
    return room[words[2]] if words[2] in PEOPLE else rooms[words[3]][-1]


@pytest.mark.parametrize("subset", KINDS)
def test_an_answer_follows_from_the_facts_that_are_named(subset):
    draws, answers = random.Random(5), set()
    for _ in range(300):
        said, question, answer, needed = story(subset, 10, draws)
        assert len(said) == 10 and answer == answer_of(question, said)
        assert needed == sorted(set(needed)) and all(0 <= place < 10 for place in needed)
        answers.add(answer)
        if subset in ("qa1", "qa6"):  # one fact is enough
            assert answer_of(question, [said[place] for place in needed]) == answer
        elif subset != "qa7":  # the last says where, and one of them what
            thing = next(word for word in re.findall(r"\w+", question) if word in THINGS)
            assert any(f"the {thing}." in said[place] for place in needed)
    assert answers == set(KINDS[subset].labels) - {"none"}


@pytest.mark.parametrize("subset", KINDS)
def test_rows_have_their_length_and_their_facts_in_order(subset):
    task = Facts(subset=subset, lengths=(900, 1800), size=3)
    rows = [task.fit(example, count, 1 << 30) for example in task.examples()]
    for row in rows:
        assert row.info["length"] - 6 <= count(row.prompt) + 16 == row.info["length_measured"] <= row.info["length"]
        context = row.prompt.partition("<context>\n")[2].partition("\n</context>")[0]
        said = re.findall(rf"(?:{'|'.join(PEOPLE)}) [a-z ]+ the (?:{'|'.join((*ROOMS, *THINGS))})\.", context)
        assert len(said) == 10 and answer_of(row.info["question"], said) == row.reference
        assert row.info["depths_measured"] == sorted(row.info["depths_measured"]) and "_places" not in row.info
        assert row.info["depth"] <= row.info["depths_measured"][-1] <= row.info["depth"] + 25
        assert len(row.info["depths_measured"]) == row.info["needs"]
    assert rows == [task.fit(example, count, 1 << 30) for example in task.examples()]
    assert len({row.prompt for row in rows}) == 6


def test_no_article_names_a_person_of_the_facts():
    names = re.compile(rf"\b(?:{'|'.join(PEOPLE)})\b (?:went|moved|took|got|left)")
    assert not any(names.search(article.text) for article in articles())


def test_too_short_a_length_is_refused_and_a_longer_one_than_the_model_skipped():
    (row,) = Facts(lengths=(200,), size=1).examples()
    with pytest.raises(ConfigError, match=r"200 tokens does not hold instruction, facts and answer, which have \d+"):
        Facts().fit(row, count, 1 << 30)
    skipped = Facts().fit(row, count, 100)
    assert skipped.skipped == "too long" and "_places" not in skipped.info
    with pytest.raises(ConfigError, match="must be one of qa1, qa2, qa3, qa6, qa7, got 'qa4'"):
        Facts(subset="qa4").check_options()


def test_files_are_asked_in_the_official_form(tmp_path):
    path = tmp_path / "qa7.jsonl"
    path.write_text(json.dumps({"input": "A. B.", "question": "How many objects is John carrying?", "target": "two"}))
    task = BABILong(subset="qa7", data_files=str(path))
    task.check()
    (row,) = task.examples()
    assert row.prompt.endswith("<context>\nA. B.\n</context>\n\nQuestion: How many objects is John carrying?\nAnswer:")
    assert [task.score(said, "two", row)["accuracy"] for said in (" Two.", "two or one", "3")] == [100, 0, 0]
    assert task.answered("two", row) and task.for_model(chat=True).answer_prefix == ""
    assert replace(task, counted="answered").only_answered and not task.only_answered
    with pytest.raises(ConfigError, match=r"the target 'two' is no answer of qa1, which has bathroom"):
        replace(task, subset="qa1").check()
    assert KINDS["qa7"].labels == NUMBERS
