"""Seconds of a group of runs from a handful of speeds that were measured on this machine (`speed_measurement`).

A command is its start-up, the prefills, the decode steps of the answers and those of the forced texts. Runs that share
prefills decode several prompts in the same steps, on a CPU in several processes (`kvexp.sweep.prefill_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvexp.core import AttentionScoreSpec


def observes_prompt(spec: AttentionScoreSpec | None) -> bool:
    """Whether this score looks at the attention of all of a prompt's rows, which costs time; of few rows costs none."""
    return spec is not None and spec.last_rows is None and spec.decay == 1


@dataclass(frozen=True)
class Speed:
    """Seconds of the parts of a command, measured while so many processes did the same side by side.

    prefill_s: of a prefill of one row whatever its length, per prompt token, and per prompt token squared.
    score_s: per prompt token squared and score that observes the whole prompt (`observes_prompt`).
    variant_s: per prompt token and variant: storing, choosing and copying its slots.
    step_s: (rows, seconds) of a decode step whose rows hold no slots; rows ascending.
    slot_s: per slot that a row holds and decode step, all layers and kv heads together.
    forced_s: per row and step of a forced text, beyond the decode step: log-probabilities of the vocabulary.
    """

    processes: int
    threads: int
    prefill_s: tuple[float, float, float]
    score_s: float
    variant_s: float
    step_s: tuple[tuple[float, float], ...]
    slot_s: float
    forced_s: float

    def prefill(self, tokens: float, scores: int, variants: int) -> float:
        """Seconds of the prefill of one prompt of so many tokens, whose rows so many scores observe."""
        each, linear, square = self.prefill_s
        square += scores * self.score_s
        return each + (linear + variants * self.variant_s) * tokens + square * tokens**2

    def step(self, rows: float, slots: float) -> float:
        """Seconds of a decode step of so many rows that hold so many slots together.

        Between the measured numbers of rows by straight lines, beyond the largest along the last of them.
        """
        (low, at_low), (high, at_high) = self.step_s[0], self.step_s[-1]
        if rows > low and len(self.step_s) > 1:
            pairs = [*pairwise(self.step_s)]
            (low, at_low), (high, at_high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
            at_low += (rows - low) * (at_high - at_low) / (high - low)
        return at_low + slots * self.slot_s


def prefill_coefficients(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """`Speed.prefill_s` of three measured prefills (tokens, seconds), shortest first; none is below 0.

    The shortest is taken as what a forward costs whatever its length, so it should be of a few tokens.
    """
    (_, least), (short, at_short), (long, at_long) = points
    x, y = max(0.0, at_short - least), max(0.0, at_long - least)
    square = (y / long - x / short) / (long - short)
    linear = x / short - square * short
    if square < 0:
        linear, square = y / long, 0.0
    elif linear < 0:
        linear, square = 0.0, y / long**2
    return least, linear, square


def observation_coefficients(
    scores: int, observed: tuple[int, float], variants: int, stored: tuple[int, float]
) -> tuple[float, float]:
    """(`Speed.score_s`, `Speed.variant_s`) of two measured differences to a prefill without variants, none below 0.

    observed: (tokens, seconds more) with one variant for each of so many scores; stored: the same with so many variants
    that have the same scores.
    """
    (long, with_few), (short, with_many) = observed, stored
    share = (short / long) ** 2
    variant = max(0.0, with_many - share * with_few) / (variants * short - share * scores * long)
    return max(0.0, with_few - scores * variant * long) / (scores * long**2), variant


@dataclass(frozen=True)
class GroupWork:
    """What is left to do of runs that share prefills, or of one run.

    prompts: that are read; prompt, new: mean tokens of a prompt, and of those that are fed for an answer or a text.
    scores: that a prefill observes; variants: runs that evict. answers: rows that are generated; texts: rows that are
    fed a text, the full cache's beside them included. slots, text_slots: mean number of slots that such a row holds.
    groups: of prompts that are decoded in the same steps. second_passes: over each prompt, before it is evicted.
    """

    prompts: int
    prompt: float
    new: float
    scores: int
    variants: int
    answers: int
    texts: int
    slots: float
    text_slots: float
    groups: int
    second_passes: int = 0


def work_seconds(speed: Speed, work: GroupWork) -> float:
    """Seconds from the loaded model to the last row; processes share the groups of prompts as evenly as these go."""
    if not work.prompts or not work.groups:
        return 0.0
    total = work.prompts * speed.prefill(work.prompt, work.scores, work.variants)
    # The prompt behind itself: what twice the prompt takes beyond the prompt.
    again = speed.prefill(2 * work.prompt, 0, 0) - speed.prefill(work.prompt, 0, 0)
    total += work.prompts * work.second_passes * again
    for rows, slots, more in ((work.answers, work.slots, 0.0), (work.texts, work.text_slots, speed.forced_s)):
        each = rows / work.groups
        total += work.groups * work.new * (speed.step(each, each * slots) + each * more) if rows else 0.0
    return total * math.ceil(work.groups / speed.processes) / work.groups
