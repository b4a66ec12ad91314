"""Make exhibits again: run what is missing, write the table and the figure, say whether the claim holds.

python -m experiments.reproduce keyformer_fig7
python -m experiments.reproduce all --smoke                 every exhibit with two examples, under outputs/smoke
python -m experiments.reproduce fig7 --scale paper          the paper's models and data, from the hub
python -m experiments.reproduce fig7 --scale paper --set keyformer_fig7:task.data_files=cnn.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.lib.exhibits import SCALES, full_name, load, names, sweeps
from experiments.lib.pages import VERDICT, record
from experiments.lib.runner import Asked, markdown, results
from experiments.lib.titles import exhibit_title
from kvexp.errors import ConfigError
from kvexp.pipes import watch_pipes


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m experiments.reproduce", description=__doc__.splitlines()[0])
    add = result.add_argument
    add("names", nargs="+", metavar="NAME", help="exhibits, or all; python -m experiments.index lists them")
    add("--scale", choices=SCALES, default=SCALES[0])
    add("--smoke", action="store_true", help="two examples, one model, two budgets: does it run at all?")
    add("--outputs", type=Path, help="default: outputs, or outputs/smoke with --smoke")
    add("--workers", type=int, default=1, metavar="N", help="processes that make exhibits side by side (default: 1)")
    add(
        "--set",
        action="append",
        default=[],
        dest="given",
        metavar="[SWEEP:]KEY=VALUE",
        help="an override of every sweep, or of conf/experiment/SWEEP alone: task.data_files, task.haystack, model",
    )
    add("--record", action="store_true", help="keep verdicts for experiments/README.md; times too if outputs is new")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all were made, whether or not claims hold; 1 if one could not be made; 2 for a name there is not."""
    args = parser().parse_args(arguments)
    try:
        wanted = [full_name(name) for name in (names() if args.names == ["all"] else args.names)]
        _check(args, wanted)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outputs, failed = (args.outputs or Path("outputs/smoke" if args.smoke else "outputs")).resolve(), []
    fresh = not outputs.exists() or not any(outputs.iterdir())
    asked = Asked(args.scale, outputs, args.smoke, tuple(args.given))
    if len(wanted) == 1:
        print(_title(wanted[0], args.scale), flush=True)
    for name, made in results(wanted, asked, args.workers):
        if len(wanted) > 1:
            print(_title(name, args.scale), flush=True)
        if isinstance(made, str):
            failed.append(name)
            print(made.rstrip(), file=sys.stderr, flush=True)
            continue
        if len(wanted) == 1:
            print(markdown(made.table))
        print(f"  {VERDICT[made.holds]}: {made.words}\n  {made.seconds:.0f} CPU s, {made.folder}", flush=True)
        if args.record:
            record(made.name, args.scale, made.holds, made.words, made.seconds if fresh else None)
    if failed:
        print(f"\n{len(failed)} of {len(wanted)} could not be made: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _title(name: str, scale: str) -> str:
    return f"\n{exhibit_title(name)}\n{name} ({scale}): {load(name).claim}"


def _check(args: argparse.Namespace, wanted: Sequence[str]) -> None:
    """What was asked for in words that do not go together."""
    if args.smoke and args.record:
        raise ConfigError("--record keeps numbers, and a --smoke run has none")
    if args.given and args.record:
        raise ConfigError("--record keeps numbers of the sweeps as they stand, and --set changes them")
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
