"""hydra/launcher=joblib, submitit_local, submitit_slurm, ray: a sweep's groups go to workers of an existing engine.

Jobs are composed here, as by shared_prefill, and grouped before anything is shipped: an engine gets whole groups.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydra_plugins.kvexp_shared_prefill import OneByOneLauncher
from kvexp.run.session import Session
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


class ShippingLauncher(OneByOneLauncher):
    """options: the engine's own, as conf/hydra/launcher lists them."""

    needs: str  # the package

    def __init__(self, shards: int = 1, **options: Any) -> None:
        super().__init__()
        self.shards = shards
        self.options = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in options.items()}

    def perform(self, jobs: list[Any], session: Session) -> None:
        from kvexp.run.workers import run_remote

        try:
            _check_lines(self.options, "hydra.launcher")
            self.package()
            run_remote(jobs, self.shards, self.engine, session)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    def engine(self, work: Any, shipments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """See `kvexp.run.workers.run_remote`."""
        raise NotImplementedError

    def package(self) -> Any:
        try:
            return importlib.import_module(self.needs)
        except ImportError as error:
            raise ConfigError(
                f"this hydra/launcher needs {self.needs}, which is not installed; run: pip install {self.needs}"
            ) from error


class JoblibLauncher(ShippingLauncher):
    """options: n_jobs."""

    needs = "joblib"

    def engine(self, work: Any, shipments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        joblib = self.package()
        with _importable():
            pool = joblib.Parallel(**self.options, backend="loky", batch_size=1, return_as="generator_unordered")
            left = set(range(len(shipments)))
            try:
                for place, outcome in pool(joblib.delayed(_kept)(work, *numbered) for numbered in enumerate(shipments)):
                    left.discard(place)
                    yield place, outcome
            except Exception as error:  # one worker that is killed takes the pool with it
                yield from ((place, error) for place in sorted(left))


class SubmititLauncher(ShippingLauncher):
    """options: cluster (local or slurm), submitit_folder, and parameters of submitit.AutoExecutor."""

    needs = "submitit"

    def engine(self, work: Any, shipments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        submitit = self.package()
        options = {key: value for key, value in self.options.items() if value is not None}
        executor = submitit.AutoExecutor(options.pop("submitit_folder"), cluster=options.pop("cluster"))
        executor.update_parameters(name="kvexp", **options)
        with _importable():
            submitted = executor.map_array(work, shipments)
        try:
            for place, job in enumerate(submitted):
                try:
                    yield place, job.result()
                except Exception as error:  # submitit's own, of a task that failed, was cut off or vanished
                    yield place, error
        except BaseException:  # an interruption: what would go on has nobody to answer to
            for job in submitted:
                job.cancel(check=False)
            raise


class RayLauncher(ShippingLauncher):
    """options: init (of ray.init) and remote (of every task)."""

    needs = "ray"

    def engine(self, work: Any, shipments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        ray = self.package()
        if not ray.is_initialized():
            given = {key: value for key, value in self.options["init"].items() if value is not None}
            ray.init(runtime_env={"env_vars": {"PYTHONPATH": _python_path()}}, log_to_driver=True, **given)
        task = ray.remote(**self.options["remote"])(work)
        places = {task.remote(shipment): place for place, shipment in enumerate(shipments)}
        waiting = list(places)
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            try:
                yield places[ready], ray.get(ready)
            except Exception as error:  # Ray's own, of a worker or node that died
                yield places[ready], error


def _check_lines(value: Any, place: str) -> None:
    """ConfigError for a line end within an option: submitit writes options into a shell script, a line each."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_lines(key, place)
            _check_lines(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_lines(inner, f"{place}[{number}]")
    elif isinstance(value, str) and len(value.splitlines()) > 1:
        raise ConfigError(f"{place} holds a line end, got {value!r}; give one line (slurm_setup takes a list of them)")


def _kept(work: Any, place: int, shipment: Any) -> tuple[int, Any]:
    """Work together with its place, since workers answer in any order."""
    return place, work(shipment)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """In the block, workers that are started find kvexp where this process found it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _python_path()
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
