"""Every method with small settings, as a cache of any family has to be configured, and what its steps may wait for."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import test_kept_sets
import torch
from cases import CASES
from host_reads import HostReads
from test_kept_sets import calibration, surrogate
from tiny import tiny

from kvexp.core import Budget, CacheConfig
from kvexp.methods import Ideal

PROMPTS, SEEDS = test_kept_sets.PROMPTS[:2], test_kept_sets.SEEDS[:2]  # of different length: one is padded
METHODS = {name: case.method for name, case in CASES.items() if case.oracle} | {"ideal": Ideal()}
LEARNED = ("gpt2", "opt")  # families whose positions no cache can renumber
STEPS = 20

# Where the host waits once the prompt has been read, and why. At every step:
PER_STEP = {"generate/loop.py:<listcomp>": "which rows have ended, so that they stop and times are true"}
BEAM_STEP = {
    "generate/loop.py:beam_search": "transformers asks whether a beam can still be beaten",
    "generate/loop.py:__call__": "the device has finished, so that times are true",
}
OWN_ANSWER = {"generate/kl.py:compare_next": "whether the full cache's own answers have all ended"}
# In all, once for every cache or layer:
ONCE = {
    "generate/prefill.py:prefill": "the prompt has been computed, so that its time is true",
    "generate/loop.py:__init__": "ids of end tokens, sent before the first step",
    "hf/cache.py:logits_were_finite": "whether any logit was NaN, asked at the end",
    "hf/cache.py:<genexpr>": "the same, of every layer",
    "generate/inputs.py:truncate_at_end": "the tokens, when all are there",
    "generate/loop.py:beam_search": "tokens and scores of the best beams, at the end",
    "generate/kl.py:found": "the divergences of all steps, at the end",
    "core/decode.py:from_schedule": "temperatures of all steps, sent at the first",
    "core/decode.py:_by_row": "sinks and decays of every row, sent at the first step",
}
# Of retrieval methods, at every layer and step. Tokens are in CPU memory, lengths of rows are integers of the host:
FETCHING = {
    "retrieval/offload.py:fetch": "which slots were chosen, so that the host can look for them",
    "retrieval/offload.py:_count_fetch": "with offload=false how many slots of each row are meant",
    "retrieval/offload.py:components": "which components of the query are the largest, likewise, and back",
    "retrieval/offload.py:all_keys": "all keys, for a method that compares all",
    "retrieval/offload.py:_copy": "where each fetched token goes; with offload=false which places are meant",
    "retrieval/index.py:__getitem__": "an index that was made in the background, at the first step",
    "retrieval/index.py:write": "where in its row's index the new token goes",
    "retrieval/quest.py:extend": "which pages the new tokens begin or go on",
    "retrieval/infllm.py:extend": "where the attention that new tokens receive is added up",
    "retrieval/infllm.py:select": "how many blocks each row has",
    "retrieval/infllm.py:attend": "where far blocks stand",
    "retrieval/infllm.py:_scores": "where far blocks stand",
    "retrieval/infllm.py:_observe": "how long each row's window is, and blocks that are full",
    "retrieval/pqcache.py:relevance": "how many tokens each row has",
    "retrieval/offload.py:read": "how many tokens each row has",
    "retrieval/offload.py:write_token": "where in its row the new token goes",
    "retrieval/offload.py:_step_layout": "how many tokens each row has",
    "core/slot_order.py:topk_slots": "how many slots each row may choose",
}
# Of single methods, at every layer and step:
GUARD = {"hf/cache.py:reorder_cache": "that no row went to another sample, where a sample's beams share scores"}
CHOICE_ON_HOST = {  # as often as it likes
    "methods/openvino.py:kept": "which rows hold what they may at most, and which slots these are",
    "methods/openvino.py:_gone": "which blocks go, as the engine sorts them; a study of an engine, never timed",
    "methods/openvino.py:_without_crushed": "which blocks KVCrush takes back",
    "core/backends.py:evict": "how many slots are left, which blocks change",
}
OF_METHOD = {
    "ideal": {"methods/ideal.py:query_mask": "the largest budget of the batch; a simulation, never timed"},
    "openvino": CHOICE_ON_HOST,
    "openvino_crush": CHOICE_ON_HOST,
    "keyformer": GUARD,
    "keyformer_shared": GUARD,
    "keyformer_a2sf": GUARD,
}


def config_of(family: str, name: str, **options: Any) -> CacheConfig:
    """The configuration of a method's cache, half of a prompt's tokens kept."""
    method = METHODS[name]
    given: dict[str, Any] = {"select": CASES[name].select}
    if family in LEARNED:
        given["positions"] = "original"  # else what the method has: streaming_llm renumbers
    if method.needs.calibration and "calibration" not in options:
        given["calibration"] = calibration(family)
    if method.needs.surrogate and "surrogate" not in options:
        given["surrogate"] = surrogate(family)
    if name == "ideal":
        given["mode"] = "mask"
    return CacheConfig(method, Budget(kv_ratio=0.5) if method.evicts else None, **given | options)


@cache
def on_cpu(family: str, dtype: torch.dtype) -> Any:
    """The tiny model of a family on the CPU."""
    return tiny(family) if dtype == torch.float32 else copy.deepcopy(tiny(family)).to(dtype)


def check_waits(
    reads: HostReads, steps: int, per_step: dict[str, str], *names: str, each: int = 1, caches: int = 1
) -> None:
    """Every wait has a reason: `each` per step, a few for every cache in all; and nothing of the host is used beside.

    names: of the methods, for those that wait by themselves at every layer.
    """
    own = {place: why for name in names for place, why in OF_METHOD.get(name, {}).items()}
    waits = reads.places + reads.sends
    assert set(waits) <= {*per_step, *ONCE, *own}, waits
    assert set(per_step) <= set(waits), f"waits no more: {waits}"
    for place, count in waits.items():
        if place in CHOICE_ON_HOST:
            continue
        most = 2 * steps if place in own else each * steps if place in per_step else 0
        assert count <= most + (4 * caches if place in ONCE else 0), f"{place}, {count} times: {waits}"
    assert not reads.strays, reads.strays
