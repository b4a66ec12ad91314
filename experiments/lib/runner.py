"""Exhibits made one after the other or in parallel: run what is missing, tabulate, draw and judge."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.exhibits import ROOT, Exhibit, full_name, load, sweeps
from experiments.lib.pages import VERDICT, recorded
from experiments.lib.sweep import smaller
from experiments.lib.titles import exhibit_title
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """What is wanted of every exhibit; given: overrides of its sweeps, "KEY=VALUE" or "SWEEP:KEY=VALUE" for one."""

    scale: str
    outputs: Path
    smoke: bool = False
    given: tuple[str, ...] = ()

    def overrides(self, sweep: str) -> list[str]:
        """Those of `given` that this sweep takes, whichever scale it is of."""
        found = []
        for word in self.given:
            of, colon, _ = word.partition("=")[0].partition(":")
            if not colon or of == sweep.rpartition("/")[2]:
                found.append(word[len(of) + 1 :] if colon else word)
        return found


@dataclass(frozen=True)
class Made:
    """One exhibit: its table, what became of the claim, and the CPU seconds it took now (less where runs existed).

    CPU seconds (of all threads, user and system) say what an exhibit costs whatever else the machine does.
    """

    name: str
    table: pd.DataFrame
    holds: bool | None
    words: str
    seconds: float
    folder: Path


def make(name: str, asked: Asked) -> Made:
    """ConfigError where a job fails or the yaml of this scale is missing."""
    start, name, exhibit = time.process_time(), full_name(name), load(name)
    folder = asked.outputs / "exhibits" / (name if asked.scale == "testbed" else f"{name}_{asked.scale}")
    folder.mkdir(parents=True, exist_ok=True)
    table = exhibit.table(_frame(name, exhibit, asked, folder))
    holds, words = exhibit.holds(table)
    write(name, exhibit, table, folder, holds, words)
    return Made(name, table, holds, words, time.process_time() - start, folder)


def _frame(name: str, exhibit: Exhibit, asked: Asked, folder: Path) -> pd.DataFrame:
    """What the exhibit's table is made of. What the sweep prints goes to sweep.log in the folder."""
    from experiments.lib.data import frame_of
    from experiments.lib.measure import measured
    from experiments.lib.sweep import late, limit_of, sweep

    wanted = sweeps(name, asked.scale)
    for experiment in wanted:
        if not (ROOT / "conf" / "experiment" / f"{experiment}.yaml").exists():
            raise ConfigError(f"{name} has no sweep at this scale (conf/experiment/{experiment}.yaml)")
    hashes: list[str] = []
    parts: list[pd.DataFrame] = []
    given = [word for experiment in wanted for word in asked.overrides(experiment)]
    small = {each: smaller(each) if asked.smoke else [] for each in wanted}
    limits = {limit_of(each, [*small[each], *asked.overrides(each)]) for each in wanted}
    if len(limits) > 1:
        raise ConfigError(f"the sweeps {', '.join(wanted)} need one limit, got {sorted(map(str, limits))}")
    with (
        (folder / "sweep.log").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        for experiment in wanted:
            own = asked.overrides(experiment)
            overrides = [f"outputs_dir={asked.outputs}", *small[experiment], *map(late, own)]
            if exhibit.measure is not None:
                parts.append(measured(name, experiment, overrides, asked.outputs / "collected", own))
                continue
            hashes += [each for each in sweep(experiment, overrides) if each not in hashes]
    if parts:
        return pd.concat(parts, ignore_index=True)
    return frame_of(asked.outputs, hashes, wanted, *limits, given=given) if hashes else pd.DataFrame()


def write(name: str, exhibit: Exhibit, table: pd.DataFrame, folder: Path, holds: bool | None, words: str) -> None:
    """table.csv, table.md, figure.png, figure.pdf; an exhibit with nothing to draw leaves no figure."""
    table.to_csv(folder / "table.csv", index=False)
    lines = [f"# {exhibit_title(name)}", "", exhibit.claim, "", f"**{VERDICT[holds]}**: {words}", "", markdown(table)]
    (folder / "table.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    figure = Figure()
    exhibit.draw(table, figure)
    for ending in ("png", "pdf"):
        # Without a date the same table gives the same file.
        about = {"CreationDate": None} if ending == "pdf" else None
        figure.savefig(folder / f"figure.{ending}", dpi=200, metadata=about)


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown, numbers to four digits, columns without any value left out."""
    shown = table.dropna(axis=1, how="all")
    shown = shown[[name for name in shown if not shown[name].astype(str).eq("").all()]]
    rows = [["" if pd.isna(cell) else _cell(cell) for cell in row] for row in shown.itertuples(index=False)]
    lines = [list(map(str, shown.columns)), ["---"] * shown.shape[1], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def results(names: Sequence[str], asked: Asked, workers: int) -> Iterator[tuple[str, Made | str]]:
    """(name, what was made or why it could not be) as each is ready; those that took longest when recorded come first.

    Processes that want the same run wait for each other (`kvexp.record`): none is made twice.
    """
    if workers == 1 or len(names) == 1:
        yield from ((name, attempt(name, asked)) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    with ProcessPoolExecutor(workers, spawn, initializer=_share, initargs=(workers,)) as pool:
        waiting = {pool.submit(attempt, name, asked): name for name in longest_first(names, asked.scale)}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def attempt(name: str, asked: Asked) -> Made | str:
    """One exhibit. A defect of one, told in full, keeps no other from being made."""
    try:
        return make(name, asked)
    except ConfigError as error:
        return f"error: {error}"
    except Exception:
        return traceback.format_exc()


def longest_first(names: Sequence[str], scale: str) -> list[str]:
    """So that no process is left alone with the longest at the end."""
    known = recorded(scale)
    return sorted(names, key=lambda name: -(known.get(name, {}).get("seconds") or 0))


def _share(workers: int) -> None:
    """The cores divided among the processes."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
