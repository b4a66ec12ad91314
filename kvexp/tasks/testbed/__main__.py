"""`kvexp export-testbed FOLDER`: the testbed as data of lm-eval, LongBench and needle, and how to run it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from kvexp.errors import ConfigError
from kvexp.tasks.testbed.export_tasks import export
from kvexp.testbed.document import SPLITS


def main(arguments: list[str] | None = None) -> int:
    """Write the files and print the commands that read them; 1 for what cannot be done, which is told."""
    parser = argparse.ArgumentParser(prog="kvexp export-testbed", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=60, help="items and questions")
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--seed", type=int, default=12345)
    asked = parser.parse_args(arguments)
    try:
        for overrides in export(asked.folder, asked.size, asked.split, asked.seed).values():
            print(shlex.join(["kvexp", "run", *overrides]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
