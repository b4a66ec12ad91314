"""Comparison of methods in one call from Python: the runs of a sweep, their table and their figure."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.core import Method
from kvexp.results.plots import draw_quality as draw
from kvexp.results.table import table
from kvexp.run.compose import explained, is_model_place, make_option, named_user_method, option, options, roots, unknown
from kvexp.run.jobs import HydraJob, run_jobs
from kvexp.run.user_methods import MISSING, admitted, class_method, settings_of_class
from kvexp.util import CONF, ConfigError, Session

SHOWN = ("method", "setting", "kv_ratio", "n")  # columns of a notebook's table, before the metric's


class Curves(pd.DataFrame):
    """The runs of one `compare` and their baselines: a DataFrame as `kvexp.results.table` gives it, a row per run.

    With limit=N all its numbers are over the first N examples, also of runs that have more. Printed, it shows the
    columns of the task's first metric; in a notebook also their figure. A part of it is an ordinary DataFrame.
    """

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        return str(self._shown().to_string(index=False, float_format="{:.2f}".format, na_rep=""))

    def figure(self, metric: str | None = None) -> Figure:
        """Quality in percent of full attention against kv_ratio, a line per method; metric: None for the task's first.

        ConfigError where no run has a percentage, as with fewer than 20 examples.
        """
        return draw(self, metric)

    def _repr_html_(self) -> str:
        return self._picture() + str(self._shown().to_html(index=False, float_format="{:.2f}".format, na_rep=""))

    def _shown(self) -> pd.DataFrame:
        """The columns of the first metric, with n; with NUMERICS where there are several."""
        metric = str(self["headline"].dropna().iloc[0])
        several = ["numerics"] if self["numerics"].nunique() > 1 else []
        columns = [*several, *SHOWN, metric, *(f"{metric}{end}" for end in ("_of_full", "_low", "_high"))]
        return self[[name for name in columns if name in self]]

    def _picture(self) -> str:
        try:
            figure = self.figure()
        except ConfigError:  # too few examples for a percentage: the table has the means
            return ""
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        data = base64.b64encode(file.getvalue()).decode()
        return f'<img alt="quality against kv_ratio" src="data:image/png;base64,{data}">'


def compare(
    methods: Sequence[Method | type[Method] | str],
    task: str | None = None,
    kv_ratio: float | Sequence[float] = (0.2, 0.5),
    *,
    model: str | None = None,
    outputs_dir: str = "outputs",
    **settings: Any,
) -> Curves:
    """Run methods on a task at every kv_ratio, with full attention; returns a DataFrame of the runs.

    methods: names as after `method=` on the command line (MODULE.CLASS and FILE.py too), and method objects or
        classes that stand in a file.
    task, model: names of `kvexp tasks` and `kvexp models`, or a model's folder or hub id; None: what `kvexp run` takes.
    settings: any other setting of `kvexp run`, as in limit=9; a dot in its name is written `__`
        (task__max_new_tokens=8); what is not given is as `kvexp run` has it.

    Runs share their prefills; what was run before is not run again. ConfigError for what cannot be run, a job that
    failed included.
    """
    if isinstance(methods, str | Method | type) or not methods:
        raise ConfigError(f'methods must be a list with at least one method, as in methods=["h2o"], got {methods!r}')
    if task is not None and not isinstance(task, str):
        raise ConfigError(f'task must be a name, as in task="news", got {task!r}; a budget is kv_ratio={task!r}')
    ratios = [kv_ratio] if isinstance(kv_ratio, int | float) else list(kv_ratio)
    given = {"outputs_dir": outputs_dir, "divergence": True, **settings}
    given |= {} if task is None else {"task": task}
    if model is not None:
        given |= {"model": "local", "model__path": model} if is_model_place(model) else {"model": model}
    if wrong := [name for name in settings if "__" not in name and name not in roots()]:
        raise ConfigError(f"{unknown(wrong[0], {})} (in Python a dot is written __)")
    common = [_override(key.replace("__", "."), value) for key, value in given.items()]
    jobs = [
        job_of([*words, *common, _override("kv_ratio", ratio)])
        for words, ratio in itertools.product([_words_of(method) for method in methods], ratios)
    ]
    session = Session()
    run_jobs(jobs, session)
    if failed := session.failures:
        raise ConfigError(f"{len(failed)} of {len(jobs)} runs failed, the first: {failed[0].why}")
    return Curves(table(outputs_dir, {"hash": session.hashes}, settings.get("limit")))


def _words_of(method: Method | type[Method] | str) -> list[str]:
    """The overrides that stand for a method: its option, and the fields that differ from the option's."""
    if isinstance(method, str):
        return [f"method={method if method in options('method') else make_option(named_user_method(method))}"]
    if isinstance(method, type):
        method = method()
    cls = type(method)
    if not isinstance(method, Method):
        raise ConfigError(f"methods holds a {cls.__name__}; a method is a name, or an object of kvexp.core.Method")
    if cls.__module__.partition(".")[0] == "kvexp":
        name, found = cls.name, option("method", cls.name)
        if not found:
            raise ConfigError(f"{cls.__name__} is no option of method; give its name instead")
        known = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    else:
        # The class as it was loaded from its file; else as its file is now.
        loaded_ones = (one for one in admitted().values() if one.cls is cls and one.reference is not None)
        own = next(loaded_ones, None) or class_method(cls)
        name, known = make_option(own), settings_of_class(own.cls)
    values = {key: getattr(method, key) for key in settings_of_class(cls)}
    changed = {key: value for key, value in values.items() if known.get(key, MISSING) != value}
    return [f"method={name}", *(_override(f"method.{key}", value) for key, value in changed.items())]


def _override(key: str, value: Any) -> str:
    """KEY=VALUE in Hydra's grammar."""
    return f"{key}={_literal(value, key)}"


def _literal(value: Any, key: str) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        plain = value.replace("/", "").replace("_", "").replace(".", "").replace("-", "")
        if plain.isalnum() and not plain.isdigit():
            return value
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_literal(item, key) for item in value) + "]"
    raise ConfigError(f"{key} must be a number, a text, true or false, None or a list of those, got {value!r}")


def job_of(overrides: list[str]) -> HydraJob:
    """The job that a command line of these words would run; ConfigError for words that cannot be."""
    with _own_hydra():
        try:
            composed = compose("config", overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explained(error, overrides)) from error
    choices = dict(composed.hydra.runtime.choices)
    config = copy.deepcopy(composed)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return HydraJob(config, overrides, choices, None)


@contextlib.contextmanager
def _own_hydra() -> Iterator[None]:
    """In the block Hydra reads kvexp's configurations; afterwards it is as the notebook had it."""
    before = copy.copy(GlobalHydra.instance().hydra)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = before
