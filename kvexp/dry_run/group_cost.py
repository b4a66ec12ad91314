"""What a group of runs takes by measured speeds, and holds at most: as `kvexp.sweep` will arrange its prompts."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvexp.config.model_spec import rows_alone
from kvexp.config.settings import Settings
from kvexp.dry_run.cost import second_passes, slots_bytes, slots_of
from kvexp.dry_run.peak_memory import BASE_BYTES, HeldCaches, PeakMemory, width_of, working_bytes
from kvexp.dry_run.speed_files import KeptSpeed
from kvexp.dry_run.speed_model import GroupWork, observes_prompt, work_seconds
from kvexp.evaluate.limits import SHARE
from kvexp.models.cpu_linear import MAX_MEMORY_SHARE
from kvexp.models.load import parse_dtype
from kvexp.models.model_size import ModelSize
from kvexp.sweep.prefill_groups import MAX_DECODE_ROWS, MIN_UTILISATION


@dataclass(frozen=True)
class RunWork:
    """What one run lacks. answers: rows; texts: by kind, those it has still to be forced."""

    settings: Settings
    answers: int
    texts: dict[str, int]


@dataclass(frozen=True)
class GroupPlan:
    """Runs that share prefills (or one run) on prompts of so many tokens, with so many new ones each.

    prompts: that lack anything; shared: whether several runs share prefills; free: bytes of memory that are there
    beside the weights; threads: processes that a shared sweep may fork.
    """

    runs: Sequence[RunWork]
    shape: ModelSize
    prompts: int
    prompt: float
    new: float
    shared: bool
    free: int
    threads: int

    @property
    def lead(self) -> Settings:
        return self.runs[0].settings

    @property
    def device(self) -> str:
        return self.lead.model.resolved_device().partition(":")[0]

    @property
    def batches(self) -> int:
        return math.ceil(self.prompts / self.lead.batch_size)

    @property
    def active(self) -> list[RunWork]:
        """The runs that lack anything."""
        return [run for run in self.runs if run.answers or any(run.texts.values())]

    @property
    def kinds(self) -> list[str]:
        """Of texts that are forced."""
        return sorted({kind for run in self.runs for kind, count in run.texts.items() if count})

    @property
    def packed(self) -> int:
        """Bytes of the copies of linear layers' weights."""
        model = self.lead.model
        packs = model.pack_linear and (self.device, model.dtype) == ("cpu", "float32")
        return min(4 * self.shape.linear, int(MAX_MEMORY_SHARE * self.free)) if packs else 0

    def held(self) -> HeldCaches:
        """The caches of one batch; with a full cache's beside them where texts are forced."""
        runs = [run.settings for run in self.active]
        if self.kinds and not any(settings.is_baseline for settings in runs):
            runs.append(runs[0].baseline())
        rows = self.lead.batch_size * self.lead.decoding.num_beams
        stacks = [settings.cache.stacks for settings in runs]
        held = [slots_of(settings, self.prompt) for settings in runs]
        widths = [width_of(slots, self.device) if on else slots for slots, on in zip(held, stacks, strict=True)]
        return HeldCaches(
            [rows * width for width in widths],
            [rows * slots_bytes(self.shape, each, width) for each, width in zip(runs, widths, strict=True)],
            stacks,
            len(self.kinds),
            any(run.answers for run in self.runs),
            self.shape.token_bytes(self.lead.model.dtype),
            self.shape.layers,
        )

    def arrangement(self) -> Arrangement:
        """How `kvexp.sweep.prefill_groups` will take the batches, if memory is then as free as now."""
        if not (self.shared or self.kinds):
            return Arrangement(1, self.batches, 1)
        members, held = len(self.active), self.held()
        prompt_bytes = int(self.prompt) * self.lead.batch_size * held.token
        need, room = held.copies * held.bytes + prompt_bytes, (self.free - self.packed) * SHARE
        limited = self.lead.timeout_s is not None
        several = self.threads if self.device == "cpu" and sys.platform == "linux" and not limited else 1
        if math.ceil(self.batches / several) * several > MIN_UTILISATION * self.batches or need > room / several:
            several = 1
        most = (
            1 if limited or rows_alone(self.lead.model) else max(1, MAX_DECODE_ROWS // (members * self.lead.batch_size))
        )
        groups = min(self.batches, several * math.ceil(self.batches / (several * most)))
        if math.ceil(self.batches / groups) * need > room / several:
            groups = self.batches
        parts = 1 if need <= room / several else math.ceil((need - prompt_bytes) / max(1.0, room - prompt_bytes))
        return Arrangement(several, groups, min(parts, members))

    def parts(self) -> list[GroupPlan]:
        """What is done in turn: a run alone makes its answers, then reads its prompts anew for its texts."""
        if self.shared:
            return [self]
        (run,) = self.runs
        answers = replace(self, runs=[replace(run, texts={})], prompts=run.answers)
        texts = replace(self, runs=[replace(run, answers=0)], prompts=max(run.texts.values(), default=0))
        return [part for part in (answers, texts) if part.prompts]

    def peak(self, base: int | None = None) -> PeakMemory:
        """Bytes held at the peak by all processes; base: as measured, None: as it was elsewhere."""
        model = self.lead.model
        process = (BASE_BYTES if base is None else base) if self.device == "cpu" else 0
        held = [part._held_at_peak() for part in self.parts()]
        caches, working = max(held, key=sum, default=(0, 0))
        return PeakMemory(process, self.shape.weight_bytes(model.dtype), self.packed, caches, working)

    def _held_at_peak(self) -> tuple[int, int]:
        """Bytes of (caches, what prefill and decode steps hold beside), of all processes."""
        here, held, lead = self.arrangement(), self.held(), self.lead
        together = math.ceil(self.batches / here.groups)
        caches = math.ceil(held.peak(together) / here.parts)
        rows = together * len(held.slots) * lead.batch_size * lead.decoding.num_beams
        itemsize = parse_dtype(lead.model.dtype).itemsize
        working = working_bytes(self.shape, int(self.prompt) * lead.batch_size, rows, itemsize)
        return here.processes * caches, here.processes * working

    def seconds(self, known: KeptSpeed) -> float:
        """From the loaded model to the last row."""
        return sum(
            work_seconds(known.of(here.processes), part._work(here))
            for part, here in ((part, part.arrangement()) for part in self.parts())
        )

    def _work(self, here: Arrangement) -> GroupWork:
        runs = [run.settings for run in self.active]
        specs = [spec for settings in runs if (spec := settings.method.score_spec) is not None]
        scores = {spec.sums_key for spec in specs if observes_prompt(spec)}  # runs of equal sums share them
        beams = self.lead.decoding.num_beams
        answered = [(run.settings, run.answers * beams) for run in self.active]
        forced = [(run.settings, sum(run.texts.values())) for run in self.active]
        if self.kinds:  # the full cache's own rows beside them
            most = sum(max(run.texts.get(kind, 0) for run in self.runs) for kind in self.kinds)
            forced.append((self.lead.baseline(), most))
        return GroupWork(
            prompts=self.prompts * self._prefills(here),
            prompt=self.prompt,
            new=self.new,
            scores=len(scores),
            variants=math.ceil(sum(not settings.is_baseline for settings in runs) / here.parts),
            answers=sum(count for _, count in answered),
            texts=sum(count for _, count in forced),
            slots=self._mean_slots(answered),
            text_slots=self._mean_slots(forced),
            groups=here.groups * here.parts,
            second_passes=second_passes(runs),
        )

    def _prefills(self, here: Arrangement) -> int:
        """How often a prompt is read: once for all runs of a part, once more for each that evicts between chunks."""
        own = sum(run.settings.cache.bounded_chunk is not None for run in self.active)
        together = here.parts if own < len(self.active) or self.kinds else 0
        return together + own

    def _mean_slots(self, rows: Sequence[tuple[Settings, int]]) -> float:
        """Slots that a row holds, in the middle of its answer; rows: how many of each run."""
        total = sum(count for _, count in rows)
        return sum(count * self._slots(settings) for settings, count in rows) / total if total else 0.0

    def _slots(self, settings: Settings) -> float:
        """Of a run: all tokens but half the new ones where it evicts nothing."""
        held = slots_of(settings, self.prompt)
        return held - self.new / 2 if held >= int(self.prompt) + self.new else held


@dataclass(frozen=True)
class Arrangement:
    """processes: that share the batches; groups: of batches that decode in the same steps; parts: into which the runs
    of a batch are split where memory does not hold all of them, each with a prefill of its own."""

    processes: int
    groups: int
    parts: int
