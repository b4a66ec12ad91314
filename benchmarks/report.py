"""Every table of a folder of results, then the issue's targets with what was reached.

python -m benchmarks.report benchmarks/results
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.command import Line, printed, table
from benchmarks.store import RESULTS
from kvexp.util.output import watch_pipes


def tables(folder: Path, tiny: bool = False) -> tuple[list[str], list[Line]]:
    """The printed tables in order of file and cell, and the lines that have a target."""
    texts, judged = [], []
    for file in sorted(folder.glob("*.json")):
        module = _module(file.stem)
        for cell in json.loads(file.read_text("utf-8")) if module else ():
            if cell["key"].get("tiny") and not tiny:
                continue
            texts.append(printed(file.stem, cell, module.title, module.lines))
            where = f"{file.stem}, {cell['key']['device']}, {module.title(cell['key'])}"
            for line in module.lines(cell):
                if line.target:
                    judged.append(replace(line, what=f"{where}: {line.what}", bandwidth=None, floor=None))
    return texts, judged


def _module(name: str) -> Any:
    """The benchmark that wrote a file of this name; None for other files."""
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError:
        return None
    return module if hasattr(module, "title") and hasattr(module, "lines") else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="also what was run with --tiny")
    options = parser.parse_args(arguments)
    texts, judged = tables(options.folder, options.tiny)
    if not texts:
        print(f"no results under {options.folder}; run: make bench")
        return 1
    print("\n".join(texts))
    if judged:
        print(f"\ntargets\n\n{table(judged)}")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
