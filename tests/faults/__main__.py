"""The long form: python tests/faults [--kills 30] [--seed 0]

Kills a sweep with SIGKILL at random moments, resumes it, and compares its files with those of an undisturbed sweep.
"""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.kills import Killer
from faults.stage import TWO_THREADS, Stage


def main():
    command = argparse.ArgumentParser(prog="tests/faults", description=__doc__)
    command.add_argument("--kills", type=int, default=30)
    command.add_argument("--seed", type=int, default=0)
    asked = command.parse_args()
    with Stage() as stage:
        two = functools.partial(stage.start, before=TWO_THREADS)
        for launcher, start in (("basic", stage.start), ("shared_prefill", stage.start), ("shared_prefill", two)):
            with tempfile.TemporaryDirectory() as folder:
                killer = Killer(start, launcher, folder, asked.seed, ordered=start is not two)
                killer.run(asked.kills)
            threads = 2 if start is two else 1
            print(f"{launcher}, {threads} process(es): {killer.kills} kills in {killer.sweeps} sweeps, nothing differs")


if __name__ == "__main__":
    main()
