"""Traces of an eviction method for engines: what it scored, kept and dropped, step by step, layer by layer.

`kvexp export trace` writes them; `trace_check`, which needs nothing but numpy, reads and checks them (docs/ports.md). A
profile says how an engine's memory lets tokens be dropped. per_head: every kv head drops its
own tokens, and a new token takes the slot of a dropped one. union: the heads of a layer hold the same tokens. paged:
the heads of a layer share a table of pages, which stay or go whole. append_only: nothing is dropped after the prompt,
and new tokens are appended. `trace_check.chosen` says the same rules in numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp import NUMERICS
from kvexp.core import CacheConfig, Cadence, EvictionLayer
from kvexp.core.backends import Mask, RecordingBackend, SlotsBefore, held_slots
from kvexp.core.budget_resolution import LayerSlots
from kvexp.core.ranking import RankedSlots
from kvexp.core.slots import Slots
from kvexp.diagnose.case import Case
from kvexp.engines.trace_check import PROFILES, VERSION, check_rules, chosen
from kvexp.generate.prefill import decode_step
from kvexp.hf import EvictionCache
from kvexp.util.errors import CacheError, ConfigError, Rule, refuse
from kvexp.util.output import say, tells_errors

TRACE_DOC = """kvexp export trace RUN EXAMPLE...: what a method scored, kept and dropped, step by step, to check another
engine's port of it (docs/ports.md)."""


@tells_errors(ConfigError, CacheError, OSError)
def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if the request cannot work."""
    say(made(parser().parse_args(argv)))
    return 0


def made(args: argparse.Namespace) -> str:
    """Write the traces that were asked for; returns a line on each."""
    from kvexp.diagnose.case import cases, opened
    from kvexp.diagnose.options import check_diagnosable
    from kvexp.run.batches import settings_at

    number = len(args.example) * len(args.profile)
    if args.new_tokens < 1:
        raise ConfigError(f"--new-tokens must be at least 1, got {args.new_tokens}")
    if args.out.suffix not in (".npz", "") or (args.out.suffix and number > 1):
        raise ConfigError(f"--out must be a folder, or end in .npz for one trace; got {args.out} for {number}")
    chosen_rows = [opened(args.run, example) for example in args.example]
    run, _ = chosen_rows[0]
    settings = settings_at(run)
    check_diagnosable(settings)
    for profile in args.profile:
        profiled(settings.cache, profile)
    lines = []
    for row, case, _ in cases(settings, [row for _, row in chosen_rows]):
        known = {"name": settings.labels["model"], "family": case.model.config.model_type}
        for profile in args.profile:
            trace = trace_of(case, profile, args.new_tokens, settings.model.identity() | known)
            if broken := check_rules(trace):
                raise CacheError(f"the trace does not follow its own rules, which is a bug of kvexp: {broken[0]}")
            header = trace["header"]
            name = header["method"]["name"]
            file = args.out if args.out.suffix else args.out / f"{name}_{profile}_{row['index']}.npz"
            write_trace(trace, file)
            lines.append(
                f"wrote {file} ({file.stat().st_size / 1024:.0f} KiB): {name}, profile {profile}, {header['layers']} "
                f"layers, {header['heads']} kv heads, {header['prompt_tokens']} prompt tokens, {header['steps']} steps"
            )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp export trace", description=TRACE_DOC)
    add = result.add_argument
    add("run", metavar="RUN", help="a run: its folder outputs/HASH, or outputs@LABEL=VALUE,... where that is one run")
    add("example", metavar="EXAMPLE", nargs="+", help="id of an example, its beginning, or its index")
    profiles = f"how memory lets tokens be dropped: {', '.join(PROFILES)} (default: per_head)"
    add("--profile", metavar="NAME", choices=PROFILES, nargs="+", default=["per_head"], help=profiles)
    add("--new-tokens", type=int, default=32, metavar="N", help="steps: of the full cache's answer (default: 32)")
    out = "a file .npz (default: trace.npz), or a folder for METHOD_PROFILE_INDEX.npz"
    add("--out", type=Path, default=Path("trace.npz"), metavar="FILE", help=out)
    return result


BLOCK = 16  # tokens of a page, as in vLLM


class LayerTrace:
    """One layer of one row whose evictions are traced under a profile.

    latest: the latest eviction since `take`, None without one.
    """

    def __init__(self, state: EvictionLayer, profile: str) -> None:
        self.state = state
        self.latest: SlotsBefore | None = None
        inner = Paged() if profile == "paged" else state.backend
        state.backend = RecordingBackend(inner, self._note, partial(_profiled_priority, profile))

    def _note(self, eviction: SlotsBefore) -> None:
        self.latest = eviction

    def take(self) -> dict[str, Tensor]:
        """The slots [H, C] that the forward which has just ended found, and what it kept; without an eviction, all."""
        evicted, self.latest = self.latest, None
        if evicted is None:
            slots = self.state.require_slots()
            held, score = held_slots(slots), slots.score[:, :, : slots.length]
            positions = slots.positions[:, :, : slots.length].masked_fill(~held, -1)
            evicted = SlotsBefore(held, positions, score, torch.zeros_like(held), held)
        columns = {"positions": evicted.positions, "scores": evicted.priority.float(), "protected": evicted.protected}
        return {name: values[0].cpu() for name, values in (columns | {"kept": evicted.kept}).items()}


def _profiled_priority(profile: str, priority: Tensor, held: Tensor) -> Tensor:
    """The priority [B, H, S] that a profile evicts by, -inf where nothing is held."""
    shared = priority.masked_fill(~held, -torch.inf)
    if profile == "union":  # the heads of a layer hold the same tokens in the same slots
        shared = shared.double().mean(1, keepdim=True).float().expand_as(shared)
    return shared


class Paged(Mask):
    """Mode mask with whole pages of BLOCK positions dropped, by the rule of `trace_check.chosen`; for one row."""

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        assert slots.visible is not None
        positions = slots.positions[0, :, : slots.length].masked_fill(~held_slots(slots)[0], -1)
        scores, places, protected = (x.cpu().numpy() for x in (ranked.priority[0], positions, ranked.protected[0]))
        rule = chosen(scores, places, protected, allowed.kept[0], "paged", BLOCK)
        keep = torch.tensor(rule, device=positions.device)
        slots.visible[0, :, : slots.length] = keep
        slots.score[0, :, : slots.length].masked_fill_(~keep, -torch.inf)


REFUSED: tuple[Rule[CacheConfig], ...] = (
    (
        lambda c: not c.method.evicts or c.drops_nothing,
        "method {c.method.name} evicts nothing: there is no eviction to trace",
    ),
    (
        lambda c: c.simulation_only or (c.method.score_spec is not None and c.method.score_spec.over == "full"),
        "method {c.method.name} exists as a simulation only, which no engine could follow",
    ),
    (lambda c: c.rewritten, "method {c.method.name} puts other numbers into kept slots, which a trace does not hold"),
    (lambda c: c.renumbered, "traces are of original positions: set cache.positions=original"),
)


def profiled(config: CacheConfig, profile: str) -> CacheConfig:
    """The configuration of a cache as the profile needs it; ConfigError for a method that cannot be traced."""
    refuse(config, REFUSED)
    if config.is_ragged:
        assert config.budget is not None
        remedy = f"{config.budget.heads_remedy}{' or union' if config.budget.threshold is None else ''}"
        raise ConfigError(f"heads with budgets of their own have no profile yet: {remedy}")
    if profile == "paged":
        return dataclasses.replace(config, mode="mask")
    if profile == "append_only" and config.method.evicts_while_decoding:
        return dataclasses.replace(config, mode="compact", cadence=Cadence(at_prefill=True, every=None))
    return dataclasses.replace(config, mode="compact" if profile == "append_only" else "overwrite")


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

    traced: list[LayerTrace] = []

    def watch(cache: EvictionCache) -> None:
        traced.extend(LayerTrace(state, profile) for state in cache.layer_states if isinstance(state, EvictionLayer))

    context = case.prefill_prompt(watch, config)
    states = [layer.state for layer in traced]
    if len({state.require_slots().keys.shape[1] for state in states}) != 1:
        raise ConfigError("traces need layers of one number of kv heads")
    if any(layer.latest is None for layer in traced):
        raise ConfigError("the prompt fits into the budget, so nothing is evicted: lower kv_ratio (or budget.tokens)")
    prompt, steps, logits = [layer.take() for layer in traced], [], [context.logits[-1]]
    for number, token in enumerate(fed):
        at = torch.tensor([[len(case.prompt) + number]], device=context.ids.device)
        logits.append(decode_step(case.model, torch.full_like(at, token), at, context.cache)[-1])
        steps.append([layer.take() for layer in traced])
    arrays = {"tokens": np.array([*case.prompt, *fed], dtype=np.int32)}
    arrays |= {f"prompt_{name}": values for name, values in _prompt(prompt, len(case.prompt)).items()}
    arrays |= {f"step_{name}": values for name, values in _steps(steps).items()}
    return arrays | _tops(logits) | {"header": _header(case, profile, states, len(fed), model, logits)}


def _prompt(layers: list[dict[str, Tensor]], tokens: int) -> dict[str, np.ndarray]:
    """Arrays [L, H, S] by position: after a prompt slot = position."""
    assert all(layer["positions"].shape[1] == tokens for layer in layers), "the first eviction sees the prompt in order"
    return {name: torch.stack([layer[name] for layer in layers]).numpy() for name in ("scores", "protected", "kept")}


def _steps(steps: list[list[dict[str, Tensor]]]) -> dict[str, np.ndarray]:
    """Arrays [T, L, H, C]; shorter ones end in empty slots."""
    width = max(layer["positions"].shape[1] for layers in steps for layer in layers)
    arrays = {}
    for name, empty in {"positions": -1, "scores": 0, "protected": False, "kept": False}.items():
        padded = [[pad(layer[name], (0, width - layer[name].shape[1]), value=empty) for layer in row] for row in steps]
        arrays[name] = torch.stack([torch.stack(row) for row in padded]).numpy()
    return arrays | {"positions": arrays["positions"].astype(np.int32)}


def _tops(logits: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """The likeliest tokens of every prediction, [T + 1, TOP]."""
    best = torch.stack(logits).float().log_softmax(-1).topk(TOP)
    return {"top_ids": best.indices.to(torch.int32).cpu().numpy(), "top_logprobs": best.values.cpu().numpy()}


def _header(
    case: Case, profile: str, states: list[EvictionLayer], steps: int, model: dict[str, Any], logits: list[torch.Tensor]
) -> dict[str, Any]:
    budgets = [state.layer_slots for state in states]
    config = states[0].config
    return {
        "format": "kvexp-trace",
        "version": VERSION,
        "profile": profile,
        "block": BLOCK if profile == "paged" else None,
        "keep": [budget.kept[0] for budget in budgets if budget is not None],
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
        "logits_sha256": [hashlib.sha256(row.float().cpu().numpy().tobytes()).hexdigest() for row in logits],
    }


def write_trace(trace: dict[str, Any], file: Path) -> None:
    """Write the arrays compressed, the header as JSON in bytes."""
    header = np.frombuffer(json.dumps(trace["header"], sort_keys=True).encode(), dtype=np.uint8)
    arrays = {name: values for name, values in trace.items() if name != "header"}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        np.savez_compressed(out, header=header, **arrays)
