"""The tables of a causal measurement: a row per score, means over examples with their intervals; then its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.text import Text

from kvexp.console import Console
from kvexp.diagnose.causal.causal_files import METHODS, REMOVALS, SCORES, CausalExample, read_frame
from kvexp.diagnose.causal.causal_measures import LEAST, Floats, rank_correlation, score_quality, superiority
from kvexp.diagnose.causal.removal_effects import ANSWER_SCORES
from kvexp.diagnose.causal.removal_plan import HEAD, LAYER, SPAN, TOKEN
from kvexp.diagnose.classes import CLASSES
from kvexp.record import Run
from kvexp.results import intervals, stats
from kvexp.results.columns import Column, plain
from kvexp.results.render import print_columns
from kvexp.results.units import TOO_FEW, absent, fixed

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


def mean_with_interval(values: Floats) -> tuple[float, float, float]:
    """Mean over the examples that are defined, and its 95 % interval: NaN for fewer than `stats.MIN_PAIRS`."""
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan, math.nan, math.nan
    if len(values) < stats.MIN_PAIRS:
        return float(values.mean()), math.nan, math.nan
    moments = intervals.mean_moments(values)
    means = stats.resampled_means(moments, stats.resamples_for(stats.LEVEL))
    return float(values.mean()), *intervals.mean_interval(values, means, stats.LEVEL)


def score_rows(tables: CausalTables) -> list[dict[str, Any]]:
    """One row per score, the largest mean rank correlation first."""
    rows: list[dict[str, Any]] = []
    for name, part in tables.quality.groupby("method", sort=False):
        row: dict[str, Any] = {"method": name, "n": len(part)}
        for key in ("rho", "precision", "mass", "kept"):
            row[key], row[f"{key}_low"], row[f"{key}_high"] = mean_with_interval(_column(part, key))
        for key in ("rho_error", "mass_error"):  # of the mean over examples
            each = _column(part[part[key].notna()], key)
            row[key] = float(np.sqrt((each**2).mean() / len(each))) if len(each) else math.nan
        for kind in (SPAN, LAYER, HEAD):
            own = tables.other[(tables.other["method"] == name) & (tables.other["kind"] == kind)]
            row[f"rho_{kind}"] = mean_with_interval(_column(own, "rho"))[0]
        own = tables.joint[tables.joint["method"] == name]
        for key in ("kl", "gone", "gone_mass"):
            row[f"joint_{key}"] = float(own[key].mean()) if len(own) else math.nan
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


def show_causal(tables: CausalTables, title: str, console: Console) -> None:
    """Print every table, and what is needed to read it."""
    for words, rows, columns in _printed(tables):
        if rows:
            console.print(Text(f"{title}: {words}", style="bold"))
            print_columns(rows, columns, 1, console)
    for line in notes(tables):
        console.print(line, highlight=False, markup=False)


def _printed(tables: CausalTables) -> Iterator[tuple[str, list[dict[str, Any]], list[Column]]]:
    name = plain("method", "score", right=False)
    yield (
        "scores against the effect of removing tokens",
        score_rows(tables),
        [
            name,
            Column("rank\ncorrelation", lambda row: _with_interval(row, "rho")),
            Column("sampling\nerror", lambda row: fixed(row["rho_error"], 3)),
            Column("of\nspans", lambda row: fixed(row["rho_span"], 2)),
            Column("in one\nlayer", lambda row: fixed(row["rho_layer"], 2)),
            Column("in one\nhead", lambda row: fixed(row["rho_head"], 2)),
            Column("precision\nat budget", lambda row: _share(row["precision"])),
            Column("effect\nkept", lambda row: _share(row["mass"])),
            Column("tokens\nkept", lambda row: _share(row["kept"])),
            Column("KL of all\nevicted", lambda row: fixed(row["joint_kl"], 3)),
            Column("gone in\nall heads", lambda row: _share(row["joint_gone"])),
        ],
    )
    for by, groups, words in (("class", CLASSES, "class of token"), ("fifth", FIFTHS, "position")):
        found = [group for group in groups if group in set(tables.groups.get("group", ()))]
        columns = [Column(group, lambda row, group=group: fixed(row.get(group), 2)) for group in found]  # type: ignore[misc]
        yield f"rank correlation by {words}", group_rows(tables, by), [name, *columns]
    share = [Column("tokens", lambda row: _share(row["weight"])), Column("effect", lambda row: _share(row["mass"]))]
    yield "where the effect is", mass_rows(tables), [plain("group", "tokens of", right=False), *share]
    yield (
        "tokens gone in all heads of all layers, against wrong answers",
        gone_rows(tables),
        [
            name,
            Column("wrong", lambda row: f"{row['wrong']} of {row['n']}"),
            Column("gone,\nwrong", lambda row: _share(row["gone_wrong"])),
            Column("gone,\nright", lambda row: _share(row["gone_right"])),
            Column("their effect,\nwrong", lambda row: _share(row["gone_mass_wrong"])),
            Column("their effect,\nright", lambda row: _share(row["gone_mass_right"])),
            Column("tells apart", lambda row: fixed(row["auc"], 2)),
        ],
    )


def _with_interval(row: Mapping[str, Any], key: str) -> str:
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return f"{fixed(row[key], 3)} ({TOO_FEW if absent(low) else f'{low:.3f}..{high:.3f}'})"


def _share(value: Any) -> str:
    return "-" if absent(value) else f"{100 * value:.1f} %"


def notes(tables: CausalTables) -> list[str]:
    """What a reader must know of the numbers."""
    examples, counts = tables.examples, tables.removals["kind"].value_counts()
    made, seconds = len(tables.removals), sum(each.seconds for each in examples)
    floor = max(each.floor for each in examples)
    tokens = tables.removals[tables.removals["kind"] == TOKEN]
    below = float((tokens["kl"] <= floor).mean()) if len(tokens) else math.nan
    removed = ", ".join(f"{counts[kind]} {kind}s" for kind in (TOKEN, SPAN, LAYER, HEAD) if kind in counts)
    return [
        f"{len(examples)} examples of {np.mean([each.tokens for each in examples]):.0f} tokens; {made} removals "
        f"({removed}), {60 * made / max(seconds, 1e-9):.0f} a minute; judged over "
        f"{np.mean([each.judged for each in examples]):.1f} tokens of the full cache's own answer",
        f"a row without a removal has KL up to {floor:.1e} nats (rounding); {_share(below)} of the removed tokens have "
        "no more than that",
        "effect: mean KL(full || without the token) per token of the answer. rank correlation: Spearman's, weighted by "
        "the sampling plan, of a score's percentile (mean over layers and heads); (..): 95 % over examples; sampling "
        "error: of that mean, by the tokens drawn. effect kept: share of the summed effect on tokens that are kept; a "
        "random choice has tokens kept, in precision too. KL of all evicted: all that the method does not keep at the "
        "prompt's end, removed at once; wrong: that changes a likeliest token; tells apart: how probably a wrong "
        "example has more of the effect on tokens gone in all heads than a right one (0.5: it says nothing).",
        f"{', '.join(ANSWER_SCORES)}: by the answer's own queries, which no method can see.",
    ]
