"""The command `kvexp results`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvexp.results.divergence import DIVERGENCES, divergence_frames, print_choices, print_divergence
from kvexp.results.read import add_choice, chosen_by, unmatched
from kvexp.results.table import X_AXES, print_table, table, to_markdown
from kvexp.util import ConfigError, Console, say


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 1 if nothing matched, 2 if the request cannot work."""
    args = parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", file=sys.stderr)
        warnings.simplefilter("always")
        try:
            chosen = chosen_by(args)
            if args.metric is not None:
                return divergence(args, chosen)
            df = table(args.outputs, chosen)
            if df.empty:
                say(unmatched(args.outputs, chosen))
                return 1
            write(df, args)
            print_table(df, Console(markup=False), args.x)
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp results", description=__doc__)
    result.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(result)
    result.add_argument(
        "--metric",
        choices=DIVERGENCES,
        help="the divergence from the full cache in place of the task's scores, runs of one kv_ratio in its order",
    )
    result.add_argument("--x", choices=X_AXES, default=X_AXES[0], help="what orders the rows (default: kv_ratio)")
    result.add_argument("--csv", type=Path, metavar="FILE", help="write every column as CSV")
    result.add_argument("--parquet", type=Path, metavar="FILE", help="write every column as parquet")
    result.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed as Markdown")
    return result


def divergence(args: argparse.Namespace, chosen: Mapping[str, Any]) -> int:
    """As `main`, of what is measured of divergence; nothing is measured here."""
    frame, choices = divergence_frames(args.outputs, chosen)
    if frame.empty and choices.empty:
        say(f"no run here has a divergence: kvexp divergence {args.outputs} measures it")
        return 1
    if args.markdown is not None:
        raise ConfigError("--markdown writes the table of scores: with --metric use --csv or --parquet")
    write(choices if frame.empty else frame, args)
    print_divergence(frame, Console(markup=False), args.metric)
    print_choices(choices, Console(markup=False))
    return 0


def write(df: pd.DataFrame, args: argparse.Namespace) -> None:
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (args.csv, lambda path: df.to_csv(path, index=False)),
        (args.parquet, lambda path: df.to_parquet(path, index=False)),
        (args.markdown, lambda path: path.write_text(to_markdown(df, args.x), encoding="utf-8")),
    ]
    for path, writer in writers:
        if path is None:
            continue
        try:
            writer(path)
        except (OSError, ImportError) as error:
            raise ConfigError(f"cannot write {path}: {error}; choose another file") from error
        say(f"wrote {path}", file=sys.stderr)
