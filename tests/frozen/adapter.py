"""The only lines of the frozen recording that name modules of kvexp; they move with the house."""

import sys


def whole_batches():
    """Let nothing part a batch: how many rows small linear layers get at once moves the last digits of KL."""
    import kvexp.run.batches as batches

    batches.MAX_UNWRITTEN_ROWS = None


def collect_identities(write):
    """Command lines of this process compose only: `write` gets the hash of each job in place of its run."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    import kvexp.run.jobs as jobs
    from kvexp.run.jobs import HydraJob, settings_of_job
    from kvexp.run.store import run_hash

    def main_job(config, session):
        hydra = HydraConfig.get()
        session.begun = True
        overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        try:
            parts = settings_of_job(HydraJob(config, overrides, dict(hydra.runtime.choices), None), session).parts()
            write(" ".join(f"{run_hash(one.identity)}:{one.labels['method']}" for one in parts))
        except Exception as error:
            write(type(error).__name__)

    jobs.main_job = main_job


def run_py():
    """`run.py`, from sys.argv."""
    import runpy

    whole_batches()
    runpy.run_path("run.py", run_name="__main__")


def command():
    """`kvexp`, from sys.argv."""
    if sys.argv[1] == "train-surrogate":
        from kvexp.run.calibrate import calibrate_main as main

        sys.exit(main(["kvzap", *sys.argv[2:]]))
    from kvexp.cli import main

    main()


def options(group):
    """The names of a group's options."""
    from kvexp.run.compose import options as known

    return known(group)
