"""Files with InfLLM as released: prefill block by block, clamped positions, whole blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording
from kvexp.reference_check.streams import Streams, streams
from kvexp.retrieval import InfLLM, infllm_blocks

_TIGHT = 1e-5


class _BlockTap:
    """Notes which blocks every chunk of the prompt chose."""

    def __init__(self) -> None:
        self.real, self.chosen = infllm_blocks.distant_slots, []  # type: ignore[var-annotated]

    def __enter__(self) -> _BlockTap:
        infllm_blocks.distant_slots = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        infllm_blocks.distant_slots = self.real

    def __call__(self, method: InfLLM, inputs: Any, rows: slice, count: int, *others: Any) -> Tensor:
        found = self.real(method, inputs, rows, count, *others)
        self.chosen.append(_numbers(method, found[0], count))
        return found


def _numbers(method: InfLLM, slots: Tensor, count: int) -> list[list[int]]:
    """Slots [H, N] -> per head the blocks they lie in, of the first `count` ones."""
    rows = []
    for head in slots.tolist():
        inside = {(p - method.n_sinks) // method.block for p in head if p >= method.n_sinks}
        rows.append(sorted(b for b in inside if b < count))
    return rows


def check(archive: Recording, report: Report) -> None:
    """Both ways of choosing: one for all heads, one per query head."""
    whole = streams(archive, "q_pre_rope k_pre_rope v")
    for prefix, choice in (("perhead0", "shared"), ("perhead1", "query_head")):
        if f"{prefix}_out" in archive:
            _check(archive, report, whole, prefix, choice)


def _check(archive: Recording, report: Report, whole: Streams, prefix: str, choice: str) -> None:
    sinks, size = int(archive["n_init"]), int(archive["block"])
    granted = int((whole.prompt - sinks) * float(archive["ratio"]))
    method = InfLLM(
        n_sinks=sinks,
        recent_ratio=float(archive["local_ratio"]),
        block=size,
        choice=choice,  # type: ignore[arg-type]
        rounding="blocks",
        prefill="blockwise",
        far_positions="clamped",
        chunk=int(archive["exc_block"] if "exc_block" in archive else archive["exc"]),
        cache_tokens=4 * size,
    )
    chosen: list[list[list[list[int]]]] = [[] for _ in range(whole.q.shape[0])]
    ends: dict[int, Any] = {}

    def note(state: Any, layer: int) -> None:
        ends[layer] = state
        if state.selection_stats.attended is None:
            chosen[layer] += tap.chosen
            tap.chosen = []
            return
        length, local = state.memory.lengths[0], state.memory.config.local[0]
        chosen[layer].append(
            _numbers(method, state.selection_stats.attended[0], max(0, length - 2 - local - sinks) // size)
        )

    with _BlockTap() as tap:
        out = whole.run(method, sinks + granted, note)
    theirs = archive[f"{prefix}_selected_blocks"]
    ours = np.full(theirs.shape, -1)
    for layer, steps in enumerate(chosen):
        for step, heads in enumerate(steps):
            for unit in range(theirs.shape[2]):
                ours[layer, step, unit, : len(heads[unit])] = heads[unit]
    report.exact(f"{prefix}_selected_blocks", ours, theirs)
    report.close(f"{prefix}_out", out, archive[f"{prefix}_out"], _TIGHT)
    local, taken = ends[0].resolved_budget.recent[0], ends[0]._num_to_select()[0]
    end = max(0, ends[0].memory.lengths[0] - 1 - local - sinks) // size
    for name, value in (
        ("n_local", local + 1),
        ("topk_blocks", -(-taken // size)),
        ("n_prefill_chunks", sum(len(x) for x in chosen) // len(chosen) - (whole.q.shape[3] - whole.prompt)),
        ("blocks_after_prefill", max(0, whole.prompt - 1 - local - sinks) // size),
        ("blocks_end", end),
    ):
        if f"{prefix}_{name}" in archive:
            report.exact(f"{prefix}_{name}", value, archive[f"{prefix}_{name}"])
    keys = torch.stack([ends[layer].kv_index["repr"][0, :, :end] for layer in sorted(ends)])  # [L, H, n, G, D]
    keys = keys.transpose(2, 3).flatten(1, 2)
    theirs = archive[f"{prefix}_repr_keys_end"]
    if theirs.shape[1] == 1 and keys.shape[1] != 1:
        keys = keys.transpose(1, 2).flatten(2)[:, None]
    report.close(f"{prefix}_repr_keys_end", keys.numpy(), theirs, _TIGHT)
