"""The long form: python tests/faults [--kills 30] [--seed 0] [--launcher basic] [--fresh]

Kills a sweep with SIGKILL at random moments, resumes it, and compares its files with those of an undisturbed sweep.
--fresh: every process begins anew, as on a command line; else they are forked off one that has loaded everything, so
that most moments fall into the work and not into imports.
"""

import argparse
import functools
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.kills import LAUNCHERS, Killer, Process
from faults.stage import TWO_THREADS, Stage


def main():
    command = argparse.ArgumentParser(prog="tests/faults", description=__doc__)
    command.add_argument("--kills", type=int, default=30)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--launcher", choices=LAUNCHERS, nargs="+", default=LAUNCHERS)
    command.add_argument("--fresh", action="store_true")
    asked = command.parse_args()
    with Stage() as stage:
        start = Process if asked.fresh else stage.start
        two = {"OMP_NUM_THREADS": "2"} if asked.fresh else {"before": TWO_THREADS}
        for launcher, threads in itertools.product(asked.launcher, (1, 2)):
            if launcher == "basic" and threads > 1:
                continue  # takes one run at a time, in this process
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                begin = functools.partial(start, **two) if threads > 1 else start
                killer = Killer(begin, launcher, folder, asked.seed, ordered=threads == 1)
                killer.run(asked.kills)
            seconds = time.monotonic() - begun
            told = f"{launcher}, {threads} process(es): {killer.kills} kills in {killer.sweeps} sweeps"
            print(f"{told}, nothing differs ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
