"""What became of the full cache's own answers: where written ones part from it, which choices flip.

From the rows of a run and of its baseline alone. Flips as in "Accuracy is Not All You Need" (arXiv:2407.09141): equal
accuracies can hide as many answers lost as won.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results.divergence_table import share_interval
from kvexp.results.intervals import is_all_or_nothing
from kvexp.results.read import Folder, Row, baseline_of, number
from kvexp.results.stats import LEVEL, Floats

NO_ANSWERS = {"same_answers": math.nan, "same_tokens": math.nan, "parts_at": math.nan}


def answer_changes(folder: Folder, baseline: Folder | None) -> dict[str, float]:
    """Free-running answers beside the full cache's, over the examples both answered.

    same_answers: share of answers with the same tokens throughout; same_tokens: share of places with the same token,
    mean over answers, out of the longer one's places; parts_at: median place, from 1, of the first token that differs,
    over the answers that do. NaN where rows hold no `output_tokens` (recorded before) or nothing differs.
    """
    pairs = [(one["output_tokens"], full["output_tokens"]) for one, full in _pairs(folder, baseline, "output_tokens")]
    if not pairs:
        return dict(NO_ANSWERS)
    first = [first_difference(*pair) for pair in pairs]
    parted = [place for place in first if place is not None]
    equal = [sum(map(int.__eq__, *pair)) / max(map(len, pair)) for pair in pairs]
    return {
        "same_answers": 1 - len(parted) / len(pairs),
        "same_tokens": float(np.mean(equal)),
        "parts_at": float(np.median(parted)) if parted else math.nan,
    }


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The place, from 1, of the first token that differs, an end before the other's included; None where none does."""
    shorter = min(len(one), len(other))
    place = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    return None if place == len(one) == len(other) else place + 1


def choice_changes(folder: Folder, baseline: Folder | None) -> dict[str, Any]:
    """Flips of a score that is right or wrong, and KL over the choices; empty where examples are neither.

    lost: examples right with the full cache and wrong here; won: the other way; choice_kl: KL(full || run) in nats,
    mean over examples, of the distributions that the choices' summed log-probabilities give, with its 95 % interval.
    """
    pairs = _pairs(folder, baseline, "choices")
    if not pairs:
        return {}
    name = next(iter(pairs[0][1]["metrics"]), "")
    one, full = (np.array([number(pair[side]["metrics"].get(name)) for pair in pairs]) for side in (0, 1))
    found: dict[str, Any] = {"n": len(pairs), "metric": name, "lost": None, "won": None}
    if is_all_or_nothing(one, full):
        found |= {"lost": int((full > one).sum()), "won": int((one > full).sum())}
    kl = np.array([value for pair in pairs if (value := choice_kl(*(side["choices"] for side in pair))) is not None])
    low, high = share_interval(kl, np.ones(len(kl)), LEVEL) if len(kl) else (math.nan, math.nan)
    return found | {"choice_kl": float(kl.mean()) if len(kl) else math.nan, "kl_low": low, "kl_high": high}


def choice_kl(one: Mapping[str, Any], full: Mapping[str, Any]) -> float | None:
    """KL(full || one) in nats over the same choices; None where they are not the same, or a single one."""
    logs = [np.array([number(value) for value in side.get("logprobs", [])]) for side in (full, one)]
    if len(logs[0]) != len(logs[1]) or len(logs[0]) < 2 or not all(np.isfinite(each).all() for each in logs):
        return None
    p, q = map(_log_softmax, logs)
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def _log_softmax(logs: Floats) -> Floats:
    shifted = logs - logs.max()
    made: Floats = shifted - math.log(np.exp(shifted).sum())
    return made


def with_answers(frame: pd.DataFrame, folders: Iterable[Folder], known: Mapping[str, Folder]) -> pd.DataFrame:
    """A frame of `divergence_table` with the columns of `answer_changes`. known: runs by hash, baselines among them."""
    if frame.empty:
        return frame
    found = {each.run.hash: answer_changes(each, baseline_of(each, known)) for each in folders}
    return frame.assign(**{name: [found[key][name] for key in frame["hash"]] for name in NO_ANSWERS})


def choice_table(folders: Iterable[Folder], known: Mapping[str, Folder]) -> pd.DataFrame:
    """A row per run of a task that chooses. known: runs by hash, the baselines among them."""
    rows = []
    for folder in folders:
        found = choice_changes(folder, baseline_of(folder, known))
        if found:
            rows.append({**folder.labels, "question": folder.question, **found, "hash": folder.run.hash})
    return pd.DataFrame(rows)


def _pairs(folder: Folder, baseline: Folder | None, field: str) -> list[tuple[Row, Row]]:
    """Rows of both with this field, by example; none for the full cache itself, and between NUMERICS."""
    if baseline is None or folder.is_baseline or baseline.run.numerics != folder.run.numerics:
        return []
    both = [(row, baseline.scored.get(name)) for name, row in folder.scored.items()]
    return [(row, full) for row, full in both if full is not None and row.get(field) and full.get(field)]
