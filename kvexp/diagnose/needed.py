"""What a command needs of a run's diagnosis, made where it is missing: nobody has to know beforehand what to log."""

from __future__ import annotations

from kvexp.diagnose.diagnosis_options import Log
from kvexp.diagnose.folders import Row, short_title
from kvexp.diagnose.runs import settings_at
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import waiting_notice
from kvexp.record import Run


def ensure_diagnosed(run: Run, rows: list[Row], kind: Log | None = None) -> None:
    """Make the log (or `kind`) of the rows that have none; ConfigError where the run can have none."""
    kind = kind or Log()
    if not kind.rows_without(run, rows):
        return
    settings = settings_at(run)
    kind.check(settings)
    if (why := kind.obstacle(settings)) is not None:
        raise ConfigError(f"{short_title(run)} has no log to look at: {why}")
    with run.claim(waiting=waiting_notice(run)):
        kind.write(settings, run, rows)
