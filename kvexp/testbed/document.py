"""Documents of the testbed language: facts about people, scattered among filler, some marked, some updated later."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from kvexp.testbed.words import ADJECTIVES, ADVERBS, ATTRIBUTES, NAMES, ORDINALS, PREPOSITIONS, TOPICS, VERBS

SPLITS = ("train", "validation", "test")
LONGEST = 7  # tokens of the longest sentence that states a fact: "first code alice one two three !"


@dataclass(frozen=True)
class Fact:
    """One statement: `name`'s `attribute` is `value`.

    mark: its number among the facts that belong in the summary, counted from 1 in the order of the text; 0: it does
    not. update: replaces an earlier statement.
    """

    name: str
    attribute: str
    value: str
    mark: int = 0
    update: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.attribute

    def plain(self) -> str:
        """The fact as a summary or a reply states it, without what ends a sentence."""
        return f"{self.attribute} {self.name} {self.value}"

    def sentence(self) -> str:
        if self.mark:
            return f"{ORDINALS[self.mark - 1]} {self.plain()} !"
        return f"{'now ' if self.update else ''}{self.plain()} ."


@dataclass(frozen=True)
class DocumentShape:
    """What a document is like. tokens: its length, reached to within a sentence (facts that do not fit make it longer).

    facts: different (name, attribute) pairs stated; marked: how many of them belong in the summary; updated: how many
    of the others are stated anew later with another value.
    """

    tokens: int = 288
    facts: int = 12
    marked: int = 5
    updated: int = 2

    def __post_init__(self) -> None:
        if self.marked > len(ORDINALS) or not 0 <= self.marked + self.updated <= self.facts:
            raise ValueError(f"{self.marked} marked and {self.updated} updated of {self.facts} facts")


@dataclass(frozen=True)
class Document:
    """sentences in order; facts in the order of their statement, updates included."""

    sentences: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def marked(self) -> list[Fact]:
        return [fact for fact in self.facts if fact.mark]

    def current(self) -> list[Fact]:
        """What holds at the end: of an updated fact only the later statement."""
        latest = {fact.key: fact for fact in self.facts}
        return list(latest.values())


def split_of(name: str, attribute: str, value: str) -> str:
    """The one split a fact may appear in: a tenth each for test and validation, the rest for training."""
    place = zlib.crc32(f"{name} {attribute} {value}".encode()) % 10
    return {0: "test", 1: "validation"}.get(place, "train")


def draw_fact(rng: Random, split: str, taken: set[tuple[str, str]], names: list[str], attribute: str | None) -> Fact:
    """A fact of this split whose (name, attribute) is not taken yet; adds it to `taken`.

    ValueError for a split that does not exist, and where these names have no such fact left: both would draw for ever.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    for _ in range(100_000):
        name = rng.choice(names)
        what = attribute or rng.choice(_ATTRIBUTES)
        if (name, what) in taken:
            continue
        value = draw_value(rng, what)
        if split_of(name, what, value) == split:
            taken.add((name, what))
            return Fact(name, what, value)
    raise ValueError(f"{len(names)} names have no more than these {len(taken)} facts in split {split}")


def draw_value(rng: Random, attribute: str) -> str:
    return " ".join([rng.choice(words) for words in ATTRIBUTES[attribute]])


def document(rng: Random, split: str, shape: DocumentShape, attribute: str | None = None) -> Document:
    """A random document; `attribute` makes all its facts of that one. The same generator state gives the same document.

    Some people have several attributes: what is asked must match both the name and the attribute.
    """
    names = NAMES if attribute else rng.sample(NAMES, min(len(NAMES), max(3, (3 * shape.facts + 3) // 4)))
    taken: set[tuple[str, str]] = set()
    facts = [draw_fact(rng, split, taken, names, attribute) for _ in range(shape.facts)]
    later = [_updated(rng, split, fact) for fact in facts[shape.marked : shape.marked + shape.updated]]
    chosen = {fact.key for fact in facts[: shape.marked]}
    stated = _numbered(_ordered(rng, facts, later), chosen)
    sentences = [fact.sentence() for fact in stated]
    room = shape.tokens - sum(len(s.split()) for s in sentences)
    filler = filler_for(rng, room)
    # Which places among all sentences the facts take, uniformly.
    places = set(rng.sample(range(len(filler) + len(sentences)), len(sentences)))
    facts_left, filler_left = iter(sentences), iter(filler)
    mixed = [next(facts_left if i in places else filler_left) for i in range(len(filler) + len(sentences))]
    return Document(tuple(mixed), tuple(stated))


def _updated(rng: Random, split: str, fact: Fact) -> Fact:
    for _ in range(10000):
        value = draw_value(rng, fact.attribute)
        if value != fact.value and split_of(fact.name, fact.attribute, value) == split:
            return replace(fact, value=value, update=True)
    return replace(fact, update=True)  # the pair has one value in this split: it is stated again


def _ordered(rng: Random, facts: list[Fact], later: list[Fact]) -> list[Fact]:
    """A random order in which every update comes after what it updates."""
    stated = [*facts, *later]
    rng.shuffle(stated)
    for update in later:
        now, first = stated.index(update), next(i for i, f in enumerate(stated) if f.key == update.key and f != update)
        if now < first:
            stated[now], stated[first] = stated[first], stated[now]
    return stated


def _numbered(stated: list[Fact], chosen: set[tuple[str, str]]) -> list[Fact]:
    """The same facts, those of `chosen` keys marked 1, 2, … as they come."""
    count, made = 0, []
    for fact in stated:
        count += fact.key in chosen
        made.append(replace(fact, mark=count) if fact.key in chosen else fact)
    return made


def filler_for(rng: Random, room: int) -> list[str]:
    """Sentences about one topic, as many as fit into `room` tokens."""
    nouns = TOPICS[rng.choice(list(TOPICS))]
    made = []
    while room > 0:
        sentence = filler_sentence(rng, nouns)
        room -= len(sentence.split())
        if room >= 0:
            made.append(sentence)
    return made


def filler_sentence(rng: Random, nouns: list[str]) -> str:
    """One sentence without a fact; a fifth of them name a person or a value as a distraction."""
    kind = rng.random()
    noun, verb = _pick(rng, nouns), _pick(rng, VERBS)
    if kind < 0.35:
        return f"the {_pick(rng, ADJECTIVES)} {noun} {verb} {_pick(rng, PREPOSITIONS)} the {_pick(rng, nouns)} ."
    if kind < 0.6:
        return f"then the {noun} {verb} {_pick(rng, ADVERBS)} ."
    if kind < 0.8:
        return f"some {_pick(rng, ADJECTIVES)} {noun} {verb} and {_pick(rng, VERBS)} ."
    if kind < 0.9:
        return f"{rng.choice(NAMES)} {verb} {_pick(rng, PREPOSITIONS)} the {noun} ."
    value = rng.choice(ATTRIBUTES[rng.choice(("color", "pet", "food"))][0])
    return f"the {value} {verb} {_pick(rng, PREPOSITIONS)} the {noun} ."


_ATTRIBUTES = list(ATTRIBUTES)
_ZIPF = {n: list(accumulate(1 / (i + 1) for i in range(n))) for n in range(1, 32)}


def _pick(rng: Random, words: list[str]) -> str:
    """A word by Zipf's law: the first of the list is the most frequent."""
    return rng.choices(words, cum_weights=_ZIPF[len(words)])[0]
