"""Make the trace of one example of a run: its prompt under a profile, then the full cache's own answer by steps."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvexp import NUMERICS
from kvexp.core import EvictionLayer
from kvexp.diagnose.case import Case
from kvexp.errors import ConfigError
from kvexp.generate.prefilled_context import decode_step
from kvexp.models import EvictionCache
from kvexp.trace.profiles import BLOCK, ProfiledEviction, SlotsBefore, backend_of, profiled
from kvexp.trace.trace_check import VERSION

TOP = 8  # next tokens whose log-probabilities are kept


@torch.no_grad()
def trace_of(case: Case, profile: str, new_tokens: int, model: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a trace by name, its header as a dict. model: what the header says of it.

    The question, if there is one, is fed ahead of the answer. ConfigError for methods that cannot be traced, and for
    layers of different numbers of kv heads.
    """
    config = profiled(case.cache, profile)
    count = min(new_tokens, case.decoding.max_new_tokens)
    shorter = dataclasses.replace(case.decoding, max_new_tokens=count, min_new_tokens=0)
    answer = dataclasses.replace(case, decoding=shorter).full().generate_again().tokens[0]
    fed = [*case.question, *answer]

    def watch(cache: EvictionCache) -> None:
        for state in cache.layer_states:
            assert isinstance(state, EvictionLayer)
            state.backend = backend_of(state.backend, profile)

    context = case.prefill_prompt(watch, config)
    states = [state for state in context.cache.layer_states if isinstance(state, EvictionLayer)]
    if len({state.require_slots().keys.shape[1] for state in states}) != 1:
        raise ConfigError("traces need layers of one number of kv heads")
    if any(isinstance(state.backend, ProfiledEviction) and state.backend.noted is None for state in states):
        raise ConfigError("the prompt fits into the budget, so nothing is evicted: lower kv_ratio (or budget.tokens)")
    prompt, steps, logits = _slots(states), [], [context.logits[-1]]
    for number, token in enumerate(fed):
        at = torch.tensor([[len(case.prompt) + number]], device=context.ids.device)
        logits.append(decode_step(case.model, torch.full_like(at, token), at, context.cache)[-1])
        steps.append(_slots(states))
    made = {"tokens": np.array([*case.prompt, *fed], dtype=np.int32)}
    made |= {f"prompt_{name}": values for name, values in _prompt(prompt, len(case.prompt)).items()}
    made |= {f"step_{name}": values for name, values in _steps(steps).items()}
    return made | _tops(logits) | {"header": _header(case, profile, states, len(fed), model, logits)}


def _slots(states: list[EvictionLayer]) -> list[SlotsBefore]:
    """What every layer's latest forward found and kept."""
    found = []
    for state in states:
        assert isinstance(state.backend, ProfiledEviction)
        found.append(state.backend.take(state.require_slots()))
    return found


def _prompt(layers: list[SlotsBefore], tokens: int) -> dict[str, np.ndarray]:
    """Arrays [L, H, S] by position: after a prompt slot = position."""
    for layer in layers:
        assert layer.positions.shape[1] == tokens, "the first eviction sees the prompt in order"
    return {
        "scores": torch.stack([layer.scores for layer in layers]).numpy(),
        "protected": torch.stack([layer.protected for layer in layers]).numpy(),
        "kept": torch.stack([layer.kept for layer in layers]).numpy(),
    }


def _steps(steps: list[list[SlotsBefore]]) -> dict[str, np.ndarray]:
    """Arrays [T, L, H, C]; shorter ones end in empty slots."""
    width = max(layer.positions.shape[1] for layers in steps for layer in layers)
    fill = {"positions": -1, "scores": 0, "protected": False, "kept": False}
    made = {}
    for name, empty in fill.items():
        each = [[getattr(layer, name) for layer in layers] for layers in steps]
        padded = [[torch.nn.functional.pad(one, (0, width - one.shape[1]), value=empty) for one in row] for row in each]
        made[name] = torch.stack([torch.stack(row) for row in padded]).numpy()
    return made | {"positions": made["positions"].astype(np.int32)}


def _tops(logits: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """The likeliest tokens of every prediction, [T + 1, TOP]."""
    best = torch.stack(logits).float().log_softmax(-1).topk(TOP)
    return {"top_ids": best.indices.to(torch.int32).cpu().numpy(), "top_logprobs": best.values.cpu().numpy()}


def _header(
    case: Case, profile: str, states: list[EvictionLayer], steps: int, model: dict[str, Any], logits: list[torch.Tensor]
) -> dict[str, Any]:
    budgets = [state.resolved_budget for state in states]
    config = states[0].config
    return {
        "format": "kvexp-trace",
        "version": VERSION,
        "profile": profile,
        "block": BLOCK if profile == "paged" else None,
        "keep": [budget.keep[0] for budget in budgets if budget is not None],
        "evicts_while_decoding": config.evict_every is not None,
        "prompt_tokens": len(case.prompt),
        "question_tokens": len(case.question),
        "steps": steps,
        "layers": len(states),
        "heads": int(states[0].require_slots().keys.shape[1]),
        "method": {"name": config.method.name, **dataclasses.asdict(config.method)},
        "seed": case.seed,
        "model": model,
        "numerics": NUMERICS,
        "logits_sha256": [hashlib.sha256(each.float().cpu().numpy().tobytes()).hexdigest() for each in logits],
    }


def write_trace(trace: dict[str, Any], file: Path) -> None:
    """Write the arrays compressed, the header as JSON in bytes."""
    header = np.frombuffer(json.dumps(trace["header"], sort_keys=True).encode(), dtype=np.uint8)
    arrays = {name: values for name, values in trace.items() if name != "header"}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        np.savez_compressed(out, header=header, **arrays)
