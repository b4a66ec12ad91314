"""A job on the CPU that runs beside a GPU's computation until its result is needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    """The one worker thread: jobs run in order, each with all the threads that torch gives to one operation."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvexp-index")


def _in_this_mode(job: Callable[[], None]) -> Callable[[], None]:
    """The job wrapped in the calling thread's inference mode, which torch keeps per thread."""
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            job()

    return run


class BackgroundTask:
    """A job on the CPU that starts at once in the worker thread (run_async), or else when it is first waited for.

    On a CPU it is not started beside the computation, which it would slow down.
    """

    def __init__(self, job: Callable[[], None], *, run_async: bool) -> None:
        self.job: Callable[[], None] | Future[None] | None = _worker().submit(_in_this_mode(job)) if run_async else job

    @property
    def done(self) -> bool:
        """Whether the job has run, waited for or not."""
        return self.job is None or (isinstance(self.job, Future) and self.job.done())

    @property
    def joined(self) -> bool:
        """Whether `wait` has returned."""
        return self.job is None

    def wait(self) -> None:
        """Return once the job is done; raises what it raised."""
        job, self.job = self.job, None
        if isinstance(job, Future):
            job.result()
        elif job is not None:
            job()
