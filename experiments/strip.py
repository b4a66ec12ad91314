"""Make notebooks fit for the repository: no outputs, no execution counts, and the outcomes that are on record.

python -m experiments.strip notebooks/*.ipynb     exit 1 if a file was changed, so that a commit stops and shows it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments import findings
from kvexp.util.output import watch_pipes

SHOWN = re.compile(r'show\("(\w+)"\)')
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
METADATA["language_info"] = {"name": "python"}


def stripped(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook without what a run or an editor adds: outputs, counts, metadata; a cell keeps its tags."""
    cells = []
    for cell in notebook["cells"]:
        tags = cell.get("metadata", {}).get("tags")
        cell = {**cell, "metadata": {"tags": tags} if tags else {}}
        cells.append(cell | ({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}))
    for about, cell in pairwise(cells):
        if shown := SHOWN.fullmatch("".join(cell["source"])):
            about["source"] = [_with_outcome(line, shown[1]) for line in about["source"]]
    return {**notebook, "cells": cells, "metadata": METADATA}


def _with_outcome(line: str, name: str) -> str:
    """The line that says what is recorded of an exhibit, brought up to date; any other as it is."""
    return re.sub(r"(?<=^\*Recorded: ).*(?=\.\*$)", findings.outcomes(name), line)


def strip(path: Path) -> bool:
    """Whether the file had something to mend; it has not now."""
    before = path.read_text(encoding="utf-8")
    after = json.dumps(stripped(json.loads(before)), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def main(arguments: Sequence[str] | None = None) -> int:
    changed = [name for name in (sys.argv[1:] if arguments is None else arguments) if strip(Path(name))]
    for name in changed:
        print(f"{name}: outputs taken out, recorded outcomes brought up to date; add it again")
    return 1 if changed else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
