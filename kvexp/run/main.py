"""`kvexp run`: Hydra's command line over the configurations in conf/, for one run, a sweep or its plan."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from shutil import get_terminal_size
from typing import Any, NoReturn

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig

from kvexp.run.compose import (
    check_groups,
    hydra_errors_shown,
    listed,
    mistaken_option,
    stop,
    with_places,
    with_user_classes,
)
from kvexp.run.guard import CheckedLoader, guard
from kvexp.run.jobs import interruptible
from kvexp.run.session import Session, active, keys_of
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF
from kvexp.util.output import watch_pipes


def compose_and_run(session: Session) -> None:
    """Run the job or jobs that Hydra composes of sys.argv, or show what was asked for (--help, --cfg, --info).

    Hydra's own main, but for the loader that checks what is composed (`kvexp.run.guard`).
    """
    parser = get_args_parser()
    args, unknown = parser.parse_known_intermixed_args()
    if unknown:
        raise ConfigError(mistaken_option(unknown[0], parser._option_string_actions))
    if args.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun unpickles {args.experimental_rerun}, which can run code; type the command again "
            "instead"
        )
    guard()
    version.setbase("1.3")
    name, words = args.config_name or "config", args.overrides

    def run_job(config: DictConfig) -> None:
        from kvexp.run.jobs import main_job  # late: --help must not wait for torch

        main_job(config, session)

    hydra = Hydra.create_main_hydra2("kvexp", path := _search_path(args.config_path, args.config_dir))
    hydra.config_loader = CheckedLoader(path, session)
    try:
        if args.help:
            hydra.format_config_groups = lambda *_: _option_lists(hydra)  # type: ignore[method-assign]
            hydra.app_help(config_name=name, args_parser=parser, args=args)
        elif args.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=parser, args=args)
        elif args.cfg:
            hydra.show_cfg(name, words, cfg_type=args.cfg, package=args.package, resolve=args.resolve)
        elif args.shell_completion:
            hydra.shell_completion(config_name=name, overrides=words)
        elif args.info:
            hydra.show_info(args.info, config_name=name, overrides=words)
        else:
            sweep = args.multirun or (_may_sweep(args) and hydra.get_mode(name, words) == RunMode.MULTIRUN)
            mode, perform = ("MULTIRUN", hydra.multirun) if sweep else ("RUN", hydra.run)
            perform(config_name=name, task_function=run_job, overrides=[*words, f"hydra.mode={mode}"])
    finally:
        GlobalHydra.instance().clear()


def _option_lists(hydra: Hydra) -> str:
    """The options of every group in lines of the terminal's width; of `experiment` those that no paper's figure has."""
    papers, lines = {name for name in listed("experiment") if "/" not in name}, []
    for group in hydra.list_all_config_groups():
        if group.partition("/")[0] == "hydra" or group.startswith("experiment/"):
            continue
        names = sorted(hydra.config_loader.get_group_options(group))
        if group == "experiment":
            names = [name for name in names if name not in papers]
            names.append(f"and {len(papers)} of papers' figures and tables: kvexp run experiment= lists their names")
        words = f"{group}: {', '.join(names)}"
        lines.append(textwrap.fill(words, get_terminal_size((100, 24)).columns - 1, subsequent_indent="  "))
    return "\n".join(lines)


def _may_sweep(args: argparse.Namespace) -> bool:
    """Whether a sweep may be asked for without -m: to know it, all is composed once more.

    Of kvexp's own configurations experiments alone ask for one.
    """
    asking = keys_of(args.overrides) & {"experiment", "hydra.mode", "hydra.searchpath"}
    return bool(asking or args.config_name or args.config_path or args.config_dir)


def _search_path(config_path: str | None, config_dir: str | None) -> Any:
    """Folders in which Hydra finds configurations: conf/, or config_path in place of it, then config_dir."""
    main = config_path or str(CONF)
    path = create_config_search_path(main if "://" in main else f"file://{os.path.abspath(main)}")
    if config_dir is not None:
        if not os.path.isdir(config_dir):
            raise ConfigError(f"--config-dir: there is no folder {config_dir}")
        folder = f"file://{os.path.abspath(config_dir)}"
        path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    return path


def own_launchers() -> None:
    """Let conf/hydra/launcher count where Hydra's plugins of the same names are installed too; they know no groups."""
    Plugins.instance()  # registers them
    known = ConfigStore.instance().repo["hydra"]["launcher"]
    for file in (CONF / "hydra" / "launcher").glob("*.yaml"):
        known.pop(file.name, None)


def main(session: Session | None = None) -> NoReturn:
    """The whole command, from sys.argv; the exit code is 1 where a job failed.

    session: to look at afterwards.
    """
    watch_pipes()
    session = session or Session()
    try:
        check_groups(sys.argv[1:])
        sys.argv[1:] = with_places(with_user_classes(sys.argv[1:]))
        session.typed_keys = keys_of(sys.argv[1:])
        own_launchers()
        planning = [word for word in sys.argv[1:] if word.partition("=")[0] == "--dry-run"]
        with active(session), interruptible(session), hydra_errors_shown(sys.argv[1:]):
            if planning:
                from kvexp.run.plan import dry_run

                sys.exit(dry_run(compose_and_run, planning[-1], session))
            compose_and_run(session)
    except ConfigError as error:
        stop(str(error))
    sys.exit(session.exit_code)
