"""Needles in a haystack: sentences hidden at some depth of a long text, and questions about them."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from kvexp.tasks.articles import NeedleSentence, articles, articles_digest, needles, own_digest
from kvexp.tasks.base import Example, FramedQuestions, Positive, Rules, Truncation, filled, longest_fit
from kvexp.tasks.data import random_state
from kvexp.tasks.metrics import OTHER_ENDS, beyond_ascii, contains, needs_marks, word_recall
from kvexp.tasks.qa import NewsQuestions
from kvexp.util.errors import ConfigError
from kvexp.util.fields import Range
from kvexp.util.files import Stamp, path_of, stamp

_ENDS = re.compile(rf"[.!?][\"')\]\u201d\u2019]*\s+|{OTHER_ENDS.pattern}")
LONGEST = 600  # characters of a sentence; what goes on for longer was written without their marks
LONGEST_LINE, LONGEST_WORD = 200, 60
# Line ends inside of a sentence, in code counted twice: with more it is code, verse, a list or a table.
LINES = 4
_CODE = re.compile(r"^[ \t]+\S|[{};(]\s*\n", re.MULTILINE)  # a line end next to an indented line, or behind such a mark
_FLAGS = "".join(map(chr, range(0x1F1E6, 0x1F200)))  # two of these letters are a flag
_CLOSERS = "\"')]\u201d\u2019 \n\t"
_WHITE = " \t\n\u3000\u200b"  # with the space of no width that Thai and Khmer may have


class Hidden(NamedTuple):
    """A text with needles: the whole, and for each needle the share of the text's characters in front, in percent."""

    text: str
    depths: list[float]


def read(haystack: str) -> str:
    """All .txt files of a folder (or one file) as one text."""
    path = path_of(haystack, "task.haystack")
    if not path.exists():
        raise ConfigError(f"task.haystack={haystack}: there is no such folder or file (seen from {Path.cwd()})")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    try:
        whole = _read(tuple((file, stamp(file)) for file in files))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.haystack={haystack}: cannot read it as text: {error}") from error
    if not whole:
        raise ConfigError(f"task.haystack={haystack}: found no text; give a folder of .txt files, or one text file")
    return whole


@functools.lru_cache(maxsize=4)  # the tasks of a sweep share one text
def _read(files: tuple[tuple[Path, Stamp], ...]) -> str:
    texts = (file.read_text(encoding="utf-8").strip() for file, _ in files)
    return "\n\n".join(text for text in texts if text)


def repeated(filler: str, characters: int) -> str:
    """The filler, a space between its repetitions, at least so many characters long."""
    return " ".join([filler.strip()] * (characters // (len(filler.strip()) + 1) + 1))


def from_sentence(text: str, share: float) -> str:
    """Turn a text so that it begins with the first sentence past `share` of it and ends with what was in front.

    Where the text has no sentences there: with the line, word or character at `share`.
    """
    if share <= 0:
        return text
    near = int(share * len(text))
    if _sentence(text, near) is None:
        at, _ = _boundary(text, near, len(text))
    else:
        match = _ENDS.search(text, near)
        at = match.end() if match else 0
    return f"{text[at:]}\n\n{text[:at].rstrip()}" if at else text


def hide(text: str, needles: Sequence[tuple[float, str]], characters: int | None = None) -> Hidden:
    """The first `characters` of a text (None: all) with each (depth in percent, needle) put where it would fall.

    A needle goes in front of the sentence at its depth; in code, verse, lists and tables in front of the line; where
    there is neither, between two words, and where nothing parts words, between two characters. Depth 0 is in front of
    all, 100 behind all.
    """
    length = len(text) if characters is None else min(characters, len(text))
    parts, end, depths = [], length, [0.0] * len(needles)
    for number in reversed(sorted(range(len(needles)), key=lambda number: needles[number][0])):
        depth, needle = needles[number]
        at, line = _boundary(text, int(length * depth / 100), length)
        at = min(at, end)
        before, after = "" if at == 0 or text[at - 1].isspace() else " ", " "
        if line:
            before, after = "" if at == 0 or text[at - 1] == "\n" else "\n", "\n"
        parts += [text[at:end], f"{before}{needle}{after}"]
        depths[number], end = round(100 * at / length, 2) if length else 0.0, at
    parts.append(text[:end])
    return Hidden("".join(reversed(parts)).rstrip(), depths)


def _boundary(text: str, near: int, length: int) -> tuple[int, bool]:
    """(Where the sentence, line, word or character that holds character `near` begins, whether it is a line.)

    0 and `length`, the place where the text is cut, stay what they are.
    """
    begin = _sentence(text, min(near, length))
    if begin is not None:
        return (length if near >= length else begin), False
    start, stop = text.rfind("\n", 0, near) + 1, text.find("\n", near)
    line = (start > 0 or stop >= 0) and (stop if stop >= 0 else len(text)) - start <= LONGEST_LINE
    if near <= 0 or near >= length:
        return min(near, length), line
    if line:
        return start, True
    words = [place for mark in _WHITE if (place := text.rfind(mark, max(0, near - LONGEST_WORD), near)) >= 0]
    return (max(words) + 1 if words else _character(text, near)), False


def _sentence(text: str, near: int) -> int | None:
    """Begin of the sentence that holds character `near`; None where the text has no sentences there."""
    window = max(0, near - 2000)
    ends = list(_ENDS.finditer(text[window:near]))
    if window and not ends:
        return None  # whatever began in front of the window is no sentence
    begin = window + ends[-1].end() if ends else 0
    return begin if _ends_as_sentence(text, begin) else None


def _ends_as_sentence(text: str, begin: int) -> bool:
    """Whether what begins here is a sentence: its end is not far, and few lines end inside that are not full."""
    reach = begin + 2 * LONGEST
    match = _ENDS.search(text, begin, reach)
    if match is None and (len(text) > reach or (begin == 0 and text.rstrip(_CLOSERS)[-1:] not in (*".!?",))):
        return False
    words = text[begin : match.end() if match else len(text)].strip()
    if len(words) > LONGEST:
        return False
    begin = text.find(words, begin)
    *full, last = re.split(r"\n\s*\n|\n", text[text.rfind("\n", 0, begin) + 1 : begin + len(words)])
    width = max(map(len, [*full, last]))
    follow = [*full[1:], last] if full else []
    ends = 0
    for line, after in zip(full, follow, strict=True):
        # Where lines are filled, the next one's first word would not have gone into the line.
        if len(line) + 1 + len(after.split(" ", 1)[0]) <= width:
            ends += 2 if _CODE.search(f"{line}\n{after}") else 1
    return ends < LINES


def _character(text: str, near: int) -> int:
    """The last place up to `near` where no letter is parted from its marks, and no emoji in two."""
    while 0 < near < len(text):
        before, after = text[near - 1], text[near]
        joined = unicodedata.category(after)[0] == "M" or "\U0001f3fb" <= after <= "\U0001f3ff"
        joined |= "\u200d" in (before, after) or unicodedata.combining(before) == 9 or "\u1160" <= after <= "\u11ff"
        flags = len(text[:near]) - len(text[:near].rstrip(_FLAGS)) if after in _FLAGS else 0
        if not joined and flags % 2 == 0:
            break
        near -= 1
    return near


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Percent = Annotated[float, Range(0, 100)]


def _filling(tokens: Callable[[int], int], length: int, size: int, source: str, way: str) -> int:
    """How much of a text of `size` words or characters makes a prompt of `length` tokens; tokens: counts such a prompt.

    ConfigError where even nothing of the text is too much, or all of it too little; source, way: words of that message.
    """
    fits = longest_fit(tokens, length, size)
    if fits < 0:
        raise ConfigError(
            f"a length of {length} tokens does not hold needle and question, which have {tokens(0)}: raise task.lengths"
        )
    if fits == size and (held := tokens(size)) < length:
        raise ConfigError(f"{source} a prompt of {held} of this model's tokens, and {length} are asked for: {way}")
    return fits


CHARACTERS_PER_TOKEN = 4  # of a first draft only: `fit` counts


@dataclass(frozen=True, kw_only=True)
class Needle(FramedQuestions):
    """Find needles in a text: a grid of `lengths` (tokens, all of prompt and question) and `depths` (percent), with
    `repeats` examples per cell and question. After Kamradt's test (github.com/gkamradt/LLMTest_NeedleInAHaystack).

    `haystack`: a folder of .txt files, or one; `filler`: a text said over and over instead. A needle goes in front of
    the sentence found at its depth, of the line in code or verse, of the word or character where the text has neither;
    of several the first is at that depth and the others spread evenly over what follows. A row's info has the depth
    that came of it, `depth_measured`: how many percent of the haystack's characters stand in front of the needle (of
    the first; `depths_measured`: of all).

    Repeat 0 begins at the start of the haystack, the others at the sentence that `seed` draws. {key} in a needle and
    its answer stands for five digits drawn per example (passkey retrieval, arXiv:2305.16300). One question for all
    needles is scored by all answers; several are asked one by one, of the same context. `answer_prefix` stands behind
    it all and begins the answer; a chat model, whose answer begins with its turn, does not get it.

    Scores: `word_recall`, the share of an answer's words that were given (without function words); `exact`, whether
    all of it stands in the answer word for word; both without case, punctuation and articles. Where a needle, question
    or answer has letters beyond ASCII, words of any script count (`kvexp.tasks.metrics.words_of`), and the row's
    info says so (`words`: unicode). `length` tokens are met or undershot by the little that one more character adds, in
    the tokenizer of the model; of several questions it is the longest that counts.
    """

    name: ClassVar[str] = "needle"
    metrics: ClassVar[tuple[str, ...]] = ("word_recall", "exact")
    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "examples"
    uncut: ClassVar[str] = "its examples are a grid of lengths"
    rules: ClassVar[Rules] = (
        *map(filled, ("lengths", "depths", "needles", "questions", "answers")),
        (
            lambda c: len(c.answers) != len(c.needles) or len(c.questions) not in (1, len(c.needles)),
            "every needle needs one of task.answers, and task.questions holds one for all needles or one each, got "
            "needles={c.needles}, answers={c.answers} and questions={c.questions}",
        ),
        (
            lambda c: c.filler is not None and not c.filler.strip(),
            "task.filler is empty: give the text to repeat",
        ),
    )

    haystack: str | None = None
    filler: str | None = None
    lengths: tuple[Positive, ...] = (1000, 2000, 4000)
    depths: tuple[Percent, ...] = (0, 25, 50, 75, 100)
    repeats: Positive = 1
    needles: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    truncate: Truncation = "skip"

    @cached_property
    def text(self) -> str:
        """The haystack; read once, as the fingerprint has it."""
        if (self.haystack is None) == (self.filler is None):
            raise ConfigError("set one of task.haystack=FOLDER (of .txt files) and task.filler=TEXT (to repeat)")
        if self.haystack is not None:
            return read(self.haystack)
        return repeated(str(self.filler), 20 * max(self.lengths))

    @property
    def beyond_ascii(self) -> bool:
        """Whether answers are compared by words of any script."""
        return beyond_ascii("".join((*self.needles, *self.questions, *self.answers)))

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        grid = product(self.lengths, self.depths, range(self.repeats), range(len(self.questions)))
        names = ("length", "depth", "repeat", "question")
        return islice(((f"cell {cell}", dict(zip(names, cell, strict=True))) for cell in grid), self.limit)

    def example(self, row: dict[str, Any], where: str) -> Example:
        return self._made(row, CHARACTERS_PER_TOKEN * row["length"])

    def fit(self, example: Example, count: Callable[[str], int], room: int) -> Example:
        row, size = example.info, len(self.text)
        widest = max(range(len(self.questions)), key=lambda k: count(self.questions[k]))  # one context for all

        def tokens(characters: int) -> int:
            trial = self._made({**row, "question": widest}, characters)
            return count(trial.prompt + trial.question)

        source, way = f"task.haystack={self.haystack} makes", "add text to it, or lower task.lengths"
        return replace(self._made(row, _filling(tokens, row["length"], size, source, way)), id=example.id)

    def _made(self, row: Any, characters: int) -> Example:
        """The example of a cell with so many characters of the haystack."""
        length, depth, repeat, number = (row[name] for name in ("length", "depth", "repeat", "question"))
        draws = random_state([self.seed, length, round(1000 * depth), repeat])
        keys = [str(draws.randint(10000, 100000)) for _ in self.needles]
        start = draws.random_sample() if repeat else 0.0
        hidden = [needle.replace("{key}", key) for needle, key in zip(self.needles, keys, strict=True)]
        answers = [answer.replace("{key}", key) for answer, key in zip(self.answers, keys, strict=True)]
        step = (100 - depth) / len(hidden)
        places = [(depth + k * step, needle) for k, needle in enumerate(hidden)]
        document, measured = hide(from_sentence(self.text, start), places, characters)
        wanted = answers if len(self.questions) == 1 else [answers[number]]
        name = f"length {length} depth {depth:g}" + f" repeat {repeat}" * (self.repeats > 1)
        name += f" question {number}" * (len(self.questions) > 1)
        example = self.about(name, document, self.questions[number], "\n".join(wanted))
        others: dict[str, Any] = {"depths_measured": measured} if len(hidden) > 1 else {}
        others |= {"words": "unicode"} if self.beyond_ascii else {}
        return replace(example, info={**row, "depth_measured": measured[0], **others, "answers": wanted})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """Scores in percent, the mean over the answers that were asked for."""
        wanted, how = example.info["answers"], (self.beyond_ascii, bool(self.corrected()))
        recall = sum(word_recall(output, answer, *how) for answer in wanted) / len(wanted)
        exact = sum(contains(output, answer, *how) for answer in wanted) / len(wanted)
        return {"word_recall": 100 * recall, "exact": 100 * exact}

    def corrected(self) -> tuple[str, ...]:
        """The marks of answers that need them (`needs_marks`), without which they were compared."""
        return ("marks",) if any(needs_marks(answer, self.beyond_ascii) for answer in self.answers) else ()

    def fingerprint(self) -> str:
        return f"needle:{digest(self.filler or self.text)}"

    def check(self) -> None:
        self.check_options()
        if len(self.text.encode()) < max(self.lengths):  # a token has a byte at least; a letter may have several tokens
            raise ConfigError(
                f"task.haystack={self.haystack} has {len(self.text)} characters, which cannot be {max(self.lengths)} "
                "tokens: add text to it, or lower task.lengths"
            )
        super().check()


COMMON = 4  # a word that more articles than this hold is nobody's topic
DRAFT = 400  # words of filler before `fit` has counted tokens


@dataclass(frozen=True, kw_only=True)
class NewsNeedle(NewsQuestions):
    """Find a sentence in a text of articles: a grid of `lengths` (tokens of the whole prompt, with question and chat
    template) and `depths` (percent), gone through `repeats` times, each time with other needles and articles.

    The filler is whole articles in an order that `seed` draws per cell, cut at its front so that the prompt has its
    length; the last article ends whole. An article that shares a word with the needle is left out, unless more than 4
    articles hold that word. The needle goes in front of the sentence found at its depth.

    With questions=all a text holds the needles of all depths of its length and repeat, and each is asked for; the
    filler shares no word with any of them.

    Scores in percent: `word_recall` and `exact`, as of the task needle. `length` tokens are met, or undershot by
    less than one more word would add. A length beyond what the model holds is a skipped row.
    """

    name: ClassVar[str] = "news_needle"
    metrics: ClassVar[tuple[str, ...]] = ("word_recall", "exact")
    uncut: ClassVar[str] = "a shortened text may have lost its needle; lower task.lengths instead"
    rules: ClassVar[Rules] = (
        filled("lengths"),
        filled("depths"),
        (
            lambda c: c.shared_context and len({round(d) % len(needles()) for d in c.depths}) < len(c.depths),
            "task.depths={c.depths} with questions=all would hide a needle twice in one text: the needle depends on "
            "the depth in whole percent, so leave out depths that are equal, or as many percent apart as there are "
            "needles",
        ),
    )

    lengths: tuple[Positive, ...] = (512, 1024, 2048, 4096, 8000)
    depths: tuple[Percent, ...] = (0, 25, 50, 75, 100)
    repeats: Positive = 4
    max_new_tokens: Positive = 32
    truncate: Truncation = "skip"

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for repeat, length, depth in islice(product(range(self.repeats), self.lengths, self.depths), self.limit):
            row = {"length": length, "depth": depth, "repeat": repeat}
            yield f"cell {row}", row

    def articles_read(self) -> set[str]:
        return {article.id for article in articles()}  # the filler may be any of them

    def example(self, row: dict[str, Any], where: str) -> Example:
        return self._made(row, DRAFT)

    def fit(self, example: Example, count: Callable[[str], int], room: int) -> Example:
        row = example.info
        # One text for all of its questions: the longest is counted.
        widest = max(self._hidden(row), key=lambda cell: count(self._needle(cell).question))

        def tokens(words: int) -> int:
            trial = self._made(widest, words)
            return count(trial.prompt + trial.question)

        words = _filling(tokens, row["length"], len(self._filler(row)), "the articles make", "lower task.lengths")
        return replace(self._made(row, words), id=example.id)

    def _hidden(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The cells whose needles are in this cell's text: itself, or one for each depth."""
        return [{**row, "depth": depth} for depth in self.depths] if self.shared_context else [row]

    def _needle(self, row: Mapping[str, Any]) -> NeedleSentence:
        """The needle of a cell."""
        # One step per percent of depth and five per repeat: the cells of a length ask for as many needles as they can.
        first = random_state([self.seed, row["length"]]).randint(len(needles()))
        needle: NeedleSentence = needles()[(first + round(row["depth"]) + 5 * row["repeat"]) % len(needles())]
        return needle

    def _filler(self, row: Mapping[str, Any]) -> list[str]:
        """The words of the articles to hide a cell's needles in, each with the white space behind it."""
        hidden = tuple(map(self._needle, self._hidden(row)))
        place = () if self.shared_context else (round(1000 * row["depth"]),)
        return _shuffled(hidden, (self.seed, row["length"], *place, row["repeat"]))

    def _made(self, row: Mapping[str, Any], words: int) -> Example:
        """The example of a cell with the last so many words of its filler."""
        needle, filler = self._needle(row), self._filler(row)
        cells = self._hidden(row)
        hidden = [(cell["depth"], self._needle(cell).needle) for cell in cells]
        text, measured = hide("".join(filler[len(filler) - words :]), hidden)
        name = f"length {row['length']} depth {row['depth']:g} repeat {row['repeat']}"
        example = self.about(name, text, needle.question, needle.answer)
        return replace(example, info={**row, "depth_measured": measured[cells.index(row)], "needle": needle.id})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"word_recall": 100 * word_recall(output, reference), "exact": 100 * contains(output, reference)}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()} needles:{own_digest('needles')}"


@lru_cache(maxsize=4)  # the same cell is made at many lengths until it has its own
def _shuffled(hidden: tuple[NeedleSentence, ...], seeds: tuple[int, ...]) -> list[str]:
    """The words of all articles that may hide these needles, in an order drawn by the seeds."""
    unfit = frozenset().union(*map(related, hidden))
    fitting = [article for article in articles() if article.id not in unfit]
    order = random_state(list(seeds)).permutation(len(fitting))
    return re.findall(r"\S+\s*", "\n\n".join(fitting[place].text for place in order))


@cache
def related(needle: NeedleSentence) -> frozenset[str]:
    """Ids of the articles that share a word with the needle, its question or its answer, other than a common one."""
    mine = topic_words(f"{needle.needle} {needle.question} {needle.answer}") - _common()
    return frozenset(article.id for article in articles() if mine & topic_words(f"{article.title} {article.text}"))


@cache
def _common() -> frozenset[str]:
    """Words that more than COMMON articles hold."""
    counts = Counter(word for article in articles() for word in topic_words(f"{article.title} {article.text}"))
    return frozenset(word for word, number in counts.items() if number > COMMON)


@cache
def topic_words(text: str) -> frozenset[str]:
    """The words of four letters or digits and more, in lower case, a plural as its singular."""
    return frozenset(word.removesuffix("s") for word in re.findall(r"[^\W_]{4,}", text.lower()))
