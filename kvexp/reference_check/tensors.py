"""Files that hold bare q, k, v of some layers: A2SF's masks and its decode-time procedures."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.core import (
    AttentionParams,
    Budget,
    CacheConfig,
    Cadence,
    EvictionLayer,
    MemoryTracker,
    Method,
    SequenceState,
)
from kvexp.core.row_mask import (
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
from kvexp.errors import ConfigError
from kvexp.methods import A2SF, H2O
from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording
from kvexp.reference_check.trace import tapped

_TIGHT = 1e-5
_UNIT = 2.0**-10  # between two neighbouring numbers in half precision, relative


def alpha_of(name: str) -> float:
    """A2SF's forgetting factor from a field's name: a0, a00: 0; a01: 0.1; a025: 0.25; a0.5: 0.5; a1, a10: 1.

    The first digit stands before the point.
    """
    found = re.fullmatch(r"(?:.*_)?a(?:2sf)?(\d)\.?(\d*)", name)
    if found is None or not 0 <= (alpha := float(f"{found[1]}.{found[2] or 0}")) <= 1:
        raise ConfigError(f"the field {name}: expected a forgetting factor from 0 to 1 in its name, as in a01 for 0.1")
    return alpha


def check_rowmask(archive: Recording, report: Report) -> None:
    """Masks, outputs, accumulators and similarities of the three generations of A2SF's mask.

    A file whose outputs are half was recorded in half, whatever its inputs are stored as; so is what is compared, and
    choices between scores that are equal in half are those recorded.
    """
    half = any(archive[name].dtype == np.float16 for name in archive if name == "q" or name.endswith("_out"))
    dtype = torch.float16 if half else torch.float32
    q, k, v = (archive.tensor(name).to(dtype) for name in "qkv")
    x = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    causal = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    if "logits" in archive:
        ours, theirs = (y.float().masked_fill(~causal, 0) for y in (x, archive.tensor("logits")))
        report.close("logits", ours, theirs, _UNIT if half else _TIGHT, _UNIT if half else _TIGHT)
        # How a product is rounded to half is the machine's choice and decides near-ties: go on from the recorded ones.
        x = archive.tensor("logits") if half else x
    full = causal_probs(x).to(dtype)

    def like(name: str) -> dict[str, Any]:
        """How the mask of this name was recorded: its dtype, and in half the mask itself, to settle ties by."""
        return {"dtype": dtype, "recorded": archive.tensor(name) if half and name in archive else None}

    _close(report, archive, "probs_full", full)
    budget, share = int(archive["budget"]), int(archive["half_budget"])
    ideals = {
        "gen1_ideal": ideal_mask(x, budget, **like("gen1_ideal_mask")),
        "ideal_llama": ideal_mask(x, budget, force_self=False, **like("ideal_llama_mask")),
    }
    for name, mask in ideals.items():
        _mask(report, archive, f"{name}_mask", mask)
        _close(report, archive, f"{name}_probs", masked_probs(x, mask).to(dtype))
        _close(report, archive, f"{name}_out", masked_attention(x, mask, v))
    others = [masked_probs(x, ideals["gen1_ideal"]), full, masked_probs(x, ideals["ideal_llama"])]
    series = {found[1] for field in archive if (found := re.fullmatch(r"gen\d_(.+)_mask", field))}
    for name in sorted(series - {"ideal"}):
        rules = {"h2o": (share, share, 1.0), "local": (0, budget, 1.0)}
        heavy, recent, alpha = rules[name] if name in rules else (budget, 0, alpha_of(name))
        how = like(f"gen1_{name}_mask")
        mask, accumulated = local_mask(x, heavy, recent, decay=alpha, return_accumulated=True, **how)
        _mask(report, archive, f"gen1_{name}_mask", mask)
        _close(report, archive, f"gen1_{name}_acc", accumulated)
        _close(report, archive, f"gen1_{name}_out", masked_attention(x, mask, v))
        if f"gen1_{name}_cos" in archive:
            ours = _similarity(masked_probs(x, mask).to(dtype), [y.to(dtype) for y in others], budget, name)
            report.close(f"gen1_{name}_cos", ours, archive[f"gen1_{name}_cos"], _UNIT if half else _TIGHT)
        for generation, count_next in (("gen2", True), ("gen3", False)):
            how = like(f"{generation}_{name}_mask")
            mask = evict_one_mask(x, 0, heavy, recent, decay=alpha, count_next=count_next, **how)
            _mask(report, archive, f"{generation}_{name}_mask", mask)
            _close(report, archive, f"{generation}_{name}_out", masked_attention(x, mask, v))


def _mask(report: Report, archive: Recording, name: str, ours: Tensor) -> None:
    if name in archive:
        report.exact(name, ours.numpy(), archive[name])


def _close(report: Report, archive: Recording, name: str, ours: Tensor) -> None:
    """To the bit in half precision, where the order of a sum seldom shows; within 1e-5 in float32."""
    if name not in archive:
        return
    if ours.dtype == torch.float16:
        report.exact(name, ours.numpy(), archive[name].astype(np.float16))
    else:
        report.close(name, ours.numpy(), archive[name], _TIGHT)


def _similarity(ours: Tensor, others: list[Tensor], budget: int, name: str) -> Tensor:
    """[layer, 4]: row cosine to ideal, to full, to the other ideal; whole-matrix cosine to full."""
    ours, others = ours.float(), [other.float() for other in others]
    cut = ours * window_mask(ours.shape[-1], budget) if name == "local" else ours
    rows = [row_cosine(cut, other).flatten(1).mean(1) for other in others]
    return torch.stack([*rows, matrix_cosine(ours, others[1]).flatten(1).mean(1)], dim=1)


def check_decode(archive: Recording, report: Report) -> None:
    """A2SF's and H2O's decode-time code: `hh_` masks and keeps one key more, `drop_` drops; both via the core."""
    prompt = int(archive["prompt"])
    for prefix in sorted({name.rsplit("_", 1)[0] for name in archive if name.startswith(("hh_", "drop_"))}):
        count = (
            archive[f"{prefix}_kept"].shape[-1]
            if prefix.startswith("drop")
            else int(archive[f"{prefix}_mask"][0, 0, 0].sum()) - 1
        )
        method = _decode_method(archive, prefix, count)
        for mode in ("overwrite", "compact", "mask"):
            budget = Budget(tokens=count, counts_self=False)
            config = CacheConfig(method, budget, mode=mode, positions="original")
            out, kept, score = _run(archive, config, prompt)
            report.close(f"{mode}: {prefix}_out", out, archive[f"{prefix}_out"], _TIGHT)
            if prefix.startswith("drop"):
                report.exact(f"{mode}: {prefix}_kept", kept, archive[f"{prefix}_kept"])
                report.close(f"{mode}: {prefix}_score", score, archive[f"{prefix}_score"], _TIGHT)
                continue
            mask: np.ndarray = np.zeros(archive[f"{prefix}_mask"].shape, bool)
            dense = np.zeros(archive[f"{prefix}_score"].shape)
            np.put_along_axis(dense, kept, score, -1)
            for step in range(mask.shape[1]):
                np.put_along_axis(mask[:, step], kept[:, step], True, -1)
                mask[:, step, :, prompt + step] = True
            report.exact(f"{mode}: {prefix}_mask", mask, archive[f"{prefix}_mask"])
            report.close(f"{mode}: {prefix}_score", dense, archive[f"{prefix}_score"], _TIGHT)


def _decode_method(archive: Recording, prefix: str, count: int) -> Method:
    if "h2o" in prefix:
        recent = archive.whole_number("recent")
        return H2O(recent_ratio=0.5 if recent is None else recent / count)
    # The mask variant protects the token just fed; the dropping one protects nobody unless its name says how many.
    name, _, protected = prefix.partition("_r")
    protect = int(protected) if protected else (1 if prefix.startswith("hh") else 0)
    return A2SF(alpha=alpha_of(name), protect_recent=protect)


def _run(archive: Recording, config: CacheConfig, prompt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every layer's prompt and decode steps: out [L, T, H, D]; kept ids and scores [L, steps + 1, H, N]."""
    outs, kepts, scores = [], [], []
    for layer in range(archive["q"].shape[0]):
        q, k, v = (archive.tensor(name)[layer] for name in "qkv")
        state = EvictionLayer(config, 0, 1, SequenceState(prompt_columns=prompt), MemoryTracker(1), None)
        params = AttentionParams(q.shape[-1] ** -0.5)
        rows = [slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, q.shape[2]))]
        out, kept, score = [], [], []
        for r in rows:
            out.append(state.forward(q[:, :, r], k[:, :, r], v[:, :, r], params, None)[0])
            held = state.kept_positions()[0]
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


def check_head(archive: Recording, report: Report) -> None:
    """The 2026 code with grouped heads: scores summed over a query group, top of them plus the newest, prefill only."""
    names = [name[: -len("_scores")] for name in archive if name.endswith("_scores")]
    q, k, v = (archive.tensor(name) for name in "qkv")
    q, k, v = (x[:, None] if x.ndim == 4 else x for x in (q, k, v))
    recent = _recent(archive, names, q.shape[3])
    for name in names:
        theirs, selected = archive[f"{name}_scores"], archive[f"{name}_selected"]
        chosen = _selection(selected, q.shape[3])
        budget = int(chosen.sum(-1).max())
        config = CacheConfig(
            A2SF(alpha=alpha_of(name), protect_recent=recent),
            Budget(tokens=budget, counts_self=False),
            Cadence(every=None),
            mode="mask",
        )
        score, kept, out = [], [], []
        for layer in range(q.shape[0]):
            state = EvictionLayer(config, 0, 1, SequenceState(), MemoryTracker(1), None)
            (tap,) = tapped([state])
            out.append(state.forward(q[layer], k[layer], v[layer], AttentionParams(q.shape[-1] ** -0.5), None)[0])
            score.append(np.array([list(held.values()) for held in tap.last[0]]))
            line = np.zeros(score[-1].shape, bool)
            for head, ids in enumerate(state.kept_positions()[0]):
                line[head, ids] = True
            kept.append(line)
        late = theirs[..., q.shape[3] - recent :]
        marked = late.size and (not np.isfinite(late).all() or (late == late.flat[0]).all())  # in place of their sums
        summed = slice(0, q.shape[3] - recent if marked else theirs.shape[-1])
        ours = np.stack(score)[..., summed]
        report.close(f"{name}_scores", ours.reshape(theirs[..., summed].shape), theirs[..., summed])
        report.exact(f"{name}_selected", np.stack(kept).reshape(chosen.shape), chosen)
    if "out" in archive:
        whole = torch.stack(out).numpy()
        theirs = archive["out"].reshape(-1)
        fits = [y for y in (whole, whole.swapaxes(1, 2)) if np.allclose(y.reshape(-1), theirs, atol=1e-4)]
        report.close("out", (fits or [whole])[0].reshape(-1), theirs)


def _recent(archive: Recording, names: list[str], tokens: int) -> int:
    """How many of the newest tokens are protected: what the file says, else what all of its choices have in common.

    A token that all choices hold anyway is chosen whether it is protected or not, so the latter loses nothing.
    """
    said = archive.whole_number("recent")
    if said is not None:
        return said
    common = np.logical_and.reduce([_selection(archive[f"{name}_selected"], tokens) for name in names])
    gaps = np.flatnonzero(~common.reshape(-1, tokens).all(0))
    return tokens - 1 - int(gaps[-1]) if len(gaps) else tokens


def _selection(selected: np.ndarray, tokens: int) -> np.ndarray:
    """Recorded choices, ids or a mask, as a bool mask [..., tokens]."""
    if selected.dtype == bool:
        return selected
    mask = np.zeros((*selected.shape[:-1], tokens), bool)
    np.put_along_axis(mask, np.sort(selected.astype(np.int64), -1), True, -1)
    return mask
