"""Conversational memory: what a user said of himself over many turns, among other talk, is asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Annotated, Any, ClassVar

from kvexp.tasks.articles import conversations, own_digest
from kvexp.tasks.base import (
    CountedTask,
    Example,
    Positive,
    Rules,
    SharedContextTask,
    Truncation,
    When,
    among,
    depths_of,
    quarter,
    seed_of,
)
from kvexp.tasks.metrics import contains
from kvexp.util.fields import Range

USER, ASSISTANT = "\nUser: ", "\nAssistant:"


@dataclass(frozen=True, kw_only=True)
class Memory(SharedContextTask, CountedTask):
    """Remember what a user said: `facts` of `turns` turns of a conversation state a fact each, `others` one of the same
    kind about somebody else, the rest is small talk; at the end each fact is asked for, an example each.

    Own English, drawn by `seed`. Asked with question=after_eviction, the default, the conversation is prefilled and
    evicted once for all of its questions (questions=all); else before its question is known. `exact`, in percent:
    whether the value stands in the answer word for word. A row's info has the `turn` that stated the fact, how many
    turns ago that was (`distance`), and where it begins in percent of the tokens (`depth_measured`, its quarter
    `depth`).
    """

    name: ClassVar[str] = "memory"
    metrics: ClassVar[tuple[str, ...]] = ("exact",)
    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "questions"
    uncut: ClassVar[str] = "a shortened conversation may have lost what is asked for"
    rules: ClassVar[Rules] = (
        (
            lambda c: not c.others <= c.facts <= c.turns - c.others,
            "task.others={c.others} must be at most task.facts={c.facts}, and task.turns={c.turns} hold both: raise "
            "task.turns, or lower task.others or task.facts",
        ),
    )

    turns: Annotated[int, Range(2, 400)] = 40
    facts: Annotated[int, Range(1, 8)] = 8
    others: Annotated[int, Range(0, 8)] = 4
    size: Positive = 20  # conversations
    question: When = "after_eviction"
    max_new_tokens: Positive = 8
    truncate: Truncation = "skip"

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, place in islice(product(range(self.size), range(self.facts)), self.limit):
            yield f"question {place} of conversation {number}", {"conversation": number, "question": place}

    def example(self, row: dict[str, Any], where: str) -> Example:
        words, dice = conversations(), random.Random(seed_of(f"{self.seed} memory {row['conversation']}"))
        facts = dice.sample(words["facts"], self.facts)
        mine, theirs = zip(*(dice.sample(fact["values"], 2) for fact in facts), strict=True)
        names = dice.sample(words["names"], self.facts)
        stated = [fact["told"].format(value=value) for fact, value in zip(facts, mine, strict=True)]
        others = [f["other"].format(name=n, value=v) for f, n, v in zip(facts, names, theirs, strict=True)]
        talk = [dice.choice(words["talk"]) for _ in range(self.turns - self.facts - self.others)]
        rest = [[line, dice.choice(words["heard"])] for line in dice.sample(others, self.others)] + talk
        dice.shuffle(rest)
        hidden = [[line, dice.choice(words["heard"])] for line in stated]
        shares = [(place + dice.random()) / self.facts for place in range(self.facts)]
        pairs = among(hidden, shares, rest)
        lines = [f"{USER}{said}{ASSISTANT} {heard}" for said, heard in pairs]
        fact, turn = facts[row["question"]], pairs.index(hidden[row["question"]])
        question = f"{USER}{fact['asked']}{ASSISTANT} {fact['begun']}"
        name = f"conversation {row['conversation']} question {row['question']}"
        example = self.ask(name, ("", "".join(lines).lstrip(), ""), question, mine[row["question"]])
        place = sum(map(len, lines[:turn]))
        info = {**row, "turn": turn, "distance": self.turns - turn, "characters": place}
        return replace(example, begun=f" {fact['begun']}", info=info)

    def fit(self, example: Example, count: Callable[..., int], room: int) -> Example:
        (depth,) = depths_of(example.prompt, [example.info["characters"]], count)
        return replace(example, info={**example.info, **quarter(depth)})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"exact": 100 * contains(output, reference)}

    def fingerprint(self) -> str:
        return f"conversations:{own_digest('conversations')}"
