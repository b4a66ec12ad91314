"""The roofline by hand, and that predictions carry their error and stay apart from what was measured."""

import json
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from benchmarks import predict
from benchmarks.roofline import Forward, Layout, decode_step, generation, layout, prefill, sweep
from benchmarks.store import RESULTS
from benchmarks.variants import variant
from experiments.keyformer import fig1, fig9, fig10, table1
from kvexp.dry_run.cost import Machine

MACHINE = Machine("one of 100 flops and 10 bytes per second", 100.0, 10.0, 0.5)
SMALL = Layout(read_bytes=1000, weights=500, layers=2, heads=4, width=8, token_bytes=64)


def test_a_forward_takes_its_longer_part_and_its_launches():
    assert Forward(50, 100, 2).seconds(MACHINE) == 5 + 1 and Forward(50, 100, 2).limit(MACHINE) == "bytes"
    assert Forward(5, 1000, 2).seconds(MACHINE) == 10 + 1 and Forward(5, 1000, 2).limit(MACHINE) == "operations"
    assert Forward(1, 1, 2).limit(MACHINE) == "launches"


def test_a_decode_step_by_hand():
    """Weights once; 3 rows x 10 slots x 64 bytes; 2 x 500 x 3 operations and 4 x 2 x 8 x 10 x 3."""
    assert decode_step(SMALL, variant("full"), 10, 3) == Forward(1000 + 1920, 3000 + 1920, 2)
    scored = decode_step(SMALL, variant("h2o@0.5"), 10, 3)
    assert scored.bytes == 2920 + 2 * 4 * 3 * 2 * 4 * 10
    assert decode_step(SMALL, variant("keyformer@0.5"), 10, 3).bytes == 2920 + 3 * 4 * 3 * 2 * 4 * 10


def test_a_prefill_by_hand():
    """2 x 500 x 7 operations, and 2 x 2 x 8 x 49 of a causal prompt; what scores has its products twice."""
    assert prefill(SMALL, variant("full"), 7, 1) == Forward(1000 + 7 * 64, 7000 + 1568, 2)
    assert prefill(SMALL, variant("a2sf@0.5"), 7, 1).flops == 7000 + 2 * 1568


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
    seconds = decode_step(layout("to_beat"), variant("full"), 64, 1).seconds(predict.cpu_machine(cell, 0))
    assert line["measured_s"] == 2.0 and line["error"] == pytest.approx(seconds / 2 - 1, abs=1e-3)
    lines = [{"benchmark": "decode", "error": error} for error in (0.5, -0.1, 0.2)]
    assert predict.errors(lines) == {"decode": {"median": 0.2, "largest": 0.5, "of": 3}}


def test_the_files_are_what_the_predictor_says():
    """But for its errors on the CPU, which follow benchmarks/results."""
    made = predict.predictions()
    for name, content in made.items():
        there = json.loads((predict.PREDICTED / f"{name}.json").read_text("utf-8"))
        if name == "cpu":
            assert set(there["errors"]) == {"decode", "prefill", "sweep"}
            continue
        for cell, kept in zip(content, there, strict=True):
            assert kept["from"]["predictor_error_on_cpu"] and kept["from"]["machine"] == predict.LABEL
            assert {k: v for k, v in json.loads(json.dumps(cell)).items() if k != "from"} == {
                k: v for k, v in kept.items() if k != "from"
            }
    assert RESULTS != predict.PREDICTED and not set(predict.PREDICTED.glob("*")) & set(Path(RESULTS).glob("*"))


@pytest.mark.parametrize("exhibit", [table1, fig1, fig9, fig10], ids=lambda module: module.__name__.split(".")[-1])
def test_an_exhibit_that_waits_shows_the_prediction_and_stays_open(exhibit, monkeypatch, tmp_path):
    import benchmarks.store as store
    from experiments.lib import speed

    class Nothing(store.Results):
        """As if no GPU had measured anything."""

        def __init__(self, benchmark, folder=tmp_path):
            super().__init__(benchmark, folder)

    monkeypatch.setattr(speed, "Results", Nothing)
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
