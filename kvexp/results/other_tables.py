"""Which runs of a table have another one of their own, and the command that prints it."""

from __future__ import annotations

import pandas as pd

from kvexp.results.units import absent

# What a run's label `task`, or the beginning of a word of its settings, says of it -> the command and what that shows.
OF_TASK = {
    **dict.fromkeys(("dialogue", "soda_turns"), ("turns", "turn by turn")),
    **dict.fromkeys(("instructions", "instructions_leak"), ("instructions", "what is followed and told")),
    "long_answers": ("long-answers", "length, ends, loops"),
}
OF_SETTING = {
    "questions=all": ("many-questions", "by number of questions asked"),
    **dict.fromkeys(("prefill=bounded", "prefill.chunk="), ("prefill-chunks", "by size of the chunks")),
}


def other_tables(df: pd.DataFrame) -> list[str]:
    """A line that names the commands for the runs of a frame of `kvexp.results.table`; none where there are none."""
    found: dict[str, str] = {}
    for row in df.to_dict("records"):
        words = [] if absent(row.get("setting")) else str(row.get("setting")).split()
        found |= dict(each for word in words for start, each in OF_SETTING.items() if word.startswith(start))
        found |= dict([OF_TASK[task]] if (task := str(row.get("task"))) in OF_TASK else [])
    named = [f"kvexp {command} OUTPUTS ({what})" for command, what in found.items()]
    return [f"more of these runs: {'; '.join(named)}."] if named else []
