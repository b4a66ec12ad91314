"""Known changes of a model, which say what a divergence is worth."""

from __future__ import annotations

import copy
import math

import pandas as pd
import pytest
import torch
from test_sweep_divergence import ONE_BY_ONE, group
from tiny import stock, tiny, tokens

from experiments.studies import kl_scale as command
from experiments.studies.kl_scale import (
    SEEDS,
    forced_logits,
    line_of,
    logits_under,
    measured,
    scale_table,
    with_rounded_weights,
)
from kvexp.core import Budget, CacheConfig
from kvexp.hf.cpu_linear import rounded
from kvexp.methods import Full, Keyformer
from kvexp.run.batches import run_group
from kvexp.run.session import Session
from kvexp.run.store import Run, runs


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_is_to_the_nearest_level_of_each_row(bits):
    torch.manual_seed(0)
    weight = torch.randn(5, 40) * torch.tensor([1.0, 10, 0.1, 3, 0])[:, None]
    made, most = rounded(weight, bits), 2 ** (bits - 1) - 1
    step = weight.abs().amax(1) / most
    assert ((made - weight).abs().amax(1) <= step / 2 + 1e-7).all()
    levels = [len(row.unique()) for row in made]
    assert max(levels) <= 2 * most + 1 and made[4].eq(0).all()
    assert torch.equal(made.abs().amax(1), weight.abs().amax(1)), "the largest of a row stays"


def test_a_copy_is_changed_and_the_model_is_not():
    model = stock("llama")
    before = copy.deepcopy(model.state_dict())
    changed = with_rounded_weights(model, 4)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(
        changed.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    assert torch.equal(changed.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_fewer_bits_diverge_more_and_none_not_at_all():
    model, prompt, text = stock("llama"), tokens(1, 30).tolist(), tokens(2, 6).tolist()
    full = forced_logits(model, prompt, text)
    whole = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    assert torch.allclose(full, whole, atol=1e-5), "the logits that predict each token"
    found = {
        str(bits): [line_of(full, forced_logits(with_rounded_weights(model, bits), prompt, text), text, "e", 0)]
        for bits in (16, 8, 4)
    }
    frame = scale_table(found).set_index("change")
    assert frame.loc["16", "kl"] < 1e-5 < frame.loc["8", "kl"] < frame.loc["4", "kl"]
    assert frame.loc["16", "top1"] == 1


def test_fed_token_by_token_under_a_full_cache_is_one_forward():
    model, prompt, text = tiny("llama"), tokens(1, 30).tolist(), tokens(2, 6).tolist()
    whole = CacheConfig(Full())
    assert torch.allclose(logits_under(model, whole, prompt, text, 0), forced_logits(model, prompt, text), atol=1e-5)
    noised = CacheConfig(Keyformer(), Budget(kv_ratio=0.5))
    one, same, other = (logits_under(model, noised, prompt, text, seed) for seed in (3, 3, 4))
    assert torch.equal(one, same) and torch.allclose(one[0], other[0]) and not torch.allclose(one, other, atol=1e-3)


def test_a_run_without_rows_has_a_scale(tmp_path):
    """divergence=only: its texts are enough."""
    run_group(group(tmp_path, *ONE_BY_ONE, "divergence=only", methods=("h2o", "window")), Session())
    run = next(run for run in runs(tmp_path) if run.baseline)
    frame = scale_table(measured(run)).set_index("change")
    assert set(frame["n"]) == {4} and frame.loc["8-bit weights", "kl"] < frame.loc["4-bit weights", "kl"]
    assert 0 < frame.loc[SEEDS, "kl"] < 20 and frame.loc[SEEDS, "tokens"] == 4 * 7, "the prefill's token is left out"
    first = measured(run, 1)
    assert {len(lines) for lines in first.values()} == {1} and {line["index"] for line in first[SEEDS]} == {0}


def test_rows_are_every_examples_numbers(tmp_path):
    folder, file = tmp_path / "outputs", tmp_path / "rows.csv"
    labels = {"model": "tiny", "task": "xsum"}
    base = Run.open(folder, labels | {"method": "full"}, labels | {"method": "full"})
    labels |= {"method": "h2o", "kv_ratio": 0.5}
    run = Run.open(folder, labels, labels, baseline=base.hash)
    row = {"seconds": {}, "new_tokens": 3, "finish_reason": "length", "skipped": None, "example": "e", "index": 0}
    base.append(row | {"metrics": {"rouge2": 30.0}})
    run.append(row | {"metrics": {"rouge2": 20.0}})
    kl = {"kl": [9.0, 1.0, 2.0], "full_logprob": [-1.0] * 3, "logprob": [-1.5] * 3, "same_top1": [1, 1, 0]}
    run.append_divergence(
        [{"example": "e", "index": 0, "text": "own", "first_by_prefill": True, "tokens": [1, 2, 3], **kl}]
    )
    assert command.main(["rows", str(folder), "rouge2", str(file)]) == 0
    rows = pd.read_csv(file).set_index("measure")
    assert (rows.loc["kl", "h2o 0.5"], rows.loc["rouge2", "h2o 0.5"], rows.loc["rouge2", "full"]) == (1.5, 20, 30)
    assert math.isnan(rows.loc["kl", "full"])
