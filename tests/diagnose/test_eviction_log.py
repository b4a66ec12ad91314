"""The eviction log: it tells what went, changes nothing, and is there for every family, mode and kind of run."""

from __future__ import annotations

import hashlib
import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from commands import composed, config_of
from omegaconf import OmegaConf
from small import small
from test_shared_prefill import SHORT, content
from tiny import CONFIGS, prompts_of, tiny

import kvexp.run.batches
from kvexp.core import Budget, CacheConfig, Cadence
from kvexp.diagnose.case import Case, run_at
from kvexp.diagnose.log import EvictionRecord, watch
from kvexp.diagnose.show import main
from kvexp.generate import GenerationParams
from kvexp.methods import A2SF, H2O, TOVA, H2ODamping, Keyformer, SnapKV, SpAtten, StreamingLLM, Window
from kvexp.run import jobs as hydra_job
from kvexp.run.batches import settings_at
from kvexp.run.evictions import has_log, read_evictions, read_example_log
from kvexp.run.jobs import HydraJob
from kvexp.run.model_spec import tokenizer_of
from kvexp.run.session import current
from kvexp.run.store import runs
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NEW = 7


def case_of(family, method, *, question=(), tokens=12, **plan):
    (prompt,) = prompts_of(5, [31])
    decoding = GenerationParams(max_new_tokens=NEW, eos=None)
    cache = CacheConfig(method, Budget(tokens=tokens), **plan)
    return Case(tiny(family), prompt, list(question), cache, decoding, seed=3)


def watched(case):
    seen = EvictionRecord()
    made = case.generate_again(lambda cache: watch(cache, seen))
    return made, seen.table()


def held(table, layer, head, present, step):
    """Positions below `present` that a head still holds after a step, by the log alone."""
    mine = (table["layer"] == layer) & (table["head"] == head) & (table["step"] <= step)
    return sorted(set(range(present)) - set(table["position"][mine].tolist()))


def assert_kept_is_what_is_not_logged(case, made, table):
    fed = len(case.prompt) + len(case.question) + len(made.tokens[0]) - 1
    for layer, state in enumerate(made.cache.layer_states):
        for head, kept in enumerate(state.kept_positions()[0]):
            assert held(table, layer, head, fed, math.inf) == kept


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("method", [H2O(), A2SF(alpha=0.5), Keyformer()], ids=lambda method: method.name)
def test_what_is_not_in_the_log_is_kept_in_every_family(family, method):
    case = case_of(family, method, question=[50, 51], positions="original")
    made, table = watched(case)
    assert made.tokens == case.generate_again().tokens
    assert_kept_is_what_is_not_logged(case, made, table)
    for layer, head in product(range(2), range(3)):
        assert len(held(table, layer, head, len(case.prompt), 0)) == 11  # 12 less the token to come


METHODS = (Window(), TOVA(), SnapKV(window=4), SpAtten(), H2ODamping(), StreamingLLM(), Keyformer(score_scope="shared"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_every_way_of_dropping_tells_the_same(method, mode):
    case = case_of("llama", method, mode=mode)
    made, table = watched(case)
    assert_kept_is_what_is_not_logged(case, made, table)
    _, truth = watched(case_of("llama", method, mode="compact"))
    for name in ("step", "layer", "head", "position", "rank", "of"):
        assert np.array_equal(table[name], truth[name]), name
    for name in ("score", "threshold"):
        np.testing.assert_allclose(table[name], truth[name], rtol=1e-5, atol=1e-5)


def test_scores_ranks_and_thresholds_by_hand():
    """window's rank is the position: of 31 tokens the newest 11 stay, then one goes per step."""
    _, table = watched(case_of("gpt2", Window(), cadence=Cadence(every=2)))
    first = (table["step"] == 0) & (table["layer"] == 1) & (table["head"] == 2)
    assert table["position"][first].tolist() == list(range(20)) == table["score"][first].tolist()
    assert table["rank"][first].tolist() == list(range(31, 11, -1))
    assert set(table["of"][first].tolist()) == {31}
    assert set(table["step"].tolist()) == {0, 2, 4, 6}
    free = case_of("gpt2", H2O())  # half of it is protected: the lowest kept without protection is the threshold
    _, table = watched(free)
    assert bool((table["score"] <= table["threshold"]).all())
    assert set(table["of"][table["step"] > 0].tolist()) == {12}


def test_what_a_simulation_hides_for_one_step_is_not_gone():
    made, table = watched(case_of("llama", H2O(impl="mask"), mode="mask"))
    for layer, state in enumerate(made.cache.layer_states):
        score = state.slots.score[0, :, : state.slots.length]
        for head in range(3):
            alive = (score[head] > -math.inf).nonzero()[:, 0].tolist()
            assert held(table, layer, head, 31 + NEW - 1, math.inf) == alive


# -- runs --------------------------------------------------------------------------------------------------------------


SETTING = " ".join(sorted(SHORT))  # as labels say what was set by hand


def job(outputs, *overrides, limit=3):
    short = SHORT[:1] if any(word.startswith("task=") for word in overrides) else SHORT
    words = small(f"limit={limit}", f"outputs_dir={outputs}", *short, *overrides)
    words = [*words, *(() if any("kv_ratio=" in word for word in words) else ("kv_ratio=0.3",))]
    plain = OmegaConf.create(OmegaConf.to_container(config_of(*words), resolve=False))
    return HydraJob(plain, words, composed(*words)[1], None)


def run_job(one):
    hydra_job.run_job(one, current())


def run_of(outputs, method="h2o"):
    (found,) = [run for run in runs(outputs) if run.labels["method"] == method]
    return found


def test_rows_are_the_same_with_and_without(tmp_path, command):
    for diagnose in ("none", "log"):
        run_job(job(tmp_path / diagnose, f"diagnose={diagnose}"))
    assert not command.failures
    assert content(tmp_path / "log") == content(tmp_path / "none")
    evicting, full = sorted(runs(tmp_path / "log"), key=lambda run: run.labels["method"] == "full")
    assert not (full.path / "diagnose").exists()
    for row in evicting.rows():
        told, table = read_example_log(evicting, row["example"]), read_evictions(evicting, row["example"])
        assert told.same_output and told.same_kept
        assert told.prompt_tokens == row["prompt_tokens"] and told.new_tokens == row["new_tokens"]
        assert "".join(told.texts[told.prompt_tokens :]).replace("</s>", "") == row["output"]
        assert table["text"].tolist() == [told.texts[place] for place in table["position"]]
        assert len(table) == sum(told.heads) * (
            told.prompt_tokens + told.steps - (int(0.3 * told.prompt_tokens + 1e-9) - 1)
        )


def test_a_finished_run_gets_the_log_it_lacks(tmp_path, command, capsys):
    run_job(job(tmp_path))
    run = run_of(tmp_path)
    before = (run.path / "examples.jsonl").read_bytes()
    run_job(job(tmp_path, "diagnose=log", "diagnose.examples=2"))
    names = [row["example"] for row in run.rows()]
    assert [has_log(run, name) for name in names] == [True, True, False]
    lost = next(path for path in (run.path / "diagnose").glob("*.parquet"))
    lost.unlink()
    run_job(job(tmp_path, "diagnose=log"))
    assert all(has_log(run, name) for name in names)
    capsys.readouterr()
    run_job(job(tmp_path, "diagnose=log"))
    assert "3 examples are diagnosed already" in capsys.readouterr().out
    assert (run.path / "examples.jsonl").read_bytes() == before
    assert len(list(runs(tmp_path))) == 2, "a diagnosis is no part of what identifies a run"
    assert settings_at(run).labels == run.labels
    assert not command.failures


def test_a_folder_tells_when_its_settings_cannot_be_read_or_are_others_now(tmp_path, command):
    run_job(job(tmp_path))
    run = run_of(tmp_path)
    file = run.path / "command.json"
    asked = json.loads(file.read_text())
    other = json.loads(file.read_text())
    other["config"]["kv_ratio"] = other["config"]["budget"]["kv_ratio"] = 0.4
    again = "run the same command again"
    damaged = ["{", "{}", '{"config": [], "choices": {}, "overrides": []}', "[" * 99999]
    damaged += [
        json.dumps({key: value for key, value in asked.items() if key != part}) for part in ("config", "choices")
    ]
    for text, why in (*((text, again) for text in damaged), (json.dumps(other), "settings have changed since")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            settings_at(run)
    file.unlink()
    with pytest.raises(ConfigError, match=f"does not know how it was asked for: {again}"):
        settings_at(run)
    run_job(job(tmp_path))
    assert settings_at(run).labels == run.labels


def test_a_folder_cannot_ask_to_be_trusted(tmp_path, command, capsys):
    run_job(job(tmp_path, limit=1))
    run = run_of(tmp_path)
    asked = json.loads((run.path / "command.json").read_text())
    asked["config"]["model"]["trust_remote_code"] = True
    (run.path / "command.json").write_text(json.dumps(asked))
    assert main(["show", str(run.path), "0"]) == 2
    assert "if you trust it, say so on the command line: model.trust_remote_code=true" in capsys.readouterr().err
    assert main(["show", str(run.path), "0", "model.trust_remote_code=true"]) == 2
    assert "model.trust_remote_code is not a setting of a random model" in capsys.readouterr().err
    asked["config"]["model"] = {"_target_": "os.system"}
    (run.path / "command.json").write_text(json.dumps(asked))
    assert main(["show", str(run.path), "0"]) == 2
    assert "model._target_='os.system'" in capsys.readouterr().err


# -- made when it is asked for -----------------------------------------------------------------------------------------


def text_of(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_commands_make_the_log_they_need(tmp_path, command, capsys):
    run_job(job(tmp_path, limit=2))
    run = run_of(tmp_path)
    before = (run.path / "examples.jsonl").read_bytes()
    first, second = (row["example"] for row in run.rows())
    assert main(["show", str(run.path), first]) == 0
    assert f"diagnose h2o 0.3 {SETTING}: 1 examples" in text_of(capsys)
    assert has_log(run, first) and not has_log(run, second), "what is asked for and no more"
    assert main(["show", str(run.path), first]) == 0
    assert "diagnose h2o" not in text_of(capsys), "made once"
    assert main(["replay", str(run.path), second, "--trials", "2"]) == 0
    said = text_of(capsys)
    assert f"diagnose h2o 0.3 {SETTING}: 1 examples" in said and "2 trials at most" in said
    assert (run.path / "examples.jsonl").read_bytes() == before and not command.failures


def test_gap_makes_the_ideal_runs_it_needs(tmp_path, command, capsys):
    run_job(job(tmp_path, "kv_ratio=0.3", "method.recent_ratio=0.4", limit=2))
    run_job(job(tmp_path, "kv_ratio=0.5", limit=2))
    capsys.readouterr()
    assert main(["gap", str(tmp_path), "--where", "kv_ratio=0.3"]) == 0
    assert "lost to" in text_of(capsys)
    ideals = [run for run in runs(tmp_path) if run.labels["method"] == "ideal"]
    (only,) = ideals
    assert (only.labels["kv_ratio"], only.labels["setting"], len(only.rows())) == (0.3, SETTING, 2)
    assert settings_at(only).method.name == "ideal" and len({run.baseline for run in runs(tmp_path)}) == 2
    assert main(["gap", str(tmp_path)]) == 0
    assert len(list(runs(tmp_path))) == 5, "one for each budget, made once"


def test_the_prompt_as_it_was_sent(tmp_path, command, capsys):
    question = ["task=testbed_qa", "model=testbed_rope", "task.question=after_eviction"]
    run_job(job(tmp_path, *question, limit=2))
    capsys.readouterr()
    for run in runs(tmp_path):  # a baseline too
        row = run.rows()[1]
        assert main(["prompt", str(run.path), "1"]) == 0
        out, err = capsys.readouterr()
        tokenizer = tokenizer_of(settings_at(run).model)
        fed = tokenizer(out.rstrip("\n"), add_special_tokens=False).input_ids
        count, asked = row["prompt_tokens"], row["question_tokens"]
        assert hashlib.sha256(json.dumps([fed[:count], fed[count:]]).encode()).hexdigest()[:16] == row["prompt_digest"]
        assert f"{count + asked} tokens, the last {asked} after the eviction" in err
    assert not command.failures


def test_a_prompt_that_cannot_be_had_again_is_not_shown(tmp_path, command, capsys, monkeypatch):
    run_job(job(tmp_path, limit=1))
    run = run_of(tmp_path)
    tokenizer = tokenizer_of(settings_at(run).model)

    def other(text, **options):
        return tokenizer(text + "!", **options)

    monkeypatch.setattr(kvexp.diagnose.case, "tokenizer_of", lambda spec: other)
    capsys.readouterr()
    assert main(["prompt", str(run.path), "0"]) == 2
    out, err = capsys.readouterr()
    assert not out and "data, chat template or tokenizer have changed" in err


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["generation=beam4"], "generation.num_beams"),
        (["generation=sampling"], "generation.sample=true"),
        (["task=testbed_choice", "model=testbed_rope"], "task=testbed_choice"),
        (["task=perplexity"], "task=perplexity"),
        (["engine=openvino", "model=testbed_gqa", "task=testbed_summary", "method=full"], "diagnose its twin"),
        (["diagnose.examples=0"], "examples must be at least 1"),
    ],
)
def test_refused_with_a_reason_before_a_model_loads(tmp_path, command, monkeypatch, overrides, reason):
    monkeypatch.setattr(kvexp.run.batches, "load", None)
    run_job(job(tmp_path, "diagnose=log", *overrides))
    (failure,) = command.failures
    assert reason in failure.why
    assert not list(runs(tmp_path))


@pytest.mark.parametrize("method", ["full", "ideal", "oracle"])
def test_a_method_that_evicts_nothing_runs_and_says_so(tmp_path, command, method, capsys):
    run_job(job(tmp_path, "diagnose=log", f"method={method}", limit=1))
    assert "nothing to do" in capsys.readouterr().out
    assert not command.failures and not list(tmp_path.glob("*/diagnose"))


def test_a_run_is_named_by_its_folder_or_by_its_labels(tmp_path, command):
    for ratio in ("0.3", "0.5"):
        run_job(job(tmp_path, f"kv_ratio={ratio}", limit=1))
    found = run_at(f"{tmp_path}@method=h2o,kv_ratio=0.50")
    assert found.labels["kv_ratio"] == 0.5 and run_at(str(found.path)).hash == found.hash
    for words, reason in (
        (f"{tmp_path}@method=h2o", "2 runs have the labels method=h2o"),
        (f"{tmp_path}@method=tova", "0 runs have the labels"),
        (f"{tmp_path}@h2o", "labels are given as in"),
        (str(tmp_path), "is no run: name its folder"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run_at(words)
