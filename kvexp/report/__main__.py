"""kvexp report [OUTPUTS] [FILE]: write one HTML file of whatever has been run."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from kvexp.errors import ConfigError
from kvexp.report.html_page import page
from kvexp.report.source import read
from kvexp.results.where import add_choice, chosen_by
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 where there is nothing to show or no place to put it."""
    parser = argparse.ArgumentParser(prog="kvexp report", description=__doc__)
    parser.add_argument("outputs", nargs="?", type=Path, default=Path("outputs"), help="the folder of the runs")
    parser.add_argument("file", nargs="?", type=Path, help="what to write (default: report.html in that folder)")
    add_choice(parser)
    parser.add_argument("--samples", type=int, default=20, help="sample outputs per run (default: 20)")
    args = parser.parse_args(argv)
    file = args.file or args.outputs / "report.html"
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", file=sys.stderr)
        warnings.simplefilter("always")
        try:
            source = read(args.outputs, chosen_by(args), args.samples)
            text = page(source)
            write(file, text)
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr)
            return 2
    runs = int(source.frame["status"].ne("refused").sum())
    say(f"wrote {file}: {runs} runs, {len(text) / 1e6:.1f} MB; open it in a browser")
    return 0


def write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}; choose another file") from error
