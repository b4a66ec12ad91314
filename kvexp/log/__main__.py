"""kvexp log outputs/: publish whatever has been run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import kvexp.log
from kvexp.errors import ConfigError
from kvexp.log import check, publish
from kvexp.log.mode import PROJECT
from kvexp.results.read import chosen, folders, unmatched
from kvexp.results.where import add_choice, chosen_by
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvexp log", description=kvexp.log.__doc__)
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    parser.add_argument("--project", default=PROJECT, help=f"wandb project (default: {PROJECT})")
    add_choice(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--online", action="store_const", dest="mode", const="online", help="even if no account is found")
    how.add_argument("--offline", action="store_const", dest="mode", const="offline", help="even if one is found")
    args = parser.parse_args(argv)
    try:
        if not Path(args.outputs).is_dir():
            raise ConfigError(f"no folder {args.outputs}; name the outputs_dir of your runs, or run: kvexp run")
        paths = [folder.run.path for folder in chosen(folders(args.outputs), chosen_by(args)) if not folder.refused]
        if not paths:
            say(unmatched(args.outputs, chosen_by(args)))
            return 1
        mode = check(args.project, args.mode)
        written = publish(paths, args.project, mode)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    say(f"published {len(paths)} runs to project {args.project}, {mode}")
    if mode == "offline" and written:
        say(f"upload them with: wandb sync {written[0].parent}/offline-run-*")
    return 0
