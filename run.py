"""kvexp's command line: `python run.py --help`."""

import sys

from kvexp.runner.interrupt import interruptible, watch

if __name__ == "__main__":
    watch()  # first: the imports take their time too

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    from kvexp.runner.job import job  # late: --help must not wait for torch

    job(config)


# Hydra's parser wants all overrides in one block: of `method=h2o -m kv_ratio=0.2,0.5` the last would be "unrecognized".
ANYWHERE = ("-m", "--multirun", "-r", "--run", "-h", "--help", "--resolve")

if __name__ == "__main__":
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ANYWHERE)  # keeps the order of all others
    with interruptible():
        main()
    from kvexp.runner.report import exit_code

    sys.exit(exit_code())
