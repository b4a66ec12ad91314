"""`python run.py --dry-run`: what a command would do, how much of it is done, what the rest takes. Loads no weights."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from kvexp.config.divergence_options import refusal
from kvexp.config.model_spec import ModelSpec, check_cache_fits_model
from kvexp.config.settings import Settings
from kvexp.dry_run import cost, speed_files
from kvexp.dry_run.group_cost import GroupPlan, RunWork
from kvexp.dry_run.plan_print import name_of, print_plan
from kvexp.dry_run.planned_runs import Planned, PlannedGroup
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
from kvexp.terminal import say

MEASURE = "measure"


def dry_run(main: Callable[[], None], option: str, session: Session) -> int:
    """The exit code of run.py: 1 where the option or a job is wrong, which is told."""
    try:
        plan(main, option, session)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return session.exit_code


def plan(main: Callable[[], None], option: str, session: Session) -> list[PlannedGroup]:
    """Let Hydra compose the jobs of sys.argv without running one, print their plan and return it.

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
    return show_plan(jobs, name, session, shares=swept and not basic)


def show_plan(jobs: Sequence[HydraJob], machine: str | None, session: Session, *, shares: bool) -> list[PlannedGroup]:
    """shares: the launcher lets runs share prefills. Jobs that cannot run are told as their turn would tell them."""
    wanted: dict[str, Settings] = {}
    workloads = Workloads()
    for job in jobs:
        try:
            for settings in runs_of(job, session):
                config, _ = model_config(settings.model)
                if config is not None and not settings.is_baseline:
                    check_cache_fits_model(settings.model, settings.cache, config)
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
            session.add_failure(name_of(group[0]), str(error), told=True)
    print_plan(planned, len(jobs))
    return planned


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
        free=max(0, _free_bytes(lead.model) - shape.weight_bytes(lead.model.dtype)),
        threads=torch.get_num_threads(),
    )
    peak = group.peak(known.base_bytes if known else None) if planned.prefills else None
    if known is None:
        return replace(planned, peak=peak)
    seconds, basis = group.seconds(known), f"measured here on {known.date}"
    return replace(planned, seconds=seconds, basis=basis, start_s=known.start_s, peak=peak)


def _free_bytes(spec: ModelSpec) -> int:
    """Of the device that the model will be on."""
    if spec.resolved_device().startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    return available()


def _measure(wanted: Iterable[Settings], session: Session) -> None:
    """Measure every model of these runs on this machine, and keep what was found."""
    from kvexp.dry_run.speed_measurement import measure, process_age  # late: it imports what a plan does without

    started = process_age()
    for spec in dict.fromkeys(settings.model for settings in wanted):
        try:
            speed_files.keep(speed_files.surroundings(spec, environment()["device"]), measure(spec, started))
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
