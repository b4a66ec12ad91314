"""What is still there at a step: for every token of an example, how many heads of each layer hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import EVICTIONS, ExampleLog, read_table, require_example_log
from kvexp.record import Run

Array = Any  # of numpy


@dataclass(frozen=True)
class View:
    """kept [L, tokens]: heads that hold the token once the evictions of `step` are done; a token to come has 0.

    layer: None for all. The text is that of prompt, question and answer.
    """

    told: ExampleLog
    kept: Array
    step: int
    layer: int | None

    @property
    def counts(self) -> Array:
        """[tokens]: heads, of the layer or of all."""
        return self.kept.sum(0) if self.layer is None else self.kept[self.layer]

    @property
    def heads(self) -> int:
        """What a token has that nobody has evicted."""
        return sum(self.told.heads) if self.layer is None else self.told.heads[self.layer]

    @property
    def present(self) -> int:
        """Tokens that have been read at this step."""
        return self.told.prompt_tokens + self.step

    def data(self) -> dict[str, Any]:
        """Plain values for a page: one entry per token, `kept` and `by_layer` None for tokens to come."""
        tokens = [
            {
                "text": text,
                "kept": int(self.counts[place]) if place < self.present else None,
                "by_layer": self.kept[:, place].tolist() if place < self.present else None,
            }
            for place, text in enumerate(self.told.texts)
        ]
        told = self.told
        return {
            "example": told.example,
            "step": self.step,
            "layer": self.layer,
            "heads": self.heads,
            "heads_by_layer": told.heads,
            "prompt_tokens": told.prompt_tokens,
            "question_tokens": told.question_tokens,
            "tokens": tokens,
        }


def view(run: Run, example: str, step: int = 0, layer: int | None = None) -> View:
    """ConfigError where the example has no log, or not that many steps or layers."""
    told = require_example_log(run, example)
    return made(told, read_table(run, example, EVICTIONS), step, layer)


def made(told: ExampleLog, evictions: pd.DataFrame, step: int = 0, layer: int | None = None) -> View:
    """`view` of what was read."""
    if not 0 <= step <= told.steps:
        raise ConfigError(f"--step must be from 0 (the end of the prompt) to {told.steps} in this example, got {step}")
    if layer is not None and not 0 <= layer < len(told.heads):
        raise ConfigError(f"--layer must be from 0 to {len(told.heads) - 1} in this model, got {layer}")
    return View(told, kept_at(told, evictions, step), step, layer)


def kept_at(told: ExampleLog, evictions: pd.DataFrame, step: int) -> Array:
    """[L, tokens] int32: heads of each layer that hold each token after this step."""
    kept = np.zeros((len(told.heads), len(told.ids)), dtype=np.int32)
    kept[:, : told.prompt_tokens + step] = np.array(told.heads, dtype=np.int32)[:, None]
    try:
        gone = evictions[evictions["step"] <= step]
        places = gone[["layer", "position"]].to_numpy(dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise _not_this(told, f"it needs numbers in step, layer and position ({error})") from error
    if ((places < 0) | (places >= kept.shape)).any():
        raise _not_this(
            told, f"it names a layer or a position outside of {kept.shape[0]} layers, {kept.shape[1]} tokens"
        )
    np.subtract.at(kept, tuple(places.T), 1)
    return kept


def _not_this(told: ExampleLog, why: str) -> ConfigError:
    return ConfigError(
        f"the log of evictions of example {told.example} is damaged: {why}; remove it and run the same command again "
        "with diagnose=log"
    )
