"""An experiment, run in this process as run.py runs it; made small; its jobs without a run."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from experiments.lib.exhibits import ROOT, declared, params
from kvexp.run.jobs import INTERRUPTED, KEPT, TERMINATED, summary
from kvexp.run.main import main
from kvexp.run.session import Session
from kvexp.util.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.run.settings import Settings

QUIET = "~hydra.callbacks.table"  # the exhibit has a table of its own


def sweep(experiment: str, overrides: Sequence[str] = ()) -> list[str]:
    """Run it, resuming what exists; the hashes of its runs and their baselines. ConfigError if a job failed.

    experiment: here and below, "" for a sweep of the overrides alone. Once per process: exhibits that show the same
    runs need not look for them again.
    """
    return list(_hashes(experiment, tuple(overrides)))


def _words(experiment: str, overrides: Sequence[str]) -> list[str]:
    return [*([f"experiment={experiment}"] if experiment else []), *overrides]


def _named(experiment: str) -> str:
    return f"experiment={experiment}" if experiment else "the sweep"


@functools.cache
def _hashes(experiment: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    session = Session()
    _command([*_words(experiment, overrides), QUIET], session)
    if session.failures:
        first = session.failures[0]
        raise ConfigError(
            f"{len(session.failures)} job(s) of {_named(experiment)} failed, the first: {first.job}: {first.why}"
        )
    return tuple(session.hashes)


def late(override: str) -> str:
    """An override as a sweep over its one value: its key may be of an option that the sweep itself brings.

    Of `task.data_files=x` Hydra would look for the key in the default task, before it takes the experiment's.
    """
    parsed = OverridesParser.create().parse_override(override)
    key, _, value = override.partition("=")
    return override if parsed.is_sweep_override() or parsed.is_delete() else f"{key}=choice({value})"


def limit_of(experiment: str, overrides: Sequence[str]) -> int | None:
    """How many examples its runs are asked for; None: all."""
    words = [word.partition("=")[2] for word in overrides if word.startswith("limit=")]
    if words:
        return None if words[-1] in ("null", "None") else int(words[-1])
    limit: int | None = declared()[experiment].get("limit")
    return limit


def jobs(experiment: str, overrides: Sequence[str] = ()) -> list[Settings]:
    """Every job of the sweep as checked settings; nothing is loaded or run."""
    from kvexp.run.settings import settings_of  # late: a finished sweep needs no torch

    session = _collected(experiment, overrides)
    settings = []
    for job in session.collected_jobs():
        plain = OmegaConf.to_container(job.config, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        config = {str(key): value for key, value in plain.items() if key not in ("log", "experiment")}
        settings.append(settings_of(config, job.choices, job.overrides))
    return settings


def planned_seconds(experiment: str, overrides: Sequence[str] = ()) -> float:
    """How long what is missing of a sweep takes on this machine, as `--dry-run` says; nothing is loaded or run.

    ConfigError for a job that cannot run.
    """
    from kvexp.run.plan import show_plan, total_seconds

    session = _collected(experiment, overrides)
    with contextlib.redirect_stdout(io.StringIO()):
        groups = show_plan(session.collected_jobs(), None, session, shares=True)
    if session.failures:
        first = session.failures[0]
        raise ConfigError(f"a job of {_named(experiment)} cannot run: {first.job}: {first.why}")
    return total_seconds(groups)


def _collected(experiment: str, overrides: Sequence[str]) -> Session:
    """A session that holds the jobs of the sweep; none is run."""
    session = Session()
    session.collect_jobs()
    _command([*_words(experiment, overrides), "hydra/launcher=basic", QUIET], session)
    return session


def _command(overrides: list[str], session: Session) -> None:
    """`python run.py -m OVERRIDES` in this process, so that many sweeps load torch and a model once."""
    before, sys.argv = sys.argv, [str(ROOT / "run.py"), "-m", *overrides]
    try:
        main(session)
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):
            raise KeyboardInterrupt(f"{summary(session)}{KEPT}") from end
        if end.code and not session.failures:
            raise ConfigError(
                f"python run.py -m {' '.join(overrides)} did not begin: its message is in sweep.log"
            ) from end
    finally:
        sys.argv = before


EXAMPLES = {"real": 1}  # of a smoke run, by scale; the testbed's models are quick enough for FEW
FEW = 2


def smaller(experiment: str) -> list[str]:
    """Overrides for the first of its models, the first and the last of its budgets, and one or two examples."""
    swept = params(experiment)
    words = [f"limit={EXAMPLES.get(experiment.partition('/')[0], FEW)}"]
    if "model" in swept:
        words.append(f"model={swept['model'].split(',')[0]}")
    if "kv_ratio" in swept:
        ratios = swept["kv_ratio"].split(",")
        words.append(f"kv_ratio={','.join(dict.fromkeys([ratios[0], ratios[-1]]))}")
    return words
