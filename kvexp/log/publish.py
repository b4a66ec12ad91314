"""Run folders to wandb runs, and each group of them to one more run with a table and charts."""

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.log.mode import PROJECT, check
from kvexp.record import Run
from kvexp.results import table
from kvexp.results.columns import parts, with_n
from kvexp.results.divergence_print import divergence_frames
from kvexp.results.question_place import titled

SAMPLES = 20
DataFrame = Any  # a pandas one, as `table` returns it
MARKS = (99.0, 99.9)
DIVERGENCE = ("kl", "kl_low", "kl_high", "top1", "ppl_ratio", "verdict_kl", "verdict_top1")


def publish(
    run_paths: Iterable[str | Path],
    project: str = PROJECT,
    mode: str | None = None,
    directory: str | Path | None = None,
    samples: int = SAMPLES,
    experiment: str | None = None,
) -> list[Path]:
    """Publish these run folders, and per group one more run that holds the sweep's chart and table.

    mode: online, offline or disabled; None: WANDB_MODE, else online where an account is configured, else offline.
    experiment: the group of all of them (default: the experiment each was asked for by, else its model/task).
    directory: where wandb makes its folder `wandb` (default: beside the run folders). Returns the folders it wrote.
    The verdicts are those of a table of the given runs: publish a sweep at once, not run by run.
    """
    mode = check(project, mode)
    written: list[Path] = []
    for outputs, paths in _by_parent(run_paths).items():
        loaded = {run.hash: run for run in map(Run.load, paths)}
        df = table(outputs, {"hash": list(loaded)})
        divergence, _ = divergence_frames(outputs, {"hash": list(loaded)})
        place = Path(directory) if directory is not None else outputs
        place.mkdir(parents=True, exist_ok=True)  # wandb makes a folder `wandb` in it
        groups = [[experiment] if experiment else _groups(row) for row in _records(df)]
        for row, names in zip(_records(df), groups, strict=True):
            row |= summary_of(divergence, row["hash"])
            written.append(_publish_run(loaded[row["hash"]], row, names[-1], project, mode, place, samples))
        for name in dict.fromkeys(name for names in groups for name in names):
            part = df[[name in names for names in groups]]
            own = divergence[divergence["hash"].isin(part["hash"])] if len(divergence) else divergence
            written.append(_publish_sweep(name, part, own, project, mode, place))
    return [path for path in written if path.is_dir()]  # disabled writes nothing


def _groups(row: Mapping[str, Any]) -> list[str]:
    """The experiments that asked for this run, or else its model and task."""
    if not _missing(row.get("experiment")) and row["experiment"]:
        return str(row["experiment"]).split(", ")
    return [_title(row, "/")]


def _title(row: Mapping[str, Any], between: str) -> str:
    return between.join(str(row[name]) for name in ("model", "task") if not _missing(row.get(name))) or "runs"


def _by_parent(run_paths: Iterable[str | Path]) -> dict[Path, list[Path]]:
    groups: dict[Path, list[Path]] = {}
    for path in map(Path, run_paths):
        groups.setdefault(path.parent, []).append(path)
    return groups


def _publish_run(
    run: Run, row: Mapping[str, Any], group: str, project: str, mode: str, place: Path, samples: int
) -> Path:
    labels = run.asked[-1]
    parts = [labels.get(name) for name in ("task", "method", "kv_ratio")]
    record = {"hash": run.hash, "numerics": run.numerics, "baseline": run.baseline, "labels": labels, "env": run.env}
    with _started(
        **{"project": project, "mode": mode, "dir": place, "id": run.hash, "config": {**run.config, "kvexp": record}},
        group=group,
        job_type=str(labels.get("method", "run")),
        name=" ".join(str(part) for part in parts if part is not None),
        tags=[f"{row['status']}", f"verdict99: {row['verdict99']}"],
    ) as published:
        published.log({"examples": _samples(run.rows()[:samples])})
        published.summary.update(_plain(row))
        return Path(published.dir).parent


def summary_of(divergence: DataFrame, key: str) -> dict[str, Any]:
    """What a run's summary says of its divergence: `divergence.own.kl` and the like, nothing where none is measured."""
    found: dict[str, Any] = {}
    for row in _records(divergence[divergence["hash"] == key]) if len(divergence) else ():
        found |= {f"divergence.{row['text']}.{name}": row[name] for name in DIVERGENCE}
    return found


def _publish_sweep(group: str, df: DataFrame, divergence: DataFrame, project: str, mode: str, place: Path) -> Path:
    """The table of all runs and, per model and task, quality and divergence against kv_ratio and against bytes."""
    import wandb

    key = hashlib.sha256(" ".join(sorted(df["hash"])).encode()).hexdigest()[:16]
    with _started(
        **{"project": project, "mode": mode, "dir": place, "id": f"sweep-{key}", "job_type": "sweep"},
        **{"group": group, "name": f"sweep {group}", "config": {"hashes": list(df["hash"])}},
    ) as published:
        whole = [_plain(row, keep_missing=True) for row in _records(df)]
        columns = list(df.columns)
        cells: list[Iterable[Any]] = [[row[name] for name in columns] for row in whole]
        published.log({"runs": wandb.Table(columns, cells)})
        for title, rows in charts(df).items():
            metric = rows[0]["headline"]
            for axis in ("kv_ratio", "kv_bytes"):
                data = wandb.Table(["line", axis, f"{metric}_of_full"], _points(rows, axis, metric))
                words = f"{titled(title, (row.get('question') for row in rows))}: {metric}, % of full"
                chart = wandb.plot.line(data, axis, f"{metric}_of_full", stroke="line", title=words)
                published.log({chart_key(axis, title): chart})
        for title, rows in divergence_charts(divergence).items():
            for axis in ("kv_ratio", "kv_bytes"):
                points = sorted(_along(rows, axis, "kl"), key=lambda point: point[1])
                data = wandb.Table(["line", axis, "log10_kl"], [[line, x, math.log10(kl)] for line, x, kl in points])
                words = f"{titled(title, (row.get('question') for row in rows))}: log10 of KL, nats"
                chart = wandb.plot.line(data, axis, "log10_kl", stroke="line", title=words)
                published.log({divergence_key(axis, title): chart})
        published.summary.update({"n_runs": len(df), **_verdict_counts(df)})
        return Path(published.dir).parent


def charts(df: DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Rows that have a percentage, by model, task and NUMERICS. A void or failed run has none."""
    found: dict[str, list[dict[str, Any]]] = {}
    if df.empty:
        return found
    for title, _, part in parts(df):
        rows = _records(
            with_n(part.assign(setting=part["setting"].fillna("")) if "setting" in part else part.assign(setting=""))
        )
        kept = [
            row for row in rows if row["headline"] is not None and not _missing(row.get(f"{row['headline']}_of_full"))
        ]
        found |= {title: kept} if kept else {}
    return found


def divergence_charts(divergence: DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Rows of `divergence_table` by model, task, NUMERICS and kind of text; a KL of 0 has no place on a log axis."""
    found: dict[str, list[dict[str, Any]]] = {}
    if divergence.empty:
        return found
    for title, labels, part in parts(divergence, "text"):
        filled = part.assign(setting=part["setting"].fillna("") if "setting" in part else "")
        if kept := [row for row in _records(with_n(filled)) if row["kl"] > 0]:
            found[f"{title}, {labels['text']}"] = kept
    return found


def divergence_key(axis: str, title: str) -> str:
    """What a sweep's chart of divergence is logged as."""
    return f"divergence vs {axis}: {title}"


def chart_key(axis: str, title: str) -> str:
    """What a sweep's chart is logged as; wandb keeps its points under this and `_table`."""
    return f"quality vs {axis}: {title}"


def _points(rows: Sequence[Mapping[str, Any]], axis: str, metric: str) -> list[Iterable[Any]]:
    """(line, x, percent) by x, and the two marks as lines of their own across the chart.

    A line is a method with one setting: two settings of a method are two lines, not one that goes to and fro.
    """
    points = sorted(_along(rows, axis, f"{metric}_of_full"), key=lambda point: point[1])
    ends = [points[0][1], points[-1][1]] if points else []
    return points + [[f"{mark:g} % mark", end, mark] for mark in MARKS for end in ends]


def _along(rows: Sequence[Mapping[str, Any]], axis: str, value: str) -> list[Any]:
    """[line, x, value] of the rows that have a place on the axis."""
    names = [[str(row[name]) for name in ("method", "setting") if row.get(name)] for row in rows]
    points = [[" ".join(name), row.get(axis), row[value]] for name, row in zip(names, rows, strict=True)]
    return [point for point in points if isinstance(point[1], int | float) and math.isfinite(point[1])]


def _verdict_counts(df: DataFrame) -> dict[str, int]:
    names = ("verdict99", "verdict999")
    return {f"{name}.{verdict}": int(n) for name in names for verdict, n in df[name].value_counts().items()}


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


def _records(df: DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in df.to_dict("records")]


def _plain(row: Mapping[str, Any], keep_missing: bool = False) -> dict[str, Any]:
    """Python values; what is missing is left out, or None."""
    values = {
        name: None if _missing(value) else getattr(value, "item", lambda v=value: v)() for name, value in row.items()
    }
    return {name: value for name, value in values.items() if keep_missing or value is not None}


def _missing(value: Any) -> bool:
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and not math.isfinite(value))
