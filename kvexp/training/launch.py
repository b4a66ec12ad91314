"""Several trainings at a time, each in a process of its own, with a bar for each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Said = tuple[str, str | None]  # a training and a line of it; None: it has no more to say


def several(commands: Mapping[str, list[str]], workers: int) -> list[str]:
    """Run the commands, `workers` at a time and one core each; returns what went wrong, a line per training.

    A line "12/200 words" of a command moves its bar, other lines are printed; where the output is no terminal there
    are no bars and all lines are printed. An interrupt stops the commands before it passes.
    """
    shown = sys.stdout.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    state = TextColumn("{task.fields[state]}", markup=False)
    waiting, running, failed = list(commands), dict[str, subprocess.Popen[str]](), list[str]()
    said: SimpleQueue[Said] = SimpleQueue()
    # A line comes about every two minutes: with rich's own 30 seconds there would never be two of them to tell a speed.
    with Progress(*columns, state, disable=not shown, speed_estimate_period=3600) as bars:
        bar = {name: bars.add_task(name, total=None, state="waiting") for name in commands}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    name = waiting.pop(0)
                    running[name] = _start(name, commands[name], said)
                    bars.update(bar[name], state="starting")
                name, line = said.get()
                if line is not None:
                    _tell(bars, bar[name], name, line, shown)
                elif code := running.pop(name).wait():
                    failed.append(f"{name} {_ending(code)}; what it said stands above")
                    bars.update(bar[name], state=_ending(code))
        finally:
            for child in running.values():
                child.terminate()
            for child in running.values():
                child.wait()
    return failed


def _start(name: str, command: list[str], said: SimpleQueue[Said]) -> subprocess.Popen[str]:
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # A line of text may hold what is no character: a progress bar must not die of it.
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=one_core
    )

    def listen() -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                said.put((name, line.rstrip("\n")))
        said.put((name, None))

    Thread(target=listen, daemon=True).start()
    return child


def _tell(bars: Progress, bar: TaskID, name: str, line: str, shown: bool) -> None:
    count, _, state = line.partition(" ")
    step, _, total = count.partition("/")
    counted = step.isdigit() and total.isdigit()
    if counted:
        bars.update(bar, completed=int(step), total=int(total), state=state)
    if not (counted and shown):
        bars.console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
