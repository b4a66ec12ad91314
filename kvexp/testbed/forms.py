"""The prompt forms of the testbed: how a document is asked about. The training data uses these very functions."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from kvexp.testbed.document import DocumentShape, Fact, document
from kvexp.testbed.words import END, START

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
    """What answers a recall: the facts asked for."""
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
