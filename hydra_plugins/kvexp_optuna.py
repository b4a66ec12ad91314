"""hydra/sweeper=optuna: runs whose settings Optuna chooses, in a study that a later command takes up again.

A sweeper of our own: Hydra's plugin wants optuna < 3, whose SQLite storage fails with the SQLAlchemy of today, and it
starts n_trials anew each time.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from kvexp.util.errors import ConfigError

NEUTRAL = ("outputs_dir", "batch_size", "threads", "log", "hydra")  # they choose nothing and change no objective


class OptunaSweeper(Sweeper):  # type: ignore[misc]
    """Options: conf/hydra/sweeper/optuna.yaml."""

    def __init__(
        self,
        storage: str,
        n_trials: int,
        batch: int,
        direction: str | None,
        sampler: str,
        seed: int,
        params: DictConfig,
    ) -> None:
        self.storage, self.n_trials, self.batch, self.direction = storage, n_trials, batch, direction
        self.sampler, self.seed, self.params = sampler, seed, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        try:
            self._search(arguments)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    def _search(self, arguments: list[str]) -> None:
        self._check()
        words = [f"{key}={value}" for key, value in self.params.items()] + list(arguments)
        parsed = {word.get_key_element(): word for word in OverridesParser.create().parse_overrides(words)}
        try:
            searched = {key: distribution(word) for key, word in parsed.items() if word.is_sweep_override()}
        except ValueError as error:  # Optuna's, of bounds
            raise ConfigError(f"what hydra/sweeper=optuna is to search cannot be: {error}") from error
        fixed = [
            f"{key}={word.get_value_element_as_str()}" for key, word in parsed.items() if not word.is_sweep_override()
        ]
        if not searched:
            raise ConfigError(
                "hydra/sweeper=optuna searches nothing: give a range here or in hydra.sweeper.params, as "
                "in 'method.alpha=interval(0,1)'"
            )
        study = self._study(fixed, searched)
        done = _completed(study)
        if done:
            print(f"{done} of {self.n_trials} trials are there already ({self.storage})", flush=True)
        first = 0
        for start in range(done, self.n_trials, self.batch):
            trials = self._ask(study, searched, min(self.batch, self.n_trials - start))
            jobs = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            returned = self.launcher.launch(jobs, initial_job_idx=first)
            first += len(jobs)
            self._tell(study, trials, [job.return_value for job in returned])
        _report(study)

    def _check(self) -> None:
        try:
            import optuna  # noqa: F401
        except ImportError as error:
            raise ConfigError("hydra/sweeper=optuna needs optuna; run: pip install 'kvexp[search]'") from error
        metric = self.config.get("objective")
        if not isinstance(metric, str):
            raise ConfigError(f"hydra/sweeper=optuna needs objective=METRIC, as in objective=rouge2, got {metric!r}")
        for name in ("n_trials", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"hydra.sweeper.{name} must be a whole number of at least 1, got {value!r}")
        if self.sampler not in ("tpe", "random"):
            raise ConfigError(f"hydra.sweeper.sampler must be tpe or random, got {self.sampler!r}")
        if self.direction not in (None, "maximize", "minimize"):
            raise ConfigError(f"hydra.sweeper.direction must be maximize, minimize or null, got {self.direction!r}")

    def _study(self, fixed: Sequence[str], searched: dict[str, Any]) -> Any:
        """The study of this command: known by what is searched, what is fixed, and how kvexp counts."""
        import optuna

        import kvexp
        from kvexp.results.stats import lower_is_better
        from kvexp.run.user_code import admitted

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        metric = str(self.config.objective)
        words = [word for word in fixed if word.lstrip("+~").partition("=")[0].split(".")[0] not in NEUTRAL]
        named = [users for users in admitted().values() if any(users.option in word for word in words)]
        code = [hashlib.sha256(repr(users.source).encode()).hexdigest()[:16] for users in named]
        name = " ".join([f"numerics={kvexp.NUMERICS}", *sorted(words), *code, *sorted(searched), f"objective={metric}"])
        direction = self.direction or ("minimize" if lower_is_better(metric) else "maximize")
        if self.storage.startswith("sqlite:///"):
            Path(self.storage.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(storage=self.storage, study_name=name, direction=direction, load_if_exists=True)
        for trial in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)  # of a command that was interrupted
        return study

    def _ask(self, study: Any, searched: dict[str, Any], count: int) -> list[Any]:
        """Choose trials from the completed ones and the seed alone: an interrupted search chooses the same again."""
        import optuna

        seed = self.seed + _completed(study)
        random = self.sampler == "random"
        kinds = optuna.samplers
        study.sampler = kinds.RandomSampler(seed=seed) if random else kinds.TPESampler(seed=seed, n_startup_trials=8)
        return [study.ask(searched) for _ in range(count)]

    def _tell(self, study: Any, trials: Sequence[Any], values: Sequence[float | None]) -> None:
        from optuna.trial import TrialState

        for trial, value in zip(trials, values, strict=True):
            if value is None or not math.isfinite(value):
                study.tell(trial, state=TrialState.FAIL)
            else:
                study.tell(trial, value)


def distribution(word: Override) -> Any:
    """Optuna's distribution for what Hydra's grammar says."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = word.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution(list(word.sweep_string_iterator()))
    log = "log" in value.tags
    if isinstance(value.start, int) and isinstance(value.end, int):
        return IntDistribution(value.start, value.end, log=log)
    return FloatDistribution(float(value.start), float(value.end), log=log)  # type: ignore[arg-type]


def _completed(study: Any) -> int:
    from optuna.trial import TrialState

    return len(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]))


def _report(study: Any) -> None:
    if not _completed(study):
        print("no trial has a value")
        return
    best = study.best_trial
    words = " ".join(f"{key}={value}" for key, value in best.params.items())
    print(f"best of {_completed(study)} trials: {best.value:.6g} with {words}")
