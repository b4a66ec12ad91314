"""The report of the first run on a GPU, and that it does not pretend without one."""

import importlib.util

import pytest
import torch

from benchmarks import gpu_first
from benchmarks.gpu_first import CHECKS, Check, Outcome, report, run
from benchmarks.machine import ROOT
from benchmarks.suite import GPU

PASSES = Check("passes", "that it can", "timeit", "-n1 -r1 pass")
FAILS = Check("fails", "that it can fail", "timeit", "-n1 -r1 1/0")


def test_a_line_is_green_where_its_command_ends_well():
    good, bad = run(PASSES), run(FAILS)
    assert (good.word, bad.word) == ("green", "RED") and "ZeroDivisionError" in bad.tail
    late = run(Check("late", "that it stops", "http.server", "--bind 127.0.0.1 0"), minutes=0.02)
    assert late.word == "RED" and late.status is None and "stopped after" in late.tail


def test_the_report_says_where_it_ran_and_shows_every_output():
    text = report([Outcome(PASSES, 0, 2.4, "fine"), Outcome(FAILS, 1, 3.6, "not fine")], {"machine": "a GPU"})
    assert "- machine: a GPU" in text
    assert "| passes | green | 2 | that it can |" in text and "| fails | RED | 4 | that it can fail |" in text
    assert "## fails: RED" in text and "not fine" in text


def test_every_check_is_there_and_the_page_tells_what_to_do():
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8").partition("## The first hour")[2].partition("\n## ")[0]
    for check in CHECKS:
        assert importlib.util.find_spec(check.module), check
        assert all((ROOT / word).exists() for word in check.words.split() if word.startswith("tests/"))
        assert check.name in page, check.name
        only = check.words.partition("--only ")[2]
        assert not only or only in {one.name for one in GPU}


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_first.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err
