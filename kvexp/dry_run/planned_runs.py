"""The runs of a plan: what each lacks, and the groups that share prefills with what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.config.settings import Settings
from kvexp.dry_run.peak_memory import PeakMemory
from kvexp.dry_run.workload import Workload
from kvexp.models.model_size import ModelSize


@dataclass(frozen=True)
class Planned:
    """One run. left: rows it lacks; forced: texts it has still to be forced for its divergence, by kind of text."""

    settings: Settings
    work: Workload
    left: int
    forced: dict[str, int]

    @property
    def total(self) -> int:
        return len(self.work.examples)

    @property
    def state(self) -> str:
        if not self.left and not self.texts:
            return "done"
        only = self.settings.divergence.only
        untouched = self.texts == len(self.forced) * self.total if only else self.left == self.total
        return "to do" if untouched else "partly"

    @property
    def texts(self) -> int:
        """Texts of all kinds that it lacks."""
        return sum(self.forced.values())

    def prefills(self, shared: bool) -> int:
        """Prompts that it reads; one that shares its prefill with no other run reads them once more for the texts."""
        again = max(self.forced.values(), default=0)
        examples = max(self.left, again) if shared else self.left + again
        return -(-examples * self.work.prefills // max(1, self.total))

    @property
    def decodes(self) -> int:
        """Answers and texts, each of which takes a step per token."""
        return self.left + self.texts


@dataclass(frozen=True)
class PlannedGroup:
    """Runs that share prefills, or one alone.

    seconds, peak: bytes at one time; None where the model's size is not known, peak also on a machine that is not this
    one. start_s: seconds of the command before any group, where they were measured.
    """

    runs: list[Planned]
    shape: ModelSize | None
    seconds: float | None
    basis: str
    start_s: float = 0.0
    peak: PeakMemory | None = None

    @property
    def prefills(self) -> int:
        """One per example for all runs of the group."""
        return max(run.prefills(shared=len(self.runs) > 1) for run in self.runs)

    @property
    def prompt_tokens(self) -> float:
        return self.prefills * self.runs[0].work.prompt_tokens

    @property
    def new_tokens(self) -> float:
        return sum(run.left * run.work.new_tokens for run in self.runs)

    @property
    def texts(self) -> int:
        return sum(run.texts for run in self.runs)


def total_seconds(groups: Sequence[PlannedGroup]) -> float:
    """Of the whole command, as far as known: with its start, where that was measured and anything is left to do."""
    start = max((group.start_s for group in groups if group.prefills), default=0.0)
    return start + sum(group.seconds for group in groups if group.seconds is not None)
