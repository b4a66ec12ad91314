"""Where the numbers come from, and which runs have none."""

from typing import Any

import kvexp
from kvexp.report.section import Section
from kvexp.report.source import ReportSource


def data(source: ReportSource) -> dict[str, Any]:
    """Runs by NUMERICS, commit and machine (one who-when-where per line); runs that are not done, with the reason."""
    real = source.frame[source.frame["status"] != "refused"]
    envs = [source.folders[key].run.env for key in real["hash"] if key in source.folders]
    names = ("kvexp", "commit", "device", "threads", "python", "torch", "transformers")
    made: dict[tuple[str, ...], int] = {}
    for env, numerics in zip(envs, real["numerics"], strict=True):
        key = (str(numerics), *(str(env.get(name, "-")) for name in names))
        made[key] = made.get(key, 0) + 1
    problems = source.frame[source.frame["status"] != "done"].to_dict("records")  # refused jobs too: here alone
    said = ("status", "model", "task", "method", "kv_ratio", "n", "note", "hash")
    return {
        "outputs": source.outputs.name,
        "numerics": kvexp.NUMERICS,
        "heads": ["NUMERICS", *names, "runs"],
        "made": [[*key, count] for key, count in made.items()],
        "problem_heads": list(said),
        "problems": [[row.get(name) for name in said] for row in problems],
    }


SECTION = Section(
    "about",
    "Where these numbers come from",
    "Runs by the code and the machine that made them. Numbers of different NUMERICS are never compared; seconds are "
    "compared only on one machine.",
    data,
)
