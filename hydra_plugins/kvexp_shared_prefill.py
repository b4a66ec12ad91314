"""hydra/launcher=shared_prefill, the default of a sweep: runs that differ in method and budget share every prefill.

Hydra composes the jobs one by one, as with launcher=basic, and they are only collected; then each group fills in the
rows it can write together, and at last every job has its turn, which finds its rows there or makes what is missing.
It stands here because Hydra looks for launchers in the package hydra_plugins and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

TARGET = "hydra_plugins.kvexp_shared_prefill.SharedPrefillLauncher"
ConfigStore.instance().store(group="hydra/launcher", name="shared_prefill", node={"_target_": TARGET}, provider="kvexp")


class SharedPrefillLauncher(BasicLauncher):  # type: ignore[misc]
    """Runs the jobs of a sweep in this process."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from kvexp.runner.job import SWEPT

        SWEPT.begin()
        try:
            returned: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
        finally:
            jobs = SWEPT.end()
        for job, value in zip(returned, self.perform(jobs), strict=True):
            job.return_value = value
        return returned

    def perform(self, jobs: list[Any]) -> list[float | None]:
        """Each job's objective."""
        from kvexp.runner.job import perform

        return perform(jobs)
