"""The runs of a sweep as one table with every example's scores, the points that a figure shows, and the paper's own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.lib.exhibits import HERE
from experiments.lib.stats import mean_interval, paired_difference
from kvexp.results.table import table
from kvexp.run.labels import override_label as setting_of
from kvexp.run.store import Run, check_same_prompts

Columns = dict[str, list[float]]
KEYS = ["model", "task", "method", "setting", "kv_ratio"]


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
    given: overrides beside the sweep's own, left out of `setting`: an exhibit compares the settings that it swept.
    """
    frame = table(outputs, {"hash": list(hashes), "experiment": list(experiments)}, first)
    setting = [without(spelled(words), given) for words in frame["setting"]] if "setting" in frame else ""
    baselines = frame["baseline"].where(frame["baseline"].notna(), frame["hash"]) if len(frame) else []
    pairs = zip(frame["hash"], baselines, strict=True) if len(frame) else ()
    scores = [_scores(outputs / name, outputs / str(base), first) for name, base in pairs]
    sent = [{row["example"]: row for row in Run.load(outputs / name).rows()} for name in frame["hash"]]
    return frame.assign(setting=setting, scores=scores, sent=sent)


def spelled(setting: str | None) -> str:
    """A setting with booleans as the yaml spells them: Hydra says True of a swept `true`."""
    return re.sub(r"=(True|False)(?= |$)", lambda found: found.group().lower(), setting or "")


def without(setting: str, overrides: Sequence[str]) -> str:
    """A setting less what these overrides put there."""
    for words in (spelled(setting_of([override])) for override in overrides):
        setting = f" {setting} ".replace(f" {words} ", " ").strip() if words else setting
    return setting


def _scores(folder: Path, baseline: Path, first: int | None) -> dict[str, dict[str, float]]:
    """Without questions that the baseline does not answer, where the task counts no others (docs/protocols.md)."""
    rows = [row for row in Run.load(folder).rows() if first is None or row["index"] < first]
    known = Run.load(baseline).rows() if any(row.get("answered") is not None for row in rows) else []
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
    made = pd.DataFrame(rows)
    if rival is not None:
        made = made.assign(**ahead(frame, metric, rival, setting))
    for name, (method, fixed) in (over or {}).items():
        made = made.assign(**ahead(frame, metric, method, fixed, name))
    if not numbers:
        return made
    for name, key in numbers.items():
        values = [option(words, key) for words in made["setting"]]
        made = made.assign(**{name: pd.to_numeric(pd.Series(values, index=made.index), errors="coerce")})
    return made.sort_values(["model", *numbers], na_position="first", ignore_index=True)


def ahead(frame: pd.DataFrame, metric: str, rival: str, setting: str | None = None, name: str = "ahead") -> Columns:
    """The columns name, name_low, name_high of `points`, in the order of the frame's runs; NaN for the rival itself."""
    found = [_ahead(frame, run, rival, setting, metric) for _, run in frame.iterrows()]
    return {f"{name}{end}": [each[i] for each in found] for i, end in enumerate(("", "_low", "_high"))}


def _baseline(full: pd.DataFrame, run: Any) -> Any:
    """The run's baseline, by its hash."""
    wanted = run["hash"] if run["verdict99"] == "baseline" else run["baseline"]
    found = full[full["hash"].eq(wanted)]
    return found.iloc[0] if len(found) else None


def _point(run: Any, base: Any, metric: str) -> dict[str, Any]:
    row: dict[str, Any] = {key: run[key] for key in KEYS} | {"metric": metric, "n": int(run["n"])}
    row["question"] = run.get("question")
    row |= {"value": float(run[metric])}
    if run["verdict99"] == "baseline":
        low, high = mean_interval([each[metric] for each in run["scores"].values() if metric in each])
        return row | {"low": low, "high": high, "of_full": 100.0, "of_full_low": 100.0, "of_full_high": 100.0}
    mean = float(base[metric]) if base is not None else math.nan
    each = {end: float(run[f"{metric}_{end}"]) for end in ("of_full", "low", "high")}
    row |= {"low": each["low"] * mean / 100, "high": each["high"] * mean / 100}
    return row | {"of_full": each["of_full"], "of_full_low": each["low"], "of_full_high": each["high"]}


def _ahead(frame: pd.DataFrame, run: Any, rival: str, setting: str | None, metric: str) -> tuple[float, float, float]:
    found = frame[frame["method"].eq(rival) & frame["model"].eq(run["model"]) & frame["task"].eq(run["task"])]
    found = found[found["kv_ratio"].eq(run["kv_ratio"])]
    if setting is None:
        same = found[found["setting"].eq(run["setting"])]
        found = same if len(same) else found[found["setting"].eq("")]
    else:
        found = found[found["setting"].eq(setting)]
    if run["method"] == "full" or found.empty or found.iloc[0]["hash"] == run["hash"]:
        return math.nan, math.nan, math.nan
    check_same_prompts(run["hash"], run.get("sent", {}), found.iloc[0]["hash"], found.iloc[0].get("sent", {}))
    return paired_difference(run["scores"], found.iloc[0]["scores"], metric)[:3]


COLUMNS = [
    "model",
    "task",
    "method",
    "kv_ratio",
    "setting",
    "metric",
    "value",
    "source",
    "kind",
    "reading_error",
    "note",
]
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
    """Those of the models and tasks that our table has: none at the testbed's scale, of other models."""
    paper = paper_numbers(name)
    ran = set(zip(ours["model"], ours["task"], strict=True))
    return paper[[pair in ran for pair in zip(paper["model"], paper["task"], strict=True)]]
