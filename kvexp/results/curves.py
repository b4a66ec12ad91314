"""Comparison of methods in one call from Python: the runs of a sweep, their table and their figure."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import html
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.core import Method
from kvexp.results.blocks import records
from kvexp.results.divergence import conclusion
from kvexp.results.plots import NO_KL, draw_divergence, draw_runs, without_shared
from kvexp.results.read import Runs, read_runs
from kvexp.results.screen import with_distances
from kvexp.results.table import parts, quality_table
from kvexp.run import model_spec
from kvexp.run.compose import (
    check_groups,
    explained,
    in_python,
    is_data_file,
    is_model_place,
    make_option,
    named_class,
    option,
    options,
    quoted,
    roots,
    task_words,
    unknown,
)
from kvexp.run.jobs import HydraJob, run_jobs
from kvexp.run.session import Session
from kvexp.run.user_code import BASES, admitted, base_of, in_its_file, settings_of_class
from kvexp.tasks import Task
from kvexp.util.errors import ConfigError
from kvexp.util.fields import MISSING, as_python
from kvexp.util.files import CONF, replace

RUN = ("model", "task", "method", "setting", "kv_ratio", "n")  # columns that name a run
DISTANCE = ("kl", "kl_low", "kl_high", "top1", "verdict_kl")  # from the full cache, as in `kvexp results`
LAST = ("verdict99", "status", "note", "hash")
ENDINGS = ("", "_of_full", "_low", "_high")  # of a metric's columns
PROMPTS = ".prompts"  # under the outputs: prompts that were given as texts


class Curves(pd.DataFrame):
    """The runs of one `compare` and their full caches, a row per run: who ran, KL from the full cache, scores.

    Columns as of `kvexp.results.table` and, in DISTANCE, of the divergence table. Further columns are there where they
    tell methods apart; `whole` has all. With limit=N all numbers are over the first N examples, also of runs that have
    more. Printed, it shows KL and the task's first metric, in a notebook also their figure. A part of it is an ordinary
    DataFrame.
    """

    _metadata: ClassVar[list[str]] = ["runs", "whole"]
    runs: Runs
    whole: pd.DataFrame

    @classmethod
    def of(cls, runs: Runs) -> Curves:
        """The frame of these runs."""
        frame = runs.frame(quality_table)
        whole = runs.frame(with_distances)[[*frame, *DISTANCE, "epsilon"]]
        first = [f"{metric}{ending}" for metric in dict.fromkeys(frame["headline"].dropna()) for ending in ENDINGS]
        metrics = (name for folder in runs.shown for name in folder.metrics)
        kept = dict.fromkeys([*RUN, *DISTANCE, *first, *metrics, *LAST])
        compared = whole[whole["verdict99"] != "baseline"].astype(str)
        telling = [name for name in whole if name not in kept and compared[name].nunique() > 1]
        curves = cls(whole[[*(name for name in kept if name in whole), *telling]])
        curves.runs, curves.whole = runs, whole
        return curves

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n{rows.to_string(**_PRINTED)}" for title, rows in self._shown())

    @in_python("__")
    def figure(self, metric: str | None = None) -> Figure:
        """Runs against kv_ratio, a line per method, n in the title.

        metric: in percent of the full cache's score; None: the task's first, and KL from the full cache where no run
        has a percentage. Points of fewer than 20 examples are hollow. ConfigError where neither can be drawn.
        """
        return draw_runs(self.runs, metric)

    def _repr_html_(self) -> str:
        tables = (f"<p>{html.escape(title)}</p>{rows.to_html(**_PRINTED)}" for title, rows in self._shown())
        return self._picture() + "".join(tables)

    def _shown(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield (title, columns to print) for each model and task."""
        for title, _, block in parts(self.whole):
            metrics = block["headline"].dropna().unique()[:1]
            quality = [f"{metric}{ending}" for metric in metrics for ending in ENDINGS]
            rows, shared = without_shared(block)
            telling = [name for name in ("question", "setting") if rows[name].nunique() > 1]
            columns = ["method", *telling, "kv_ratio", "n", *DISTANCE[:3], *quality]
            rows = rows[[name for name in columns if name in rows]].dropna(axis="columns", how="all")
            measured = records(block[block["kl_low"].notna()]) if "kl" in rows else []
            why = "" if "kl" in rows or len(rows) < 2 else f"\nno KL, which {NO_KL}"
            yield "\n".join(filter(None, [f"{title} {shared}".rstrip() + why, conclusion(measured)])), rows

    def _picture(self) -> str:
        """KL against kv_ratio where it was measured, else the first metric; empty where neither can be drawn."""
        try:
            far = "kl" in self.whole and self.whole["kl"].notna().any()
            figure = draw_divergence(self.runs, "kv_ratio") if far else self.figure()
        except ConfigError:
            return ""
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        data = base64.b64encode(file.getvalue()).decode()
        return f'<img alt="runs against kv_ratio" src="data:image/png;base64,{data}">'


_PRINTED: dict[str, Any] = {"index": False, "float_format": "{:.4g}".format, "na_rep": ""}


@in_python("__")
def compare(
    methods: Sequence[Method | type[Method] | str],
    task: Task | type[Task] | str | None = None,
    kv_ratio: float | Sequence[float] = (0.2, 0.5),
    *,
    prompts: Sequence[Any] | None = None,
    data: str | None = None,
    model: str | None = None,
    outputs_dir: str = "outputs",
    **settings: Any,
) -> Curves:
    """Do what `kvexp.compare` says, which tells the arguments."""
    model_spec.forget_changed()
    task, kv_ratio, data, model, outputs_dir = map(as_python, (task, kv_ratio, data, model, outputs_dir))
    settings = {name: as_python(value) for name, value in settings.items()}
    if isinstance(methods, str | Method | type) or not methods:
        raise ConfigError(f'methods must be a list with at least one method, as in methods=["h2o"], got {methods!r}')
    if task is not None and not isinstance(task, str | type | Task):
        raise ConfigError(f'task must be a name, as in task="news", got {task!r}; a budget is kv_ratio={task!r}')
    if wrong := [name for name in settings if "__" not in name and name not in roots()]:
        raise ConfigError(unknown(wrong[0], {}))
    if prompts is not None:
        if task is not None or data is not None:
            raise ConfigError("prompts are a task of their own: leave out task and data")
        data = _file_of(prompts, Path(outputs_dir))
    for name, value in {"data": data, "model": model}.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} must be a name or a path, got {value!r:.80}")
    if kv_ratio is None or kv_ratio == [] or kv_ratio == ():
        raise ConfigError(
            f"kv_ratio must be a number or a list of numbers, as in kv_ratio=[0.2, 0.5], got {kv_ratio!r}"
        )
    ratios = [kv_ratio] if isinstance(kv_ratio, int | float | str) else as_python(list(kv_ratio))
    given = {"outputs_dir": outputs_dir, "divergence": True, **settings}
    if model is not None:
        given |= {"model": "local", "model__path": model} if is_model_place(model) else {"model": model}
    common = [*_words_of_task(task, data), *(_override(key.replace("__", "."), value) for key, value in given.items())]
    jobs = [
        job_of([*words, *common, _override("kv_ratio", ratio)])
        for words, ratio in itertools.product([_words_of("method", method) for method in methods], ratios)
    ]
    session = Session()
    run_jobs(jobs, session)
    if failed := session.failures:
        raise ConfigError(f"{len(failed)} of {len(jobs)} runs failed, the first: {failed[0].why}")
    return Curves.of(read_runs(outputs_dir, {"hash": session.hashes}, settings.get("limit"), alone=True))


def _words_of_task(task: Task | type[Task] | str | None, data: str | None) -> list[str]:
    """The words of a task, a task and a file of its rows, or a file that tells its task."""
    if task is None or (isinstance(task, str) and is_data_file(task)):
        file, named = (data, "data") if data is not None else (task, "task")
        return [] if file is None else task_words([file], named)
    return [*_words_of("task", task), *([] if data is None else [f"task.data_files={quoted(data)}"])]


def _file_of(prompts: Any, outputs: Path) -> str:
    """A file of these prompts, texts or rows; the same ones are the same file, so that their runs are found again."""
    if isinstance(prompts, pd.DataFrame):
        prompts = prompts.to_dict("records")
    prompts = prompts if isinstance(prompts, str | Mapping) else list(prompts)
    if isinstance(prompts, str | Mapping) or not prompts:
        raise ConfigError(
            f'prompts must be a list of texts, as in prompts=["A text.", "Another."], got {prompts!r:.80}'
        )
    rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise ConfigError(f'prompts holds {wrong[0]!r:.80}; a prompt is a text, or a row {{"prompt": TEXT}}')
    try:
        data = "".join(f"{json.dumps(dict(row), ensure_ascii=False, default=_plain)}\n" for row in rows).encode()
    except ValueError as error:
        raise ConfigError(f"prompts hold {error}: rows have texts, numbers and lists of these") from error
    file = outputs / PROMPTS / f"{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, data)
    return str(file)


def _plain(value: Any) -> Any:
    """A value that JSON has in place of this one; ValueError for what is none."""
    if (plain := as_python(value)) is value:
        raise ValueError(f"{value!r:.80}")
    return plain


def _words_of(group: str, item: Any) -> list[str]:
    """The overrides that stand for a method or task, given as its name, class or object: its option, and the fields
    that differ from the option's.
    """
    if isinstance(item, str):
        return [_override(group, item if item in options(group) else make_option(named_class(group, item)))]
    cls: Any = item if isinstance(item, type) else type(item)
    if not issubclass(cls, base_of(group)):
        raise ConfigError(f"{group}s holds a {cls.__name__}; a {group} is a name, or an object of {BASES[group]}")
    if cls.__module__.partition(".")[0] == "kvexp":
        name, fields = cls.name, option(group, cls.name)
        if fields.get("_target_", "").rpartition(".")[2] != cls.__name__:
            raise ConfigError(f"{cls.__name__} is no option of {group}; give its name instead")
        known = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    else:
        # The class as it was loaded from its file; else as its file is now.
        loaded_ones = (users for users in admitted(group).values() if users.cls is cls and users.reference is not None)
        user_class = next(loaded_ones, None) or in_its_file(cls)
        name, known = make_option(user_class), settings_of_class(user_class.cls)
    item = item() if isinstance(item, type) else item
    values = {key: getattr(item, key) for key in settings_of_class(cls)}
    changed = {key: value for key, value in values.items() if known.get(key, MISSING) != value}
    return [f"{group}={name}", *(_override(f"{group}.{key}", value) for key, value in changed.items())]


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
        return quoted(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(_literal(item, key) for item in value) + "]"
    raise ConfigError(f"{key} must be a number, a text, true or false, None or a list of those, got {value!r}")


def job_of(overrides: list[str]) -> HydraJob:
    """The job that a command line of these words would run; ConfigError for words that cannot be."""
    check_groups(overrides)
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
