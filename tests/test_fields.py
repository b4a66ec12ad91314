"""What a field may hold is said at the field and checked in one place; what excludes each other is a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from kvexp.util import AtLeast, ConfigError, Odd, Range, Rule, check_fields, reason_against, refuse, typed

SHARE, LEFT_OPEN = Annotated[float, Range(0, 1)], Annotated[float, Range(0, 1, above=True)]
COUNT = Annotated[int, AtLeast(0)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("hint", "fine", "wrong"),
    [
        (SHARE, (0, 1, 0.5), {-0.1: "in [0, 1]", 1.5: "in [0, 1]", NAN: "in [0, 1]", "x": "a number"}),
        (LEFT_OPEN, (0.1, 1), {0: "in (0, 1]", True: "a number"}),
        (COUNT, (0, 7), {-1: "at least 0", 0.5: "a whole number", None: "a whole number"}),
        (COUNT | None, (None, 0), {-1: "at least 0 or null", "x": "a whole number or null"}),
        (Annotated[float, Range(0, above=True)], (1e-9,), {0: "above 0", INF: "above 0", NAN: "above 0"}),
        (Annotated[int, Odd(1)], (1, 7), {4: "odd and at least 1", -1: "odd and at least 1"}),
        (COUNT | Literal["adaptive"], ("adaptive", 3), {-1: "at least 0 or adaptive"}),
        (Literal["max", "avg"], ("max",), {"mean": "one of max, avg"}),
    ],
)
def test_values_and_what_is_said_of_others(hint: Any, fine: tuple[Any, ...], wrong: dict[Any, str]) -> None:
    for value in fine:
        assert typed(value, hint, "method.x") == value
    for value, allowed in wrong.items():
        with pytest.raises(ConfigError) as caught:
            typed(value, hint, "method.x")
        assert str(caught.value) == f"method.x must be {allowed}, got {value!r}"


@dataclass(frozen=True)
class Chunks:
    size: Annotated[int, AtLeast(1)] = 4
    overlap: COUNT = 0
    extra: Unknown = None  # type: ignore[name-defined]  # noqa: F821


@dataclass(frozen=True)
class Checked:
    size: Annotated[int, AtLeast(1)] = 4
    overlap: COUNT = 0


RULES: tuple[Rule[Checked], ...] = (
    (lambda c: c.overlap >= c.size, "overlap={c.overlap} leaves nothing of size={c.size}"),
    (lambda c: c.size == 13, "not 13"),
)


def test_fields_of_an_object_are_checked_by_their_types_alone() -> None:
    check_fields(Checked())
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        check_fields(Checked(size=0))
    check_fields(Chunks(size=0))  # a name that the class's module does not have: nothing is known of its fields


def test_the_first_rule_that_applies_is_said_with_the_values_found() -> None:
    assert reason_against(Checked(), RULES) is None
    assert reason_against(Checked(13, 13), RULES) == "overlap=13 leaves nothing of size=13"
    with pytest.raises(ConfigError, match="not 13"):
        refuse(Checked(13), RULES)
