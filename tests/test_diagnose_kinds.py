"""Log, twin and replay of head budgets, of quantised slots and of turns of a conversation, or why there is none."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_conversations import talk
from test_diagnose_log import case_of, command, held, job, run_job, watched  # noqa: F401
from test_diagnose_twin import losses
from tiny import stock

from kvexp.core import Budget, HeadScores, Quantization
from kvexp.diagnose.__main__ import main
from kvexp.diagnose.causal.prompt_scores import prompt_scores
from kvexp.diagnose.diagnosis_options import Twin
from kvexp.diagnose.folders import rows_of
from kvexp.diagnose.runs import cases
from kvexp.diagnose.undo import Replay, UndoneEvictions
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.evictions.eviction_files import EVICTIONS, TWIN, has, read_example_log, read_table
from kvexp.methods import H2O, TOVA, SnapKV
from kvexp.record import runs

NOTHING = UndoneEvictions((), (), 0, 0)
FEW_BITS = Quantization(4, 4, residual=8, group=7)
HEADS = {
    "union": Budget(tokens=12, heads="union"),
    "adaptive": Budget(tokens=12, heads="adaptive"),
    "global": Budget(tokens=12, heads="global"),
    "threshold": Budget(threshold=3.0, threshold_recent=4),
    "duo": Budget(tokens=20, heads="duo", stream_sinks=2, stream_recent=4),
}
RETRIEVAL = HeadScores.of(torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.7]]))  # three of six heads fit: 0.7 and up


def with_budget(family, method, how, **plan):
    case = case_of(family, method, positions="original", **plan)
    scores = RETRIEVAL if how == "duo" else None
    return dataclasses.replace(case, cache=dataclasses.replace(case.cache, budget=HEADS[how], head_scores=scores))


def attended_by_full(case, answer):
    """[layers][H * G, all tokens, all tokens]: Hugging Face's own attention of everything that was fed."""
    ids = torch.tensor([[*case.prompt, *case.question, *answer]])
    with torch.no_grad():
        return [weights[0] for weights in stock("llama")(ids, output_attentions=True).attentions]


@pytest.mark.parametrize("how", HEADS)
def test_head_budgets_have_a_log_a_twin_and_a_replay(how):
    case = with_budget("llama", H2O(recent_ratio=0.2), how)
    made, table = watched(case)
    fed, counts = len(case.prompt) + len(made.tokens[0]) - 1, []
    for layer, state in enumerate(made.cache.layer_states):
        for head, kept in enumerate(state.kept_positions()[0]):
            assert held(table, layer, head, fed, math.inf) == kept
            counts.append(len(held(table, layer, head, len(case.prompt), 0)))
    if how == "union":
        assert set(counts) == {11}
    elif how == "duo":
        assert counts == [5, 31, 5, 31, 5, 31], "a retrieval head lost something, or a streaming one did not"
    elif how != "threshold":
        assert sum(counts) == 11 * len(counts) and len(set(counts)) > 1, "heads hold different numbers"
    frame, answer, _ = losses(case)
    attention, start = attended_by_full(case, answer), len(case.prompt)
    for row in frame[frame.step.isin([1, 5])].itertuples():
        mass = attention[row.layer][5 * row.head : 5 * (row.head + 1), start + row.step - 1].mean(0)
        seen = [*held(table, row.layer, row.head, start + row.step - 1, row.step - 1), start + row.step - 1]
        assert row.kept == len(seen)
        assert row.lost == pytest.approx(1 - float(mass[seen].sum()), abs=2e-5)
    assert frame.lost.max() > 0.01
    replay = Replay(case, 2)
    first, last = replay.answers([NOTHING, replay.everything])
    assert [first] == made.tokens and [last] == case.full().generate_again().tokens


def test_quantised_slots_have_a_log_and_a_twin_and_say_why_no_replay():
    plain = case_of("llama", TOVA(), question=[50, 51])
    case = dataclasses.replace(plain, cache=dataclasses.replace(plain.cache, quantization=FEW_BITS))
    made, table = watched(case)
    fed = len(case.prompt) + 2 + len(made.tokens[0]) - 1
    for layer, state in enumerate(made.cache.layer_states):
        for head, kept in enumerate(state.kept_positions()[0]):
            assert held(table, layer, head, fed, math.inf) == kept
    frame, answer, _ = losses(case)
    attention, start = attended_by_full(case, answer), len(case.prompt)
    for row in frame[frame.step == 4].itertuples():
        mass = attention[row.layer][5 * row.head : 5 * (row.head + 1), start + 3].mean(0)
        seen = [*held(table, row.layer, row.head, start + 3, 3), start + 3]
        assert row.lost == pytest.approx(1 - float(mass[seen].sum()), abs=2e-5)
    # With room for everything only the bits are left: nothing is evicted here, and outputs differ all the same.
    roomy = dataclasses.replace(case, cache=dataclasses.replace(case.cache, budget=Budget(tokens=60)))
    frame, _, _ = losses(roomy)
    assert frame.lost.max() < 1e-6 and frame.error_here.max() < 1e-5 < 1e-3 < frame.error.mean()
    with pytest.raises(ConfigError, match=r"quantised slots drop what is evicted: .* cache\.bits=16"):
        Replay(case)


def test_a_full_cache_in_few_bits_has_a_twin_that_shows_what_the_bits_do(tmp_path, command):  # noqa: F811
    run_job(job(tmp_path, "method=full", "cache.bits=4", "cache.residual=8", "cache.group=8", "diagnose=twin", limit=1))
    assert not command.failures
    ((run, row),) = [(run, row) for run in runs(tmp_path) for row in run.rows() if has(run, row["example"], TWIN)]
    frame = read_table(run, row["example"], TWIN)
    assert len(frame) and frame.lost.max() < 1e-6 and frame.error.max() > 1e-3 > frame.error_here.max()
    assert read_table(run, row["example"], EVICTIONS).empty


def test_a_replay_of_quantised_slots_is_refused_before_a_model_loads(tmp_path, command, capsys, monkeypatch):  # noqa: F811
    run_job(job(tmp_path, "cache.bits=4", "cache.residual=8", "cache.group=8", limit=1))
    assert not command.failures
    run = next(run for run in runs(tmp_path) if run.labels["method"] == "h2o")
    monkeypatch.setattr("kvexp.diagnose.runs.load", None)
    for words in (["replay", str(run.path), "0"], ["explain", str(run.path)], ["explain", str(run.path), "--kl"]):
        assert main(words) == 2
        assert "explain a run of the same method with cache.bits=16" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("history", "method"), [("own", "h2o"), pytest.param("reference", "keyformer", marks=pytest.mark.slow)]
)
def test_a_turn_is_diagnosed_behind_all_that_was_fed_before_it(tmp_path, history, method):
    one = talk(tmp_path, f"method={method}", "kv_ratio=0.4", history=history)
    run = evaluate_run(one)
    rows = sorted(rows_of(run).values(), key=lambda row: row["index"])
    Twin().write(one, run, rows[:3])
    for row in rows[:3]:
        told = read_example_log(run, row["example"])
        assert told.same and told.prompt_tokens + told.question_tokens == row["info"]["fed"]
        assert len(read_table(run, row["example"], EVICTIONS)) > 0
        frame = read_table(run, row["example"], TWIN)
        assert frame.step.max() == told.steps and frame.lost.ge(frame.lost_ideal - 1e-6).all()
    assert told.question_tokens > 0
    tokens = {row["example"]: row["output"] for row in rows}
    for row, case, _ in cases(one, rows[1:2]):
        replay = Replay(case, 2)
        first, last = replay.answers([NOTHING, replay.everything])
        assert case.tokenizer.decode(first, skip_special_tokens=True) == tokens[row["example"]]
        assert [last] == case.full().generate_again().tokens


def test_marked_spans_are_spared_in_a_diagnosis_as_in_the_run():
    case = case_of("llama", SnapKV(window=4))
    spared = dataclasses.replace(
        case, cache=dataclasses.replace(case.cache, keep="span"), spans=((6, 9),), seed=case.seed
    )
    for one, where in ((case, False), (spared, True)):
        _, table = watched(one)
        assert all({6, 7, 8} <= set(held(table, layer, head, 31, 0)) for layer in (0, 1) for head in range(3)) == where
    (scores,) = prompt_scores(spared, {"snapkv": spared.cache}).values()
    assert bool(scores.kept[:, :, 6:9].all())
