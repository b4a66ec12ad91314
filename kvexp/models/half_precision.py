"""Half precision: where the rows of a batch change each other's numbers.

How a product of half-precision matrices is summed goes by the number of its rows, and a padded prompt is attended to in
other blocks. In float32 that moves the last of 24 bits; of 8 or 11 bits it moves tokens, because logits often tie.
"""

from __future__ import annotations

FULL = "float32"


def alone(dtype: str, device: str) -> bool:
    """Whether every prompt goes through the model by itself, so that its row is the same in any batch: on a CPU.

    On a GPU that would take many times as long; there the batch size is part of what a run is.
    """
    return dtype != FULL and device.startswith("cpu")


def identifies(dtype: str, device: str) -> bool:
    """Whether the batch size is part of a run's identity, because it can change the numbers of a row."""
    return dtype != FULL and not alone(dtype, device)
