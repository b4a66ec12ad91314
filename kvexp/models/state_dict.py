"""A model made of a state dict in memory, whatever names transformers' releases have given its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.utils import logging

from kvexp.errors import ConfigError
from kvexp.models.load import random_config
from kvexp.models.patch import patch_model

_BUFFERS = (".attn.bias", ".attention.bias", "masked_bias", "inv_freq")  # in state dicts of older releases


def model_from_state(family: str, state: dict[str, Tensor], **config: Any) -> PreTrainedModel:
    """A float32 model of `family` with exactly these weights, ready for `EvictionCache`.

    config: fields of the family's Hugging Face configuration. ConfigError that names the weight where one is missing,
    unknown or of another shape.
    """
    configuration = random_config(family, **config)
    with _quietly():
        model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(configuration)].from_pretrained(
            None,
            config=configuration,
            state_dict=dict(state),
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # refused below, with all the others
            output_loading_info=True,
        )
    foreign = [name for name in found["unexpected_keys"] if not name.endswith(_BUFFERS)]
    shapes = [name for name, *_ in found["mismatched_keys"]]
    wrong = {"missing": found["missing_keys"], "unknown": foreign, "of another shape": shapes}
    if any(wrong.values()):
        said = "; ".join(f"{how}: {', '.join(sorted(names))}" for how, names in wrong.items() if names)
        raise ConfigError(f"these weights are not those of a {family} model: {said}")
    return patch_model(model)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers' progress bar and table of weights while loading; `model_from_state` raises the errors."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
