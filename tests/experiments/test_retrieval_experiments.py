"""The tables of recall and of cache hits, on a tiny model: plausible ends, and what must hold whatever the model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import SHARED
from tiny import prompts_of, tiny

from benchmarks.pq_selection import main as selection
from experiments.lib import inside
from experiments.lib.long_texts import long_text, windows
from experiments.pq_recall import main as pq_recall
from experiments.pq_recall import recall
from kvexp.core import Budget, CacheConfig
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.hf import load_model, load_tokenizer
from kvexp.methods import A2SF, H2O, TOVA, Full, Ideal, Keyformer, KNorm, Random, StreamingLLM, Window
from kvexp.retrieval import PQCache
from kvexp.util.errors import ConfigError


def test_recall_rises_with_bits_and_is_one_where_nothing_is_lost():
    """29 keys: 2 clusters know little, and 8 bits are more centroids than keys, which the method searches exactly."""
    model = tiny("llama")
    found = recall(model, prompts_of(3, [47, 45]), [1, 7], [1, 3, 5], 0.4, 5)
    assert set(found) == {"1x1", "1x3", "1x5", "7x1", "7x3", "7x5", "random"}
    assert all(0 <= value <= 1 for value in found.values())
    assert found["1x1"] < found["7x5"]
    assert found["random"] < found["1x3"] < found["7x3"]


def test_a_cache_for_everything_hits_what_was_asked_for_before(monkeypatch):
    """All blocks noted at every step and room for all: whatever lies in a block touched before is a hit."""
    monkeypatch.setattr(inside, "NEW", 8)

    def rate(policy, blocks):
        method = PQCache(m=2, b=4, cache_tokens=200, cache_block=2, cache_policy=policy, cache_blocks_per_step=blocks)
        asked = SimpleNamespace(method=method, cache=CacheConfig(method, Budget(kv_ratio=0.4)))
        return inside.hit_rate(tiny("llama"), prompts_of(3, [41]), asked)["rate"].item()

    assert 0 <= rate("lru", 1) < rate("lru", 50) == rate("lfu", 50) < 1


@pytest.mark.parametrize("model", ["testbed_gqa", "testbed_rope"])
def test_recall_is_a_command_that_needs_nothing(model, capsys):
    """On a model of every kind of head: some configurations have no field for the size of one."""
    options = ["--tokens", "96", "--documents", "1", "--new", "3", "--m", "2", "--b", "2", "4"]
    assert pq_recall(["--model", model, *options]) == 0
    head, _, _, row, chance = capsys.readouterr().out.splitlines()
    assert head == f"recall@k, {model}, kv_ratio=0.2, 1 documents of 96 tokens"
    low, high = map(float, row.split("|")[2:4])
    assert float(chance.split(": ")[1]) < low < high < 1


def test_long_texts_are_of_the_testbeds_language_and_of_one_length():
    tokenizer = load_tokenizer("kvexp/tasks/testbed_models/testbed_gqa")
    one, other, again = (long_text(tokenizer, 1024, number) for number in (0, 1, 0))
    assert len(one) == len(other) == 1024
    assert one == again != other
    assert tokenizer.unk_token_id not in one + other


def test_the_benchmark_runs(capsys, tmp_path):
    threads = torch.get_num_threads()
    line = "--slots 70 --heads 2 --group 1 --dim 8 --b 3 --repeats 3 --threads 1"
    try:
        assert selection([*line.split(), "--json", str(tmp_path / "rows.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "| 70 |" in capsys.readouterr().out
    assert (tmp_path / "rows.json").is_file()


# Real text under a real, small model: what a sliding window costs is known from elsewhere and must come out.


TEXT = SHARED / "data" / "tinystories_text" / "tinystories_1000.jsonl"


@pytest.fixture(scope="module")
def texts(stories260k):
    if not TEXT.is_file():
        pytest.skip(f"no text at {TEXT}")
    return load_model(stories260k), windows(load_tokenizer(stories260k), TEXT, 512, 32)


def nll(model, texts, method, slots=None, **options):
    """Mean nats per token of the last quarter of each text, less its first token, which the full prefill predicts."""
    split, budget = len(texts[0]) * 3 // 4, None if slots is None else Budget(tokens=slots)
    parts = [text[:split] for text in texts], [text[split:] for text in texts]
    found = continuation_logprobs(model, *parts, method, budget, seeds=0, **options)
    return torch.tensor([-sum(row[1:]) / (len(row) - 1) for row in found], dtype=torch.float64)


@pytest.mark.slow
def test_a_sliding_window_costs_what_is_known(texts):
    known = {None: 1.29, 64: 1.33, 32: 1.39, 16: 1.49}
    found = {slots: nll(*texts, Window() if slots else Full(), slots).mean().item() for slots in known}
    assert {slots: round(value, 2) for slots, value in found.items()} == pytest.approx(known, abs=0.0101)


def test_everything_kept_is_full_and_ideal_is_nearly(texts):
    model, stories = texts
    some = [story[:96] for story in stories[:3]]
    full = nll(model, some, Full())
    for method in (Window(), StreamingLLM(), H2O(), Keyformer(), A2SF(alpha=0.1), TOVA(), KNorm(), Random()):
        torch.testing.assert_close(nll(model, some, method, 96), full, atol=1e-5, rtol=0, msg=method.name)
    torch.testing.assert_close(nll(model, some, Ideal(), 96, mode="mask"), full, atol=1e-5, rtol=0)
    assert abs(nll(model, some, Ideal(), 8, mode="mask").mean() - full.mean()) < 0.1
    assert nll(model, some, Random(), 8).mean() > full.mean() + 0.5


def test_texts_that_do_not_fit(tmp_path, stories260k):
    tokenizer = load_tokenizer(stories260k)
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "Once upon a time"}) + "\n")
    with pytest.raises(ConfigError, match="holds 0 windows of 64 tokens, 2 were asked for"):
        windows(tokenizer, path, 64, 2)
    path.write_text(json.dumps({"story": "Once"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 has no field 'text' \(fields: story\)"):
        windows(tokenizer, path, 64, 2)
