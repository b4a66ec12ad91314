"""The league of methods: every method of kvexp at equal bytes on the real model, by divergence from the full cache.

python -m experiments.methods_league --data FOLDER                    all of it, resuming what exists
python -m experiments.methods_league --data FOLDER --plan             what is left to do, and how long it takes here
python -m experiments.methods_league --data FOLDER news news_qa       these tasks alone; --question in_prompt: seen
python -m experiments.methods_league --record                         keep the numbers for docs/methods_league.md
python -m experiments.methods_league --tables                         print the table of what is kept

First the calibrations that methods need are made, on the twelve articles of kvexp's own that no task of the league asks
about; then one sweep after the other (experiments/lib/league.py), split by what fits into memory. The rows of
FOLDER are found by experiments/real_data.yaml; without --data the tasks on kvexp's own articles are run alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.lib import league
from experiments.lib.exhibits import REAL
from experiments.lib.league import GROUPS, LONGEST, QUESTIONS, Piece, calibrate_for_league, pieces
from experiments.lib.real_scale import commands_of, scale_of
from experiments.lib.sweep import late, planned_seconds, sweep
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import tells_errors, watch_pipes

OWN = ("news", "news_qa")  # tasks on kvexp's own articles, which need no DATA
SMOKE_RATIOS = "0.25,0.75"


@tells_errors(ConfigError, CacheError)
def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all was run, 1 if a sweep failed (the others are run), 2 for what cannot be asked for."""
    args = parser().parse_args(arguments)
    where: Path = args.outputs.resolve()
    if args.record:
        print(f"wrote {league.record(where)}")
        return 0
    if args.tables:
        print(league.leaders(league.recorded()))
        return 0
    wanted = _checked(args)
    if not args.plan and any(_calibrated(piece) for piece in wanted):
        calibrate_for_league(where)
    seconds = [_took(piece, args, where) for piece in wanted]
    failed = [piece.name for piece, took in zip(wanted, seconds, strict=True) if took is None]
    if failed:
        print(f"{len(failed)} of {len(wanted)} sweeps failed: {', '.join(failed)}", file=sys.stderr)
    print(f"{len(wanted)} sweeps, {sum(filter(None, seconds)) / 3600:.1f} hours{' left' if args.plan else ''}")
    if not args.plan:
        print(league.leaders(league.frame_of(where)))
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments.methods_league", description=(__doc__ or "").splitlines()[0]
    )
    add = made.add_argument
    add("tasks", nargs="*", metavar="TASK", help=f"default: all of {', '.join(LONGEST)}")
    add("--data", metavar="FOLDER", help="rows, laid out as experiments/real_data.yaml says, or hub")
    add("--outputs", type=Path, default=Path("outputs/methods_league"), help="default: outputs/methods_league")
    add("--methods", nargs="+", default=[], metavar="METHOD", help="these alone (default: all)")
    add("--question", choices=QUESTIONS, help="seen by the eviction (in_prompt), or hidden from it; default: both")
    add("--limit", type=int, metavar="N", help="the first N examples of each task, at two budgets: does it run?")
    add("--no-answers", action="store_true", help="the divergence alone, in half of the time; answers can follow later")
    add("--plan", action="store_true", help="what is left to do and how long it takes; runs nothing")
    add("--record", action="store_true", help="keep the numbers of OUTPUTS in experiments/methods_league.csv")
    add("--tables", action="store_true", help="print the tables of what is kept")
    return made


def _checked(args: argparse.Namespace) -> list[Piece]:
    """The pieces that were asked for; ConfigError where there is none."""
    scale_of(REAL, args.data)
    known = {name for group in GROUPS for name in group.methods}
    for given, there, what in ((args.tasks, set(LONGEST), "task"), (args.methods, known, "method")):
        if unknown := [name for name in given if name not in there]:
            raise ConfigError(
                f"no such {what} in the league: {', '.join(unknown)}; there are {', '.join(sorted(there))}"
            )
    tasks = args.tasks or list(LONGEST)
    if args.data is None:
        for name in (name for name in tasks if name not in OWN):
            print(f"{name}: left out: its rows are in DATA, and no --data was given", flush=True)
        tasks = [name for name in tasks if name in OWN]
    if not tasks:
        raise ConfigError("no task is left: give --data FOLDER")
    return pieces(tasks, args.methods, [args.question] if args.question else QUESTIONS, answers=not args.no_answers)


def _calibrated(piece: Piece) -> bool:
    """Whether a method of the piece needs what a calibration pass leaves."""
    return piece.group.name == "duo" or bool({*league.CALIBRATED} & set(piece.methods))


def _took(piece: Piece, args: argparse.Namespace, where: Path) -> float | None:
    """Run one piece, or plan it; returns its seconds, or None where a job failed (after a message)."""
    more = [] if args.limit is None else [f"limit={args.limit}", f"kv_ratio={SMOKE_RATIOS}"]
    more += ["divergence=only"] if args.no_answers else []
    seconds = 0.0
    try:
        for each in commands_of(f"{REAL}/league_{piece.task}", args.data):
            words = [f"outputs_dir={where / piece.task}", *more, *map(late, [*each.overrides, *piece.words])]
            if args.plan:
                seconds += planned_seconds(each.experiment, words)
                continue
            start = time.monotonic()
            sweep(each.experiment, words)
            seconds += time.monotonic() - start
    except ConfigError as error:
        if args.plan and _calibrated(piece):
            print(f"{piece.name}: not known before its calibrations are made, as the first thing of a run", flush=True)
            return 0.0
        print(f"error: {piece.name}: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{piece.name}: {seconds / 60:.1f} minutes{' left' if args.plan else ''}", flush=True)
    return seconds


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
