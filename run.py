"""kvexp's command line: `python run.py --help`."""

import sys

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    from kvexp.runner.job import job  # late: --help must not wait for torch

    job(config)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted: the rows written so far are kept; the same command goes on from there", file=sys.stderr)
        sys.exit(130)
    from kvexp.runner.report import exit_code

    sys.exit(exit_code())
