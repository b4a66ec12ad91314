"""The settings at the root of a configuration: their values, a run's share of the examples, a search's objective.

Checked by themselves: a mistake is told before torch is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvexp.build import STORAGE, build, typed
from kvexp.config.known_keys import root_values
from kvexp.errors import ConfigError
from kvexp.record import Run

if TYPE_CHECKING:
    from kvexp.tasks import Task


KINDS: dict[str, Any] = {
    "outputs_dir": str,
    "limit": int | None,
    "seed": int,
    "batch_size": int,
    "timeout_s": float | None,
    "retry": bool,
}
QUESTIONS = ("each", "all")


def check_values(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """ConfigError in the words of the command line. choices: group -> the option taken."""
    for name, kind in KINDS.items():
        typed(config[name], kind, name)
    limit, seed, timeout = config["limit"], config["seed"], config["timeout_s"]
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 example or null for all, got {limit}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    if config["batch_size"] < 1:
        raise ConfigError(f"batch_size must be at least 1, got {config['batch_size']}")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds or null, got {timeout:g}")
    share = config.get("bytes_ratio")  # a run of before has no such key
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise ConfigError(f"bytes_ratio must be a number in (0, 1] or null, got {share!r}")
    if config.get("questions", "each") not in QUESTIONS:  # a run of before has no such key
        raise ConfigError(f"questions must be one of {', '.join(QUESTIONS)}, got {config['questions']!r}")
    budget = config.get("budget")
    if isinstance(budget, Mapping):
        _check_budget(budget, config.get("kv_ratio"), choices.get("budget"))


def check_idle(config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]) -> None:
    """ConfigError for an option of a number of slots, or of their storage, that was asked for and would do nothing.

    overrides: what was typed or is swept. A kv_ratio other than conf/config.yaml's stands in a file that was named.
    """
    typed_keys = {word.lstrip("+").partition("=")[0] for word in overrides}
    _check_idle_storage(config.get("cache"), typed_keys)
    if config.get("bytes_ratio") is not None and "kv_ratio" in typed_keys:
        raise ConfigError(
            f"kv_ratio has no effect with bytes_ratio={config['bytes_ratio']}: leave out "
            f"kv_ratio={config.get('kv_ratio')}"
        )
    budget = config.get("budget")
    if not isinstance(budget, Mapping):
        return
    given = next((name for name in ("tokens", "threshold") if budget.get(name) is not None), None)
    if given is None:
        return
    ratio, option = config.get("kv_ratio"), choices.get("budget", given)
    if budget.get("kv_ratio") is None and ("kv_ratio" in typed_keys or ratio != root_values()["kv_ratio"]):
        raise ConfigError(
            f"kv_ratio has no effect with budget={option}; leave out kv_ratio={ratio}, or take budget=ratio instead of "
            f"budget.{given}={budget[given]}"
        )
    if given == "tokens" and "budget.of" in typed_keys:
        raise ConfigError(
            f"budget.of has no effect with budget={option}, a number of slots for prompts of any length; leave it out, "
            "or take budget=ratio"
        )


def _check_idle_storage(cache: Any, typed_keys: Collection[str]) -> None:
    """ConfigError for an option of quantised slots where bits were not asked for. cache: the group `cache`."""
    bits = ("bits", "key_bits", "value_bits")
    if not isinstance(cache, Mapping) or any(f"cache.{name}" in typed_keys for name in bits):
        return
    if cache.get("bits", 16) != 16 or cache.get("key_bits") or cache.get("value_bits"):
        return
    for name in STORAGE:
        if f"cache.{name}" in typed_keys:
            raise ConfigError(
                f"cache.{name} has no effect with cache.bits=16, where nothing is quantised: add cache.bits=8, 4 or 2, "
                f"or leave out cache.{name}={cache[name]}"
            )


def _check_budget(budget: Mapping[str, Any], at_root: Any, option: str | None) -> None:
    ratio, tokens = budget.get("kv_ratio"), budget.get("tokens")
    if ratio is not None and tokens is not None:
        if option == "tokens":
            raise ConfigError(f"budget=tokens takes no ratio, got budget.kv_ratio={ratio}: leave out one of the two")
        raise ConfigError(f"budget.tokens={tokens} needs budget=tokens; budget={option or 'ratio'} takes a ratio")
    if ratio is None:
        return
    name = "kv_ratio" if ratio == at_root else "budget.kv_ratio"
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ConfigError(f"{name} must be a number in (0, 1], got {ratio!r}")
    if not 0 < ratio <= 1:
        percent = f"; {ratio:g} % is {name}={ratio / 100:g}" if 2 <= ratio <= 100 else ""
        raise ConfigError(f"{name} must be in (0, 1], got {ratio:g}{percent}")


@dataclass(frozen=True)
class Shard:
    """index: from 0 to of - 1. Neighbouring examples stay together, since they may ask about one context."""

    index: int = 0
    of: int = 1

    @classmethod
    def read(cls, value: Any) -> Shard:
        """The configuration's `shard`; null is all examples."""
        if value is None:
            return cls()
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value) if isinstance(value, str) else None
        if found is None or not int(found[1]) < int(found[2]):
            raise ConfigError(f"shard must be null or i/n with i from 0 to n - 1, as in shard=0/4, got {value!r}")
        return cls(int(found[1]), int(found[2]))

    @property
    def whole(self) -> bool:
        return self.of == 1

    @property
    def name(self) -> str | None:
        """Of its claim; None for all examples."""
        return None if self.whole else f"{self.index}-of-{self.of}"

    def takes(self, total: int) -> range:
        """Which of so many examples are its own; the shards of one `of` share them out without rest."""
        return range(total * self.index // self.of, total * (self.index + 1) // self.of)


def objective(made: Sequence[Run], metric: str | None) -> float | None:
    """Of a job's runs, each counting once; None where nothing has a score. metric: None is the first one of rows."""
    means = [mean for run in made if (mean := _mean(run, metric)) is not None]
    return fmean(means) if means else None


def check_objective(task: Task, metric: Any) -> None:
    """ConfigError, before anything runs, for a metric that no row of the task will hold."""
    if typed(metric, str | None, "objective") is None:
        return
    from kvexp.tasks import LMEval  # late: a command without an objective does not wait for it

    for part in task.parts() if isinstance(task, LMEval) else [task]:
        if metric not in (known := part.metric_names()):
            raise ConfigError(
                f"objective must be one of {', '.join(known)} (the metrics of task={part.name}) or null for the first, "
                f"got {metric!r}"
            )


def check_objective_of(node: Mapping[str, Any], metric: Any) -> None:
    """`check_objective`, of the task that a resolved configuration's node makes."""
    check_objective(build(node, "task", within="kvexp.tasks"), metric)


def _mean(run: Run, metric: str | None) -> float | None:
    scored = [row["metrics"] for row in _counting(run) if row.get("metrics") and not row.get("skipped")]
    if not scored:
        return None
    name = metric or next(iter(scored[0]))
    values = [metrics[name] for metrics in scored if name in metrics]
    return fmean(values) if values else None


def _counting(run: Run) -> list[dict[str, Any]]:
    """The rows; of a task that counts the questions alone that the full cache answers, those of such questions."""
    rows = run.rows()
    if run.baseline is None or all(row.get("answered") is None for row in rows):
        return rows
    right = {row["example"] for row in Run.load(run.path.parent / run.baseline).rows() if row.get("answered")}
    return [row for row in rows if row["example"] in right]
