"""The real model of the benchmarks, SmolLM2-135M-Instruct out of kvexp's cache, and prompts of real English for it.

Imports neither transformers' newest parts nor kvexp's models, because kvpress runs in an environment of its own with an
older transformers; kvexp's own modules come where they are needed, which shapes without weights do not. Where
platformdirs is missing, as there, KVEXP_CACHE has to name the cache folder.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

NAME = "smollm2_135m"  # as in conf/models.yaml
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # the file that `kvexp fetch` converts, as its manifest names it


class NotFetched(RuntimeError):
    """The weights are not in the cache."""


@functools.cache
def folder() -> Path:
    """The folder of the converted weights; NotFetched where `kvexp fetch` has not put them there."""
    from kvexp.util import cache_folder

    for manifest in sorted((cache_folder() / "models").glob("*/manifest.json")):
        if json.loads(manifest.read_text("utf-8"))["source"]["file"] == FILE:
            return manifest.parent
    raise NotFetched(f"{NAME} is not in {cache_folder()}; fetch it: kvexp fetch {NAME} (make setup does)")


def load(attention: str) -> Any:
    """The model as Hugging Face loads it, in float32; attention: its attn_implementation."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32, attn_implementation=attention)


@functools.cache
def text_ids() -> list[int]:
    """Token ids of all news articles that come with kvexp, one after the other: about 30,000."""
    from transformers import AutoTokenizer

    from kvexp.tasks.articles import articles

    tokenizer = AutoTokenizer.from_pretrained(folder())
    ids: list[int] = tokenizer("\n\n".join(article.text for article in articles()), verbose=False).input_ids
    return ids
