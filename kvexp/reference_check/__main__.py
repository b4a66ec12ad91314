"""`kvexp check-reference FILE.npz ...`: exit code 0 if every compared field of every file passes.

A folder stands for the .npz files in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvexp.errors import ConfigError
from kvexp.reference_check.dispatch import run
from kvexp.terminal import say


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvexp check-reference", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE.npz", help="recordings of the authors' code, or their folder")
    failed = 0
    for path in [path for named in parser.parse_args(arguments).files for path in _files(named, parser)]:
        say(path)
        try:
            report = run(path)
        except Exception as error:  # whatever a file lacks or holds too much of, the others are compared
            say(f"  cannot be compared: {_reason(error)}")
            failed += 1
            continue
        say(report)
        failed += not report.passed
    say(f"{failed} file(s) failed" if failed else "all files pass")
    return 1 if failed else 0


def _reason(error: Exception) -> str:
    """One line. Only kvexp's own errors say by themselves what they are about."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _files(named: str, parser: argparse.ArgumentParser) -> list[str]:
    """A file as it is named, a folder's recordings in the order of their names."""
    if not Path(named).is_dir():
        return [named]
    found = [str(path) for path in sorted(Path(named).glob("*.npz"))]
    if not found:
        parser.error(f"{named} is a folder without any .npz file")
    return found
