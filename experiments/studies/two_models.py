"""Is the order of methods a property of the methods or of the model? Tables from the runs of `experiment=two_models`.

    python -m experiments.studies.two_models OUTPUTS --rows docs/two_models.csv     # keeps the rows
    python -m experiments.studies.two_models --rows docs/two_models.csv             # of rows that were kept

Every number is KL from the full cache along its own answer, nats per token, mean over the tokens of an answer, then
over examples. Both models answer the same prompts, and are resampled together. A block is a task, where its question
stands, and a budget; what is compared is the order of the methods by their means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib.tables import markdown
from experiments.studies import KL_COLUMNS, carried_out, check_numerics, kl_of_runs, read_wide, wide
from kvexp.results.divergence import compared_means
from kvexp.results.read import AFTER_EVICTION, IN_PROMPT
from kvexp.results.stats import LEVEL, Floats, corrected_level, resampled_means, resamples_for
from kvexp.util.errors import ConfigError
from kvexp.util.output import say, watch_pipes

PLACE = ["model", "task", "question", "kv_ratio"]
RESAMPLES = 2000
HALVES = 200  # random halves of the examples, whose orders are compared
SHOWN = {IN_PROMPT: "seen", AFTER_EVICTION: "hidden"}
# Methods that both models put behind most others: what is left says whether leaders agree.
POOR = ("random", "knorm", "spatten", "window", "dilated_window", "streaming_llm", "keydiff", "qfilters")
NAMES = ("SmolLM2", "Gemma")

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
    for (task, question, ratio), block in rows[rows["method"].isin(methods)].groupby(PLACE[1:]):
        table = block.pivot_table(index="example", columns=["model", "method"], values="kl").dropna()
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


def agreements(methods: Sequence[str], blocks: Mapping[Block, Sequence[Floats]], draws: Mapping[Block, Any]) -> str:
    """A table of the blocks: how far the models agree on all methods, on those not in POOR, and halves of each model.

    draws: `resampled` of each block.
    """
    left = [place for place, name in enumerate(methods) if name not in POOR]
    table = []
    for key, block in blocks.items():
        means = [kl.mean(0) for kl in block]
        again = agreement(*(drawn[:RESAMPLES] for drawn in draws[key]))
        of_left = agreement(*(mean[left] for mean in means))
        nearest = (f"{methods[int(mean.argmin())]} {mean.min():.2f}" for mean in means)
        agreed = f"{agreement(*means):.2f} {interval(again)}"
        table.append((named(key), agreed, f"{of_left:.2f}", ", ".join(f"{halves(kl):.2f}" for kl in block), *nearest))
    heads = ("agreement", f"of {len(left)}", f"halves of {', '.join(NAMES)}", *(f"nearest, {name}" for name in NAMES))
    return markdown(("prompts, question, share", *heads), *table)


def named(key: Block) -> str:
    """A block's name in tables."""
    return f"{key[0]}, {SHOWN[key[1]]}, {key[2]:g}"


def text(rows: pd.DataFrame) -> str:
    """The tables as Markdown."""
    models, methods, blocks = blocks_of(rows)
    draws = {key: resampled(block) for key, block in blocks.items()}
    reversed_in: dict[tuple[str, str], list[str]] = {}
    known = np.zeros(3, dtype=int)  # pairs that the first model decides, the second, both
    for key, block in blocks.items():
        first, other = (decided(kl, methods) for kl in block)
        both = first.keys() & other.keys()
        known += [len(first), len(other), len(both)]
        for pair in sorted(pair for pair in both if first[pair] != other[pair]):
            reversed_in.setdefault((first[pair], other[pair]), []).append(named(key))
    count = len(methods) * (len(methods) - 1) // 2 * len(blocks)
    alike = known[2] - sum(map(len, reversed_in.values()))
    said = [(f"{a} before {b}", "; ".join(where)) for (a, b), where in reversed_in.items()]
    return "\n\n".join(
        [
            agreements(methods, blocks, draws),
            f"Of {count:,} pairs in {len(blocks)} blocks {models[0]} decides {known[0]}, {models[1]} {known[1]}, both "
            f"{known[2]}, of which {alike} alike and these reversed:",
            markdown((f"with {models[0]}", "reversed in"), *said),
            f"Mean place of {len(methods)}; bold: moves by a place at least, corrected for the number of methods:",
            markdown(("method", *models, "moves"), *map(_move, moved(methods, blocks, draws).to_dict("records"))),
        ]
    )


def moved(methods: Sequence[str], blocks: Mapping[Block, Any], draws: Mapping[Block, Any]) -> pd.DataFrame:
    """Mean place of every method with each model (first, second), and 95 % intervals of how many places it falls.

    draws: `resampled` of each block, which share the draws of examples. sure: it moves by a place at least, and an
    interval corrected for the number of methods leaves zero out.
    """
    first, second = (np.mean([places(block[model].mean(0)) for block in blocks.values()], axis=0) for model in (0, 1))
    again = [np.mean([places(drawn[model]) for drawn in draws.values()], axis=0) for model in (0, 1)]
    falls = again[1] - again[0]
    low, high = np.quantile(falls[:RESAMPLES], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    tail = (1 - corrected_level(len(methods))) / 2
    least, most = np.quantile(falls, [tail, 1 - tail], axis=0)
    sure = (np.abs(second - first) >= 1) & ((least > 0) | (most < 0))
    moves = pd.DataFrame({"method": methods, "first": first, "second": second, "low": low, "high": high, "sure": sure})
    return moves.sort_values("first", kind="stable", ignore_index=True)


def _move(row: Mapping[str, Any]) -> tuple[str, ...]:
    said = f"{row['second'] - row['first']:+.1f} ({row['low']:+.1f}..{row['high']:+.1f})"
    return row["method"], f"{row['first']:.1f}", f"{row['second']:.1f}", f"**{said}**" if row["sure"] else said


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.two_models", description=__doc__)
    parser.add_argument("outputs", nargs="*", help="folders of the sweep's runs")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="KL by example: written from OUTPUTS, else read")
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
    say(text(rows))
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
