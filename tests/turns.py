"""Grids of which every run of the tests takes a part: every value of every axis, beside some of the others'."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(*axes: Iterable[Any], of: int) -> list[Any]:
    """The product of the axes as parameters: one in `of` is quick, the others are marked slow.

    Quick are those whose places along the axes sum up to a multiple of `of`. Where the last axis has `of` values, every
    combination of the others is so taken once, with the last one's values in turn.
    """
    made = []
    for case in product(*(list(enumerate(axis)) for axis in axes)):
        quick = sum(place for place, _ in case) % of == 0
        made.append(pytest.param(*(value for _, value in case), marks=[] if quick else pytest.mark.slow))
    return made
