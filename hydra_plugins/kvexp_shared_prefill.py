"""hydra/launcher=shared_prefill, the default of a sweep: runs that differ in method and budget share every prefill.

Hydra composes the jobs one by one, as with launcher=basic, and they are only collected; then each group fills in the
rows it can write together, and at last every job has its turn, which finds its rows there or makes what is missing.
It stands here because Hydra looks for launchers in the package hydra_plugins and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from kvexp.util import Session, current

TARGET = "hydra_plugins.kvexp_shared_prefill.SharedPrefillLauncher"
ConfigStore.instance().store(group="hydra/launcher", name="shared_prefill", node={"_target_": TARGET}, provider="kvexp")
SWEEPER = "hydra_plugins.kvexp_shared_prefill.OnceComposedSweeper"
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="once_composed",
    node={"_target_": SWEEPER, "max_batch_size": None, "params": None},
    provider="kvexp",
)


class SharedPrefillLauncher(BasicLauncher):  # type: ignore[misc]
    """Runs the jobs of a sweep in this process."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        session = current()
        session.collect_jobs()
        try:
            returned: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
        finally:
            jobs = session.collected_jobs()
        for job, value in zip(returned, self.perform(jobs, session), strict=True):
            job.return_value = value
        return returned

    def perform(self, jobs: list[Any], session: Session) -> list[float | None]:
        """Each job's objective."""
        from kvexp.run.jobs import run_jobs

        return run_jobs(jobs, session)


class OnceComposedSweeper(BasicSweeper):  # type: ignore[misc]
    """hydra/sweeper=basic, which composes every job to see whether it can, and then leaves it to the launcher to do so.

    The launcher above composes all jobs of a batch before the first runs, so that once is enough; a sweep of ten jobs
    starts a second earlier.
    """

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Hydra's check, where jobs run before others are composed."""
        if type(self.launcher) is not SharedPrefillLauncher or self.max_batch_size is not None:
            super().validate_batch_is_legal(batch)
