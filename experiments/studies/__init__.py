"""Studies: what no sweep needs, each a command of its own (`python -m experiments.studies.NAME --help`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from kvexp.util import CacheError, ConfigError, tells_errors


@tells_errors(ConfigError, CacheError, OSError)
def carried_out(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> int:
    """Call the parsed arguments' `command`; returns its exit code, or 2 after printing an error."""
    args = parser.parse_args(words)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)
