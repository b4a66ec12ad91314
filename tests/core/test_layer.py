"""Caches that decode together, examples that cannot be run, and settings of a cache that exclude each other."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from commands import run_py
from tiny import LETTERS, tiny
from turns import in_turn

import kvexp.retrieval
from kvexp.core import Budget, CacheConfig, Cadence, Method, Quantization
from kvexp.core.budget import PromptSizes
from kvexp.core.budget_resolution import layer_slots
from kvexp.generate import continuation_logprobs, generate, prefill
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, MultiMethodCache, calibrate_queries, train_surrogate
from kvexp.methods import A2SF, H2O, EpiKV, Full, Ideal, SnapKV, StreamingLLM, Window
from kvexp.results.table import table
from kvexp.run.build import CACHE, STORAGE, build_cache
from kvexp.run.store import refusals, runs
from kvexp.util.errors import CacheError, ConfigError


def test_layers_that_decode_together_keep_their_rows():
    joined = MultiMethodCache([EvictionCache(tiny("llama"), H2O(), Budget(tokens=9)) for _ in range(2)], 1)
    with pytest.raises(CacheError, match="fork"):
        joined.reorder_cache(torch.tensor([0]))
    with pytest.raises(CacheError, match="reset"):
        joined.reset()


# Examples that cannot be run: rows that say why, and an error before weights load where none of them can.


LONG = "Once there was a girl who lived in a house near the river with her dog and her cat, and {} came to see them."
TEXTS = [LONG.format(name) for name in ("Tom", "Sam", "Ann")]
SHORT = "Hi you"  # the first word is the prompt: two letters and the start token


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(texts, *words) -> (exit code, stdout, stderr) of run.py on a file of these texts."""

    def called(texts, *words):
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({"id": f"t{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
        words = ["model=tiny", f"task.data_files={file}", f"outputs_dir={tmp_path / 'out'}", *words]
        return run_py(monkeypatch, capsys, *words)

    return called


STORIES = ("task=stories", "task.max_new_tokens=4", "task.continuation_words=3")


def rows(tmp_path, method):
    (run,) = (run for run in runs(tmp_path / "out") if run.labels["method"] == method)
    assert run.finished
    return {row["example"]: row for row in run.rows()}


@pytest.mark.parametrize(("batch", "launcher"), in_turn([1, 4], ["basic", "shared_prefill"], of=2))
def test_a_prompt_too_short_for_its_budget_is_a_skipped_row(command, tmp_path, launcher, batch):
    words = ("-m", "method=h2o,streaming_llm", "kv_ratio=0.3", f"hydra/launcher={launcher}", f"batch_size={batch}")
    code, out, err = command([TEXTS[0], SHORT, *TEXTS[1:]], *words, *STORIES)
    assert code == 0, err
    skipped = {name: row["skipped"] for name, row in rows(tmp_path, "full").items()}
    assert skipped == dict.fromkeys(("t0", "t1", "t2", "t3"))
    for method in ("h2o", "streaming_llm"):
        found = rows(tmp_path, method)
        assert found["t1"]["skipped"].startswith("the budget of layer 0 is 0 slots for a prompt of 3 tokens")
        assert found["t1"]["receipt"] is None
        assert found["t1"]["metrics"] == {} and found["t1"]["prompt_tokens"] == 3
        assert all(row["skipped"] is None and row["metrics"] for name, row in found.items() if name != "t1")
    shown = table(tmp_path / "out", {"method": ["h2o", "streaming_llm"]})
    assert list(shown["n"]) == list(shown["paired"]) == [3, 3] and list(shown["skipped"]) == [1, 1]
    assert "without a score: the budget of layer 0 is 0 slots" in out


def test_a_prompt_too_long_to_be_repeated_is_a_skipped_row(command, tmp_path):
    """The words and the prompt behind the prompt are more than the model holds; in pieces it can be repeated."""
    words = ("-m", "method=kvzip", "method.chunk=2000,20", "kv_ratio=0.5", "model.config.max_position_embeddings=350")
    code, _, err = command([TEXTS[0], " ".join(TEXTS)], *words, *STORIES)
    assert code == 0, err
    found = {run.config["method"].get("chunk"): run for run in runs(tmp_path / "out")}  # full has none
    whole, pieces = ({row["example"]: row["skipped"] for row in found[chunk].rows()} for chunk in (2000, 20))
    assert whole["t0"] is None and pieces == {"t0": None, "t1": None}
    assert "the model holds 350: lower method.chunk (now 2000)" in whole["t1"]


def test_rows_do_not_depend_on_skipped_neighbours(command, tmp_path):
    words = ("method=streaming_llm", "kv_ratio=0.2", "batch_size=4", *STORIES)
    assert command([*TEXTS, SHORT], *words)[0] == 0
    mixed = rows(tmp_path, "streaming_llm")
    assert mixed.pop("t3")["skipped"]
    (tmp_path / "out").rename(tmp_path / "mixed")
    assert command(TEXTS, *words)[0] == 0
    alone = rows(tmp_path, "streaming_llm")
    for name, row in alone.items():
        assert (row["output"], row["metrics"]) == (mixed[name]["output"], mixed[name]["metrics"])
        assert row["receipt"]["kept_digest"] == mixed[name]["receipt"]["kept_digest"]


def test_only_some_of_a_sweep_skip_a_prompt(command, tmp_path):
    """Each run skips what its own budget cannot hold, whoever shares its prefill."""
    middle = "Tom has a cat and a dog."
    code, _, err = command([*TEXTS, middle], "-m", "method=streaming_llm,h2o,window", "kv_ratio=0.3", *STORIES)
    assert code == 0, err
    assert rows(tmp_path, "h2o")["t3"]["skipped"] is None and rows(tmp_path, "window")["t3"]["skipped"] is None
    assert "cannot hold sink=4" in rows(tmp_path, "streaming_llm")["t3"]["skipped"]


def test_a_story_of_one_word_is_a_skipped_row(command, tmp_path):
    assert command([*TEXTS, "Alone"], "method=full", *STORIES)[0] == 0
    found = rows(tmp_path, "full")
    assert found["t3"]["skipped"] == "a story of one word has nothing to continue"
    assert [row["skipped"] for row in found.values()].count(None) == 3


def test_a_short_text_does_not_end_a_perplexity_run(command, tmp_path):
    words = ("task=perplexity", "task.prefill_tokens=32", "task.total_tokens=48", "method=window", "kv_ratio=0.5")
    code, _, err = command([TEXTS[0], "Too short.", TEXTS[1]], *words)
    assert code == 0, err
    for method in ("full", "window"):
        found = rows(tmp_path, method)
        assert found["t1"]["skipped"].startswith("too short to prefill task.prefill_tokens=32")
        assert all(found[name]["metrics"]["nll"] > 0 for name in ("t0", "t2"))


IMPOSSIBLE = [  # words, why no example can be run
    (("method=snapkv", "kv_ratio=0.1"), "cannot hold sink=0 + recent=32 of snapkv"),
    (("method=streaming_llm", "budget=tokens", "budget.tokens=4"), "cannot hold sink=4 + recent=0"),
    (("method=h2o", "kv_ratio=0.001"), "is 0 slots for a prompt"),
    (("method=pqcache", "kv_ratio=0.05"), "cannot hold sink="),
    (("method=h2o", "task.max_prompt_tokens=8"), "too long"),
    (("method=kvzip", "kv_ratio=0.5", "model.config.max_position_embeddings=128"), "tokens behind the prompt of"),
]


@pytest.mark.parametrize(("words", "why"), IMPOSSIBLE, ids=[" ".join(words) for words, _ in IMPOSSIBLE])
def test_what_no_example_can_be_is_said_before_weights_load_and_by_a_dry_run(
    command, tmp_path, monkeypatch, words, why
):
    import kvexp.run.batches as module

    monkeypatch.setattr(module, "load", lambda spec: pytest.fail("weights were loaded"))
    said = []
    for more in ((), ("--dry-run",)):
        code, _, err = command(TEXTS, *words, *STORIES, *more)
        assert code == 1 and why in err and err.count("error: ") == 1 and "Traceback" not in err
        said.append(err.splitlines()[-1])
    assert said[0] == said[1] and "none of the 3 examples can be run" in said[0]
    assert not list(runs(tmp_path / "out")) and len(list(refusals(tmp_path / "out"))) == 1


def test_one_impossible_run_of_a_sweep_leaves_the_others(command, tmp_path):
    code, out, err = command(TEXTS, "-m", "method=h2o,snapkv", "kv_ratio=0.3", *STORIES)
    assert code == 1 and "cannot hold sink=0 + recent=32 of snapkv" in err and "1 run(s) failed:" in out
    assert "method.window" in err and "n_sinks" not in err, "what this method protects, and nothing else"
    assert len(rows(tmp_path, "h2o")) == 3


def test_a_dry_run_knows_a_budget_in_tokens_without_the_data(command, tmp_path):
    words = ("method=streaming_llm", "budget=tokens", "model=llama2_7b", "task=xsum", "task.data_files=null")
    code, _, err = command(TEXTS, "--dry-run", *words, "budget.tokens=4")
    assert code == 1 and "budget of 4 slots cannot hold sink=4" in err
    assert command(TEXTS, "--dry-run", *words, "budget.tokens=5")[0] == 0


METHODS = [
    cls
    for package in (kvexp.methods, kvexp.retrieval)
    for cls in map(package.__dict__.get, package.__all__)
    if isinstance(cls, type) and issubclass(cls, Method) and cls.name and cls.evicts
    if cls is not EpiKV  # which evicts nothing of a prompt
]


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
def test_what_is_granted_can_be_generated_with(cls):
    """The check beforehand and the cache itself say the same of each budget: 41 slots hold all that any protects."""
    few = {"vase": {"window": 8}, "openvino": {"block": 2, "start_size": 2, "recent_size": 2}}  # 68, 160 by default
    method, prompt, allowed = cls(**few.get(cls.name, {})), [list(range(3, 53))], []
    plan = {"mode": "auto", "positions": method.positions, "tokenizer": LETTERS}
    if method.needs.calibration:
        plan["calibration"] = calibrate_queries(tiny("llama"), prompt)
    if method.needs.surrogate:
        scored = kvexp.methods.KVzipPlus(n_sinks=2, chunk=200, instruct=False)
        plan["surrogate"] = train_surrogate(tiny("llama"), scored, prompt * 3, [], LETTERS).surrogate
    for slots in (1, 4, 5, 41):
        budget = Budget(tokens=slots)
        try:
            layer_slots(method, budget, PromptSizes([50], 50, 3, 2), 0)
            allowed.append(slots)
        except ConfigError as error:
            with pytest.raises(ConfigError, match=str(error).partition(";")[0].replace("+", r"\+")):
                generate(tiny("llama"), prompt, method, budget, decoding=GenerationParams(3), **plan)
            continue
        generate(tiny("llama"), prompt, method, budget, decoding=GenerationParams(3), **plan)
    assert allowed[-1] == 41


# CacheConfig: what is decided in it is decided once, and what cannot be is said in the user's words.


HALF = Budget(kv_ratio=0.5)
PROMPT = [list(range(3, 20))]


@pytest.mark.parametrize(
    ("method", "mode"), [(Window(), "overwrite"), (Ideal(), "mask"), (A2SF(score_source="full"), "mask")]
)
def test_auto_is_a_simulation_where_there_is_nothing_else(method, mode):
    assert CacheConfig(method, HALF, mode="auto").mode == mode
    assert build_cache(method, HALF, {}).mode == mode, "as configurations have it"
    if mode == "mask":
        with pytest.raises(ConfigError, match="set mode=mask"):
            CacheConfig(method, HALF)


def test_positions_are_the_papers_unless_set():
    assert not CacheConfig(H2O(), HALF).renumbered and CacheConfig(StreamingLLM(), HALF).renumbered
    assert not CacheConfig(StreamingLLM(), HALF, positions="original").renumbered


def test_a_method_that_evicts_at_prefill_only_has_its_cadence_as_given():
    """The run's hash has the field; what happens goes by evict_every."""
    config = CacheConfig(SnapKV(), HALF)
    assert (config.cadence, config.evict_every) == (Cadence(), None)
    assert CacheConfig(H2O(), HALF, Cadence(every=3)).evict_every == 3


WRONG = {
    "mode": (
        lambda: CacheConfig(H2O(), HALF, mode="masked"),
        "mode must be one of overwrite, compact, mask, auto, got 'm",
    ),
    "positions": (
        lambda: CacheConfig(H2O(), HALF, positions="x"),
        "positions must be one of original, renumbered or null, got",
    ),
    "observe": (
        lambda: CacheConfig(H2O(), HALF, observe="x"),
        "observe must be one of blocked, naive, triton, got 'x'",
    ),
    "cadence": (lambda: CacheConfig(H2O(), HALF, {"mode": "mask"}), "cadence must be a Cadence, got"),
    "method": (lambda: CacheConfig("h2o", HALF), "method must be a method object such as"),
    "budget": (lambda: CacheConfig(H2O(), 0.5), "budget must be a Budget or null, got 0.5"),
    "no budget": (lambda: CacheConfig(H2O()), "needs a budget"),
    "both": (lambda: CacheConfig.of(CacheConfig(Full()), HALF, mode="mask"), "a CacheConfig holds budget, mode itself"),
    "key": (
        lambda: build_cache(H2O(), HALF, {"modes": "mask"}),
        "cache.modes is not a setting of cache; it has: mode, ",
    ),
    "type": (lambda: build_cache(H2O(), HALF, {"evict_every": "8"}), r"cache\.evict_every"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be(case):
    make, match = WRONG[case]
    with pytest.raises(ConfigError, match=match):
        make()


def test_the_keys_of_the_group_are_fields():
    fields = {field.name for field in dataclasses.fields(CacheConfig)}
    assert set(CACHE) - {"evict_at_prefill", "evict_every", *STORAGE} <= fields
    assert set(STORAGE) - {"bits", "codec", "signs", "rotate"} == {
        field.name for field in dataclasses.fields(Quantization)
    }


def test_one_object_stands_for_method_budget_and_keywords():
    model, decoding = tiny("llama"), GenerationParams(5, eos=None)
    config = CacheConfig(H2O(), HALF, Cadence(every=2), mode="compact")
    one = generate(model, PROMPT, config, decoding=decoding)
    other = generate(model, PROMPT, H2O(), HALF, decoding=decoding, cadence=Cadence(every=2), mode="compact")
    assert one.tokens == other.tokens and one.cache.config == other.cache.config == config
    assert prefill(model, PROMPT, config).cache.layer_states[0].config is config
    (mine,), (same,) = (continuation_logprobs(model, PROMPT, [[5, 6, 7]], *what) for what in ((config,), (H2O(), HALF)))
    assert len(mine) == len(same) == 3
    with pytest.raises(ConfigError, match=r"cadance is not a keyword .* did you mean cadence"):
        generate(model, PROMPT, H2O(), HALF, cadance=Cadence(every=2))
