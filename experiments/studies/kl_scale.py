"""What a divergence is worth: known changes of a model, and whether KL orders runs as a task's metric does.

    python -m experiments.studies.kl_scale scale RUN
    python -m experiments.studies.kl_scale agreement OUTPUTS ...

`scale` takes the texts of one measured run (the full cache's own answers) and compares the unchanged model with changes
that do not touch the KV cache: its linear layers rounded to 8 and to 4 bits (symmetric, nearest, one scale per
output row), the whole model in bfloat16, the prompt without one token drawn at random, and Keyformer at half the cache
with one seed of its noise against another. The last is fed token by token, all others are read in one
forward. The table is kept in the run's folder, where the report finds it.

`agreement` tells for each model and task Kendall's tau-b between the runs' mean KL and their mean score over the
examples that all its runs have, how many runs KL decides against epsilon, a quarter and four times of it, how many
pairs of runs KL and the metric decide (paired by example; Student's t, Holm's correction over all pairs), and every
pair that both decide, one against the other. `--rows FILE` writes the numbers of every example.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from rich.text import Text
from torch import Tensor

from experiments.studies import carried_out
from kvexp.core import Budget, CacheConfig
from kvexp.generate import prefill
from kvexp.generate.kl import compare
from kvexp.generate.prefill import decode_step
from kvexp.hf import unpack_linear
from kvexp.hf.cpu_linear import round_linear_layers
from kvexp.methods import Keyformer
from kvexp.results import stats
from kvexp.results.blocks import Column, interval, numeric, plain, print_columns
from kvexp.results.divergence import (
    UNDECIDED,
    PerExample,
    choice_kl,
    decide,
    example_means,
    holm_corrected,
    share_interval,
    write_scale,
)
from kvexp.results.read import Folder, baseline_of, check_pair, chosen, folders, number
from kvexp.results.stats import Floats
from kvexp.results.table import shared_settings, table
from kvexp.run.batches import examples_of, settings_at
from kvexp.run.model_spec import load
from kvexp.run.prompts import prompt_of
from kvexp.run.store import EPSILON_KL, OWN, Line, Run, run_name
from kvexp.util.errors import ConfigError
from kvexp.util.output import Console, watch_pipes
from kvexp.util.progress import Progress

if TYPE_CHECKING:
    from kvexp.hf.load import Model


DROPPED = "prompt less one token"
SEEDS = "two seeds of keyformer 0.5"


def with_rounded_weights(model: Model, bits: int) -> Model:
    """A copy whose linear layers are rounded; an output head that shares the embedding's weights is left as it is."""
    changed = copy.deepcopy(model)
    round_linear_layers(changed, bits)
    return changed


CHANGES: dict[str, Callable[[Model], Model]] = {
    "8-bit weights": lambda model: with_rounded_weights(model, 8),
    "4-bit weights": lambda model: with_rounded_weights(model, 4),
    "bfloat16": lambda model: copy.deepcopy(model).to(torch.bfloat16),
}


@torch.no_grad()
def forced_logits(model: Model, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """[N, V] float32: the logits that predict each token of the text, all tokens in one forward."""
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.get_input_embeddings().weight.device)
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=len(text)).logits[0]
    return logits.float()


@torch.no_grad()
def logits_under(model: Model, config: CacheConfig, prompt: Sequence[int], text: Sequence[int], seed: int) -> Tensor:
    """[N, V] float32: `forced_logits` with this cache, fed token by token. seed: of the method's noise."""
    context = prefill(model, [list(prompt)], config, max_new_tokens=len(text), seeds=seed)
    device = context.ids.device
    logits, position = [context.logits], context.mask.sum(1, keepdim=True) - 1
    for token in text[:-1]:
        position = position + 1
        logits.append(decode_step(model, torch.tensor([[token]], device=device), position, context.cache))
    return torch.cat(logits).float()


def line_of(full: Tensor, changed: Tensor, text: Sequence[int], example: str, index: int) -> Line:
    """As divergence.jsonl has it; logits [N, V] of both."""
    kl, full_logprob, logprob, same = compare(full, changed, torch.tensor(list(text))).tolist()
    line: Line = {"example": example, "index": index, "text": OWN, "first_by_prefill": False, "tokens": list(text)}
    return line | {"kl": kl, "full_logprob": full_logprob, "logprob": logprob, "same_top1": [int(x) for x in same]}


def measured(run: Run, limit: int | None = None) -> dict[str, list[Line]]:
    """What is changed -> a line per example of the run's own-answer texts; ConfigError where none is measured.

    limit: the first so many of the task's examples.
    """
    lines = sorted((line["index"], example, line) for (example, text), line in run.divergence().items() if text == OWN)
    texts = {example: line for _, example, line in lines[:limit]}
    if not texts:
        raise ConfigError(
            f"{run.path} has no divergence yet: run kvexp results {run.path.parent} --view divergence --measure"
        )
    settings = settings_at(run)
    rows = [{"example": name, "index": line["index"]} for name, line in texts.items()]  # divergence=only has no others
    model, tokenizer = load(settings.model)
    prompts: dict[str, list[int]] = {}
    for example in examples_of(settings, rows):
        fed = prompt_of(settings, model, tokenizer, example)
        prompts[example.id] = [*fed.ids, *fed.question_ids]
    lines_by_change: dict[str, list[Line]] = {name: [] for name in (*CHANGES, DROPPED, SEEDS)}
    with Progress("scale", (len(lines_by_change) + 1) * len(prompts), 0, "texts") as progress:

        def add(change: str, name: str, full: Tensor, changed: Tensor) -> None:
            line = line_of(full, changed, texts[name]["tokens"], name, texts[name]["index"])
            lines_by_change[change].append(line | {"first_by_prefill": change == SEEDS})
            progress.advance()

        noised = CacheConfig(Keyformer(), Budget(kv_ratio=0.5))
        for name, prompt in prompts.items():
            seeds, text = zlib.crc32(name.encode()), texts[name]["tokens"]
            add(SEEDS, name, *(logits_under(model, noised, prompt, text, seeds + i) for i in (0, 1)))
        unpack_linear(model)  # a packed copy of the weights would not see them change
        known = {}
        for name, prompt in prompts.items():
            known[name] = forced_logits(model, prompt, texts[name]["tokens"])
            progress.advance()
        for change, make in CHANGES.items():
            changed = make(model)
            for name, prompt in prompts.items():
                add(change, name, known[name], forced_logits(changed, prompt, texts[name]["tokens"]))
            del changed
        for name, prompt in prompts.items():
            at = random.Random(zlib.crc32(name.encode())).randrange(len(prompt))
            less = forced_logits(model, [*prompt[:at], *prompt[at + 1 :]], texts[name]["tokens"])
            add(DROPPED, name, known[name], less)
    return lines_by_change


def scale_table(lines_by_change: dict[str, list[Line]]) -> pd.DataFrame:
    """One row per change: mean KL and top-1 agreement over all tokens, with 95 % intervals by example."""
    rows = []
    for name, lines in lines_by_change.items():
        texts = PerExample.of(lines)
        assert texts is not None, "every text has a token"
        total = texts.tokens.sum()
        kl, differs = (share_interval(sums, texts.tokens, stats.LEVEL) for sums in (texts.kl, texts.differs))
        row: dict[str, Any] = {"change": name, "n": len(texts.names), "tokens": int(total)}
        row |= {"kl": float(texts.kl.sum() / total), "kl_low": kl[0], "kl_high": kl[1]}
        row |= {"top1": 1 - float(texts.differs.sum() / total), "top1_low": 1 - differs[1], "top1_high": 1 - differs[0]}
        rows.append(row)
    return pd.DataFrame(rows)


def _scale(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    run = Run.load(args.run)
    frame = scale_table(measured(run, args.limit))
    write_scale(run, frame)
    if args.csv is not None:
        frame.to_csv(args.csv, index=False)
    console = Console()
    console.print(Text("KL divergence of known changes from the unchanged model, full cache", style="bold"))
    columns = [
        plain("change", "change", right=False),
        plain("n", "n"),
        plain("tokens", "tokens"),
        numeric("KL", "kl", 4),
        interval("95 %", "kl_low", "kl_high", 4),
        numeric("same\ntop-1 %", "top1", 1, 100),
    ]
    print_columns(frame.to_dict("records"), columns, 1, console)  # type: ignore[arg-type]
    return 0


PREFERRED = "rouge2"  # where a task has it; else its first metric
FACTORS = (0.25, 1.0, 4.0)  # of epsilon
RESAMPLES = 2_000


@dataclass(frozen=True)
class Measured:
    """The numbers of one run: example -> (sum of KL, tokens), and example -> score."""

    folder: Folder
    kl: dict[str, tuple[float, float]]
    score: dict[str, float]


def agreement(folders: Iterable[Folder], epsilon: float, metric: str | None = None) -> pd.DataFrame:
    """A row per model, task and NUMERICS with three runs or more that have both; `contradicted` names pairs of runs.

    folders: runs and their baselines. tau, low, high: Kendall's tau-b, 1 where less KL is always the better score, and
    the middle 95 % of it over resampled examples (which add their own noise: it lies nearer to 0 than tau does).
    pairs, by_kl, by_metric, by_both: pairs of runs, and those that KL, the metric and both decide. contradicted: of
    those that both decide, one against the other, the run with less KL and the run with the better score. hashes: of
    all runs. kl_0.25, kl_1, kl_4: runs with a decided verdict on KL at these multiples of epsilon, corrected for the
    number of runs.
    """
    every = list(folders)
    by_hash = {folder.run.hash: folder for folder in every}
    families: dict[tuple[str, str, int], list[Folder]] = defaultdict(list)
    for folder in every:
        if folder.run.baseline is not None and not folder.refused:
            labels = folder.labels
            families[str(labels.get("model")), str(labels.get("task")), folder.run.numerics].append(folder)
    rows = []
    for (model, task, numerics), family in families.items():
        known = [known_metric for folder in family for known_metric in folder.metrics]
        name = metric or (PREFERRED if PREFERRED in known else next(iter(known), ""))
        pairs = [(folder, baseline_of(folder, by_hash)) for folder in family]
        counted = [(folder.of_answered(full), full) for folder, full in pairs]
        measured = [run for pair in counted if (run := _measured(*pair, name)) is not None]
        for run in measured[1:]:
            check_pair(measured[0].folder, run.folder)
        shared = sorted(set.intersection(*(set(run.kl) & set(run.score) for run in measured))) if measured else []
        if len(measured) > 2 and shared:
            row = {"numerics": numerics, "model": model, "task": task, "metric": name}
            rows.append(row | _row(measured, shared, name, epsilon))
    return pd.DataFrame(rows)


def by_example(folders: Iterable[Folder], metric: str) -> pd.DataFrame:
    """A line per task, measure (mean KL in nats per token, or `metric`) and example, with a column for each run."""
    lines, every = [], list(folders)
    _, named = shared_settings([{**folder.labels, "hash": folder.run.hash} for folder in every])
    for folder, labels in zip(every, named, strict=True):
        score = {name: number(row["metrics"].get(metric)) for name, row in folder.scored.items()}
        about = {"numerics": folder.run.numerics, "task": labels.get("task"), "run": run_name(labels)}
        lines += [
            about | {"measure": measure, "example": example, "value": value}
            for measure, values in (("kl", example_means(folder, OWN)), (metric, score))
            for example, value in values.items()
        ]
    index = ["numerics", "task", "measure", "example"]
    return pd.DataFrame(lines).pivot_table(index=index, columns="run", values="value").reset_index()


def _measured(folder: Folder, baseline: Folder | None, metric: str) -> Measured | None:
    """The numbers of a run; None where it has no divergence or no score."""
    score = {name: number(row["metrics"].get(metric)) for name, row in folder.scored.items()}
    score = {name: value for name, value in score.items() if math.isfinite(value)}
    measured = PerExample.of([line for (_, text), line in folder.run.divergence().items() if text == OWN])
    if measured is not None:
        kl = dict(zip(measured.names, zip(measured.kl.tolist(), measured.tokens.tolist(), strict=True), strict=True))
    else:
        kl = _of_choices(folder, baseline)
    return Measured(folder, kl, score) if kl and score else None


def _of_choices(folder: Folder, baseline: Folder | None) -> dict[str, tuple[float, float]]:
    if baseline is None:
        return {}
    kl_by_name: dict[str, tuple[float, float]] = {}
    for name, row in folder.scored.items():
        full = baseline.scored.get(name)
        if full is not None and row.get("choices") and full.get("choices"):
            value = choice_kl(row["choices"], full["choices"])
            kl_by_name |= {} if value is None else {name: (value, 1.0)}
    return kl_by_name


def _row(runs: Sequence[Measured], shared: Sequence[str], metric: str, epsilon: float) -> dict[str, Any]:
    kl = np.array([[run.kl[name][0] for name in shared] for run in runs])
    tokens = np.array([[run.kl[name][1] for name in shared] for run in runs])
    score = np.array([[run.score[name] for name in shared] for run in runs])
    if stats.lower_is_better(metric):
        score = -score
    draws = stats.resampled_means(np.concatenate([kl, tokens, score]).T, RESAMPLES)
    many = len(runs)
    resampled = _tau(-draws[:, :many] / draws[:, many : 2 * many], draws[:, 2 * many :])
    low, high = np.nanquantile(resampled, (0.025, 0.975)) if len(shared) >= stats.MIN_PAIRS else (math.nan, math.nan)
    row: dict[str, Any] = {"n": len(shared), "runs": many, "hashes": [run.folder.run.hash for run in runs]}
    row["tau"] = float(_tau(-kl.mean(axis=1, keepdims=True).T / tokens.mean(axis=1), score.mean(axis=1)[None])[0])
    row |= {"low": float(low), "high": float(high), **_pairs(runs, kl / tokens, score)}
    level = stats.corrected_level(many)
    ends = [share_interval(sums, count, level) for sums, count in zip(kl, tokens, strict=True)]
    for factor in FACTORS:
        row[f"kl_{factor:g}"] = sum(decide(end, factor * epsilon) != UNDECIDED for end in ends)
    return row


def _tau(left: Floats, other: Floats) -> Floats:
    """Kendall's tau-b of each row [B, R] of `left` with that of the other; NaN where either ties all."""
    first, second = (np.sign(scores[:, :, None] - scores[:, None, :]) for scores in (left, other))
    both = np.sqrt((first**2).sum(axis=(1, 2)) * (second**2).sum(axis=(1, 2)))
    with np.errstate(invalid="ignore"):
        tau: Floats = (first * second).sum(axis=(1, 2)) / both
    return tau


def _pairs(runs: Sequence[Measured], kl: Floats, score: Floats) -> dict[str, Any]:
    """How many pairs of runs each decides, and which they decide against each other; kl, score [R, n]."""
    left, right = np.triu_indices(len(runs), 1)
    less, better = (_decided(values[left] - values[right]) for values in (-kl, score))
    signs = zip(left.tolist(), right.tolist(), less, better, strict=True)
    against = [(i, j) if sign > 0 else (j, i) for i, j, sign, other in signs if sign * other < 0]
    return {
        "pairs": len(left),
        "by_kl": int((less != 0).sum()),
        "by_metric": int((better != 0).sum()),
        "by_both": int(((less != 0) & (better != 0)).sum()),
        "contradicted": [(runs[i].folder.run.hash, runs[j].folder.run.hash) for i, j in against],
    }


def _decided(gaps: Floats) -> Floats:
    """Sign of the mean of each pair's differences [P, n] where it is decided, else 0."""
    n = gaps.shape[1]
    if n < stats.MIN_PAIRS:
        return np.zeros(len(gaps))
    mean, error = gaps.mean(axis=1), gaps.std(axis=1, ddof=1) / math.sqrt(n)
    p = [stats.t_tail(float(m / e), n - 1) if e > 0 else float(m == 0) for m, e in zip(mean, error, strict=True)]
    signs: Floats = np.where(holm_corrected(np.array(p)) < 1 - stats.LEVEL, np.sign(mean), 0.0)
    return signs


def _agreement(args: argparse.Namespace) -> int:
    shown = [folder for outputs in args.outputs for folder in chosen(folders(outputs), {})]
    frame = agreement(shown, args.epsilon, args.metric)
    if frame.empty:
        raise ConfigError(
            "no task has three runs with a divergence and a score; see kvexp results --view divergence --measure"
        )
    if args.rows is not None:
        by_example(shown, str(frame["metric"].iloc[0])).to_csv(args.rows, index=False, float_format="%.5g")
    rows: list[dict[str, Any]] = frame.to_dict("records")  # type: ignore[assignment]
    verdicts = [row for outputs in args.outputs for row in table(outputs).to_dict("records")]
    for row in rows:
        judged = [run for run in verdicts if all(run[name] == row[name] for name in ("numerics", "model", "task"))]
        row["mlperf"] = sum(run["verdict99"] in ("pass", "fail") for run in judged)
    if args.csv is not None:
        frame.assign(mlperf=[row["mlperf"] for row in rows]).to_csv(args.csv, index=False)
    _print(rows, args.epsilon, {folder.run.hash: folder for folder in shown if not folder.refused})
    return 0


def _print(rows: list[dict[str, Any]], epsilon: float, by_hash: dict[str, Folder]) -> None:
    console = Console()
    columns = [
        Column("task", lambda row: f"{row['model']} / {row['task']}", right=False),
        *([plain("numerics", "NUMERICS")] if len({row["numerics"] for row in rows}) > 1 else []),
        plain("metric", "metric", right=False),
        plain("n", "n"),
        plain("runs", "runs"),
        numeric("Kendall's\ntau", "tau", 2, sign="+"),
        interval("95 %", "low", "high", 2, sign="+"),
        *(Column(f"decided,\nKL {f * epsilon:g}", lambda row, f=f: f"{row[f'kl_{f:g}']}") for f in FACTORS),  # type: ignore[misc]
        Column("decided,\n99 %", lambda row: f"{row['mlperf']}"),
        plain("pairs", "pairs"),
        Column("decided\nby KL", lambda row: f"{row['by_kl']}"),
        Column("by the\nmetric", lambda row: f"{row['by_metric']}"),
        Column("by both", lambda row: f"{row['by_both']}"),
        Column("against\neach other", lambda row: f"{len(row['contradicted'])}"),
    ]
    console.print(Text("KL divergence from the full cache against the task's metric", style="bold"))
    print_columns(rows, columns, 1, console)
    for row in rows:
        _, labels = shared_settings([{**by_hash[name].labels, "hash": name} for name in row["hashes"]])
        names = {label["hash"]: run_name(label) for label in labels}
        for nearer, other in row["contradicted"]:
            console.print(
                f"{row['task']}: {names[nearer]} diverges less than {names[other]}, which has more {row['metric']}"
            )


def main(words: Sequence[str] | None = None) -> int:
    """0, or 2 where there is nothing to go by."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.kl_scale")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    scale = commands.add_parser("scale", help="known changes of the same model on the same texts")
    scale.set_defaults(command=_scale)
    scale.add_argument("run", type=Path, help="the folder of a run whose divergence was measured")
    scale.add_argument("--limit", type=int, metavar="N", help="only the first N texts (default: all)")
    agree = commands.add_parser("agreement", help="does KL divergence order runs as the task's metric does?")
    agree.set_defaults(command=_agreement)
    agree.add_argument("outputs", nargs="+", type=Path, help="folders of runs")
    agree.add_argument("--metric", help="default: rouge2 where a task has it, else its first")
    agree.add_argument("--rows", type=Path, metavar="FILE", help="write each example's KL and metric, a column per run")
    agree.add_argument("--epsilon", type=float, default=EPSILON_KL, metavar="NATS", help=f"default: {EPSILON_KL}")
    for command in (scale, agree):
        command.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    return carried_out(parser, words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
