"""The effect of removing tokens from the cache, and which methods' scores rank tokens by it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.console import Console
from kvexp.diagnose.__main__ import RUN, carried_out
from kvexp.diagnose.causal.causal_draw import draw_causal
from kvexp.diagnose.causal.causal_run import CausalOptions, measure_causes
from kvexp.diagnose.causal.causal_show import causal_title, show_causal
from kvexp.diagnose.causal.causal_tables import causal_tables
from kvexp.diagnose.causal.removal_plan import RemovalPlan
from kvexp.diagnose.draw import check_picture, save
from kvexp.diagnose.folders import run_at
from kvexp.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if the request cannot work."""
    return carried_out(parser(), sys.argv[1:] if argv is None else argv)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m experiments.studies.causal", description=__doc__)
    result.set_defaults(command=_causal)
    add = result.add_argument
    add("run", metavar="RUN", help=RUN)
    add("--methods", nargs="+", metavar="METHOD", default=["all"], help="whose scores (default: all)")
    add("--first", type=int, default=12, metavar="N", help="of the run's first so many examples (default: 12)")
    add("--example", nargs="+", default=[], metavar="EXAMPLE", help="these in place of the first ones")
    add("--tokens", default="300", metavar="N", help="single tokens removed per example, or all (default: 300)")
    add("--span", type=int, default=8, metavar="M", help="tokens of a span (default: 8)")
    add("--spans", type=int, metavar="N", help="spans removed per example (default: all, which cover the prompt)")
    add("--layers", type=int, default=150, metavar="N", help="tokens removed in one layer (default: 150)")
    add("--heads", type=int, default=180, metavar="N", help="tokens removed in one kv head (default: 180)")
    add("--new-tokens", type=int, default=32, metavar="N", help="of the forced answer, at most (default: 32)")
    add("--rows", type=int, default=8, metavar="N", help="removals per forward (default: 8)")
    add("--draw", type=Path, metavar="FILE", help="a picture: .png, .pdf or .svg")
    add("--csv", type=Path, metavar="FILE", help="write every removal and its effect")
    return result


def _causal(args: argparse.Namespace, console: Console) -> None:
    if args.draw is not None:
        check_picture(args.draw)
    for name in ("first", "new_tokens", "rows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.tokens != "all" and not args.tokens.isdigit():
        raise ConfigError(f"--tokens must be a whole number or all, got {args.tokens!r}")
    tokens = None if args.tokens == "all" else int(args.tokens)
    plan = RemovalPlan(tokens, args.span, args.spans, args.layers, args.heads)
    run = run_at(args.run)
    asked = CausalOptions(
        plan, tuple(args.methods), args.first, tuple(args.example), new_tokens=args.new_tokens, rows=args.rows
    )
    found = measure_causes(run, asked)
    tables = causal_tables(run, found)
    show_causal(tables, causal_title(run), console)
    if args.draw is not None:
        save(draw_causal(tables, causal_title(run)), args.draw)
        console.print(f"wrote {args.draw}", highlight=False, markup=False)
    if args.csv is not None:
        tables.removals.to_csv(args.csv, index=False)
        console.print(f"wrote {args.csv}", highlight=False, markup=False)
