"""One family from random weights to its folder."""

from __future__ import annotations

import contextlib
import fcntl
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvexp.errors import ConfigError
from kvexp.training.export_model import export
from kvexp.training.lessons import CURRICULUM, KINDS, lesson
from kvexp.training.recipe import Recipe
from kvexp.training.train import Trainer, loss_of


def train_family(name: str, recipe: Recipe, work: Path, out: Path, say: Callable[[Trainer], None]) -> None:
    """Train `name` (resuming what lies in `work`) and write `out / name`; `say` is called first and as it goes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with folder_lock(work / name):
        trainer = Trainer(name, recipe, work / name, device)
        say(trainer)
        trainer.run(say)
        export(trainer.model, out / name, trainer.folder / "training.jsonl", facts(trainer))


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder of a training: two processes would overwrite each other's checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process trains in {folder}: wait for it or end it, or give --work") from error
        yield


def facts(trainer: Trainer) -> dict[str, Any]:
    """What the model card says."""
    device = trainer.model.device
    return {
        **asdict(trainer.recipe),
        "steps": trainer.step,
        "layout": trainer.model.config.model_type,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "stage": trainer.stage,
        "tokens": trainer.step * trainer.recipe.batch_tokens,
        "seconds": round(trainer.seconds),
        "validation_recall": {kind: round(recall(trainer, kind), 4) for kind in KINDS},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "commit": _commit(),
    }


@torch.no_grad()
def recall(trainer: Trainer, kind: str, batches: int = 8) -> float:
    """Mean share of right answer tokens over lessons of the last stage from the validation split."""
    total = 0.0
    for number in range(batches):
        rng = Random(f"validation {kind} {number}")
        batch = lesson(rng, "validation", CURRICULUM[trainer.stage], kind, trainer.recipe)
        total += loss_of(trainer.model, trainer.name, batch, rng)[1]
    return total / batches


def _commit() -> str | None:
    with contextlib.suppress(OSError):
        line = ["git", "describe", "--always", "--dirty"]
        where = Path(__file__).resolve().parents[2]
        if (where / ".git").exists():
            return subprocess.run(line, cwd=where, capture_output=True, text=True).stdout.strip() or None
    return None
