"""`kvexp train-testbed`: train the testbed's models from scratch. A killed training goes on where it was."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvexp.errors import ConfigError
from kvexp.training.launch import several
from kvexp.training.layouts import NAMES
from kvexp.training.recipes import RECIPES

if TYPE_CHECKING:
    from kvexp.training.train import Trainer

MODELS = Path(__file__).resolve().parents[1] / "testbed" / "models"


def main(arguments: list[str] | None = None) -> int:
    """0, 1 if a training failed, 2 if one cannot begin, 130 if it was interrupted."""
    asked = _asked(arguments)
    try:
        if len(asked.models) == 1 and not sys.stdout.isatty():  # in a terminal even one gets a bar
            _one(asked.models[0], asked.out, asked.work, asked.steps)
            return 0
        options = ["--out", str(asked.out), "--work", str(asked.work)]
        options += [] if asked.steps is None else ["--steps", str(asked.steps)]
        line = [sys.executable, "-u", "-m", "kvexp.training"]
        failed = several({name: [*line, name, *options] for name in asked.models or NAMES}, asked.workers)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on from what lies in {asked.work}", file=sys.stderr)
        return 130
    for words in failed:
        print(f"error: {words}", file=sys.stderr)
    return 1 if failed else 0


def command(arguments: list[str]) -> int:
    """As `main`; a training asked to end ends its children too, which Python does only of an interrupt."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main(arguments)


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvexp train-testbed", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, default=MODELS, help="where the model folders go (default: kvexp's own)")
    parser.add_argument("--work", type=Path, default=Path("outputs/.training"), help="checkpoints while training")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="models at a time, one core each")
    parser.add_argument("--steps", type=int, help="another number of steps than the recipe's, to try something out")
    asked = parser.parse_args(arguments)
    for name in asked.models:
        if name not in NAMES:
            parser.error(f"{name} is none of {', '.join(NAMES)}")
    asked.models = list(dict.fromkeys(asked.models))
    if asked.workers < 1 or (asked.steps is not None and asked.steps < 1):
        parser.error("--workers and --steps must be at least 1")
    if asked.steps is not None and asked.out.resolve() == MODELS:
        parser.error("--steps is for trying something out: give --out FOLDER too, kvexp's own models stay as they are")
    return asked


def _one(name: str, out: Path, work: Path, steps: int | None) -> None:
    """Train in this process; a line of text at the start and after every 100 steps."""
    import torch
    from transformers.utils import logging

    from kvexp.training.family import train_family

    logging.set_verbosity_error()  # it warns of a missing mask, but pads stand behind the text and weigh nothing
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    recipe = RECIPES[name] if steps is None else replace(RECIPES[name], steps=steps)
    train_family(name, recipe, work, out, say)
    print(f"{recipe.steps}/{recipe.steps} done: {out / name}", flush=True)


def say(trainer: Trainer) -> None:
    """Print where a training is: a line that `several` can read."""
    state = "begins"
    if trainer.log:
        line = trainer.log[-1]
        recall = " ".join(f"{key.removeprefix('recall_')} {line[key]:.2f}" for key in line if "recall" in key)
        state = f"stage {line['stage'] + 1}, {line['seconds'] / 60:.1f} min, recall {recall}"
    print(f"{trainer.step}/{trainer.recipe.steps} {state}", flush=True)
