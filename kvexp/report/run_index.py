"""The runs as every section's script sees them: `page.runs`."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvexp.figures.quality import dashes_of
from kvexp.report.look import look
from kvexp.report.source import ReportSource, RunGroup
from kvexp.results.columns import few
from kvexp.results.question_place import question_words, titled
from kvexp.results.units import absent, called

COST = ("slots", "kv_bytes", "peak_kv_bytes", "ttft_s", "tpot_s", "tokens_per_s", "smallest_batch", "batch_size")
SAID = ("kv_ratio", "status", "note", "verdict99", "verdict999", "n", "paired", "headline", "numerics", "baseline")


def index(source: ReportSource) -> list[dict[str, Any]]:
    """One entry per run, in the table's order; `line` parts the lines of a chart, `of` holds percentages of full.

    Refused jobs are none: they have nothing that a filter could choose.
    """
    return [entry for group in source.groups for entry in _entries(source, group)]


def _entries(source: ReportSource, group: RunGroup) -> list[dict[str, Any]]:
    asked = [row.get("question") for row in group.rows]
    codes: dict[str, set[Any]] = defaultdict(set)
    for row in group.rows:
        codes[str(row.get("method"))].add(row.get("code"))
    several = {method for method, found in codes.items() if len(found) > 1}
    most = max(row["n"] for row in group.rows)
    lines = [_line(row, several, most, asked=len(set(asked)) > 1) for row in group.rows]
    panel = titled(group.panel, asked)
    dashes = dashes_of(pd.DataFrame(lines, columns=["method", "setting"]))
    return [
        {
            **{name: row[name] for name in ("hash", *SAID, *COST) if name in row},
            **{"model": group.model, "task": group.task, "panel": panel, "method": method, "line": setting},
            **{"headline": called(str(row["headline"]), row.get("task")) if row["headline"] else None},
            **{"of": _percentages(row), "full": row["verdict99"] == "baseline", "few": few(row)},
            **look(method, dashes[method, setting]),
            **_where(source, row["hash"]),
        }
        for row, (method, setting) in zip(group.rows, lines, strict=True)
    ]


def _line(row: Mapping[str, Any], several: set[str], most: int, *, asked: bool) -> tuple[str, str]:
    """Method and setting: what one line of a chart may join. Two versions of a method's code are two lines.

    several: methods with more than one; most: examples of the run of the panel that has most: those with fewer are
    lines of their own. asked: whether eviction has seen the question in some of these runs alone, which parts lines.
    """
    method = "-" if absent(row.get("method")) else str(row["method"])
    setting = "" if absent(row.get("setting")) else str(row["setting"])
    if asked:
        setting = ", ".join(filter(None, [setting, question_words([row.get("question")])]))
    if method in several:
        setting = f"{setting} code={row['code']}".lstrip()
    return method, f"{setting} (n = {row['n']})".lstrip() if 0 < row["n"] < most else setting


def _percentages(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Metric -> [percent of full, ends of its 95 % interval, mean score]."""
    names = [name.removesuffix("_of_full") for name in row if name.endswith("_of_full") and name != "length_of_full"]
    return {
        called(name, row.get("task")): [row[f"{name}{ending}"] for ending in ("_of_full", "_low", "_high", "")]
        for name in names
        if not absent(row[name])
    }


def _where(source: ReportSource, key: str) -> dict[str, str]:
    """The commit that made the rows, and what their seconds depend on."""
    env = source.folders[key].run.env if key in source.folders else {}
    place = [str(env.get("device", "")), f"{env['threads']} threads" if "threads" in env else ""]
    place += [f"torch {env['torch']}" if "torch" in env else ""]
    return {"commit": str(env.get("commit") or ""), "place": ", ".join(word for word in place if word)}
