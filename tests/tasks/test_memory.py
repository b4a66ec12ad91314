"""The task memory: what a conversation says, where, and what an answer must hold."""

from __future__ import annotations

import re

import pytest

from kvexp.tasks import Memory
from kvexp.tasks.articles import conversations
from kvexp.util.errors import ConfigError


def words(text):
    return len(text.split())


def test_a_conversation_states_each_fact_once_and_says_where():
    """By the text itself: turns parted at "User:", the turn and its place looked up again; questions share the text."""
    task = Memory(size=2, facts=5, others=3, turns=21)
    examples = [task.fit(example, words, 4096) for example in task.examples()]
    assert len(examples) == 10 and len({example.prompt for example in examples}) == 2
    for example in examples:
        turns = re.split(r"(?:^|\n)User: ", example.prompt)[1:]
        (fact,) = (fact for fact in conversations()["facts"] if fact["asked"] in example.question)
        stated = fact["told"].format(value=example.reference)
        (at,) = (number for number, turn in enumerate(turns) if turn.startswith(f"{stated}\n"))
        before = words(example.prompt[: example.prompt.index(stated) - len("User: ")])
        assert len(turns) == 21 and example.info["turn"] == at and example.info["distance"] == 21 - at
        assert example.info["depth_measured"] == pytest.approx(100 * before / words(example.prompt), abs=0.5)
        assert example.reference not in example.question and example.question.endswith(example.begun)
        about_others = [turn for turn in turns if any(turn.startswith(name) for name in conversations()["names"])]
        assert len(about_others) == 3 and not any(f" {example.reference}." in turn for turn in about_others)


def test_facts_are_spread_and_draws_go_by_the_seed():
    depths = [example.info["turn"] // 10 for example in Memory(size=6).examples()]
    assert all(depths.count(quarter) >= 6 for quarter in range(4))
    first, again, other = (next(iter(Memory(seed=seed).examples())).prompt for seed in (1, 1, 2))
    assert first == again != other


def test_the_value_must_stand_in_the_answer_and_the_others_do_not_count():
    task = Memory()
    example = next(iter(task.examples()))
    assert task.score(f" {example.reference}, as you said.", example.reference, example) == {"exact": 100}
    assert task.score(" somebody's", example.reference, example) == {"exact": 0}


@pytest.mark.parametrize("options", [{"others": 9}, {"facts": 3}, {"turns": 11}])
def test_what_a_conversation_cannot_hold_is_refused(options):
    with pytest.raises(ConfigError):
        Memory(**options).check()
