"""Files that hold bare q, k, v of some layers: A2SF's masks and its decode-time procedures."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvexp.core import Budget, Cadence, Geometry, LayerState, Ledger, Method, Plan, Timeline
from kvexp.core.rowmask import (
    causal_probs,
    evict_one_mask,
    ideal_mask,
    local_mask,
    masked_attention,
    masked_probs,
    matrix_cosine,
    row_cosine,
    window_mask,
)
from kvexp.methods import A2SF, H2O
from kvexp.reference_check.archive import Archive
from kvexp.reference_check.report import Report

_ALPHA = {"a0": 0.0, "a01": 0.1, "a02": 0.2, "a05": 0.5, "a09": 0.9, "a1": 1.0}
_TIGHT = 1e-5


def check_rowmask(archive: Archive, report: Report) -> None:
    """Masks, outputs, accumulators and similarities of the three generations of A2SF's mask."""
    half = archive["q"].dtype == np.float16
    q, k, v = (archive.tensor(name) for name in "qkv")
    x = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if half and "logits" in archive:
        x = archive.tensor("logits")  # half rounding of the recorded product decides near-ties
    causal = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    if "logits" in archive and not half:
        report.close("logits", x.masked_fill(~causal, 0), archive.tensor("logits").masked_fill(~causal, 0), _TIGHT)
    if "probs_full" in archive:
        report.close("probs_full", causal_probs(x), archive["probs_full"], 1e-3 if half else _TIGHT)
    budget, share = int(archive["budget"]), int(archive["half_budget"])
    series = {name: (budget, 0, alpha) for name, alpha in ((f"a2sf_{a}", _ALPHA[a]) for a in _ALPHA)}
    series |= {"h2o": (share, share, 1.0), "local": (0, budget, 1.0)}
    ideal = ideal_mask(x, budget)
    _mask(report, archive, "gen1_ideal_mask", ideal, half)
    _mask(report, archive, "ideal_llama_mask", ideal_mask(x, budget, force_self=False), half)
    _close(report, archive, "gen1_ideal_probs", masked_probs(x, ideal), half)
    _close(report, archive, "gen1_ideal_out", masked_attention(x, ideal, v), half)
    dtype = torch.float16 if half else torch.float32
    for name, (heavy, recent, alpha) in series.items():
        mask, accumulated = local_mask(x, heavy, recent, decay=alpha, dtype=dtype, return_accumulated=True)
        _mask(report, archive, f"gen1_{name}_mask", mask, half)
        _close(report, archive, f"gen1_{name}_acc", accumulated, half)
        _close(report, archive, f"gen1_{name}_out", masked_attention(x, mask, v), half)
        if f"gen1_{name}_cos" in archive and not half:
            report.close(
                f"gen1_{name}_cos", _similarity(x, mask, ideal, budget, name), archive[f"gen1_{name}_cos"], 1e-5
            )
        for generation, count_next in (("gen2", True), ("gen3", False)):
            mask = evict_one_mask(x, 0, heavy, recent, decay=alpha, count_next=count_next)
            _mask(report, archive, f"{generation}_{name}_mask", mask, half)
            _close(report, archive, f"{generation}_{name}_out", masked_attention(x, mask, v), half)


def _mask(report: Report, archive: Archive, name: str, ours: Tensor, half: bool) -> None:
    if name in archive and half:
        report.overlap(name, ours.numpy(), archive[name], 0.97)
    elif name in archive:
        report.exact(name, ours.numpy(), archive[name])


def _close(report: Report, archive: Archive, name: str, ours: Tensor, half: bool) -> None:
    if name in archive and half:
        report.skip(name, "half precision: sets only")
    elif name in archive:
        report.close(name, ours.numpy(), archive[name], _TIGHT)


def _similarity(x: Tensor, mask: Tensor, ideal: Tensor, budget: int, name: str) -> Tensor:
    """[layer, 4]: row cosine to ideal, to full, to the other ideal; whole-matrix cosine to full."""
    full, ours = causal_probs(x), masked_probs(x, mask)
    cut = ours * window_mask(x.shape[-1], budget) if name == "local" else ours
    others = (masked_probs(x, ideal), full, masked_probs(x, ideal_mask(x, budget, force_self=False)))
    rows = [row_cosine(cut, other).flatten(1).mean(1) for other in others]
    return torch.stack([*rows, matrix_cosine(ours, full).flatten(1).mean(1)], dim=1)


def check_decode(archive: Archive, report: Report) -> None:
    """A2SF's and H2O's decode-time code: `hh_` masks and keeps one key more, `drop_` drops; both via the core."""
    prompt = int(archive["prompt"])
    for prefix in sorted({name.rsplit("_", 1)[0] for name in archive if name.startswith(("hh_", "drop_"))}):
        count = (
            archive[f"{prefix}_kept"].shape[-1]
            if prefix.startswith("drop")
            else int(archive[f"{prefix}_mask"][0, 0, 0].sum()) - 1
        )
        method = _decode_method(prefix, count)
        for mode in ("overwrite", "compact", "mask"):
            out, kept, score = _run(archive, Plan(method, Budget(tokens=count, counts_self=False), mode=mode), prompt)  # type: ignore[arg-type]
            report.close(f"{mode}: {prefix}_out", out, archive[f"{prefix}_out"], _TIGHT)
            if prefix.startswith("drop"):
                report.exact(f"{mode}: {prefix}_kept", kept, archive[f"{prefix}_kept"])
                report.close(f"{mode}: {prefix}_score", score, archive[f"{prefix}_score"], _TIGHT)
                continue
            mask = np.zeros(archive[f"{prefix}_mask"].shape, bool)
            dense = np.zeros(archive[f"{prefix}_score"].shape)
            np.put_along_axis(dense, kept, score, -1)
            for step in range(mask.shape[1]):
                np.put_along_axis(mask[:, step], kept[:, step], True, -1)
                mask[:, step, :, prompt + step] = True
            report.exact(f"{mode}: {prefix}_mask", mask, archive[f"{prefix}_mask"])
            report.close(f"{mode}: {prefix}_score", dense, archive[f"{prefix}_score"], _TIGHT)


def _decode_method(prefix: str, count: int) -> Method:
    if "h2o" in prefix:
        return H2O(recent_ratio=0.5)
    alpha = _ALPHA["a" + prefix.split("a2sf")[1].split("_")[0]]
    # The mask variant protects the token just fed; the dropping one protects nobody unless its name says how many.
    protect = int(prefix.rsplit("_r", 1)[1]) if "_r" in prefix else (1 if prefix.startswith("hh") else 0)
    return A2SF(alpha=alpha, protect_recent=protect)


def _run(archive: Archive, plan: Plan, prompt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every layer's prompt and decode steps: out [L, T, H, D]; kept ids and scores [L, steps + 1, H, N]."""
    outs, kepts, scores = [], [], []
    for layer in range(archive["q"].shape[0]):
        q, k, v = (archive.tensor(name)[layer] for name in "qkv")
        state = LayerState(plan, 0, 1, Timeline(prompt_columns=prompt), Ledger(1), None)
        geometry = Geometry(q.shape[-1] ** -0.5)
        rows = [slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, q.shape[2]))]
        out, kept, score = [], [], []
        for r in rows:
            out.append(state.forward(q[:, :, r], k[:, :, r], v[:, :, r], geometry, None)[0])
            held = state.kept()[0]
            kept.append(held)
            slots = state.slots
            assert slots is not None
            table = [
                dict(zip(ps, vs, strict=True))
                for ps, vs in zip(slots.positions[0].tolist(), slots.score[0].tolist(), strict=True)
            ]
            score.append([[table[h][p] for p in ids] for h, ids in enumerate(held)])
        outs.append(torch.cat(out, dim=1).transpose(0, 1).numpy())
        kepts.append(np.asarray(kept))
        scores.append(np.asarray(score))
    return np.stack(outs), np.stack(kepts), np.stack(scores)


def check_head(archive: Archive, report: Report) -> None:
    """The 2026 code with grouped heads: scores summed over a query group, top of them plus the newest, prefill only."""
    names = [name[: -len("_scores")] for name in archive if name.endswith("_scores")]
    q, k, v = (archive.tensor(name) for name in "qkv")
    q, k, v = (x[:, None] if x.ndim == 4 else x for x in (q, k, v))
    for name in names:
        theirs, selected = archive[f"{name}_scores"], archive[f"{name}_selected"]
        recent = int(archive["recent"]) if "recent" in archive else 4
        chosen = _selection(selected, q.shape[3])
        budget = int(chosen.sum(-1).max())
        plan = Plan(
            A2SF(alpha=_ALPHA.get(name.replace(".", ""), _ALPHA["a1"]), protect_recent=recent),
            Budget(tokens=budget, counts_self=False),
            Cadence(every=None),
            mode="mask",
        )
        score, kept, out = [], [], []
        for layer in range(q.shape[0]):
            state = LayerState(plan, 0, 1, Timeline(), Ledger(1), None)
            seen: list[Tensor] = []
            state._accumulate = lambda s, view, columns, p, seen=seen, add=state._accumulate: (  # type: ignore[method-assign,misc]
                seen.append(columns),
                add(s, view, columns, p),
            )
            out.append(state.forward(q[layer], k[layer], v[layer], Geometry(q.shape[-1] ** -0.5), None)[0])
            score.append(seen[0][0].numpy())
            line = np.zeros(seen[0][0].shape, bool)
            for head, ids in enumerate(state.kept()[0]):
                line[head, ids] = True
            kept.append(line)
        free = slice(0, q.shape[3] - recent)
        report.close(f"{name}_scores", np.stack(score)[..., free].reshape(theirs[..., free].shape), theirs[..., free])
        report.exact(f"{name}_selected", np.stack(kept).reshape(chosen.shape), chosen)
    if "out" in archive:
        ours = torch.stack(out).numpy()
        theirs = archive["out"].reshape(-1)
        fits = [y for y in (ours, ours.swapaxes(1, 2)) if np.allclose(y.reshape(-1), theirs, atol=1e-4)]
        report.close("out", (fits or [ours])[0].reshape(-1), theirs)


def _selection(selected: np.ndarray, tokens: int) -> np.ndarray:
    """Recorded choices, ids or a mask, as a bool mask [..., tokens]."""
    if selected.dtype == bool:
        return selected
    mask = np.zeros((*selected.shape[:-1], tokens), bool)
    np.put_along_axis(mask, np.sort(selected.astype(np.int64), -1), True, -1)
    return mask
