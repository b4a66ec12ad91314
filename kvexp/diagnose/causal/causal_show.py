"""A causal measurement in words: its tables as they are printed, and what is needed to read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.text import Text

from kvexp.console import Console
from kvexp.diagnose.causal.causal_measures import TOP, mass_of_top
from kvexp.diagnose.causal.causal_pairs import YARDSTICK, company_rows, pair_rows
from kvexp.diagnose.causal.causal_tables import FIFTHS, CausalTables, gone_rows, group_rows, mass_rows, score_rows
from kvexp.diagnose.causal.removal_effects import ANSWER_SCORES
from kvexp.diagnose.causal.removal_plan import HEAD, LAYER, SPAN, TOKEN
from kvexp.diagnose.classes import CLASSES
from kvexp.record import Run
from kvexp.results import stats
from kvexp.results.columns import Column, plain
from kvexp.results.question_place import question_of, titled
from kvexp.results.render import print_columns
from kvexp.results.units import TOO_FEW, absent, fixed

COMPANY = {  # of `company_rows`
    "gone": "tokens gone in all heads",
    "gone_mass": "effect on those tokens",
    "evicted": "effect on tokens evicted",
    "rho": "the score's rank correlation",
}


def causal_title(run: Run) -> str:
    """Task, budget and model of a measurement, what else was set, and whether eviction has seen the question.

    The run's own method is one of those that are judged, and no part of it.
    """
    labels = run.asked[-1]
    budget = "" if labels.get("kv_ratio") is None else f"kv_ratio={labels['kv_ratio']:g}"
    known = (labels.get("task"), budget, labels.get("model"), labels.get("setting"))
    return titled(", ".join(word for word in known if word), [question_of(run.config)])


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
            Column(f"top {TOP:.0%}\nkept", lambda row: _share(row["top"])),
            Column("effect\nkept", lambda row: _share(row["mass"])),
            Column("tokens\nkept", lambda row: _share(row["kept"])),
            Column("KL of all\nevicted", lambda row: _with_interval(row, "joint_kl")),
            Column("gone in\nall heads", lambda row: _share(row["joint_gone"])),
        ],
    )
    yield (
        "differences within an example",
        pair_rows(tables.quality),
        [
            name,
            Column(f"rank correlation\nbehind {YARDSTICK}", lambda row: _with_interval(row, "behind")),
            Column("effect kept less\ntokens kept", lambda row: _share_with_interval(row, "mass")),
            Column("precision less\ntokens kept", lambda row: _share_with_interval(row, "precision")),
            Column(f"top {TOP:.0%} kept less\ntokens kept", lambda row: _share_with_interval(row, "top")),
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
    yield (
        "what goes with the KL of all evicted, across methods",
        company_rows(tables.quality, tables.joint),
        [
            Column("", lambda row: COMPANY[row["what"]], right=False),
            plain("n", "examples"),
            Column("rank correlation", lambda row: _with_interval(row, "rho")),
        ],
    )


def _share_with_interval(row: Mapping[str, Any], key: str) -> str:
    if absent(row[key]):
        return "-"
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return f"{100 * row[key]:.1f} ({TOO_FEW if absent(low) else f'{100 * low:.1f}..{100 * high:.1f}'})"


def _with_interval(row: Mapping[str, Any], key: str) -> str:
    if absent(row[key]):
        return "-"
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
    top = [
        mass_of_top(part["kl"].to_numpy(dtype=float), part["weight"].to_numpy(dtype=float))
        for _, part in tokens.groupby("example")
    ]
    held = _share(float(np.mean(top)) if top else math.nan)
    removed = ", ".join(f"{counts[kind]} {kind}s" for kind in (TOKEN, SPAN, LAYER, HEAD) if kind in counts)
    return [
        f"{len(examples)} examples of {np.mean([each.tokens for each in examples]):.0f} tokens; {made} removals "
        f"({removed}), {60 * made / max(seconds, 1e-9):.0f} a minute; judged over "
        f"{np.mean([each.judged for each in examples]):.1f} tokens of the full cache's own answer",
        f"a row without a removal has KL up to {floor:.1e} nats (rounding); {_share(below)} of the removed tokens have "
        f"no more than that; the {TOP:.0%} of tokens of largest effect hold {held} of it",
        "effect: mean KL(full || without the token) per token of the answer. rank correlation: Spearman's, weighted by "
        "the sampling plan, of a score's percentile (mean over layers and heads); (..): 95 % over examples, "
        f"Student's t of fewer than {stats.MIN_PAIRS}; sampling "
        "error: of that mean, by the tokens drawn. effect kept: share of the summed effect on tokens that are kept; a "
        "random choice has tokens kept, in precision and of the top too. KL of all evicted: all that the method does "
        "not keep at the prompt's end, removed at once; wrong: that changes a likeliest token; tells apart: how "
        "probably a wrong example has more of the effect on tokens gone in all heads than a right one (0.5: it says "
        "nothing).",
        f"{', '.join(ANSWER_SCORES)}: by the answer's own queries, which no method can see.",
    ]
