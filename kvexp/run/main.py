"""`kvexp run`: Hydra's command line over the configurations in conf/, for one run, a sweep or its plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from kvexp.run.compose import guard, stop, told, with_user_methods
from kvexp.run.jobs import interruptible
from kvexp.util import CONF, ConfigError, Session, active, current, keys_of, watch_pipes

if TYPE_CHECKING:
    from kvexp.run.plan import TimeOf

# Hydra's parser wants all overrides in one block: of `method=h2o -m kv_ratio=0.2,0.5` the last would be "unrecognized".
ANYWHERE = ("-m", "--multirun", "-r", "--run", "-h", "--help", "--resolve")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose_and_run(config: DictConfig) -> None:
    """Run the job or jobs that Hydra composes of sys.argv."""
    from kvexp.run.jobs import main_job  # late: --help must not wait for torch

    main_job(config, current())


def own_launchers() -> None:
    """Let conf/hydra/launcher count where Hydra's plugins of the same names are installed too; they know no groups."""
    Plugins.instance()  # registers them
    known = ConfigStore.instance().repo["hydra"]["launcher"]
    for file in (CONF / "hydra" / "launcher").glob("*.yaml"):
        known.pop(file.name, None)


def main(session: Session | None = None, time_of: TimeOf | None = None) -> NoReturn:
    """The whole command, from sys.argv; the exit code is 1 where a job failed.

    session: to look at afterwards; time_of: how long a group of runs takes, for --dry-run (`kvexp.run.plan.show_plan`).
    """
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ANYWHERE)  # keeps the order of all others
    watch_pipes()
    try:
        sys.argv[1:] = with_user_methods(sys.argv[1:])
    except ConfigError as error:
        stop(str(error))
    session = session or Session()
    session.typed_keys = keys_of(sys.argv[1:])
    guard()
    own_launchers()
    planning = [word for word in sys.argv[1:] if word.partition("=")[0] == "--dry-run"]
    with active(session), interruptible(), told(sys.argv[1:]):
        if planning:
            from kvexp.run.plan import dry_run

            sys.exit(dry_run(compose_and_run, planning[-1], session, time_of))
        compose_and_run()
    sys.exit(session.exit_code)
