"""What the divergence of a sweep costs, beside the generation of its answers, after the prefill that both share.

    python -m benchmarks.divergence_cost

Six runs and the full cache on kvexp's own articles, decoded in the same steps as a sweep decodes them. "own" and
"reference" force the full cache's answer and the reference on copies of the caches (the copying counts); "only" writes
the full cache's answer and feeds it to the others in the same step, as divergence=only does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.clock import Sample, busy, in_turns, ratio, spent
from benchmarks.command import Command, shape_of
from benchmarks.growth import configs_of
from benchmarks.real_model import folder
from benchmarks.shapes import Shape, ours, stock
from benchmarks.store import Cell
from benchmarks.table import Line, Target
from kvexp.tasks.articles import articles
from kvexp.util import watch_pipes

VARIANTS = 6
TARGETS = {"own": 1.3, "reference": 1.3, "only": 1.1}


def texts_of(shape: Shape, count: int, new: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, references of `new` tokens) of articles."""
    if not shape.real:
        dice = torch.Generator().manual_seed(0)
        drawn = [torch.randint(0, 90, (count, n), generator=dice).tolist() for n in (40, new)]
        return drawn[0], drawn[1]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    some = articles()[:count]
    references = tokenizer([" ".join(one.highlights) for one in some]).input_ids
    return tokenizer([one.text for one in some]).input_ids, [ids[:new] for ids in references]


def measure(options: Any) -> list[dict[str, Any]]:
    """The four passes, in turns, from forks of the same prefilled contexts."""
    from kvexp.core import CacheConfig
    from kvexp.generate import Forcing, GenerationParams, decode_batches, divergence_of_batches
    from kvexp.generate.prefill import prefill_together
    from kvexp.methods import Full

    shape = shape_of(options).fitted(2048)
    model = ours(stock(shape, options.device))
    prompts, references = texts_of(shape, options.articles, options.new)
    params = GenerationParams(options.new, eos=None)
    full = CacheConfig.of(Full(), None)
    batches = [
        prefill_together(model, [ids], [full, *configs_of(VARIANTS, len(ids))], max_new_tokens=options.new)
        for ids in prompts
    ]

    def forks() -> list[list[Any]]:
        return [[context.fork([0]) for context in batch] for batch in batches]

    def generate(contexts: list[list[Any]]) -> list[Any]:
        return decode_batches(model, contexts, params, [[0]] * len(contexts), None, start=0.0)

    own = [made[0].tokens[0] for made in generate([[batch[0]] for batch in forks()])]

    def generation() -> Sample:
        contexts = forks()
        return _timed(lambda: generate(contexts), options.device)

    def forced(texts: Sequence[list[int]]) -> Sample:
        def run() -> Any:
            return divergence_of_batches(
                model, [Forcing(b[0], b[1:], [text]) for b, text in zip(forks(), texts, strict=True)]
            )

        return _timed(run, options.device)

    def only() -> Sample:
        contexts = [Forcing(batch[0], batch[1:]) for batch in forks()]
        return _timed(lambda: divergence_of_batches(model, contexts, max_new_tokens=options.new), options.device)

    tasks: dict[str, Callable[[], Sample]] = {
        "generation": generation, "own": functools.partial(forced, own),
        "reference": functools.partial(forced, references), "only": only,
    }  # fmt: skip
    samples = in_turns(tasks, options.repeats)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def _timed(task: Callable[[], Any], device: str) -> Sample:
    _, wall, cpu = spent(task, device)
    return {"wall_s": wall, "cpu_s": cpu}


def title(key: Cell) -> str:
    return f"{key['shape']}, {VARIANTS} runs and the full cache, {key['articles']} articles, {key['new']} tokens"


def lines(cell: Cell) -> list[Line]:
    """Seconds of each pass over those of generation."""
    rows = {row["variant"]: row["samples"] for row in cell["rows"]}
    generation, found = rows.pop("generation"), []
    for name, samples in rows.items():
        wall, cpu = (
            ratio([s[clock] for s in samples], [s[clock] for s in generation]) for clock in ("wall_s", "cpu_s")
        )
        target = None if cell["key"]["tiny"] else Target(TARGETS[name], "<=")
        seconds = f"{samples[0]['wall_s']:.1f} s / {generation[0]['wall_s']:.1f} s"
        note = "; ".join(part for part in (busy(samples), seconds) if part)
        found.append(Line(f"{name}: seconds / generation", wall, cpu, target=target, note=note))
    return found


def main(arguments: list[str] | None = None) -> int:
    command = Command("divergence_cost", __doc__, arguments)
    command.add("--shape", default="smollm2_135m")
    command.add("--articles", type=int, default=4)
    command.add("--new", type=int, default=32)
    options = command.options()
    with torch.no_grad():
        key = {"articles": options.articles, "new": options.new}
        command.cell(key, functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
