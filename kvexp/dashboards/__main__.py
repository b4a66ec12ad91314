"""kvexp dashboards outputs/: make the saved view and the report in Weights & Biases."""

import argparse
import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import kvexp.dashboards
from kvexp.dashboards.spec import spec
from kvexp.dashboards.wandb_objects import report, workspace
from kvexp.errors import ConfigError
from kvexp.log import check
from kvexp.log.mode import PROJECT, has_account
from kvexp.results import table
from kvexp.results.divergence_print import divergence_frames
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 with one line that says why not."""
    parser = argparse.ArgumentParser(prog="kvexp dashboards", description=kvexp.dashboards.__doc__)
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    parser.add_argument("--project", default=PROJECT, help=f"wandb project (default: {PROJECT})")
    parser.add_argument("--entity", help="user or team (default: WANDB_ENTITY, else the account's own)")
    parser.add_argument("--print", action="store_true", help="print the spec as JSON; needs no account and no network")
    args = parser.parse_args(argv)
    try:
        frame = table(args.outputs)
        if frame.empty:
            raise ConfigError(f"no run under {args.outputs}; run: kvexp run")
        described = spec(frame, divergence_frames(args.outputs, {})[0])
        if args.print:
            say(json.dumps(described, indent=2))
            return 0
        for url in save(described, args.entity, args.project):
            say(url)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def save(described: dict[str, Any], entity: str | None, project: str) -> list[str]:
    """Addresses of the saved view and of the report; ConfigError where wandb is missing, unreachable or says no."""
    check(project, "online")
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError("dashboards need wandb-workspaces, which is not installed; run: pip install 'kvexp[eval]'")
    if not has_account():
        raise ConfigError("no wandb account is configured: run `wandb login` or set WANDB_API_KEY; --print needs none")
    check_reachable(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    import wandb

    try:
        entity = entity or os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        if not entity:
            raise ConfigError("the wandb account names no entity of its own; name a user or team with --entity")
        made = [build(described, entity, project) for build in (workspace, report)]
        for each in made:
            each.save()
        return [str(each.url) for each in made]
    except ConfigError:
        raise
    except (wandb.Error, OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"wandb did not take the dashboards ({type(error).__name__}: {first}); are the runs there "
            f"(kvexp log {'' if project == PROJECT else f'--project {project} '}--online) and the network up?"
        ) from error


def check_reachable(address: str, seconds: float = 10.0) -> None:
    """ConfigError where the server gives no answer at all: wandb itself would try again for many minutes."""
    try:
        urllib.request.urlopen(address, timeout=seconds).close()
    except urllib.error.HTTPError:
        return  # an answer, if not to this question
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no answer from {address} ({error}): dashboards need the network; --print does not"
        ) from error
