"""A tensor that is another one at every decode step, held at one address, where a captured step reads it."""

from __future__ import annotations

from torch import Tensor


class StepInput:
    """The input of one decode step from a schedule that is computed on the host.

    value: the tensor while a step is computed for which it was held; None: nothing is held, and whoever computes takes
    the next one from the schedule.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._buffer: Tensor | None = None

    def hold(self, value: Tensor) -> None:
        """Copy `value` into the buffer of the steps before, of the same shape; the first call makes the buffer."""
        if self._buffer is None:
            self._buffer = value.clone()
        else:
            self._buffer.copy_(value)
        self.value = self._buffer

    def release(self) -> None:
        """End the step. The buffer stays, since captured steps read it."""
        self.value = None
