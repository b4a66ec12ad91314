"""Dialogues: several turns in one cache, in which the model's own answers stay and age."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.articles import Article, articles, articles_digest, needles, needles_digest
from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, RougeTask, Task, Turn, row_id
from kvexp.tasks.data import text
from kvexp.tasks.metrics import contains, qa_f1
from kvexp.tasks.news_needle import related
from kvexp.tasks.soda import list_of

HISTORIES = ("own", "full", "reference")


@dataclass(frozen=True, kw_only=True)
class DialogueTask(Task):
    """A task whose examples are the turns of conversations: the first message is prefilled and evicted, each further
    one is fed token by token behind the answer before it, with eviction going on. An example per turn.

    `history` says whose answers stay in the conversation: `own`, those of the run; `full`, the full cache's of the same
    conversation; `reference`, the true ones, whatever was answered (with `cache.evict_every=null` the protocol of
    SCBench's multi-turn mode, arXiv:2412.10319: true answers over a cache that was compressed at its first turn, and so
    no measure of a conversation). What a turn is scored by is always the run's own answer.
    """

    has_turns: ClassVar[bool] = True

    history: str = "own"
    truncate: str = "skip"

    def fit(self, example: Example, count: Callable[[str], int], room: int) -> Example:
        """Skipped where its turns up to this one, with answers as long as they may be, do not fit the model."""
        turns = example.turns[: example.number + 1]
        tokens = count(example.prompt) + sum(count(turn.message) for turn in turns[1:])
        tokens += sum(max(self.max_new_tokens, count(turn.reference)) + 1 for turn in turns)
        return replace(example, skipped="too long with its turns") if tokens > room else example

    def check_options(self) -> None:
        super().check_options()
        self.choice("history", HISTORIES)
        if self.truncate != "skip":
            raise ConfigError(
                f"task.truncate must be skip for {self.name}, got {self.truncate!r}: a shortened first message may "
                "have lost what is asked for later"
            )


@dataclass(frozen=True, kw_only=True)
class Dialogue(DialogueTask):
    """Seven turns about each of 36 fictional articles of kvexp.articles: four questions about the article, and two odd
    remarks of the user, of which each is asked for later.

    `info.distance` of a row is how many turns before the fact asked for was told: 0 for the question that comes with
    the article, 6 for one at the end about it; 1 and 4 for the remarks. Scores in percent: `exact`, whether the
    reference stands in the answer word for word, and `f1`. An example counts where the full cache answers it in its own
    conversation. `limit` counts turns.
    """

    name: ClassVar[str] = "dialogue"
    generated: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("exact", "f1")
    only_answered: ClassVar[bool] = True

    max_new_tokens: int = 32

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        each = (
            (article, place, number)
            for place, article in enumerate(articles())
            for number in range(len(_turns_about(article, place)))
        )
        for article, place, number in islice(each, self.limit):
            yield f"article {article.id}, turn {number}", {"article": article, "place": place, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        article, number = row["article"], row["number"]
        turns = _turns_about(article, row["place"])
        first = f"Read the following news article and answer questions about it.\n\n{article.text}\n\n"
        made = _turn(f"{article.id} turn {number}", first + turns[0].message, turns, number)
        return replace(made, info={**made.info, "article": article.id})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"exact": 100 * contains(output, reference), "f1": 100 * qa_f1(output, reference)}

    def answered(self, output: str, example: Example) -> bool:
        return bool(contains(output, example.reference))

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()} needles:{needles_digest()}"

    def check_options(self) -> None:
        super().check_options()
        if self.sample != "first":
            raise ConfigError(f"task.sample must be first for dialogue, got {self.sample!r}: its turns have an order")


@dataclass(frozen=True, kw_only=True)
class SodaTurns(DialogueTask, RougeTask):
    """Conversations of SODA (Kim et al., arXiv:2212.10465), turn by turn: the user says what the first speaker says,
    after the narrative, and the model answers for the second.

    ROUGE F1 of each answer to the true one. `limit` counts turns; `info.distance` is the number of turns since the
    narrative. A last turn that nobody answers is left out.
    """

    name: ClassVar[str] = "soda_turns"

    hub_id: str = "allenai/soda"
    revision: str | None = "d80f16879432016b62fa3d32d0fc4eeea4af78aa"
    max_new_tokens: int = 48

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        whole = self.source.choose(None if self.sample == "first" else self.limit, self.sample, self.seed)
        each = ((where, {**row, "turn": turn}) for where, row in whole for turn in range(len(_answered(row, where))))
        yield from islice(each, self.limit)

    def example(self, row: dict[str, Any], where: str) -> Example:
        narrative, turns = text(row, "narrative", where, "data_files"), _answered(row, where)
        speakers = list_of(row, "speakers", where)
        name = row_id(row, "original_index", narrative, *(turn.message for turn in turns))
        first = f"{narrative}\n\nYou are {speakers[1]}. Answer {speakers[0]} in one or two sentences.\n\n"
        return _turn(f"{name} turn {row['turn']}", first + turns[0].message, turns, row["turn"])

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return self.rouge(output, reference)


def _turn(name: str, first: str, turns: tuple[Turn, ...], number: int) -> Example:
    """The example of turn `number`; first: the message of the first turn, with what stands before it."""
    turns = (replace(turns[0], message=first), *turns[1:])
    info = {"turn": number, "distance": turns[number].distance}
    return Example(name, first, turns[number].reference, number=number, turns=turns, info=info)


def _turns_about(article: Article, place: int) -> tuple[Turn, ...]:
    """The turns about an article: its questions, and two remarks that share no uncommon word with it.

    place: of the article, by which the remarks are chosen.
    """
    fitting = [one for one in needles() if article.id not in related(one)]
    early, late = fitting[2 * place % len(fitting)], fitting[(2 * place + 1) % len(fitting)]
    asked = [(one.question, one.answer) for one in article.questions]
    short = "Answer in a few words."
    return (
        Turn(f"{asked[0][0]} {short}", asked[0][1], 0),
        Turn(f"Remember this: {early.needle} And now: {asked[1][0]} {short}", asked[1][1], 1),
        Turn(f"Remember this, too: {late.needle} And now: {asked[2][0]} {short}", asked[2][1], 2),
        Turn(f"{late.question} {short}", late.answer, 1),
        Turn(f"Back to the article: {asked[3][0]} {short}", asked[3][1], 4),
        Turn(f"{early.question} {short}", early.answer, 4),
        Turn(f"Once more about the article: {asked[0][0]} {short}", asked[0][1], 6),
    )


def _answered(row: dict[str, Any], where: str) -> tuple[Turn, ...]:
    """The turns of a row of SODA: each second one answers the one before it."""
    said = [" ".join(each.split()) for each in list_of(row, "dialogue", where)]
    return tuple(Turn(said[i], said[i + 1], i // 2) for i in range(0, len(said) - 1, 2))
