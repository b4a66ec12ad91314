"""A small synthetic language, so that every experiment runs anywhere: its words, documents and prompt forms.

    kvexp tasks testbed          a document, what is asked about it, and the answers
    python -m experiments.studies.testbed train                train the models that come with kvexp (make testbed)
    python -m experiments.testbed           are they good enough to measure with?

A document is a list of sentences about one topic. Among filler stand facts, "city alice north ford .": some numbered
("first city alice north ford !"), which is what a summary has to tell, some stated anew later with another value ("now
city alice east pool ."); and the filler names the same people and values without stating anything. Each (name,
attribute, value) belongs to one split, so that nothing asked in a test was ever seen in training. Four small models
were trained on it, one per layout of the papers' models, on documents of up to 560 tokens with up to 20 facts, ten of
them numbered, with up to 16 questions and 4 recalls each: tasks refuse forms that were never trained, but not lengths.

What carries over to real models, and what does not:

- Whether a method runs as its paper says: what it keeps and forgets, its bytes, its behaviour under beams, batches,
  grouped heads, ALiBi or learned positions. The code is the same.
- Mechanisms: a fact whose tokens leave the cache in all heads that copy it is lost, and a question asked after the
  eviction is harder than one the method could read. Both can be followed here token by token.
- The order of methods, only as far as their reasons carry over. These models attend by copying: nearly all of the mass
  of a head that matters lies on few tokens, and there is no world knowledge to fall back on when a fact is evicted.
  Real text is redundant, a lost word is often guessed, and attention is spread wider, so losses here are steeper.
- Not the percentages. No number from the testbed may be quoted as one about a 7B model, nor a kv_ratio as a
  recommendation: prompts here are hundreds of tokens, and a fixed number of protected tokens weighs more in them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count, islice, product
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from kvexp.tasks.base import (
    AFTER_EVICTION,
    IN_PROMPT,
    Example,
    Positive,
    QuestionTask,
    Rules,
    SharedContextTask,
    Task,
    Truncation,
    filled,
)
from kvexp.tasks.metrics import exact_match, qa_f1, rouge, word_recall
from kvexp.util.fields import AtLeast, Range

LANGUAGE = 1  # raised when the same seed makes another text


# ruff: noqa: SIM905  # a list of words is read more easily as a text

NAMES = (
    "alice bruno carla david elena felix greta henry irene jonas karla lewis maria niels olive pedro quinn rosa simon "
    "tilda ulric vera walter xenia yusuf zelda amir bella casper dora emil flora gustav hanna ivan julia kurt linda "
    "milo nora"
).split()

_COLORS = "red blue green yellow purple orange white black pink brown grey silver golden crimson violet teal".split()
_PETS = "cat dog horse parrot rabbit turtle hamster goat lizard falcon ferret donkey spaniel canary otter pony".split()
_FOODS = (
    "bread soup cheese rice honey apples olives salmon noodles plums beans mango pepper walnut garlic melon".split()
)
_PLACES = "haven ford mouth bridge castle wick stead minster pool field port combe".split()
_TRADES = "baker pilot doctor painter judge sailor tailor miner farmer lawyer singer broker".split()
_DIGITS = "zero one two three four five six seven eight nine".split()

# attribute -> the word lists its values are made of, one word of each list in turn
ATTRIBUTES: dict[str, tuple[list[str], ...]] = {
    "color": (_COLORS,),
    "pet": (_PETS,),
    "food": (_FOODS,),
    "city": ("north south east west upper lower new great".split(), _PLACES),
    "job": ("chief junior senior night deputy master acting royal".split(), _TRADES),
    "code": (_DIGITS, _DIGITS, _DIGITS),
}

# topic -> the nouns that a text about it prefers
TOPICS: dict[str, list[str]] = {
    "river": "river boat stone fish reed bank".split(),
    "forest": "forest tree path owl fox moss".split(),
    "town": "town market street tower bell clock".split(),
    "house": "house door window stove chair lamp".split(),
    "sea": "sea wave harbor gull sand storm".split(),
    "mountain": "mountain rock cloud eagle snow valley".split(),
    "garden": "garden rose fence bee well hedge".split(),
    "road": "road cart wheel inn dust mile".split(),
}
ADJECTIVES = "old small quiet tall cold bright narrow empty gentle heavy distant broken hidden early".split()
VERBS = "stood moved waited turned slept leaned shone rested drifted fell grew sang stayed vanished".split()
PREPOSITIONS = "near behind above beside under past beyond across".split()
ADVERBS = "slowly again alone softly often forever outside together".split()

START = "<s>"  # first token of every prompt
END = ";"  # closes every answer: the models' end token
PAD = "<pad>"
UNKNOWN = "<unk>"
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
GRAMMAR = "text talk summary ask recall now ann ben the then and some : . , ? !".split()


def vocabulary() -> list[str]:
    """Every token once, in a fixed order; special tokens first."""
    words = [PAD, START, END, UNKNOWN, *GRAMMAR, *ORDINALS, *NAMES, *ATTRIBUTES]
    for parts in ATTRIBUTES.values():
        for choices in parts:
            words += choices
    for nouns in TOPICS.values():
        words += nouns
    words += [*ADJECTIVES, *VERBS, *PREPOSITIONS, *ADVERBS]
    return list(dict.fromkeys(words))


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
    """Shape of a document. tokens: its length, reached to within a sentence (facts that do not fit make it longer).

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
        """The facts that hold at the end: of an updated one only the later statement."""
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
        kind = attribute or rng.choice(_ATTRIBUTES)
        if (name, kind) in taken:
            continue
        value = draw_value(rng, kind)
        if split_of(name, kind, value) == split:
            taken.add((name, kind))
            return Fact(name, kind, value)
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
    """Mark the facts of `chosen` keys 1, 2, … as they come; the others stay as they are."""
    count, facts = 0, []
    for fact in stated:
        count += fact.key in chosen
        facts.append(replace(fact, mark=count) if fact.key in chosen else fact)
    return facts


def filler_for(rng: Random, room: int) -> list[str]:
    """Sentences about one topic, as many as fit into `room` tokens."""
    nouns = TOPICS[rng.choice(list(TOPICS))]
    sentences = []
    while room > 0:
        sentence = filler_sentence(rng, nouns)
        room -= len(sentence.split())
        if room >= 0:
            sentences.append(sentence)
    return sentences


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


MOST_MARKED = 10  # the words "eleventh" and "twelfth" were never trained
MOST_TOKENS = 1_000_000  # of a document: more takes hours to write, and no model of the testbed reads as many
MOST_FACTS = 40  # (name, attribute) pairs of a split are many more, but not without end
Tokens = Annotated[int, Range(1, MOST_TOKENS)]
Count = Annotated[int, AtLeast(0)]


@dataclass(frozen=True, kw_only=True)
class Generated(Task):
    """Rows made by `kvexp.tasks.testbed`; row i depends on split, seed, i and the shape of the documents alone.

    `tokens`: length of a document; `facts` stated in it, of which `marked` by a number (the summary's) and `updated`
    stated anew later with another value; `size`: rows, of which `limit` takes the first. `split`: train, validation
    and test share no fact, so nothing asked here was ever seen in training. The models were trained on documents of up
    to 560 tokens and 20 facts: longer and fuller ones may be asked for, and are then a test of that too.
    """

    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "rows"
    rules: ClassVar[Rules] = (
        (
            lambda c: c.data_files or c.hub_id or c.hub_config or c.revision,
            "task.data_files, task.hub_id, task.hub_config and task.revision have no meaning for {c.name}, which makes "
            "its own rows",
        ),
        (
            lambda c: c.marked + c.updated > c.facts,
            "task.facts={c.facts} must be at least task.marked={c.marked} + task.updated={c.updated}",
        ),
        (
            lambda c: c.tokens < c.least_tokens,
            "task.tokens must be at least {c.least_tokens} to hold task.facts={c.facts} and task.updated={c.updated} "
            "later statements, got {c.tokens}; raise it or lower those",
        ),
    )

    size: Positive = 60
    split: Literal["train", "validation", "test"] = "test"
    tokens: Tokens = 288
    facts: Annotated[int, Range(0, MOST_FACTS)] = 14
    marked: Annotated[int, Range(0, MOST_MARKED)] = 6
    updated: Count = 2
    truncate: Truncation = "skip"

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number in range(self.size if self.limit is None else min(self.size, self.limit)):
            yield f"row {number}", {"number": number}

    def random(self, number: int | str) -> Random:
        """The generator that makes document `number`, or the one of this name."""
        return Random(f"{self.split} {self.seed} {number}")

    def document(self, number: int) -> tuple[Document, Random]:
        """Document `number`, and its generator as the document leaves it."""
        drawn, state = _seeded(f"{self.split} {self.seed} {number}", self.split, self.shape)
        rng = Random()
        rng.setstate(state)
        return drawn, rng

    @property
    def shape(self) -> DocumentShape:
        return DocumentShape(self.tokens, self.facts, self.marked, self.updated)

    def fingerprint(self) -> str:
        return f"testbed language {LANGUAGE}, split {self.split}"

    @property
    def least_tokens(self) -> int:
        """Tokens of a document that holds nothing but its facts."""
        return LONGEST * (self.facts + self.updated)


@lru_cache(maxsize=512)  # a sweep reads the same rows for every run; states are large
def _seeded(words: str, split: str, shape: DocumentShape) -> tuple[Document, tuple[Any, ...]]:
    rng = Random(words)
    return document(rng, split, shape), rng.getstate()


# The forms of prompts: the training data uses these very functions.
SPEAKERS = ("ann", "ben")


def opening(text: str) -> str:
    """A document as a prompt begins with it."""
    return f"{START} text : {text}"


def ask(fact: Fact) -> str:
    """A question; its answer is the fact's value."""
    return f" ask {fact.attribute} {fact.name}"


def answer(fact: Fact) -> str:
    """The answer as it follows `ask`, closed: what a shot or a training text holds."""
    return f" {fact.value} {END}"


SUMMARY = " summary :"
RECALL = " : recall "


def summary(facts: Iterable[Fact]) -> str:
    """The summary: the marked facts in order, each as in the text."""
    return " ".join(fact.sentence() for fact in facts)


def reply(facts: Iterable[Fact]) -> str:
    """The answer to a recall: the facts asked for."""
    return " . ".join(fact.plain() for fact in facts)


def last_request(said: str) -> tuple[str, str]:
    """(what was said before, the turn that asks to recall facts and begins the reply) of a conversation's pieces."""
    at = said.rindex(" ", 0, said.rindex(RECALL))
    return said[:at], said[at:]


def dialogue(rng: Random, split: str, shape: DocumentShape, recalls: int = 1, per_recall: int = 3) -> list[str]:
    """A conversation as a list of pieces: even ones are what was said, odd ones the replies that refer back.

    Two speakers state the sentences of a document by turns, one to three at a time. Then and in between one asks the
    other to recall some of the facts stated so far. The last piece is a reply.
    """
    doc = document(rng, split, shape)
    order = {fact.sentence(): fact for fact in doc.facts}
    pieces, said, known = [], f"{START} talk :", {}
    speaker, left = rng.randrange(2), list(doc.sentences)
    places = sorted(rng.sample(range(1, len(left)), min(recalls - 1, len(left) - 1))) if recalls > 1 else []
    done = 0
    while left:
        turn = left[: rng.randint(1, 3)]
        left = left[len(turn) :]
        done += len(turn)
        for sentence in turn:
            if sentence in order:
                known[order[sentence].key] = order[sentence]
        said += f" {SPEAKERS[speaker]} : {' '.join(turn)}"
        speaker = 1 - speaker
        if (places and done >= places[0] and known) or not left:
            places = places[1:]
            wanted = rng.sample(list(known.values()), min(per_recall, len(known)))
            request = " , ".join(f"{fact.attribute} {fact.name}" for fact in wanted)
            said += f" {SPEAKERS[speaker]}{RECALL}{request} ? {SPEAKERS[1 - speaker]} :"
            pieces += [said, f" {reply(wanted)} {END}"]
            said = ""
    return pieces


# A value of one word is judged by the prefill alone, before anything is evicted.
SEVERAL_WORDS = tuple(attribute for attribute, parts in ATTRIBUTES.items() if len(parts) > 1)


@dataclass(frozen=True, kw_only=True)
class TestbedChoice(Generated, QuestionTask):
    """Choose among `options` values of two or three words by log-likelihood, after `num_fewshot` answered questions.

    One wrong option begins with the right one's first word (in 11 of 12 questions, in 99 of 100 about codes), others
    are values that the text gives to somebody else, as far as it has such.
    Accuracy, in percent: `acc` by the summed log-probability (as lm-eval's). Plays lm-eval's multiple choice.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_choice"
    metrics: ClassVar[tuple[str, ...]] = ("acc",)
    rules: ClassVar[Rules] = (
        (
            lambda c: c.num_fewshot >= c.facts,
            "task.num_fewshot={c.num_fewshot} needs as many other facts: task.facts={c.facts} states one "
            "to ask about and too few to show; lower one or raise the other",
        ),
    )

    options: Annotated[int, Range(2, 4)] = 4
    num_fewshot: Annotated[int, Range(0, 15)] = 0

    def example(self, row: dict[str, Any], where: str) -> Example:
        rng = self.random(row["number"])
        doc, fact = self._with_long_value(rng)
        others = [other for other in doc.current() if other.key != fact.key]
        shots = "".join(ask(shot) + answer(shot) for shot in rng.sample(others, self.num_fewshot))
        values = [fact.value, *self._wrong(rng, fact, others)]
        rng.shuffle(values)
        name = f"{self.split}-{row['number']}"
        context = ("", opening(doc.text) + shots, "")
        return self.ask(name, context, ask(fact), fact.value, choices=tuple(f" {value}" for value in values))

    def _with_long_value(self, rng: Random) -> tuple[Document, Fact]:
        while True:
            doc = document(rng, self.split, self.shape)
            long = [fact for fact in doc.current() if fact.attribute in SEVERAL_WORDS]
            if long:
                return doc, rng.choice(long)

    def _wrong(self, rng: Random, fact: Fact, others: list[Fact]) -> list[str]:
        """Values to tell from the fact's, all different."""
        first = fact.value.split()[0]
        near = [value for value in (draw_value(rng, fact.attribute) for _ in range(200)) if value.split()[0] == first]
        elsewhere = [other.value for other in others if other.attribute == fact.attribute]
        rng.shuffle(elsewhere)
        candidates = [*near[:1], *elsewhere, *(draw_value(rng, fact.attribute) for _ in range(50))]
        return [value for value in dict.fromkeys(candidates) if value != fact.value][: self.options - 1]

    def score_choices(self, logprobs: list[float], tokens: list[int], example: Example) -> dict[str, float]:
        best = max(range(len(logprobs)), key=logprobs.__getitem__)
        return {"acc": 100.0 * (example.choices[best].strip() == example.reference)}


@dataclass(frozen=True, kw_only=True)
class TestbedDialogue(Generated, QuestionTask):
    """Reply to the last turn of a conversation, which asks to recall `per_recall` facts said earlier. ROUGE in percent.

    `recalls`: how often a speaker asks so, the last turn included; earlier replies stand in the prompt. It is a most:
    in a short conversation two requests may fall into one turn, which then makes one of them. Plays SODA. With
    question=after_eviction all but that last request is prefilled and evicted.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_dialogue"
    later_options: ClassVar[tuple[str, ...]] = ("question",)

    facts: Annotated[int, Range(1, MOST_FACTS)] = 14
    marked: Annotated[int, Range(0, MOST_MARKED)] = 0
    recalls: Annotated[int, Range(1, 4)] = 2
    per_recall: Annotated[int, Range(1, 4)] = 3
    max_new_tokens: Positive = 32

    def example(self, row: dict[str, Any], where: str) -> Example:
        shape = self.shape
        pieces = dialogue(self.random(row["number"]), self.split, shape, self.recalls, self.per_recall)
        reference = pieces[-1].strip().removesuffix(" ;")
        said, request = "".join(pieces[:-1]), ""
        if self.question == AFTER_EVICTION:  # else all of it is body: what truncate=middle shortens
            said, request = last_request(said)
        return self.ask(f"{self.split}-{row['number']}", ("", said, ""), request, reference)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """ROUGE F1 with stemmer in percent, one fact per line for rougeLsum."""
        return rouge(output.replace(" . ", "\n"), reference.replace(" . ", "\n"))


@dataclass(frozen=True, kw_only=True)
class TestbedQA(Generated, SharedContextTask):
    """Answer `per_document` questions about each document, one example each. Word F1 and exact match, in percent.

    An updated fact is asked for its latest value. Plays LongBench's question answering. Asked with
    question=after_eviction the questions of a document share one evicted context.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_qa"
    metrics: ClassVar[tuple[str, ...]] = ("f1", "exact")
    rules: ClassVar[Rules] = (
        (
            lambda c: c.facts < c.per_document,
            "task.facts must be at least task.per_document={c.per_document}, got {c.facts}",
        ),
    )

    per_document: Positive = 4
    max_new_tokens: Positive = 6

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """`limit` and `size` count questions."""
        cells = ({"number": n // self.per_document, "question": n % self.per_document} for n in range(self.size))
        for row in islice(cells, self.limit):
            yield f"document {row['number']}, question {row['question']}", row

    def example(self, row: dict[str, Any], where: str) -> Example:
        doc, rng = self.document(row["number"])
        fact = rng.sample(doc.current(), self.per_document)[row["question"]]
        name = f"{self.split}-{row['number']}.{row['question']}"
        return self.ask(name, ("", opening(doc.text), ""), ask(fact), fact.value)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"f1": 100 * qa_f1(output, reference), "exact": 100 * exact_match(output, reference)}


@dataclass(frozen=True, kw_only=True)
class TestbedSummary(Generated, QuestionTask):
    """Summarize: state every fact that a number marks ("first city alice north ford !"), in order.

    ROUGE F1 in percent, of the facts without their numbers. Plays CNN/DailyMail and, with task.tokens=512 or more,
    GovReport: what must be said is strewn over the whole text. The instruction is the last word: " summary :".
    """

    __test__ = False  # no test of pytest's
    name: ClassVar[str] = "testbed_summary"
    later_options: ClassVar[tuple[str, ...]] = ("question",)

    marked: Annotated[int, Range(1, MOST_MARKED)] = 6
    max_new_tokens: Positive = 48

    def example(self, row: dict[str, Any], where: str) -> Example:
        doc, _ = self.document(row["number"])
        name = f"{self.split}-{row['number']}"
        context, question = opening(doc.text), SUMMARY
        if self.question == IN_PROMPT:  # all of it is body: what truncate=middle shortens
            context, question = context + question, ""
        return self.ask(name, ("", context, ""), question, summary(doc.marked))

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """ROUGE F1 with stemmer in percent, one fact per line for rougeLsum."""
        return rouge(_facts(output), _facts(reference))


def _facts(summary: str) -> str:
    """One fact per line, without its number: counting is no merit."""
    words = [word for word in summary.split() if word not in ORDINALS]
    return " ".join(words).replace(" ! ", "\n")


def needle_document(rng: Random, split: str, tokens: int, depth: float, others: int = 5) -> tuple[Document, Fact]:
    """(document of about `tokens` tokens, the fact to find); depth 0 puts it first, 1 last among all sentences."""
    taken: set[tuple[str, str]] = set()
    needle = draw_fact(rng, split, taken, NAMES, "code")
    facts = [draw_fact(rng, split, taken, NAMES, None) for _ in range(others)]
    sentences = [fact.sentence() for fact in facts]
    sentences += filler_for(rng, tokens - sum(len(s.split()) for s in [*sentences, needle.sentence()]))
    rng.shuffle(sentences)
    place = round(depth * len(sentences))
    sentences.insert(place, needle.sentence())
    return Document(tuple(sentences), (needle, *facts)), needle


@dataclass(frozen=True, kw_only=True)
class TestbedNeedle(Generated, QuestionTask):
    """Say the three digits of somebody's code: a grid of `lengths` (tokens) and `depths` (percent), round and round.

    `facts` others are strewn about as distractors. Exact match and word recall, in percent; rows carry length and
    depth, and the depth in characters (`depth_measured`). Plays needle in a haystack.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_needle"
    metrics: ClassVar[tuple[str, ...]] = ("exact", "word_recall")
    rules: ClassVar[Rules] = (
        (
            lambda c: any(getattr(c, name) != getattr(type(c), name) for name in ("tokens", "marked", "updated")),
            "task.tokens, task.marked and task.updated have no meaning for {c.name}: set task.lengths instead",
        ),
        filled("depths"),
        (
            lambda c: min(c.lengths, default=0) < c.least_tokens + LONGEST,
            "task.lengths must be numbers of tokens that hold the needle and task.facts={c.facts} others of up to "
            f"{LONGEST} each, got {{c.lengths}}",
        ),
    )

    lengths: tuple[Tokens, ...] = (128, 256, 384)
    depths: tuple[Annotated[float, Range(0, 100)], ...] = (0, 25, 50, 75, 100)
    facts: Annotated[int, Range(0, MOST_FACTS)] = 5
    marked: Annotated[int, Range(0, MOST_MARKED)] = 0
    updated: Count = 0
    max_new_tokens: Positive = 6

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """`size` and `limit` count examples: cell after cell of the grid, then the grid again with other texts."""
        cells = ((again, cell) for again in count() for cell in product(self.lengths, self.depths))
        for again, (length, depth) in islice(cells, self.size if self.limit is None else min(self.size, self.limit)):
            row = {"length": length, "depth": depth, "repeat": again}
            yield f"cell {row}", row

    def example(self, row: dict[str, Any], where: str) -> Example:
        name = f"{self.split}-{row['length']}-{row['depth']}-{row['repeat']}"
        rng = self.random(name)
        doc, fact = needle_document(rng, self.split, row["length"], row["depth"] / 100, self.facts)
        before, _, behind = doc.text.partition(fact.sentence())
        measured = round(100 * len(before) / len(before + behind), 2)
        example = self.ask(name, ("", opening(doc.text), ""), ask(fact), fact.value)
        return replace(example, info={**row, "depth_measured": measured})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"exact": 100 * exact_match(output, reference), "word_recall": 100 * word_recall(output, reference)}
