"""What every benchmark's command line shares: where results go, what is repeated, the tiny form, the printed table."""

from __future__ import annotations

import argparse
import gc
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.clock import BUSY, Ratio
from benchmarks.shapes import SHAPES, Shape, variant
from benchmarks.store import RESULTS, Cell, Results, sources, words


@dataclass(frozen=True)
class Target:
    """A ratio has to be at most, or at least, this."""

    limit: float
    side: Literal["<=", ">="]

    def met(self, value: float) -> bool:
        return value <= self.limit if self.side == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.side} {self.limit:g}"


@dataclass(frozen=True)
class Line:
    """what: text of the comparison; ratio: None with the reason in `note` where there is none.

    by_cpu: the same ratio of the processor's seconds, which others on the machine disturb less. bandwidth: bytes per
    second reached; floor: measured time over the least time the bytes allow. A verdict reached while others used the
    machine carries a question mark.
    """

    what: str
    ratio: Ratio | None
    by_cpu: Ratio | None = None
    bandwidth: float | None = None
    floor: float | None = None
    target: Target | None = None
    note: str = ""

    def cells(self) -> list[str]:
        verdict = ""
        if self.target is not None and self.ratio is not None:
            doubt = "?" if self.note.startswith(BUSY) else ""
            verdict = ("met" if self.target.met(self.ratio.value) else "MISSED") + doubt
        return [
            self.what,
            "" if self.ratio is None else f"{self.ratio.value:.3g}",
            "" if self.ratio is None else f"{self.ratio.low:.3g} to {self.ratio.high:.3g}",
            "" if self.by_cpu is None else f"{self.by_cpu.value:.3g}",
            "" if self.bandwidth is None else f"{self.bandwidth / 1e9:.1f}",
            "" if self.floor is None else f"{self.floor:.3g}",
            "" if self.target is None else str(self.target),
            verdict,
            self.note,
        ]


HEAD = ("what", "ratio", "min to max", "by cpu", "GB/s", "x floor", "target", "verdict", "note")


def table(lines: Iterable[Line], head: Sequence[str] = HEAD) -> str:
    """Markdown, columns aligned; a column nobody fills is left out."""
    rows = [list(head), *(line.cells() for line in lines)]
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    text = ["| " + " | ".join(row[i].ljust(widths[i]) for i in used) + " |" for row in rows]
    return "\n".join([text[0], "|" + "|".join("-" * (widths[i] + 2) for i in used) + "|", *text[1:]])


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
        """Parse, and check shape and variants; sets torch's threads."""
        self.parsed = self.parser.parse_args(self.arguments)
        if getattr(self.parsed, "shape", None) not in (None, *SHAPES):
            self.parser.error(f"--shape must be one of {', '.join(SHAPES)}, got {self.parsed.shape!r}")
        for name in getattr(self.parsed, "variants", ()):
            variant(name)
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
