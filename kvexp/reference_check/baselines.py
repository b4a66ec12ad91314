"""Files with PQCache's baselines: SparQ as run there and as its authors wrote it, H2O with sinks, Oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.methods import H2OC
from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording
from kvexp.reference_check.streams import Streams, streams
from kvexp.retrieval import Oracle, SparQ
from kvexp.retrieval.query import RetrievalQuery

_TIGHT = 1e-5


@dataclass(frozen=True)
class _RecordedSelections(SparQ):
    """Notes its scores."""

    noted: list[Tensor] = field(default_factory=list, compare=False)

    def approximate(self, asked: RetrievalQuery) -> Tensor:
        dots = super().approximate(asked)
        self.noted.append(asked.logits(dots, past=True).flatten(1, 2)[0])
        return dots


def check(archive: Recording, report: Report) -> None:
    """Choices exactly; weights, scores and outputs within 1e-5."""
    whole = streams(archive)
    for name in sorted({name.rsplit("_", 1)[0] for name in archive if name.startswith("sparq") and "idx" in name}):
        _check_sparq(archive, report, whole, name)
    if "oracle_out" in archive:
        sink, count = int(archive["sink"]), int(archive["oracle_budget"])
        kept: list[np.ndarray] = []
        method = Oracle(n_sinks=sink, recent_ratio=int(archive["oracle_local"]) / count)
        out = whole.run(method, sink + count, lambda state, _: kept.append(_attended(state, whole)))
        _compare(archive, report, "oracle", whole, out, _by_layer(kept, whole))
    if "h2o_out" in archive:
        _check_h2o(archive, report, whole)


def _check_sparq(archive: Recording, report: Report, whole: Streams, name: str) -> None:
    """name: sparq_r<r>_mv<0 or 1>, or that with _official."""
    _, r, mean, *official = name.split("_")
    noted: list[Tensor] = []
    kept: list[np.ndarray] = []
    sink = 0 if official else int(archive["sink"])
    count = int(archive["prompt"] * archive["ratio"])
    method = _RecordedSelections(r=int(r[1:]), mean_value=mean == "mv1", n_sinks=sink, noted=noted)
    out = whole.run(method, sink + count + 1, lambda state, _: kept.append(_attended(state, whole)))
    masks = _by_layer(kept, whole)
    if not official:
        width = whole.q.shape[3]
        table = torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=torch.nan) for x in noted])
        theirs = archive[f"{name}_approx_logits"]
        ours = table.unflatten(0, (len(masks), -1))
        if ours.shape[2] > theirs.shape[2]:  # recorded as what the choice is made by: summed over a query group
            ours = ours.unflatten(2, (theirs.shape[2], -1)).sum(3)
        report.close(f"{name}_approx_logits", ours.reshape(theirs.shape).numpy(), theirs)
        steps = np.arange(masks.shape[1]) + whole.prompt
        masks[:, np.arange(len(steps)), :, steps] = False  # the current token is not among those recorded
    theirs = archive[f"{name}_idx"]
    masks = masks.repeat(theirs.shape[2] // masks.shape[2], axis=2)
    report.exact(f"{name}_idx", _indices(masks, theirs.shape), np.sort(theirs, -1))
    report.close(f"{name}_out", out[:, whole.prompt :], archive[f"{name}_out"], _TIGHT)


def _check_h2o(archive: Recording, report: Report, whole: Streams) -> None:
    sink, heavy, recent = (int(archive[name]) for name in ("sink", "h2o_heavy", "h2o_recent"))
    method = H2OC(n_sinks=sink, recent_ratio=recent / (heavy + recent), compensation="none")
    scores: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    total = whole.q.shape[3]

    def note(state: Any, _: int) -> None:
        slots = state.slots
        positions, score = slots.positions[0, :, : slots.length], slots.score[0, :, : slots.length]
        table = torch.zeros(positions.shape[0], total + 1).scatter_(
            1, torch.where(positions < 0, total, positions), score
        )
        scores.append(table[:, :total].numpy())
        mask = np.zeros((positions.shape[0], total), bool)
        for head, held in enumerate(state.kept_positions()[0]):
            mask[head, held] = True
        kept.append(mask)

    out = whole.run(method, sink + heavy + recent + 1, note)
    steps = total - whole.prompt
    masks = np.stack(kept).reshape(-1, steps + 1, *kept[0].shape)[:, :-1]
    masks[:, np.arange(steps), :, np.arange(steps) + whole.prompt] = True
    _compare(archive, report, "h2o", whole, out, masks)
    theirs = archive["h2o_scores"]
    ours = np.stack(scores).reshape(-1, steps + 1, *scores[0].shape)
    report.close("h2o_scores", ours.repeat(theirs.shape[2] // ours.shape[2], axis=2), theirs)


def _compare(archive: Recording, report: Report, name: str, whole: Streams, out: np.ndarray, masks: np.ndarray) -> None:
    """masks [L, steps, H, T]: what each step attended to; the recorded weights are those of the query heads."""
    group = whole.q.shape[2] // whole.k.shape[2]
    seen = torch.from_numpy(masks).repeat_interleave(group, dim=2)
    q, k = whole.q[:, 0, :, whole.prompt :], whole.k[:, 0].repeat_interleave(group, dim=1)
    x = torch.einsum("lhqd,lhkd->lqhk", q, k) * q.shape[-1] ** -0.5
    weights = torch.softmax(x.masked_fill(~seen, -torch.inf), dim=-1)
    theirs = archive[f"{name}_weights"]
    report.exact(f"{name}: attended", seen.numpy(), np.nan_to_num(theirs) > 0)
    report.close(f"{name}_weights", weights.numpy(), np.nan_to_num(theirs), _TIGHT)
    report.close(f"{name}_out", out[:, whole.prompt :], archive[f"{name}_out"], _TIGHT)


def _attended(state: Any, whole: Streams) -> np.ndarray:
    """[H, T] bool: what the newest token attended to."""
    mask = torch.zeros(whole.k.shape[2], whole.q.shape[3] + 1, dtype=torch.bool)
    if state.selection_stats.attended is not None:
        positions = state.selection_stats.attended[0]
        mask.scatter_(1, torch.where(positions < 0, whole.q.shape[3], positions), True)
    return mask[:, :-1].numpy()


def _by_layer(kept: list[np.ndarray], whole: Streams) -> np.ndarray:
    """[L, steps, H, T] of what was noted after every forward, the prompt's left out."""
    return np.stack(kept).reshape(whole.q.shape[0], -1, *kept[0].shape)[:, 1:]


def _indices(masks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Masks [..., T] as ascending indices, -1 where the number is not that of `shape`."""
    result = np.full(shape, -1)
    for place in np.ndindex(*masks.shape[:-1]):
        found = np.flatnonzero(masks[place])
        result[place][: len(found)] = found[: shape[-1]]
    return result
