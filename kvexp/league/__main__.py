"""kvexp league check|page|tolerance: measure entries again, show them, or measure how far machines differ."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvexp import NUMERICS
from kvexp.config.typed_methods import with_user_methods
from kvexp.errors import CacheError, ConfigError
from kvexp.league.entry_file import NUMBERS, Entry, entries_in, read_entry
from kvexp.league.league_page import html_page, markdown
from kvexp.terminal import say

BEGIN, END = "<!-- league: made by kvexp league page -->", "<!-- end of league -->"
SAFETY = 4.0  # the tolerance is so many times the largest difference that was measured
# Environments of one machine whose sums differ: threads, and the instruction sets that torch and oneDNN may use.
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
    {
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    {
        "OMP_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
)
OF_ENVIRONMENT = ("environment", "torch", "instructions", "threads")
# What torch takes itself to have in such an environment, a line each: it may not know a name, or the CPU lack it.
SAYS = r"""import torch
print(torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), sep="\n")"""


def main(argv: Sequence[str] | None = None) -> int:
    """0, 1 where an entry was refused, 2 if the request cannot work."""
    args = parser().parse_args(argv)
    try:
        result: int = args.command(args)
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}", file=sys.stderr)
        return 2
    return result


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp league", description=__doc__)
    commands = result.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="measure five random rows of every entry again")
    check.set_defaults(command=_check)
    check.add_argument("entries", nargs="*", type=Path, metavar="ENTRY", help="files (default: all of --league)")
    check.add_argument("--rows", type=int, default=5, metavar="N", help="of every entry (default: 5)")
    check.add_argument("--seed", type=int, default=0, metavar="N", help="other rows for other numbers (default: 0)")
    check.add_argument("--sample", type=int, metavar="N", help="only so many entries, which the seed draws")
    check.add_argument("--outputs", action="store_true", help="also generate, and say whether the answers are the same")
    check.add_argument("--method-file", metavar="FILE", help="the code of an entry's method, which is run")
    check.add_argument("--built-in", action="store_true", help="pass over entries whose method is a user's code")
    check.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    page = commands.add_parser("page", help="the table of all entries")
    page.set_defaults(command=_page)
    page.add_argument("--out", type=Path, default=Path("build/league/index.html"), metavar="FILE")
    page.add_argument("--markdown", type=Path, metavar="FILE", help="also put the tables into this page")
    tolerance = commands.add_parser("tolerance", help="measure rows under several threads and instruction sets")
    tolerance.set_defaults(command=_tolerance)
    tolerance.add_argument("entries", nargs="*", type=Path, metavar="ENTRY", help="files (default: all of --league)")
    tolerance.add_argument("--rows", type=int, default=5, metavar="N", help="of every entry (default: 5)")
    tolerance.add_argument("--python", nargs="*", default=[], metavar="PYTHON", help="of environments with other torch")
    for each in (check, page, tolerance):
        each.add_argument("--league", type=Path, default=Path("league"), metavar="FOLDER", help="default: league")
    return result


def _chosen(args: argparse.Namespace) -> list[tuple[Path, Entry]]:
    """The entries that were named, or all; of them those that --sample draws."""
    found = [(file, read_entry(file)) for file in args.entries] if args.entries else list(entries_in(args.league))
    if getattr(args, "sample", None) is not None:
        import random

        found = random.Random(args.seed).sample(found, min(args.sample, len(found)))
    return sorted(found, key=lambda each: (each[1]["model"], str(each[0])))  # a model is loaded once


def _check(args: argparse.Namespace) -> int:
    from kvexp.league.recheck import check_entry, drawn_rows, entry_settings, tolerance_of

    if args.rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {args.rows}")
    tolerance = tolerance_of(args.league)
    code = with_user_methods([f"+method_file={args.method_file}"]) if args.method_file else []
    refused, told = 0, []
    for file, entry in _chosen(args):
        if entry.get("code") and args.built_in:
            say(f"{file.name}: passed over, its method is a user's code")
            continue
        if entry["numerics"] != NUMERICS:
            commit = (entry.get("environment") or {}).get("commit")
            made = f"made under NUMERICS {entry['numerics']}: kvexp of commit {commit} measures it again"
            say(f"{file.name}: stale, {made}")
            continue
        try:
            settings = entry_settings(entry, code)
            rows = list(check_entry(entry, drawn_rows(entry, args.rows, args.seed), tolerance, settings, args.outputs))
        except (ConfigError, CacheError) as error:
            refused += 1
            say(f"{file.name}: REFUSED: {error}")
            continue
        wrong = [row for row in rows if row.why]
        refused += bool(wrong)
        far = ", ".join(f"{name} {max(row.distance(name) for row in rows):.1e}" for name in NUMBERS)
        answers = [row.same_output for row in rows if row.same_output is not None]
        also = f"; {sum(answers)} of {len(answers)} answers the same" if answers else ""
        say(f"{file.name}: {'REFUSED' if wrong else 'ok'}, {len(rows)} rows, largest differences: {far}{also}")
        for row in wrong:
            say(f"  {row.example}: {row.why}")
        told += [{"hash": entry["hash"], "example": row.example, **row.found} for row in rows]
    if args.json is not None:
        args.json.write_text(json.dumps(told), encoding="utf-8")
    return 1 if refused else 0


def _page(args: argparse.Namespace) -> int:
    entries = [entry for _, entry in entries_in(args.league)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(html_page(entries), encoding="utf-8")
    say(f"wrote {args.out}: {len(entries)} entries")
    if args.markdown is not None:
        text = args.markdown.read_text("utf-8")
        before, found, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        if not found or END not in rest:
            raise ConfigError(f"{args.markdown} must have the lines {BEGIN} and {END}, between which the tables go")
        args.markdown.write_text(f"{before}{BEGIN}\n\n{markdown(entries)}\n{END}{after}", encoding="utf-8")
        say(f"wrote {args.markdown}")
    return 0


def _tolerance(args: argparse.Namespace) -> int:
    """Check the same rows in processes of other environments; the largest difference times SAFETY is the tolerance."""
    files = [str(file) for file, _ in _chosen(args)]
    pythons = [sys.executable, *args.python]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for python in pythons:
            for number, environment in enumerate(ENVIRONMENTS):
                out = Path(folder) / f"{len(found)}.json"
                words = [python, "-m", "kvexp.league", "check", *files, "--rows", str(args.rows), "--json", str(out)]
                done = subprocess.run(
                    [*words, "--league", str(args.league)], env=os.environ | environment, capture_output=True, text=True
                )
                if done.returncode == 2 or not out.is_file():
                    raise ConfigError(f"environment {number} measured nothing: {done.stderr.strip()[-400:]}")
                said = subprocess.run(
                    [python, "-c", SAYS], env=os.environ | environment, capture_output=True, text=True, check=True
                )
                version, instructions, threads = said.stdout.split("\n")[:3]
                made = {"torch": version, "instructions": instructions, "threads": int(threads)}
                found.append({"environment": environment, **made, "rows": json.loads(out.read_text("utf-8"))})
                say(f"torch {version}, {instructions}, threads {threads}: measured")
    content = tolerance_file(found)
    file = args.league / "tolerance.json"
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    say(f"wrote {file}: " + ", ".join(f"{name} {value:.2e}" for name, value in content["tolerance"].items()))
    return 0


def tolerance_file(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What league/tolerance.json holds: per environment the largest difference to the first, and the tolerance."""
    first = {(row["hash"], row["example"]): row for row in found[0]["rows"]}
    each = []
    for other in found:
        largest = {
            name: max((abs(row[name] - first[row["hash"], row["example"]][name]) for row in other["rows"]), default=0.0)
            for name in NUMBERS
        }
        each.append({key: other[key] for key in OF_ENVIRONMENT} | {"largest": largest})
    least = 1e-5  # what seven digits in an entry leave open
    tolerance = {name: max(least, SAFETY * max(one["largest"][name] for one in each)) for name in NUMBERS}
    return {"tolerance": tolerance, "safety": SAFETY, "rows": len(first), "measured": each}
