"""What --where takes on every command line that reads outputs."""

import argparse
from collections.abc import Sequence
from typing import Any

from kvexp.errors import ConfigError
from kvexp.results.read import ALL_VERSIONS


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Arguments that choose the runs of a folder; `chosen_by` reads them."""
    parser.add_argument(
        *("--where", "-w"),
        nargs="+",
        action="extend",
        default=[],
        metavar="LABEL=VALUE",
        help="only these runs: method=h2o,keyformer kv_ratio=0.5 status=done",
    )
    parser.add_argument(
        "--all-versions",
        action="store_true",
        help="also runs by older code of a method of your own, and refused jobs that a later run made up for",
    )


def chosen_by(args: argparse.Namespace) -> dict[str, Any]:
    """What `kvexp.results.read.chosen` takes for the arguments of `add_choice`."""
    return where(args.where) | ({ALL_VERSIONS: True} if args.all_versions else {})


def where(pairs: Sequence[str]) -> dict[str, Any]:
    """["method=h2o,tova"] -> {"method": ["h2o", "tova"]}."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"--where takes LABEL=VALUE, got {pair!r}; name the outputs folder before --where")
        result.setdefault(name, []).extend(values.split(","))
    return result
