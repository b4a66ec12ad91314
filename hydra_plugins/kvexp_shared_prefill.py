"""hydra/launcher=shared_prefill, the default of a sweep: runs that differ in method and budget share every prefill.

With hydra/launcher=basic every run reads its prompts by itself, and is timed. Either composes all jobs, one by one,
before the first runs. They stand here because Hydra looks for launchers in the package hydra_plugins and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from kvexp.run.labels import with_controls
from kvexp.run.session import Session, current

HERE = "hydra_plugins.kvexp_shared_prefill"
NODES: dict[tuple[str, str], dict[str, Any]] = {
    ("hydra/launcher", "shared_prefill"): {"_target_": f"{HERE}.SharedPrefillLauncher"},
    ("hydra/launcher", "basic"): {"_target_": f"{HERE}.OneByOneLauncher"},  # in place of Hydra's own
    ("hydra/sweeper", "once_composed"): {
        "_target_": f"{HERE}.OnceComposedSweeper",
        "max_batch_size": None,
        "params": None,
    },
}
for (group, name), node in NODES.items():
    ConfigStore.instance().store(group=group, name=name, node=node, provider="kvexp")


class OneByOneLauncher(BasicLauncher):  # type: ignore[misc]
    """Runs the jobs of a sweep in this process, one after the other."""

    shares_prefills = False

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        session = current()
        if session.collected is not None:  # the caller of this command wants its jobs and not their runs
            composed: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
            return composed
        session.collect_jobs()
        try:
            returned: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
        finally:
            jobs = session.collected_jobs()
        alike = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
        session.overrides_of_jobs += [[word for word in job.overrides if word not in alike] for job in jobs]
        self.perform(jobs, session)
        return returned

    def perform(self, jobs: list[Any], session: Session) -> None:
        """Run the jobs."""
        from kvexp.run.jobs import run_jobs

        run_jobs(jobs, session, share=self.shares_prefills)


class SharedPrefillLauncher(OneByOneLauncher):
    """Fills in together what runs of the same prompts lack; then each job has its turn, which finds its rows there."""

    shares_prefills = True


class OnceComposedSweeper(BasicSweeper):  # type: ignore[misc]
    """hydra/sweeper=basic, which composes every job to see whether it can, and then leaves it to the launcher to do so.

    The launchers above compose all jobs of a batch before the first runs, so that once is enough; a sweep of ten jobs
    starts a second earlier.
    """

    @staticmethod
    def split_arguments(overrides: Any, max_batch_size: int | None) -> list[list[list[str]]]:
        """Hydra's batches of jobs, with the control's at the end of the last."""
        batches: list[list[list[str]]] = BasicSweeper.split_arguments(overrides, max_batch_size)
        return [*batches[:-1], with_controls(batches[-1], [job for batch in batches for job in batch])]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Hydra's check, where jobs run before others are composed."""
        if not isinstance(self.launcher, OneByOneLauncher) or self.max_batch_size is not None:
            super().validate_batch_is_legal(batch)
