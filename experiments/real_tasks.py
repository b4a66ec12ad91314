"""Every task of kvexp on the real model: nine methods (lm-eval: six) at three budgets, experiment=real/tasks_NAME.

python -m experiments.real_tasks --data FOLDER                   all of them, resuming what exists
python -m experiments.real_tasks --data FOLDER xsum news_qa      these
python -m experiments.real_tasks --data FOLDER --full-only       the full cache alone: which tasks can it do at all?

Of every task the full cache is run first. Where it is not above what an answer that read nothing gets
(experiments/lib/floors.py), the task is void: no method is run on it, unless --void asks for that.

The rows of a folder are found by experiments/real_data.yaml; without --data kvexp's own articles stand for them.
Tables are printed as `kvexp results OUTPUTS/NAME` prints them; docs/real_model.md says what was seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.lib.exhibits import REAL, declared
from experiments.lib.floors import floors_of
from experiments.lib.real_scale import commands_of, scale_of
from experiments.lib.sweep import late, sweep
from kvexp.results.read import folders
from kvexp.results.table import print_table, table
from kvexp.util.errors import ConfigError
from kvexp.util.output import tells_errors, watch_pipes

PREFIX = "tasks_"
FULL = ["method=full", "kv_ratio=1.0"]


def task_names() -> list[str]:
    """Short names of the sweeps, in alphabetical order."""
    prefix = f"{REAL}/{PREFIX}"
    return [name.removeprefix(prefix) for name in declared() if name.startswith(prefix)]


def run_task(
    name: str, data: str | None, outputs: Path, more: Sequence[str] = (), *, methods: bool = True, void: bool = False
) -> Path:
    """Run what is missing of one sweep, in a folder of its own, which is returned. ConfigError where a job failed.

    methods: not the full cache alone; void: methods also where the full cache is at its floor.
    """
    folder = outputs / name
    for command in commands_of(f"{REAL}/{PREFIX}{name}", data):
        print(f"{name}: {command.rows}", flush=True)
        words = [f"outputs_dir={folder}", *more, *map(late, command.overrides)]
        hashes = sweep(command.experiment, [*FULL, *words])
        floors_by_name = [item for run in folders(folder) if run.run.hash in hashes for item in floors_of(run).items()]
        for benchmark, floors in floors_by_name:
            print(f"{' '.join(filter(None, [name, benchmark]))}: {floors}", flush=True)
        if methods and (void or not floors_by_name or not all(floors.void for _, floors in floors_by_name)):
            sweep(command.experiment, words)
    return folder


@tells_errors(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all were run, 1 if one failed (the others are run), 2 for a name or a folder there is not."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.real_tasks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(task_names())}")
    parser.add_argument("--data", metavar="FOLDER", help="rows, laid out as experiments/real_data.yaml says, or hub")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/real_tasks"), help="default: outputs/real_tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N examples instead of the file's number")
    parser.add_argument("--full-only", action="store_true", help="no method: is the full cache above the floor?")
    parser.add_argument("--void", action="store_true", help="run methods also where the full cache is at its floor")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in task_names()]:
        raise ConfigError(f"no such sweep: {', '.join(unknown)}; there are {', '.join(task_names())}")
    scale_of(REAL, args.data)
    more = [f"limit={args.limit}"] if args.limit is not None else []
    failed = []
    for name in args.names or task_names():
        try:
            where = args.outputs.resolve()
            print_table(table(run_task(name, args.data, where, more, methods=not args.full_only, void=args.void)))
        except ConfigError as error:
            failed.append(name)
            print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
