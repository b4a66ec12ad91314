"""Files with block caches and with PQCache's cap of k-means iterations."""

from __future__ import annotations

import numpy as np

from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording
from kvexp.retrieval.kmeans_schedule import CostModel
from kvexp.retrieval.policies import make_policy

# Seconds of one layer's prefill as a * n^2 + b * n + c, as the two releases hold them, and their shares and bounds.
_RELEASED: dict[str, tuple[tuple[float, ...], float, int]] = {
    "v1": ((5.56006974e-11, 1.60809797e-06, 7.46724923e-03), 0.5, 10),
    "v2_mistral": ((4.86069848e-11, 2.52501805e-06, 5.10610107e-04), 1.0, 300),
    "v2_llama": ((4.75329e-11, 2.53902e-06, 4.22124e-04), 1.0, 300),
}


def check_policies(archive: Recording, report: Report) -> None:
    """Batches of insertions: what was there before each, and which block is where after it."""
    count, limit = int(archive["n_blocks"]), int(archive["limit"])
    for name in ("lfu", "lru"):
        policy = make_policy(name, limit)
        hits, places = [], []
        for batch in archive["batches"].tolist():
            hits.append([int(block in policy.slots) for block in batch])
            for block in batch:
                if block >= 0:
                    policy.insert(block)
            places.append([policy.slots.get(block, -1) for block in range(count)])
        report.exact(f"{name}_hit_before", hits, archive[f"{name}_hit_before"])
        if f"{name}_slot_after" in archive:
            report.exact(f"{name}_slot_after", places, archive[f"{name}_slot_after"])
        else:
            report.exact(f"{name}_resident_after", np.asarray(places) >= 0, archive[f"{name}_resident_after"])


def check_iterations(archive: Recording, report: Report) -> None:
    """The formula with the recorded clustering times and the releases' own layer times."""
    for name, (compute, share, most) in _RELEASED.items():
        if name in archive:
            profile = CostModel(
                compute, tuple(archive["base3_coef"].tolist()), tuple(archive["per_iter_coef"].tolist())
            )
            ours = [profile.iterations(n, share=share, most=most) for n in archive["n_xb"].tolist()]
            report.exact(name, ours, archive[name])
