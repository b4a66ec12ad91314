"""What of a run's divergence no group of the sweep has measured: by itself, with the full cache beside it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from kvexp.config.divergence_options import generates, refusal
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.record import Run, divergence_lines
from kvexp.record.run_name import run_name
from kvexp.session import Session
from kvexp.sweep.group_run import GroupRun
from kvexp.sweep.prefill_groups import claim_all, opened, run_missing
from kvexp.terminal import say

UNKNOWN = "prompts that its budget does not hold, or too little memory or time"  # said by a process that has ended


def measure_rest(settings: Settings, session: Session) -> Run:
    """Force the texts that one run lacks; says on stderr what cannot be. Returns the run.

    ConfigError where the divergence is all the run is for (divergence=only), and none of its texts could be forced.
    """
    members = [settings.baseline(), settings] if settings.divergence.only else [settings]
    pairs = opened(members)
    if (why := refusal(settings)) is not None:
        if generates(settings):
            session.add_unmeasured(run_name(settings.labels), why)
    else:
        with ExitStack() as claims:
            claim_all(pairs[-1:], claims, timeout=None)
            lines = measure(pairs[-1:], session)
            for line in lines:
                say(line, file=sys.stderr)
        if lines and settings.divergence.only and not divergence_lines.read(pairs[-1][1]):
            raise ConfigError("no text was forced, so the run has no divergence, and divergence=only writes no answers")
    return pairs[-1][1]


def measure(
    pairs: Sequence[tuple[Settings, Run]], session: Session, within: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Force the texts that claimed runs of one group lack; returns a line for each that some are missing of still.

    within: hash -> the examples that may be forced, of each run.
    """
    examples = list(pairs[0][0].task.examples())
    todo = list(enumerate(examples))

    def members() -> list[GroupRun]:
        made = [GroupRun(*pair, examples, (within or {}).get(pair[1].hash)) for pair in pairs]
        for member in made:
            member.done = {example.id for example in examples}  # rows are not what is wanted here
        return made

    working = members()
    run_missing(working, examples, session, least=1)
    told = []
    for before, after in zip(working, members(), strict=True):  # read again: other processes may have written
        if left := after.missing(todo):
            why = before.error or "; ".join(before.skipped) or UNKNOWN
            told.append(f"divergence of {run_name(after.settings.labels)}: {left} texts were not forced ({why})")
    return told
