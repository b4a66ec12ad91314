"""Hydra's callback: looks at what all runs of a sweep need before it, shows table and failures after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from kvexp.run.session import Session, current
from kvexp.util.errors import ConfigError
from kvexp.util.fields import typed
from kvexp.util.files import check_writable
from kvexp.util.output import Console, duration, say


def print_summary(outputs_dir: str | Path, session: Session, *, jobs: bool = False, limit: int | None = None) -> None:
    """Print the table of this command's runs and their baselines; jobs: it had several, so also which failed.

    limit: of the task's examples only so many, as was asked of all runs; some may have more.
    """
    console = Console(markup=False)
    if session.hashes:
        from kvexp.results import views  # late: a command that made nothing does not wait for pandas
        from kvexp.results.read import read_runs
        from kvexp.results.screen import print_answers, print_screen, screen_console

        runs = read_runs(outputs_dir, {"hash": session.hashes}, limit, alone=True)
        if not jobs:
            print_answers(runs, screen_console())
        took = duration(session.seconds) if session.rows_written + session.texts_measured else ""
        print_screen(runs, screen_console(), took=took, views=views.further_views(runs))
        for why, names in session.unmeasured.items():
            console.print(f"no divergence of {', '.join(names)}: {why}", highlight=False)
    if session.failures and jobs:
        words = [failure.job.split(" ") for failure in session.failures]
        shared = [word for word in words[0] if len(words) > 1 and all(word in job_words for job_words in words)]
        console.print(f"\n{len(words)} run(s) failed: {' '.join(shared)}".rstrip(), highlight=False, soft_wrap=True)
        jobs_by_reason: dict[str, list[str]] = {}  # reasons printed before are empty
        for failure in session.failures:
            job = " ".join(word for word in failure.job.split(" ") if word not in shared)
            jobs_by_reason.setdefault("" if failure.reported else failure.why, []).append(job)
        for why, own_words in jobs_by_reason.items():
            for line in (*filter(None, own_words), *([f"  {why}"] if why else [])):
                console.print(f"  {line}", highlight=False, soft_wrap=True)


class SweepTable(Callback):
    """Hydra callback: looks at what all runs need before the first one, prints the table after the last one."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        _stop_if_wrong(_check_log, config)

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        _stop_if_wrong(_check_sweep, config)

    def on_run_end(self, config: Any, **_: Any) -> None:
        self._end(config, jobs=False)

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        self._end(config, jobs=True)

    def _end(self, config: Any, *, jobs: bool) -> None:
        session = current()
        try:
            swept = any(override.startswith("limit=") for job in session.overrides_of_jobs for override in job)
            limit = None if swept else config.get("limit")
            print_summary(config.outputs_dir, session, jobs=jobs, limit=limit if isinstance(limit, int) else None)
            self._publish(config, session)
        except Exception as error:  # Hydra would turn it into a warning and exit code 0
            say(f"error after the runs: {type(error).__name__}: {error}", file=sys.stderr)
            session.add_failure("table and publishing", f"{type(error).__name__}: {error}", reported=True)

    def _publish(self, config: Any, session: Session) -> None:
        if config.log.wandb and session.hashes:
            from kvexp.results.wandb_log import check, publish

            # All at once: the verdicts are corrected for the number of runs compared.
            folders = [Path(config.outputs_dir) / name for name in session.hashes]
            mode = check(config.log.project, None if config.log.mode == "auto" else config.log.mode)
            written = publish(
                folders, config.log.project, mode, experiment=config.hydra.runtime.choices.get("experiment")
            )
            if mode == "offline" and written:
                place = written[0].parent
                say(f"wandb: {len(folders)} runs, offline in {place}; to upload them: wandb sync {place}/offline-run-*")
            else:
                say(f"wandb: {len(folders)} runs, {mode}, project {config.log.project}")


def _stop_if_wrong(check: Callable[[Any], None], config: Any) -> None:
    """Print a ConfigError of the check and exit: Hydra makes a warning of any other exception in a callback."""
    try:
        check(config)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _check_log(config: Any) -> None:
    """ConfigError where the runs, which may take days, could not be published at their end."""
    if typed(config.log.wandb, bool, "log.wandb"):
        from kvexp.results.wandb_log import check

        check(config.log.project, None if config.log.mode == "auto" else config.log.mode)


def _check_sweep(config: Any) -> None:
    """ConfigError where a sweep cannot be published, or its folder not written."""
    _check_log(config)
    typed(config.outputs_dir, str, "outputs_dir")
    check_writable(Path(config.hydra.sweep.dir).expanduser())
