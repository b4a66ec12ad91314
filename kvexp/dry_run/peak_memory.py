"""The most memory a group of runs holds at one time, from the model's size and the slots that its runs keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.core.eviction_backend import stackable_width
from kvexp.models.batched_cache import bin_by_bytes
from kvexp.models.model_size import ModelSize

BASE_BYTES = 450 << 20  # a process without its model: Python and libraries; measured with torch 2.13 on Linux
TABLES_BYTES = 75 << 20  # of these, the libraries that only the tables at the end bring in
# Of a forward over a prompt, in widths of the model and per token: its widest layer, and what malloc keeps of it
# (SmolLM2-135M, 512 and 1024 tokens).
ACTIVATION_WIDTHS = 25
# Share of the bytes of the stacked caches (`kvexp.core.decode.fast_step`) that comes new from the system. What is freed
# layer by layer is hardly used again: malloc keeps it in pieces. Answers; texts, which come after them (SmolLM2-135M,
# 20 variants on 512 and 1024 tokens).
ANSWERS_STACKED, TEXTS_STACKED = 1.0, 0.7
LOGITS_COPIES = 4  # of a step's logits: processed, as log-probabilities, compared


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the peak. base: of the process; packed: copies of linear layers' weights; caches: of all runs and
    texts; working: what prefill and decode steps hold beside."""

    base: int
    weights: int
    packed: int
    caches: int
    working: int

    @property
    def total(self) -> int:
        return self.base + self.weights + self.packed + self.caches + self.working


@dataclass(frozen=True)
class HeldCaches:
    """What the runs of a group hold of one batch of prompts.

    slots: of every run, all its rows and kv heads alike; sizes: bytes of them in all layers, in as many bits as the run
    stores them; stacks: whether its rows join others in a decode step. kinds: of texts that are forced; answers:
    whether answers are generated too. token: bytes of a slot of a model's dtype in all layers; layers: their number.
    """

    slots: Sequence[int]
    sizes: Sequence[int]
    stacks: Sequence[bool]
    kinds: int
    answers: bool
    token: int
    layers: int

    @property
    def copies(self) -> int:
        """How often every cache is held, answers and texts counted apart."""
        return max(1, self.kinds + self.answers)

    @property
    def bytes(self) -> int:
        """Of all runs' caches, once."""
        return sum(self.sizes)

    @property
    def stacked_bytes(self) -> int:
        """Of the buffers in which the caches take a step together: each as wide as the widest of its stack."""
        widths = {place: slots for place, (slots, on) in enumerate(zip(self.slots, self.stacks, strict=True)) if on}
        layer = self.token // self.layers
        stacks = bin_by_bytes({place: (width, width * layer) for place, width in widths.items()})
        several = [[widths[place] for place in stack] for stack in stacks if len(stack) > 1]
        return sum(max(stack) * len(stack) for stack in several) * self.token

    def peak(self, batches: int) -> int:
        """Bytes once so many batches are read and all their caches, for answers and for texts, have taken a step.

        Copies share keys and values with what they are of until a step stacks them, or for those that no stack takes,
        until it adds a token.
        """
        taken = (ANSWERS_STACKED if self.answers else 0) + TEXTS_STACKED * self.kinds
        if not self.answers and self.kinds:  # the first to be stacked
            taken += ANSWERS_STACKED - TEXTS_STACKED
        alone = sum(size for size, on in zip(self.sizes, self.stacks, strict=True) if not on)
        return batches * (self.bytes + (self.copies - 1) * alone + int(taken * self.stacked_bytes))


def working_bytes(shape: ModelSize, prompt: int, rows: int, itemsize: int) -> int:
    """Of a prefill of so many tokens (batch included), or of a decode step of so many rows, whichever is more.

    itemsize: bytes of a number in the model's dtype.
    """
    return max(ACTIVATION_WIDTHS * shape.width * prompt * itemsize, LOGITS_COPIES * rows * shape.vocabulary * 4)


def width_of(slots: int, device: str) -> int:
    """Slots that a cache of a run takes on this kind of device."""
    import torch

    return stackable_width(slots, torch.device(device))
