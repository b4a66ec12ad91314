"""How much of a needle is held: which tokens are the needle's, and what caches say they keep."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import prompts_of, tiny

from experiments import needle_kept
from kvexp.core import Budget, CacheConfig
from kvexp.errors import ConfigError
from kvexp.generate import prefill
from kvexp.methods import StreamingLLM


def test_the_tokens_of_a_sentence():
    pieces = ["He", " said", ".", " The", " best", " th", "ing", ".", " And"]
    assert needle_kept.tokens_of(pieces, "The best thing.") == [3, 4, 5, 6, 7]
    assert needle_kept.tokens_of(pieces, "est th") == [4, 5]
    with pytest.raises(ConfigError, match="lacks the needle 'The worst'"):
        needle_kept.tokens_of(pieces, "The worst")


def test_what_a_window_with_sinks_holds():
    """Of 20 tokens it keeps the first 3 and the newest 7, in every head."""
    cache = prefill(tiny("llama"), prompts_of(3, (20,)), StreamingLLM(n_sinks=3), Budget(tokens=10)).cache
    found = needle_kept.held(cache, [0, 2, 3, 12, 14, 19], layers=2)
    assert found.shape == (2, 3) and np.all(found == 4 / 6)


def test_the_table():
    found = np.zeros((2, 3, 2, 2))  # two runs, three prompts, two layers of two heads
    found[1, :, 0] = [[1.0, 0.5], [1.0, 0.8], [1.0, 0.2]]
    text = needle_kept.table("in_prompt", ["a", "b"], found)
    lines = text.splitlines()
    # means of 37.5, 45 and 30 %: 4.303 * 7.5 / sqrt(3)
    assert lines[2:] == ["| b | 38 (19..56) | 25 |", "| a | 0 (0..0) | 0 |"] and "question in prompt" in lines[0]


def test_runs_share_their_prompts(monkeypatch):
    """The needle's positions are looked for in the prompt as the model reads it, and every run is asked for them."""
    words = [f"w{n} " for n in range(40)]
    ids = prompts_of(3, (20,))[0]
    tokenizer = SimpleNamespace(decode=lambda tokens: words[ids.index(tokens[0])])
    run = SimpleNamespace(
        model=None,
        task=SimpleNamespace(examples=lambda: iter([None]), needles=("w1 w2 w3 w4 ",)),
        decoding=SimpleNamespace(max_new_tokens=3),
    )
    monkeypatch.setattr(needle_kept, "load", lambda spec: (tiny("llama"), tokenizer))
    monkeypatch.setattr(needle_kept, "prompts_of", lambda *_: [(0, SimpleNamespace(ids=ids))])
    plans = iter([CacheConfig(StreamingLLM(n_sinks=n), Budget(tokens=10)) for n in (3, 5)])
    monkeypatch.setattr(needle_kept, "batch_cache", lambda run, lengths: next(plans))
    found = needle_kept.shares([run, run])
    assert found.shape == (2, 1, 2, 3) and np.all(found[0] == 2 / 4) and np.all(found[1] == 1.0)
    assert not torch.is_inference_mode_enabled()


def test_what_cannot_be_asked_for(capsys):
    assert needle_kept.main(["h2o"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
