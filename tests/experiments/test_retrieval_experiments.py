"""The table of cache hits on a tiny model, and perplexity under eviction on a real, small one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import SHARED
from tiny import prompts_of, tiny

from benchmarks.pq_selection import main as selection
from experiments.lib import inside
from kvexp.core import Budget, CacheConfig
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.hf import load_model, load_tokenizer
from kvexp.methods import A2SF, H2O, TOVA, Full, Ideal, Keyformer, KNorm, Random, StreamingLLM, Window
from kvexp.retrieval import PQCache


def test_a_cache_for_everything_hits_what_was_asked_for_before(monkeypatch):
    """All blocks noted at every step and room for all: whatever lies in a block touched before is a hit."""
    monkeypatch.setattr(inside, "NEW", 8)

    def rate(policy, blocks):
        method = PQCache(m=2, b=4, cache_tokens=200, cache_block=2, cache_policy=policy, cache_blocks_per_step=blocks)
        asked = SimpleNamespace(method=method, cache=CacheConfig(method, Budget(kv_ratio=0.4)))
        return inside.hit_rate(tiny("llama"), prompts_of(3, [41]), asked)["rate"].item()

    assert 0 <= rate("lru", 1) < rate("lru", 50) == rate("lfu", 50) < 1


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


def windows(tokenizer, path, length, count):
    """`count` windows of `length` tokens from the texts of a jsonl file laid end to end, each after a start token."""
    stream = []
    for line in path.read_text("utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"]).input_ids
        stream += ids if ids[:1] == [tokenizer.bos_token_id] else [tokenizer.bos_token_id, *ids]
    assert len(stream) >= length * count
    return [stream[i : i + length] for i in range(0, length * count, length)]


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
