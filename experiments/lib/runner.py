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

from experiments.lib.divergence_figure import draw_divergence
from experiments.lib.exhibits import ROOT, Exhibit, full_name, load, sweeps
from experiments.lib.made import Made
from experiments.lib.pages import VERDICT, recorded
from experiments.lib.provenance import provenance_of
from experiments.lib.real_scale import REAL, Command, commands
from experiments.lib.sweep import smaller
from experiments.lib.titles import exhibit_title
from kvexp.util import ConfigError


@dataclass(frozen=True)
class Asked:
    """What is wanted of every exhibit; given: overrides of its sweeps, "KEY=VALUE" or "SWEEP:KEY=VALUE" for one.

    data: at the real scale the folder of rows, "hub", or None for kvexp's own articles.
    """

    scale: str
    outputs: Path
    smoke: bool = False
    given: tuple[str, ...] = ()
    data: str | None = None

    def commands(self, name: str) -> list[Command]:
        """The sweeps of an exhibit at this scale, and what they need to find their rows."""
        if self.scale == REAL:
            return commands(name, self.data)
        return [Command(each, (), "") for each in sweeps(name, self.scale)]

    def overrides(self, sweep: str) -> list[str]:
        """Those of `given` that this sweep takes, whichever scale it is of."""
        found = []
        for word in self.given:
            of, colon, _ = word.partition("=")[0].partition(":")
            if not colon or of == sweep.rpartition("/")[2]:
                found.append(word[len(of) + 1 :] if colon else word)
        return found


def make(name: str, asked: Asked) -> Made:
    """ConfigError where a job fails, the yaml of this scale is missing, or the exhibit has no real scale."""
    start, name, exhibit = time.process_time(), full_name(name), load(name)
    if asked.scale == REAL and exhibit.testbed_only:
        raise ConfigError(f"{name} stays at the testbed: {exhibit.testbed_only}")
    folder = asked.outputs / "exhibits" / (name if asked.scale == "testbed" else f"{name}_{asked.scale}")
    folder.mkdir(parents=True, exist_ok=True)
    frame, divergence = _frames(name, exhibit, asked, folder)
    table = exhibit.table(frame)
    holds, words = exhibit.holds(table)
    again = None
    if exhibit.divergence is not None and divergence is not None and len(divergence):
        again = exhibit.divergence(divergence)
        divergence.drop(columns=["scores", "sums", "counts"]).to_csv(folder / "divergence.csv", index=False)
        picture = Figure()
        draw_divergence(divergence, picture)
        save(picture, folder, "divergence")
    write(name, exhibit, table, folder, holds, words, again)
    about = provenance_of(asked.outputs, frame, asked.commands(name)) if asked.scale == REAL and len(frame) else None
    return Made(name, table, holds, words, time.process_time() - start, folder, again, about)


def _frames(name: str, exhibit: Exhibit, asked: Asked, folder: Path) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """What the exhibit's table is made of, and the divergence of its runs where one is judged.

    What the sweep prints goes to sweep.log in the folder.
    """
    from experiments.lib.data import frame_of
    from experiments.lib.divergence import divergence_frame, measure_missing
    from experiments.lib.measure import measured
    from experiments.lib.sweep import late, limit_of, sweep

    wanted = asked.commands(name)
    for each in wanted:
        if not (ROOT / "conf" / "experiment" / f"{each.experiment}.yaml").exists():
            raise ConfigError(f"{name} has no sweep at this scale (conf/experiment/{each.experiment}.yaml)")
    hashes: list[str] = []
    parts: list[pd.DataFrame] = []
    experiments = list(dict.fromkeys(each.experiment for each in wanted))
    given = [word for each in experiments for word in asked.overrides(each)]
    given += [word for each in wanted for word in each.overrides]
    small = {each: smaller(each) if asked.smoke else [] for each in experiments}
    limits = {limit_of(each, [*small[each], *asked.overrides(each)]) for each in experiments}
    if len(limits) > 1:
        raise ConfigError(f"the sweeps {', '.join(experiments)} need one limit, got {sorted(map(str, limits))}")
    with (
        (folder / "sweep.log").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        judged = exhibit.divergence is not None and asked.scale == REAL
        for each in wanted:
            own = [*each.overrides, *asked.overrides(each.experiment)]
            overrides = [f"outputs_dir={asked.outputs}", *small[each.experiment], *map(late, own)]
            if exhibit.measure is not None:
                parts.append(measured(name, each.experiment, overrides, asked.outputs / "collected", own))
                continue
            # The pass costs as much as the answers do: only where a claim is judged by it.
            with_pass = [f"divergence={str(judged).lower()}"]
            hashes += [found for found in sweep(each.experiment, [*overrides, *with_pass]) if found not in hashes]
        if judged and hashes:
            measure_missing(asked.outputs, hashes)
    if parts:
        return pd.concat(parts, ignore_index=True), None
    if not hashes:
        return pd.DataFrame(), None
    frame = frame_of(asked.outputs, hashes, experiments, *limits, given=given)
    return frame, divergence_frame(asked.outputs, frame, *limits) if judged else None


def write(
    name: str,
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
    lines = [f"# {exhibit_title(name)}", "", exhibit.claim, "", f"**{VERDICT[holds]}**: {words}", ""]
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
    rows = [["" if pd.isna(cell) else _cell(cell) for cell in row] for row in shown.itertuples(index=False)]
    lines = [list(map(str, shown.columns)), ["---"] * shown.shape[1], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def results(names: Sequence[str], asked: Asked, workers: int) -> Iterator[tuple[str, Made | str]]:
    """(name, what was made or why it could not be) as each is ready; those that took longest when recorded come first.

    Processes that want the same run wait for each other (`kvexp.run.store`): none is made twice.
    """
    if workers == 1 or len(names) == 1:
        yield from ((name, attempt(name, asked)) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    with ProcessPoolExecutor(workers, spawn, initializer=_share, initargs=(workers,)) as pool:
        waiting = {pool.submit(attempt, name, asked): name for name in longest_first(names, asked.scale)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:  # interrupted: those that have not begun do not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
