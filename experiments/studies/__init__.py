"""Studies: what no sweep needs, each a command of its own (`python -m experiments.studies.NAME --help`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.lib.tables import between
from kvexp.results.divergence import example_means
from kvexp.results.read import read_runs
from kvexp.run.guard import guard
from kvexp.run.jobs import HydraJob, runs_of
from kvexp.run.session import Session, active
from kvexp.run.settings import Settings
from kvexp.run.store import OWN
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.files import CONF
from kvexp.util.output import say, tells_errors


def composed_runs(words: Sequence[str], session: Session) -> tuple[dict[str, str], list[Settings]]:
    """(Group -> option, the runs) of the words of a command line; ConfigError for settings that cannot be."""
    guard()
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(words), return_hydra_config=True)
        choices = {str(key): str(value) for key, value in config.hydra.runtime.choices.items() if value is not None}
        plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return choices, runs_of(HydraJob(plain, list(words), choices, None), session)


@tells_errors(ConfigError, CacheError, OSError)
def carried_out(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> int:
    """Call the parsed arguments' `command`; returns its exit code, or 2 after printing an error."""
    args = parser.parse_args(words)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


def write_tables(text: str, page: Path | None, begin: str, end: str) -> None:
    """Print a study's tables, or write them into a page between its marks; ConfigError where it has no such marks."""
    if page is None:
        say(text)
    else:
        page.write_text(between(page.read_text("utf-8"), begin, end, text, page), encoding="utf-8")


KL_COLUMNS = ["numerics", "model", "task", "question", "method", "kv_ratio", "example", "kl"]


def kl_of_runs(outputs: str, experiment: str | None = None, columns: Sequence[str] = KL_COLUMNS) -> pd.DataFrame:
    """KL_COLUMNS of every example of an experiment's runs: mean nats per token along the full cache's own answer.

    experiment: None takes all runs; columns: also other labels of runs.
    """
    rows = [
        {"question": run.question, "example": example, "kl": kl}
        | {name: value for name, value in run.labels.items() if name not in ("question", "example", "kl")}
        for run in read_runs(outputs, {"experiment": experiment} if experiment else {}).ran
        for example, kl in example_means(run, OWN).items()
    ]
    return pd.DataFrame(rows, columns=list(columns))


def wide(rows: pd.DataFrame, across: Sequence[str]) -> pd.DataFrame:
    """A table with a column of `kl` for each value of the columns `across` (joined by spaces); lines are the rest."""
    index = [name for name in rows.columns if name not in (*across, "kl")]
    columns = ([f"{x:g}" if isinstance(x, float) else x for x in rows[name]] for name in across)
    named = rows.assign(of=[" ".join(words) for words in zip(*columns, strict=True)])
    return named.pivot_table(index=index, columns="of", values="kl", sort=False).sort_index(axis=1).reset_index()


def read_wide(file: Path, columns: Sequence[str], across: Sequence[str]) -> pd.DataFrame:
    """The rows, with these columns, of a file that holds a table of `wide`."""
    index = [name for name in columns if name not in (*across, "kl")]
    long = pd.read_csv(file).melt(index, var_name="of", value_name="kl").dropna()
    long[list(across)] = long["of"].str.split(" ", expand=True)
    return long.astype({"kv_ratio": float})[list(columns)]


def check_numerics(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows; ConfigError where they are of several NUMERICS."""
    if len(numerics := sorted(set(rows["numerics"]))) > 1:
        raise ConfigError(f"the rows are of NUMERICS {numerics}, which cannot be compared: begin a new file of rows")
    return rows
