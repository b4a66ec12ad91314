"""What a divergence is worth: known changes of a model; and the numbers of every example of runs as a file.

    python -m experiments.studies.kl_scale scale RUN
    python -m experiments.studies.kl_scale rows OUTPUTS METRIC FILE

`scale` takes the texts of one measured run (the full cache's own answers) and compares the unchanged model with changes
that do not touch the KV cache: its linear layers rounded to 8 and to 4 bits (symmetric, nearest, one scale per
output row), the whole model in bfloat16, the prompt without one token drawn at random, and Keyformer at half the cache
with one seed of its noise against another. The last is fed token by token, all others are read in one
forward.

`rows` writes each example's KL and metric with a column for every run, as articles_100.csv has them.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from kvexp.results.blocks import interval, numeric, plain, print_columns
from kvexp.results.divergence import (
    PerExample,
    example_means,
    share_interval,
)
from kvexp.results.read import Folder, chosen, folders, number
from kvexp.results.table import shared_settings
from kvexp.run.batches import examples_of, settings_at
from kvexp.run.model_spec import load
from kvexp.run.prompts import prompt_of
from kvexp.run.store import OWN, Line, Run, run_name
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
    frame = scale_table(measured(Run.load(args.run), args.limit))
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


def _rows(args: argparse.Namespace) -> int:
    shown = list(chosen(folders(args.outputs), {}))
    by_example(shown, args.metric).to_csv(args.file, index=False, float_format="%.5g")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """0, or 2 where there is nothing to go by."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.kl_scale")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    scale = commands.add_parser("scale", help="known changes of the same model on the same texts")
    scale.set_defaults(command=_scale)
    scale.add_argument("run", type=Path, help="the folder of a run whose divergence was measured")
    scale.add_argument("--limit", type=int, metavar="N", help="only the first N texts (default: all)")
    scale.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    rows = commands.add_parser("rows", help="each example's KL and metric, a column per run")
    rows.set_defaults(command=_rows)
    rows.add_argument("outputs", type=Path, help="a folder of runs")
    rows.add_argument("metric", help="such as rouge2")
    rows.add_argument("file", type=Path, metavar="FILE", help="the CSV to write")
    return carried_out(parser, words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
