"""`python run.py --dry-run`: what a command would do, how much of it is done, what the rest takes. Loads no weights."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kvexp.config.divergence_options import refusal
from kvexp.config.model_spec import check_method_fits_model
from kvexp.config.settings import Settings
from kvexp.dry_run import cost, speed_files
from kvexp.dry_run.group_cost import GroupPlan, RunWork
from kvexp.dry_run.peak_memory import PeakMemory
from kvexp.dry_run.workload import Workload, Workloads, check_workload, model_config, model_shape
from kvexp.errors import ConfigError
from kvexp.evaluate.rows import environment
from kvexp.models.free_memory import available
from kvexp.models.model_size import ModelSize
from kvexp.record import identity
from kvexp.session import Session
from kvexp.sweep.hydra_job import report_failure
from kvexp.sweep.job_queue import HydraJob, runs_of
from kvexp.sweep.prefill_groups import prefill_groups
from kvexp.sweep.sweep_summary import duration
from kvexp.terminal import say

LISTED = 40  # runs shown one by one; more are told in groups
MEASURE = "measure"


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


def dry_run(main: Callable[[], None], option: str, session: Session) -> int:
    """The exit code of run.py: 1 where the option or a job is wrong, which is told."""
    try:
        plan(main, option, session)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return session.exit_code


def plan(main: Callable[[], None], option: str, session: Session) -> None:
    """Let Hydra compose the jobs of sys.argv without running one, and print their plan.

    option: --dry-run, --dry-run=NAME of another machine (`cost.MACHINES`), or --dry-run=measure, which first loads
    the models, measures them on this one (`speed_measurement`) and keeps that in the cache folder. Else nothing is
    written: Hydra's own notes on a sweep go to a folder that is removed. Whatever the launcher, jobs are composed here,
    one after the other.
    """
    name = option.partition("=")[2] or None
    if name not in (None, MEASURE, *cost.MACHINES):
        raise ConfigError(
            f"--dry-run may be {MEASURE} (this machine, from now on) or name a machine, "
            f"one of {', '.join(cost.MACHINES)}, got {name!r}"
        )
    words = [word for word in sys.argv[1:] if word.partition("=")[0] != "--dry-run"]
    if any(word.startswith("hydra/sweeper=") and not word.endswith(("=basic", "=once_composed")) for word in words):
        raise ConfigError(
            "--dry-run plans grids; a search chooses its runs one after the other: leave out hydra/sweeper"
        )
    basic = "hydra/launcher=basic" in words
    words = [word for word in words if not word.startswith(("hydra/launcher", "hydra.launcher."))]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*words, "hydra/launcher=basic", f"hydra.sweep.dir={folder}"]
        session.collect_jobs()
        try:
            main()
        finally:
            jobs = session.collected_jobs()
    swept = any(job.number is not None for job in jobs)
    show_plan(jobs, name, session, shares=swept and not basic)


def show_plan(jobs: Sequence[HydraJob], machine: str | None, session: Session, *, shares: bool) -> None:
    """shares: the launcher lets runs share prefills. Jobs that cannot run are told as their turn would tell them."""
    wanted: dict[str, Settings] = {}
    workloads = Workloads()
    for job in jobs:
        try:
            for settings in runs_of(job, session):
                config, _ = model_config(settings.model)
                if config is not None and not settings.is_baseline:
                    check_method_fits_model(settings.model, settings.method, config)
                check_workload(settings, workloads.of(settings))
                for one in (settings if settings.is_baseline else settings.baseline(), settings):
                    wanted.setdefault(identity(one.identity), one)
        except Exception as error:
            if len(jobs) > 1:
                say(" ".join(job.overrides), end=": ", file=sys.stderr)
            report_failure(job, error, session)
    together = prefill_groups(wanted.values()) if shares else []
    taken = {str(settings.identity) for group in together for settings in group}
    alone = [[settings] for settings in wanted.values() if str(settings.identity) not in taken]
    if machine == MEASURE:
        _measure(wanted.values(), session)
        machine = None
    planned = []
    for group in [*together, *alone]:
        try:
            planned.append(_group(group, machine, workloads))
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr, flush=True)
            session.add_failure(_name(group[0]), str(error), told=True)
    _show(planned, len(jobs))


def _group(members: list[Settings], machine: str | None, workloads: Workloads) -> PlannedGroup:
    runs = []
    for settings in members:
        work = workloads.of(settings)
        done = cost.folder_rows(settings.outputs_dir / identity(settings.identity))
        known = [example for example in work.examples if example is not None]
        left = sum(example not in done for example in known) if known else max(0, len(work.examples) - len(done))
        runs.append(Planned(settings, work, 0 if settings.divergence.only else left, _texts(settings, work)))
    lead, work = members[0], runs[0].work
    shape, device = model_shape(lead.model), environment()["device"]
    planned = PlannedGroup(runs, shape, None, "not known")
    todo = [(run.settings, run.decodes) for run in runs]
    if machine is None and shape is not None:
        planned = _on_this_machine(planned, shape, device)
        if planned.seconds is not None:
            return planned
    rates = cost.measured(lead, device) if machine is None else None
    if rates is not None:
        seconds = cost.measured_seconds(rates, todo, planned.prefills, work.prompt_tokens, work.new_tokens)
        return replace(planned, seconds=seconds, basis=f"measured on {rates.rows} rows")
    on = cost.machine_here(device) if machine is None else cost.MACHINES[machine]
    if shape is None:
        return planned
    seconds = cost.estimated_seconds(on, shape, todo, planned.prefills, work.prompt_tokens, work.new_tokens)
    return replace(planned, seconds=seconds, basis=f"estimated for {on.name}")


def _on_this_machine(planned: PlannedGroup, shape: ModelSize, device: str) -> PlannedGroup:
    """With the peak of memory here; with the time as well where the model was measured here."""
    lead, work = planned.runs[0].settings, planned.runs[0].work
    known = speed_files.kept(speed_files.surroundings(lead.model, device))
    group = GroupPlan(
        [RunWork(run.settings, run.left, run.forced) for run in planned.runs],
        shape,
        planned.prefills,
        work.prompt_tokens,
        work.new_tokens,
        shared=len(planned.runs) > 1,
        free=max(0, available() - shape.weight_bytes(lead.model.dtype)),
        threads=torch.get_num_threads(),
    )
    peak = group.peak(known.base_bytes if known else None) if planned.prefills else None
    if known is None:
        return replace(planned, peak=peak)
    seconds = group.seconds(known.of(group.arrangement().processes))
    return replace(planned, seconds=seconds, basis=f"measured here on {known.date}", start_s=known.start_s, peak=peak)


def _measure(wanted: Iterable[Settings], session: Session) -> None:
    """Measure every model of these runs on this machine, and keep what was found."""
    from kvexp.dry_run.speed_measurement import measure  # late: it imports what a plan does without

    for spec in dict.fromkeys(settings.model for settings in wanted):
        try:
            speed_files.keep(speed_files.surroundings(spec, environment()["device"]), measure(spec))
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr, flush=True)
            session.add_failure(MEASURE, str(error), told=True)


def _texts(settings: Settings, work: Workload) -> dict[str, int]:
    """Kind of text -> how many a run has still to be forced, as far as its folder tells."""
    if refusal(settings) is not None:
        return {}
    measured, skipped = cost.folder_texts(settings.outputs_dir / identity(settings.identity))
    left = len(work.examples) - len(skipped)
    return {kind: max(0, left - sum(text == kind for _, text in measured)) for kind in settings.divergence.texts}


def _show(planned: list[PlannedGroup], jobs: int) -> None:
    runs = [run for group in planned for run in group.runs]
    if not runs:
        return
    full = sum(run.settings.is_baseline for run in runs)
    say(f"plan: {jobs} job(s), {len(runs)} runs with {full} full-attention baseline(s) among them; nothing is run")
    if len(runs) <= LISTED:
        for run in runs:
            rows = f"{run.total - run.left:>6}/{run.total} rows" if not run.settings.divergence.only else ""
            texts = f", {run.texts} texts to force" if run.texts else ""
            say(f"  {run.state:6} {rows}  {_name(run.settings)}{texts}")
    by_part: dict[str, list[PlannedGroup]] = {}
    for group in planned:
        by_part.setdefault(_title(group.runs[0].settings), []).append(group)
    for part in by_part.values():
        _show_part(part)
    for spec in dict.fromkeys(group.runs[0].settings.model for group in planned):
        _show_model(next(group for group in planned if group.runs[0].settings.model == spec))
    for basis in dict.fromkeys(group.basis for group in planned):
        say(f"time: {basis}")
    states = [run.state for run in runs]
    prompt, new = sum(group.prompt_tokens for group in planned), sum(group.new_tokens for group in planned)
    say(
        f"total: {states.count('done')} done, {states.count('partly')} partly, {states.count('to do')} to do; "
        f"{cost.tokens(prompt)} prompt tokens, at most {cost.tokens(new)} new tokens, "
        f"about {_time(planned, start=True)}"
    )


def _show_part(groups: list[PlannedGroup]) -> None:
    """The groups of one model and task."""
    lead = groups[0].runs[0]
    runs = [run for group in groups for run in group.runs]
    sharing = f", prefills shared by {max(len(group.runs) for group in groups)}" if len(groups) < len(runs) else ""
    memory = "memory not known"
    if (shape := groups[0].shape) is not None:
        weights = shape.weight_bytes(lead.settings.model.dtype)
        each = ([run.settings for run in group.runs] for group in groups)
        kv = max(cost.kv_bytes(shape, settings, lead.work.prompt_tokens) for settings in each)
        memory = f"weights {cost.gigabytes(weights)} + KV {cost.gigabytes(kv)}"
        if peaks := [group.peak.total for group in groups if group.peak is not None]:
            memory += f", peak about {cost.gigabytes(max(peaks))}"
    prompts, new = sum(group.prefills for group in groups), sum(group.new_tokens for group in groups)
    texts = sum(group.texts for group in groups)
    say(
        f"{_title(lead.settings)}: {len(runs)} runs{sharing}; {prompts} prefills of {lead.work.prompt_tokens:.0f} "
        f"tokens ({lead.work.source}), {cost.tokens(new)} new tokens{f', {texts} texts forced' if texts else ''}; "
        f"{memory}; about {_time(groups)}"
    )


def _time(groups: list[PlannedGroup], *, start: bool = False) -> str:
    """Of these groups; start: with the command's own start, where that was measured and anything is left to do."""
    known = [group.seconds for group in groups if group.seconds is not None]
    before = max((group.start_s for group in groups if group.prefills), default=0.0) if start else 0.0
    return duration(sum(known) + before) + ("" if len(known) == len(groups) else " and what is not known")


def _title(settings: Settings) -> str:
    return f"{settings.labels['model']} {settings.labels['task']}"


def _show_model(group: PlannedGroup) -> None:
    settings = group.runs[0].settings
    shape, (_, source) = model_shape(settings.model), model_config(settings.model)
    size = f"{shape.parameters:,} parameters, " if shape else ""
    say(f"model {settings.labels['model']}: {size}{source}")


def _name(settings: Settings) -> str:
    labels = settings.labels
    ratio = f"kv_ratio={labels['kv_ratio']:g}" if labels.get("kv_ratio") is not None else ""
    words = (labels["model"], labels["task"], labels["method"], ratio, labels["setting"])
    return " ".join(str(word) for word in words if word)
