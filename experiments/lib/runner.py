"""Exhibits made one after the other or in parallel: run or measure what is missing, tabulate, draw and judge."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pandas as pd
from matplotlib.figure import Figure

import kvexp
from experiments.lib import tables
from experiments.lib.draw import draw_divergence
from experiments.lib.exhibits import HERE, REAL, Exhibit, full_name, load, sweeps
from experiments.lib.real_scale import Command, commands
from experiments.lib.record import VERDICT, Made, provenance_of, recorded
from experiments.lib.sweep import jobs, late, limit_of, planned_seconds, smaller, sweep
from experiments.lib.tables import KEYS, frame_of, spelled, without
from experiments.lib.verdicts import divergence_frame, measure_missing
from kvexp.run.store import run_hash
from kvexp.util.errors import ConfigError
from kvexp.util.machine import use_threads

OUTPUTS = Path("outputs/reproduce")  # a folder of their own: hundreds of runs, which tables of `outputs` would list


@dataclass(frozen=True)
class Setup:
    """What is wanted of every exhibit; given: overrides of its sweeps, "KEY=VALUE" or "SWEEP:KEY=VALUE" for one.

    data: at the real scale the folder of rows, "hub", or None for kvexp's own articles. shows: whether the progress of
    its sweeps is printed as well as logged.
    """

    scale: str
    outputs: Path
    smoke: bool = False
    given: tuple[str, ...] = ()
    data: str | None = None
    shows: bool = False

    def commands(self, name: str) -> list[Command]:
        """The sweeps of an exhibit at this scale, and what they need to find their rows."""
        if self.scale == REAL:
            return commands(name, self.data)
        return [Command(experiment, (), "") for experiment in sweeps(name, self.scale)]

    def words(self, name: str, command: Command) -> list[str]:
        """All overrides of one of an exhibit's sweeps."""
        given = [*command.overrides, *self.overrides(command.experiment)]
        small = smaller(command.experiment) if self.smoke else []
        # The pass costs as much as the answers do: only where a claim is judged by it.
        judged = [] if load(name).measure else [f"divergence={str(self.judged(name)).lower()}"]
        return [f"outputs_dir={self.outputs}", *small, *map(late, given), *judged]

    def judged(self, name: str) -> bool:
        """Whether the claim is judged by divergence too."""
        return load(name).divergence is not None and self.scale == REAL

    def overrides(self, sweep: str) -> list[str]:
        """The words of `given` that this sweep takes, at any scale."""
        words = []
        for word in self.given:
            of, colon, _ = word.partition("=")[0].partition(":")
            if not colon or of == sweep.rpartition("/")[2]:
                words.append(word[len(of) + 1 :] if colon else word)
        return words


def make(name: str, setup: Setup) -> Made:
    """ConfigError where a job fails, the yaml of this scale is missing, or the exhibit has no real scale."""
    start, name, exhibit = time.process_time(), full_name(name), load(name)
    if setup.scale == REAL and exhibit.testbed_only:
        raise ConfigError(f"{name} stays at the testbed: {exhibit.testbed_only}")
    folder = setup.outputs / "exhibits" / (name if setup.scale == "testbed" else f"{name}_{setup.scale}")
    folder.mkdir(parents=True, exist_ok=True)
    frame, divergence = _frames(name, exhibit, setup, folder)
    table = exhibit.table(frame)
    holds, words = exhibit.holds(table)
    again = None
    if exhibit.divergence is not None and divergence is not None and len(divergence):
        again = exhibit.divergence(divergence)
        divergence.drop(columns=["scores", "sums", "counts"]).to_csv(folder / "divergence.csv", index=False)
        picture = Figure()
        draw_divergence(divergence, picture)
        save(picture, folder, "divergence")
    write(exhibit, table, folder, holds, words, again)
    about = provenance_of(setup.outputs, frame, setup.commands(name)) if setup.scale == REAL and len(frame) else None
    return Made(name, table, holds, words, time.process_time() - start, folder, again, about)


class _Both(io.TextIOBase):
    """What is printed goes to both files."""

    def __init__(self, *files: TextIO) -> None:
        self.files = files

    def write(self, text: str) -> int:
        for file in self.files:
            file.write(text)
            file.flush()
        return len(text)


def _frames(name: str, exhibit: Exhibit, setup: Setup, folder: Path) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """What the exhibit's table is made of, and the divergence of its runs where one is judged.

    What the sweep prints goes to sweep.log in the folder.
    """
    wanted = setup.commands(name)
    if not wanted and load(exhibit.runs_of or name).at:
        raise ConfigError(f"{name} has no sweep at the {setup.scale} scale")
    hashes: list[str] = []
    parts: list[pd.DataFrame] = []
    experiments = list(dict.fromkeys(command.experiment for command in wanted))
    given = [word for command in experiments for word in setup.overrides(command)]
    given += [word for command in wanted for word in command.overrides]
    small = {experiment: smaller(experiment) if setup.smoke else [] for experiment in experiments}
    limits = {limit_of(experiment, [*small[experiment], *setup.overrides(experiment)]) for experiment in experiments}
    if len(limits) > 1:
        raise ConfigError(f"the sweeps {', '.join(experiments)} need one limit, got {sorted(map(str, limits))}")
    with (
        (folder / "sweep.log").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(_Both(log, sys.stdout) if setup.shows else log),
        contextlib.redirect_stderr(log),
    ):
        judged = setup.judged(name)
        for command in wanted:
            overrides = setup.words(name, command)
            if exhibit.measure is not None:
                own_words = [*command.overrides, *setup.overrides(command.experiment)]
                parts.append(measured(name, command.experiment, overrides, setup.outputs / "collected", own_words))
                continue
            hashes += [key for key in sweep(command.experiment, overrides) if key not in hashes]
        if judged and hashes:
            measure_missing(setup.outputs, hashes)
    if parts:
        return pd.concat(parts, ignore_index=True), None
    if not hashes:
        return pd.DataFrame(), None
    frame = frame_of(setup.outputs, hashes, experiments, *limits, given=given)
    return frame, divergence_frame(setup.outputs, frame, *limits) if judged else None


def seconds_left(name: str, setup: Setup) -> float | None:
    """Seconds that an exhibit takes on this machine, without runs that are there; None where that is not known."""
    wanted = setup.commands(name)
    if not wanted or load(name).measure is not None:
        return None
    try:
        return sum(planned_seconds(command.experiment, setup.words(name, command)) for command in wanted)
    except ConfigError:  # the sweep says what is wrong
        return None


def write(
    exhibit: Exhibit,
    table: pd.DataFrame,
    folder: Path,
    holds: bool | None,
    words: str,
    again: tuple[bool | None, str] | None = None,
) -> None:
    """table.csv, table.md, figure.png, figure.pdf; an exhibit with nothing to draw leaves no figure.

    again: the verdict and sentence of the claim by divergence.
    """
    table.to_csv(folder / "table.csv", index=False)
    lines = [f"# {exhibit.title}", "", exhibit.claim, "", f"**{VERDICT[holds]}**: {words}", ""]
    lines += [f"By divergence **{VERDICT[again[0]]}**: {again[1]}", ""] if again is not None else []
    lines.append(markdown(table))
    (folder / "table.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    figure = Figure()
    exhibit.draw(table, figure)
    save(figure, folder, "figure")


def save(figure: Figure, folder: Path, name: str) -> None:
    """NAME.png and NAME.pdf; the same table gives the same files."""
    for ending in ("png", "pdf"):
        about = {"CreationDate": None} if ending == "pdf" else None
        figure.savefig(folder / f"{name}.{ending}", dpi=200, metadata=about)


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown, numbers to four digits, columns without any value left out."""
    shown = table.dropna(axis=1, how="all")
    shown = shown[[name for name in shown if not shown[name].astype(str).eq("").all()]]
    shown = shown.map(lambda cell: "" if pd.isna(cell) else f"{cell:.4g}" if isinstance(cell, float) else str(cell))
    return tables.markdown(list(map(str, shown.columns)), *shown.itertuples(index=False))


def results(names: Sequence[str], setup: Setup, workers: int) -> Iterator[tuple[str, Made | str]]:
    """(name, what was made or why it could not be) as each is ready; those that took longest when recorded come first.

    Processes that want the same run wait for each other (`kvexp.run.store`): none is made twice.
    """
    if workers == 1 or len(names) == 1:
        yield from ((name, attempt(name, setup)) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    with ProcessPoolExecutor(workers, spawn, initializer=_share, initargs=(workers,)) as pool:
        waiting = {pool.submit(attempt, name, setup): name for name in longest_first(names, setup.scale)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:  # interrupted: those that have not begun do not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def attempt(name: str, setup: Setup) -> Made | str:
    """Make one exhibit; any error is returned as text, so that the others are still made."""
    try:
        return make(name, setup)
    except ConfigError as error:
        return f"error: {error}"
    except Exception:
        return traceback.format_exc()


def longest_first(names: Sequence[str], scale: str) -> list[str]:
    """The names by recorded time, longest first, so that no process is left with the longest at the end."""
    known = recorded(scale)
    return sorted(names, key=lambda name: -(known.get(name, {}).get("seconds") or 0))


def _share(workers: int) -> None:
    """The cores divided among the processes."""
    use_threads(max(1, (os.cpu_count() or 1) // workers))


def measured(
    name: str, experiment: str, overrides: Sequence[str], folder: Path, given: Sequence[str] = ()
) -> pd.DataFrame:
    """What an exhibit's `measure` finds of every job of a sweep, with the job's labels in front.

    folder: where it is kept, and read if it is there. given: overrides that are no setting of the
    exhibit's own, as in `lib.tables.frame_of`.
    """
    from kvexp.run.model_spec import load as load_model
    from kvexp.run.prompts import prompt_of  # late: exhibits whose runs are all there need no torch

    frames, measure = [], load(name).measure
    assert measure is not None
    for settings in jobs(experiment, overrides):
        # The key changes with whatever can change a number: the run, its length, and the code that measures.
        about = (run_hash(settings.identity), str(settings.limit), str(kvexp.NUMERICS), *sources(measure.__module__))
        key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
        path = folder / f"{name}-{key}.csv"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            settings.task.check()
            model, tokenizer = load_model(settings.model)
            prompts = [prompt_of(settings, model, tokenizer, example) for example in settings.task.examples()]
            measure(model, [p.ids for p in prompts if p.skipped is None], settings).to_csv(draft, index=False)
            draft.replace(path)
        frame = pd.read_csv(path)
        labels = {key: settings.labels.get(key) for key in KEYS}
        labels |= {"setting": without(spelled(settings.labels.get("setting")), given)}
        frames.append(pd.concat([pd.DataFrame([labels] * len(frame), columns=KEYS), frame], axis=1))
    return pd.concat(frames, ignore_index=True)


def sources(module: str) -> list[str]:
    """The text of a module of `experiments` and of all those it imports, directly or not, by name."""
    texts: dict[str, str] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        package, *parts = name.split(".")
        path = HERE.joinpath(*parts).with_suffix(".py")
        if package == "experiments" and name not in texts and path.exists():
            texts[name] = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(texts[name])):
                if isinstance(node, ast.ImportFrom) and node.module:
                    wanted += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                elif isinstance(node, ast.Import):
                    wanted += [alias.name for alias in node.names]
    return [texts[name] for name in sorted(texts)]
