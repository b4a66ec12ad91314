"""Files with PQCache's product quantisation: codes, approximate scores, choices and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording
from kvexp.reference_check.streams import streams
from kvexp.retrieval import PQCache
from kvexp.retrieval.kmeans import init_rows
from kvexp.retrieval.pqcache import dots
from kvexp.retrieval.query import RetrievalQuery, Selection, reduce_group

_TIGHT = 1e-5
# In half precision: two steps between neighbouring numbers near 1; eight times that for sums over a head's width.
_HALF, _HALF_SUMS = 2.0**-9, 2.0**-6


@dataclass(frozen=True)
class _Replayed(PQCache):
    """Breaks ties as recorded: tokens with the same codes score the same, and the release leaves those to `topk`.

    A recorded token is preferred to another of the same score and to no other, so a wrong score still shows. half:
    scores are rounded to half precision before they are compared, so that those tie that tied when this was recorded.
    """

    recorded: np.ndarray | None = None  # [steps, H, N], less the sinks, of the layer in progress
    recorded_exact: np.ndarray | None = None  # the same of the choice by the keys themselves
    half: bool = False
    first: int = 0  # position of the first step
    total: int = 0  # positions in all
    notes: dict[str, list[Any]] = field(default_factory=dict, compare=False)

    def select(self, asked: RetrievalQuery) -> Selection:
        assert self.recorded is not None
        x = dots(asked.query, asked.index["centroids"], asked.index["codes"][:, :, : asked.memory.length])
        rank = self._ranks(asked, asked.logits(x), self.combine, self.recorded)
        shown = torch.softmax(asked.logits(x), -1).sum(2) if self.combine == "softmax_sum" else x.sum(2)
        exact = self._ranks(asked, asked.exact_logits(), "softmax_sum", self.recorded_exact)
        exact_raw = self._ranks(asked, asked.exact_logits(), self.combine, self.recorded_exact)
        hidden = ~asked.candidates.expand_as(rank)
        for name, value in (
            ("approx_logits", x.flatten(1, 2).masked_fill(~asked.candidates, torch.nan)),
            ("approx_score", shown.masked_fill(hidden, torch.nan)),
            ("topk_idx", asked.topk(rank) - self.n_sinks),
            ("exact_topk_idx", asked.topk(exact) - self.n_sinks),
            ("exact_topk_idx, combined alike", asked.topk(exact_raw) - self.n_sinks),
        ):
            if name.startswith("approx"):
                value = torch.nn.functional.pad(value, (0, self.total - value.shape[-1]), value=torch.nan)
            self.notes.setdefault(name, []).append(value[0].numpy())
        return Selection(asked.topk(rank))

    def _ranks(self, asked: RetrievalQuery, logits: Tensor, combine: str, recorded: np.ndarray | None) -> Tensor:
        """Relevance [B, H, S] as whole numbers, in which a recorded slot lies before others that are level with it."""
        assert recorded is not None
        if not self.half:
            relevance = reduce_group(logits, combine)
        elif combine == "softmax_sum":
            relevance = logits.softmax(-1).half().sum(2)
        else:
            relevance = logits.half().sum(2)
        theirs = torch.from_numpy(recorded[int(asked.positions[0]) - self.first])[None] + self.n_sinks
        favoured = torch.zeros_like(relevance, dtype=torch.bool).scatter_(-1, theirs, True)
        ranks: Tensor = relevance.float().unique(return_inverse=True)[1]
        return ranks * 2.0 + favoured


def check(archive: Recording, report: Report) -> None:
    """Every `clean` run: real keys, a window that moves in step. The released run's defects are not reproduced."""
    for prefix in ("clean_fp32", "cleancand_fp32", "cleanraw_fp32", "clean_fp16"):
        if f"{prefix}_out" in archive:
            _check_pq_run(archive, report, prefix)
    for name in archive:
        if name.startswith("released_"):
            report.skip(name, "the release's defects (rows of an unfilled buffer, layers out of step) are not copied")


def _check_pq_run(archive: Recording, report: Report, prefix: str) -> None:
    half = prefix.endswith("fp16")
    whole = streams(archive, dtype=torch.float16 if half else torch.float32)
    sink, steps = int(archive["sink"]), int(archive["steps"])
    recent, count = int(archive[f"{prefix}_recent"]), int(archive[f"{prefix}_topk"])
    method = _Replayed(
        n_sinks=sink,
        recent_ratio=recent / (recent + count),
        m=int(archive["m"]),
        b=int(archive["b"]),
        max_iter=int(archive["max_iter"]),
        kmeans_seed=int(archive["km_seed"]),
        cluster="outside_window" if "cand" in prefix else "prompt",
        combine="raw_sum" if "raw" in prefix else "softmax_sum",
        cache_tokens=int(archive["cache_size"]),
        cache_block=int(archive["cache_block"]),
        cache_blocks_per_step=int(archive["cache_topk"]),
        half=half,
        first=whole.prompt,
        total=whole.q.shape[3],
    )
    outs, noted, indexed = [], [], []
    for layer in range(whole.q.shape[0]):
        one = replace(whole, q=whole.q[layer, None], k=whole.k[layer, None], v=whole.v[layer, None])
        chosen, exact = (archive[f"{prefix}_{name}"][layer].astype(np.int64) for name in ("topk_idx", "exact_topk_idx"))
        method = replace(method, recorded=chosen, recorded_exact=exact, notes={})
        ends: list[Any] = []

        def keep(state: Any, _: int, ends: list[Any] = ends) -> None:
            ends.append(state)

        outs.append(one.run(method, sink + recent + count + 1, keep)[0])
        noted.append({name: np.stack(values) for name, values in method.notes.items()})
        indexed.append(ends[-1].kv_index)
    _compare_pq(archive, report, prefix, noted, indexed, half)
    ours, theirs = np.stack(outs), archive[f"{prefix}_out"]  # [L, T, H * G, D]
    if half:  # nearly all choices are equal in half precision; outputs of the others say nothing
        picked = np.stack([layer["topk_idx"] for layer in noted])
        same = (np.sort(picked, -1) == np.sort(archive[f"{prefix}_topk_idx"], -1)).all(-1)  # [L, steps, H]
        seen = np.ones(ours.shape[:3], bool)
        seen[:, whole.prompt :] = same.repeat(ours.shape[2] // same.shape[2], axis=2)
        ours, theirs = ours[seen], theirs[seen]
    report.close(f"{prefix}_out", ours, theirs, _HALF if half else _TIGHT)
    clustered = whole.prompt - sink - (recent if "cand" in prefix else 0)
    start = init_rows(clustered, 1 << method.b, method.kmeans_seed)
    report.exact(f"{prefix}_init_idx", start.numpy(), archive[f"{prefix}_init_idx"])
    assert len(noted[0]["topk_idx"]) == steps


def _compare_pq(
    archive: Recording, report: Report, prefix: str, noted: list[dict[str, np.ndarray]], indexed: list[Any], half: bool
) -> None:
    total, sink = archive["q"].shape[3], int(archive["sink"])
    for name in ("topk_idx", "exact_topk_idx"):
        ours, theirs = np.stack([layer[name] for layer in noted]), archive[f"{prefix}_{name}"]
        if name == "exact_topk_idx" and not np.array_equal(ours, theirs):
            # What is exact for a group of query heads is said nowhere: their probabilities added up, or the run's rule.
            ours = np.stack([layer[f"{name}, combined alike"] for layer in noted])
        if half:
            report.overlap(f"{prefix}_{name}", _mask(ours, total), _mask(theirs, total), 0.97)
        else:
            report.exact(f"{prefix}_{name}", ours, theirs)
    shared = _mask(np.stack([n["topk_idx"] for n in noted]), total) & _mask(archive[f"{prefix}_exact_topk_idx"], total)
    recall = shared.sum() / np.prod(archive[f"{prefix}_topk_idx"].shape)
    report.close(f"{prefix}_recall", recall, archive[f"{prefix}_recall"], 0.03 if half else _TIGHT)
    made = [index.notes["kmeans_iterations"][0] for index in indexed]
    report.close(f"{prefix}_km_iters", made, archive[f"{prefix}_km_iters"].reshape(len(made), -1).mean(1))
    for name, unit in (("approx_logits", _HALF_SUMS), ("approx_score", _HALF)):
        ours = np.stack([layer[name] for layer in noted])[..., sink:]
        theirs = archive[f"{prefix}_{name}"]
        padded = np.full(theirs.shape, np.nan)
        width = min(ours.shape[-1], theirs.shape[-1])
        padded[..., :width] = ours[..., :width]
        report.close(f"{prefix}_{name}", padded, theirs, unit if half else 1e-4)
    centroids = np.stack([index["centroids"][0].numpy() for index in indexed])
    report.close(f"{prefix}_centroids", centroids, archive[f"{prefix}_centroids"], _HALF if half else _TIGHT)
    codes = np.stack([index["codes"][0].transpose(1, 2).numpy() for index in indexed]).astype(np.int64)
    theirs = archive[f"{prefix}_codes"]
    known = theirs >= 0
    ours = np.full(theirs.shape, -1)
    width = min(codes.shape[-1] - sink, theirs.shape[-1])
    ours[..., :width] = codes[..., sink : sink + width]
    report.exact(f"{prefix}_codes", np.where(known, ours, -1), theirs)


def _mask(ids: np.ndarray, total: int) -> np.ndarray:
    """Index sets [..., N] as a mask [..., total]."""
    mask = np.zeros((*ids.shape[:-1], total), bool)
    np.put_along_axis(mask, ids.astype(np.int64), True, -1)
    return mask
