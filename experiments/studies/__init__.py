"""Studies: what no sweep needs, each a command of its own (`python -m experiments.studies.NAME --help`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from kvexp.util import CacheError, ConfigError, say


def carried_out(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> int:
    """Do what the arguments say: their `command` gets them. Its exit code, or 2 for an error, which is told."""
    args = parser.parse_args(words)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
    except OSError as error:
        say(f"error: {error.strerror or error}", file=sys.stderr)
    return 2
