"""The report of the first run on a GPU, that it does not pretend without one, and exhibits that wait for a GPU."""

from __future__ import annotations

import importlib.util
import re
import shlex
from functools import partial

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import gpu_first
from benchmarks.gpu_first import CHECKS, Check, Outcome, report, run
from benchmarks.store import ROOT, Results
from experiments.lib import speed
from experiments.lib.exhibits import load

PASSES = Check("passes", "that it can", "timeit", "-n1 -r1 pass")
FAILS = Check("fails", "that it can fail", "timeit", "-n1 -r1 1/0")


def test_a_line_is_green_where_its_command_ends_well():
    good, bad = run(PASSES, 1), run(FAILS, 1)
    assert (good.word, bad.word) == ("green", "RED") and "ZeroDivisionError" in bad.tail
    late = run(Check("late", "that it stops", "http.server", "--bind 127.0.0.1 0"), minutes=0.02)
    assert late.word == "RED" and late.status is None and "stopped after" in late.tail
    assert run(PASSES, 0).word == "not run"


def test_the_report_says_where_it_ran_and_shows_every_output():
    text = report([Outcome(PASSES, 0, 2.4, "fine"), Outcome(FAILS, 1, 3.6, "not fine")], {"machine": "a GPU"})
    assert "- machine: a GPU" in text
    assert "| passes | green | 2 | that it can |" in text and "| fails | RED | 4 | that it can fail |" in text
    assert "## fails: RED" in text and "not fine" in text


def test_every_check_is_there_and_the_page_tells_what_to_do():
    page = (ROOT / "docs" / "gpu_details.md").read_text("utf-8").partition("## The first run")[2].partition("\n## ")[0]
    for check in CHECKS:
        assert importlib.util.find_spec(check.module), check
        assert all((ROOT / word).exists() for word in check.words.split() if word.startswith("tests/"))
        assert check.name in page, check.name


@pytest.mark.parametrize(
    ("cuda", "available", "lacks", "words"),
    [
        (None, False, (), "nothing was run: torch"),
        ("12.9", False, (), "does nvidia-smi list one, and is its driver new enough for CUDA 12.9"),
        ("12.9", True, ("xdist",), "make setup, or pip install pytest-xdist"),
        ("12.9", True, ("triton",), "kernels and prefill need Triton"),
        ("12.9", True, (), None),
    ],
)
def test_it_says_what_is_missing(cuda, available, lacks, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(gpu_first, "find_spec", lambda name: None if name in lacks else "here")
    assert gpu_first.lacking(CHECKS) is None if words is None else gpu_first.main([]) == 1
    assert words is None or words in capsys.readouterr().err
    assert gpu_first.lacking([check for check in CHECKS if check.name == "decode"]) is None or not available


def test_a_line_whose_tests_were_all_skipped_is_red():
    check = next(check for check in CHECKS if check.module == "pytest")
    assert Outcome(check, 0, 1.0, "4 skipped in 0.1s").word == "RED"
    assert Outcome(check, 0, 1.0, "10 passed, 4 skipped in 0.1s").word == "green"


@pytest.mark.parametrize("name", ["table1", "fig1", "fig9", "fig10"])
def test_an_exhibit_that_waits_shows_the_papers_numbers_and_stays_open(name, monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "Results", partial(Results, folder=tmp_path))  # as if no GPU had measured anything
    exhibit = load(f"keyformer_{name}")
    table = exhibit.table(pd.DataFrame())
    assert set(table["source"]) == {"paper"}
    verdict, words = exhibit.holds(table)
    assert verdict is None and words.startswith("no GPU result yet")
    figure = Figure()
    exhibit.draw(table, figure)
    assert figure.axes


def test_every_test_of_the_gpu_file_is_of_one_line():
    """The lines take the tests of tests/core/test_gpu.py apart by words of their names."""
    names = re.findall(r"^def (test_\w+)", (ROOT / "tests/core/test_gpu.py").read_text(), re.MULTILINE)
    lines = [shlex.split(check.words) for check in CHECKS if gpu_first.GPU in check.words]
    words = [line[line.index("-k") + 1].split(" or ") for line in lines]
    chosen = {name: [line for line in words if any(word in name for word in line)] for name in names}
    assert not [name for name, lines in chosen.items() if not lines]
