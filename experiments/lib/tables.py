"""The runs of a sweep as one table with every example's scores, the points that a figure shows, and the paper's own.

Numbers have 95 % intervals, and stand in three columns NAME, NAME_low and NAME_high.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib.exhibits import HERE
from kvexp.results.blocks import TOO_FEW
from kvexp.results.divergence import rests_on, share_interval
from kvexp.results.stats import LEVEL, Floats, interval_of_mean
from kvexp.results.table import table
from kvexp.run.labels import override_label as setting_of
from kvexp.run.store import Run, check_same_prompts
from kvexp.util.errors import ConfigError

Scores = Mapping[str, Mapping[str, float]]  # example -> metric -> number
Gap = tuple[float, float, float]  # mean, low, high
Side = Callable[[pd.Series], bool]  # whether a run is one of those compared
KEYS = ["model", "task", "method", "setting", "kv_ratio"]
ENDS = ("", "_low", "_high")


def frame_of(
    outputs: Path,
    hashes: Sequence[str],
    experiments: Sequence[str],
    first: int | None = None,
    given: Sequence[str] = (),
) -> pd.DataFrame:
    """`kvexp.results.table` of exactly these runs, plus `scores`: {example: {metric: number}} of those that count.

    first: the sweeps' limit; where another exhibit took more examples of a run, they are not this one's.

    experiments: the sweeps that asked for them; a run that others asked for too is shown by the labels it has there.
    given: overrides that are not the sweep's own, left out of `setting`: an exhibit compares what it swept.
    """
    frame = table(outputs, {"hash": list(hashes), "experiment": list(experiments)}, first)
    setting = [without(spelled(words), given) for words in frame["setting"]] if "setting" in frame else ""
    baselines = frame["baseline"].where(frame["baseline"].notna(), frame["hash"]) if len(frame) else []
    pairs = zip(frame["hash"], baselines, strict=True) if len(frame) else ()
    rows = functools.cache(lambda name: Run.load(outputs / str(name)).rows())
    scores = [_scores(rows(name), functools.partial(rows, base), first) for name, base in pairs]
    sent = [{row["example"]: row for row in rows(name)} for name in frame["hash"]]
    return frame.assign(setting=setting, scores=scores, sent=sent)


def spelled(setting: str | None) -> str:
    """A setting with booleans as the yaml spells them: Hydra says True of a swept `true`."""
    return re.sub(r"=(True|False)(?= |$)", lambda match: match.group().lower(), setting or "")


def without(setting: str, overrides: Sequence[str]) -> str:
    """A setting less what these overrides put there."""
    for words in (spelled(setting_of([override])) for override in overrides):
        setting = f" {setting} ".replace(f" {words} ", " ").strip() if words else setting
    return setting


def _scores(
    rows_of_run: Sequence[dict[str, Any]], baseline: Callable[[], Sequence[dict[str, Any]]], first: int | None
) -> dict[str, dict[str, float]]:
    """Without questions that the baseline does not answer, where the task counts no others (docs/protocols.md)."""
    rows = [row for row in rows_of_run if first is None or row["index"] < first]
    known = baseline() if any(row.get("answered") is not None for row in rows) else []
    missed = {row["example"] for row in known if row.get("answered") is False}
    return {row["example"]: row["metrics"] for row in rows if row.get("metrics") and row["example"] not in missed}


def option(setting: str, key: str, default: str = "") -> str:
    """The value of one override in a run's setting: option("method.noise=none seed=1", "method.noise") is "none"."""
    words = dict(word.split("=", 1) for word in str(setting).split() if "=" in word)
    return words.get(key, default)


def points(
    frame: pd.DataFrame,
    metric: str,
    rival: str | None = None,
    setting: str | None = None,
    over: Mapping[str, tuple[str, str]] | None = None,
    numbers: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """One row per run: value, low, high in the metric's unit, of_full and its interval in percent, and n.

    A run's interval is the paired one of its percentage, times the full cache's mean: it is made to be held against
    the full cache's line. Full's own interval is of its mean over examples. rival: a method; ahead, ahead_low,
    ahead_high are then the paired difference to its run of the same model, task and kv_ratio, and of this `setting`
    (None: of the run's own setting, or else the one with none). over: column -> (method, setting), the paired
    differences to several runs. numbers: column -> option of the setting, its value as a number (NaN for full), by
    which the rows are then sorted.
    """
    full = frame[frame["verdict99"].eq("baseline")]
    rows = [_point(run, _baseline(full, run), metric) for _, run in frame.iterrows()]
    table = pd.DataFrame(rows)
    if rival is not None:
        table = table.assign(**ahead(frame, metric, rival, setting))
    for name, (method, fixed) in (over or {}).items():
        table = table.assign(**ahead(frame, metric, method, fixed, name))
    if not numbers:
        return table
    for name, key in numbers.items():
        values = [option(words, key) for words in table["setting"]]
        table = table.assign(**{name: pd.to_numeric(pd.Series(values, index=table.index), errors="coerce")})
    return table.sort_values(["model", *numbers], na_position="first", ignore_index=True)


def ahead(
    frame: pd.DataFrame, metric: str, rival: str, setting: str | None = None, name: str = "ahead"
) -> dict[str, list[float]]:
    """The columns name, name_low, name_high of `points`, in the order of the frame's runs; NaN for the rival itself."""
    gaps = [_ahead(frame, run, rival, setting, metric) for _, run in frame.iterrows()]
    return {f"{name}{end}": [gap[i] for gap in gaps] for i, end in enumerate(ENDS)}


def _baseline(full: pd.DataFrame, run: Any) -> Any:
    """The run's baseline, by its hash."""
    wanted = run["hash"] if run["verdict99"] == "baseline" else run["baseline"]
    matching = full[full["hash"].eq(wanted)]
    return matching.iloc[0] if len(matching) else None


def _point(run: Any, base: Any, metric: str) -> dict[str, Any]:
    row: dict[str, Any] = {key: run[key] for key in KEYS} | {"metric": metric, "n": int(run["n"])}
    row["question"] = run.get("question")
    row |= {"value": float(run[metric])}
    if run["verdict99"] == "baseline":
        low, high = mean_interval([scores[metric] for scores in run["scores"].values() if metric in scores])
        return row | {"low": low, "high": high, "of_full": 100.0, "of_full_low": 100.0, "of_full_high": 100.0}
    mean = float(base[metric]) if base is not None else math.nan
    ends = {end: float(run[f"{metric}_{end}"]) for end in ("of_full", "low", "high")}
    row |= {"low": ends["low"] * mean / 100, "high": ends["high"] * mean / 100}
    return row | {"of_full": ends["of_full"], "of_full_low": ends["low"], "of_full_high": ends["high"]}


def _ahead(frame: pd.DataFrame, run: Any, rival: str, setting: str | None, metric: str) -> tuple[float, float, float]:
    rivals = frame[frame["method"].eq(rival) & frame["model"].eq(run["model"]) & frame["task"].eq(run["task"])]
    rivals = rivals[rivals["kv_ratio"].eq(run["kv_ratio"])]
    if setting is None:
        same = rivals[rivals["setting"].eq(run["setting"])]
        rivals = same if len(same) else rivals[rivals["setting"].eq("")]
    else:
        rivals = rivals[rivals["setting"].eq(setting)]
    if run["method"] == "full" or rivals.empty or rivals.iloc[0]["hash"] == run["hash"]:
        return math.nan, math.nan, math.nan
    check_same_prompts(run["hash"], run.get("sent", {}), rivals.iloc[0]["hash"], rivals.iloc[0].get("sent", {}))
    return paired_difference(run["scores"], rivals.iloc[0]["scores"], metric)[:3]


def with_interval(value: float, low: float, high: float) -> str:
    """A number with its interval, two digits each, as cells of pages have it."""
    return f"{value:#.2g} ({low:#.2g}..{high:#.2g})"


def markdown(head: Sequence[str], *rows: Sequence[str], right: bool = False) -> str:
    """A Markdown table of texts; right: all columns but the first are aligned to the right."""
    rule = "---:|" if right else "---|"
    lines = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (head, *rows))
    first, *rest = lines
    return "\n".join([first, f"|---|{rule * (len(head) - 1)}", *rest])


def between(page: str, begin: str, end: str, content: str, name: object) -> str:
    """A page with `content` between its lines begin and end; ConfigError where it lacks them. name: of the page."""
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ConfigError(f"{name} has no lines {begin} and {end}")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


COLUMNS = ["model", "task", "method", "kv_ratio", "setting", "metric", "value"]
COLUMNS += ["source", "kind", "reading_error", "note"]
KINDS = ("exact", "digitised", "text")


def paper_numbers(name: str) -> pd.DataFrame:
    """Every number of the paper for an exhibit; an empty table where the paper has none."""
    path = HERE / "paper" / f"{name}.csv"
    if not path.exists():
        return pd.DataFrame(columns=COLUMNS)
    return pd.read_csv(path, dtype={"setting": str}, comment="#").fillna(
        {"setting": "", "note": "", "reading_error": 0.0}
    )


def paper_numbers_for(name: str, ours: pd.DataFrame) -> pd.DataFrame:
    """The paper's numbers for the models and tasks of our table; none at the testbed's scale."""
    paper = paper_numbers(name)
    ran = set(zip(ours["model"], ours["task"], strict=True))
    return paper[[pair in ran for pair in zip(paper["model"], paper["task"], strict=True)]]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean (`kvexp.results.stats`); NaN for fewer than two values."""
    return interval_of_mean(np.array(values, dtype=np.float64), least=2)


def paired_difference(ours: Scores, theirs: Scores, metric: str) -> tuple[float, float, float, int]:
    """(mean of ours - theirs over the examples both scored, low, high, their number), in the metric's unit."""
    shared = [name for name in ours if name in theirs and metric in ours[name] and metric in theirs[name]]
    gaps = [ours[name][metric] - theirs[name][metric] for name in shared]
    low, high = mean_interval(gaps)
    return (float(np.mean(gaps)) if gaps else math.nan), low, high, len(gaps)


def ends(row: Any, name: str) -> Gap:
    """The columns NAME, NAME_low and NAME_high of one row: a number and its interval."""
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


def estimate(at: float, low: float, high: float, digits: int = 1, sign: bool = False) -> str:
    """ "96.1 (93.0 … 98.9)", or "96.1 (too few)" without an interval."""
    plus = "+" if sign else ""
    if math.isnan(low) or math.isnan(high):
        return f"{at:{plus}.{digits}f} ({TOO_FEW})"
    return f"{at:{plus}.{digits}f} ({low:{plus}.{digits}f} … {high:{plus}.{digits}f})"


def kl_estimate(kl: float, low: float, high: float, parts: Floats) -> str:
    """ "0.041 (0.024 … 0.095)"; what `rests_on` finds in the parts [n] of the mean replaces the upper end."""
    few, share = rests_on(parts)
    if math.isnan(low) or not few:
        return estimate(kl, low, high, 3)
    holds = "is" if len(few) == 1 else "are"
    return f"{kl:.3f} (from {low:.3f}, {len(few)} of {len(parts)} {holds} {100 * share:.0f} %)"


def interval(row: Any, name: str, digits: int = 1) -> str:
    """A number of a row and its interval: "96.1 (93.0 … 98.9)"."""
    return estimate(*ends(row, name), digits)


def signed(row: Any, name: str, digits: int = 1) -> str:
    """A difference and its interval: "+1.2 (-0.3 … 2.7)"."""
    return estimate(*ends(row, name), digits, sign=True)


def judge(row: Any, name: str, rule: Callable[[float, float], bool | None]) -> bool | None:
    """What a rule of `lib.verdicts` says of the interval of a row's number."""
    return rule(*ends(row, name)[1:])


def mean_of(values: Sequence[float]) -> Gap:
    """Mean of independent examples (prompts, documents; never layers or heads of one) and its interval, without NaN."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return float("nan"), float("nan"), float("nan")
    low, high = mean_interval(finite.tolist())
    return float(finite.mean()), low, high


def mean_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """`mean_of` as columns of a table."""
    return interval_columns(name, mean_of(values))


def means_by(
    frame: pd.DataFrame, by: Sequence[str], columns: Iterable[str], count: str = "prompts", sort: bool = True
) -> pd.DataFrame:
    """One row per group of `by`: its number of prompts as `count`, and `mean_columns` of each column."""
    rows = []
    for key, group in frame.groupby(list(by), sort=sort):
        row: dict[str, Any] = dict(zip(by, key, strict=True)) | {count: group["prompt"].nunique()}
        for name in columns:
            row |= mean_columns(name, group[name].tolist())
        rows.append(row)
    return pd.DataFrame(rows)


def interval_columns(name: str, gap: Gap) -> dict[str, float]:
    """A number of the whole table as columns that are the same in every row."""
    return {f"{name}{end}": value for end, value in zip(ENDS, gap, strict=True)}


def paired_gap(frame: pd.DataFrame, value: str, first: pd.Series, other: pd.Series, by: Sequence[str]) -> Gap:
    """One part of a frame less another, over the examples that both have; `by` names an example.

    Models that read the same prompts are averaged within a prompt: they are no further examples.
    """
    sides = [frame[mask].groupby(list(by))[value].mean() for mask in (first, other)]
    return mean_of((sides[0] - sides[1]).dropna().tolist())


def pooled_difference(frame: pd.DataFrame, first: Side, other: Side, metric: str) -> Gap:
    """Mean of one - other over (task, example), each the mean over the runs that a side chooses.

    Models, budgets and settings of a side are averaged within an example first: a document that several models read is
    one document, and counts once.
    """
    sides = [_means(frame[frame.apply(side, axis=1)], metric) for side in (first, other)]
    return mean_of((sides[0] - sides[1]).dropna().tolist())


def _means(runs: pd.DataFrame, metric: str) -> pd.Series:
    scored_rows = [
        {"example": f"{run['task']} {example}", "value": scored[metric]}
        for _, run in runs.iterrows()
        for example, scored in run["scores"].items()
        if metric in scored
    ]
    return pd.DataFrame(scored_rows, columns=["example", "value"]).groupby("example")["value"].mean()


def with_gaps(
    table: pd.DataFrame, frame: pd.DataFrame, metric: str, pairs: Mapping[str, tuple[Side, Side]]
) -> pd.DataFrame:
    """A table with the pooled difference of each pair of sides, by its name, in every row."""
    for name, (first, other) in pairs.items():
        table = table.assign(**interval_columns(name, pooled_difference(frame, first, other, metric)))
    return table


def pooled_kl(rows: pd.DataFrame) -> tuple[float, float, float]:
    """KL of the runs of `lib.verdicts.divergence_frame` as one sample, examples put together, and its interval."""
    sums, counts = (np.concatenate(rows[name].tolist()) for name in ("sums", "counts"))
    return float(sums.sum() / counts.sum()), *share_interval(sums, counts, LEVEL)


def of(method: str | None = None, setting: str | None = None, **wanted: Any) -> Side:
    """Runs of a method and setting (None: any), whose columns have these values: of("h2o", kv_ratio=0.9)."""
    if method is not None:
        wanted["method"] = method
    if setting is not None:
        wanted["setting"] = setting
    return lambda run: all(bool(run[name] == value) for name, value in wanted.items())
