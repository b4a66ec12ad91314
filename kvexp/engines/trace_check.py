"""Read and check traces of `kvexp export trace`. This file needs Python and numpy alone: an engine can copy it.

    python trace_check.py REFERENCE.npz              does the reference follow its own rules?
    python trace_check.py REFERENCE.npz ENGINE.npz   does an engine keep the same tokens?

A trace is an .npz without pickled objects. T steps follow a prompt of S tokens; L layers, H kv heads, C slots.

    header          JSON as bytes. profile, one of PROFILES; block: tokens of a page (profile paged); keep: per layer,
                    tokens held after an eviction (profile paged: what whole pages have to fit into);
                    evicts_while_decoding: false where only the end of the prompt evicts; prompt_tokens S, steps T,
                    layers L, heads H (kv heads); method: name and settings; model: name, family and digest of the
                    weights; logits_sha256: of each prediction's float32 logits, which the same machine and library
                    repeat
    tokens          [S + T]     token ids: the prompt, then the tokens fed one by one, whatever was predicted
    prompt_scores   [L, H, S]   float32, by position, at the end of the prompt, before its eviction: higher stays longer
    prompt_protected, prompt_kept   [L, H, S] bool: kept whatever their score; held after the eviction
    step_positions  [T, L, H, C]    int32: the position id in every slot after the step's token was written, -1: empty
    step_scores, step_protected, step_kept   [T, L, H, C]: of these slots, before and after the step's eviction
    top_ids, top_logprobs  [T + 1, 8]   the likeliest next tokens after the prompt and after every step

A slot that holds a position and is not in step_kept was evicted by that step. Of an engine's trace `tokens` and what is
kept are needed: prompt_kept and either step_positions with step_kept or step_held [T, L, H, K], the positions held
after each step in any order, padded with -1. Scores and top_logprobs are compared where it has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
PROFILES = ("per_head", "union", "paged", "append_only")
Trace = dict[str, Any]


class TraceError(ValueError):
    """A file that is no trace, or lacks what a check needs."""


def read_trace(path: str | Path) -> Trace:
    """The arrays of a trace by name, and its header as a dict under "header"; TraceError for anything else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            trace: Trace = {name: file[name] for name in file.files}
        trace["header"] = json.loads(bytes(trace["header"]).decode("utf-8")) if "header" in trace else {}
    except (OSError, ValueError, KeyError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is no trace: {error}") from error
    for name in ("tokens", "prompt_kept"):
        if name not in trace:
            raise TraceError(f"{path} has no array {name!r}; it has {', '.join(sorted(trace))}")
    if "step_held" not in trace and not {"step_positions", "step_kept"} <= set(trace):
        raise TraceError(f"{path} has neither step_held nor step_positions with step_kept")
    return trace


def held(trace: Trace, step: int, layer: int, head: int) -> list[int]:
    """Positions held after a step, ascending; step -1: after the prompt."""
    if step < 0:
        return [int(at) for at in np.flatnonzero(trace["prompt_kept"][layer, head])]
    if "step_held" in trace:
        positions = trace["step_held"][step, layer, head]
    else:
        positions = trace["step_positions"][step, layer, head]
        positions = positions[trace["step_kept"][step, layer, head]]
    return sorted(int(at) for at in positions if at >= 0)


def chosen(
    scores: np.ndarray, positions: np.ndarray, protected: np.ndarray, keep: int, profile: str, block: int
) -> Any:
    """The rule: which slots [H, C] bool are held after an eviction of one layer.

    scores, positions, protected [H, C] of the slots before it; positions -1: empty. Protected tokens come first, then
    higher scores; of equals the newer stays. per_head and append_only: every head by its own scores. union: all heads
    hold the same tokens, by the mean of their scores. paged: likewise, and whole pages of `block` positions stay
    or go, by the mean of their tokens; one with a protected token stays; at most keep // block pages, or the protected.
    """
    scores = np.nan_to_num(scores.astype(np.float32), nan=-np.inf)
    if profile in ("union", "paged"):
        scores = np.broadcast_to(scores.astype(np.float64).mean(0).astype(np.float32), scores.shape)
    if profile == "paged":
        return _pages(scores, positions, protected, keep, block)
    kept = np.zeros(positions.shape, dtype=bool)
    for head in range(len(positions)):
        live = np.flatnonzero(positions[head] >= 0)
        keys = [(not protected[head, at], -scores[head, at], -positions[head, at]) for at in live]
        kept[head, [live[i] for i in sorted(range(len(live)), key=keys.__getitem__)[:keep]]] = True
    return kept


def _pages(scores: np.ndarray, positions: np.ndarray, protected: np.ndarray, keep: int, block: int) -> np.ndarray:
    live, page = positions[0] >= 0, positions[0] // block
    order = []
    for number in sorted(set(page[live].tolist())):
        mine = live & (page == number)
        mean = np.float32(scores[0, mine].astype(np.float64).mean())
        order.append((not bool(protected[0, mine].any()), -float(mean), -number))
    needed = sum(not free for free, _, _ in order)
    stay = {-number for _, _, number in sorted(order)[: max(keep // block, needed)]}
    kept = live & np.isin(page, sorted(stay))
    return np.broadcast_to(kept, positions.shape)


def check_rules(trace: Trace) -> list[str]:
    """What in a reference does not follow from its own scores, a line each; TraceError where it has no scores."""
    header = trace["header"]
    for name in ("profile", "keep", "steps", "layers", "evicts_while_decoding"):
        if name not in header:
            raise TraceError(f"the header has no {name}: only a trace of kvexp can be checked against its own scores")
    for name in ("prompt_scores", "prompt_protected", "step_scores", "step_protected"):
        if name not in trace:
            raise TraceError(f"the trace has no array {name!r}, by which its own rules are checked")
    rule = (header["profile"], int(header.get("block") or 1))
    problems = []
    for layer in range(header["layers"]):
        keep = int(header["keep"][layer])
        scores = trace["prompt_scores"][layer]
        positions = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        wanted = chosen(scores, positions, trace["prompt_protected"][layer], keep, *rule)
        if not np.array_equal(wanted, trace["prompt_kept"][layer]):
            problems.append(f"layer {layer}: the prompt's eviction is not the one its scores ask for")
        for step in range(header["steps"]):
            positions, kept = trace["step_positions"][step, layer], trace["step_kept"][step, layer]
            scores, protected = trace["step_scores"][step, layer], trace["step_protected"][step, layer]
            wanted = positions >= 0
            if header["evicts_while_decoding"]:
                wanted = chosen(scores, positions, protected, keep, *rule)
            if not np.array_equal(wanted, kept):
                problems.append(f"layer {layer}, step {step}: the eviction is not the one its scores ask for")
            for head in range(len(positions)):
                before = set(held(trace, step - 1, layer, head)) | {header["prompt_tokens"] + step}
                present = {int(at) for at in positions[head] if at >= 0}
                if present != before:
                    problems.append(f"layer {layer}, head {head}, step {step}: slots hold what was not kept before")
    return problems


def differences(reference: Trace, other: Trace, score_rtol: float = 1e-3, logprob_atol: float = 1e-2) -> list[str]:
    """Differences of an engine from the reference, the earliest first, a line each; empty: it conforms.

    A token kept in place of one whose score is as near as score_rtol (relative) is no difference: floating-point sums
    differ between engines. Steps after such a swap are compared only up to the tokens swapped. TraceError for a trace
    whose header names another profile.
    """
    if not np.array_equal(reference["tokens"], other["tokens"]):
        return ["the tokens fed are not the reference's: feed header's prompt and steps as they are"]
    header = reference["header"]
    profile = other.get("header", {}).get("profile", header["profile"])
    if profile != header["profile"]:
        raise TraceError(f"the reference is of profile {header['profile']}, the other trace of {profile}: compare like")
    shape = (header["layers"], header["heads"], header["prompt_tokens"])
    if other["prompt_kept"].shape != shape:
        return [f"prompt_kept has the shape {other['prompt_kept'].shape}, not [layers, heads, prompt tokens] = {shape}"]
    lines = []
    swapped: dict[tuple[int, int], set[int]] = {}
    for step in range(-1, header["steps"]):
        for layer in range(header["layers"]):
            for head in range(header["heads"]):
                ours, theirs = (set(held(trace, step, layer, head)) for trace in (reference, other))
                known = swapped.setdefault((layer, head), set())
                lost, extra = ours - theirs - known, theirs - ours - known
                if not lost and not extra:
                    continue
                if _near(reference, step, layer, head, lost, extra, score_rtol):
                    known |= lost | extra
                    continue
                when = "after the prompt" if step < 0 else f"after step {step}"
                lines.append(f"{when}, layer {layer}, head {head}: lacks {sorted(lost)}, holds {sorted(extra)} instead")
    return lines + _scores(reference, other, score_rtol) + _logprobs(reference, other, logprob_atol)


def _near(trace: Trace, step: int, layer: int, head: int, lost: set[int], extra: set[int], rtol: float) -> bool:
    """Whether all of these tokens have scores so near that rounding may have chosen."""
    if "prompt_scores" not in trace or len(lost) != len(extra):
        return False
    if step < 0:
        by_position = dict(enumerate(trace["prompt_scores"][layer, head].tolist()))
    else:
        positions, scores = trace["step_positions"][step, layer, head], trace["step_scores"][step, layer, head]
        by_position = {int(at): float(score) for at, score in zip(positions, scores, strict=True)}
    values = [by_position.get(at) for at in lost | extra]
    if any(value is None for value in values):
        return False
    low, high = min(values), max(values)  # type: ignore[type-var]
    return bool(high - low <= rtol * max(abs(low), abs(high)))  # type: ignore[operator, arg-type]


def _scores(reference: Trace, other: Trace, rtol: float) -> list[str]:
    if "prompt_scores" not in other:
        return []
    ours, theirs = reference["prompt_scores"], other["prompt_scores"]
    if theirs.shape != ours.shape:
        return [f"prompt_scores has the shape {theirs.shape}, not {ours.shape}"]
    count = int((~np.isclose(theirs, ours, rtol=rtol, atol=1e-6) & np.isfinite(ours)).sum())
    return [f"{count} of {ours.size} scores of the prompt differ by more than {rtol:g}"] if count else []


def _logprobs(reference: Trace, other: Trace, atol: float) -> list[str]:
    if "top_ids" not in other or "top_logprobs" not in other:
        return []
    for step, (ours, theirs) in enumerate(zip(reference["top_logprobs"], other["top_logprobs"], strict=True)):
        known = dict(zip(other["top_ids"][step].tolist(), theirs.tolist(), strict=True))
        best = int(reference["top_ids"][step][0])
        if best not in known or abs(known[best] - float(ours[0])) > atol:
            when = "the prompt" if step == 0 else f"step {step - 1}"
            return [f"after {when}, token {best} has log-probability {float(ours[0]):.4f}, here {known.get(best)}"]
    return []


SHOWN = 20  # differences that are printed


def main(files: list[str]) -> int:
    """0: conforms, 1: differs (each difference a line, up to SHOWN), 2: cannot be checked."""
    if len(files) not in (1, 2) or files[0].startswith("-"):
        print("usage: trace_check.py REFERENCE.npz [ENGINE.npz]", file=sys.stderr)
        return 2
    try:
        traces = [read_trace(file) for file in files]
        problems = check_rules(traces[0]) if len(traces) == 1 else differences(traces[0], traces[1])
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in problems[:SHOWN]:
        print(line)
    if len(problems) > SHOWN:
        print(f"... and {len(problems) - SHOWN} more")
    header = traces[0]["header"]
    verdict = "follows its own rules" if len(traces) == 1 else "keeps what the reference keeps"
    sizes = f"{header.get('prompt_tokens')} prompt tokens, {header.get('steps')} steps, profile {header.get('profile')}"
    print(f"{files[-1]}: {f'{len(problems)} differences' if problems else verdict} ({sizes})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
