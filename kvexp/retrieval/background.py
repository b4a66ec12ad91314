"""Work on the host that nobody waits for until its result is needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    """One thread: jobs run in order, each with all the threads that torch gives to one operation."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvexp-index")


def _in_this_mode(job: Callable[[], None]) -> Callable[[], None]:
    """Whether tensors are made for inference only is a thread's own business: the job makes those of this thread."""
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            job()

    return run


class Later:
    """A job that starts at once beside a GPU's computation, or, where that would only slow it down, when waited for."""

    def __init__(self, job: Callable[[], None], *, beside: bool) -> None:
        self.job: Callable[[], None] | Future[None] | None = _worker().submit(_in_this_mode(job)) if beside else job

    @property
    def done(self) -> bool:
        return self.job is None or (isinstance(self.job, Future) and self.job.done())

    @property
    def waited_for(self) -> bool:
        return self.job is None

    def wait(self) -> None:
        """Return once the job is done; raises what it raised."""
        job, self.job = self.job, None
        if isinstance(job, Future):
            job.result()
        elif job is not None:
            job()
