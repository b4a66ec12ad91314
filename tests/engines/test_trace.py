"""Traces: they follow the rules that a numpy reader knows, for every profile; a wrong engine is found out."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_eviction_log import case_of, run_of
from test_sweep_divergence import ONE_BY_ONE, group

from kvexp.core import Budget, CacheConfig
from kvexp.engines.trace import BLOCK, main, trace_of, write_trace
from kvexp.engines.trace_check import PROFILES, SHOWN, TraceError, check_rules, differences, held, read_trace
from kvexp.engines.trace_check import main as check_main
from kvexp.generate.prefill import decode_step
from kvexp.methods import A2SF, H2O, TOVA, Full, KeyDiff, Keyformer, SnapKV, StreamingLLM
from kvexp.run.batches import run_group
from kvexp.run.session import Session
from kvexp.util.errors import ConfigError

MODEL = {"name": "tiny"}
CHECKER = Path(__file__).resolve().parents[2] / "kvexp" / "engines" / "trace_check.py"


def traced(method, profile="per_head", tokens=12, question=(), new=7, family="llama"):
    case = case_of(family, method, tokens=tokens, question=question, positions="original")
    return trace_of(case, profile, new, MODEL)


METHODS = (H2O(), SnapKV(window=4), TOVA(), A2SF(alpha=0.5), Keyformer(), KeyDiff(), StreamingLLM())
SOME = [pytest.param(each, marks=[pytest.mark.slow] if place > 1 else []) for place, each in enumerate(METHODS)]


@pytest.mark.parametrize("method", SOME, ids=lambda method: method.name)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_eviction_follows_from_the_recorded_scores(method, profile):
    trace = traced(method, profile, tokens=20 if profile == "paged" else 12, question=[50, 51])
    assert check_rules(trace) == []
    assert trace["header"]["steps"] == 9 and (profile == "paged" or (~trace["prompt_kept"]).any())
    assert trace["tokens"].shape == (31 + 9,) and trace["top_ids"].shape == (10, 8)


@pytest.mark.parametrize("method", [H2O(), Keyformer(), StreamingLLM()], ids=lambda method: method.name)
def test_per_head_is_what_the_run_itself_holds(method):
    case = case_of("llama", method, positions="original")
    trace = trace_of(case, "per_head", 7, MODEL)
    context = case.prefill_prompt()
    for step in range(-1, trace["header"]["steps"]):
        if step >= 0:
            at = torch.tensor([[len(case.prompt) + step]])
            decode_step(case.model, at * 0 + int(trace["tokens"][31 + step]), at, context.cache)
        for layer in range(2):
            kept = context.cache.layer_states[layer].kept_positions()[0]
            assert kept == [held(trace, step, layer, head) for head in range(3)]


def test_the_profiles_keep_what_their_memory_can():
    union, pages = traced(H2O(), "union"), traced(H2O(), "paged", tokens=24)
    for layer in range(2):
        for step in range(-1, 7):
            assert held(union, step, layer, 0) == held(union, step, layer, 2)
            kept = held(pages, step, layer, 1)
            assert {at // BLOCK for at in kept} == {at // BLOCK for at in range(31 + step + 1) if at in kept}
            full = [at for at in range(31 + step + 1) if at // BLOCK in {one // BLOCK for one in kept}]
            assert kept == full
    assert pages["header"]["block"] == BLOCK
    appended = traced(H2O(), "append_only")
    assert appended["header"]["evicts_while_decoding"] is False
    assert held(appended, 6, 1, 2) == [*held(appended, -1, 1, 2), *range(31, 38)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("traced")
    run_group(group(outputs, *ONE_BY_ONE, methods=("h2o",)), Session())
    return run_of(outputs, "h2o")


@pytest.mark.parametrize("profile", ["paged", *(pytest.param(each, marks=pytest.mark.slow) for each in PROFILES[:2])])
def test_the_command_writes_a_trace_that_the_checker_alone_reads(run, tmp_path, profile, capsys):
    out = tmp_path / "h2o.npz"
    assert main([str(run.path), "0", "--profile", profile, "--new-tokens", "5", "--out", str(out)]) == 0
    assert f"h2o, profile {profile}" in capsys.readouterr().out
    # Nothing of kvexp and no torch: as an engine would run a copy of the file.
    copied = tmp_path / "trace_check.py"
    copied.write_text(CHECKER.read_text("utf-8"), "utf-8")
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'kvexp', 'pandas'), None))\n"
        f"sys.argv = ['trace_check.py', {str(out)!r}]\n"
        f"runpy.run_path({str(copied)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "follows its own rules" in done.stdout, done.stderr
    assert check_main([str(out), str(out)]) == 0
    assert "keeps what the reference keeps" in capsys.readouterr().out


def test_several_examples_and_profiles_go_into_a_folder(run, tmp_path, capsys):
    words = [str(run.path), "0", "1", "--profile", "union", "append_only", "--new-tokens", "2", "--out"]
    assert main([*words, str(tmp_path / "traces")]) == 0
    names = {f"h2o_{profile}_{index}.npz" for profile in ("union", "append_only") for index in (0, 1)}
    assert {file.name for file in (tmp_path / "traces").iterdir()} == names
    capsys.readouterr()
    assert main([*words, str(tmp_path / "one.npz")]) == 2
    assert "--out must be a folder, or end in .npz for one trace; got " in capsys.readouterr().err


def as_engine(trace):
    """What an engine would write: positions held, without slots or scores."""
    header = trace["header"]
    steps = [
        [[held(trace, step, layer, head) for head in range(header["heads"])] for layer in range(header["layers"])]
        for step in range(header["steps"])
    ]
    width = max(len(each) for layers in steps for heads in layers for each in heads)
    padded = [[[each[::-1] + [-1] * (width - len(each)) for each in heads] for heads in layers] for layers in steps]
    return {"tokens": trace["tokens"], "prompt_kept": trace["prompt_kept"].copy(), "step_held": np.array(padded)}


def test_an_engine_that_keeps_the_same_conforms_and_one_that_does_not_is_told_where():
    reference = traced(H2O())
    engine = as_engine(reference)
    assert differences(reference, engine) == []
    wrong = copy.deepcopy(engine)
    gone = next(at for at in range(31) if at not in held(reference, 2, 1, 2))
    lost = held(reference, 2, 1, 2)[0]
    wrong["step_held"][2, 1, 2][wrong["step_held"][2, 1, 2] == lost] = gone
    (first, *_) = differences(reference, wrong)
    assert first == f"after step 2, layer 1, head 2: lacks [{lost}], holds [{gone}] instead"
    other = {**engine, "tokens": engine["tokens"] + 1}
    assert "tokens fed are not the reference's" in differences(reference, other)[0]
    assert "has the shape" in differences(reference, {**engine, "prompt_kept": engine["prompt_kept"][:1]})[0]


def test_traces_of_two_profiles_are_not_compared_and_many_differences_are_counted(tmp_path, capsys):
    files = {profile: tmp_path / f"{profile}.npz" for profile in ("per_head", "union")}
    for profile, file in files.items():
        write_trace(traced(H2O(), profile), file)
    assert check_main([str(file) for file in files.values()]) == 2
    assert "of profile per_head, the other trace of union" in capsys.readouterr().err
    unnamed = read_trace(files["union"])
    del unnamed["header"]["profile"]
    write_trace(unnamed, files["union"])
    assert check_main([str(file) for file in files.values()]) == 1
    *lines, more, last = capsys.readouterr().out.splitlines()
    count = int(last.split(": ")[1].split()[0])
    assert len(lines) == SHOWN < count and more == f"... and {count - SHOWN} more"


def test_rounding_may_choose_between_equals_and_nothing_else():
    reference = traced(H2O())
    kept, scores, free = (reference[f"prompt_{name}"][0, 0] for name in ("kept", "scores", "protected"))
    one = int(np.flatnonzero(kept & ~free)[0])
    other = int(np.flatnonzero(~kept)[0])
    engine = as_engine(reference)
    engine["prompt_kept"][0, 0, [one, other]] = engine["prompt_kept"][0, 0, [other, one]]
    assert any("after the prompt, layer 0, head 0" in line for line in differences(reference, engine))
    scores[other] = scores[one] * (1 - 1e-5)
    assert not any("after the prompt" in line for line in differences(reference, engine))


def test_scores_and_probabilities_are_compared_where_there_are_some():
    reference = traced(H2O())
    near = {**as_engine(reference), "prompt_scores": reference["prompt_scores"] * (1 + 1e-5)}
    assert differences(reference, near) == []
    off = reference["prompt_scores"].copy()
    off[0, 0, 3] *= 1.5
    assert differences(reference, {**near, "prompt_scores": off}) == [
        f"1 of {off.size} scores of the prompt differ by more than 0.001"
    ]
    tops = {name: reference[name].copy() for name in ("top_ids", "top_logprobs")}
    assert differences(reference, near | tops) == []
    tops["top_logprobs"][4] -= 0.5
    assert "after step 3, token" in differences(reference, near | tops)[0]


def test_a_trace_that_breaks_its_rules_is_told(tmp_path, capsys):
    trace = traced(H2O())
    one = int(np.flatnonzero(trace["prompt_kept"][1, 1] & ~trace["prompt_protected"][1, 1])[0])
    trace["prompt_scores"][1, 1, one] = -1
    assert check_rules(trace)[0] == "layer 1: the prompt's eviction is not the one its scores ask for"
    file = tmp_path / "broken.npz"
    write_trace(trace, file)
    assert check_main([str(file)]) == 1 and "1 differences" in capsys.readouterr().out
    again = read_trace(file)
    assert again["header"] == json.loads(json.dumps(trace["header"]))
    (tmp_path / "no.npz").write_bytes(b"nothing")
    assert check_main([str(tmp_path / "no.npz")]) == 2 and "is no trace" in capsys.readouterr().err
    np.savez(tmp_path / "half.npz", tokens=trace["tokens"])
    with pytest.raises(TraceError, match="has no array 'prompt_kept'"):
        read_trace(tmp_path / "half.npz")


def test_what_cannot_be_traced_is_said():
    case = case_of("llama", H2O())
    for cache, why in (
        (CacheConfig(Full()), "evicts nothing"),
        (CacheConfig(H2O(), Budget(tokens=60)), "fits into the budget"),
        (CacheConfig(H2O(), Budget(tokens=12), positions="renumbered"), "original positions"),
    ):
        with pytest.raises(ConfigError, match=why):
            trace_of(dataclasses.replace(case, cache=cache), "per_head", 3, MODEL)
