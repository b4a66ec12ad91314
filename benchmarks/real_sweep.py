"""A sweep of twenty variants and the full cache on the real model, against Hugging Face's six full answers alone.

    python -m benchmarks.real_sweep
    python -m benchmarks.real_sweep --basic --articles 2      # against hydra/launcher=basic, at batch 1 and all at once

Five methods at four budgets on kvexp's own news articles, as a whole command, start-up and tables included, into a
fresh folder; and the model's own `generate` on the same prompts, weights and number of new tokens, one prompt after the
other, loading not counted. The two in turns. The sweep again with divergence=true is measured beside.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

import torch

from benchmarks.clock import Sample, busy, in_turns, ratio, spent
from benchmarks.command import Command
from benchmarks.processes import command as run_command
from benchmarks.real_model import NAME
from benchmarks.shapes import SHAPES, stock
from benchmarks.store import Cell
from benchmarks.table import Line, Target
from kvexp.tasks.articles import articles
from kvexp.util import watch_pipes

METHODS = "h2o,keyformer,a2sf,window,tova"
RATIOS = "0.2,0.5,0.7,0.9"
INSTRUCTION = "Summarize the following news article in three sentences:"  # as task=news
BASIC = "hydra/launcher=basic"
SWEEPS = {"sweep": "false", "sweep with divergence": "true"}


def sweep(options: Any, divergence: str, *more: str) -> Sample:
    """The whole command; more: further words of it."""
    with tempfile.TemporaryDirectory() as out:
        model = ["model=tiny"] if options.tiny else [f"model={NAME}"]
        words = ["run.py", "-m", *model, "task=news", f"limit={options.articles}", f"outputs_dir={out}"]
        words += [f"task.max_new_tokens={options.new}", "generation.eos=null", f"divergence={divergence}"]
        return run_command(
            [
                *words,
                *more,
                f"method={METHODS}",
                f"kv_ratio={RATIOS}",
                *["task.max_prompt_tokens=64", "task.truncate=right"] * options.tiny,
            ]
        )


def prompts(options: Any) -> list[list[int]]:
    """Token ids of the articles' prompts, as the sweep feeds them."""
    if options.tiny:
        return [list(range(1, 65))] * options.articles
    from transformers import AutoTokenizer

    from benchmarks.real_model import folder

    tokenizer = AutoTokenizer.from_pretrained(folder())
    turns = [[{"role": "user", "content": f"{INSTRUCTION}\n\n{one.text}"}] for one in articles()[: options.articles]]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def full_answers(model: Any, each: list[list[int]], new: int) -> Sample:
    """Hugging Face's `generate`, one prompt after the other."""

    def answer() -> None:
        for ids in each:
            row = torch.tensor([ids])
            kept = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new, **kept)

    _, wall, cpu = spent(answer, "cpu")
    return {"wall_s": wall, "cpu_s": cpu}


def measure(options: Any) -> list[dict[str, Any]]:
    """One cell: both sweeps and Hugging Face's answers, or the sweep and the same without sharing, in turns."""
    if options.basic:
        alone = {f"basic, batch {size}": (f"batch_size={size}", BASIC) for size in sorted({1, options.articles})}
        runs = {"sweep": functools.partial(sweep, options, "false")}
        runs |= {name: functools.partial(sweep, options, "false", *words) for name, words in alone.items()}
        samples = in_turns(runs, options.repeats, warm=0)
        return [{"variant": name, "samples": taken} for name, taken in samples.items()]
    shape = SHAPES[NAME].tiny() if options.tiny else SHAPES[NAME]
    each = prompts(options)
    model = stock(shape.fitted(max(map(len, each)) + options.new), "cpu")
    tasks = {name: functools.partial(sweep, options, said) for name, said in SWEEPS.items()}
    tasks["hf"] = functools.partial(full_answers, model, each, options.new)
    samples = in_turns(tasks, options.repeats, warm=0)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def title(key: Cell) -> str:
    against = "one run after the other" if key.get("basic") else "their full answers alone"
    return f"21 runs on {key['articles']} articles, {key['new']} new tokens, against {against}"


def lines(cell: Cell) -> list[Line]:
    """Seconds of the sweeps over those of Hugging Face's answers; or those of `BASIC` over the sweep's."""
    rows = {row["variant"]: row["samples"] for row in cell["rows"]}
    if cell["key"].get("basic"):
        return _basic_lines(rows.pop("sweep"), rows, cell["key"]["tiny"])
    hf, found = rows.pop("hf"), []
    for name, samples in rows.items():
        wall, cpu = (ratio([s[clock] for s in samples], [s[clock] for s in hf]) for clock in ("wall_s", "cpu_s"))
        target = Target(1.5, "<=") if name == "sweep" and not cell["key"]["tiny"] else None
        seconds = f"{samples[0]['wall_s']:.0f} s / {hf[0]['wall_s']:.0f} s"
        note = "; ".join(part for part in (busy(samples), seconds) if part)
        found.append(Line(f"{name}: seconds / hf", wall, cpu, target=target, note=note))
    return found


def _basic_lines(shared: list[Sample], rows: dict[str, list[Sample]], tiny: bool) -> list[Line]:
    found = []
    for name, samples in rows.items():
        wall, cpu = (ratio([s[clock] for s in samples], [s[clock] for s in shared]) for clock in ("wall_s", "cpu_s"))
        target = Target(10, ">=") if name == "basic, batch 1" and not tiny else None
        seconds = f"{samples[0]['wall_s']:.0f} s / {shared[0]['wall_s']:.0f} s"
        note = "; ".join(part for part in (busy(samples), seconds) if part)
        found.append(Line(f"{name}: seconds / sweep", wall, cpu, target=target, note=note))
    return found


def main(arguments: list[str] | None = None) -> int:
    command = Command("real_sweep", __doc__, arguments)
    command.add("--articles", type=int, default=6)
    command.add("--new", type=int, default=96)
    command.add("--basic", action="store_true", help=f"against {BASIC} instead")
    options = command.options()
    key = {
        "model": NAME,
        "articles": options.articles,
        "new": options.new,
        **({"basic": True} if options.basic else {}),
    }
    command.cell(key, functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
