"""How many runs of a group fit into memory at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvexp.config.padding import budget_of
from kvexp.config.settings import Settings
from kvexp.evaluate.tokenized_examples import TokenizedExample

SHARE = 0.6  # of the memory that is free: the rest is for what a prefill makes on its way


def at_once(
    runs: Sequence[Settings], model: Any, batch: Sequence[tuple[int, TokenizedExample]], processes: int = 1
) -> list[list[int]]:
    """Places of the runs to take together: neighbours, as many as fit into a process's share; one alone is tried."""
    prompts, each = needs(runs, model, batch)
    groups: list[list[int]] = [[]]
    left = room = free_bytes(model) * SHARE / processes - prompts
    for place, need in enumerate(each):
        if groups[-1] and need > left:
            groups.append([])
            left = room
        groups[-1].append(place)
        left -= need
    return groups


def needs(runs: Sequence[Settings], model: Any, batch: Sequence[tuple[int, TokenizedExample]]) -> tuple[int, list[int]]:
    """Bytes of the prompts, which the runs share, and of what each run keeps."""
    lengths = [prompt.size for _, prompt in batch]
    token = token_bytes(model)
    return token * sum(lengths), [token * sum(held(settings, lengths)) for settings in runs]


def held(settings: Settings, lengths: Sequence[int]) -> list[int]:
    """Slots per layer and kv head that each prompt holds at most once it is evicted."""
    new = settings.decoding.max_new_tokens
    budget = budget_of(settings, lengths)
    cache = settings.cache
    if budget is None or cache.mode == "mask" or cache.method.keeps_everything or not cache.cadence.at_prefill:
        return [length + new for length in lengths]
    return [slots + 1 for slots in budget.resolve(lengths, max(lengths), new, 0, 1)]


def token_bytes(model: Any) -> int:
    """Bytes of one token's keys and values in all layers, if all of them were attention of one shape."""
    from kvexp.models.families import kv_heads, layers_of
    from kvexp.models.retrieval_calibration import head_dim

    config = model.config
    return 2 * layers_of(config) * kv_heads(config) * head_dim(config) * int(model.dtype.itemsize)


def free_bytes(model: Any) -> int:
    """Free memory of the devices the model is on: of a spread one, as if each had what the fullest has left."""
    import torch

    from kvexp.models.free_memory import available

    devices = {parameter.device for parameter in model.parameters()}
    cards = [int(torch.cuda.mem_get_info(device)[0]) for device in devices if device.type == "cuda"]
    if cards:
        return min(cards) * len(cards)
    return available()  # unknown: what does not fit is halved when it fails
