"""Make exhibits again: run what is missing, write the table and the figure, say whether the claim holds.

python -m experiments.reproduce keyformer_fig7
python -m experiments.reproduce all --smoke                 every exhibit with two examples, under outputs/smoke
python -m experiments.reproduce fig7 --data FOLDER          SmolLM2-135M on the rows of a folder (or --data hub)
python -m experiments.reproduce fig7 --scale real           the same on kvexp's own articles
python -m experiments.reproduce fig7 --scale paper          the paper's models and data, from the hub
python -m experiments.reproduce fig7 --scale paper --set keyformer_fig7:task.data_files=cnn.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.lib.exhibits import REAL, SCALES, full_name, load, names, size_of, sweeps
from experiments.lib.real_scale import commands, layout, scale_of
from experiments.lib.record import SECOND, VERDICT, record, record_real, recorded
from experiments.lib.runner import OUTPUTS, Setup, results, seconds_left
from kvexp.run.jobs import INTERRUPTED, KEPT
from kvexp.util.errors import ConfigError
from kvexp.util.output import duration, tells_errors, watch_pipes

SHOWN = 20  # rows of a table that are printed


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m experiments.reproduce", description=__doc__.splitlines()[0])
    add = result.add_argument
    add("names", nargs="+", metavar="NAME", help="exhibits, or all; python -m experiments.index lists them")
    add("--scale", choices=SCALES, help="default: real where its model and --data are there, else testbed")
    add("--data", metavar="FOLDER", help=f"rows of the real scale: {layout()}")
    add("--smoke", action="store_true", help="one or two examples, one model, two budgets: does it run at all?")
    add("--outputs", type=Path, help=f"default: {OUTPUTS}, or outputs/smoke with --smoke")
    add("--workers", type=int, default=1, metavar="N", help="processes that make exhibits side by side (default: 1)")
    add(
        "--set",
        action="append",
        default=[],
        dest="given",
        metavar="[SWEEP:]KEY=VALUE",
        help="an override of every sweep, or of experiment=SWEEP alone: task.data_files, task.haystack, model",
    )
    add("--record", action="store_true", help="keep verdicts for experiments/README.md; times too if outputs is new")
    return result


@tells_errors(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all were made, whether or not claims hold; 1 if one could not be made; 2 for a name there is not; 130 for an
    interrupt.
    """
    args = parser().parse_args(arguments)
    args.data = args.data or None  # --data "$DATA" of a script where it is not set
    args.scale = scale_of(args.scale, args.data)
    wanted = [full_name(name) for name in (names() if args.names == ["all"] else args.names)]
    if args.names == ["all"] and args.scale == REAL:
        wanted = _with_a_real_scale(wanted, args.data)
    _check(args, wanted)
    outputs = (args.outputs or (Path("outputs/smoke") if args.smoke else OUTPUTS)).resolve()
    setup = Setup(args.scale, outputs, args.smoke, tuple(args.given), args.data, shows=len(wanted) == 1)
    fresh = not outputs.exists() or not any(outputs.iterdir())
    try:
        failed = _made(args, wanted, setup, fresh)
    except KeyboardInterrupt as error:
        print(f"\ninterrupted: {error or KEPT}", file=sys.stderr)
        return INTERRUPTED
    if failed:
        print(f"\n{len(failed)} of {len(wanted)} could not be made: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _made(args: argparse.Namespace, wanted: Sequence[str], setup: Setup, fresh: bool) -> list[str]:
    """Make and print each exhibit; returns those that could not be made. fresh: outputs were empty before."""
    failed = []
    if len(wanted) == 1:
        print(f"{_title(wanted[0], setup)}\n{_plan(wanted[0], setup)}", flush=True)
    else:
        known = recorded(setup.scale)
        took = sum(known.get(name, {}).get("seconds") or 0 for name in wanted) if not setup.smoke else 0
        more = f": {duration(took)} of CPU time from nothing, when they were recorded" if took else ""
        print(f"{len(wanted)} exhibits{more}", flush=True)
    for name, result in results(wanted, setup, args.workers):
        if len(wanted) > 1:
            print(_title(name, setup), flush=True)
        if isinstance(result, str):
            failed.append(name)
            print(result.rstrip(), file=sys.stderr, flush=True)
            continue
        if len(wanted) == 1:
            print(_brief(result.table))
            print(f"all {len(result.table)} rows: {result.folder}/table.csv; figure.png is there too")
        smoke = "SMOKE, means nothing: " if setup.smoke else ""
        print(f"  {smoke}{VERDICT[result.holds]}: {result.words}", flush=True)
        if result.divergence is not None:
            print(f"  by divergence {VERDICT[result.divergence[0]]}: {result.divergence[1]}", flush=True)
        print(f"  {result.seconds:.0f} CPU s, {result.folder}", flush=True)
        if args.record and args.scale == REAL:
            record_real(result)
        elif args.record:
            record(result.name, args.scale, result.holds, result.words, result.seconds if fresh else None)
    return failed


def _title(name: str, setup: Setup) -> str:
    rows = dict.fromkeys(cmd.rows for cmd in setup.commands(name) if cmd.rows) if setup.scale == REAL else ()
    said = f"\nrows: {'; '.join(rows)}" if rows else ""
    return f"\n{load(name).title}\n{name} ({setup.scale}): {load(name).claim}{said}"


def _plan(name: str, setup: Setup) -> str:
    """How many runs an exhibit takes and how long, where they are kept, and how it is made with another model."""
    runs = sum(size_of(item) for item in dict.fromkeys(item.experiment for item in setup.commands(name)))
    small = ", fewer with --smoke" if setup.smoke else ""
    said = (
        f"{runs} runs{small} and their full caches; those in {setup.outputs} are not made again (Ctrl-C keeps the rest)"
    )
    left = seconds_left(name, setup)
    if left is None and (took := recorded(setup.scale).get(name, {}).get("seconds")):
        said += f"\ntime: {duration(took)} of CPU time from nothing, when it was recorded"
    elif left is not None:
        said += f"\ntime for what is missing: {f'about {duration(left)}' if left >= 60 else 'less than a minute'}"
    if setup.scale == "testbed" and sweeps(name, REAL):
        said += (
            "\nThe testbed is a synthetic language. SmolLM2-135M: DATA=FOLDER, or SCALE=real on kvexp's own articles"
        )
    return said


def _brief(table: pd.DataFrame) -> str:
    """The first rows of a table, numbers to four digits; what all rows share stands in one line above them."""
    shown = table.dropna(axis=1, how="all")
    shared = {name: shown[name].iloc[0] for name in shown if shown[name].astype(str).nunique() == 1}
    words = ", ".join(f"{name} {value}" for name, value in shared.items() if str(value))
    rows = shown.drop(columns=list(shared)).head(SHOWN)
    return f"{words}\n{rows.to_string(index=False, na_rep='', float_format='{:.4g}'.format)}"


def _with_a_real_scale(wanted: Sequence[str], data: str | None) -> list[str]:
    """The exhibits that can be made at the real scale; of each other one the reason is printed."""
    possible = []
    for name in wanted:
        why = load(name).testbed_only
        try:
            commands(name, data)
        except ConfigError as error:
            why = why or str(error)
        if why:
            print(f"{name}: left out: {why}", flush=True)
        elif sweeps(name, REAL):
            possible.append(name)
    return possible


def _check(args: argparse.Namespace, wanted: Sequence[str]) -> None:
    """Raise ConfigError for arguments that contradict each other."""
    if args.smoke and args.record:
        raise ConfigError("--record keeps numbers, and a --smoke run has none")
    if args.scale == REAL:
        for name in wanted:
            commands(name, args.data)  # a ConfigError here where DATA lacks the rows of one
    if args.record and args.scale == REAL and args.data is None:
        raise ConfigError(f"--record keeps numbers of the papers' tasks, which need DATA: {layout()}")
    if args.given and args.record and (args.scale != REAL or args.given != [f"model={SECOND}"]):
        raise ConfigError(
            "--record keeps numbers of the sweeps as they stand, and --set changes them; only --set "
            f"model={SECOND} at the real scale is kept, as a second model's"
        )
    if args.workers < 1:
        raise ConfigError(f"--workers must be 1 or more, got {args.workers}")
    known = {sweep.rpartition("/")[2] for name in wanted for sweep in sweeps(name, args.scale)}
    for word in args.given:
        key, equals, _ = word.partition("=")
        of, colon, _ = key.partition(":")
        if not equals:
            raise ConfigError(f"--set wants KEY=VALUE or SWEEP:KEY=VALUE, got {word!r}")
        if colon and of not in known:
            raise ConfigError(f"--set {word}: no sweep {of!r} here; there are {', '.join(sorted(known))}")


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
