"""Divergence from the full cache: divergence.jsonl as a table with intervals by example and verdicts.

Means are over tokens; examples are what an interval resamples, since the tokens of one answer are not independent. A
first token that the full prefill predicts is the same for every method and counts apart (`first_kl`). `PerExample` is
the one reader of the lines. Also here: how a run's own answers differ from the full cache's.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import stats
from kvexp.results.blocks import Block, Column, interval, numeric, plain, print_blocks, print_columns, records
from kvexp.results.blocks import Row as TableRow
from kvexp.results.read import Folder, Row, Runs, baseline_of, check_pair, number
from kvexp.results.stats import LEVEL, Floats, is_all_or_nothing
from kvexp.results.table import (
    FEW_SLOTS,
    FEW_SLOTS_WORDS,
    METHOD,
    METHOD_AND_SETTING,
    N,
    n_differs,
    parts,
    question_column,
    shared_settings,
)
from kvexp.run.store import EPSILON_KL, EPSILON_TOP1, OWN, TEXTS, WORSE_KL, Line, Run, run_name
from kvexp.util.errors import ConfigError
from kvexp.util.output import Console

QUANTILES = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p95": 0.95, "kl_p99": 0.99}
# Mean divergences are skewed so far that 20 to 50 examples miss the tail: their intervals are made at a fifth of the
# error asked for, which in simulation (tests/results/test_divergence_table.py) keeps the false verdicts at the
# nominal rate.
TAIL = 5

EQUIVALENT, UNDECIDED, WORSE = VERDICTS = "equivalent", "undecided", "worse"


@dataclass(frozen=True)
class PerExample:
    """Divergence of one run along one kind of text: an entry per example [n], summed over its tokens.

    each_kl, each_same, each_place [tokens.sum()]: KL, whether the likeliest token is the same, and the place in the
    text, from 1, of every token. first_kl: of first tokens that the prefill predicts, which are in nothing else.
    """

    names: list[str]
    tokens: Floats
    kl: Floats
    differs: Floats
    change: Floats  # log-probability of the forced token, variant less full
    change_squared: Floats
    each_kl: Floats
    each_same: Floats
    each_place: Floats
    first_kl: Floats

    @classmethod
    def of(cls, lines: Iterable[Line]) -> PerExample | None:
        """Read the lines of divergence.jsonl; None where no line has a token predicted after the eviction."""
        names, columns, tokens_of, first = [], [], [], []
        for line in sorted(lines, key=lambda line: line["index"]):
            skip = int(line["first_by_prefill"])
            kl, same = np.array(line["kl"]), np.array(line["same_top1"], dtype=np.float64)
            change = np.array(line["logprob"]) - np.array(line["full_logprob"])
            first += kl[:skip].tolist()
            if len(kl) == skip:
                continue
            place = np.arange(skip + 1, len(kl) + 1)
            kl, same, change = np.maximum(kl[skip:], 0), same[skip:], change[skip:]
            names.append(line["example"])
            tokens_of.append([kl, same, place])
            columns.append([len(kl), kl.sum(), (1 - same).sum(), change.sum(), (change * change).sum()])
        if not names:
            return None
        tokens, sums, differs, changes, squares = np.array(columns, dtype=np.float64).T
        each_kl, each_same, places = np.concatenate(tokens_of, axis=1)
        return cls(names, tokens, sums, differs, changes, squares, each_kl, each_same, places, np.array(first))

    def by_position(self) -> pd.DataFrame:
        """Mean KL and share of equal top tokens at each place of the text, from 1: columns position, n, kl, top1."""
        rows = []
        for place in np.unique(self.each_place):
            here = self.each_place == place
            means = (float(values[here].mean()) for values in (self.each_kl, self.each_same))
            rows.append((int(place), int(here.sum()), *means))
        return pd.DataFrame(rows, columns=["position", "n", "kl", "top1"])


def per_example(run: Run, text: str, first: int | None = None) -> PerExample | None:
    """What a run recorded along one kind of text; None where it has nothing. first: of the task's first examples."""
    return _per_text(run, (text,), first).get(text)


def _per_text(run: Run, texts: Sequence[str], first: int | None) -> dict[str, PerExample]:
    """`per_example` of those kinds of text that a run has, which is read once."""
    lines = run.divergence().values() if run.baseline is not None else ()
    shown = [line for line in lines if first is None or line["index"] < first]
    by_text = {text: PerExample.of(line for line in shown if line["text"] == text) for text in texts}
    return {text: measured for text, measured in by_text.items() if measured is not None}


def frame_of(runs: Runs, epsilon_kl: float | None = None, epsilon_top1: float | None = None) -> pd.DataFrame:
    """`divergence_table` of the runs shown, with the columns of `answer_changes`."""
    frame = divergence_table(runs.ran, epsilon_kl, epsilon_top1, runs.first)
    if frame.empty:
        return frame
    changes = {folder.run.hash: answer_changes(folder, baseline_of(folder, runs.known)) for folder in runs.ran}
    return frame.assign(**{name: [changes[key][name] for key in frame["hash"]] for name in NO_ANSWERS})


def divergence_table(
    folders: Iterable[Folder],
    epsilon_kl: float | None = None,
    epsilon_top1: float | None = None,
    first: int | None = None,
) -> pd.DataFrame:
    """Rows for the runs that have lines; verdicts are corrected for the runs of one model, task, NUMERICS and text.

    epsilon_kl, epsilon_top1: None takes what each run was asked for with (`epsilon_kl` of its configuration). first: of
    the task's first examples alone.
    """
    families: dict[tuple[str, str], list[tuple[Folder, PerExample]]] = defaultdict(list)
    for folder in folders:
        for text, measured in _per_text(folder.run, TEXTS, first).items():
            families[folder.family, text].append((folder, measured))
    rows = []
    for (_, text), family in families.items():
        level = stats.corrected_level(len(family))
        for folder, measured in family:
            config = (folder.run.command or {}).get("config") or {}
            kl = epsilon_kl or float(config.get("epsilon_kl") or EPSILON_KL)
            top1 = epsilon_top1 or float(config.get("epsilon_top1") or EPSILON_TOP1)
            beyond = float(config.get("worse_kl") or WORSE_KL)
            rows.append(_row(folder, measured, text, level, kl, top1) | {"worse": _worse(measured, beyond)})
    return pd.DataFrame(rows)


def _row(
    folder: Folder, measured: PerExample, text: str, level: float, epsilon_kl: float, epsilon_top1: float
) -> dict[str, Any]:
    total = measured.tokens.sum()
    shares = share_intervals((measured.kl, measured.differs), measured.tokens, (stats.LEVEL, level))
    (kl, kl_corrected), (top1, top1_corrected) = shares
    same_top1 = np.clip((1 - top1[1], 1 - top1[0]), 0, 1)  # a share; NaN stays
    change = float(measured.change.sum() / total)
    row: dict[str, Any] = {**folder.labels, "question": folder.question, "text": text}
    row |= {"n": len(measured.names), "tokens": int(total)}
    row |= {"kl": float(measured.kl.sum() / total), "kl_low": kl[0], "kl_high": kl[1]}
    row |= {name: float(np.quantile(measured.each_kl, q)) for name, q in QUANTILES.items()}
    row |= {"kl_max": float(measured.each_kl.max()), "first_kl": _mean(measured.first_kl)}
    few, share = rests_on(measured.kl)
    row |= {"rests_on": " ".join(measured.names[place] for place in few), "rests_on_share": share}
    row |= {"top1": 1 - float(measured.differs.sum() / total), "top1_low": same_top1[0], "top1_high": same_top1[1]}
    row |= {"dlogprob": change, "dlogprob_rms": math.sqrt(measured.change_squared.sum() / total)}
    row |= {"ppl_ratio": math.exp(-change), "epsilon": epsilon_kl, "epsilon_top1": epsilon_top1}
    row["verdict_kl"] = decide(kl_corrected, epsilon_kl)
    row["verdict_top1"] = decide(top1_corrected, epsilon_top1)
    row |= _of_an_engine(folder.run, text)
    receipts = [row["receipt"] for row in folder.scored.values() if row.get("receipt")]  # none: divergence=only
    for name in ("slots", "kv_bytes"):
        values = np.array([number(receipt.get(name)) for receipt in receipts])
        row[name] = _mean(values[np.isfinite(values)])
    return row | {"few_slots": bool(row["slots"] < FEW_SLOTS), "hash": folder.run.hash}


def _worse(measured: PerExample, beyond: float) -> float:
    """Share of the examples whose mean KL is beyond so many nats per token."""
    return float(np.mean(measured.kl / measured.tokens > beyond))


def _of_an_engine(run: Run, text: str) -> dict[str, float]:
    """Mean KL to transformers' full cache of an engine's run (kl_transformers) and of its full cache (engine_kl).

    NaN for runs of kvexp itself.
    """
    lines = [line for line in run.divergence().values() if line["text"] == text]
    names = ("kl_transformers", "engine_kl")
    every = {
        name: [nats for line in lines for nats in line.get(name, [])[line["first_by_prefill"] :]] for name in names
    }
    return {name: _mean(np.array(nats)) for name, nats in every.items()}


NAMED = 4  # runs that a sentence names; of more it says how many


def some(names: Sequence[str]) -> str:
    """The first NAMED, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on one panel of `divergence_table`: which runs are within epsilon of the full cache, which may be.

    Empty where no row has an interval.
    """
    judged = [row for row in rows if not math.isnan(row["kl_low"])]
    runs = {verdict: [run_name(row) for row in judged if row["verdict_kl"] == verdict] for verdict in VERDICTS}
    limits = " or ".join(f"{limit:g}" for limit in sorted({row["epsilon"] for row in judged}))
    near, undecided, worse = (runs[verdict] for verdict in VERDICTS)
    words = [f"{some(near)} {'is' if len(near) == 1 else 'are'} within {limits} nats of the full cache"] if near else []
    words += [f"{some(undecided)} may be within {limits} nats of the full cache"] if undecided else []
    others = "all others are" if words and len(worse) > 1 else "all are" if len(worse) > 1 else f"{some(worse)} is"
    return "; ".join([*words, *([f"{others} farther{'' if words else f' than {limits} nats'}"] if worse else [])])


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def rests_on(sums: Floats) -> tuple[list[int], float]:
    """The one or two examples of a sum [n] that make up half of it or more, and their share; none of less: [], NaN.

    Two count among twenty or more. Where there are any, the upper end of the mean's interval says little.
    """
    order = np.argsort(-sums, kind="stable")
    for count in range(1, min(2, len(sums) // 10) + 1):
        share = float(sums[order[:count]].sum() / max(sums.sum(), 1e-300))
        if share >= 0.5:
            return order[:count].tolist(), share
    return [], math.nan


def share_interval(sums: Floats, tokens: Floats, level: float) -> tuple[float, float]:
    """Interval of sum(sums) / sum(tokens), examples resampled; NaN under MIN_PAIRS of them."""
    return share_intervals((sums,), tokens, (level,))[0][0]


def share_intervals(sums: Sequence[Floats], tokens: Floats, levels: Sequence[float]) -> list[list[stats.Interval]]:
    """`share_interval` of several sums of the same examples, at every level."""
    if len(tokens) < stats.MIN_PAIRS:
        return [[stats.NONE for _ in levels] for _ in sums]
    finer = [1 - (1 - level) / TAIL for level in levels]
    counts = [stats.resamples_for(level) for level in finer]
    blocks = stats.resampled_blocks([stats.ratio_moments(sums, tokens) for sums in sums], max(counts))
    made_of = list(zip(finer, counts, strict=True))
    return [stats.ratio_intervals(sums, tokens, means, made_of) for sums, means in zip(sums, blocks, strict=True)]


def decide(interval: tuple[float, float], epsilon: float) -> str:
    """Verdict on an interval: equivalent where it is below epsilon, worse where it is above, else undecided."""
    low, high = interval
    if high < epsilon:
        return EQUIVALENT
    return WORSE if low > epsilon else UNDECIDED


def compared(folders: Mapping[str, Folder], text: str, alike: Sequence[str] = ()) -> pd.DataFrame:
    """`compared_means` of every two runs of one model, task and NUMERICS with the same baseline.

    folders: hash -> run; alike: labels two runs have to share, such as `kv_ratio`. ConfigError where two such runs
    were sent different tokens.
    """
    means_by_name = {name: means for name, folder in folders.items() if (means := example_means(folder, text))}
    labels = {name: (folder.family, *(folder.labels.get(label) for label in alike)) for name, folder in folders.items()}

    def comparable(first_name: str, second_name: str) -> bool:
        first, second = folders[first_name], folders[second_name]
        if labels[first_name] != labels[second_name] or first.run.baseline != second.run.baseline:
            return False
        check_pair(first, second)
        return True

    return compared_means(means_by_name, comparable)


def example_means(folder: Folder, text: str) -> dict[str, float]:
    """Example -> mean KL per token of a run's forced text; empty where it has none."""
    measured = per_example(folder.run, text)
    return {} if measured is None else dict(zip(measured.names, measured.kl / measured.tokens, strict=True))


def compared_means(
    means: Mapping[str, Mapping[str, float]], comparable: Callable[[str, str], bool] = lambda first, other: True
) -> pd.DataFrame:
    """Every two comparable runs: mean KL of the first less the second over the examples both have.

    means: run -> example -> mean KL per token. p is two-sided, from Student's t of the per-example means; `holm` is p
    after Holm's correction over all pairs of the table, and `better` names the run with less divergence where that is
    below 0.05.
    """
    rows = []
    for first, other in itertools.combinations(means, 2):
        if comparable(first, other):
            shared = [example for example in means[first] if example in means[other]]
            gaps = np.array([means[first][example] - means[other][example] for example in shared])
            rows.append({"one": first, "other": other, "n": len(shared), **_difference(gaps)})
    frame = pd.DataFrame(rows, columns=["one", "other", "n", "difference", "low", "high", "p"])
    frame = frame.assign(holm=holm_corrected(frame["p"].to_numpy(dtype=np.float64)))
    ahead = np.where(frame["difference"] < 0, frame["one"], frame["other"])
    return frame.assign(better=np.where(frame["holm"] < 1 - stats.LEVEL, ahead, ""))


def _difference(gaps: Floats) -> dict[str, float]:
    n, mean = len(gaps), _mean(gaps)
    low, high = stats.interval_of_mean(gaps)
    if math.isnan(low):
        return {"difference": mean, "low": low, "high": high, "p": math.nan}
    error = gaps.std(ddof=1) / math.sqrt(n)
    p = stats.t_tail(abs(mean) / error, n - 1) if error > 0 else float(mean == 0)
    return {"difference": mean, "low": low, "high": high, "p": p}


def holm_corrected(p: Floats) -> Floats:
    """Holm's step-down correction of p [P]: the k-th smallest times the number left, never falling; NaN stays NaN."""
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * (len(order) - np.arange(len(order)))), 1.0)
    return corrected


NO_ANSWERS = {"same_answers": math.nan, "same_tokens": math.nan, "parts_at": math.nan}


def answer_changes(folder: Folder, baseline: Folder | None) -> dict[str, float]:
    """Free-running answers compared with the full cache's, over the examples both answered.

    same_answers: share of answers with the same tokens throughout; same_tokens: share of places with the same token,
    mean over answers, out of the longer one's places; parts_at: median place, from 1, of the first token that differs
    (or that only one answer has), over the answers that do. NaN where rows hold no `output_tokens` (recorded before) or
    nothing differs.
    """
    pairs = [(row["output_tokens"], full["output_tokens"]) for row, full in _pairs(folder, baseline, "output_tokens")]
    if not pairs:
        return dict(NO_ANSWERS)
    same = [list(map(int.__eq__, *pair)) for pair in pairs]
    parted = [len(matches) if all(matches) else matches.index(False) for matches in same]
    parted = [at + 1 for at, (answer, full) in zip(parted, pairs, strict=True) if at < max(len(answer), len(full))]
    shares = [sum(matches) / max(map(len, pair)) for matches, pair in zip(same, pairs, strict=True)]
    return {
        "same_answers": 1 - len(parted) / len(pairs),
        "same_tokens": float(np.mean(shares)),
        "parts_at": float(np.median(parted)) if parted else math.nan,
    }


def choice_changes(folder: Folder, baseline: Folder | None) -> dict[str, Any]:
    """Flips of a score that is right or wrong, and KL over the choices; empty where nothing was chosen.

    Flips as in "Accuracy is Not All You Need" (arXiv:2407.09141): equal accuracies can hide as many answers lost as
    won. lost: examples right with the full cache and wrong here; won: the other way; choice_kl: KL(full || run) in
    nats, mean over examples, of the distributions that the choices' summed log-probabilities give, with its 95 %
    interval.
    """
    pairs = _pairs(folder, baseline, "choices")
    if not pairs:
        return {}
    name = next(iter(pairs[0][1]["metrics"]), "")
    scores, full = (np.array([number(pair[side]["metrics"].get(name)) for pair in pairs]) for side in (0, 1))
    changes: dict[str, Any] = {"n": len(pairs), "metric": name, "lost": None, "won": None}
    if is_all_or_nothing(scores, full):
        changes |= {"lost": int((full > scores).sum()), "won": int((scores > full).sum())}
    kl = np.array([value for pair in pairs if (value := choice_kl(*(side["choices"] for side in pair))) is not None])
    low, high = share_interval(kl, np.ones(len(kl)), LEVEL) if len(kl) else (math.nan, math.nan)
    return changes | {"choice_kl": float(kl.mean()) if len(kl) else math.nan, "kl_low": low, "kl_high": high}


def choice_kl(choices: Mapping[str, Any], full: Mapping[str, Any]) -> float | None:
    """KL(full || one) in nats over the same choices; None where they are not the same, or a single one."""
    logs = [np.array([number(value) for value in side.get("logprobs", [])]) for side in (full, choices)]
    if len(logs[0]) != len(logs[1]) or len(logs[0]) < 2 or not all(np.isfinite(logprobs).all() for logprobs in logs):
        return None
    shifted = [logprobs - logprobs.max() for logprobs in logs]
    p, q = (logprobs - math.log(np.exp(logprobs).sum()) for logprobs in shifted)  # log_softmax
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def choice_table(runs: Runs) -> pd.DataFrame:
    """A row per run of a task that chooses: labels, question, the numbers of `choice_changes`, hash."""
    rows = []
    for folder in runs.ran:
        changes = choice_changes(folder, baseline_of(folder, runs.known))
        if changes:
            rows.append({**folder.labels, "question": folder.question, **changes, "hash": folder.run.hash})
    return pd.DataFrame(rows)


def _pairs(folder: Folder, baseline: Folder | None, field: str) -> list[tuple[Row, Row]]:
    """(run's row, baseline's row) of the examples of which both have `field`; none for the baseline itself, and for a
    baseline of another NUMERICS.
    """
    if baseline is None or folder.is_baseline or baseline.run.numerics != folder.run.numerics:
        return []
    both = [(row, baseline.scored.get(name)) for name, row in folder.scored.items()]
    return [(row, full) for row, full in both if full is not None and row.get(field) and full.get(field)]


DIVERGENCES = ("kl", "top1")  # what may order the runs of one kv_ratio
NO_END = 100  # nats per token: where few examples diverge at all, an interval may end anywhere above
KL_INTERVAL = interval("95 %", "kl_low", "kl_high", 4, most=NO_END)


def choice_columns(rows: Sequence[TableRow]) -> tuple[list[Column], list[Column]]:
    """Columns of a frame of `choice_table`: those that name a row, and all others."""
    names = [METHOD_AND_SETTING, plain("kv_ratio", "kv_ratio"), *question_column(rows)]
    return [*names, N], [
        numeric("right to\nwrong", "lost", 0),
        numeric("wrong to\nright", "won", 0),
        numeric("KL over\nchoices", "choice_kl", 4),
        KL_INTERVAL,
    ]


def ordered(frame: pd.DataFrame, order: str | None) -> pd.DataFrame:
    """Rows by kv_ratio, the largest first; of one kv_ratio and n (there is no rank across n) by one of DIVERGENCES."""
    metric = order or DIVERGENCES[0]
    if metric not in DIVERGENCES:
        raise ConfigError(f"a divergence is ordered by one of {', '.join(DIVERGENCES)}, got {metric}")
    return frame.sort_values(["kv_ratio", "n", metric], ascending=[False, False, metric == "kl"])


def heading(rows: Sequence[TableRow]) -> str:
    """What the title of a printed table says after model and task."""
    along = "its own greedy answer" if rows[0]["text"] == OWN else "the reference answer"
    return f"KL divergence from the full cache along {along}"


DIFFERENT_N = (
    "n differs between runs of one table: KL and its verdict are over the examples that a run was measured on, and say "
    "nothing of those it failed on or has not come to."
)


def notes(runs: Runs, frame: pd.DataFrame) -> list[str]:
    """The runs of too few slots, and what the verdicts and columns of these rows stand for."""
    kl = " or ".join(f"{value:g}" for value in sorted(set(frame["epsilon"])))
    percent = " or ".join(f"{100 * value:g} %" for value in sorted(set(frame["epsilon_top1"])))
    few = {f"{run_name(row)} ({row['slots']:.1f})": None for row in records(frame) if row["few_slots"]}
    return [
        *([DIFFERENT_N] if any(block["n"].nunique() > 1 for _, _, block in parts(frame, "text")) else []),
        *([f"{FEW_SLOTS_WORDS}: {', '.join(few)}"] if few else []),
        f"KL in nats per token, mean over tokens, 95 % interval over examples; equivalent: within {kl}, worse: beyond; "
        f"top-1: share of tokens with the same likeliest token, equivalent: no more than {percent} differ; a first "
        "token that the prefill predicts, the same for every run, is left out; equal tokens, parts at: of the answers "
        "a run writes itself, median of the first token that differs; what a KL means: docs/kl_meaning.md",
    ]


def columns_of(rows: Sequence[TableRow]) -> tuple[list[Column], list[Column]]:
    """Columns of a frame of `frame_of`: those that name a row, and all others."""
    settings = any(row.get("setting") for row in rows)
    measured = any(not math.isnan(row["engine_kl"]) for row in rows)
    names = [METHOD_AND_SETTING if settings else METHOD, plain("kv_ratio", "kv_ratio"), *question_column(rows)]
    return [*names, *([N] if n_differs(rows) else [])], [
        numeric("KL", "kl", 4),
        KL_INTERVAL,
        *(
            [numeric("KL to\ntransformers", "kl_transformers", 4), numeric("of it the\nengine", "engine_kl", 4)]
            * measured
        ),
        plain("verdict_kl", "verdict\non KL", right=False),
        *([] if n_differs(rows) else [N]),
        plain("tokens", "tokens"),
        numeric("median", "kl_p50", 4),
        numeric("99 % of\ntokens", "kl_p99", 2),
        numeric("same\ntop-1 %", "top1", 1, 100),
        interval("95 %", "top1_low", "top1_high", 1, 100),
        plain("verdict_top1", "verdict\non top-1", right=False),
        numeric("perplexity\nratio", "ppl_ratio", 3),
        numeric("equal\ntokens %", "same_tokens", 0, 100),
        numeric("parts\nat", "parts_at", 1),
    ]


def print_compared(
    runs: Runs,
    frame: pd.DataFrame,
    blocks: Iterable[Block],
    below: Iterable[str],
    alike: Sequence[str],
    console: Console,
) -> None:
    """Print the tables of a frame of `frame_of`, each with every two of its runs compared.

    blocks, below: the tables and the lines below them all; alike: labels that two runs have to share.
    """
    known = sorted({name for folder in runs.ran for name in folder.labels})
    if wrong := [name for name in alike if name not in known]:
        raise ConfigError(f"--alike: no run has a label {', '.join(wrong)}; their labels are {', '.join(known)}")
    for block in blocks:
        print_blocks([block], [], console)
        text, hashes = str(block.rows[0]["text"]), {row["hash"] for row in block.rows}
        block_frame = frame[frame["hash"].isin(hashes) & frame["text"].eq(text)]
        names = {row["hash"]: run_name(row) for row in shared_settings(records(block_frame))[1]}
        by_hash = {key: folder for key, folder in runs.known.items() if key in hashes}
        pairs = compared(by_hash, text, alike)
        print_columns(records(pairs), _columns_of_pairs(names), 2, console)
    print_blocks([], below, console)


def _columns_of_pairs(names: Mapping[str, str]) -> list[Column]:
    """Columns of a frame of `compared`. names: hash -> name of a run."""

    def less(row: TableRow) -> str:
        return {row["one"]: "one", row["other"]: "other"}.get(row["better"], "undecided")

    return [
        Column("one", lambda row: names[row["one"]], right=False),
        Column("other", lambda row: names[row["other"]], right=False),
        N,
        numeric("KL of one\nless other", "difference", 4, sign="+"),
        interval("95 %", "low", "high", 4, sign="+"),
        Column("p (Holm)", "holm", "{:.2g}".format),
        Column("less", less, right=False),
    ]
