"""Rows are compared where they were sent the same tokens: their digests say so, whatever made prompts differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError

DIGESTS = ("prompt_digest", "continuation_digest")  # fields of a row; one that lacks either is taken as it is


def sent_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first digest in which two rows differ, of those that both have, with both values; None if they agree."""
    for name in DIGESTS:
        mine, theirs = one.get(name), other.get(name)
        if mine is not None and theirs is not None and mine != theirs:
            return f"{name} {mine} and {theirs}"
    return None


def check_same_prompts(
    one: Path | str, rows: Mapping[str, Mapping[str, Any]], other: Path | str, others: Mapping[str, Mapping[str, Any]]
) -> None:
    """ConfigError where an example of both runs, which are to be compared, was sent with different tokens.

    one, other: folders of the runs; rows, others: their rows by example.
    """
    for name, row in rows.items():
        if name in others and (why := sent_otherwise(row, others[name])):
            raise ConfigError(
                f"example {name} was asked with other tokens in {one} than in {other} ({why}): their answers cannot be "
                "compared. Chat template, tokenizer or a library changed between these runs: remove the folder that is "
                "out of date and run the same command again, or leave it out (--where)"
            )
