"""Verdicts as declarations: what a panel, a row or all runs of an exhibit have to show, by its metric or by divergence.

A claim about ROUGE of a small model on few examples stays undecided; the same claim about KL divergence along the full
cache's own answer often does not (docs/divergence.md). Both verdicts are kept: this one never replaces the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib.draw import panels_of
from experiments.lib.tables import Side, ends, estimate, kl_estimate, of, option, pooled_difference, pooled_kl
from kvexp.results.divergence import PerExample, share_interval
from kvexp.results.stats import LEVEL
from kvexp.run.store import EPSILON_KL, OWN, Run

Verdict = tuple[bool | None, str]  # holds, does not hold or undecided; a sentence with the numbers
Judge = Callable[[pd.DataFrame], Verdict]
MARK = 99.0  # percent of full attention's score that count as reaching it
KL = "kl"  # nats per token
COLUMNS = ["model", "task", "method", "setting", "kv_ratio", "hash"]


def above(low: float, high: float, mark: float) -> bool | None:
    """Whether an interval lies at or above the mark (True), below it (False), or across it (None)."""
    if low >= mark:
        return True
    return False if high < mark else None


def better(low: float, high: float) -> bool | None:
    """Whether a difference is above 0 (True), at or below it (False: a tie is no improvement), or open (None)."""
    if low > 0:
        return True
    return False if high <= 0 else None


def all_hold(parts: Iterable[bool | None]) -> bool | None:
    """A claim of several parts: False if one is contradicted, True if all are supported, else None."""
    parts = list(parts)
    if False in parts:
        return False
    return True if parts and None not in parts else None


def positive(low: float, high: float) -> bool | None:
    """Whether a difference is above 0 (True), below (False) or neither: two methods that tie do not beat each other."""
    if low > 0:
        return True
    return False if high < 0 else None


@dataclass(frozen=True)
class Part:
    """One method at one budget in each panel: its column "of_full" (percent) or "ahead" (points over the rival).

    of_interval: what the interval's ends decide; None: the number is shown and not judged.
    """

    method: str
    kv_ratio: float
    column: str = "of_full"
    of_interval: Callable[[float, float], bool | None] | None = None

    def row(self, panel: pd.DataFrame) -> Any:
        """The run of this method and budget, or None where it was not made."""
        matching = panel[panel["method"].eq(self.method) & panel["kv_ratio"].eq(self.kv_ratio)]
        return matching.iloc[0] if len(matching) else None


def reaches(method: str, kv_ratio: float) -> Part:
    """At least MARK percent of full attention."""
    return Part(method, kv_ratio, of_interval=lambda low, high: above(low, high, MARK))


def stays_below(method: str, kv_ratio: float) -> Part:
    """Less than MARK percent of full attention."""
    return Part(method, kv_ratio, of_interval=below_mark)


def beats_rival(method: str, kv_ratio: float) -> Part:
    """A paired difference to the rival of the table's points above 0."""
    return Part(method, kv_ratio, "ahead", better)


def below_mark(low: float, high: float) -> bool | None:
    """Whether an interval in percent of full attention lies below MARK."""
    reached = above(low, high, MARK)
    return None if reached is None else not reached


def each_panel(
    sentence: str,
    *parts: Part,
    before: str = "",
    between: str = "; ",
    after: Callable[[pd.DataFrame], str] = lambda table: "",
) -> Judge:
    """Every part holds in every panel (model and task).

    sentence: of one panel, with {model}, {task} and the parts' numbers as {0}, {1}, …; the panels' sentences are joined
    by `between`, after the words `before`; after: a sentence about the whole table.
    """

    def holds(table: pd.DataFrame) -> Verdict:
        verdicts, sentences = [], []
        for model, task in panels_of(table):
            panel = table[table["model"].eq(model) & table["task"].eq(task)]
            numbers = []
            for claim in parts:
                row = claim.row(panel)
                if row is None:
                    return None, f"{claim.method} at {claim.kv_ratio} was not run"
                number = ends(row, claim.column)
                numbers.append(estimate(*number, sign=claim.column == "ahead"))
                if claim.of_interval is not None:
                    verdicts.append(claim.of_interval(*number[1:]))
            sentences.append(sentence.format(*numbers, model=model, task=task))
        return all_hold(verdicts), before + between.join(sentences) + after(table)

    return holds


def each_row(
    rows: Callable[[pd.DataFrame], pd.DataFrame],
    column: str,
    of_interval: Callable[[float, float], bool | None],
    cell: str,
    sentence: str = "{}",
) -> Judge:
    """One rule for every chosen row. cell: text of a row, with its columns and {number}; sentence: around all cells."""

    def holds(table: pd.DataFrame) -> Verdict:
        verdicts, cells = [], []
        for _, row in rows(table).iterrows():
            number = ends(row, column)
            verdicts.append(of_interval(*number[1:]))
            cells.append(cell.format(number=estimate(*number, sign=column == "ahead"), **row))
        return all_hold(verdicts), sentence.format("; ".join(cells))

    return holds


def leads(method: str, rival: str) -> Callable[[pd.DataFrame], str]:
    """How often a method's paired difference to the rival leaves out 0, over all panels and budgets; not judged."""

    def said(table: pd.DataFrame) -> str:
        rows = table[table["method"].eq(method)]
        ahead, behind = int((rows["ahead_low"] > 0).sum()), int((rows["ahead_high"] < 0).sum())
        return (
            f" {method.capitalize()} against {rival.upper()} (not part of the verdict): better at {ahead}, worse at "
            f"{behind}, open at {len(rows) - ahead - behind} of {len(rows)} points."
        )

    return said


def measure_missing(outputs: Path, hashes: Sequence[str]) -> dict[str, str]:
    """Measure what these runs lack; hash -> why a run has no divergence (choices, baselines)."""
    from kvexp.run.batches import measure_claimed

    return measure_claimed([Run.load(outputs / name) for name in hashes], (OWN,))


def divergence_frame(outputs: Path, frame: pd.DataFrame, first: int | None) -> pd.DataFrame:
    """The runs of `lib.tables.frame_of` that have a divergence: KL over all tokens, with its interval over examples.

    scores: {example: {"kl": mean of its tokens}}. COLUMNS identify a run within its group.

    Runs that differ in task or model alone may be pooled: their examples have the task's name in front there.
    """
    rows = []
    for _, run in frame.iterrows():
        lines = [line for (_, text), line in Run.load(outputs / run["hash"]).divergence().items() if text == OWN]
        measured = PerExample.of([line for line in lines if first is None or line["index"] < first])
        if measured is None:
            continue
        low, high = share_interval(measured.kl, measured.tokens, LEVEL)
        row: dict[str, Any] = {name: run[name] for name in COLUMNS} | {"n": len(measured.names)}
        row |= {KL: float(measured.kl.sum() / measured.tokens.sum()), "kl_low": low, "kl_high": high}
        row |= {"tokens": int(measured.tokens.sum()), "sums": measured.kl, "counts": measured.tokens}
        means = zip(measured.names, measured.kl / measured.tokens, strict=True)
        rows.append(row | {"scores": {name: {KL: float(value)} for name, value in means}})
    return pd.DataFrame(rows, columns=[*COLUMNS, "n", KL, "kl_low", "kl_high", "tokens", "sums", "counts", "scores"])


@dataclass(frozen=True)
class Near:
    """Whether runs are within EPSILON_KL of the full cache. within=False: the claim is that they are not.

    Several runs (of several tasks) are one sample: their examples are put together. judged=False: only shown.
    """

    words: str
    runs: Side
    within: bool = True
    judged: bool = True

    def found(self, frame: pd.DataFrame) -> Verdict | None:
        """The verdict and its sentence; None where no run is one of these."""
        rows = frame[frame.apply(self.runs, axis=1)] if len(frame) else frame
        if rows.empty:
            return None
        kl, low, high = pooled_kl(rows)
        near = None if math.isnan(low) else True if high < EPSILON_KL else False if low > EPSILON_KL else None
        verdict = near if near is None or self.within else not near
        return verdict, f"{self.words} {kl_estimate(kl, low, high, np.concatenate(rows['sums'].tolist()))}"


@dataclass(frozen=True)
class Closer:
    """Whether some runs diverge less than others, paired over the examples of each task. judged=False: only shown."""

    words: str
    one: Side
    other: Side
    judged: bool = True

    def found(self, frame: pd.DataFrame) -> Verdict | None:
        """The verdict and its sentence; None where one of the sides has no run."""
        sides = [frame.apply(side, axis=1) if len(frame) else pd.Series(dtype=bool) for side in (self.one, self.other)]
        if not all(side.any() for side in sides):
            return None
        less = pooled_difference(frame, self.other, self.one, KL)
        return better(less[1], less[2]), f"{self.words} {estimate(*less, 3, sign=True)}"


def by_divergence(*parts: Near | Closer, remark: Callable[[pd.DataFrame], str] = lambda frame: "") -> Judge:
    """Every judged part holds. remark: a further sentence, of the whole frame."""

    def holds(frame: pd.DataFrame) -> Verdict:
        verdicts, near, closer = [], [], []
        for claim in parts:
            judged = claim.found(frame)
            if judged is None:
                if claim.judged:
                    return None, f"{claim.words}: not measured"
                continue
            (near if isinstance(claim, Near) else closer).append(judged[1])
            verdicts += [judged[0]] if claim.judged else []
        pairs = zip(frame["task"], frame["scores"], strict=True)
        texts = len({(task, name) for task, scores in pairs for name in scores})
        about = f"KL in nats per token of {texts} answers (near the full cache: under {EPSILON_KL:g})"
        sentences = [f"{about}: {'; '.join(near)}"] if near else []
        less = "less divergence, nats" + ("" if near else f" per token, {texts} answers")
        sentences += [f"{less}: {'; '.join(closer)}"] if closer else []
        return all_hold(verdicts), ". ".join([*sentences, *filter(None, [remark(frame)])]) or "nothing to compare"

    return holds


def count_closer(method: str, rival: str) -> Callable[[pd.DataFrame], str]:
    """At how many budgets a method diverges less than its rival by more than chance; not judged."""

    def said(frame: pd.DataFrame) -> str:
        ahead = behind = open_ = 0
        for (_, ratio), _ in frame[frame["method"].eq(method)].groupby(["task", "kv_ratio"]):
            judged = Closer("", of(method, kv_ratio=ratio), of(rival, kv_ratio=ratio)).found(frame)
            if judged is None:
                continue
            verdict = judged[0]
            ahead, behind, open_ = ahead + (verdict is True), behind + (verdict is False), open_ + (verdict is None)
        total = ahead + behind + open_
        return f"{method} diverges less than {rival} at {ahead}, more at {behind}, open at {open_} of {total} budgets"

    return said


def lowest(frame: pd.DataFrame, key: str, method: str) -> str:
    """Per task the value of an option with the least divergence, and its KL: "news 0.3 (0.112)"."""
    sentences = []
    runs = frame[frame["method"].eq(method)]
    for (task, ratio), group in runs.groupby(["task", "kv_ratio"], sort=False):
        best = group.loc[group[KL].idxmin()]
        sentences.append(f"{task} at {ratio:g}: {option(best['setting'], key)} ({best[KL]:.3f})")
    return ", ".join(sentences)
