"""What the benchmarks compute from their measurements, by hand-computed cases; no time is asserted."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
from typing import Any

import pytest
import torch

from benchmarks import decode, peers, report, throughput, whole
from benchmarks.clock import OUT_OF_MEMORY, Ratio, busy, in_turns, peak, ratio, slot_bytes, step_bytes, weight_bytes
from benchmarks.command import Command, Line, Target, table
from benchmarks.report import tables
from benchmarks.shapes import SHAPES, ours, prompt_of, stock, variant
from benchmarks.store import Results
from benchmarks.suite import CPU, GPU, PEERS, REAL, Run, main
from benchmarks.throughput import largest

# What the benchmarks compute from their measurements, by hand-computed cases; no time is asserted.


def test_turns_are_rotated_and_the_first_is_dropped() -> None:
    order = []

    def task(name: str):
        return lambda: order.append(name) or {"n": len(order)}

    taken = in_turns({name: task(name) for name in "abc"}, repeats=2, warm=1)
    assert order == list("abcbcacab")
    assert taken == {"a": [{"n": 6}, {"n": 8}], "b": [{"n": 4}, {"n": 9}], "c": [{"n": 5}, {"n": 7}]}


def test_out_of_memory_is_a_sample_and_ends_nothing() -> None:
    calls = []

    def dies():
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    taken = in_turns({"dies": dies, "lives": lambda: {"n": 1}}, repeats=3)
    assert taken == {"dies": [{"error": OUT_OF_MEMORY}], "lives": [{"n": 1}] * 3}
    assert len(calls) == 1


def test_another_error_is_not_taken_for_it() -> None:
    def dies():
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        in_turns({"dies": dies}, repeats=1)


def test_ratios_are_paired_by_turn() -> None:
    """A machine twice as slow in the second turn changes no ratio: 2/1 and 4/2, although the medians say 3/1.5."""
    assert ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == Ratio(2.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="argument"):
        ratio([1.0], [1.0, 2.0])


def test_a_busy_machine_is_named() -> None:
    assert busy([{"wall_s": 3.0, "cpu_s": 1.0}] * 3) == "busy machine: wall / cpu 3.0"
    assert busy([{"wall_s": 1.1, "cpu_s": 1.0}]) == busy([{"tpot_s": 1.0}]) == ""


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 40])
def test_bisection_finds_the_largest_batch(limit: int) -> None:
    tried = []
    assert largest(lambda batch: tried.append(batch) or batch <= limit, most=17) == min(limit, 17)
    assert max(tried) <= 17
    assert len(tried) == len(set(tried))


def test_bisection_may_stop_early() -> None:
    tried = []
    found = largest(lambda batch: tried.append(batch) or batch <= 1000, most=4096, fine=0.1)
    assert 900 < found <= 1000
    assert len(tried) < 16


def test_bytes_of_a_step() -> None:
    """2 layers, hidden 32, 4 query and 2 kv heads of 8, MLP 48, vocabulary 97, float32."""
    model = stock(SHAPES["to_beat"].tiny(), "cpu")
    attention, mlp = 32 * 32 * 2 + 2 * 32 * 16, 3 * 32 * 48
    weights = 2 * (attention + mlp + 2 * 32) + 32 + 97 * 32  # the head is read, the embedding is not
    assert weight_bytes(model) == 4 * weights
    assert slot_bytes(model.config, model.dtype) == 2 * 2 * 2 * 8 * 4
    assert step_bytes(model, 10, 3) == 4 * weights + 3 * 10 * 2 * 2 * 2 * 8 * 4

    tied, mpt = (stock(SHAPES[name].tiny(), "cpu") for name in ("llama_100m", "mpt_7b"))
    assert weight_bytes(tied) == sum(weight.numel() for weight in tied.parameters()) * 4, "the embedding is read whole"
    assert slot_bytes(mpt.config, mpt.dtype) == 2 * 2 * 4 * 8 * 4, "no grouped heads"


@pytest.mark.real
def test_the_real_model_is_the_layout_it_is_named_after(smollm2) -> None:
    model = stock(SHAPES["smollm2_135m"], "cpu")
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008 and model.dtype == torch.float32


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.real])
def test_layouts_are_those_they_are_named_after(name: str) -> None:
    """Parameters in millions, without building them."""
    millions = {"to_beat": 56, "llama_100m": 100, "llama2_7b": 6738, "mistral_7b": 7241, "mpt_7b": 6649}
    model = stock(SHAPES[name], "meta")
    assert sum(weight.numel() for weight in model.parameters()) // 10**6 == millions[name]
    assert model.dtype == (torch.float32 if name in ("to_beat", "llama_100m") else torch.bfloat16)


@pytest.mark.parametrize("name", ["to_beat", "mpt_7b", "mistral_7b"])
def test_both_models_share_weights_and_logits(name: str) -> None:
    shape = SHAPES[name].tiny()
    theirs = stock(shape, "cpu")
    mine = ours(theirs)
    assert [w.data_ptr() for w in theirs.parameters()] == [w.data_ptr() for w in mine.parameters()]
    assert theirs.config._attn_implementation != mine.config._attn_implementation
    with torch.no_grad():
        ids = prompt_of(shape, 11)
        torch.testing.assert_close(theirs(ids).logits, mine(ids).logits, atol=1e-5, rtol=1e-5)


def test_slots_of_a_variant() -> None:
    """0.29 of 100 is 29, as kvexp's own budget; what grows holds half of the new tokens on average."""
    assert [variant(name).slots(100, 10) for name in ("h2o@0.29", "full", "hf", "short@0.2")] == [29, 105, 105, 25]
    method, budget = variant("a2sf@0.29").plan(100)
    assert (method.name, budget.tokens) == ("a2sf", 29)
    assert variant("short@0.2").plan(100)[1] is None
    assert [variant(name).graph for name in ("h2o@0.2", "h2o@0.2,graph=auto")] == ["off", "auto"]


@pytest.mark.parametrize(
    "name", ["h2o", "full@0.5", "nosuch@0.5", "hf@0.2", "hf,bits=4", "h2o@0.5,nosuch=1", "h2o@0.5,graph=on"]
)
def test_a_variant_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition("@")[0]):
        variant(name)


def test_peak_memory_is_that_of_the_task() -> None:
    """64 MiB are held for a moment; what was held before and what was freed before do not count."""
    before = torch.ones(16 << 20)  # 64 MiB
    freed = torch.ones(16 << 20)
    del freed
    kept, took, how = peak(lambda: torch.ones(16 << 20).sum(), "cpu")
    assert float(kept) == 16 << 20 == float(before.sum())
    assert how in ("hwm", "polled")
    if how == "hwm":
        assert 63 << 20 <= took <= 96 << 20


def test_what_is_there_is_not_measured_again(tmp_path) -> None:
    calls = []

    def measure():
        calls.append(1)
        return [{"variant": "a", "samples": [{"n": len(calls)}]}]

    key = {"prompt": 4, "variants": ("a",)}  # a tuple here is a list in the file
    first, was_there = Results("some", tmp_path).measured(key, measure, "cpu")
    assert not was_there
    again, was_there = Results("some", tmp_path).measured(key, measure, "cpu")
    assert was_there and again["rows"] == first["rows"] and len(calls) == 1
    Results("some", tmp_path).measured({"prompt": 5}, measure, "cpu")
    Results("some", tmp_path).measured(key, measure, "cpu", again=True)
    cells = Results("some", tmp_path).cells
    assert [cell["rows"][0]["samples"][0]["n"] for cell in cells] == [2, 3]
    assert {"machine", "commit", "sources", "date", "versions", "threads"} <= cells[0]["from"].keys()


def test_a_failed_measurement_leaves_the_file_as_it_was(tmp_path) -> None:
    results = Results("some", tmp_path)
    results.measured({"n": 1}, list, "cpu")
    before = results.path.read_text()

    def dies():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        results.measured({"n": 1}, dies, "cpu", again=True)
    assert results.path.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


def test_the_table_says_what_was_missed() -> None:
    lines = [
        Line("fast", Ratio(0.5, 0.4, 0.6), target=Target(0.6, "<=")),
        Line("slow", Ratio(0.7, 0.7, 0.7), target=Target(0.8, ">=")),
        Line("unsure", Ratio(0.7, 0.7, 0.7), target=Target(0.6, ">="), note=busy([{"wall_s": 2.0, "cpu_s": 1.0}])),
        Line("dead", None, target=Target(0.8, ">="), note=OUT_OF_MEMORY),
    ]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table(lines).splitlines()]
    assert rows[0] == ["what", "ratio", "min to max", "target", "verdict", "note"]
    assert rows[2:] == [
        ["fast", "0.5", "0.4 to 0.6", "<= 0.6", "met", ""],
        ["slow", "0.7", "0.7 to 0.7", ">= 0.8", "MISSED", ""],
        ["unsure", "0.7", "0.7 to 0.7", ">= 0.6", "met?", "busy machine: wall / cpu 2.0"],
        ["dead", "", "", ">= 0.8", "", OUT_OF_MEMORY],
    ]


def _decode_cell(**times: list[float]) -> dict:
    size = {"hf": 1000, "full": 1000, "h2o@0.2": 400, "short@0.2": 400}
    rows = [
        {"variant": name, "step_bytes": size[name], "samples": [{"tpot_s": t, "cpu_s": t} for t in taken]}
        for name, taken in times.items()
    ]
    key = {"shape": "to_beat", "prompt": 8192, "batch": 1, "new": 64, "device": "cpu", "tiny": False}
    return {"key": key, "rows": [{"variant": "bandwidth", "samples": [{"bytes_per_s": 100.0}] * 2}, *rows]}


def test_decode_is_judged_by_the_bytes() -> None:
    """The bytes predict 1000 / 400 = 2.5 over the faster full cache (kvexp's, 16 s); 8 s are 2 times: 0.8 of it."""
    cell = _decode_cell(**{"hf": [20.0, 20.0], "full": [16.0, 16.0], "h2o@0.2": [8.0, 8.0], "short@0.2": [6.0, 6.0]})
    found = {line.what: line for line in decode.lines(cell)}
    per_token = found["h2o@0.2: seconds per token / hf"]
    assert per_token.ratio.value == 0.4
    assert per_token.bandwidth == 50.0  # 400 bytes in 8 s
    assert per_token.floor == 2.0  # 4 s at 100 bytes a second
    assert found["hf: seconds per token / hf"].floor == 2.0
    reached = found["h2o@0.2: of the speed-up over full that the bytes predict"]
    assert math.isclose(reached.ratio.value, 0.8)
    assert reached.target == Target(0.8, ">=")
    assert found["h2o@0.2: score, select and overwrite, of a step"].ratio.value == 0.25
    assert per_token.target is None  # that one is of 4096 tokens


def test_decode_without_a_full_cache_that_fits() -> None:
    cell = _decode_cell(**{"h2o@0.2": [8.0, 8.0]})
    cell["rows"].append({"variant": "hf", "step_bytes": 1000, "samples": [{"error": OUT_OF_MEMORY}]})
    assert [(line.what, line.ratio, line.note) for line in decode.lines(cell)] == [("hf", None, OUT_OF_MEMORY)]


def test_windows_of_a_whole_generation() -> None:
    """What grows is looked at in three places, by Simpson's rule; 1 s + 7 tokens, (1 + 4 * 2 + 6) / 6 s each."""
    assert whole.windows(variant("full"), 100, 60, 20) == [100, 120, 140]
    assert whole.windows(variant("pqcache@0.2"), 100, 60, 20) == [100, 120, 140]
    assert whole.windows(variant("h2o@0.2"), 100, 60, 20) == whole.windows(variant("full"), 100, 20, 20) == [100]
    parts = [[{"ttft_s": 1.0, "tt2t_s": 2.0, "tpot_s": t, "peak_bytes": p}] for t, p in ((1.0, 5), (2.0, 7), (6.0, 6))]
    (made,) = whole.joined(parts, 8)
    assert math.isclose(made["total_s"], 1 + 7 * 2.5)
    assert (made["ttft_s"], made["tt2t_s"], made["peak_bytes"]) == (1.0, 2.0, 7)
    assert whole.joined([parts[0], [{"error": OUT_OF_MEMORY}]], 8) == [{"error": OUT_OF_MEMORY}]


def test_peers_are_compared_with_hugging_face_alone() -> None:
    def row(name: str, seconds: float) -> dict:
        sample = {"tpot_s": seconds, "wall_s": seconds, "cpu_s": seconds}
        return {
            "variant": name,
            "step_bytes": 10,
            "samples": [{**sample, "ttft_s": 2 * seconds, "ttft_cpu_s": 3 * seconds, "peak_bytes": 4}],
        }

    rows = [{"variant": "bandwidth", "samples": [{"bytes_per_s": 10.0}]}, row("hf", 1.0), row("snapkv, prefill", 3.0)]
    found = {line.what: line.ratio.value for line in peers.lines({"key": {}, "rows": rows})}
    assert found == {
        "hf: seconds per token / hf": 1.0,
        "snapkv, prefill: seconds per token / hf": 3.0,
        "snapkv, prefill: seconds of prefill / hf": 3.0,
        "snapkv, prefill: peak memory of prefill / hf": 1.0,
    }


def test_exponents_and_where_they_change() -> None:
    from benchmarks.growth import bends, exponents

    places = [1.0, 2.0, 4.0, 8.0]
    slopes = exponents(places, [3.0, 3.0, 6.0, 24.0])
    assert slopes == pytest.approx([0, 1, 2])
    assert bends(places, slopes) == [2.0, 4.0] and bends(places, [1.0, 1.1, 1.2]) == []


def test_growth_from_nothing_has_no_ratio() -> None:
    """The smallest point may fit into memory that the process held already: its peak is 0 bytes then."""
    from benchmarks import growth

    def row(place: str, peak: int) -> dict[str, Any]:
        sample = {"prefill_s": 1.0, "step_s": 1.0, "kv_bytes": 8, "peak_bytes": peak, "wall_s": 1.0, "cpu_s": 1.0}
        return {"variant": place, "samples": [sample]}

    found = growth.lines({"key": {"axis": "layers"}, "rows": [row("1", 0), row("2", 16)]})
    peaks = [line for line in found if growth.QUANTITIES["peak_bytes"] in line.what]
    assert [line.ratio for line in peaks] == [None] and "nothing measured at the first point" in peaks[0].note
    assert all(line.ratio is not None for line in found if line not in peaks)


def test_a_folder_without_results_has_no_tables(tmp_path) -> None:
    (tmp_path / "other.json").write_text("[]")
    assert tables(tmp_path) == ([], [])


def test_names_of_a_suite_are_its_own() -> None:
    for suite in (CPU, GPU):
        names = [run.name for run in suite]
        assert len(names) == len(set(names))


def test_peers_import_no_kvexp(stage, tmp_path) -> None:
    """They run where kvexp cannot, with an older transformers: they take what needs the standard library alone."""
    code = (
        "import sys, benchmarks.peers\n"
        "held = {name for name in sys.modules if name.startswith('kvexp.') and '.util' not in name}\n"
        "print('held:', sorted(held), flush=True)\n"
        "sys.exit(0)"
    )
    done, said = stage.run([], tmp_path / "log", code, bare=True)
    assert done == 0 and "held: []" in said, said


def test_options_say_what_a_shape_may_be(capsys) -> None:
    with pytest.raises(SystemExit):
        decode.main(["--shape", "nosuch"])
    assert "to_beat" in capsys.readouterr().err


# Every command of both suites in its tiny form: it runs on a CPU, resumes, and its tables have their lines.


COMMANDS = ("sweep",)  # runs whole commands: too slow here
HERE = [run for run in (*CPU, *GPU, *REAL) if run.python != str(PEERS) and run.module not in COMMANDS]


def _kinds() -> list[Run]:
    """One run per module, layout and tiny form: lengths are the tiny form's, so that more would be the same again."""
    kinds = {}
    for run in HERE:
        words = run.arguments.split()
        shape = words[words.index("--shape") + 1] if "--shape" in words else ""
        kinds.setdefault((run.module, shape, run.tiny, "--figures 10" in run.arguments), run)
    return list(kinds.values())


KINDS = _kinds()


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "run",
    # real_growth runs sweeps in processes of their own, and waits until their files are settled
    [pytest.param(run, marks=[pytest.mark.slow] if run.name == "real_growth" else []) for run in KINDS],
    ids=lambda run: f"{run.module}-{run.name}",
)
def test_a_command_of_the_suites_runs(run, tmp_path, capsys) -> None:
    module = importlib.import_module(f"benchmarks.{run.module}")
    line = [*run.words(tiny=True), "--out", str(tmp_path), "--device", "cpu", "--threads", "1"]
    assert module.main(line) == 0
    first = capsys.readouterr().out
    assert "TINY" in first and "| what" in first
    assert OUT_OF_MEMORY not in first
    cells = json.loads((tmp_path / f"{run.module}.json").read_text())
    assert cells and all(cell["key"]["tiny"] for cell in cells)
    if run in (KINDS[0], KINDS[-1]):
        assert module.main(line) == 0
        assert "has this already" in capsys.readouterr().out
        assert json.loads((tmp_path / f"{run.module}.json").read_text()) == cells


@pytest.mark.parametrize("run", [*CPU, *GPU, *REAL], ids=lambda run: run.name)
def test_the_real_forms_are_understood(run, tmp_path, monkeypatch) -> None:
    """Arguments and variants are read, and every cell is asked for; nothing is measured."""
    module, asked = importlib.import_module(f"benchmarks.{run.module}"), []
    monkeypatch.setattr(Command, "cell", lambda self, key, *_: asked.append(key))
    assert module.main([*run.words(), "--out", str(tmp_path), "--device", "cpu"]) == 0
    keys = [json.dumps(key) for key in asked]
    assert keys and len(keys) == len(set(keys))


def test_a_limit_is_an_answer(tmp_path, capsys) -> None:
    """What needs more than the limit at batch 1 says so, in the table too."""
    line = ["--tiny", "--shape", "mpt_7b", "--lengths", "8+4", "--limit-gib", "0", "--repeats", "1", "--most", "2"]
    assert throughput.main([*line, "--variants", "full", "h2o@0.5", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("batch 0; out of memory at batch 1") == 2


def test_the_report_has_every_table_and_no_tiny_one_unasked(tmp_path, capsys) -> None:
    line = ["--tiny", "--prompts", "20", "--new", "3", "--repeats", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert decode.main([*line, "--variants", "hf", "h2o@0.5"]) == 0
    shown = capsys.readouterr().out.strip()
    assert report.main([str(tmp_path)]) == 1
    assert "no results" in capsys.readouterr().out
    assert report.main([str(tmp_path), "--tiny"]) == 0
    assert capsys.readouterr().out.strip() == shown


def test_a_suite_runs_its_commands_and_says_what_failed(tmp_path, capfd, monkeypatch) -> None:
    words = ["gpu", "--tiny", "--out", str(tmp_path), "--only"]
    assert main([*words, "llama2_2k"]) == 0
    assert "1 of 1 done" in capfd.readouterr().out
    assert (tmp_path / "whole.json").exists()
    (tmp_path / "whole.json").write_text("not json")
    (run,) = (run for run in GPU if run.name == "llama2_2k")
    with pytest.raises(json.JSONDecodeError):  # here, for a process takes long to begin
        whole.main([*run.words(tiny=True), "--out", str(tmp_path), "--device", "cpu"])
    monkeypatch.setattr(subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, 1))
    assert main([*words, "llama2_2k"]) == 1
    assert "not: llama2_2k" in capfd.readouterr().out


def test_what_takes_long_runs_on_request_alone(capsys) -> None:
    def names(*words: str) -> list[str]:
        assert main(["real", "--list", *words]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert names("--all") == [run.name for run in REAL]
    assert names() == [run.name for run in REAL if not run.more] and len(names()) == 5
    assert names("--only", "real_growth") == ["real_growth"]


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in (*CPU, *REAL) if run.module == "sweep"], ids=lambda run: run.name)
def test_commands_that_start_commands(run, tmp_path, capsys) -> None:
    module = importlib.import_module(f"benchmarks.{run.module}")
    assert module.main([*run.words(tiny=True), "--out", str(tmp_path), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "TINY" in said and "seconds / " in said
