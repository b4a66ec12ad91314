"""What a person reads at the end: the table of what this command ran, and the list of what failed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.build import typed
from kvexp.config.objective import check_objective_of
from kvexp.errors import ConfigError
from kvexp.record import check_writable
from kvexp.sweep.sweep_progress import SWEEP
from kvexp.terminal import say


@dataclass(frozen=True)
class Failure:
    """A job (its overrides) that failed; told: whether the reader of this command has been told why."""

    job: str
    why: str
    told: bool


@dataclass
class _Command:
    """The runs of this process, in the order they were asked for."""

    hashes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


COMMAND = _Command()


def note(*hashes: str | None) -> None:
    """These runs belong to what the command shows."""
    COMMAND.hashes += [h for h in hashes if h is not None and h not in COMMAND.hashes]


def note_failure(job: str, why: str, *, told: bool) -> None:
    """The command fails; a sweep lists its failed jobs at the end, with the reason where it was not told before."""
    COMMAND.failures.append(Failure(job, why, told))


def taken() -> _Command:
    """What was noted so far, which is forgotten here: another process will note it."""
    found = _Command(list(COMMAND.hashes), list(COMMAND.failures))
    COMMAND.hashes.clear()
    COMMAND.failures.clear()
    return found


def exit_code() -> int:
    """Non-zero if any job of this process failed."""
    return 1 if COMMAND.failures else 0


def show(outputs_dir: str | Path, *, jobs: bool = False) -> None:
    """Print the table of this command's runs and their baselines; jobs: it had several, so also which failed."""
    from kvexp.console import Console

    console = Console(markup=False)
    if COMMAND.hashes:
        from kvexp.results import print_table, table  # late: a command that made nothing does not wait for pandas

        frame = table(outputs_dir, {"hash": COMMAND.hashes})
        print_table(frame, console)
        console.print(f"rows, configurations and environments: {outputs_dir}/<hash>/", highlight=False)
    if COMMAND.failures and jobs:
        console.print(f"\n{len(COMMAND.failures)} run(s) failed:", highlight=False)
        for failure in COMMAND.failures:
            why = "" if failure.told else f"\n    {failure.why}"
            console.print(f"  {failure.job}{why}", highlight=False, soft_wrap=True)


SEVERAL = re.compile(r"[,(]")  # in a value that may be a sweep of several
GRIDS = ("BasicSweeper", "OnceComposedSweeper")  # sweepers whose jobs are known from the command line


class SweepTable(Callback):
    """Hydra callback: looks at what all runs need before the first one, prints the table after the last one."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        _stop_if_wrong(_check_log, config)

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        _stop_if_wrong(_check_log, config)
        _stop_if_wrong(_check_sweep_folder, config)
        _stop_if_wrong(_check_metric, config)
        if config.hydra.sweeper.get("_target_", "").rpartition(".")[2] in GRIDS:
            params = OmegaConf.to_container(config.hydra.sweeper.params or OmegaConf.create({}), resolve=True)
            SWEEP.plan(list(config.hydra.overrides.task), params)  # type: ignore[arg-type]
            SWEEP.deferring = True  # this sweeper asks for nothing back, so a job may come later

    def on_run_end(self, config: Any, **_: Any) -> None:
        self._end(config, jobs=False)

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        from kvexp.sweep.hydra_job import finish_left

        finish_left()
        self._end(config, jobs=True)

    def _end(self, config: Any, *, jobs: bool) -> None:
        try:
            show(config.outputs_dir, jobs=jobs)
            self._publish(config)
        except Exception as error:  # Hydra would turn it into a warning and exit code 0
            say(f"error after the runs: {type(error).__name__}: {error}", file=sys.stderr)
            note_failure("table and publishing", f"{type(error).__name__}: {error}", told=True)

    def _publish(self, config: Any) -> None:
        if config.log.wandb and COMMAND.hashes:
            from kvexp.log import publish

            # All at once: the verdicts are corrected for the number of runs compared.
            folders = [Path(config.outputs_dir) / name for name in COMMAND.hashes]
            mode = None if config.log.mode == "auto" else config.log.mode
            written = publish(
                folders, config.log.project, mode, experiment=config.hydra.runtime.choices.get("experiment")
            )
            say(f"wandb: {len(written)} runs, beside the rows; python -m kvexp.log replays them at any time")


def _stop_if_wrong(check: Callable[[Any], None], config: Any) -> None:
    """Hydra makes a warning of any other exception in a callback."""
    try:
        check(config)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _check_log(config: Any) -> None:
    """The runs may take days: what cannot be published is to be said first."""
    if typed(config.log.wandb, bool, "log.wandb"):
        from kvexp.log import check

        check(config.log.project, None if config.log.mode == "auto" else config.log.mode)


def _check_metric(config: Any) -> None:
    """Once for all jobs, where none of them chooses another task: each of a search's trials would say the same."""
    words = [*(f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items())]
    words += list(config.hydra.overrides.task)
    swept = [word.partition("=")[0].partition(".")[0] for word in words if SEVERAL.search(word.partition("=")[2])]
    if config.get("objective") is None or {"task", "experiment", "protocol"} & set(swept):
        return
    try:
        node: Any = OmegaConf.to_container(config.task, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:  # a job's turn says what is missing
        return
    check_objective_of(node, config.objective)


def _check_sweep_folder(config: Any) -> None:
    """Hydra writes there before any run begins, and explains nothing."""
    typed(config.outputs_dir, str, "outputs_dir")
    check_writable(Path(config.hydra.sweep.dir).expanduser())
