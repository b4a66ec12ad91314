"""A full cache's mean score on a benchmark, and how far it is from the published one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvexp.errors import ConfigError
from kvexp.yardstick.published_numbers import PublishedNumber

ERRORS = 2  # standard errors within which a number counts as the published one


@dataclass(frozen=True)
class FullCacheScore:
    """score and published in percent, the mean over n of the task's `items`; stderr: of the mean over these n.

    The published number has an error of its own, over the same items: two models' scores on the same items differ by
    less than two independent samples would, so the interval is on the wide side where n is all.
    """

    task: str
    metric: str
    n: int
    items: int
    score: float
    stderr: float
    published: float

    @property
    def distance(self) -> float:
        """Points above (or below) the published number."""
        return self.score - self.published

    @property
    def inside(self) -> bool:
        return abs(self.distance) <= ERRORS * self.stderr

    def plain(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "distance": self.distance, "inside": self.inside}


def mean_score(rows: Sequence[Mapping[str, Any]], items: int, number: PublishedNumber) -> FullCacheScore:
    """Of rows of one benchmark, which has `items`; stderr is lm-eval's, of the sample, over n - 1.

    ConfigError where there are fewer than two rows, or one has no score.
    """
    scores = [row["metrics"].get(number.metric) for row in rows]
    if len(scores) < 2:
        raise ConfigError(f"{number.task}: {len(scores)} items are too few for a mean with an error; raise limit")
    if lost := [row for row, score in zip(rows, scores, strict=True) if score is None]:
        why = lost[0].get("skipped") or f"no metric {number.metric}"
        raise ConfigError(f"{number.task}: {len(lost)} of {len(rows)} items have no {number.metric} ({why})")
    n, mean = len(scores), math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (n - 1)
    return FullCacheScore(number.task, number.metric, n, items, mean, math.sqrt(variance / n), number.number)


def verdict(scores: Sequence[FullCacheScore]) -> str:
    """ "checked", or "off by -3.1 points in arc_easy (published 54.12)", the farthest first; and of how many items."""
    outside = sorted((score for score in scores if not score.inside), key=lambda score: -abs(score.distance))
    words = "checked"
    if outside:
        each = (f"{one.distance:+.1f} points in {one.task} (published {one.published:g})" for one in outside)
        words = f"off by {', '.join(each)}"
    n, items = sum(score.n for score in scores), sum(score.items for score in scores)
    return words if n == items else f"{words}, on {n} of {items} items"
