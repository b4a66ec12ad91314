"""docs/gpu.md: times and memory on an H200, over Hugging Face's full cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks.clock import Ratio
from experiments.lib.speed import cells, over, samples
from experiments.pages import blank, dots, markdown

NAMES = {"full": "full cache here", "h2o@0.2": "H2O", "keyformer@0.2": "Keyformer", "a2sf@0.2": "A2SF"}
Rows = dict[str, tuple[str, dict[str, object], str, str]]
# Row -> benchmark, what tells its cell from others, field, and what is behind the variants' names.
CUDA = {"device": "cuda", "shape": "llama2_7b"}
ROWS: Rows = {
    "a token, 8k, batch 1": ("decode", {**CUDA, "prompt": 8192, "batch": 1}, "tpot_s", ""),
    "a token, 8k, batch 8": ("decode", {**CUDA, "prompt": 8192, "batch": 8}, "tpot_s", ""),
    "a token, 4k, batch 1": ("whole", CUDA, "tpot_s", ""),
    "the same, CUDA graph": ("whole", CUDA, "tpot_s", ",graph=auto"),
    "first token, 8k": ("prefill", CUDA, "ttft_s", ""),
    "memory, 8k": ("prefill", CUDA, "peak_bytes", ""),
}


def ratios(rows: Rows) -> Iterator[tuple[str, list[Ratio | None]]]:
    """Each row's label and, of each of NAMES, the ratio to Hugging Face; None of what was not run."""
    for label, (benchmark, wanted, field, end) in rows.items():
        cell = cells(benchmark, **wanted)[0]
        yield label, [over(samples(cell, name + end), samples(cell, "hf"), field) for name in NAMES]


def draw() -> Figure:
    figure, (axes,) = blank()
    unknown = Ratio(math.nan, math.nan, math.nan)
    rows = [
        (label, [(r.value, r.low, r.high) for r in (each or unknown for each in row)]) for label, row in ratios(ROWS)
    ]
    dots(axes, rows, list(NAMES.values()))
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 2.4)
    axes.set_xlabel("share of what Hugging Face's full cache takes")
    return figure


def table(rows: Rows = ROWS) -> str:
    lines = [[label, *(str(each or "").replace(" to ", "-") for each in row)] for label, row in ratios(rows)]
    return markdown(["over Hugging Face's full cache", *NAMES.values()], lines)
