"""Which tokens were kept: the text of some examples, each token with the heads of every layer that hold it."""

from typing import Any

from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import EVICTIONS, has, read_table, require_example_log
from kvexp.evictions.held_tokens import made
from kvexp.report.section import Section
from kvexp.report.source import ReportSource
from kvexp.results.read import Folder

MOST = 4  # examples of a run
TOTAL = 60_000  # tokens of all texts together: a page a browser still opens at once


def data(source: ReportSource) -> dict[str, Any] | None:
    """hash -> its diagnosed examples, the first in order; None where no run was made with diagnose=log or twin."""
    found: dict[str, Any] = {}
    room = TOTAL
    for key in source.frame["hash"]:
        folder = source.folders.get(key)
        if folder is None:
            continue
        for example in _diagnosed(folder)[:MOST]:
            text = _text(folder, example)
            room -= len(text["tokens"]) if text else 0
            if text and room >= 0:
                found.setdefault(key, []).append(text)
    return {"texts": found, "cut": room < 0} if found else None


def _diagnosed(folder: Folder) -> list[str]:
    return [row["example"] for row in folder.rows if has(folder.run, row["example"], EVICTIONS)]


def _text(folder: Folder, example: str) -> dict[str, Any] | None:
    """kept: at the end of the prompt and after the last token, [layer][token] heads; None for a log that is broken."""
    try:
        told = require_example_log(folder.run, example)
        evictions = read_table(folder.run, example, EVICTIONS)
        views = [made(told, evictions, step) for step in sorted({0, told.steps})]
    except ConfigError:
        return None
    return {
        "example": example,
        "tokens": told.texts,
        "heads": told.heads,
        "prompt": told.prompt_tokens,
        "question": told.question_tokens,
        "times": [{"step": view.step, "read": view.present, "kept": view.kept.tolist()} for view in views],
    }


SECTION = Section(
    "kept",
    "What was kept",
    "The text of an example; the greener a token, the more heads hold it, struck out: none. Point at a token for its "
    "layers. Runs made with <code>diagnose=log</code> or <code>twin</code> have such texts.",
    data,
)
