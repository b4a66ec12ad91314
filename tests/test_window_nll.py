"""Real text under a real, small model: what a sliding window costs is known from elsewhere and must come out."""

import json

import pytest
import torch
from conftest import SHARED

from experiments.window_nll import METHODS, interval, nll, table, windows
from kvexp.errors import ConfigError
from kvexp.methods import Full
from kvexp.models import load_model, load_tokenizer

TEXT = SHARED / "data" / "tinystories_text" / "tinystories_1000.jsonl"


@pytest.fixture(scope="module")
def texts(stories260k):
    if not TEXT.is_file():
        pytest.skip(f"no text at {TEXT}")
    return load_model(stories260k), windows(load_tokenizer(stories260k), TEXT, 512, 32)


@pytest.mark.slow
def test_a_sliding_window_costs_what_is_known(texts):
    model, stories = texts
    result = table(model, stories, [16, 32, 64], 32, ["window"])
    known = {("full", 0): 1.29, ("window", 64): 1.33, ("window", 32): 1.39, ("window", 16): 1.49}
    assert {key: round(result[key][0], 2) for key in known} == pytest.approx(known, abs=0.0101)


def test_everything_kept_is_full_and_ideal_is_nearly(texts):
    model, stories = texts
    some = [story[:96] for story in stories[:3]]
    full = nll(model, some, Full(), None, 3)
    for name, (method, plan) in METHODS.items():
        torch.testing.assert_close(nll(model, some, method, 96, 3, **plan), full, atol=1e-5, rtol=0, msg=name)
    scarce = {name: nll(model, some, METHODS[name][0], 8, 3, **METHODS[name][1]).mean() for name in ("ideal", "random")}
    assert abs(scarce["ideal"] - full.mean()) < 0.1
    assert scarce["random"] > full.mean() + 0.5


def test_interval_covers_the_mean():
    low, high = interval(torch.arange(100, dtype=torch.float64))
    assert 40 < low < 49.5 < high < 59


def test_texts_that_do_not_fit(tmp_path, stories260k):
    tokenizer = load_tokenizer(stories260k)
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "Once upon a time"}) + "\n")
    with pytest.raises(ConfigError, match="holds 0 windows of 64 tokens, 2 were asked for"):
        windows(tokenizer, path, 64, 2)
    path.write_text(json.dumps({"story": "Once"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 has no field 'text' \(fields: story\)"):
        windows(tokenizer, path, 64, 2)
