"""Measure what recorded runs lack: runs of the same prompts are prefilled once, and all are forced the same text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvexp.config.divergence_options import DivergenceOptions, refusal
from kvexp.config.root_values import Shard
from kvexp.config.settings import Settings
from kvexp.diagnose.runs import settings_at, with_limit_of
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import waiting_notice
from kvexp.record import Run
from kvexp.session import Session
from kvexp.sweep.divergence_turn import measure
from kvexp.sweep.group_run import GroupRun
from kvexp.sweep.prefill_groups import group_key
from kvexp.terminal import say


def measure_claimed(runs: Iterable[Run], texts: Sequence[str]) -> dict[str, str]:
    """Write the lines that these runs lack, holding each against other measurements; hash -> why a run has none."""
    runs = sorted(runs, key=lambda run: run.hash)  # all processes in one order: none waits for one that waits for it
    with ExitStack() as held:
        for run in runs:
            held.enter_context(run.claim(waiting=waiting_notice(run), part="divergence"))
        return _measured(runs, texts)


def _measured(runs: Sequence[Run], texts: Sequence[str]) -> dict[str, str]:
    refused: dict[str, str] = {}
    groups: dict[str, list[tuple[Settings, Run]]] = defaultdict(list)
    within: dict[str, set[str]] = {}
    for run in runs:
        rows = {row["example"]: row["index"] for row in run.rows() if not row.get("skipped")}
        if run.baseline is None or not rows:
            continue
        try:
            settings = with_limit_of(settings_at(run), 1 + max(rows.values()))
        except ConfigError as error:
            refused[run.hash] = str(error)
            continue
        if (why := refusal(settings)) is not None:
            refused[run.hash] = why
            continue
        settings = replace(settings, shard=Shard(), divergence=DivergenceOptions(tuple(texts), only=True))
        groups[group_key(settings)].append((settings, run))
        within[run.hash] = set(rows)
    for pairs in groups.values():
        _group(pairs, within)
    return refused


def _group(pairs: Sequence[tuple[Settings, Run]], within: dict[str, set[str]]) -> None:
    """Runs that share model, task and prompts."""
    settings = pairs[0][0]
    examples = list(settings.task.examples())
    if settings.task.pinned != settings.identity["data"]:
        raise ConfigError(f"{settings.task.source} has changed since; start again when nothing writes to it")
    missing = sum(GroupRun(*pair, examples, within[pair[1].hash]).missing(list(enumerate(examples))) for pair in pairs)
    if not missing:
        labels = settings.labels
        say(f"divergence of {len(pairs)} runs, {labels['model']}, {labels['task']}: all texts are measured already")
        return
    for line in measure(pairs, Session(), within):
        say(line)
