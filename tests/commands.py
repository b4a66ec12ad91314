"""run.py in this process, for tests of what a command says and leaves behind."""

import runpy
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "run.py"


def run_py(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr) of `python run.py WORDS`."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(RUN), run_name="__main__")
    return (stopped.value.code, *capsys.readouterr())
