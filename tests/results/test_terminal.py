"""Control characters of models, data and file names are shown, never obeyed: in a terminal, in a page, in Markdown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from kvexp.results.report import page, read
from kvexp.results.table import print_table, table, to_markdown
from kvexp.results.views import main as results
from kvexp.run.store import Run
from kvexp.util.output import CONTROL, Console, say, visible

ROOT = Path(__file__).resolve().parents[2]
EVIL = "the \x1b]0;x\x07 answer\x08\x9b31m"
ROW = {
    "metrics": {"rouge1": 50.0},
    "output": EVIL,
    "reference": EVIL,
    "seconds": {},
    "receipt": {"slots": 8.0, "kv_bytes": 10, "peak_kv_bytes": 20, "evicted": True, "batch_size": 1},
    "prompt_tokens": 3,
    "new_tokens": 4,
    "skipped": None,
    "failed": None,
}


@pytest.fixture
def outputs(tmp_path):
    """Two runs, the names of whose model, folder, examples and answers hold control characters."""
    folder = tmp_path / "out\x1b[2J"
    baseline = None
    for method in ("full", "h2o"):
        labels = {
            "model": f"m{EVIL}",
            "task": "xsum",
            "method": method,
            "kv_ratio": 0.5,
            "setting": f"task.frame={EVIL}",
        }
        run = Run.open(folder, {"method": method}, labels, {}, baseline=baseline)
        for number in range(3):
            run.append({**ROW, "example": f"{number}{EVIL}", "index": number})
        run.finish(3)
        baseline = run.hash
    return folder


def test_control_characters_are_written_as_python_writes_them():
    assert visible(EVIL) == r"the \x1b]0;x\x07 answer\x08\x9b31m"
    assert visible("a\tb\n\u00e9 \u4e2d") == "a\tb\n\u00e9 \u4e2d" and visible("a\r\x7f") == r"a\r\x7f"


def test_what_is_said_is_visible(capsys):
    say("error:", ValueError(EVIL), end="")
    assert capsys.readouterr().out == r"error: the \x1b]0;x\x07 answer\x08\x9b31m"


def test_a_consoles_own_colours_stay_and_columns_are_straight():
    out = io.StringIO()
    grid = Table(box=None)
    grid.add_column("a")
    grid.add_column("b")
    grid.add_row(Text("\x1b[31m", style="red"), "end")
    grid.add_row("plain text", "end")
    Console(file=out, force_terminal=True, color_system="standard", width=80).print(grid)
    text = out.getvalue()
    assert "\x1b[31m" + r"\x1b[31m" in text and text.count("\x1b[31m") == 1
    ends = {re.sub("\x1b\\[[0-9;]*m", "", line).index("end") for line in text.splitlines()[1:]}
    assert len(ends) == 1


def test_a_table_of_such_runs_holds_none(outputs, capsys):
    out = io.StringIO()
    print_table(table(outputs), Console(file=out, width=200))
    assert r"\x1b]0;x" in out.getvalue() and not CONTROL.search(out.getvalue())
    assert r"\x1b]0;x\x07" in to_markdown(table(outputs)) and not CONTROL.search(to_markdown(table(outputs)))
    for words in ([], ["--where", f"method={EVIL}"], ["--where", EVIL]):
        results([str(outputs), *words])
        assert not CONTROL.search("".join(capsys.readouterr()))


def test_a_page_of_such_runs_holds_none(outputs):
    text = page(read(outputs))
    data = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    inside = json.dumps(data, ensure_ascii=False)
    assert r"\\x1b]0;x\\x07 answer" in inside and not CONTROL.search(inside)
    assert "\x1b" not in text


def test_everything_is_said():
    """print() is left to what shows nothing but kvexp's own words, and to a prompt that goes into a file."""
    own = {"cli.py", "util/output.py", "tasks/testbed.py", "engines/trace_check.py"}
    for path in (ROOT / "kvexp").rglob("*.py"):
        printed = re.findall(r"(?<![\w.])print\((.*)", path.read_text("utf-8"))
        # text: the prompt that goes into a file; torch's version: another Python's, asked in a process
        printed = [words for words in printed if not words.startswith(("text)", "torch.__version__,"))]
        assert not printed or path.relative_to(ROOT / "kvexp").as_posix() in own, path
        assert not re.search(r"from rich.console import .*\bConsole\b", path.read_text("utf-8")), path
