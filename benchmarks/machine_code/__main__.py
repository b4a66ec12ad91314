"""Compile the kernels for sm_80, sm_90 and sm_100 without a GPU, and hold their machine code against bars.

    make gpu-compile                      # the default set, compared with table.csv
    make gpu-compile ARGS=--write         # writes that table
    make gpu-compile ARGS=--all           # every specialisation, bars alone (about an hour)

Ends with 1 where a bar is broken or the table says something else.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.machine_code.cases import ALL, DEFAULT, Case
from benchmarks.machine_code.compiler import check_installed, compile_all
from benchmarks.machine_code.launches import Specialisation, specialisations
from benchmarks.machine_code.sass import DEVICES, Line, broken, differences, table
from kvexp.util import ConfigError, watch_pipes

TABLE = Path(__file__).with_name("table.csv")


def calls_of(cases: tuple[Case, ...]) -> dict[Specialisation, list[str]]:
    """Every specialisation that these cases launch, with the cases it serves; kernel by kernel."""
    calls: dict[Specialisation, list[str]] = {}
    for case in cases:
        for spec in specialisations(case):
            calls.setdefault(spec, []).append(str(case))
    kernels = list(dict.fromkeys(spec.kernel for spec in calls))
    return {spec: calls[spec] for spec in sorted(calls, key=lambda spec: kernels.index(spec.kernel))}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_code", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every specialisation, not the default set")
    parser.add_argument("--write", action="store_true", help="write the table in benchmarks/machine_code/table.csv")
    parser.add_argument("--only", default="", help="calls and kernels that contain this text; no table")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.write and (options.all or options.only):
        parser.error("--write writes the table of the default set: without --all and --only")
    try:
        triton = check_installed()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    start = time.perf_counter()
    calls = calls_of(ALL if options.all else DEFAULT)
    calls = {spec: of for spec, of in calls.items() if options.only in f"{spec.kernel} {of[0]}"}
    tasks = [(spec, capability) for spec in calls for capability in DEVICES]
    codes = dict(zip(tasks, compile_all(tasks, options.workers), strict=True))
    lines = [Line(spec, tuple(of), {sm: codes[spec, sm] for sm in DEVICES}) for spec, of in calls.items()]
    made, wrong = table(lines, triton), 0
    for line in lines:
        for capability, code in line.codes.items():
            for why in broken(line.spec, code, capability):
                print(f"sm_{capability} {line.spec.kernel} {line.calls[0]}: {why}")
                wrong += 1
    if options.only:
        print(made)
    elif options.write:
        TABLE.write_text(made, encoding="utf-8")
    elif not options.all:
        changed = differences(TABLE.read_text(encoding="utf-8"), made)
        wrong += len(changed)
        print("\n".join(["table.csv says something else: make gpu-compile ARGS=--write", *changed] if changed else []))
    seconds = time.perf_counter() - start
    print(f"{len(tasks)} machine codes of {len(calls)} specialisations in {seconds:.0f} s; {wrong or 'nothing'} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
