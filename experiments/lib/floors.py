"""What a task gives to an answer that read nothing: is the full cache above it, or can the task tell methods apart?

An answer of three random sentences of the text (one where references are short; mean of 20 draws) and the most
frequent reference of the other examples, scored as the run's own answers; of choices, a random one. Where all examples
have one and the same reference (a needle hidden at many places) that is the answer, which nobody knows unread: it is
left out. Lead-3, the first three sentences, is shown too: it reads, and is no floor. The rule, fixed before any
method was run: a task is void where the full cache's scores, less its best floor's, do not have a positive mean
(the 95 % interval of the mean difference, paired by example, has to lie above 0).
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.lib.tables import mean_interval
from kvexp.results import stats
from kvexp.results.read import Folder, Row
from kvexp.run.batches import examples_of, settings_at
from kvexp.tasks import Example
from kvexp.tasks.base import Task
from kvexp.tasks.metrics import sentences

DRAWS = 20
LEAD, RANDOM, FREQUENT, CHANCE = "Lead-3", "random sentences", "most frequent reference", "random choice"
FLOORS = (RANDOM, FREQUENT, CHANCE)
SHORT = 12  # words of a reference: an answer of one sentence is as long as they are

Scores = dict[str, float]  # by example, in percent


@dataclass(frozen=True)
class Floors:
    """The mean score of a full cache's run on one task and of each answer that read nothing, and the verdict.

    low, high: 95 % interval of the mean difference from the best floor; NaN for fewer than two examples.
    """

    metric: str
    n: int
    full: float
    means: dict[str, float]
    low: float
    high: float

    @property
    def void(self) -> bool:
        """Whether nothing shows that the full cache is above the floor."""
        return any(name in self.means for name in FLOORS) and not self.low > 0

    def __str__(self) -> str:
        floors = ", ".join(f"{name} {value:.1f}" for name, value in self.means.items()) or "no floor"
        words = f"full cache {self.full:.1f} {self.metric} on {self.n} examples; {floors}"
        if not any(name in self.means for name in FLOORS):
            return words
        verdict = "VOID, not above it" if self.void else "above it"
        return f"{words}; less the best floor {self.low:+.1f}..{self.high:+.1f}: {verdict}"


def floors_of(folder: Folder) -> dict[str, Floors]:
    """Floors of a full cache's run by lm-eval benchmark ("": another task); {} where nothing is scored in percent."""
    metric = next(iter(folder.metrics), "")
    if not folder.scored or stats.lower_is_better(metric):
        return {}
    rows = list(folder.scored.values())
    if not rows[0].get("choices"):
        settings = settings_at(folder.run)
        texts = of_examples(settings.task, examples_of(settings, rows), metric)
        return {"": judged(metric, _scores(rows, metric), texts)}
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row["example"].rpartition("/")[0]].append(row)
    return {name: judged(metric, _scores(group, metric), _chance(group)) for name, group in parts.items()}


def _scores(rows: Sequence[Row], metric: str) -> Scores:
    return {row["example"]: float(row["metrics"][metric]) for row in rows if metric in row["metrics"]}


def _chance(rows: Sequence[Row]) -> dict[str, Scores]:
    return {CHANCE: {row["example"]: 100 / len(row["choices"]["logprobs"]) for row in rows if row.get("choices")}}


def judged(metric: str, full: Scores, others: Mapping[str, Scores]) -> Floors:
    """Compare the full cache's scores with answers that read nothing, over the examples that all have."""
    names = sorted(set(full).intersection(*others.values())) if others else sorted(full)
    means = {answer: float(np.mean([scores[name] for name in names])) for answer, scores in others.items()}
    ends = math.nan, math.nan
    if floors := [answer for answer in FLOORS if answer in means]:
        best = max(floors, key=means.__getitem__)
        ends = mean_interval([full[name] - others[best][name] for name in names])
    mean = float(np.mean([full[name] for name in names])) if names else math.nan
    return Floors(metric, len(names), mean, means, *ends)


def of_examples(task: Task, examples: Sequence[Example], metric: str) -> dict[str, Scores]:
    """Answers that read nothing, and Lead-3 where references are long: their scores by example."""
    many = 3 if np.mean([len(example.reference.split()) for example in examples]) > SHORT else 1

    def scored(answer: Callable[[Example], str]) -> Scores:
        return {e.id: task.score(answer(e), e.reference, e)[metric] for e in examples}

    scores = {LEAD: scored(lambda e: " ".join(sentences(e.body)[:3]))} if many == 3 else {}
    draws = [scored(lambda e, draw=draw: _random_sentences(e, many, draw)) for draw in range(DRAWS)]  # type: ignore[misc]
    scores[RANDOM] = {e.id: float(np.mean([draw[e.id] for draw in draws])) for e in examples}
    counts = Counter(example.reference for example in examples)
    if len(counts) > 1 or len(examples) == 1:
        # Ties in alphabetical order; "" where there is no other example.
        def frequent(example: Example) -> str:
            left = counts - Counter({example.reference: 1})
            return min(left, key=lambda text: (-left[text], text), default="")

        scores[FREQUENT] = scored(frequent)
    return scores


def _random_sentences(example: Example, many: int, draw: int) -> str:
    known = sentences(example.body)
    rng = random.Random(zlib.crc32(f"{example.id} {draw}".encode()))
    return " ".join(known[place] for place in sorted(rng.sample(range(len(known)), min(many, len(known)))))
