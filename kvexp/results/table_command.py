"""The command of a table that is read from a folder of runs: its arguments, the CSV file, the errors, the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.results.where import add_choice, chosen_by
from kvexp.terminal import say


def parser_of(doc: str, prog: str) -> argparse.ArgumentParser:
    """The parser of such a command: folder, --where, --csv. doc: of the module, whose first line describes it."""
    parser = argparse.ArgumentParser(prog=prog, description=doc.splitlines()[0])
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    read: Callable[..., pd.DataFrame],
    show: Callable[..., None],
    *options: str,
) -> int:
    """0 if there was something to show, 2 if not.

    read(outputs, wanted, **options): the table; show(frame, console=…, **options): prints it. options: names of
    arguments of the parser that both take.
    """
    args = parser.parse_args(argv)
    more: dict[str, Any] = {name: getattr(args, name) for name in options}
    try:
        frame = read(args.outputs, chosen_by(args), **more)
        if args.csv is not None:
            frame.to_csv(args.csv, index=False)
        show(frame, console=Console(markup=False), **more)
    except (ConfigError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0
