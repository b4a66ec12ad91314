"""The report of the first run on a GPU, and that it does not pretend without one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import gpu_first, predict
from benchmarks.gpu_first import CHECKS, Check, Outcome, report, run
from benchmarks.machine import ROOT
from benchmarks.roofline import (
    A2SF_QUERIES,
    Forward,
    Layout,
    Speeds,
    decode_step,
    generation,
    layout,
    observed,
    prefill,
    sweep,
)
from benchmarks.store import RESULTS
from benchmarks.suite import GPU
from benchmarks.variants import variant
from experiments.lib.exhibits import load
from kvexp.core.observe import first_weighted_row
from kvexp.methods import A2SF
from kvexp.run.plan import Machine

# The report of the first run on a GPU, and that it does not pretend without one.


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
    said = capsys.readouterr().err
    assert said.startswith("nothing was run: torch ") and "CUDA" in said and "make gpu-compile" in said


@pytest.mark.parametrize(
    ("cuda", "available", "lacks", "words"),
    [
        (None, False, (), "is a build without CUDA"),
        ("12.9", False, (), "does nvidia-smi list one, and is its driver new enough for CUDA 12.9"),
        ("12.9", True, ("xdist",), "make setup, or pip install pytest-xdist"),
        ("12.9", True, ("triton",), "the line kernels needs Triton"),
        ("12.9", True, (), None),
    ],
)
def test_it_says_what_is_missing(cuda, available, lacks, words, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(gpu_first, "find_spec", lambda name: None if name in lacks else "here")
    said = gpu_first.lacking(CHECKS)
    assert (said is None) if words is None else (words in said)
    assert gpu_first.lacking([check for check in CHECKS if check.name == "decode"]) is None or not available


def test_a_line_whose_tests_were_all_skipped_is_red():
    check = next(check for check in CHECKS if check.module == "pytest")
    assert Outcome(check, 0, 1.0, "4 skipped in 0.1s").word == "RED"
    assert Outcome(check, 0, 1.0, "10 passed, 4 skipped in 0.1s").word == "green"


# The roofline by hand, and that predictions carry their error and stay apart from what was measured.


MACHINE = Speeds.of(Machine("one of 100 flops and 10 bytes per second", 100.0, 10.0, 0.5))
SMALL = Layout(read_bytes=1000, weights=500, head=100, layers=2, heads=4, width=8, token_bytes=64)


def test_a_forward_takes_its_longer_part_and_its_launches():
    assert Forward(50, 2, 100).seconds(MACHINE) == 5 + 1 and Forward(50, 2, 100).limit(MACHINE) == "bytes"
    assert Forward(5, 2, 1000).seconds(MACHINE) == 10 + 1 and Forward(5, 2, 1000).limit(MACHINE) == "operations"
    assert Forward(1, 2, 1).limit(MACHINE) == "launches"
    each = Speeds(linear=10, attention=20, observation=40, bandwidth=1e9, layer_s=0)
    assert Forward(1, 2, 100, 100, 100).seconds(each) == 10 + 5 + 2.5


def test_a_decode_step_by_hand():
    """Weights once; 3 rows x 10 slots x 64 bytes; 2 x 500 x 3 operations and 4 x 2 x 8 x 10 x 3."""
    assert decode_step(SMALL, variant("full"), 10, 3) == Forward(1000 + 1920, 2, 3000, 1920)
    scored = decode_step(SMALL, variant("h2o@0.5"), 10, 3)
    assert scored.bytes == 2920 + 2 * 4 * 3 * 2 * 4 * 10
    assert decode_step(SMALL, variant("keyformer@0.5"), 10, 3).bytes == 2920 + 3 * 4 * 3 * 2 * 4 * 10


def test_a_prefill_by_hand():
    """2 x 400 x 7 operations, the head's for one token, and 2 x 2 x 8 x 49 of a causal prompt; H2O has them twice."""
    assert prefill(SMALL, variant("full"), 7, 1) == Forward(1000 + 7 * 64, 2, 5600 + 200, 1568, 0)
    assert prefill(SMALL, variant("h2o@0.5"), 7, 1).observation == 1568
    assert prefill(SMALL, variant("a2sf@0.5"), 7, 1).observation == 1568


def test_a2sf_observes_the_queries_that_weigh_anything():
    """As the code itself finds them, and the pairs that they have with the keys before them."""
    last = 1000 - first_weighted_row(A2SF().score_spec, 1000, None)
    assert last == A2SF_QUERIES
    pairs = [sum(range(1, n + 1)) for n in (1000, 1000 - last)]
    assert observed(variant("a2sf@0.5"), 1000) == pytest.approx(1 - pairs[1] / pairs[0], rel=2e-3)
    assert observed(variant("window@0.5"), 1000) == 0 and observed(variant("keyformer@0.5"), 1000) == 1


def test_generations_and_sweeps_add_up():
    full, half = variant("full"), variant("window@0.5")
    made = generation(MACHINE, SMALL, full, 20, 5, 1)
    assert made["total_s"] == made["ttft_s"] + 4 * made["tpot_s"]
    assert generation(MACHINE, SMALL, half, 20, 5, 1)["tpot_s"] < made["tpot_s"]
    both = sweep(MACHINE, SMALL, [full, half], 20, 5, 3)
    alone = sum(generation(MACHINE, SMALL, each, 20, 5, 1)["total_s"] for each in (full, half))
    assert both["one_by_one_s"] == pytest.approx(3 * alone)
    assert both["shared_s"] < both["one_by_one_s"]


def test_the_layouts_are_those_of_the_models():
    """MPT-7B: 6.65 billion parameters, keys and values of half a MiB per token in 16 bit."""
    mpt = layout("mpt_7b")
    assert 6.4e9 < mpt.weights < 6.7e9 and mpt.read_bytes == 2 * mpt.weights
    assert mpt.token_bytes == 2 * 32 * 4096 * 2 and (mpt.layers, mpt.heads, mpt.width) == (32, 32, 4096)


def test_the_predictor_is_held_against_every_measured_cell(tmp_path):
    cell = {
        "key": {"shape": "to_beat", "prompt": 64, "batch": 1, "device": "cpu", "threads": 1, "tiny": False},
        "rows": [
            {"variant": "bandwidth", "samples": [{"bytes_per_s": 1e10}]},
            {"variant": "full", "slots": 64, "samples": [{"tpot_s": 1.0}, {"tpot_s": 3.0}, {"tpot_s": 2.0}]},
        ],
    }
    tiny = {**cell, "key": {**cell["key"], "tiny": True}}
    (tmp_path / "decode.json").write_text(json.dumps([cell, tiny]))
    (line,) = predict.cpu_check(tmp_path)
    seconds = decode_step(layout("to_beat"), variant("full"), 64, 1).seconds(predict.cpu_speeds(cell, 0, []))
    assert line["measured_s"] == 2.0 and line["error"] == pytest.approx(seconds / 2 - 1, abs=1e-3)
    lines = [{"benchmark": "decode", "variant": "full", "error": error} for error in (0.5, -0.1, 0.2)]
    lines.append({"benchmark": "decode", "variant": "hf_static", "error": 0.9})
    assert predict.errors(lines) == {
        "decode": {"median": 0.2, "largest": 0.5, "of": 3},
        "decode of Hugging Face": {"median": 0.9, "largest": 0.9, "of": 1},
    }


def test_the_cpu_multiplies_as_fast_as_on_prompts_of_another_model():
    """From prompts that were made with known rates; the model that calibrates is in no line of the check."""
    of, rates = layout(predict.CALIBRATION), Speeds(2e11, 1e11, 5e10, 1e18, 0)
    cells = [
        {
            "key": {"shape": predict.CALIBRATION, "prompt": prompt, "device": "cpu", "threads": 2, "tiny": False},
            "rows": [
                {"variant": name, "samples": [{"ttft_s": prefill(of, variant(name), prompt, 1).seconds(rates)}]}
                for name in ("full", "h2o@0.2")
            ],
        }
        for prompt in (512, 2048, 4096)
    ]
    assert predict.product_rates(cells) == pytest.approx((2e11, 1e11, 5e10), rel=1e-6)
    at = predict.cpu_speeds({"key": {"threads": 2}, "rows": []}, 7.0, cells)
    assert (at.bandwidth, at.linear) == (7.0, pytest.approx(2e11))
    assert predict.cpu_speeds({"key": {"threads": 1}, "rows": []}, 7.0, cells).linear == 40e9, "of other threads"
    assert all(line.get("shape") != predict.CALIBRATION for line in predict.cpu_check())


def test_the_files_are_what_the_predictor_says():
    """But for its errors on the CPU, which follow benchmarks/results."""
    made = predict.predictions()
    for name, content in made.items():
        there = json.loads((predict.PREDICTED / f"{name}.json").read_text("utf-8"))
        if name == "cpu":
            assert {"decode", "prefill", "sweep"} < set(there["errors"])
            continue
        for cell, kept in zip(content, there, strict=True):
            assert kept["from"]["predictor_error_on_cpu"] and kept["from"]["machine"] == predict.LABEL
            assert {k: v for k, v in json.loads(json.dumps(cell)).items() if k != "from"} == {
                k: v for k, v in kept.items() if k != "from"
            }
    assert RESULTS != predict.PREDICTED and not set(predict.PREDICTED.glob("*")) & set(Path(RESULTS).glob("*"))


@pytest.mark.parametrize("name", ["table1", "fig1", "fig9", "fig10"])
def test_an_exhibit_that_waits_shows_the_prediction_and_stays_open(name, monkeypatch, tmp_path):
    import benchmarks.store as store
    from experiments.lib import speed

    class Nothing(store.Results):
        """As if no GPU had measured anything."""

        def __init__(self, benchmark, folder=tmp_path):
            super().__init__(benchmark, folder)

    monkeypatch.setattr(speed, "Results", Nothing)
    exhibit = load(f"keyformer_{name}")
    table = exhibit.table(pd.DataFrame())
    assert set(table["source"]) == {"predicted", "paper"}
    said = set(table.loc[table["source"].eq("predicted"), "machine"])
    assert all("predicted, A100 80GB" in each and "its error on a CPU" in each for each in said)
    verdict, words = exhibit.holds(table)
    assert verdict is None and words.startswith("no GPU result yet")
    figure = Figure()
    exhibit.draw(table, figure)
    bars = [patch for axes in figure.axes for patch in axes.patches]
    assert bars and all(bar.get_hatch() == "////" for bar in bars)
    labels = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert any("(predicted)" in label for label in labels)
