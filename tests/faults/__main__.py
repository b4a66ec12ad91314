"""The long form: python tests/faults [--kills 30] [--seed 0] [--launcher basic] [--fresh]

Kills a sweep with SIGKILL at random moments, resumes it, and compares its files with those of an undisturbed sweep.
--fresh: every process begins anew, as on a command line; else they are forked off one that has loaded everything, so
that most moments fall into the work and not into imports.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.kills import LAUNCHERS, Killer, Process
from faults.stage import Stage


def main():
    command = argparse.ArgumentParser(prog="tests/faults", description=__doc__)
    command.add_argument("--kills", type=int, default=30)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--launcher", choices=LAUNCHERS, nargs="+", default=LAUNCHERS)
    command.add_argument("--fresh", action="store_true")
    asked = command.parse_args()
    with Stage() as stage:
        for launcher in asked.launcher:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                start = Process if asked.fresh else stage.start
                killer = Killer(start, launcher, folder, asked.seed)
                killer.run(asked.kills)
            seconds = time.monotonic() - begun
            print(f"{launcher}: {killer.kills} kills in {killer.sweeps} sweeps, nothing differs ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
