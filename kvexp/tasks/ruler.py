"""RULER (Hsieh et al., arXiv:2404.06654): thirteen tasks, each row made to a length in the model's own tokens.

Row makers follow the official generator (github.com/NVIDIA/RULER, commit c3f5e3b, Apache-2.0): they take their draws
in its order, so that the same draws and words give the same bytes. How many units of filler fill a length is another
matter: there the generator draws from one stream for all rows, and here every row has a seed of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice, pairwise, product
from typing import Annotated, Any, ClassVar, Literal

from kvexp.tasks.articles import articles, articles_digest, own_digest, own_words
from kvexp.tasks.base import (
    IN_PROMPT,
    CountedTask,
    Example,
    Positive,
    QuestionTask,
    Rules,
    Subset,
    SubsetTask,
    Truncation,
    depths_of,
    filled,
    longest_fit,
    most_units,
    quarter,
    seed_of,
)
from kvexp.tasks.data import misshapen, random_state, text
from kvexp.util.errors import ConfigError
from kvexp.util.fields import Range

Seed = Annotated[int, Range(0, 2**32 - 1)]


class Draws:
    """Two streams that a row is drawn from: Python's generator, and numpy's legacy one for the values of vt."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = random_state(seed % 2**32)

    def letters(self, alphabet: str, size: int) -> str:
        return "".join(self.python.choices(alphabet, k=size))


def pairs_of(adjectives: Iterable[str], nouns: Iterable[str]) -> list[str]:
    """Each "adjective-noun" once, in alphabetical order."""
    return sorted({f"{adjective}-{noun}" for adjective, noun in product(adjectives, nouns)})


@dataclass(frozen=True)
class Asked:
    """A question of the QA tasks: its answers, and places among the documents: its own, and the nearest others."""

    question: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Material:
    """What rows are made of. pairs: keys; words, then more_words where those are too few: lists to count; essay: words
    of running text; seed: of the orders that are the same in every row; length: tokens of prompt and answer.
    """

    pairs: Sequence[str] = ()
    words: Sequence[str] = ()
    more_words: Sequence[str] = ()
    essay: Sequence[str] = ()
    documents: Sequence[str] = ()
    questions: Sequence[Asked] = ()
    seed: int = 42
    length: int = 4096


@dataclass(frozen=True)
class Row:
    """A prompt in parts, which joined are the prompt: `before` the context, `after` it the question, then the
    `opening` of the answer. sources: texts of the context that answers come from, if they stand at one place.
    """

    before: str
    context: str
    after: str
    opening: str
    answers: Sequence[str]
    sources: Sequence[str] = ()
    mark: str = ""  # the instruction within `before`


def _row(template: str, opening: str, context: str, answers: Sequence[str], lesson: str = "", **parts: Any) -> Row:
    """The row of a template with {context}, behind `lesson`, a worked example; parts: sources, and what to fill in."""
    sources = parts.pop("sources", ())
    before, after = (piece.format(**parts) for piece in template.split("{context}"))
    return Row(lesson + before, context, after, opening.format(**parts), answers, sources, before.strip())


def _shuffled(texts: Sequence[str], seed: int) -> list[str]:
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    return shuffled


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * step / 39) for step in range(40)]  # percent
_SENTENCES = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]\u201d\u2019])\s+")


def sentences(words: str) -> list[str]:
    """The sentences of a text; each ends with its mark."""
    return _SENTENCES.split(words)


class Maker:
    """Maker of one task's rows. A unit is what the length is filled with, and `least` the fewest a row can have."""

    new_tokens: ClassVar[int]
    least: int

    def make(self, draws: Draws, units: int, of: Material, number: int) -> Row:
        """The row `number` with so many units of filler."""
        raise NotImplementedError

    def fewest(self, of: Material, number: int) -> int:
        """The fewest units of the row `number`; ConfigError where the length is too small for any row."""
        return self.least


@dataclass(frozen=True)
class Niah(Maker):
    """Needles that give a key a value, in lines of noise, in running text, or among needles of other keys."""

    new_tokens: ClassVar[int] = 128
    haystack: Literal["noise", "essay", "needle"] = "essay"
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def least(self) -> int:  # type: ignore[override]
        return self.keys * self.values

    def make(self, draws: Draws, units: int, of: Material, number: int) -> Row:
        keys, values, needles = [], [], []
        for _ in range(self.keys):
            key = self._drawn(self.key, draws, of)
            keys.append(key)
            values.append([self._drawn(self.value, draws, of) for _ in range(self.values)])
            needles.append([self._needle(key, value) for value in values[-1]])
        hidden = _shuffled([needle for of_key in needles for needle in of_key], of.seed)
        if self.haystack == "essay":
            context = self._in_essay(draws, units, of, hidden)
        else:
            context = self._in_lines(draws, units, of, hidden)
        queried = draws.python.sample(range(self.keys), self.queries)
        names = [keys[place] for place in queried]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        kinds, kind = self.value, self.value.removesuffix("s")
        template = (
            "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the {kind} afterwards.\n{context}\n"
            "What are all the special magic {kind} for {query} mentioned in the provided text?"
        )
        opening = " The special magic {kind} for {query} mentioned in the provided text are"
        single = self.queries * self.values == 1
        if single:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            opening = opening.replace("are", "is")
        answers = [value for place in queried for value in values[place]]
        sources = [needle for place in queried for needle in needles[place]]
        return _row(template, opening, context, answers, kind=kind if single else kinds, query=query, sources=sources)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _drawn(self, kind: str, draws: Draws, of: Material) -> str:
        if kind == "words":
            return draws.python.choice(of.pairs)
        if kind == "numbers":
            return str(draws.python.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=draws.python.getrandbits(128), version=4))

    def _in_lines(self, draws: Draws, units: int, of: Material, hidden: Sequence[str]) -> str:
        if self.haystack == "noise":
            lines = [NOISE] * units
        else:
            lines = [
                self._needle(self._drawn(self.key, draws, of), self._drawn(self.value, draws, of)) for _ in range(units)
            ]
        places = sorted(draws.python.sample(range(units), len(hidden)), reverse=True)
        for place, needle in zip(places, hidden, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _in_essay(self, draws: Draws, units: int, of: Material, hidden: Sequence[str]) -> str:
        times = -(-units // len(of.essay))
        pieces = sentences(" ".join((list(of.essay) * times)[:units]).strip())
        places = sorted(int(len(pieces) * (depth / 100)) for depth in draws.python.sample(DEPTHS, len(hidden)))
        parts, last = [], 0
        for place, needle in zip(places, hidden, strict=True):
            parts += [" ".join(pieces[last:place]), needle]
            last = place
        return " ".join([*parts, " ".join(pieces[last:])])


@dataclass(frozen=True)
class VariableTracking(Maker):
    """One chain of assignments in lines of noise, all names of which have the value asked for, behind a worked example
    of at most 500 tokens, whose names and value are drawn anew.
    """

    new_tokens: ClassVar[int] = 30
    least: int = 5
    hops: int = 4
    lesson_tokens: ClassVar[int] = 500
    lesson_units: int = 5  # lines of noise of the example: as many as its tokens hold

    def make(self, draws: Draws, units: int, of: Material, number: int) -> Row:
        row = self.alone(draws, units)
        lesson = self._redrawn(draws, self.lesson(Draws(of.seed), self.lesson_units))
        return replace(row, before=f"{lesson}\n{row.before}")

    def lesson(self, draws: Draws, units: int) -> str:
        """The worked example, with the names and the value that it was made with."""
        row = self.alone(draws, units, example=True)
        return f"{row.before}{row.context}{row.after}{row.opening} {' '.join(row.answers)}\n"

    def alone(self, draws: Draws, units: int, example: bool = False) -> Row:
        """A row without worked example; example: the names and value of one."""
        size = 3 if example else 5
        names: list[str] = []
        while len(set(names)) <= self.hops:
            names.append(draws.letters(string.ascii_uppercase, size))
        names = list(dict.fromkeys(names))
        value = "12345" if example else str(draws.numpy.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
        lines = [NOISE] * units
        for more, place in enumerate(sorted(draws.python.sample(range(units), len(chain)))):
            lines.insert(place + more, chain[more])
        template = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            "Question: Find all variables that are assigned the value {value} in the text above."
        )
        opening = (
            " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
            "assigned the value {value}, they are: "
        )
        context = "\n".join(lines).replace(". \n", ".\n")
        return _row(template, opening, context, names, value=value, count=len(names), sources=chain)

    def _redrawn(self, draws: Draws, lesson: str) -> str:
        for name in lesson.strip().split()[-self.hops - 1 :]:
            lesson = lesson.replace(name, draws.letters(string.ascii_uppercase, len(name)))
        return lesson.replace("12345", str(draws.numpy.randint(10000, 99999)))


@dataclass(frozen=True)
class CommonWords(Maker):
    """A numbered list in which ten words stand more often than the others, behind a worked example with another ten."""

    new_tokens: ClassVar[int] = 120
    common: ClassVar[int] = 10
    least: int = 11

    def make(self, draws: Draws, units: int, of: Material, number: int) -> Row:
        size, *times = (20, 3, 1, 6, 1) if of.length < 4096 else (40, 10, 3, 30, 3)
        example, answers = self._list(draws, size, times[0], times[1], of)
        template = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
        )
        opening = " Answer: The top 10 words that appear most often in the list are:"
        given = " ".join(f"{place}. {word}" for place, word in enumerate(answers, 1))
        lesson = f"{template.replace('{context}', example)}{opening} {given}\n"
        listed, words = self._list(draws, units, times[2], times[3], of)
        return _row(template, opening, listed, words, lesson)

    def _list(self, draws: Draws, size: int, often: int, seldom: int, of: Material) -> tuple[str, list[str]]:
        source = of.words if size <= len(of.words) else of.more_words
        if size > len(source):
            raise ConfigError(
                f"task.lengths: {of.length} tokens of cwe need {size} different words, and kvexp has {len(source)}: "
                "lower task.lengths, or set task.words=wonderwords"
            )
        drawn = draws.python.sample(source, size)
        common, others = drawn[: self.common], drawn[self.common :]
        words = _shuffled(common * often + others * seldom, of.seed)
        return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1)), common


ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class FrequentWords(Maker):
    """Coded words of six letters, as often as Zipf's law with exponent 2 says; the most frequent is written as dots."""

    new_tokens: ClassVar[int] = 50
    least: int = 74  # from here on the fourth stands there more often than the fifth

    def fewest(self, of: Material, number: int) -> int:
        if self._size(of) < 4:
            raise ConfigError(
                f"a length of {of.length} tokens leaves fwe {max(self._size(of), 0)} different words, a 50th of the "
                "length, and it asks for three of four: raise task.lengths"
            )
        return self.least

    def _size(self, of: Material) -> int:
        return (of.length - self.new_tokens) // 50

    def make(self, draws: Draws, units: int, of: Material, number: int) -> Row:
        drawn: list[str] = []
        while len(set(drawn)) < self._size(of):
            drawn.append(draws.letters(string.ascii_lowercase, 6))
        ranked = _shuffled(sorted(set(drawn)), of.seed)
        ranked[0] = "..."
        times = [int(units * float(rank) ** -2.0 / ZETA_2) for rank in range(1, len(ranked) + 1)]
        words = _shuffled([word for word, often in zip(ranked, times, strict=True) for _ in range(often)], of.seed)
        template = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?"
        )
        opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
        return _row(template, opening, " ".join(words), ranked[1:4])


@dataclass(frozen=True)
class Documents(Maker):
    """A question of a data set, whose documents stand among others; unit: a document. Any answer is right."""

    new_tokens: ClassVar[int] = 32

    def fewest(self, of: Material, number: int) -> int:
        return len(of.questions[number].own)

    def make(self, draws: Draws, units: int, of: Material, number: int) -> Row:
        entry, more = of.questions[number], units - len(of.questions[number].own)
        places = list(range(len(of.documents)))
        if units >= len(places):
            chosen = (places * -(-units // len(places)))[:units]
        elif more > len(entry.near):
            known = {*entry.own, *entry.near}
            others = [place for place in places if place not in known]
            chosen = [*entry.own, *entry.near, *draws.python.sample(others, more - len(entry.near))]
        else:
            chosen = [*entry.own, *draws.python.sample(entry.near, more)]
        documents = _shuffled([of.documents[place] for place in chosen], of.seed)
        context = "\n\n".join(f"Document {place}:\n{document}" for place, document in enumerate(documents, 1))
        only = "Only give me the answer and do not output any other words."
        template = (
            f"Answer the question based on the given documents. {only}\n\nThe following are given documents.\n\n"
            f"{{context}}\n\nAnswer the question based on the given documents. {only}\n\nQuestion: {{question}}"
        )
        sources = [of.documents[place] for place in entry.own] if len(entry.own) == 1 else []
        return _row(template, " Answer:", context, entry.answers, question=entry.question, sources=sources)


MAKERS: Mapping[str, Maker] = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah(),
    "niah_single_3": Niah(value="uuids"),
    "niah_multikey_1": Niah(keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah(values=4),
    "niah_multiquery": Niah(keys=4, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_own": Documents(),
    "qa_1": Documents(),
    "qa_2": Documents(),
}
FROM_FILES = ("qa_1", "qa_2")


@dataclass(frozen=True, kw_only=True)
class Ruler(SubsetTask, CountedTask, QuestionTask):
    """A task of RULER (arXiv:2404.06654): `size` rows of each of `lengths`, in tokens of prompt, chat template and
    answer together. A row has the most filler with which it is no longer than that.

    `subset`: one of the thirteen, or qa_own, the form of the QA tasks with kvexp's articles: a paragraph is a document.
    The running text of five tasks is kvexp's articles, where the official one is essays; `words`: own, or wonderwords,
    the official lists, by the package of that name. Each row has a seed of its own, made of `seed`, subset, length and
    number.

    `score`: the share of the right answers that stand in the model's, in percent, by letters in lower case; of
    the QA tasks 100 where any does. The mean over the rows is RULER's number of a task, and the plain mean over the
    thirteen its total (experiment=ruler). counted=answered counts rows that the full cache answers whole. The
    beginning of the answer, that repeats the question, stands behind the chat template. A row's info: `length` asked
    for, `length_measured`, `depths_measured` of what answers come from, in percent of the prompt's tokens, and where
    that is one place `depth`, the quarter that it stands in.

    Departures from the generator, besides seeds: sentences end at . ! ? (there nltk's); cwe's worked example is not a
    turn of its own in a chat template; names of vt that are drawn twice are drawn again.
    """

    name: ClassVar[str] = "ruler"
    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "rows"
    uncut: ClassVar[str] = "a shortened text may have lost what is asked for; lower task.lengths instead"
    metrics: ClassVar[tuple[str, ...]] = ("score",)
    rules: ClassVar[Rules] = (filled("lengths"),)
    subsets: ClassVar[Mapping[str, Subset]] = {name: kind for name, kind in MAKERS.items() if name not in FROM_FILES}

    subset: str = "niah_single_1"
    lengths: tuple[Positive, ...] = (4096,)
    size: Positive = 20
    words: Literal["own", "wonderwords"] = "own"
    seed: Seed = 42
    truncate: Truncation = "skip"

    def _other_subset(self) -> str:
        return f"{super()._other_subset()}; qa_1 and qa_2 are of task=ruler_qa, from files of SQuAD and HotpotQA"

    def label(self, choice: str) -> str:
        return f"{choice.removesuffix('_qa')}/{self.subset}"

    @cached_property
    def material(self) -> Material:
        """What the rows are made of, at no length yet."""
        if self.subset == "qa_own":
            return replace(_own_questions(), seed=self.seed)
        material = _own() if self.words == "own" else _wonderwords()
        return replace(material, words=_shuffled(material.words, self.seed), seed=self.seed)

    def count(self) -> int:
        """How many rows a length has."""
        return min(self.size, len(self.material.questions)) if self.material.questions else self.size

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, length in islice(product(range(self.count()), self.lengths), self.limit):
            yield f"row {number} of length {length}", {"length": length, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        maker, of = MAKERS[self.subset], replace(self.material, length=row["length"])
        return self._asked(self._made(maker, maker.fewest(of, row["number"]), of, row["number"]), row)

    def fit(self, example: Example, count: Callable[..., int], room: int) -> Example:
        length, number = example.info["length"], example.info["number"]
        maker, of = MAKERS[self.subset], replace(self.material, length=length)
        new = self.max_new_tokens or 0
        least, most = maker.fewest(of, number), length - new
        if length > room:
            return replace(example, skipped="too long")
        if isinstance(maker, VariableTracking):
            lesson, of_seed = maker, Draws
            fits = longest_fit(lambda n: count(lesson.lesson(of_seed(self.seed), 5 + n)), maker.lesson_tokens, 100)
            maker = replace(maker, lesson_units=5 + max(fits, 0))

        def tokens(more: int) -> int:
            row = self._made(maker, least + more, of, number)
            return count(row.before + row.context + row.after, row.opening)

        more = most_units(tokens, most)
        if more < 0:
            holds = f"a length of {length} tokens does not hold {self.subset}"
            if isinstance(maker, Documents):
                few = tokens(0) + new
                return replace(example, skipped=f"{holds}: question, its documents and answer have {few}")
            raise ConfigError(
                f"{holds}, whose shortest row has {tokens(0)} tokens and an answer of {new}: raise "
                f"task.lengths to {tokens(0) + new} or more"
            )
        row = self._made(maker, least + more, of, number)
        whole = row.before + row.context + row.after
        size = count(whole, row.opening)
        depths = depths_of(whole, [len(row.before) + row.context.find(source) for source in row.sources], count)
        info: dict[str, Any] = {"length_measured": size + new, "units": least + more}
        info |= {"depths_measured": depths} if depths else {}
        if len(depths) == 1:
            info |= quarter(depths[0])
        return replace(self._asked(row, {"length": length, "number": number}, info), id=example.id)

    def _made(self, maker: Maker, units: int, of: Material, number: int) -> Row:
        name = f"{self.seed} {self.subset} {of.length} {number}"
        return maker.make(Draws(seed_of(name)), units, of, number)

    def _asked(self, row: Row, of: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Example:
        name = f"{self.subset} length {of['length']} row {of['number']}"
        example = self.ask(name, (row.before, row.context, ""), row.after, ", ".join(row.answers))
        marks = (_marked(row), *([row.after.strip()] if self.question == IN_PROMPT else []))
        info = {**of, **(more or {}), "answers": list(row.answers)}
        return replace(example, opening=row.opening, marks=marks, info=info)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """The official string match of one row; characters below the space are line ends there, too."""
        said = re.sub(r"[\x00-\x1f]", "\n", output).lower()
        hits = [answer.lower() in said for answer in example.info["answers"]]
        any_of = isinstance(MAKERS[self.subset], Documents)
        return {"score": 100.0 * (any(hits) if any_of else sum(hits) / len(hits))}

    def fingerprint(self) -> str:
        digest = f"ruler:{articles_digest()} words:{own_digest('words')}"
        if self.words == "own" or self.subset == "qa_own":
            return digest
        words = hashlib.sha256("\n".join(_wonderwords().words).encode()).hexdigest()[:16]
        return f"{digest} wonderwords:{words}"


@dataclass(frozen=True, kw_only=True)
class RulerQA(Ruler):
    """The QA tasks of RULER from `data_files`: qa_1 from SQuAD 2.0's dev set, of its questions that have an answer;
    qa_2 from HotpotQA's dev set with distractors. Either as published (JSON) or in the hub's columns
    (rajpurkar/squad_v2; hotpotqa/hotpot_qa, distractor). Questions come in the order of the file, as in RULER.
    """

    name: ClassVar[str] = "ruler"
    generated: ClassVar[bool] = False
    subsets: ClassVar[Mapping[str, Subset]] = {name: MAKERS[name] for name in FROM_FILES}

    subset: str = "qa_1"

    def _other_subset(self) -> str:
        return f"task.subset must be qa_1 or qa_2, got {self.subset!r}; the others are of task=ruler"

    @cached_property
    def material(self) -> Material:
        material = (_squad if self.subset == "qa_1" else _hotpot)(list(self.source.rows()))
        if not material.questions:
            raise ConfigError(f"{self.source}: found no question that has an answer; name another file")
        return replace(material, seed=self.seed)

    def fingerprint(self) -> str:
        return self.source.fingerprint()


def _marked(row: Row) -> str:
    """The instruction; behind a worked example, which holds it too, with the word in front of it."""
    at = row.before.rfind(row.mark)
    return row.before[row.before[:at].rstrip().rfind(" ") + 1 :].strip()


@lru_cache(maxsize=1)
def _own() -> Material:
    lists, text = own_words(), "\n".join(article.text for article in articles())
    pairs = pairs_of(lists["adjectives"], lists["nouns"])
    read = re.findall(r"(?<![\w-])[a-z]{4,}(?![\w-])", text)
    words = sorted({*lists["adjectives"], *lists["nouns"], *read})
    return Material(pairs, words, pairs, text.split())


@lru_cache(maxsize=1)
def _wonderwords() -> Material:
    """The official words, and the articles' text."""
    if importlib.util.find_spec("wonderwords") is None:
        raise ConfigError(
            "task.words=wonderwords needs the package wonderwords, which is not installed: pip install wonderwords, or "
            "set task.words=own"
        )
    read = importlib.import_module("wonderwords.random_word")._get_words_from_text_file
    nouns, adjectives, verbs = (read(f"{kind}list.txt") for kind in ("noun", "adjective", "verb"))
    pairs = pairs_of(adjectives, nouns)
    return replace(_own(), pairs=pairs, words=sorted({*nouns, *adjectives, *verbs}), more_words=pairs)


@lru_cache(maxsize=1)
def _own_questions() -> Material:
    """Each paragraph of the articles is a document; the others of its article are the nearest."""
    documents: list[str] = []
    questions = []
    for article in articles():
        first = len(documents)
        documents += article.paragraphs
        places = range(first, len(documents))
        for question in article.questions:
            source = first + question.paragraph
            near = tuple(place for place in places if place != source)
            questions.append(Asked(question.question, (question.answer,), (source,), near))
    return Material(documents=documents, questions=questions)


def _squad(rows: Sequence[tuple[str, dict[str, Any]]]) -> Material:
    """Documents are the sorted paragraphs; the others of the same article are the nearest."""
    answered: list[tuple[str, str, str, list[str]]] = []  # article, paragraph, question, answers
    paragraphs: dict[str, list[str]] = {}
    for where, row in rows:
        for title, paragraph, question in _of_squad(row, where):
            known = paragraphs.setdefault(title, [])
            if paragraph not in known:
                known.append(paragraph)
            if question is None:
                continue
            answers = question["answers"]
            given = answers.get("text") if isinstance(answers, Mapping) else [answer["text"] for answer in answers]
            if given and not question.get("is_impossible"):
                answered.append((title, paragraph, question["question"], list(given)))
    documents = sorted({paragraph for group in paragraphs.values() for paragraph in group})
    place = {paragraph: number for number, paragraph in enumerate(documents)}
    questions = [
        Asked(question, tuple(answers), (place[source],), tuple(place[p] for p in paragraphs[title] if p != source))
        for title, source, question, answers in answered
    ]
    return Material(documents=documents, questions=questions)


def _of_squad(row: dict[str, Any], where: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """(article, paragraph, question) of a row: one of the hub's, or the whole of the published file."""
    try:
        if "data" not in row:
            yield text(row, "title", where, "data_files"), text(row, "context", where, "data_files"), row
            row["question"], row["answers"]
            return
        for article in row["data"]:
            for paragraph in article["paragraphs"]:
                yield article["title"], paragraph["context"], None  # also where nothing has an answer
                for question in paragraph["qas"]:
                    yield article["title"], paragraph["context"], question
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where} is not of SQuAD 2.0: {type(error).__name__} {error}") from error


def _hotpot(rows: Sequence[tuple[str, dict[str, Any]]]) -> Material:
    """Documents are the sorted titles with their sentences; a question owns those in its row."""
    answered = []
    for where, row in rows:
        question, answer = (text(row, name, where, "data_files") for name in ("question", "answer"))
        given = row.get("context")
        pairs = list(zip(given["title"], given["sentences"], strict=True)) if isinstance(given, Mapping) else given
        try:
            texts = [f"{title}\n{''.join(said)}" for title, said in pairs or ()]
        except (TypeError, ValueError) as error:
            raise misshapen(row, "context", where, "a list of [title, sentences]") from error
        answered.append((question, answer, texts))
    documents = sorted({document for _, _, texts in answered for document in texts})
    place = {document: number for number, document in enumerate(documents)}
    questions = [Asked(question, (answer,), tuple(place[p] for p in texts)) for question, answer, texts in answered]
    return Material(documents=documents, questions=questions)
