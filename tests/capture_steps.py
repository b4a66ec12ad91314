"""Decode steps for tests of their capture: methods and budgets, contexts whose steps are taken one by one, a check."""

import itertools

import pytest
import torch
from capture_checker import CaptureChecker, changes
from tiny import CONFIGS, prompts_of, tiny

from kvexp.core import Budget, QueryCalibration, Surrogate
from kvexp.core.graph import ReplayableStep, capture_obstacle
from kvexp.generate import CacheConfig, prefill_together
from kvexp.generate.loop import batched_cache
from kvexp.generate.prefill import decode_step
from kvexp.methods import H2O, VATP, Keyformer, StreamingLLM
from kvexp.run.build import build
from kvexp.run.compose import option, options

NOTHING = torch.zeros(0)
# What a pass over texts would have found, at which nothing here looks.
NOT_LOOKED_AT = {
    "calibration": QueryCalibration("", torch.ones(1), NOTHING, NOTHING),  # has directions, which qfilters asks for
    "surrogate": Surrogate("", NOTHING, NOTHING),
}
HALF = Budget(kv_ratio=0.5)
NEW = 30


def prompts_for(*methods):
    """Two prompts: of different length, but of one for a method that adds up the scores of the batch."""
    alike = any(method.score_spec is not None and method.score_spec.batch == "sum_all" for method in methods)
    return prompts_of(3, (40, 40) if alike else (40, 33))


def obstacles():
    """Option of `method` -> the method with its defaults, and what keeps its steps from being captured."""
    found = {}
    for name in options("method"):
        method = build(option("method", name), "method", within=("kvexp.methods", "kvexp.retrieval"))
        config = CacheConfig(method, HALF if method.evicts else None, mode="auto", **NOT_LOOKED_AT)
        found[name] = method, capture_obstacle(config)
    return found


CASES = {name: (method, HALF) for name, (method, why) in obstacles().items() if why is None}
CASES |= {
    "vatp": (VATP(n_sinks=2), HALF),  # its 20 sinks are as many as the budget
    "keyformer per key": (Keyformer(noise="gaussian", fresh=False), HALF),
    "streaming_llm, two sinks": (StreamingLLM(n_sinks=2), HALF),
    "pyramid, each layer for itself": (Keyformer(), Budget(kv_ratio=0.5, layers="pyramid")),
    "heads of different width": (H2O(), Budget(kv_ratio=0.5, heads="adaptive")),
}
QUICK = [("llama", "keyformer"), ("llama", "heads of different width"), ("mpt", "keyformer")]
ALL = [("llama", name) for name in CASES] + [(family, "keyformer") for family in CONFIGS if family != "llama"]
FAMILIES = [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK)]


class Stepped:
    """A context some steps after its prompt, whose next steps are taken one by one."""

    def __init__(self, family="llama", case="h2o", *, model=None, variants=None, warm=4):
        self.model = tiny(family) if model is None else model
        configs = [CacheConfig(*CASES[case])] if variants is None else variants
        prompts = prompts_for(*(config.method for config in configs))
        made = prefill_together(self.model, prompts, configs, max_new_tokens=NEW, seeds=[1, 2])
        self.contexts = made
        self.cache = batched_cache(made)
        device = made[0].ids.device
        self.token = torch.tensor([[5], [6]]).to(device).repeat(len(made), 1)
        self.positions = made[0].mask.sum(1, keepdim=True).repeat(len(made), 1)
        self.logits = [self.eager() for _ in range(warm)]

    def eager(self):
        logits = decode_step(self.model, self.token, self.positions, self.cache)
        self.feed(logits)
        return logits.clone()

    def feed(self, logits):
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.positions += 1

    def replayable(self):
        caches = getattr(self.cache, "caches", [self.cache])
        stacks = [layer.state.decode_stacks for layer in self.cache.layers]
        return ReplayableStep([[layer.state for layer in one.layers] for one in caches], stacks)

    def step(self):
        return decode_step(self.model, self.token, self.positions, self.cache)


def checked(stepped, steps=3):
    """All refusals of some steps, and how each differed from the one before."""
    step, seen = stepped.replayable(), []
    caches = getattr(stepped.cache, "caches", [stepped.cache])
    flags = [cache.logits_nan_flag for cache in caches]  # told after a replay, outside of it
    before = step.addresses()
    for _ in range(steps):
        step.begin()
        with CaptureChecker() as checker:
            logits = stepped.step()
        step.release()
        for cache, flag in zip(caches, flags, strict=True):
            cache.logits_nan_flag = flag
        stepped.feed(logits)
        seen.append(checker)
    moved = [name for name, address in step.addresses().items() if before[name] != address]
    found = [why for checker in seen for why in checker.refusals]
    found += [why for one, other in itertools.pairwise(seen) for why in changes(one, other)]
    return found + [f"{name} moved" for name in moved]
