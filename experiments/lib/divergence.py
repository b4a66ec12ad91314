"""How far the runs of an exhibit are from the full cache (kvexp/divergence), and claims judged by that.

A claim about ROUGE of a small model on few examples stays undecided; the same claim about KL divergence along the full
cache's own answer often does not (docs/divergence.md). Both verdicts are kept: this one never replaces the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib.stats import Side, all_hold, better, estimate, pooled_difference
from kvexp.results.divergence import PerExample, share_interval
from kvexp.results.stats import LEVEL
from kvexp.run.store import EPSILON_KL, OWN, Run, read

KL = "kl"  # nats per token
COLUMNS = ["model", "task", "method", "setting", "kv_ratio", "hash"]
Judge = Callable[[pd.DataFrame], tuple[bool | None, str]]


def measure_missing(outputs: Path, hashes: Sequence[str]) -> dict[str, str]:
    """Measure what these runs lack; hash -> why a run has no divergence (choices, baselines)."""
    from kvexp.run.batches import measure_claimed

    return measure_claimed([Run.load(outputs / name) for name in hashes], (OWN,))


def divergence_frame(outputs: Path, frame: pd.DataFrame, first: int | None) -> pd.DataFrame:
    """The runs of `lib.data.frame_of` that have a divergence: KL over all their tokens with its interval over examples,
    and `scores`: {example: {"kl": mean of its tokens}}. Runs of one group are told apart by the columns COLUMNS.

    Runs that differ in task or model alone may be pooled: their examples have the task's name in front there.
    """
    rows = []
    for _, run in frame.iterrows():
        lines = [line for (_, text), line in read(Run.load(outputs / run["hash"])).items() if text == OWN]
        found = PerExample.of([line for line in lines if first is None or line["index"] < first])
        if found is None:
            continue
        low, high = share_interval(found.kl, found.tokens, LEVEL)
        row: dict[str, Any] = {name: run[name] for name in COLUMNS} | {"n": len(found.names)}
        row |= {KL: float(found.kl.sum() / found.tokens.sum()), "kl_low": low, "kl_high": high}
        row |= {"tokens": int(found.tokens.sum()), "sums": found.kl, "counts": found.tokens}
        means = zip(found.names, found.kl / found.tokens, strict=True)
        rows.append(row | {"scores": {name: {KL: float(value)} for name, value in means}})
    return pd.DataFrame(rows, columns=[*COLUMNS, "n", KL, "kl_low", "kl_high", "tokens", "sums", "counts", "scores"])


def pooled_kl(rows: pd.DataFrame) -> tuple[float, float, float]:
    """KL of the runs of `divergence_frame` as one sample, their examples put together, and its interval."""
    sums, counts = (np.concatenate(rows[name].tolist()) for name in ("sums", "counts"))
    return float(sums.sum() / counts.sum()), *share_interval(sums, counts, LEVEL)


@dataclass(frozen=True)
class Near:
    """Whether runs are within EPSILON_KL of the full cache. within=False: the claim is that they are not.

    Several runs (of several tasks) are one sample: their examples are put together. judged=False: only told.
    """

    words: str
    runs: Side
    within: bool = True
    judged: bool = True

    def found(self, frame: pd.DataFrame) -> tuple[bool | None, str] | None:
        """None where no run is one of these."""
        rows = frame[frame.apply(self.runs, axis=1)] if len(frame) else frame
        if rows.empty:
            return None
        kl, low, high = pooled_kl(rows)
        near = None if math.isnan(low) else True if high < EPSILON_KL else False if low > EPSILON_KL else None
        verdict = near if near is None or self.within else not near
        return verdict, f"{self.words} {estimate(kl, low, high, 3)}"


@dataclass(frozen=True)
class Closer:
    """Whether some runs diverge less than others, paired over the examples of each task. judged=False: only told."""

    words: str
    one: Side
    other: Side
    judged: bool = True

    def found(self, frame: pd.DataFrame) -> tuple[bool | None, str] | None:
        """None where one of the sides has no run."""
        sides = [frame.apply(side, axis=1) if len(frame) else pd.Series(dtype=bool) for side in (self.one, self.other)]
        if not all(side.any() for side in sides):
            return None
        less = pooled_difference(frame, self.other, self.one, KL)
        return better(less[1], less[2]), f"{self.words} {estimate(*less, 3, sign=True)}"


def by_divergence(*parts: Near | Closer, told: Callable[[pd.DataFrame], str] = lambda frame: "") -> Judge:
    """Every judged part holds. told: a further sentence, of the whole frame."""

    def holds(frame: pd.DataFrame) -> tuple[bool | None, str]:
        verdicts, near, closer = [], [], []
        for part in parts:
            made = part.found(frame)
            if made is None:
                if part.judged:
                    return None, f"{part.words}: not measured"
                continue
            (near if isinstance(part, Near) else closer).append(made[1])
            verdicts += [made[0]] if part.judged else []
        pairs = zip(frame["task"], frame["scores"], strict=True)
        texts = len({(task, name) for task, scores in pairs for name in scores})
        about = f"KL in nats per token of {texts} answers (near the full cache: under {EPSILON_KL:g})"
        sentences = [f"{about}: {'; '.join(near)}"] if near else []
        less = "less divergence, nats" + ("" if near else f" per token, {texts} answers")
        sentences += [f"{less}: {'; '.join(closer)}"] if closer else []
        return all_hold(verdicts), ". ".join([*sentences, *filter(None, [told(frame)])]) or "nothing to compare"

    return holds


def of(method: str, setting: str | None = None, **wanted: float) -> Side:
    """Runs of a method, with this setting (None: any) and these values of columns: of("h2o", kv_ratio=0.9)."""
    return lambda run: (
        run["method"] == method
        and (setting is None or run["setting"] == setting)
        and all(run[name] == value for name, value in wanted.items())
    )


def count_closer(method: str, rival: str) -> Callable[[pd.DataFrame], str]:
    """At how many budgets a method diverges less than its rival by more than chance: only told."""

    def said(frame: pd.DataFrame) -> str:
        ahead = behind = open_ = 0
        for (_, ratio), _ in frame[frame["method"].eq(method)].groupby(["task", "kv_ratio"]):
            part = Closer("", of(method, kv_ratio=ratio), of(rival, kv_ratio=ratio)).found(frame)
            if part is None:
                continue
            verdict = part[0]
            ahead, behind, open_ = ahead + (verdict is True), behind + (verdict is False), open_ + (verdict is None)
        total = ahead + behind + open_
        return f"{method} diverges less than {rival} at {ahead}, more at {behind}, open at {open_} of {total} budgets"

    return said


def lowest(frame: pd.DataFrame, key: str, method: str) -> str:
    """Per task the value of an option with the least divergence, and its KL: "news 0.3 (0.112)"."""
    from experiments.lib.data import option

    found = []
    runs = frame[frame["method"].eq(method)]
    for (task, ratio), part in runs.groupby(["task", "kv_ratio"], sort=False):
        best = part.loc[part[KL].idxmin()]
        found.append(f"{task} at {ratio:g}: {option(best['setting'], key)} ({best[KL]:.3f})")
    return ", ".join(found)
