"""The tables of a causal measurement: a row per score, means over examples with their intervals; then its groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvexp.diagnose.causal.causal_files import METHODS, REMOVALS, SCORES, CausalExample, read_frame
from kvexp.diagnose.causal.causal_measures import LEAST, Floats, rank_correlation, score_quality, superiority
from kvexp.diagnose.causal.causal_pairs import mean_with_interval
from kvexp.diagnose.causal.removal_plan import HEAD, LAYER, SPAN, TOKEN
from kvexp.diagnose.classes import CLASSES
from kvexp.record import Run

FIFTHS = ("0-20 %", "20-40 %", "40-60 %", "60-80 %", "80-100 %")  # of the prompt, by position


@dataclass(frozen=True)
class CausalTables:
    """What was measured of one run. removals: every removal; quality: a row per score and example, of tokens.

    other: rank correlation per score and example of spans, tokens in one layer, tokens in one head; groups: of tokens
    of a class or a fifth of the prompt; layers: of each layer's score with the effect of tokens; joint: per method and
    example, all that it evicts removed at once. All have the columns `example` and (but removals) `method`.
    """

    examples: list[CausalExample]
    removals: pd.DataFrame
    quality: pd.DataFrame
    other: pd.DataFrame
    groups: pd.DataFrame
    layers: pd.DataFrame
    joint: pd.DataFrame


def causal_tables(run: Run, examples: Sequence[CausalExample]) -> CausalTables:
    """The tables of these examples of a run, which are complete."""
    removals, quality, other, groups, lines = [], [], [], [], []
    for each in examples:
        effects, scores, methods = (read_frame(run, each.example, part) for part in (REMOVALS, SCORES, METHODS))
        assert effects is not None and scores is not None and methods is not None, "an example is complete"
        named = {"example": each.example}
        removals.append(effects.assign(fifth=_fifths(effects["position"], each.tokens), **named))
        lines.append(methods.assign(**named))
        for name, own in scores.groupby("method", sort=False):
            joined = removals[-1].join(own.set_index("unit")[["rank", "kept"]])
            tokens = joined[joined["kind"] == TOKEN]
            if len(tokens):
                columns = [_column(tokens, key) for key in ("kl", "rank", "kept", "weight")]
                found = score_quality(columns[0], columns[1], columns[2], columns[3])
                quality.append(named | {"method": name} | vars(found))
            other += [
                named | {"method": name, "kind": kind, "rho": _rho(joined[joined["kind"] == kind])}
                for kind in (SPAN, LAYER, HEAD)
            ]
            groups += [
                named | {"method": name, "by": by, "group": group, "rho": _rho(part)}
                for by in ("class", "fifth")
                for group, part in tokens.groupby(by)
            ]
    whole = pd.concat(lines, ignore_index=True)
    return CausalTables(
        list(examples),
        pd.concat(removals, ignore_index=True),
        pd.DataFrame(quality),
        pd.DataFrame(other),
        pd.DataFrame(groups),
        whole[whole["layer"] >= 0],
        whole[whole["layer"] < 0],
    )


def _fifths(positions: pd.Series, tokens: int) -> list[str]:
    return [FIFTHS[min(len(FIFTHS) * int(at) // tokens, len(FIFTHS) - 1)] for at in positions]


def _column(frame: pd.DataFrame, name: str) -> Floats:
    return frame[name].to_numpy(dtype=np.float64)


def _rho(part: pd.DataFrame) -> float:
    if len(part) < LEAST:
        return math.nan
    return rank_correlation(_column(part, "kl"), _column(part, "rank"), _column(part, "weight"))


def score_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """One row per score, the largest mean rank correlation first."""
    rows: list[dict[str, Any]] = []
    for name, part in tables.quality.groupby("method", sort=False):
        row: dict[str, Any] = {"method": name, "n": len(part)}
        for key in ("rho", "precision", "top", "mass", "kept"):
            row[key], row[f"{key}_low"], row[f"{key}_high"] = mean_with_interval(_column(part, key))
        for key in ("rho_error", "mass_error"):  # of the mean over examples
            each = _column(part[part[key].notna()], key)
            row[key] = float(np.sqrt((each**2).mean() / len(each))) if len(each) else math.nan
        for kind in (SPAN, LAYER, HEAD):
            own = tables.other[(tables.other["method"] == name) & (tables.other["kind"] == kind)]
            row[f"rho_{kind}"] = mean_with_interval(_column(own, "rho"))[0]
        own = tables.joint[tables.joint["method"] == name]
        for key in ("kl", "gone", "gone_mass"):
            found = mean_with_interval(_column(own, key))
            row[f"joint_{key}"], row[f"joint_{key}_low"], row[f"joint_{key}_high"] = found
        rows.append(row)
    return sorted(rows, key=lambda row: -row["rho"] if math.isfinite(row["rho"]) else math.inf)


def group_rows(tables: CausalTables, by: str) -> list[dict[str, Any]]:
    """One row per score: its mean rank correlation within each group of tokens. by: class or fifth."""
    mine = tables.groups[tables.groups["by"] == by]
    means = mine.groupby(["method", "group"])["rho"].mean().unstack("group")
    order = [row["method"] for row in score_rows(tables)]
    return [{"method": name, **means.loc[name].to_dict()} for name in order]


def mass_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """Share of tokens and of the summed effect of tokens by class and by fifth, means over examples."""
    tokens = tables.removals[tables.removals["kind"] == TOKEN]
    tokens = tokens.assign(mass=tokens["weight"] * tokens["kl"].clip(lower=0))
    rows: list[dict[str, Any]] = []
    for by, order in (("class", CLASSES), ("fifth", FIFTHS)):
        sums = tokens.groupby(["example", by])[["weight", "mass"]].sum()
        shares = sums / sums.groupby("example").transform("sum")
        means = shares.groupby(by).sum() / tokens["example"].nunique()  # an example without the group has 0 of it
        each: dict[str, dict[Any, float]] = {key: means[key].to_dict() for key in ("weight", "mass")}
        rows += [
            {"group": name, **{key: values[name] for key, values in each.items()}}
            for name in order
            if name in means.index
        ]
    return rows


def gone_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """Per method: tokens in no head of any layer, where its evictions changed a likeliest token and where not."""
    rows = []
    for name, part in tables.joint.groupby("method", sort=False):
        flipped = part["flips"] > 0
        row: dict[str, Any] = {"method": name, "n": len(part), "wrong": int(flipped.sum())}
        for key in ("gone", "gone_mass"):
            row[f"{key}_wrong"] = float(part.loc[flipped, key].mean()) if flipped.any() else math.nan
            row[f"{key}_right"] = float(part.loc[~flipped, key].mean()) if (~flipped).any() else math.nan
        some, others = _column(part[flipped], "gone_mass"), _column(part[~flipped], "gone_mass")
        rows.append(row | {"auc": superiority(some, others)})
    return rows
