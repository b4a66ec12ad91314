"""run.py in this process, its counters fresh, for tests of what a command says and leaves behind."""

import runpy
import sys
from pathlib import Path

import pytest

from kvexp.sweep import sweep_summary
from kvexp.sweep.sweep_progress import SWEEP, Sweep

RUN = Path(__file__).resolve().parents[1] / "run.py"


def run_py(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr) of `python run.py WORDS`."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sweep_summary, "COMMAND", sweep_summary._Command())
    for name, value in vars(Sweep()).items():
        monkeypatch.setattr(SWEEP, name, value)
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(RUN), run_name="__main__")
    return (stopped.value.code, *capsys.readouterr())
