"""Which runs of a table have another one of their own, and the command that prints it."""

from __future__ import annotations

import pandas as pd

from kvexp.results.units import absent

# What a run's label `task`, or a word of its settings, says of it -> the command and what that shows.
OF_TASK = {
    **dict.fromkeys(("dialogue", "soda_turns"), ("turns", "turn by turn")),
    **dict.fromkeys(("instructions", "instructions_leak"), ("instructions", "what is followed and told")),
    "long_answers": ("long-answers", "length, ends, loops"),
}
OF_SETTING = {
    "questions=all": ("many-questions", "by number of questions asked"),
    "prefill=bounded": ("prefill-chunks", "by size of the chunks"),
}


def other_tables(df: pd.DataFrame) -> list[str]:
    """A line that names the commands for the runs of a frame of `kvexp.results.table`; none where there are none."""
    found: dict[str, str] = {}
    for row in df.to_dict("records"):
        words = [] if absent(row.get("setting")) else str(row.get("setting")).split()
        named = [OF_TASK.get(str(row.get("task"))), *(OF_SETTING.get(word) for word in words)]
        found |= dict(each for each in named if each is not None)
    each = [f"kvexp {command} OUTPUTS ({what})" for command, what in found.items()]
    return [f"more of these runs: {'; '.join(each)}."] if each else []
