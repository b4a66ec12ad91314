"""How much of a needle each method still holds when its prompt ends, with the question seen and hidden.

    python -m experiments.needle_kept --data FOLDER h2o snapkv keydiff
    python -m experiments.needle_kept --data FOLDER --kv-ratio 0.25 --lengths 2000 4000 h2o snapkv

The prompts are the league's needles (experiment=real/league_needle), five depths of each length. A
share is that of the needle's tokens a kv head still holds, mean over heads, layers and prompts, in percent; a random
choice holds 100 * kv_ratio. It is followed by its 95 % interval over prompts (Student's t), and how many heads hold at
least nine tokens of ten. needle_kept.csv has what came out at half of the cache, on prompts of 1k and 2k tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experiments.lib.exhibits import REAL
from experiments.lib.league import QUESTIONS
from experiments.lib.real_scale import commands_of, scale_of
from experiments.lib.sweep import jobs, late
from experiments.lib.tables import markdown
from kvexp.generate import prefill_together
from kvexp.results.read import WORDS
from kvexp.results.stats import LEVEL, t_quantile
from kvexp.run.model_spec import load
from kvexp.run.prompts import prompt_of
from kvexp.run.settings import Settings, batch_cache
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import tells_errors, watch_pipes

WHOLE = 0.9  # share of a needle from which on a head counts as holding it


def tokens_of(pieces: Sequence[str], sentence: str) -> list[int]:
    """Which of the tokens, given as their texts, have a character of the sentence; ConfigError where it is missing."""
    text = "".join(pieces)
    first = text.find(sentence)
    if first < 0:
        raise ConfigError(f"the prompt lacks the needle {sentence!r}")
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = ends - [len(piece) for piece in pieces]
    return [int(at) for at in np.flatnonzero((ends > first) & (starts < first + len(sentence)))]


def held(cache: Any, wanted: Sequence[int], layers: int) -> np.ndarray:
    """The share of the positions `wanted` that each kv head holds: [layers, heads], of a cache of one row."""
    return np.array(
        [[np.isin(wanted, head).mean() for head in cache.kept_positions(layer)[0]] for layer in range(layers)]
    )


@torch.inference_mode()
def shares(runs: Sequence[Settings]) -> np.ndarray:
    """What each run's caches hold of each prompt's needle, [runs, prompts, layers, heads]; runs of the same prompts."""
    model, tokenizer = load(runs[0].model)
    task: Any = runs[0].task
    kept = []
    for example in task.examples():
        prompt = prompt_of(runs[0], model, tokenizer, example)
        ids = list(prompt.ids)
        wanted = tokens_of([tokenizer.decode([token]) for token in ids], task.needles[0])
        configs = [batch_cache(run, [len(ids)]) for run in runs]
        new = runs[0].decoding.max_new_tokens
        contexts = prefill_together(model, [ids], configs, max_new_tokens=new, tokenizer=tokenizer, seeds=[0])
        kept.append([held(context.cache, wanted, model.config.num_hidden_layers) for context in contexts])
    return np.array(kept).swapaxes(0, 1)


def table(question: str, names: Sequence[str], kept: np.ndarray) -> str:
    """A Markdown table, most first; kept: as `shares` of these names."""
    rows = []
    for place in np.argsort(-kept.mean((1, 2, 3)), kind="stable"):
        by_prompt = 100 * kept[place].mean((1, 2))
        half = t_quantile((1 + LEVEL) / 2, len(by_prompt) - 1) * by_prompt.std(ddof=1) / len(by_prompt) ** 0.5
        whole = 100 * (kept[place] >= WHOLE).mean()
        held = f"{by_prompt.mean():.0f} ({by_prompt.mean() - half:.0f}..{by_prompt.mean() + half:.0f})"
        rows.append((names[place], held, f"{whole:.0f}"))
    head = (WORDS[question], "tokens of the needle held, %", "heads that hold nine of ten, %")
    return markdown(head, *rows, right=True)


@tells_errors(ConfigError, CacheError)
def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for what cannot be asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.needle_kept", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("methods", nargs="+", metavar="METHOD", help="methods that evict at the end of the prompt")
    add("--data", metavar="FOLDER", help="rows, laid out as experiments/real_data.yaml says")
    add("--kv-ratio", type=float, default=0.5)
    add("--lengths", type=int, nargs="+", default=[1000, 2000], help="tokens of prompt and question")
    args = parser.parse_args(arguments)
    scale_of(REAL, args.data)
    (command,) = commands_of(f"{REAL}/league_needle", args.data)
    for question in QUESTIONS:
        words = [
            *command.overrides,
            f"task.question={question}",
            f"kv_ratio={args.kv_ratio}",
            f"method={','.join(args.methods)}",
        ]
        fixed = [f"task.lengths=choice({args.lengths})", "limit=null"]
        runs = jobs(command.experiment, [*map(late, words), *fixed])
        print(table(question, args.methods, shares(runs)), flush=True)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
