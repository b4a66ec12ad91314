"""kvexp's command line: `python run.py --help`."""

import sys
from pathlib import Path

from kvexp.runner.interrupt import interruptible, watch

if __name__ == "__main__":
    watch()  # first: the imports take their time too

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from kvexp.pipes import watch_pipes
from kvexp.runner.guard import guard
from kvexp.runner.mistakes import told


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    from kvexp.runner.job import job  # late: --help must not wait for torch

    job(config)


def own_launchers() -> None:
    """Let conf/hydra/launcher count where Hydra's plugins of the same names are installed too; they know no groups."""
    Plugins.instance()  # registers them
    known = ConfigStore.instance().repo["hydra"]["launcher"]
    for file in (Path(__file__).parent / "conf" / "hydra" / "launcher").glob("*.yaml"):
        known.pop(file.name, None)


# Hydra's parser wants all overrides in one block: of `method=h2o -m kv_ratio=0.2,0.5` the last would be "unrecognized".
ANYWHERE = ("-m", "--multirun", "-r", "--run", "-h", "--help", "--resolve")

if __name__ == "__main__":
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ANYWHERE)  # keeps the order of all others
    watch_pipes()
    guard(sys.argv[1:])
    own_launchers()
    planning = [word for word in sys.argv[1:] if word.partition("=")[0] == "--dry-run"]
    with interruptible(), told(sys.argv[1:]):
        if planning:
            from kvexp.runner.dry_run import dry_run

            sys.exit(dry_run(main, planning[-1]))
        main()
    from kvexp.runner.report import exit_code

    sys.exit(exit_code())
