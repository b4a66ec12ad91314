"""Runs in Weights & Biases: a run each, and a run per sweep with its table and figures."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import math
import netrc
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd

from kvexp.results.blocks import absent, records
from kvexp.results.divergence import frame_of
from kvexp.results.read import Runs, add_choice, chosen_by, read_runs, unmatched
from kvexp.results.table import quality_table, title_of
from kvexp.run.store import TEXTS, Run
from kvexp.util.errors import ConfigError
from kvexp.util.output import say, tells_errors, tells_warnings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROJECT = "kvexp"
MODES = ("online", "offline", "disabled")
NOT_IN_NAMES = "/\\#?%:"  # wandb's rule for projects


def check(project: object, mode: object) -> str:
    """The mode to publish in; ConfigError if wandb could not take these settings, or is not there."""
    if not isinstance(project, str) or not project.strip():
        raise ConfigError(f"log.project must be a name, got {project!r}")
    if len(project) > 128 or (wrong := [letter for letter in NOT_IN_NAMES if letter in project]):
        problem = f"{len(project)} characters" if len(project) > 128 else " ".join(wrong)
        raise ConfigError(f"log.project may have 128 characters and none of {' '.join(NOT_IN_NAMES)}, got {problem}")
    if mode is not None and mode not in MODES:
        raise ConfigError(f"log.mode must be one of auto, {', '.join(MODES)}, got {mode!r}")
    mode = mode or os.environ.get("WANDB_MODE") or ("online" if has_account() else "offline")
    if mode not in MODES:
        raise ConfigError(f"the variable WANDB_MODE must be one of {', '.join(MODES)}, got {mode!r}: or set log.mode")
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("log=wandb needs wandb, which is not installed; run: pip install 'kvexp[eval]'")
    return str(mode)


def has_account() -> bool:
    """Whether wandb would find a key where it looks for one: its variable, or the netrc entry `wandb login` makes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


SAMPLES = 20  # rows of a run that are published as text
DIVERGENCE = ("kl", "kl_low", "kl_high", "top1", "ppl_ratio", "verdict_kl", "verdict_top1")


def publish(
    run_paths: Iterable[str | Path],
    project: str = PROJECT,
    mode: str | None = None,
    experiment: str | None = None,
) -> list[Path]:
    """Publish these run folders, and per group one more run that holds the sweep's table and figures.

    mode: online, offline or disabled; None: WANDB_MODE, else online where an account is configured, else offline.
    experiment: the group of all of them (default: the experiment each was asked for by, else its model/task).
    Returns the folders that wandb wrote, under `wandb` in the folder of the run folders: one of each run, however often
    it was published. Verdicts are corrected for the number of the given runs: publish a sweep at once, not run by run.
    """
    mode = check(project, mode)
    written: list[Path] = []
    parents: dict[Path, list[Path]] = {}
    for path in map(Path, run_paths):
        parents.setdefault(path.parent, []).append(path)
    for outputs, paths in parents.items():
        loaded = {run.hash: run for run in map(Run.load, paths)}
        runs = read_runs(outputs, {"hash": list(loaded)})
        df, divergence = quality_table(runs), frame_of(runs)
        rows = [row | summary_of(divergence, row["hash"]) for row in records(df)]
        groups = [[experiment] if experiment else _groups(row) for row in rows]
        for row, names in zip(rows, groups, strict=True):
            written.append(_publish_run(loaded[row["hash"]], row, names[-1], project, mode))
        for name in dict.fromkeys(name for names in groups for name in names):
            group = [row for row, names in zip(rows, groups, strict=True) if name in names]
            inside = [folder for folder in runs.shown if folder.run.hash in {row["hash"] for row in group}]
            written.append(_publish_sweep(name, group, Runs(outputs, runs.everything, inside, []), project, mode))
    return [path for path in written if path.is_dir()]  # disabled writes nothing


def _groups(row: Mapping[str, Any]) -> list[str]:
    """The experiments that asked for this run, or else its model and task."""
    experiments = row.get("experiment")
    return [title_of(row, "/")] if _missing(experiments) or not experiments else str(experiments).split(", ")


def _publish_run(run: Run, row: Mapping[str, Any], group: str, project: str, mode: str) -> Path:
    labels = run.asked[-1]
    named = [labels.get(name) for name in ("task", "method", "kv_ratio")]
    record = {"hash": run.hash, "numerics": run.numerics, "baseline": run.baseline, "labels": labels, "env": run.env}
    with _started(
        **{"project": project, "mode": mode, "dir": run.path.parent, "id": run.hash, "group": group},
        config={**run.config, "kvexp": record},
        job_type=str(labels.get("method", "run")),
        name=" ".join(str(label) for label in named if label is not None),
        tags=[f"{row['status']}", f"verdict99: {row['verdict99']}"],
    ) as published:
        published.log({"examples": _samples(run.rows()[:SAMPLES])})
        published.summary.update({name: value for name, value in _plain(row).items() if value is not None})
        return Path(published.dir).parent


def summary_of(divergence: pd.DataFrame, key: str) -> dict[str, Any]:
    """What a run's summary says of its divergence: `divergence.own.kl` and the like, nothing where none is measured."""
    columns: dict[str, Any] = {}
    for row in records(divergence[divergence["hash"] == key]) if len(divergence) else ():
        columns |= {f"divergence.{row['text']}.{name}": row[name] for name in DIVERGENCE}
    return columns


def _publish_sweep(group: str, rows: Sequence[Mapping[str, Any]], runs: Runs, project: str, mode: str) -> Path:
    """The table of all runs, a row each, and their `figures`."""
    import wandb
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # By the group too: two experiments may have asked for the same runs.
    hashes = [row["hash"] for row in rows]
    key = hashlib.sha256(" ".join([group, *sorted(hashes)]).encode()).hexdigest()[:16]
    with _started(
        **{"project": project, "mode": mode, "dir": runs.outputs, "id": f"sweep-{key}", "job_type": "sweep"},
        **{"group": group, "name": f"sweep {group}", "config": {"hashes": hashes}},
    ) as published:
        columns = dict.fromkeys(name for row in rows for name in row)
        cells: list[Iterable[Any]] = [list(map(_plain(row).get, columns)) for row in rows]
        published.log({"runs": wandb.Table(list(columns), cells)})
        for name, figure in figures(runs):
            canvas: Any = FigureCanvasAgg(figure)
            canvas.draw()
            published.log({name: wandb.Image(np.asarray(canvas.buffer_rgba()))})
        verdicts = Counter(f"{name}.{row[name]}" for row in rows for name in ("verdict99", "verdict999"))
        published.summary.update({"n_runs": len(rows), **verdicts})
        return Path(published.dir).parent


def figures(runs: Runs) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of quality and divergence against the budget and against bytes, as `kvexp results --plot` draws
    them; none where there is nothing to draw.
    """
    from kvexp.results import plots, views  # late: they wait for matplotlib

    drawings: dict[str, Callable[[], Figure]] = {
        "quality": lambda: plots.draw_quality(runs.frame(quality_table), None),
        **{f"divergence along {text}": partial(plots.draw_divergence, runs, "kv_ratio", text) for text in TEXTS},
        "bytes": lambda: plots.draw_bytes(views.bytes_table(runs)),
    }
    for name, draw in drawings.items():
        with contextlib.suppress(ConfigError):
            yield name, draw()


def _samples(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    metrics = list(dict.fromkeys(name for row in rows for name in row.get("metrics") or {}))
    plain, texts = ("example", "skipped", "prompt_tokens", "new_tokens"), ("output", "reference")
    data: list[Iterable[Any]] = [
        [row.get(name) for name in plain]
        + [(row.get("metrics") or {}).get(name) for name in metrics]
        + [row.get(name) for name in texts]
        for row in rows
    ]
    return wandb.Table([*plain, *metrics, *texts], data, allow_mixed_types=True)


@contextlib.contextmanager
def _started(**settings: Any) -> Iterator[Any]:
    """A wandb run of its own (another may be active), silent, without source code, console and machine statistics."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True)
    if settings["mode"] == "online":  # only a server knows earlier runs
        settings["resume"] = "allow"
    try:
        run = wandb.init(**settings, reinit="create_new", settings=quiet)
    except wandb.Error as error:
        offline = "publish with mode=offline (it is the default without an account) and run `wandb sync` later"
        raise ConfigError(f"wandb does not start ({error}); the runs are safe on disk: {offline}") from error
    with run:
        yield run
    if settings["mode"] != "disabled":
        _remove_earlier(Path(run.dir).parent, settings["id"])


def _remove_earlier(written: Path, key: str) -> None:
    """Remove what wandb wrote of this run before, whole or interrupted: `wandb sync` would upload it too."""
    for folder in written.parent.glob(f"*run-*-{key}"):
        if folder != written:
            shutil.rmtree(folder, ignore_errors=True)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Row with plain Python values, None for what is missing."""
    return {
        name: None if _missing(value) else getattr(value, "item", lambda v=value: v)() for name, value in row.items()
    }


def _missing(value: Any) -> bool:
    return absent(value) or (isinstance(value, float) and not math.isfinite(value))


DESCRIPTION = """Replays recorded runs into Weights & Biases: kvexp log outputs/ [--project P] [--online].

Everything comes from the run folders, so publishing can wait, fail or be repeated without touching a number. A run's id
is its hash: published again, it is the same run there."""


@tells_warnings
@tells_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvexp log`; exit code 0, 1 where no run was chosen, 2 for a wrong request."""
    parser = argparse.ArgumentParser(prog="kvexp log", description=DESCRIPTION)
    parser.add_argument("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    parser.add_argument("--project", default=PROJECT, help=f"wandb project (default: {PROJECT})")
    add_choice(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--online", action="store_const", dest="mode", const="online", help="even if no account is found")
    how.add_argument("--offline", action="store_const", dest="mode", const="offline", help="even if one is found")
    args = parser.parse_args(argv)
    paths = [folder.run.path for folder in read_runs(args.outputs, chosen_by(args)).ran]
    if not paths:
        say(unmatched(args.outputs, chosen_by(args)))
        return 1
    mode = check(args.project, args.mode)
    written = publish(paths, args.project, mode)
    say(f"published {len(paths)} runs to project {args.project}, {mode}")
    if mode == "offline" and written:
        say(f"upload them with: wandb sync {written[0].parent}/offline-run-*")
    return 0
