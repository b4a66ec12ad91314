"""The least a decode step can take: bytes it must read, over the bandwidth this machine really has."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.clock import settle


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights a step reads: all but the input embedding, unless that is the head too."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    skipped = None if head is not None and head.weight is embedding else embedding
    return sum(w.numel() * w.element_size() for w in model.parameters() if w is not skipped)


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers and kv heads."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers * 2 * kv_heads * dim * dtype.itemsize


def step_bytes(model: PreTrainedModel, slots: float, batch: int) -> float:
    """Bytes a decode step must read: the weights once, and every row's slots."""
    return weight_bytes(model) + batch * slots * slot_bytes(model.config, model.dtype)


class Bandwidth:
    """Bytes per second this machine reads from memory, by a matrix times a vector and by a copy: the better of both.

    mib: size of the matrix; it has to be several times the last cache's.
    """

    def __init__(self, device: str, mib: int | None = None) -> None:
        cuda = device.startswith("cuda")
        side = int(((mib or (4096 if cuda else 256)) * 2**20 / 4) ** 0.5)
        self.device = device
        self.matrix, self.vector = torch.ones(side, side, device=device), torch.ones(side, device=device)
        self.copy = torch.empty_like(self.matrix)

    def sample(self) -> dict[str, float]:
        """One measurement: medians of five."""
        size = self.matrix.numel() * 4
        reading = self._seconds(lambda: torch.mv(self.matrix, self.vector))
        copying = self._seconds(lambda: self.copy.copy_(self.matrix))
        return {"bytes_per_s": max(size / reading, 2 * size / copying)}

    def _seconds(self, task: Any) -> float:
        taken = []
        for _ in range(5):
            settle(self.device)
            start = time.perf_counter()
            task()
            settle(self.device)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
