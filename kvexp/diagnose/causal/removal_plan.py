"""Which removals are made of a prompt: samples whose inclusion probabilities are known, so that errors can be stated.

Four kinds of unit are removed from the full cache: a token (its slot in every layer and head), a span of neighbouring
tokens, a token in one layer, and a token in one kv head. Spans cover the prompt. Tokens are drawn without replacement
within each token class, with first and last taken whole; a class of few is taken whole as well. Layers and heads are
drawn as pairs: a token of the prompt at random, the layers (heads) in equal shares.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.errors import ConfigError
from kvexp.models.removal import Removal

WHOLE = 6  # a class of at most so many tokens is taken whole, and no other class gets fewer
ALWAYS = ("first", "last")  # classes that are taken whole
TOKEN, SPAN, LAYER, HEAD = "token", "span", "layer", "head"


@dataclass(frozen=True)
class RemovalPlan:
    """How many removals of each kind are made of every prompt, 0: none; tokens None: every token.

    span: tokens of a span; spans: at most so many of them, drawn at random (None: all).
    """

    tokens: int | None = 300
    span: int = 8
    spans: int | None = None
    layers: int = 150
    heads: int = 180

    def __post_init__(self) -> None:
        for name in ("tokens", "spans", "layers", "heads"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"--{name} must be 0 or more, got {value}")
        if self.span < 1:
            raise ConfigError(f"--span must be at least 1 token, got {self.span}")


@dataclass(frozen=True)
class RemovalUnit:
    """One removal of a plan. layer, head: -1 where all are meant; weight: units of its kind that it stands for."""

    kind: str
    positions: tuple[int, ...]
    layer: int
    head: int
    weight: float

    def removal(self, heads: Sequence[int]) -> Removal:
        """heads: kv heads of each layer."""
        if self.layer < 0:
            return Removal(self.positions)
        mine = range(heads[self.layer]) if self.head < 0 else (self.head,)
        return Removal(self.positions, tuple((self.layer, head) for head in mine))


def removal_units(plan: RemovalPlan, classes: Sequence[str], heads: Sequence[int], seed: int) -> list[RemovalUnit]:
    """The removals of one prompt. classes: of its tokens; heads: kv heads of each layer; seed: of the draws."""
    draw = random.Random(seed)
    units = [RemovalUnit(TOKEN, (at,), -1, -1, weight) for at, weight in _tokens(plan, classes, draw)]
    spans = [tuple(range(at, min(at + plan.span, len(classes)))) for at in range(0, len(classes), plan.span)]
    chosen = spans if plan.spans is None else sorted(draw.sample(spans, min(plan.spans, len(spans))))
    units += [RemovalUnit(SPAN, span, -1, -1, len(spans) / len(chosen)) for span in chosen]
    everywhere = [(layer, head) for layer, count in enumerate(heads) for head in range(count)]
    units += _places(LAYER, plan.layers, len(classes), [(layer, -1) for layer in range(len(heads))], draw)
    return units + _places(HEAD, plan.heads, len(classes), everywhere, draw)


def _tokens(plan: RemovalPlan, classes: Sequence[str], draw: random.Random) -> list[tuple[int, float]]:
    """(position, tokens that it stands for) of the tokens to remove, ascending."""
    strata: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(classes):
        strata[name].append(at)
    if plan.tokens is None or plan.tokens >= len(classes):
        return [(at, 1.0) for at in range(len(classes))]
    if plan.tokens == 0:
        return []
    whole = [name for name, mine in strata.items() if name in ALWAYS or len(mine) <= WHOLE]
    left = max(plan.tokens - sum(len(strata[name]) for name in whole), 0)
    rest = sum(len(mine) for name, mine in strata.items() if name not in whole)
    chosen = []
    for name, mine in strata.items():
        count = len(mine) if name in whole else min(len(mine), max(WHOLE, round(left * len(mine) / rest)))
        chosen += [(at, len(mine) / count) for at in draw.sample(mine, count)]
    return sorted(chosen)


def _places(
    kind: str, count: int, tokens: int, places: Sequence[tuple[int, int]], draw: random.Random
) -> list[RemovalUnit]:
    """`count` pairs of a token and a place (layer, head or -1): every place in turn, from a random order of them."""
    order = list(places)
    draw.shuffle(order)
    weight = tokens * len(places) / count if count else 0.0
    chosen = [(draw.randrange(tokens), *order[number % len(order)]) for number in range(count)]
    return [RemovalUnit(kind, (at,), layer, head, weight) for at, layer, head in sorted(chosen)]
