"""Files of the row-mask protocol with a model: one forward, one mask per layer and head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvexp.core.masked_layer import MaskFn
from kvexp.core.row_mask import causal_probs, global_mask, local_mask
from kvexp.models import RowMaskCache
from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording


def mask_fn_of(archive: Recording) -> MaskFn:
    """The mask rule of the release a file comes from, with its budgets over the whole text."""
    c, width = archive.config, archive["input_ids"].shape[1]
    if "heavy_ratio" in c:
        heavy, recent = int(c["heavy_ratio"] * width), int(c["recent_ratio"] * width)
        pick = global_mask if "global" in archive.variant else local_mask
        return lambda x, layer: pick(x, heavy, recent)
    budget = int(width * c["kv_cache"] / 100)
    recent = int(budget * c["recent"] / 100)
    heavy = budget - recent
    noise = _noise(archive, heavy)
    return lambda x, layer: local_mask(x, heavy, recent, scores=causal_probs(x, noise[layer], c["tau_init"]))


def _noise(archive: Recording, heavy: int) -> Tensor:
    """[L, B, H, T, T]: one draw for the first `heavy` rows, a fresh one for each later row."""
    return torch.cat((archive.tensor("noise_block")[..., :heavy, :], archive.tensor("noise_rows")), dim=-2)


@torch.inference_mode()
def check(archive: Recording, report: Report) -> None:
    """Logits at all positions, and each layer's mask (and attention, where recorded)."""
    model = archive.model()
    ids = archive.tensor("input_ids").long()
    cache = RowMaskCache(model, mask_fn_of(archive))
    logits = model(ids, past_key_values=cache, use_cache=True).logits
    report.close("logits", logits.numpy(), archive["logits"])
    masks = np.stack([state.mask[0].numpy() for state in cache.layer_states if state.mask is not None])
    for name in ("mask", "attended"):
        if name in archive:
            report.exact(name, masks, archive[name])
    if "attn" in archive:
        attention = [state.probabilities[0].numpy() for state in cache.layer_states if state.probabilities is not None]
        report.close("attn", np.stack(attention), archive["attn"])
    if "key_mask" in archive:
        report.skip("key_mask", "the release's working copy of mask before the recent band is added")
