"""What the testbed's models are trained on: documents with many answers each, longer and fuller as recall grows."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kvexp.testbed.document import DocumentShape, document
from kvexp.testbed.forms import SUMMARY, answer, ask, dialogue, opening, summary
from kvexp.testbed.words import ATTRIBUTES, END, GRAMMAR, PAD, vocabulary
from kvexp.training.recipe import Recipe

KINDS = ("questions", "summary", "dialogue")
IDS = {word: number for number, word in enumerate(vocabulary())}


@dataclass(frozen=True)
class Lesson:
    """A batch of texts of one kind.

    ids [B, T] int64; weight [B, T] float32: each token's share in the loss; answered [B, T] bool: the words of answers,
    without what ends them.
    """

    ids: Tensor
    weight: Tensor
    answered: Tensor
    kind: str


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: documents of `low` to `high` tokens with `facts[0]` to `facts[1]` facts."""

    low: int
    high: int
    facts: tuple[int, int]

    def shape(self, rng: Random) -> DocumentShape:
        tokens = rng.randint(self.low, self.high)
        most = max(self.facts[0], min(self.facts[1], tokens // 10))
        facts = rng.randint(self.facts[0], most)
        marked = rng.randint(1, min(10, (facts + 1) // 2))
        return DocumentShape(tokens, facts, marked, rng.randint(0, min(2, (facts - marked) // 2)))


# Short and dense first: on documents of full length from the start, recall does not form.
CURRICULUM = (
    Stage(8, 24, (2, 3)),
    Stage(12, 40, (2, 5)),
    Stage(16, 64, (3, 7)),
    Stage(24, 96, (3, 9)),
    Stage(32, 160, (3, 12)),
    Stage(48, 256, (4, 16)),
    Stage(64, 400, (4, 18)),
    Stage(64, 560, (4, 20)),
)


_CLOSING = torch.tensor([IDS[END], *(IDS[word] for word in GRAMMAR if not word.isalpha())])


def lesson(rng: Random, split: str, stage: Stage, kind: str, recipe: Recipe) -> Lesson:
    """A batch of one kind of text and about `batch_tokens` tokens in all; the documents of a batch have one shape."""
    shape = stage.shape(rng)
    rows: list[tuple[list[str], list[bool]]] = []
    width = 0
    while not rows or (len(rows) + 1) * width <= recipe.batch_tokens:
        rows.append(_row(rng, split, shape, kind, recipe.one_attribute))
        width = max(width, len(rows[-1][0]))
    return _batch(rows, width, kind, recipe.context_weight)


def _row(
    rng: Random, split: str, shape: DocumentShape, kind: str, one_attribute: float
) -> tuple[list[str], list[bool]]:
    """(words, which of them are answers)."""
    words: list[str] = []
    answers: list[bool] = []

    def add(text: str, is_answer: bool = False) -> None:
        new = text.split()
        words.extend(new)
        answers.extend([is_answer] * len(new))

    if kind == "dialogue":
        # As many requests as a conversation of this length bears: the last one alone would teach little per token.
        pieces = dialogue(rng, split, shape, recalls=rng.randint(1, 4), per_recall=rng.randint(1, 4))
        for number, piece in enumerate(pieces):
            add(piece, number % 2 == 1)
        return words, answers
    # With one attribute for all facts nothing but the name tells them apart: else names are learnt late.
    doc = document(rng, split, shape, rng.choice(list(ATTRIBUTES)) if rng.random() < one_attribute else None)
    add(opening(doc.text))
    if kind == "summary":
        add(SUMMARY)
        add(f" {summary(doc.marked)} {END}", True)
    asked = doc.current()
    rng.shuffle(asked)
    for fact in asked[: 16 if kind == "questions" else 4]:
        add(ask(fact))
        add(answer(fact), True)
    return words, answers


def _batch(rows: list[tuple[list[str], list[bool]]], width: int, kind: str, context_weight: float) -> Lesson:
    ids = torch.full((len(rows), width), IDS[PAD], dtype=torch.int64)
    answered = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, (words, answers) in enumerate(rows):
        ids[place, : len(words)] = torch.tensor([IDS[word] for word in words])
        answered[place, : len(words)] = torch.tensor(answers)
    weight = torch.where(answered, 1.0, context_weight).masked_fill(ids == IDS[PAD], 0.0)
    return Lesson(ids, weight, answered & ~torch.isin(ids, _CLOSING), kind)
