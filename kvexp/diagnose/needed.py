"""What a command needs of a run's diagnosis, made where it is missing: nobody has to know beforehand what to log."""

from __future__ import annotations

from kvexp.diagnose.after import Log
from kvexp.diagnose.folders import Row, short_of
from kvexp.diagnose.refusals import nothing_to_log
from kvexp.diagnose.runs import settings_at
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import waiting_notice
from kvexp.record import Run


def need(run: Run, rows: list[Row], kind: Log | None = None) -> None:
    """Make the log (or the twin) that these rows have not; ConfigError where the run can have none."""
    kind = kind or Log()
    if not kind.lacking(run, rows):
        return
    settings = settings_at(run)
    kind.check(settings)
    if (why := nothing_to_log(settings)) is not None:
        raise ConfigError(f"{short_of(run)} has no log to look at: {why}")
    with run.claim(waiting=waiting_notice(run)):
        kind.add(settings, run, rows)
