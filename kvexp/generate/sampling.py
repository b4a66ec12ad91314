"""Seeded sampling whose draws do not depend on batch neighbours, batch size or the order of calls."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvexp.core.observe.noise import gumbel


class SeededGumbelSampler(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise of (row seed, step, token) to logits, so that their arg max is an exact sample of the softmax.

    Used as the last processor of a greedy generation: a row draws the same tokens alone or in a batch. seeds: one per
    row; prompt_columns: width of the prompt, so that the first new token is step 0.
    """

    def __init__(self, seeds: list[int], prompt_columns: int) -> None:
        self.seeds, self.prompt_columns = seeds, prompt_columns
        self._seeds: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        device = scores.device
        if self._seeds is None or self._seeds.device != device:
            self._seeds = torch.tensor(self.seeds, device=device)
        seeds = self._seeds
        step = torch.full((len(self.seeds),), input_ids.shape[1] - self.prompt_columns, device=device)
        tokens = torch.arange(scores.shape[-1], device=device).expand(len(self.seeds), -1)
        # Layer -1 keeps these draws apart from the noise inside the model under the same seed.
        return scores.float() + gumbel(seeds, -1, step, tokens)
