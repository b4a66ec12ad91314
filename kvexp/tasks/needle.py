"""Needle in a haystack: sentences hidden at some depth of a long text, and questions about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Any, ClassVar

import numpy as np

from kvexp.errors import ConfigError
from kvexp.tasks import haystack
from kvexp.tasks.base import Example
from kvexp.tasks.lengths import longest_fit
from kvexp.tasks.metrics import beyond_ascii, contains, word_recall
from kvexp.tasks.questions import SharedContextTask

CHARACTERS_PER_TOKEN = 4  # of a first draft only: `fit` counts


@dataclass(frozen=True, kw_only=True)
class Needle(SharedContextTask):
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
    or answer has letters beyond ASCII, words are those of any script (`kvexp.tasks.metrics.words_of`), and the row's
    info says so (`words`: unicode). `length` tokens are met or undershot by the little that one more character adds, in
    the tokenizer of the model; of several questions it is the longest that counts.
    """

    name: ClassVar[str] = "needle"
    metrics: ClassVar[tuple[str, ...]] = ("word_recall", "exact")
    generated: ClassVar[bool] = True

    haystack: str | None = None
    filler: str | None = None
    lengths: tuple[int, ...] = (1000, 2000, 4000)
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    repeats: int = 1
    needles: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    before: str = ""
    after: str = "\n\n{question}"
    answer_prefix: str = ""
    truncate: str = "skip"

    @cached_property
    def text(self) -> str:
        """What needles are hidden in; read once, so that it is that of the fingerprint."""
        if (self.haystack is None) == (self.filler is None):
            raise ConfigError("set one of task.haystack=FOLDER (of .txt files) and task.filler=TEXT (to repeat)")
        if self.haystack is not None:
            return haystack.read(self.haystack)
        return haystack.repeated(str(self.filler), 20 * max(self.lengths))

    @property
    def beyond_ascii(self) -> bool:
        """Whether answers are compared in words of any script."""
        return beyond_ascii("".join((*self.needles, *self.questions, *self.answers)))

    def for_model(self, *, chat: bool) -> Needle:
        return replace(self, answer_prefix="") if chat else self

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
            made = self._made({**row, "question": widest}, characters)
            return count(made.prompt + made.question)

        characters = longest_fit(tokens, row["length"], size)
        if characters < 0:
            raise ConfigError(
                f"a length of {row['length']} tokens does not hold needle and question, which have {tokens(0)}: raise "
                "task.lengths"
            )
        if characters == size and tokens(size) < row["length"]:
            raise ConfigError(
                f"task.haystack={self.haystack} makes a prompt of {tokens(size)} of this model's tokens, and "
                f"{row['length']} are asked for: add text to it, or lower task.lengths"
            )
        return replace(self._made(row, characters), id=example.id)

    def _made(self, row: Any, characters: int) -> Example:
        """The example of a cell with so many characters of the haystack."""
        length, depth, repeat, asked = (row[name] for name in ("length", "depth", "repeat", "question"))
        draws = np.random.RandomState([self.seed, length, round(1000 * depth), repeat])
        keys = [str(draws.randint(10000, 100000)) for _ in self.needles]
        start = draws.random_sample() if repeat else 0.0
        hidden = [needle.replace("{key}", key) for needle, key in zip(self.needles, keys, strict=True)]
        answers = [answer.replace("{key}", key) for answer, key in zip(self.answers, keys, strict=True)]
        step = (100 - depth) / len(hidden)
        places = [(depth + k * step, needle) for k, needle in enumerate(hidden)]
        document, measured = haystack.hide(haystack.from_sentence(self.text, start), places, characters)
        wanted = answers if len(self.questions) == 1 else [answers[asked]]
        name = f"length {length} depth {depth:g}" + f" repeat {repeat}" * (self.repeats > 1)
        name += f" question {asked}" * (len(self.questions) > 1)
        after = self.after.replace("{question}", self.questions[asked]) + self.answer_prefix
        made = self.ask(name, (self.before, document, ""), after, "\n".join(wanted))
        others: dict[str, Any] = {"depths_measured": measured} if len(hidden) > 1 else {}
        others |= {"words": "unicode"} if self.beyond_ascii else {}
        return replace(made, info={**row, "depth_measured": measured[0], **others, "answers": wanted})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """Percent, the mean over the answers that were asked for."""
        wanted = example.info["answers"]
        recall = sum(word_recall(output, answer, self.beyond_ascii) for answer in wanted) / len(wanted)
        exact = sum(contains(output, answer, self.beyond_ascii) for answer in wanted) / len(wanted)
        return {"word_recall": 100 * recall, "exact": 100 * exact}

    def fingerprint(self) -> str:
        return f"needle:{haystack.digest(self.filler or self.text)}"

    def check(self) -> None:
        self.check_options()
        if len(self.text.encode()) < max(self.lengths):  # a token has a byte at least; a letter may have several tokens
            raise ConfigError(
                f"task.haystack={self.haystack} has {len(self.text)} characters, which cannot be {max(self.lengths)} "
                "tokens: add text to it, or lower task.lengths"
            )
        super().check()

    def check_options(self) -> None:
        super().check_options()
        for option in ("lengths", "depths", "needles", "questions", "answers"):
            if not getattr(self, option):
                raise ConfigError(f"task.{option} is empty: give at least one")
        if min(self.lengths) < 1 or not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(
                f"task.lengths must be positive and task.depths 0 to 100, got {self.lengths} {self.depths}"
            )
        if len(self.answers) != len(self.needles) or len(self.questions) not in (1, len(self.needles)):
            raise ConfigError(
                f"{len(self.needles)} needles need as many task.answers, and one of task.questions or as many, got "
                f"{len(self.answers)} and {len(self.questions)}"
            )
        if self.after.count("{question}") != 1:
            raise ConfigError(f"task.after must hold {{question}} once, got {self.after!r}")
        if self.repeats < 1:
            raise ConfigError(f"task.repeats must be at least 1, got {self.repeats}")
        if self.sample != "first" or self.truncate != "skip":
            raise ConfigError("task.sample must be first and task.truncate skip for needle: its examples are a grid")
        if self.filler is not None and not self.filler.strip():
            raise ConfigError("task.filler is empty: give the text to repeat")
