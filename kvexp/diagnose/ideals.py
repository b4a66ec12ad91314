"""The runs of method=ideal that `gap` compares with, made where they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvexp.config.settings import Settings, settings_of
from kvexp.console import Console
from kvexp.diagnose.folders import short_title
from kvexp.diagnose.gap import without_ideal
from kvexp.diagnose.runs import settings_at, with_limit_of
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.record import Run
from kvexp.session import Session
from kvexp.sweep.prefill_groups import prefill_groups, run_group

OWN = ("method", "cache.mode", "cache.positions")  # options that are another method's


def make_ideals(outputs: str, where: Mapping[str, Any], console: Console) -> None:
    """Run method=ideal at the model, task, budget and examples of every run that has no such run beside it."""
    wanted: dict[str, Settings] = {}
    for folder in without_ideal(outputs, where):
        try:
            settings = with_limit_of(_ideal(folder.run), 1 + max(row["index"] for row in folder.rows))
        except ConfigError as error:
            console.print(f"{short_title(folder.run)}: no ideal run: {error}", highlight=False, markup=False)
            continue
        wanted[str(settings.identity)] = settings
    session = Session()
    for group in prefill_groups(wanted.values()):
        run_group(group, session)
    for settings in wanted.values():
        evaluate_run(settings, session)


def _ideal(record: Run) -> Settings:
    """The settings of the run, with method=ideal; ConfigError where the run's own cannot be composed any more."""
    settings = settings_at(record)
    asked = settings.command
    cache = {**asked["config"]["cache"], "mode": "auto", "positions": None}
    config = {**asked["config"], "method": {"_target_": "kvexp.methods.Ideal"}, "cache": cache}
    left = [word for word in asked["overrides"] if not word.lstrip("+~").startswith(OWN)]
    return settings_of(config, {**asked["choices"], "method": "ideal"}, left)
