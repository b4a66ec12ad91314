"""Is the order of methods a property of the methods or of the model? Tables from the runs of `experiment=two_models`.

    python -m experiments.studies.two_models OUTPUTS --rows docs/two_models.csv --page docs/two_models.md
    python -m experiments.studies.two_models --rows docs/two_models.csv

Every number is KL from the full cache along its own answer, nats per token, mean over the tokens of an answer, then
over examples. Both models answer the same prompts, and are resampled together. A block is a task, where its question
stands, and a budget; what is compared is the order of the methods by their means.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.lib.tables import markdown
from experiments.studies import KL_COLUMNS, carried_out, check_numerics, kl_of_runs, read_wide, wide, write_tables
from kvexp.results.divergence import compared_means
from kvexp.results.read import AFTER_EVICTION, IN_PROMPT
from kvexp.results.stats import LEVEL, Floats, corrected_level, n_needed, resampled_means, resamples_for
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes

BEGIN = "<!-- two models: made by python -m experiments.studies.two_models --rows FILE --page PAGE -->"
END = "<!-- end of two models -->"
PLACE = ["model", "task", "question", "kv_ratio"]
RESAMPLES = 2000
HALVES = 200  # random halves of the examples, whose orders are compared
EXAMPLES = (20, 50, 100, 200, 500)  # for which `power` says what they would decide
LEADERS = 6
SHOWN = {IN_PROMPT: "seen", AFTER_EVICTION: "hidden"}

Block = tuple[str, str, float]  # task, question, share of the cache


def rows_of(outputs: str) -> pd.DataFrame:
    """KL_COLUMNS of every example of the sweep's runs; ConfigError where there are none."""
    rows = kl_of_runs(outputs, "two_models")
    rows = rows[rows["method"].ne("full")]
    if rows.empty:
        raise ConfigError(f"{outputs} has no run with a divergence; run: kvexp run experiment=two_models")
    return rows


def blocks_of(rows: pd.DataFrame) -> tuple[list[str], list[str], dict[Block, list[Floats]]]:
    """(The two models, the methods that all blocks have, block -> each model's KL [examples, methods]).

    Of a block, the examples and models that all methods have; blocks that only one model has are left out. ConfigError
    where there are not two models, or no block of both, or several NUMERICS.
    """
    models = sorted(set(check_numerics(rows)["model"]), reverse=True)  # so SmolLM2 stands before Gemma
    if len(models) != 2:
        raise ConfigError(f"the rows are of {', '.join(models)}: the study compares two models")
    places = rows.groupby(PLACE)["method"].unique()
    methods = sorted(set.intersection(*(set(names) for names in places)))
    blocks: dict[Block, list[Floats]] = {}
    for (task, question, ratio), rows_of in rows[rows["method"].isin(methods)].groupby(PLACE[1:]):
        table = rows_of.pivot_table(index="example", columns=["model", "method"], values="kl").dropna()
        if all(model in table.columns.get_level_values(0) for model in models) and len(table) > 1:
            blocks[str(task), str(question), float(str(ratio))] = [table[model][methods].to_numpy() for model in models]
    if not blocks:
        raise ConfigError("no task, question and budget has examples of both models")
    return models, methods, blocks


def places(kl: Floats) -> Floats:
    """Places from 1 along the last axis, the least KL first."""
    ranks: Floats = kl.argsort(axis=-1).argsort(axis=-1).astype(np.float64) + 1
    return ranks


def agreement(first: Floats, other: Floats) -> Floats:
    """Spearman's correlation of two orders by KL [..., methods], along the last axis."""
    count = first.shape[-1]
    rho: Floats = 1 - 6 * ((places(first) - places(other)) ** 2).sum(-1) / (count * (count**2 - 1))
    return rho


def resampled(block: Sequence[Floats]) -> list[Floats]:
    """Each model's means under resampling of the examples, drawn for both alike: [R, methods].

    R is enough for an interval corrected for the number of methods.
    """
    resamples = resamples_for(corrected_level(block[0].shape[1]))
    together = resampled_means(np.concatenate(block, axis=1), resamples)
    return np.split(together, 2, axis=1)


def interval(values: Floats) -> str:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return f"({low:.2f}..{high:.2f})"


def halves(kl: Floats) -> float:
    """Mean agreement of two random halves of a model's examples [n, methods]: what chance alone leaves of 1."""
    dice = np.random.default_rng(0)
    agreements = []
    for _ in range(HALVES):
        order = dice.permutation(len(kl))
        cut = len(kl) // 2
        agreements.append(agreement(kl[order[:cut]].mean(0), kl[order[cut:]].mean(0)))
    return float(np.mean(agreements))


def decided(kl: Floats, methods: Sequence[str]) -> dict[tuple[str, str], str]:
    """Pair of methods -> the one that is nearer by more than chance (Holm over all pairs); other pairs are left out."""
    means = {name: {str(row): float(x) for row, x in enumerate(kl[:, place])} for place, name in enumerate(methods)}
    pairs = compared_means(means)
    return {(first, other): better for first, other, better in pairs[["one", "other", "better"]].to_numpy() if better}


def power(models: Sequence[str], blocks: Sequence[list[Floats]]) -> Iterator[tuple[str, ...]]:
    """Shares of all pairs, and of pairs of each block's LEADERS, that EXAMPLES decide with a power of 80 %.

    Differences and spreads are taken to be those seen, and tests corrected for all pairs of a block.
    """
    for place, model in enumerate(models):
        for which, most in (("all", None), (f"the nearest {LEADERS}", LEADERS)):
            needed = []
            for kl in (block[place] for block in blocks):
                count = kl.shape[1] * (kl.shape[1] - 1) // 2
                for first, other in itertools.combinations(kl.mean(0).argsort()[:most], 2):
                    gaps = kl[:, first] - kl[:, other]
                    needed.append(n_needed(abs(gaps.mean()), gaps.std(ddof=1), corrected_level(count)))
            yield model, which, *(f"{100 * np.mean(np.array(needed) <= n):.0f} %" for n in EXAMPLES)


def text(rows: pd.DataFrame) -> str:
    """The tables as Markdown."""
    models, methods, blocks = blocks_of(rows)
    draws = {key: resampled(block) for key, block in blocks.items()}
    table: list[tuple[str, ...]] = []
    reversed_in: dict[tuple[str, str], list[str]] = {}
    known = np.zeros(3, dtype=int)  # pairs that the first model decides, the second, both
    for (task, question, ratio), block in blocks.items():
        means = [kl.mean(0) for kl in block]
        again = agreement(*(drawn[:RESAMPLES] for drawn in draws[task, question, ratio]))
        first, other = (decided(kl, methods) for kl in block)
        both = first.keys() & other.keys()
        known += [len(first), len(other), len(both)]
        turned = sorted(pair for pair in both if first[pair] != other[pair])
        name = f"{task}, {SHOWN[question]}, {ratio:g}"
        for pair in turned:
            reversed_in.setdefault((first[pair], other[pair]), []).append(name)
        nearest = (f"{methods[int(mean.argmin())]} {mean.min():.2f}" for mean in means)
        agreed = f"{agreement(*means):.2f} {interval(again)}"
        alike = f"{len(both) - len(turned)} : {len(turned)}"
        table.append((name, str(len(block[0])), agreed, *(f"{halves(kl):.2f}" for kl in block), alike, *nearest))
    count = len(methods) * (len(methods) - 1) // 2
    head = ("block", "n", "agreement", *(f"halves of {model}" for model in models), "decided alike : reversed")
    heads = (*head, *(f"nearest, {model}" for model in models))
    parts = [
        f"{len(methods)} methods, {count} pairs, by block (task, question seen by the eviction or hidden, share):",
        markdown(heads, *table),
        f"Of {count * len(blocks):,} pairs in {len(blocks)} blocks {models[0]} decides {known[0]}, "
        f"{models[1]} {known[1]}, both {known[2]}.",
        f"Mean place of {len(methods)} over the {len(blocks)} blocks:",
        markdown(("method", *models, "moves"), *moved(methods, list(blocks.values()), list(draws.values()))),
        "Pairs that so many examples would decide, if differences and spreads are those seen (power 80 %, corrected):",
        markdown(("model", "pairs of", *map(str, EXAMPLES)), *power(models, list(blocks.values()))),
    ]
    if reversed_in:
        pairs = sorted(reversed_in.items(), key=lambda item: (-len(item[1]), item[0]))
        said = [(f"{a} before {b}", str(len(where)), "; ".join(where)) for (a, b), where in pairs]
        parts += [f"Pairs of this order with {models[0]}, and of the other with {models[1]}:"]
        parts += [markdown(("pair", "blocks", "where"), *said)]
    return "\n\n".join(parts) + "\n"


def moved(
    methods: Sequence[str], blocks: Sequence[list[Floats]], draws: Sequence[list[Floats]]
) -> Iterator[tuple[str, ...]]:
    """Mean place of every method with each model, and how many places it falls with the second.

    draws: `resampled` of each block, which share the draws of examples. Bold: by a place at least, and an interval
    corrected for the number of methods leaves zero out; the one shown is of 95 %.
    """
    means = [np.mean([places(block[model].mean(0)) for block in blocks], axis=0) for model in (0, 1)]
    again = [np.mean([places(draw[model]) for draw in draws], axis=0) for model in (0, 1)]
    falls = again[1] - again[0]
    low, high = np.quantile(falls[:RESAMPLES], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    tail = (1 - corrected_level(len(methods))) / 2
    least, most = np.quantile(falls, [tail, 1 - tail], axis=0)
    for place in np.argsort(means[0], kind="stable"):
        gap = means[1][place] - means[0][place]
        said = f"{gap:+.1f} ({low[place]:+.1f}..{high[place]:+.1f})"
        sure = abs(gap) >= 1 and (least[place] > 0 or most[place] < 0)
        yield methods[place], *(f"{mean[place]:.1f}" for mean in means), f"**{said}**" if sure else said


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.two_models", description=__doc__)
    parser.add_argument("outputs", nargs="*", help="folders of the sweep's runs")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="KL by example: written from OUTPUTS, else read")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.set_defaults(command=_write)
    return carried_out(parser, words)


def _write(args: argparse.Namespace) -> int:
    if args.outputs:
        rows = pd.concat([rows_of(folder) for folder in args.outputs], ignore_index=True)
        if args.rows:
            wide(rows, ["method"]).to_csv(args.rows, index=False, float_format="%.5g")
            rows = read_wide(args.rows, KL_COLUMNS, ["method"])
    elif args.rows and args.rows.exists():
        rows = read_wide(args.rows, KL_COLUMNS, ["method"])
    else:
        raise ConfigError("name the folder of the sweep's runs, or --rows FILE of earlier ones")
    write_tables(text(rows), args.page, BEGIN, END)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
