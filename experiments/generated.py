"""Pages made from recorded results: written by a command, and tested to be what it would write now."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvexp.errors import ConfigError


def write_or_check(
    text: Callable[[], str], page: Path, command: str, arguments: Sequence[str] | None, title: str | None
) -> int:
    """Write what `text` makes to `page`, or with --check see whether it is there: 0, 1 if not, 2 if it cannot be made.

    command: what to type; title: the docstring of who types it.
    """
    parser = argparse.ArgumentParser(prog=command, description=inspect.cleandoc(title or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help=f"write nothing; 1 if {page.name} is not current")
    check = parser.parse_args(arguments).check
    try:
        now = text()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if check:
        current = page.exists() and page.read_text("utf-8") == now
        print("current" if current else f"not current; run: {command}")
        return 0 if current else 1
    page.write_text(now, encoding="utf-8")
    print(f"wrote {page}")
    return 0
