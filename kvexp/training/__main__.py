"""`python -m kvexp.training`: train the testbed's models from scratch. A killed training goes on where it was."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvexp.training.families import NAMES
from kvexp.training.recipes import RECIPES

MODELS = Path(__file__).resolve().parents[1] / "testbed" / "models"


def main() -> int:
    """Number of models that failed."""
    parser = argparse.ArgumentParser(prog="python -m kvexp.training", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, default=MODELS, help="where the model folders go (default: kvexp's own)")
    parser.add_argument("--work", type=Path, default=Path("outputs/.training"), help="checkpoints while training")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="models at a time, one core each")
    parser.add_argument("--steps", type=int, help="another number of steps than the recipe's, to try something out")
    asked = parser.parse_args()
    for name in asked.models:
        if name not in NAMES:
            parser.error(f"{name} is none of {', '.join(NAMES)}")
    if asked.workers < 1 or (asked.steps is not None and asked.steps < 1):
        parser.error("--workers and --steps must be at least 1")
    if len(asked.models) == 1:
        return _one(asked.models[0], asked.out, asked.work, asked.steps)
    options = ["--out", str(asked.out), "--work", str(asked.work)]
    options += [] if asked.steps is None else ["--steps", str(asked.steps)]
    return _several(asked.models or list(NAMES), options, asked.workers)


def _one(name: str, out: Path, work: Path, steps: int | None) -> int:
    """Train in this process; a line of text after every 100 steps."""
    import torch

    from kvexp.training.family import train_family
    from kvexp.training.train import Trainer

    def say(trainer: Trainer) -> None:
        line = trainer.log[-1]
        recall = " ".join(f"{key.removeprefix('recall_')} {line[key]:.2f}" for key in line if "recall" in key)
        minutes = line["seconds"] / 60
        print(
            f"{line['step']}/{recipe.steps} stage {line['stage'] + 1}, {minutes:.1f} min, recall {recall}", flush=True
        )

    torch.set_num_threads(1)
    recipe = RECIPES[name] if steps is None else replace(RECIPES[name], steps=steps)
    train_family(name, recipe, work, out, say)
    print(f"{recipe.steps}/{recipe.steps} done: {out / name}", flush=True)
    return 0


def _several(names: list[str], options: list[str], workers: int) -> int:
    """One process per model, `workers` at a time, and a bar for each (lines where the output is no terminal)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = sys.stdout.isatty()
    with (
        Progress(*columns, TextColumn("{task.fields[state]}"), disable=not shown) as bars,
        ThreadPoolExecutor(workers) as pool,
    ):
        tasks = {name: bars.add_task(name, total=None, state="waiting") for name in names}

        def follow(name: str) -> int:
            line = [sys.executable, "-u", "-m", "kvexp.training", name, *options]
            errors = subprocess.STDOUT
            with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=_one_core()) as child:
                assert child.stdout is not None
                for said in child.stdout:
                    count, _, state = said.strip().partition(" ")
                    step, slash, total = count.partition("/")
                    if slash and step.isdigit() and total.isdigit():
                        bars.update(tasks[name], completed=int(step), total=int(total), state=state)
                    if not shown or not slash:
                        print(f"{name}: {said}", end="", flush=True)
            return child.returncode

        codes = dict(zip(names, pool.map(follow, names), strict=True))
    failed = [name for name, code in codes.items() if code]
    for name in failed:
        print(f"error: {name} ended with exit code {codes[name]}; what it said stands above", file=sys.stderr)
    return len(failed)


def _one_core() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
