"""kvexp trace RUN EXAMPLE: what a method scored, kept and dropped of one example, for engines to follow."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.errors import CacheError, ConfigError
from kvexp.terminal import say
from kvexp.trace.trace_check import PROFILES


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if the request cannot work."""
    args = parser().parse_args(argv)
    try:
        say(made(args))
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def made(args: argparse.Namespace) -> str:
    """Write the trace that was asked for; returns what was written in words."""
    from kvexp.diagnose.folders import chosen, rows_of, run_at
    from kvexp.diagnose.refusals import check
    from kvexp.diagnose.runs import cases, settings_at
    from kvexp.trace.profiles import profiled
    from kvexp.trace.trace_check import check_rules
    from kvexp.trace.trace_writer import trace_of, write_trace

    if args.new_tokens < 1:
        raise ConfigError(f"--new-tokens must be at least 1, got {args.new_tokens}")
    if args.out.suffix != ".npz":
        raise ConfigError(f"--out must end in .npz, got {args.out}")
    run = run_at(args.run)
    row = chosen(rows_of(run), args.example)
    settings = settings_at(run)
    check(settings)
    profiled(settings.cache, args.profile)
    ((_, case, _),) = cases(settings, [row])
    known = {"name": settings.labels["model"], "family": case.model.config.model_type}
    model = settings.model.identity() | known
    trace = trace_of(case, args.profile, args.new_tokens, model)
    if found := check_rules(trace):
        raise CacheError(f"the trace does not follow its own rules, which is a bug of kvexp: {found[0]}")
    write_trace(trace, args.out)
    header = trace["header"]
    size = args.out.stat().st_size / 1024
    return (
        f"wrote {args.out} ({size:.0f} KiB): {header['method']['name']}, profile {args.profile}, {header['layers']} "
        f"layers, {header['heads']} kv heads, {header['prompt_tokens']} prompt tokens, {header['steps']} steps"
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp trace", description=__doc__)
    add = result.add_argument
    add("run", metavar="RUN", help="a run: its folder outputs/HASH, or outputs@LABEL=VALUE,... where that is one run")
    add("example", metavar="EXAMPLE", help="id of an example, its beginning, or its index")
    add("--profile", choices=PROFILES, default="per_head", help="how memory lets tokens be dropped (default: per_head)")
    add("--new-tokens", type=int, default=32, metavar="N", help="steps: of the full cache's answer (default: 32)")
    add("--out", type=Path, default=Path("trace.npz"), metavar="FILE", help="default: trace.npz")
    return result
