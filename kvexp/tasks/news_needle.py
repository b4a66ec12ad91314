"""News needles: an odd sentence hidden among the articles that come with kvexp."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice, product
from typing import Any, ClassVar

import numpy as np

from kvexp.articles import NeedleSentence, articles, articles_digest, needles, needles_digest
from kvexp.errors import ConfigError
from kvexp.tasks import haystack
from kvexp.tasks.base import Example
from kvexp.tasks.lengths import longest_fit
from kvexp.tasks.metrics import contains, word_recall
from kvexp.tasks.news_questions import NewsQuestions

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

    Scores in percent: `word_recall` and `exact`, those of the task needle. `length` tokens are met, or undershot by
    less than one more word would add. A length beyond what the model holds is a skipped row.
    """

    name: ClassVar[str] = "news_needle"
    metrics: ClassVar[tuple[str, ...]] = ("word_recall", "exact")

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8000)
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    repeats: int = 4
    max_new_tokens: int = 32
    truncate: str = "skip"

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for repeat, length, depth in islice(product(range(self.repeats), self.lengths, self.depths), self.limit):
            row = {"length": length, "depth": depth, "repeat": repeat}
            yield f"cell {row}", row

    def articles_read(self) -> set[str]:
        return {one.id for one in articles()}  # the filler may be any of them

    def example(self, row: dict[str, Any], where: str) -> Example:
        return self._made(row, DRAFT)

    def fit(self, example: Example, count: Callable[[str], int], room: int) -> Example:
        row = example.info
        length, most = row["length"], len(self._filler(row))
        # One text for all of its questions: the longest is counted.
        widest = max(self._hidden(row), key=lambda cell: count(self._needle(cell).question))

        def tokens(words: int) -> int:
            made = self._made(widest, words)
            return count(made.prompt + made.question)

        words = longest_fit(tokens, length, most)
        if words < 0:
            raise ConfigError(
                f"a length of {length} tokens does not hold needle and question, which have {tokens(0)}: raise "
                "task.lengths"
            )
        if words == most and tokens(most) < length:
            raise ConfigError(
                f"the articles make a prompt of {tokens(most)} of this model's tokens, and {length} are asked for: "
                "lower task.lengths"
            )
        return replace(self._made(row, words), id=example.id)

    def _hidden(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The cells whose needles are in this cell's text: itself, or those of all depths."""
        return [{**row, "depth": depth} for depth in self.depths] if self.shared_context else [row]

    def _needle(self, row: Mapping[str, Any]) -> NeedleSentence:
        """The needle of a cell."""
        # One step per percent of depth and five per repeat: the cells of a length ask for as many needles as they can.
        first = np.random.RandomState([self.seed, row["length"]]).randint(len(needles()))
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
        text, measured = haystack.hide("".join(filler[len(filler) - words :]), hidden)
        name = f"length {row['length']} depth {row['depth']:g} repeat {row['repeat']}"
        made = self.about(name, text, needle.question, needle.answer)
        return replace(made, info={**row, "depth_measured": measured[cells.index(row)], "needle": needle.id})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"word_recall": 100 * word_recall(output, reference), "exact": 100 * contains(output, reference)}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()} needles:{needles_digest()}"

    def check_options(self) -> None:
        super().check_options()
        for option in ("lengths", "depths"):
            if not getattr(self, option):
                raise ConfigError(f"task.{option} is empty: give at least one")
        if min(self.lengths) < 1 or not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(
                f"task.lengths must be positive and task.depths 0 to 100, got {self.lengths} {self.depths}"
            )
        if self.repeats < 1:
            raise ConfigError(f"task.repeats must be at least 1, got {self.repeats}")
        if self.shared_context and len({round(depth) % len(needles()) for depth in self.depths}) < len(self.depths):
            raise ConfigError(
                f"task.depths={list(self.depths)} with questions=all would hide a needle twice in one text: the "
                f"{len(needles())} needles go by the depth in whole percent, so leave out depths that are "
                f"{len(needles())} percent apart, or equal"
            )
        if self.truncate != "skip":
            raise ConfigError(
                f"task.truncate must be skip for news_needle, got {self.truncate!r}: a shortened text may have lost "
                "its needle; lower task.lengths instead"
            )


@lru_cache(maxsize=4)  # the same cell is made at many lengths until it has its own
def _shuffled(hidden: tuple[NeedleSentence, ...], seeds: tuple[int, ...]) -> list[str]:
    """The words of all articles that may hide these needles, in an order drawn by the seeds."""
    unfit = frozenset().union(*map(related, hidden))
    fitting = [article for article in articles() if article.id not in unfit]
    order = np.random.RandomState(list(seeds)).permutation(len(fitting))
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
    words = re.findall(r"[^\W_]{4,}", text.lower())
    return frozenset(word.removesuffix("s") for word in words)
