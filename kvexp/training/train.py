"""The training loop: seeded, resumable after a kill, logging recall per prompt form."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from kvexp.errors import ConfigError
from kvexp.training.layouts import POSITIONS, untrained
from kvexp.training.lessons import CURRICULUM, KINDS, Lesson, lesson
from kvexp.training.recipe import MIXTURE, Recipe


class Trainer:
    """One family's training. The data of step i depend on (seed, i) and the stage alone: a resumed run is the same."""

    def __init__(self, name: str, recipe: Recipe, folder: Path, device: str = "cpu") -> None:
        self.name, self.recipe, self.folder = name, recipe, folder
        self.model = untrained(name, recipe.seed).to(device)
        self.optimizers = optimizers(self.model, recipe)
        self.step, self.stage, self.seconds = 0, 0, 0.0
        self.recall = dict.fromkeys(KINDS, 0.0)
        self.log: list[dict[str, Any]] = []
        self._resume()

    def run(self, say: Callable[[Trainer], None]) -> None:
        """Train to the end of the recipe; `say` is called after every step that logs."""
        while self.step < self.recipe.steps:
            start = time.perf_counter()
            self._one()
            self.seconds += time.perf_counter() - start
            if self.step % self.recipe.every == 0 or self.step == self.recipe.steps:
                self._note()
                self._save()
                say(self)

    def _one(self) -> None:
        recipe = self.recipe
        rng = Random(f"{recipe.seed} {self.step}")
        kind = rng.choices(KINDS, [MIXTURE[kind] for kind in KINDS])[0]
        # A quarter of the lessons come from earlier stages, so that short documents stay known.
        stage = self.stage if rng.random() < 0.75 else rng.randint(0, self.stage)
        batch = lesson(rng, "train", CURRICULUM[stage], kind, recipe)
        rate = schedule(self.step, recipe)
        for optimizer, base in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
        loss, right = loss_of(self.model, self.name, batch, rng, reach=2 * CURRICULUM[self.stage].high)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if stage == self.stage:
            self.recall[kind] += 0.1 * (right - self.recall[kind])
        self.step += 1
        if min(self.recall.values()) >= recipe.pass_mark and self.stage + 1 < len(CURRICULUM):
            self.stage += 1
            self.recall = {kind: value - 0.1 for kind, value in self.recall.items()}

    def _note(self) -> None:
        line = {"step": self.step, "stage": self.stage, "seconds": round(self.seconds, 1)}
        self.log.append({**line, **{f"recall_{kind}": round(value, 4) for kind, value in self.recall.items()}})

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "progress": [self.step, self.stage, self.seconds, self.recall, self.log],
        }
        lines = "".join(json.dumps(line) + "\n" for line in self.log)
        (self.folder / "training.jsonl").write_text(lines)  # first: no finished training may lack its last line
        part = self.folder / "checkpoint.part"
        torch.save(state, part)
        part.replace(self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True, map_location=self.model.device)
        if state["recipe"] != asdict(self.recipe):
            raise ConfigError(f"{path} is of another recipe: remove {self.folder} to train anew, or give --work")
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.stage, self.seconds, self.recall, self.log = state["progress"]


def optimizers(model: nn.Module, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for the rest; each with its base rate."""
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and not any(word in name for word in ("wte", "wpe", "embed_tokens", "lm_head"))
        (hidden if inside else rest).append(parameter)
    return [
        (torch.optim.Muon(hidden, lr=recipe.muon_lr, weight_decay=0.01, adjust_lr_fn="original"), recipe.muon_lr),
        (torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0), recipe.lr),
    ]


def schedule(step: int, recipe: Recipe) -> float:
    """Share of the base learning rate at a step."""
    rising = min(1.0, (step + 1) / recipe.warmup)
    left = (recipe.steps - step) / (recipe.cooldown * recipe.steps)
    return rising * min(1.0, 0.1 + 0.9 * left)


def loss_of(model: Any, name: str, batch: Lesson, rng: Random, reach: int = 0) -> tuple[Tensor, float]:
    """(weighted mean cross-entropy, share of answer tokens that are the most probable ones).

    reach: how far from the start of a table of learned positions the text may be put.
    """
    options: dict[str, Tensor] = {}
    ids, weight, answered = (each.to(model.device) for each in (batch.ids, batch.weight, batch.answered))
    length = ids.shape[1]
    if name == "testbed_learned":
        # Learned positions are learnt one by one: short documents teach positions beyond their own length too.
        first = rng.randint(0, min(reach, POSITIONS - length))
        options["position_ids"] = torch.arange(length, device=ids.device)[None] + first
    with torch.autocast(ids.device.type, torch.bfloat16):  # half the time; weights and their updates stay float32
        logits = model(ids, use_cache=False, **options).logits[:, :-1].float()
    target, weight, answered = ids[:, 1:], weight[:, 1:], answered[:, 1:]
    each = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    right = (logits.argmax(-1) == target)[answered].float().mean().item()
    return (each * weight).sum() / weight.sum(), right
