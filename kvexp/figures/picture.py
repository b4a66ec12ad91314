"""Write a figure to the file a command was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from kvexp.errors import ConfigError
from kvexp.terminal import say

SUFFIXES = (".png", ".pdf", ".svg")
DPI = 150


def write_picture(file: Path, draw: Callable[[], Figure]) -> int:
    """The exit code of a command: 0, or 2 where there is nothing to draw or no place to put it, which is told."""
    try:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{file} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
        figure = draw()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=DPI)
    except (ConfigError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    say(f"wrote {file}")
    return 0
