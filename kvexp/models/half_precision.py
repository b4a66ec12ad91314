"""Half precision: when prompts go through the model one by one, because rows of a batch change each other's numbers.

The order in which a product of half-precision matrices is summed depends on its number of rows, and a padded prompt is
attended to in other blocks. In float32 that moves the last of 24 bits; of the 8 or 11 bits of half precision it moves
tokens, because logits often tie.
"""

from __future__ import annotations

FULL = "float32"


def one_row_per_forward(dtype: str, device: str) -> bool:
    """Whether every prompt goes through the model by itself, so that its row is the same in any batch: on a CPU.

    dtype: as text, such as bfloat16; device: such as cpu or cuda:0. On a GPU it would take many times as long; there
    the batch size is part of a run's identity (`batch_size_identifies_run`).
    """
    return dtype != FULL and device.startswith("cpu")


def batch_size_identifies_run(dtype: str, device: str) -> bool:
    """Whether the batch size is part of a run's identity, because it can change the numbers of a row."""
    return dtype != FULL and not one_row_per_forward(dtype, device)
