"""A short generation before the first that is timed.

What a process does once (reading weights in, laying them out, compiling kernels) is no part of any method's time; full,
which runs first, would pay for all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from kvexp.config.padding import batch_cache
from kvexp.config.settings import Settings
from kvexp.core import CacheConfig
from kvexp.errors import CacheError, ConfigError
from kvexp.evaluate.oom_retry import Items, Patience, release
from kvexp.evaluate.timeout import Overdue
from kvexp.methods import Full
from kvexp.tasks.lm_eval import Item

PROMPT, NEW = 128, 3  # tokens: enough for every kind of call


def warm_up(settings: Settings, model: Any, tokenizer: Any, batch: Items, patience: Patience) -> None:
    """The beginnings of a batch's prompts under the run's method, to nobody's knowledge.

    Under full attention where the budget of so short a prompt does not hold what the method protects. What else goes
    wrong will go wrong again with the batch itself, which tells.
    """
    prompts = [prompt.ids[:PROMPT] for _, prompt in batch if timed(prompt.example)]
    if not prompts:
        return
    with contextlib.suppress(CacheError, MemoryError, RuntimeError, Overdue), patience.of(batch):
        try:
            _generate(settings, model, tokenizer, prompts)
        except ConfigError:
            beyond = settings.cache.beyond_context
            full = dataclasses.replace(settings, cache=CacheConfig(Full(), beyond_context=beyond))
            with contextlib.suppress(ConfigError):
                _generate(full, model, tokenizer, prompts)
    release()


def timed(example: Any) -> bool:
    """Whether the answer's row holds times; choices, but lm-eval's, are judged from forks of one prefill."""
    return isinstance(example, Item) or not example.choices


def _generate(settings: Settings, model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    from kvexp.generate import generate

    decoding = dataclasses.replace(settings.decoding, max_new_tokens=NEW, min_new_tokens=0, eos=None)
    cache = batch_cache(settings, [len(ids) for ids in prompts])
    generate(model, prompts, cache, decoding=decoding, tokenizer=tokenizer)
