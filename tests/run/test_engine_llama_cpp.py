"""engine=llama_cpp as a run: rows, KL against its own full cache in f32 and transformers', and what it refuses."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from llama_package import needs_package

from experiments.studies import composed_runs
from kvexp.generate import prefill
from kvexp.generate.llama_cpp import VERSION, Context
from kvexp.generate.prefill import decode_step
from kvexp.hf import patch_model
from kvexp.results.divergence import divergence_table
from kvexp.results.read import read_runs
from kvexp.run.batches import evaluate_run, group_key, measure_rest, prefill_groups, run_group
from kvexp.run.calibrate import calibrate_main
from kvexp.run.engine import full_logits
from kvexp.run.engine_llama_cpp import LlamaCppDriver, eviction_of, fetch_main
from kvexp.run.labels import refusal
from kvexp.run.model_spec import load
from kvexp.run.session import Session
from kvexp.run.store import Run, run_hash
from kvexp.util.errors import ConfigError

GQA = ["model=testbed_gqa", "task=testbed_summary", "limit=2", "batch_size=1", "task.max_new_tokens=8"]
ENGINE = "engine=llama_cpp"
RANDOM_ATTENTION = ["random", "method.per=model", "method.redraw=true", "method.protect_recent=8", "budget.heads=union"]
UNION = ["method.pruning=union"]
FULL, HALF = "method=full", ["method=streaming_llm", "kv_ratio=0.5"]


def settings(*words):
    ((one,),) = [composed_runs(words, Session())[1]]
    return one


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=h2o"], "shows keys but no attention weights .*, so method=h2o cannot choose there"),
        (["method=random"], "set method.per=model, got head"),
        ([*HALF, "budget.layers=pyramid"], "set budget.heads=uniform or union, and leave budget.layers alone"),
        ([*HALF, "budget.heads=adaptive"], "set budget.heads=uniform or union"),
        ([*HALF, "engine.shift=half", "cache.positions=original"], "set .* cache.positions=renumbered"),
        (["method=random", "method.per=model"], "set method.protect_recent=2 or more, or cache.positions=renumbered"),
        (["method=window", "engine.shift=half"], "set method=streaming_llm .* cache.positions=renumbered"),
        ([*HALF, "cache.evict_every=4"], "leave out cache.evict_every, cache.evict_at_prefill and"),
        ([FULL, "cache.bits=4"], "has no cache.bits"),
        ([*HALF, "generation=beam4"], "set generation=greedy"),
        ([FULL, "model.weights=int8"], "model.weights=null"),
        ([FULL, "model=testbed_rope"], "models of type llama, qwen2, qwen3, and this one is gptj"),
        ([FULL, "task=news_qa"], "set task.question=in_prompt"),
        ([FULL, "engine.cache_k=q4_k"], r"engine.cache_k must be .*q4_0.*, got 'q4_k'"),
        ([FULL, "engine.cache_k=q4_0", "engine.flash=false"], "engine.cache_v=q4_0 needs flash attention"),
        ([FULL, "engine.weights=file"], "set model=local model.path=FILE.gguf"),
        (
            [*HALF, "engine.cache_k=q8_0"],
            "moves keys in blocks only where they are rotated, .* a multiple of 64, .*cache.positions=original",
        ),
        (
            [FULL, "engine.cache_k=q8_0", "model=tiny"],
            "need heads of a multiple of 32",
        ),
    ],
)
def test_what_the_engine_cannot_be_asked_is_said_before_anything_loads(words, said):
    with pytest.raises(ConfigError, match=said):
        settings(*GQA, ENGINE, *words)


@needs_package
def test_triattention_needs_statistics(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))  # those that `calibrated` makes are not there
    with pytest.raises(ConfigError, match=r"needs statistics .* kvexp calibrate model=testbed_gqa"):
        settings(*GQA, ENGINE, "method=triattention")


@pytest.fixture(scope="module")
def calibrated(own_cache):
    """What TriAttention needs of the model."""
    assert calibrate_main(["model=testbed_gqa", "tokens=256", "sequences=2"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budget.heads=union"], r"set method.pruning=union, got per_layer_head \(budget.heads=union alone"),
        (["method.pruning=per_head"], "set method.pruning=union, got per_head"),
        ([*UNION, "engine.cache_k=q5_1"], "cannot in engine.cache_k=q5_1: set f32, f16, q8_0, q4_0"),
        ([*UNION, "method.protect_recent=0"], "which method=triattention may drop: set method.protect_recent=2"),
    ],
)
def test_triattention_is_refused_where_it_has_no_one_set_or_no_keys(calibrated, words, said):
    with pytest.raises(ConfigError, match=said):
        settings(*GQA, ENGINE, "method=triattention", *words)


@needs_package
@torch.no_grad()
@pytest.mark.parametrize("positions", ["original", "renumbered"])
@pytest.mark.parametrize("words", [UNION, ["method.pruning=per_head", "budget.heads=union"]])
def test_triattention_keeps_kvexps_positions_after_the_prompt_and_each_step(calibrated, monkeypatch, words, positions):
    words = [*GQA, "method=triattention", *words, "kv_ratio=0.25", f"cache.positions={positions}"]
    plain, asked = settings(*words), settings(*words, ENGINE)
    model, generator = patch_model(load(plain.model)[0]), torch.Generator().manual_seed(0)
    ids, text = (torch.randint(3, 260, (count,), generator=generator).tolist() for count in (150, 30))
    context = prefill(model, [ids], plain.cache, max_new_tokens=len(text))
    expected = [context.cache.kept_positions(2)[0]]
    for place, token in enumerate(text[:-1]):
        decode_step(model, torch.tensor([[token]]), torch.tensor([[len(ids) + place]]), context.cache)
        expected.append(context.cache.kept_positions(2)[0])
    engine, kept = LlamaCppDriver.engine(asked, model, 0), []
    evict = engine._evict
    monkeypatch.setattr(engine, "_evict", lambda cache, count: (evict(cache, count), kept.append(cache.held.tolist())))
    engine.logits(ids, text)
    assert expected[:-1] == [[positions] * 4 for positions in kept]
    assert len({tuple(positions) for positions in kept}) == len(text) - 1


@needs_package
def test_identity_has_package_library_and_formats_and_every_format_one_baseline():
    plain, full = settings(*GQA, FULL), settings(*GQA, FULL, ENGINE)
    eight = settings(*GQA, FULL, ENGINE, "engine.cache_k=q8_0")
    assert "engine" not in plain.identity
    known = {"name": f"xllamacpp=={VERSION}", "cache_k": "q8_0", "cache_v": "q8_0", "flash": True, "rotate": True}
    assert known.items() <= eight.identity["engine"].items()
    assert len(eight.identity["engine"]["library"]) == 64
    assert full.is_baseline
    assert not eight.is_baseline
    assert run_hash(eight.baseline().identity) == run_hash(full.identity)
    assert eight.baseline().labels == full.labels
    assert eight.labels["method"] == "full_quantised"
    assert refusal(eight) is None
    assert group_key(eight) == group_key(full) != group_key(plain)


@needs_package
def test_the_engines_file_is_written_once_and_its_size_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
    for said in ("writing the model for the engine, once: 4 MB", ""):
        assert fetch_main(["model=testbed_gqa"]) == 0
        out, err = capsys.readouterr()
        assert out.endswith("model.gguf, 4 MB\n")
        assert said in err
        assert bool(said) == ("writing" in err)
    assert fetch_main(["model=testbed_rope"]) == 2
    assert "models of type llama, qwen2, qwen3, and this one is gptj" in capsys.readouterr().err


@needs_package
def test_a_prompt_that_is_too_long_is_not_told_to_go_where_the_engine_cannot(tmp_path):
    words = [*GQA, ENGINE, FULL, "task.max_new_tokens=100000", f"outputs_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"lower task.max_new_tokens \(or generation.max_new_tokens\)$"):
        evaluate_run(settings(*words))


@needs_package
def test_rows_and_divergence_are_recorded_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    where = [f"outputs_dir={tmp_path / 'out'}", "divergence=true"]
    asked = settings(*GQA, FULL, ENGINE, "engine.cache_k=q4_0", *where)
    session = Session()
    evaluate_run(asked, session)
    run = measure_rest(asked, session)
    assert (session.rows_written, session.texts_measured) == (4, 2)  # two, and two of its baseline
    evaluate_run(asked, session)
    measure_rest(asked, session)
    assert (session.rows_written, session.texts_measured) == (4, 2)
    environment = run.path / "env.json"
    environment.write_text(environment.read_text().replace('"threads": ', '"threads": 7'))
    with pytest.raises(ConfigError, match=r"has rows made with 7.* threads, and in llama\.cpp's flash attention"):
        evaluate_run(settings(*GQA, FULL, ENGINE, "engine.cache_k=q4_0", "limit=3", *where), Session())
    for line in run.divergence().values():
        assert not line["first_by_prefill"]  # the prompt has read its own tokens in the format
        assert statistics.fmean(line["kl"]) > 1e-7
        assert line["kl_transformers"] == pytest.approx(line["kl"], abs=1e-6)
        assert abs(statistics.fmean(line["engine_kl"])) < 1e-9
    (row,) = divergence_table(read_runs(tmp_path / "out").ran).to_dict("records")
    assert abs(row["engine_kl"]) < 1e-9 < row["kl_transformers"]
    for row in run.rows():
        assert row["receipt"]["kv_bytes"] == row["receipt"]["slots"] * 2 * 4 * 4 * 18
        assert len(row["info"]["output_logprobs"]) == row["new_tokens"]


@needs_package
def test_a_sweep_reads_each_prompt_once_for_each_format_and_measures_what_runs_alone_do(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    sliding = [*HALF, "cache.positions=original"]
    asked = [[FULL, "engine.cache_k=q4_0"], [*sliding, "engine.cache_k=q4_0"], sliding]
    words = [[*GQA, ENGINE, "divergence=true", *more] for more in asked]
    together = [settings(*more, f"outputs_dir={tmp_path / 'a'}") for more in words]
    prompts, forwards = [], []
    read = Context.read
    monkeypatch.setattr(Context, "read", lambda self, ids: (len(ids) > 1 and prompts.append(ids), read(self, ids))[1])
    monkeypatch.setattr("kvexp.run.engine.full_logits", lambda *args: (forwards.append(1), full_logits(*args))[1])
    (group,) = prefill_groups(together)
    run_group(group, Session())
    assert len(prompts) == 2 * 2  # prompts, formats
    assert len(forwards) == 2
    for run in together:
        one = settings(*words[together.index(run)], f"outputs_dir={tmp_path / 'b'}")
        measure_rest(one, Session())
        both = [Run.load(each.outputs_dir / run_hash(each.identity)).divergence() for each in (run, one)]
        assert len(both[0]) == 2
        assert both[0] == both[1]


@needs_package
def test_a_shift_drops_half_of_what_is_no_sink():
    """As llama-server's: n_discard = (n_past - n_keep) / 2, once n_past is the context's size."""
    words = [*GQA, ENGINE, "method=streaming_llm", "kv_ratio=1.0", "cache.positions=renumbered", "engine.shift=half"]
    eviction = eviction_of(settings(*words), 0)
    held = np.arange(100)
    assert eviction.dropped(100, held, None).tolist() == list(range(4, 4 + 48))
    held = np.delete(held, range(4, 52))
    assert not len(eviction.dropped(100, np.append(held, range(100, 147)), None))
    assert eviction.dropped(100, np.append(held, range(100, 148)), None).tolist() == list(range(4, 52))


@needs_package
@pytest.mark.parametrize("positions", ["original", "renumbered"])
@pytest.mark.parametrize(
    "method",
    [
        ["streaming_llm"],
        ["random", "method.per=model", "method.protect_recent=2"],
        RANDOM_ATTENTION,
        ["triattention", *UNION],
    ],
)
def test_a_run_that_evicts_is_kvexps_own(tmp_path, calibrated, method, positions):
    name, *more = method
    words = [*GQA, f"method={name}", *more, "kv_ratio=0.5", f"cache.positions={positions}"]
    words += [f"outputs_dir={tmp_path / 'out'}", "divergence=true"]
    pairs = []
    for asked in (settings(*words), settings(*words, ENGINE)):
        evaluate_run(asked, Session())
        pairs.append(measure_rest(asked, Session()))
    for row, other in zip(*(run.rows() for run in pairs), strict=True):
        assert row["output_tokens"] == other["output_tokens"]
        for name in ("slots", "slots_by_layer", "first_eviction_step"):
            assert row["receipt"][name] == other["receipt"][name]
    for line, other in zip(*(run.divergence().values() for run in pairs), strict=True):
        assert line["tokens"] == other["tokens"]
        assert line["first_by_prefill"] == other["first_by_prefill"] is True
        assert other["kl"] == pytest.approx(line["kl"], rel=1e-3, abs=1e-6)
