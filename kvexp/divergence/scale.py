"""What a divergence is worth: known changes of the same model on the same texts, none of which touches the KV cache.

python -m kvexp.divergence.scale RUN takes the texts of one measured run (the full cache's own answers) and puts beside
the unchanged model: its linear layers rounded to 8 and to 4 bits (symmetric, nearest, one scale per output row), the
whole model in bfloat16, the prompt without one token drawn at random, and Keyformer at half the cache with one seed of
its noise beside itself with another. The last is fed token by token, all others are read in one forward. The table is
kept in the run's folder, where the report finds it.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from rich.text import Text
from torch import Tensor

from kvexp.config.model_spec import load
from kvexp.console import Console, Progress
from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.runs import examples_of, settings_at
from kvexp.errors import ConfigError
from kvexp.evaluate.example_prompts import prompt_of
from kvexp.generate import prefill
from kvexp.generate.divergence import compare
from kvexp.generate.prefilled_context import decode_step
from kvexp.methods import Keyformer
from kvexp.models import unpack_linear
from kvexp.models.rounded_weights import round_linear_layers
from kvexp.record import Run
from kvexp.record.divergence_lines import OWN, Line, read
from kvexp.results import stats
from kvexp.results.columns import Column, plain
from kvexp.results.divergence_scale import write_scale
from kvexp.results.divergence_table import PerExample, share_interval
from kvexp.results.render import print_columns
from kvexp.results.units import TOO_FEW, absent, fixed
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model

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
    found: Line = {"example": example, "index": index, "text": OWN, "first_by_prefill": False, "tokens": list(text)}
    return found | {"kl": kl, "full_logprob": full_logprob, "logprob": logprob, "same_top1": [int(x) for x in same]}


def measured(run: Run, limit: int | None = None) -> dict[str, list[Line]]:
    """What is changed -> a line per example of the run's own-answer texts; ConfigError where none is measured.

    limit: the first so many of the task's examples.
    """
    lines = sorted((line["index"], example, line) for (example, text), line in read(run).items() if text == OWN)
    texts = {example: line for _, example, line in lines[:limit]}
    if not texts:
        raise ConfigError(f"{run.path} has no divergence yet: run kvexp divergence {run.path.parent}")
    settings = settings_at(run)
    rows = [{"example": name, "index": line["index"]} for name, line in texts.items()]  # divergence=only has no others
    model, tokenizer = load(settings.model)
    prompts: dict[str, list[int]] = {}
    for example in examples_of(settings, rows):
        asked = prompt_of(settings, model, tokenizer, example)
        prompts[example.id] = [*asked.ids, *asked.question_ids]
    found: dict[str, list[Line]] = {name: [] for name in (*CHANGES, DROPPED, SEEDS)}
    with Progress("scale", (len(found) + 1) * len(prompts), 0, "texts") as progress:
        noised = CacheConfig(Keyformer(), Budget(kv_ratio=0.5))
        for name, prompt in prompts.items():
            text, index = texts[name]["tokens"], texts[name]["index"]
            one, other = (logits_under(model, noised, prompt, text, zlib.crc32(name.encode()) + i) for i in (0, 1))
            found[SEEDS].append(line_of(one, other, text, name, index) | {"first_by_prefill": True})
            progress.advance()
        unpack_linear(model)  # a packed copy of the weights would not see them change
        known = {}
        for name, prompt in prompts.items():
            known[name] = forced_logits(model, prompt, texts[name]["tokens"])
            progress.advance()
        for change, make in CHANGES.items():
            changed = make(model)
            for name, prompt in prompts.items():
                text, index = texts[name]["tokens"], texts[name]["index"]
                found[change].append(line_of(known[name], forced_logits(changed, prompt, text), text, name, index))
                progress.advance()
            del changed
        for name, prompt in prompts.items():
            text, index = texts[name]["tokens"], texts[name]["index"]
            at = random.Random(zlib.crc32(name.encode())).randrange(len(prompt))
            less = forced_logits(model, [*prompt[:at], *prompt[at + 1 :]], text)
            found[DROPPED].append(line_of(known[name], less, text, name, index))
            progress.advance()
    return found


def scale_table(found: dict[str, list[Line]]) -> pd.DataFrame:
    """One row per change: mean KL and top-1 agreement over all tokens, with 95 % intervals by example."""
    rows = []
    for name, lines in found.items():
        one = PerExample.of(lines)
        assert one is not None, "every text has a token"
        total = one.tokens.sum()
        kl, differs = (share_interval(sums, one.tokens, stats.LEVEL) for sums in (one.kl, one.differs))
        row: dict[str, Any] = {"change": name, "n": len(one.names), "tokens": int(total)}
        row |= {"kl": float(one.kl.sum() / total), "kl_low": kl[0], "kl_high": kl[1]}
        row |= {"top1": 1 - float(one.differs.sum() / total), "top1_low": 1 - differs[1], "top1_high": 1 - differs[0]}
        rows.append(row)
    return pd.DataFrame(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 where the run has nothing to go by."""
    parser = argparse.ArgumentParser(prog="python -m kvexp.divergence.scale", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run that kvexp divergence has measured")
    parser.add_argument("--limit", type=int, metavar="N", help="go by the first N texts (default: all)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        say(f"error: --limit must be at least 1, got {args.limit}", file=sys.stderr)
        return 2
    try:
        run = Run.load(args.run)
        frame = scale_table(measured(run, args.limit))
        write_scale(run, frame)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    if args.csv is not None:
        frame.to_csv(args.csv, index=False)
    console = Console()
    console.print(Text("KL divergence of known changes from the unchanged model, full cache", style="bold"))
    columns = [
        plain("change", "change", right=False),
        plain("n", "n"),
        plain("tokens", "tokens"),
        Column("KL", lambda row: fixed(row["kl"], 4)),
        Column("95 %", lambda row: TOO_FEW if absent(row["kl_low"]) else f"{row['kl_low']:.4f}..{row['kl_high']:.4f}"),
        Column("same\ntop-1 %", lambda row: fixed(100 * row["top1"], 1)),
    ]
    print_columns(frame.to_dict("records"), columns, 1, console)  # type: ignore[arg-type]
    return 0
