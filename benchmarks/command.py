"""What every benchmark's command line shares: where results go, what is repeated, the tiny form, the printed table."""

from __future__ import annotations

import argparse
import gc
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import sources, words
from benchmarks.shapes import SHAPES, Shape
from benchmarks.store import RESULTS, Cell, Results
from benchmarks.table import Line, table


class Command:
    """One benchmark's options, results and table. `name` is also the name of its file of results."""

    def __init__(self, name: str, doc: str | None, arguments: list[str] | None) -> None:
        self.name, self.arguments = name, arguments
        self.parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=inspect.cleandoc(doc or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add = self.parser.add_argument
        self.add("--out", default=str(RESULTS), help="folder of the results")
        self.add("--again", action="store_true", help="measure also what is there")
        self.add("--repeats", type=int, default=5, help="turns that count; one more warms up")
        self.add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        self.add("--threads", type=int, default=None, help="of torch on the CPU; default: as torch takes them")
        self.add("--tiny", action="store_true", help="tiny layouts: shows that it runs, measures nothing of interest")

    def options(self) -> argparse.Namespace:
        """Parse; sets torch's threads."""
        self.parsed = self.parser.parse_args(self.arguments)
        if getattr(self.parsed, "shape", None) not in (None, *SHAPES):
            self.parser.error(f"--shape must be one of {', '.join(SHAPES)}, got {self.parsed.shape!r}")
        if self.parsed.threads is not None:
            torch.set_num_threads(self.parsed.threads)
        self.results = Results(self.name, self.parsed.out)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # random weights only: nothing is to be asked of the hub
        return self.parsed

    def cell(
        self,
        key: Cell,
        measure: Callable[[], Any],
        title: Callable[[Cell], str],
        lines: Callable[[Cell], list[Line]],
    ) -> Cell:
        """Measure one cell unless it is there, and print its table."""
        options = self.parsed
        device = options.device
        full = {
            **({"shape": shape_of(options).name} if hasattr(options, "shape") else {}),
            **key,
            **{"repeats": options.repeats, "device": device.partition(":")[0], "threads": torch.get_num_threads()},
            **{"tiny": options.tiny, "machine": words(device)},
        }
        gc.collect()
        gc.freeze()  # what was imported is no garbage: looking through it between two tasks takes longer than they do
        try:
            cell, was_there = self.results.measured(full, measure, device, options.again)
        finally:
            gc.unfreeze()
        if was_there:
            print(f"\n{self.results.path} has this already (--again measures anew):", end="")
        print(printed(self.name, cell, title, lines), flush=True)
        return cell


def printed(name: str, cell: Cell, title: Callable[[Cell], str], lines: Callable[[Cell], list[Line]]) -> str:
    """A cell's table under a line that says what it is and where it comes from."""
    key, about = cell["key"], cell["from"]
    threads = f"{key['threads']} threads, " if key["device"] == "cpu" else ""
    origin = f"{about['machine']}, {threads}load {about['load_at_start'][0]:g}, {about['date'][:10]}"
    code = f"commit {about['commit']}" + ("" if about["sources"] == sources() else ", other code than now")
    tiny = " (TINY: shows that it runs and nothing else)" if key["tiny"] else ""
    return f"\n{name}: {title(key)}{tiny}\n{origin}, {code}\n\n{table(lines(cell))}"


def shape_of(options: argparse.Namespace) -> Shape:
    """The layout that was asked for, tiny if so asked."""
    shape = SHAPES[options.shape]
    return shape.tiny() if options.tiny else shape


def error_of(row: dict[str, Any]) -> str | None:
    """What a row's variant died of, if it did."""
    return next((str(sample["error"]) for sample in row["samples"] if "error" in sample), None)
