"""Facts hidden in a text and a question that needs one or several of them: the logic of BABILong (Kuratov et al.,
arXiv:2406.10149), which hides bAbI's facts (Weston et al., arXiv:1502.05698) in books.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from typing import Annotated, Any, ClassVar

from kvexp.tasks.articles import articles, articles_digest
from kvexp.tasks.base import (
    CountedTask,
    Example,
    Positive,
    QuestionTask,
    Rules,
    Truncation,
    among,
    depths_of,
    filled,
    most_units,
    quarter,
    row_id,
    seed_of,
)
from kvexp.tasks.data import text
from kvexp.tasks.ruler import sentences
from kvexp.util import ConfigError, Range

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
NUMBERS = ("none", "one", "three", "two")
PEOPLE = ("Mary", "John", "Sandra", "Daniel")
THINGS = ("apple", "football", "milk")
WENT = ("went to", "moved to", "travelled to", "journeyed to", "went back to")
TOOK, LEFT = ("took", "picked up", "grabbed", "got"), ("put down", "left", "dropped", "discarded")

_POSITIONS = (
    "I will give you context with the facts about positions of different persons hidden in some random text and a "
    "question. You need to answer the question based only on the information from the facts. If a person was in "
    "different locations, use the latest location to answer the question."
)
_CARRIED = (
    "I give you context with the facts about locations and actions of different persons hidden in some random text and "
    "a question.{gap}You need to answer the question based only on the information from the facts.\nIf a person got an "
    "item in the first location and travelled to the second location the item is also in the second location. If a "
    "person dropped an item in the first location and moved to the second location the item remains in the first "
    "location."
)
_OBJECTS = (
    "I will give you context with the facts about people and objects they carry, hidden in some random text and a "
    "question. You need to answer the question based only on the information from the facts."
)
_PEOPLE = (
    "I will give you context with the facts about people and their locations hidden in some random text and a "
    "question. You need to answer the question based only on the information from the facts. If a person was in "
    "different locations, use the latest location the person was in to answer the question."
)


@dataclass(frozen=True)
class Kind:
    """A kind of question. labels: all answers that there are; the others: the parts of the official prompt."""

    labels: tuple[str, ...]
    instruction: str
    examples: str
    after: str


def _lessons(*each: str, between: str = "\n", end: str = "") -> str:
    return between.join(f"<example>\n{one}\n</example>" for one in each) + end


# The prompts of babilong/prompts.py in github.com/booydar/babilong (Apache-2.0) at commit 7a6efee, to the letter.
KINDS = {
    "qa1": Kind(
        ROOMS,
        _POSITIONS,
        _lessons(
            "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. "
            "Where is Charlie?\nAnswer: The most recent location of Charlie is balcony.",
            "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to balcony. "
            "Where is Alan?\nAnswer: The most recent location of Alan is shop.",
            between="\n\n",
        ),
        "Always return your answer in the following format: The most recent location of ’person’ is ’location’. "  # noqa: RUF001
        "Do not write anything else after that.",
    ),
    "qa2": Kind(
        ROOMS,
        _CARRIED.format(gap=""),
        _lessons(
            "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. Where is the bottle?\n"
            "Answer: The bottle is in the balcony.",
            "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. Where is the screw driver?\n"
            "Answer: The screw driver is in the kitchen.",
        ),
        "Always return your answer in the following format: The ’item’ is in ’location’. "  # noqa: RUF001
        "Do not write anything else after that.",
    ),
    "qa3": Kind(
        ROOMS,
        _CARRIED.format(gap=" "),
        _lessons(
            "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel journeyed "
            "to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen. Where was the apple before "
            "the kitchen?\nAnswer: Before the kitchen the apple was in the bathroom.",
            "John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra took "
            "the football. Sandra travelled to the garden. Sandra journeyed to the bedroom. Where was the football "
            "before the bedroom?\nAnswer: Before the bedroom the football was in the garden.",
        ),
        "Always return your answer in the following format: Before the $location_1$ the $item$ was in the "
        "$location_2$. Do not write anything else after that.",
    ),
    "qa6": Kind(
        ("no", "yes"),
        _PEOPLE,
        _lessons(
            "John travelled to the hallway. John travelled to the garden. Is John in the garden?\nAnswer: yes",
            "Mary went to the office. Daniel journeyed to the hallway. Mary went to the bedroom. Sandra went to the "
            "garden. Is Mary in the office?\nAnswer: no",
            end="\n",
        ),
        "Your answer should contain only one word - $yes$ or $no$. Do not write anything else after that. "
        "Do not explain your answer.",
    ),
    "qa7": Kind(
        NUMBERS,
        _OBJECTS,
        _lessons(
            "Daniel went to the bedroom. Daniel got the apple there. How many objects is Daniel carrying?\nAnswer: one",
            "Mary grabbed the apple there. Mary gave the apple to John. How many objects is Mary carrying?\n"
            "Answer: none",
            "Sandra travelled to the hallway. Sandra picked up the milk there. Sandra took the apple there. Mary "
            "travelled to the garden. How many objects is Sandra carrying?\nAnswer: two",
            end="\n",
        ),
        "Your answer should contain only one word - $none$ or $number_of_objects$. Do not write anything else after "
        "that. Do not explain your answer.",
    ),
}


def is_right(output: str, target: str, question: str, labels: Sequence[str]) -> bool:
    """Whether the target is the only label in the answer's first sentence that the question does not name.

    babilong/metrics.py, to the letter. It looks for labels anywhere, also inside of words: "one" stands in "none", so
    that no answer is right where the target of a qa7 is none.
    """
    said = output.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    asked = question.lower()
    found = {label for label in map(str.lower, labels) if label in said and label not in asked}
    return found == {target.lower()}


@dataclass(frozen=True, kw_only=True)
class BABILong(CountedTask, QuestionTask):
    """Questions of BABILong (arXiv:2406.10149) from `data_files`, in the columns of RMT-team/babilong: input, question,
    target. `subset`: qa1, qa2 or qa3 (where is somebody, something, and where was it before), qa6 (yes or no), qa7 (how
    many things).

    The official prompt, to the letter, and behind it "Answer:" for a base model (`answer_prefix`; a chat model's answer
    begins with its turn); `accuracy` by the official rule (`is_right`). counted=answered counts rows that the full
    cache answers.
    """

    name: ClassVar[str] = "babilong"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    rules: ClassVar[Rules] = (
        (lambda c: c.subset not in KINDS, f"task.subset must be one of {', '.join(KINDS)}, got {{c.subset!r}}"),
    )

    subset: str = "qa1"
    answer_prefix: str = "\nAnswer:"
    max_new_tokens: Positive = 20
    truncate: Truncation = "skip"

    def label(self, choice: str) -> str:
        return f"{choice}/{self.subset}"

    def example(self, row: dict[str, Any], where: str) -> Example:
        given, asked, target = (text(row, name, where, "data_files") for name in ("input", "question", "target"))
        labels = KINDS[self.subset].labels
        if target.lower() not in labels:
            raise ConfigError(
                f"{where}: the target {target!r} is no answer of {self.subset}, which has {', '.join(labels)}: "
                "set task.subset to the file's task"
            )
        return self.about(row_id(row, "id", given, asked), given, asked, target)

    def about(self, name: str, context: str, question: str, answer: str) -> Example:
        """The example in the official form."""
        kind = KINDS[self.subset]
        before = f"{kind.instruction}\n\n{kind.examples}\n\n{kind.after}\n\n<context>\n"
        after = f"\n</context>\n\nQuestion: {question}{self.answer_prefix}"
        made = self.ask(name, (before, context.strip(), ""), after, answer)
        return replace(made, info={"question": question})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        right = is_right(output, example.reference, example.info["question"], KINDS[self.subset].labels)
        return {"accuracy": 100.0 * right}


@dataclass(frozen=True, kw_only=True)
class Facts(BABILong):
    """Facts of BABILong's logic among sentences of kvexp's articles, asked and graded as there: `size` rows of each of
    `lengths`, in tokens of prompt and answer, nothing to download.

    Four people go to six rooms, take three things and leave them: `facts` sentences at random places of a text, in
    their order. `subset`: as of BABILong; qa7 asks for one thing to three, as no answer to none is right there. A row's
    info: `length_measured`, `needs` (how many facts the answer follows from), `depths_measured` of these facts in
    percent of the prompt's tokens, and the quarter of the last one, `depth`.
    """

    name: ClassVar[str] = "facts"
    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "rows"
    uncut: ClassVar[str] = "a shortened text may have lost a fact; lower task.lengths instead"
    rules: ClassVar[Rules] = (filled("lengths"),)

    lengths: tuple[Positive, ...] = (4096,)
    size: Positive = 40
    facts: Annotated[int, Range(6, 100)] = 10
    max_new_tokens: Positive = 16

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, length in islice(product(range(self.size), self.lengths), self.limit):
            yield f"row {number} of length {length}", {"length": length, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        return self._made(row, 40)

    def _made(self, row: Mapping[str, Any], words: int) -> Example:
        """The row with so many words of the articles around its facts."""
        name = f"{self.seed} {self.subset} {row['length']} {row['number']}"
        draws = random.Random(seed_of(name))
        said, asked, answer, needed = story(self.subset, self.facts, draws)
        filler, shares = _filler(draws.randrange(len(articles()))), sorted(draws.random() for _ in said)
        each = sentences(" ".join((filler * (1 + words // len(filler)))[:words]))
        context = " ".join(filter(None, among(said, shares, each)))
        made = self.about(f"{self.subset} length {row['length']} row {row['number']}", context, asked, answer)
        at, places = 0, []
        for fact in said:  # facts may be said twice: each is looked for behind the one before it
            at = made.prompt.index(fact, max(at, len(made.prefix)))
            places.append(at)
            at += len(fact)
        info = {"length": row["length"], "number": row["number"], "needs": len(needed)}
        return replace(made, info={**made.info, **info, "_places": [places[fact] for fact in needed]})

    def fit(self, example: Example, count: Callable[..., int], room: int) -> Example:
        length = example.info["length"]
        if length > room:
            return replace(example, info=_public(example.info), skipped="too long")

        def tokens(words: int) -> int:
            made = self._made(example.info, words)
            return count(made.prompt + made.question)

        words = most_units(tokens, length - self.max_new_tokens)
        if words < 0:
            raise ConfigError(
                f"a length of {length} tokens does not hold instruction, facts and answer, which have "
                f"{tokens(0) + self.max_new_tokens}: raise task.lengths, or lower task.facts"
            )
        made = self._made(example.info, words)
        depths = depths_of(made.prompt + made.question, made.info["_places"], count)
        more = {
            "length_measured": tokens(words) + self.max_new_tokens,
            "depths_measured": depths,
            **quarter(depths[-1]),
        }
        return replace(made, id=example.id, info={**_public(made.info), **more})

    def fingerprint(self) -> str:
        return f"facts:{articles_digest()}"


def _public(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if not name.startswith("_")}


@lru_cache(maxsize=8)
def _filler(first: int) -> list[str]:
    """The words of all articles, from one of them on."""
    each = articles()
    return [word for article in (*each[first:], *each[:first]) for word in article.text.split()]


def story(subset: str, size: int, draws: random.Random) -> tuple[list[str], str, str, list[int]]:
    """(facts, question, answer, places of the facts that the answer follows from) of one kind, drawn anew until the
    story has such a question.
    """
    ask = {"qa1": _where, "qa2": _where_thing, "qa3": _where_before, "qa6": _is_there, "qa7": _how_many}[subset]
    while True:
        tale = _drawn_tale(size, draws, things=subset in ("qa2", "qa3", "qa7"))
        if (found := ask(tale, draws)) is not None:
            return tale.said, *found


@dataclass
class _Story:
    """What was said, and what follows from it. Numbers are places in `said`; `room` and `moved` by person; `paths`: per
    thing the rooms that it was in, each with the facts that brought it there; `held`: per person the things carried.
    """

    said: list[str]
    room: dict[str, str]
    moved: dict[str, int]
    paths: dict[str, list[tuple[str, list[int]]]]
    held: dict[str, dict[str, int]]


Found = tuple[str, str, list[int]] | None


def _drawn_tale(size: int, draws: random.Random, things: bool) -> _Story:
    story = _Story([], {}, {}, {thing: [] for thing in THINGS}, {person: {} for person in PEOPLE})
    while len(story.said) < size:
        person, here = draws.choice(PEOPLE), len(story.said)
        free = [thing for thing in THINGS if not any(thing in held for held in story.held.values())]
        held, where = story.held[person], story.room.get(person)
        there = [thing for thing in free if not story.paths[thing] or story.paths[thing][-1][0] == where]
        act = draws.random() if things and where else 1.0
        if act < 0.35 and there:
            thing = draws.choice(there)
            story.said.append(f"{person} {draws.choice(TOOK)} the {thing}.")
            held[thing] = here
            if not story.paths[thing]:
                story.paths[thing].append((str(where), [story.moved[person], here]))
        elif act < 0.5 and held:
            thing = draws.choice(sorted(held))
            story.said.append(f"{person} {draws.choice(LEFT)} the {thing}.")
            del held[thing]
            story.paths[thing][-1][1].append(here)
        else:
            room = draws.choice([room for room in ROOMS if room != where])
            story.said.append(f"{person} {draws.choice(WENT)} the {room}.")
            story.room[person], story.moved[person] = room, here
            for thing, taken in held.items():
                story.paths[thing].append((room, [taken, here]))
    return story


def _where(tale: _Story, draws: random.Random) -> Found:
    person = draws.choice(sorted(tale.room))
    return f"Where is {person}?", tale.room[person], [tale.moved[person]]


def _where_thing(tale: _Story, draws: random.Random) -> Found:
    seen = [thing for thing in THINGS if tale.paths[thing]]
    if not seen:
        return None
    thing = draws.choice(seen)
    room, needed = tale.paths[thing][-1]
    return f"Where is the {thing}?", room, sorted(needed)


def _where_before(tale: _Story, draws: random.Random) -> Found:
    """A question about a room that a thing came to once: of others the answer would not be one."""
    each = [
        (thing, path, place)
        for thing, path in tale.paths.items()
        for place in range(1, len(path))
        if [room for room, _ in path].count(path[place][0]) == 1
    ]
    if not each:
        return None
    thing, path, place = draws.choice(each)
    (before, needed), (after, more) = path[place - 1 : place + 1]
    return f"Where was the {thing} before the {after}?", before, sorted({*needed, *more})


def _is_there(tale: _Story, draws: random.Random) -> Found:
    """Half of the questions have the answer yes; the others ask for a room that the person was in, if there is one."""
    person, yes = draws.choice(sorted(tale.room)), draws.random() < 0.5
    now = tale.room[person]
    others = sorted({room for room in ROOMS if room != now and any(f"{person} " in s and room in s for s in tale.said)})
    room = now if yes else draws.choice(others or [room for room in ROOMS if room != now])
    return f"Is {person} in the {room}?", "yes" if yes else "no", [tale.moved[person]]


def _how_many(tale: _Story, draws: random.Random) -> Found:
    carrying = [person for person in PEOPLE if tale.held[person]]
    if not carrying:
        return None
    person = draws.choice(carrying)
    held = tale.held[person]
    return f"How many objects is {person} carrying?", ("one", "two", "three")[len(held) - 1], sorted(held.values())
