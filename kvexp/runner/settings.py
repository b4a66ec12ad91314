"""A composed configuration as checked objects, and what of it identifies a run. Nothing here loads a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.build import build, typed
from kvexp.core import Budget, Cadence, Method, Plan
from kvexp.errors import ConfigError
from kvexp.generate import Decoding
from kvexp.methods import Full
from kvexp.runner.model import ModelSpec
from kvexp.tasks import Task

_TOP = {"kv_ratio", "limit", "seed", "batch_size", "outputs_dir"}


@dataclass(frozen=True)
class Settings:
    """Everything one run needs. `identity` holds all that can change a number and nothing else."""

    model: ModelSpec
    method: Method
    budget: Budget | None
    cadence: Cadence
    mode: str
    positions: str
    observe: str
    beyond_context: bool
    task: Task
    decoding: Decoding
    seed: int
    limit: int | None
    batch_size: int
    outputs_dir: Path
    labels: dict[str, Any]
    identity: dict[str, Any]

    @property
    def is_baseline(self) -> bool:
        return not self.method.evicts

    def plan(self) -> dict[str, Any]:
        """Options for `kvexp.generate`."""
        return {
            "cadence": self.cadence,
            "mode": self.mode,
            "positions": self.positions,
            "observe": self.observe,
            "beyond_context": self.beyond_context,
        }

    def baseline(self) -> Settings:
        """The same run with full attention: what this one is measured against."""
        full = dataclasses.replace(
            self, method=Full(), budget=None, cadence=Cadence(), mode="overwrite", positions="original"
        )
        return full.identified({**self.labels, "method": "full", "kv_ratio": None, "setting": ""})

    def identified(self, labels: dict[str, Any]) -> Settings:
        """Fill in labels and identity. Settings that cannot matter are left out, so that equal runs are one run."""
        identity: dict[str, Any] = {
            "model": self.model.identity(),
            "task": {"name": self.task.name, **_plain(self.task, without=("limit", "data_files", "streaming"))},
            "data": self.task.fingerprint(),
            "generation": _plain(self.decoding),
            "method": {"name": self.method.name, **_plain(self.method)},
            "beyond_context": self.beyond_context,
            "positions": self.positions,
        }
        if not self.is_baseline:
            identity |= {"budget": _plain(self.budget), "cadence": _plain(self.cadence), "mode": self.mode}
            identity["observe"] = self.observe
        if self.decoding.sample or not self.is_baseline:
            identity["seed"] = self.seed
        return dataclasses.replace(self, labels=labels, identity=identity)


def settings_of(config: dict[str, Any], choices: dict[str, str]) -> Settings:
    """Check a resolved configuration; choices: group -> the option taken (for labels). ConfigError names the key."""
    method: Method = build(config["method"], "method", within="kvexp.methods")
    budget = build(config["budget"], "budget", within="kvexp.core") if method.evicts else None
    cache = dict(config["cache"])
    every, at_prefill = cache.pop("evict_every"), cache.pop("evict_at_prefill")
    mode = cache.pop("mode")
    if mode == "auto":
        mode = "mask" if method.needs_mask or getattr(method.view, "over", "") == "full" else "overwrite"
    positions = cache.pop("positions") or method.positions
    observe, beyond = cache.pop("observe"), cache.pop("beyond_context")
    if cache:
        raise ConfigError(f"cache.{next(iter(cache))} is not a setting of cache")
    task: Task = build({**config["task"], "limit": config["limit"]}, "task", within="kvexp.tasks")
    settings = Settings(
        model=ModelSpec.of(config["model"]),
        method=method,
        budget=budget,
        cadence=Cadence(
            typed(at_prefill, bool, "cache.evict_at_prefill"), typed(every, int | None, "cache.evict_every")
        ),
        mode=mode,
        positions=positions,
        observe=observe,
        beyond_context=typed(beyond, bool, "cache.beyond_context"),
        task=task,
        decoding=_decoding(config["generation"], task),
        seed=typed(config["seed"], int, "seed"),
        limit=typed(config["limit"], int | None, "limit"),
        batch_size=typed(config["batch_size"], int, "batch_size"),
        outputs_dir=Path(config["outputs_dir"]),
        labels={},
        identity={},
    )
    _check(settings)
    return settings.identified(_labels(settings, config, choices))


def _decoding(node: dict[str, Any], task: Task) -> Decoding:
    """Generation settings, with the task's lengths where the configuration leaves them open."""
    node = dict(node)
    for name in ("max_new_tokens", "min_new_tokens"):
        if node.get(name) is None:
            node[name] = getattr(task, name)
    decoding: Decoding = build(node, "generation", within="kvexp.generate")
    return decoding


def _check(settings: Settings) -> None:
    """What can be wrong without a model or data at hand."""
    if settings.batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {settings.batch_size}")
    if settings.limit is not None and settings.limit < 1:
        raise ConfigError(f"limit must be at least 1 example or null for all, got {settings.limit}")
    if settings.task.pad_to is not None:
        raise ConfigError("task.pad_to is not carried out by this runner yet: leave it at null")
    Plan(
        settings.method,
        settings.budget,
        settings.cadence,
        settings.mode,  # type: ignore[arg-type]
        settings.positions,  # type: ignore[arg-type]
        settings.observe,  # type: ignore[arg-type]
    )


def _labels(settings: Settings, config: dict[str, Any], choices: dict[str, str]) -> dict[str, Any]:
    """What a table shows of a run: short names, the x axis, and every method or cache setting that is not default."""
    budget = settings.budget
    node = {k: v for k, v in config["method"].items() if k != "_target_"}
    default = _plain(type(settings.method)())
    changed = {k: v for k, v in node.items() if default.get(k) != v}
    if settings.positions != settings.method.positions:
        changed["positions"] = settings.positions
    if budget is not None and (budget.of != "prompt" or budget.pyramid or not budget.counts_self):
        changed["budget"] = choices.get("budget", "custom")
    if settings.cadence != Cadence():
        changed["every"] = settings.cadence.every
    return {
        "model": settings.model.label(choices.get("model", "")),
        "task": choices.get("task", type(settings.task).__name__),
        "method": choices.get("method", settings.method.name),
        "kv_ratio": budget.kv_ratio if budget is not None else None,
        "tokens": budget.tokens if budget is not None else None,
        "setting": " ".join(f"{k}={v}" for k, v in sorted(changed.items())),
        "generation": choices.get("generation", ""),
    }


def _plain(item: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(item).items() if k not in without}
