"""A sweep of twenty variants and the full cache as a whole command, start-up and tables included, into a fresh folder.

    python -m benchmarks.sweep                        # against Hugging Face's full answers alone, on the real model
    python -m benchmarks.sweep --basic --articles 2   # against hydra/launcher=basic, at batch 1 and all at once
    python -m benchmarks.sweep --basic --model testbed_rope --articles 24

Five methods at four budgets on kvexp's own news articles (the testbed's models: on their summaries): such as evict at
every step, and with divergence=true such as choose at the prompt's end. Hugging Face's answers are the model's own
`generate` on the same prompts, weights and number of new tokens, one prompt after the other, loading not counted. All
in turns. The sweep again with divergence=true is measured too.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

import torch

from benchmarks.clock import Sample, busy, in_turns, over, run_command, spent
from benchmarks.command import Command, Line, Target
from benchmarks.shapes import NAME, SHAPES, folder, stock
from benchmarks.store import Cell
from kvexp.tasks.articles import articles
from kvexp.util.output import watch_pipes

BUDGETS = "kv_ratio=0.2,0.5,0.7,0.9"
EVICTING = "method=h2o,keyformer,a2sf,window,tova"
PROMPT_END = "method=snapkv,kvzip,expected_attention,pyramidkv,keydiff"
INSTRUCTION = "Summarize the following news article in three sentences:"  # as conf/task/news.yaml
BASIC = "hydra/launcher=basic"
SWEEPS = {  # name -> methods, and `divergence`
    "sweep": (EVICTING, "false"),
    "sweep with divergence": (EVICTING, "true"),
    "sweep at the prompt's end, with divergence": (PROMPT_END, "true"),
}
TARGETS = {  # of the real model
    "sweep": Target(1.6, "<="),
    "sweep with divergence": Target(2.4, "<="),
    "sweep at the prompt's end, with divergence": Target(3.0, "<="),
    "basic, batch 1": Target(10, ">="),
}


def sweep(options: Any, methods: str, divergence: str, *more: str) -> Sample:
    """The whole command; methods: the word that names them; more: further words of it."""
    testbed = options.model.startswith("testbed")
    with tempfile.TemporaryDirectory() as out:
        words = [f"model={'tiny' if options.tiny else options.model}", f"limit={options.articles}"]
        words += [f"task={'testbed_summary' if testbed and not options.tiny else 'news'}", f"outputs_dir={out}"]
        words += [f"task.max_new_tokens={options.new}", "generation.eos=null", f"divergence={divergence}"]
        words += ["task.max_prompt_tokens=200", "task.truncate=right"] * options.tiny
        return run_command(["run.py", "-m", *words, *more, methods, BUDGETS])


def prompts(options: Any) -> list[list[int]]:
    """Token ids of the articles' prompts, as the sweep feeds them."""
    if options.tiny:
        return [list(range(1, 65))] * options.articles
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    turns = [[{"role": "user", "content": f"{INSTRUCTION}\n\n{doc.text}"}] for doc in articles()[: options.articles]]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def full_answers(model: Any, fed: list[list[int]], new: int) -> Sample:
    """Hugging Face's `generate`, one prompt after the other."""

    def answer() -> None:
        for ids in fed:
            row = torch.tensor([ids])
            kept = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new, **kept)

    _, wall, cpu = spent(answer, "cpu")
    return {"wall_s": wall, "cpu_s": cpu}


def measure(options: Any) -> list[dict[str, Any]]:
    """One cell: both sweeps and Hugging Face's answers, or the sweep and the same without sharing, in turns."""
    if options.basic:
        one_sweep = functools.partial(sweep, options, EVICTING, "false")
        tasks = {"sweep": one_sweep}
        for size in sorted({1, options.articles}):
            tasks[f"basic, batch {size}"] = functools.partial(one_sweep, f"batch_size={size}", BASIC)
    else:
        shape = SHAPES[NAME].tiny() if options.tiny else SHAPES[NAME]
        fed = prompts(options)
        model = stock(shape.fitted(max(map(len, fed)) + options.new), "cpu")
        tasks = {name: functools.partial(sweep, options, *said) for name, said in SWEEPS.items()}
        tasks["hf"] = functools.partial(full_answers, model, fed, options.new)
    samples = in_turns(tasks, options.repeats, warm=0)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def title(key: Cell) -> str:
    against = "one run after the other" if key.get("basic") else "their full answers alone"
    return f"{key['model']}, 21 runs on {key['articles']} articles, {key['new']} new tokens, against {against}"


def lines(cell: Cell) -> list[Line]:
    """Seconds of the sweeps over Hugging Face's answers; or of `BASIC` over the sweep's."""
    key, rows, said = cell["key"], {row["variant"]: row["samples"] for row in cell["rows"]}, []
    base = "sweep" if key.get("basic") else "hf"
    against = rows.pop(base)
    for name, samples in rows.items():
        wall, cpu = (over(samples, against, clock) for clock in ("wall_s", "cpu_s"))
        target = TARGETS.get(name) if key["model"] == NAME and not key["tiny"] else None
        seconds = f"{samples[0]['wall_s']:.0f} s / {against[0]['wall_s']:.0f} s"
        note = "; ".join(text for text in (busy(samples), seconds) if text)
        said.append(Line(f"{name}: seconds / {base}", wall, cpu, target=target, note=note))
    return said


def main(arguments: list[str] | None = None) -> int:
    command = Command("sweep", __doc__, arguments)
    command.add("--model", default=NAME, help="as of conf/model; others than the default with --basic alone")
    command.add("--articles", type=int, default=6, help="examples")
    command.add("--new", type=int, default=96)
    command.add("--basic", action="store_true", help=f"against {BASIC} instead")
    options = command.options()
    if options.model != NAME and not options.basic:
        command.parser.error(f"--model {options.model} is measured with --basic alone")
    key = {"model": options.model, "articles": options.articles, "new": options.new}
    command.cell(key | ({"basic": True} if options.basic else {}), functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
